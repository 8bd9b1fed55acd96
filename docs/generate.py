"""Writes docs/ops.md and parts of gpu, modules, optimizers and README.md: docs/generate.py."""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import torch

from torchweld import functional, nn, optim
from torchweld.bench.measure import evidence
from torchweld.bench.measure.runner import Result
from torchweld.bench.show import report
from torchweld.registry import OPS, Composite, Op

HEADER = """# Ops

`python docs/generate.py` writes this page from the declarations of the ops. For each op it lists:

- the schemas of its forward and its backward op;
- the dtypes that it accepts;
- its kernels by backend, and the tensors that it saves for the backward pass;
- the size below which it falls back to eager on the CPU, since calling a kernel would cost more
  than it gains. 16-bit calls do not fall back where eager
  computes in several steps, with rounding between them.
"""


def table() -> str:
    """Return docs/ops.md, with one section for each op."""
    parts = [HEADER]
    for op in OPS.values():
        backends = "; ".join(f"{name}: `{files[0]}`" for name, files in op.sources.items())
        about = _seam(op, backends) if isinstance(op, Composite) else _kernel(op, backends)
        parts.append(
            f"""## {op.name}

- forward `{op.forward}`
- backward `{op.backward}`
- dtypes: {", ".join(str(dtype).removeprefix("torch.") for dtype in op.dtypes)}{about}
- {_fallback(op)}
"""
        )
    return "\n".join(parts)


def _fallback(op: Op) -> str:
    if op.slower:
        return "on the CPU falls back to eager in float64"
    if op.small == 0:
        return "runs a kernel at any size"
    return f"on the CPU falls back to eager below {op.small} elements"


def _kernel(op: Op, backends: str) -> str:
    saved = [
        name
        for name in op.backward_signature.arguments
        if name in op.forward_signature.arguments + op.forward_signature.results
        and "Tensor" in op.backward_signature.types[op.backward_signature.arguments.index(name)]
    ]
    return f"""; under a 16-bit tensor, parameters may be float32
- kernels: {backends}
- saved for backward: {", ".join(saved)}{", each only if it is needed" if op.unsaved else ""}"""


def _seam(op: Composite, backends: str) -> str:
    return f"""
- {op.made_of.format(backends)}
- saved for backward: {op.saves}"""


def optimizer_bytes() -> str:
    """Return the table of what AdamW keeps and moves, for each way to store its state."""
    lines = [
        "| parameters | master_weights | stochastic_rounding | state_dtype | kept"
        " | moved by a step |",
        "|---|---|---|---|--:|--:|",
    ]
    for dtype, masters, rounding in (
        (torch.float32, False, False),
        (torch.bfloat16, False, False),
        (torch.bfloat16, False, True),
        (torch.bfloat16, True, False),
        (torch.bfloat16, "remainder", False),
        (torch.bfloat16, "remainder8", False),
    ):
        for state_dtype in (torch.float32, torch.bfloat16, "8bit"):
            p = torch.zeros(1024, 1024, dtype=dtype, requires_grad=True)
            p.grad = torch.zeros_like(p)
            optimizer = optim.AdamW(
                [p],
                state_dtype=state_dtype,
                master_weights=masters,
                stochastic_rounding=rounding,
            )
            optimizer.step()
            state = [v for name, v in optimizer.state[p].items() if name != "step"]
            kept = sum(t.nbytes for t in [p, *state]) / p.numel()
            # A step reads the master instead of the parameter.
            moved = 2 * kept + p.itemsize - (p.itemsize if masters is True else 0)
            settings = (dtype, masters, rounding, state_dtype)
            names = [str(value).removeprefix("torch.") for value in settings]
            lines.append(f"| {' | '.join(names)} | {kept:.2f} | {moved:.2f} |")
    return "\n".join(lines)


def signatures() -> str:
    """Return every public module and function with its signature and first docstring line."""
    parts = []
    for title, room in (("Modules", nn), ("Functions", functional)):
        parts.append(f"## {title}\n")
        for name in sorted(room.__all__, key=str.lower):
            value = getattr(room, name)
            first = inspect.cleandoc(value.__doc__).split("\n")[0]
            parts.append(f"```text\n{_signature(name, value)}\n\n{first}\n```\n")
    return "\n".join(parts)


def _signature(name: str, value: Any) -> str:
    """Return a signature in lines of 100 columns; for torch's own constructors only `(...)`."""
    of = value.__init__ if inspect.isclass(value) else value
    if of.__module__.startswith("torch."):
        return f"{name}(...)"
    signature = inspect.signature(of)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    result = inspect.Signature.empty if inspect.isclass(value) else signature.return_annotation
    line = f"{name}{signature.replace(parameters=parameters, return_annotation=result)}"
    line = re.sub(r"(: |-> )'([^']*)'", r"\1\2", line).replace("torch.Tensor", "Tensor")
    # Lines break only between arguments.
    lines = textwrap.wrap(re.sub("(?<!,) ", "\0", line), 100, subsequent_indent="    ")
    return "\n".join(lines).replace("\0", " ")


def _filled(file: str, marker: str, part: str) -> str:
    """Return a document with the current part behind its marker."""
    text = (Path(__file__).parent / file).read_text()
    before, rest = text.split(f"<!-- {marker} -->")
    return f"{before}<!-- {marker} -->\n{part}\n<!-- end -->{rest.split('<!-- end -->')[1]}"


def optimizers() -> str:
    """Return docs/optimizers.md with a current table."""
    return _filled("optimizers.md", "bytes", optimizer_bytes())


def modules() -> str:
    """Return docs/modules.md with current signatures."""
    return _filled("modules.md", "signatures", signatures())


CPU = Path(__file__).parent / "measured" / "cpu.json"
ROOT = CPU.parents[2]
STALE = " (stale)"
NO_GPU = "No GPU has run this yet. `make gpu` writes `bench/evidence/` on one."


# The README's table: what a user calls, what it replaces, and the op and variant of its row.
CALLED = (
    ("`rms_norm`, `layer_norm`", "`torch.nn.functional`'s", ("rms_norm", "")),
    (
        "`dropout_add_layer_norm`, `dropout_add_rms_norm`",
        "bias, dropout, residual and norm",
        ("dropout_add_rms_norm", "p 0.1"),
    ),
    ("`bias_dropout_add`", "bias, dropout and residual", ("bias_dropout_add", "p 0.1")),
    (
        "`softmax_dropout`",
        "scale, mask, softmax and dropout",
        ("softmax_dropout", "scale 1, p 0.1"),
    ),
    ("`linear_act`, `linear_gelu`, `mlp`", "linear and activation", ("linear_act", "")),
    (
        "`gated_act`, `gated_mlp`",
        "`act(gate) * up`, SwiGLU and GeGLU",
        ("gated_act", ""),
    ),
    (
        "`batch_norm_act`, `linear_batch_norm_act`",
        "batch norm and activation",
        ("batch_norm_act", ""),
    ),
    (
        "[`rotary_embedding`, `rotary_embedding_qk`](docs/rotary.md)",
        "rotation, with the norms of q and k",
        ("rotary_embedding", ""),
    ),
    (
        "[`linear_cross_entropy`, `cross_entropy`, `linear_logprobs`, `logprobs`](docs/losses.md)",
        "a head and its loss, without stored logits",
        ("linear_cross_entropy", ""),
    ),
    (
        "[`block_sparse_attention`](docs/block-sparse-attention.md)",
        "FlexAttention, windows, documents, sinks",
        ("block_sparse_attention", ""),
    ),
    (
        "[`experts_mlp`, `route`](docs/experts.md)",
        "a mixture's loop",
        ("experts_mlp", ""),
    ),
    (
        "[`optim.AdamW`](docs/optimizers.md) and nine others",
        "torch's fused step with clipping",
        ("adam", "max_grad_norm"),
    ),
)


def measured() -> str:
    """Return the README's table: each call with its speed-up in training on the CPU and on GPUs."""
    about, results = _read_cpu()
    columns = {"CPU": results}
    notes = [f"CPU: {about}"]
    for gpu, record in evidence.read_records().items():
        results = _select_middle(evidence.list_results(record, ROOT))
        current = [result for result in results if STALE not in result.contender]
        columns[gpu.removeprefix("NVIDIA ")] = [*current, *_list_rivals(record, current)]
        notes.append(f"{gpu}: torch {record['versions']['torch']}, {record['date']}.")
    lines = [
        f"| you call | it replaces | {' | '.join(columns)} |",
        f"|---|---|{'--:|' * len(columns)}",
    ]
    for call, replaces, row in CALLED:
        ups = (_find_speedup(results, row) for results in columns.values())
        lines.append(f"| {call} | {replaces} | {' | '.join(ups)} |")
    if len(columns) == 1:
        notes.append(NO_GPU)
    return "\n" + "\n".join([*lines, "", *notes]) + "\n"


def _find_speedup(results: list[Result], row: tuple[str, str]) -> str:
    """The speed-up over torch of a forward and a backward pass, or of a step, where it is known."""
    found = {
        result.dtype: f"{torchs / ours:.2f}x"
        for result, ours, torchs in report.compare(results)
        if (result.op, result.variant) == row and result.direction in ("full", "step")
    }
    return found.get("bfloat16", found.get("float32", ""))


def _list_rivals(record: dict[str, Any], shown: list[Result]) -> list[Result]:
    """The rivals of the rows that are shown."""
    rows = {(r.op, tuple(r.shape), r.variant, r.dtype, r.direction) for r in shown}
    return [
        r
        for r in evidence.list_rivals(record)
        if (r.op, tuple(r.shape), r.variant, r.dtype, r.direction) in rows
    ]


def _read_cpu() -> tuple[str, list[Result]]:
    """Return the machine of docs/measured in words, and its times."""
    found = report.load(CPU)
    where = found.machine
    about = (
        f"{where['name']}, {where['threads']} threads, {where['isa']}, torch"
        f" {where['versions']['torch']}, {where['date']}; {where['conditions']}."
    )
    return about, evidence.mark_stale(found.results, found.sources, ROOT)


def performance() -> str:
    """Return docs/performance.md with every time on the CPU."""
    about, results = _read_cpu()
    table = report.markdown(results).rstrip("\n")
    return _filled("performance.md", "measured", f"\n{about}\n\n{table}\n")


def _select_middle(results: list[Result]) -> list[Result]:
    """Select the middle shape, by number of elements, of each op, variant and dtype."""
    sizes: dict[Any, dict[tuple[int, ...], int]] = {}
    for r in results:
        sizes.setdefault((r.op, r.variant, r.dtype), {})[tuple(r.shape)] = r.elements
    middle = {}
    for key, shapes in sizes.items():
        ordered = sorted(shapes, key=lambda shape: shapes[shape])
        middle[key] = ordered[len(ordered) // 2]
    return [r for r in results if tuple(r.shape) == middle[r.op, r.variant, r.dtype]]


def gpu_times() -> str:
    """Return the tables of docs/gpu.md: every time on each GPU."""
    parts = []
    for gpu, record in evidence.read_records().items():
        versions, copies = record["versions"], record["limits"]["copy_gbps"] / 1000
        about = f"{gpu}, torch {versions['torch']}, triton {versions['triton']}, {record['date']}."
        results = evidence.list_results(record, ROOT)
        parts.append(f"{about} A large copy reaches {copies:.1f} TB/s, reads and writes counted.")
        parts.append(report.markdown([*results, *evidence.list_rivals(record)]))
        parts.append(_list_stale(results))
    return "\n" + "\n\n".join(part.rstrip("\n") for part in parts or [NO_GPU]) + "\n"


def _list_stale(results: list[Result]) -> str:
    """Return what must be measured again, by op."""
    stale: dict[str, list[str]] = {}
    for r in results:
        if STALE in r.contender:
            stale.setdefault(r.op, []).append(f"{r.label} {r.dtype} {r.direction}")
    count = sum(map(len, stale.values()))
    about = f"{len(results) - count} of {len(results)} rows are current."
    lines = [f"- `{op}`: {', '.join(rows)}" for op, rows in stale.items()]
    return "\n".join([about, *["To be measured again:\n"] * bool(lines), *lines])


def gpu() -> str:
    """Return docs/gpu.md with current tables."""
    return _filled("gpu.md", "measured", gpu_times())


def readme() -> str:
    """Return README.md with current tables of times."""
    return _filled("../README.md", "measured", measured())


def plot_models(path: Path) -> None:
    """Draw the steps of docs/models.md: eager torch, compiled, and fused."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "models", "font.size": 9}
    from matplotlib import pyplot

    text = (Path(__file__).parent / "models.md").read_text()
    rows = re.findall(r"^\| (\S+) \| (\d+) \| (\d+) \| (\d+) \|", text, re.MULTILINE)
    figure, axes = pyplot.subplots(figsize=(8, 3), layout="constrained")
    drawn = (("eager", "#b9c0c9"), ("torch.compile", "#7d8da1"), ("torchweld.fuse", "#d9622b"))
    for at, (label, color) in enumerate(drawn):
        times = [int(row[1 + at]) for row in rows]
        axes.bar(
            [i + 0.27 * (at - 1) for i in range(len(rows))], times, 0.27, label=label, color=color
        )
    axes.set_xticks(range(len(rows)), [row[0] for row in rows], rotation=35, ha="right")
    axes.set_ylabel("ms a training step")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1))
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    plot_models(Path(__file__).parent / "models.svg")
    (Path(__file__).parents[1] / "README.md").write_text(readme())
    (Path(__file__).parent / "gpu.md").write_text(gpu())
    (Path(__file__).parent / "performance.md").write_text(performance())
    (Path(__file__).parent / "ops.md").write_text(table())
    (Path(__file__).parent / "optimizers.md").write_text(optimizers())
    (Path(__file__).parent / "modules.md").write_text(modules())
