"""Whole models of transformers, timed: python -m torchweld.bench.models.huggingface.

Sixteen architectures, eager, compiled and fused, at a size that a CPU steps in a second. Contenders
take turns, step by step. --write FILE writes the page of the documentation. With the names of some
models it replaces only their rows, if the page was measured on the same machine and versions.
"""

from __future__ import annotations

import argparse
import copy
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

import torchweld
from torchweld.bench.measure.machine import describe_machine
from torchweld.bench.models import training
from torchweld.bench.models.training import Learner
from torchweld.files import write_text


class Size(NamedTuple):
    """The sizes of all models of a page."""

    words: int
    width: int
    layers: int
    heads: int
    batch: int
    length: int


SMALL = Size(words=32000, width=256, layers=2, heads=4, batch=4, length=128)
# Few words, so that products of layers take most of a step.
WIDE = Size(words=8000, width=512, layers=4, heads=8, batch=2, length=256)
SIZES = {"small": SMALL, "wide": WIDE}
LENGTH = SMALL.length


def list_models(size: Size) -> dict[str, tuple[str, str, dict[str, Any]]]:
    """The name of a configuration, the end of the model's name, and the settings."""
    words, width, layers, heads, _, length = size
    sizes = {
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": length,
    }
    grouped = {**sizes, "num_key_value_heads": heads // 2, "pad_token_id": 0}
    head = {**grouped, "head_dim": width // heads}
    t5: dict[str, Any] = {
        "vocab_size": words,
        "d_model": width,
        "d_kv": width // heads,
        "d_ff": 2 * width,
    }
    t5 |= {"num_layers": layers, "num_heads": heads, "feed_forward_proj": "gated-gelu"}
    old: dict[str, Any] = {
        "vocab_size": words,
        "n_positions": length,
        "n_embd": width,
        "n_layer": layers,
    }
    opt = {"ffn_dim": 2 * width, "word_embed_proj_dim": width}
    images = {key: n for key, n in sizes.items() if "vocab" not in key and "max" not in key}
    state = {"num_heads": 8, "head_dim": width // 4, "n_groups": 1, "state_size": 32}
    state |= {"vocab_size": words, "hidden_size": width, "num_hidden_layers": layers}
    state |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "chunk_size": 32}
    fine = {"num_experts": 16, "num_experts_per_tok": 4}
    mla = {"q_lora_rank": 64, "kv_lora_rank": 64, "num_key_value_heads": heads, "v_head_dim": 32}
    mla |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "first_k_dense_replace": 1}
    routed = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
    small_experts = {"moe_intermediate_size": width // 2}
    return {
        "Llama": ("Llama", "ForCausalLM", grouped),
        "Qwen3": ("Qwen3", "ForCausalLM", head),
        "Gemma3": ("Gemma3Text", "ForCausalLM", head),
        "Mistral": ("Mistral", "ForCausalLM", grouped),
        "Phi3": ("Phi3", "ForCausalLM", grouped),
        "GPT-2": ("GPT2", "LMHeadModel", {**old, "n_head": heads}),
        "OPT": ("OPT", "ForCausalLM", {**sizes, **opt}),
        "BERT": ("Bert", "ForMaskedLM", sizes),
        "T5": ("T5", "ForConditionalGeneration", {**t5, "decoder_start_token_id": 0}),
        "ViT": ("ViT", "ForImageClassification", {**images, "image_size": 64, "patch_size": 8}),
        "Mixtral": ("Mixtral", "ForCausalLM", {**grouped, "num_local_experts": 4}),
        "Qwen3-MoE": ("Qwen3Moe", "ForCausalLM", {**head, **fine, **small_experts}),
        "OLMoE": ("Olmoe", "ForCausalLM", {**grouped, **fine, "intermediate_size": width // 2}),
        "gpt-oss": (
            "GptOss",
            "ForCausalLM",
            {**head, "num_local_experts": 8, "sliding_window": length // 2},
        ),
        "DeepSeek-V3": (
            "DeepseekV3",
            "ForCausalLM",
            {**grouped, **mla, **routed, **small_experts},
        ),
        "Mamba2": ("Mamba2", "ForCausalLM", state),
    }


MODELS = list_models(SMALL)
_PAGE = """# Whole models{title}

Training steps of architectures of transformers, made small: width {width}, {layers} layers,
{words} words, {batch} x {length} tokens, float32, on {machine} ({isa}, {threads} threads), torch
{torch}, transformers {transformers}. This page is measured by
`python -m torchweld.bench.models.huggingface {command}`.
"eager" is the model with torch's fused AdamW, {compiled}"fused"
after `torchweld.fuse` with `torchweld.optim.AdamW`. {times}
The peak is what a step holds beyond parameters, gradients and states; that of compiled code cannot
be counted on a CPU.

{table}

## What was fused, and what was left

{reports}
"""
_COMMANDS = {
    SMALL: "--write docs/models.md",
    WIDE: "--size wide --no-compile --write docs/models-wide.md",
}
_COMPILED = '"compiled" the same under torch.compile, '
_TIMED = "The contenders take turns, and the times are medians."
_NOT_TIMED = "This run took no times."


class Row(NamedTuple):
    """What was measured of a model."""

    name: str
    steps: list[dict[str, Any]]
    report: torchweld.fusion.WeldReport


def build(name: str, size: Size = SMALL) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model and its batch."""
    import transformers

    config, kind, settings = list_models(size)[name]
    torch.manual_seed(0)
    made = getattr(transformers, f"{config}Config")(**settings)
    model = getattr(transformers, f"{config.removesuffix('Text')}{kind}")(made)
    generator = torch.Generator().manual_seed(1)
    if name == "ViT":
        pixels = torch.randn(size.batch, 3, 64, 64, generator=generator)
        return model, {"pixel_values": pixels, "labels": torch.arange(size.batch) % 2}
    ids = torch.randint(3, size.words, (size.batch, size.length), generator=generator)
    return model, {"input_ids": ids, "labels": ids}


def measure(name: str, seconds: float, compiles: bool, size: Size = SMALL) -> Row:
    """Step times and peaks of a model, and what fuse() does to it; with 0 seconds no times."""
    model, batch = build(name, size)
    model.train()
    fused = torchweld.fuse(copy.deepcopy(model))
    named: dict[str, Any] = batch
    report = torchweld.explain_fusion(fused, **named)
    ways: dict[str, Callable[[], torch.nn.Module]] = {"eager": lambda: model}
    if compiles:
        ways["compiled"] = lambda: training.compiled(copy.deepcopy(model))
    ways["fused"] = lambda: fused
    learners = []
    for way, make in ways.items():
        made = make()
        plain = partial(torch.optim.AdamW, fused=True)
        optimizer = (torchweld.optim.AdamW if way == "fused" else plain)(made.parameters(), 1e-4)
        learners.append(Learner(way, made, optimizer, lambda m, _: m(**batch).loss))
    if seconds:
        return Row(name, training.measure(learners, seconds=seconds / len(learners)), report)
    steps: list[dict[str, Any]] = []
    for learner in learners:
        learner.learn()  # makes the optimizer's states
        steps.append({"contender": learner.name, "peak_bytes": learner.peak_bytes()})
    return Row(name, steps, report)


def write_page(rows: Sequence[Row], transformers: str, before: str = "", size: Size = SMALL) -> str:
    """The page of the documentation, with the version of transformers.

    The models that are not in `rows` keep their rows of the page before.
    """
    compiles = any(step["contender"] == "compiled" for row in rows for step in row.steps)
    names = ["eager", *["compiled"] * compiles, "fused"]
    timed = any("total" in row.steps[0] for row in rows)
    of_times = [*(f"{name} ms" for name in names), "eager / fused"] if timed else []
    header = ["model", *of_times, "peak MB, eager", "fused"]
    head = [_line(header), "|---|" + "--:|" * (len(header) - 1)]
    lines, reports = _read_page(before)
    for row in rows:
        by_name = {step["contender"]: step for step in row.steps}
        times = [_round(by_name.get(n, {}).get("total")) for n in names]
        gain = by_name["fused"].get("speed_up")
        times.append("" if gain is None else f"{gain:.2f}x")
        peaks = [f"{by_name[n]['peak_bytes'] / 1e6:.0f}" for n in ("eager", "fused")]
        lines[row.name] = _line([row.name, *(times if timed else []), *peaks])
        reports[row.name] = _describe(row)
    named = sorted(lines, key=[*MODELS, *lines].index)
    machine = describe_machine("cpu")
    page = _PAGE.format(
        title="" if size is SMALL else f" of width {size.width}",
        command=_COMMANDS[size],
        **size._asdict(),
        machine=machine["name"],
        isa=machine["isa"],
        threads=machine["threads"],
        torch=torch.__version__.partition("+")[0],
        transformers=transformers,
        compiled=_COMPILED if compiles else "",
        times=_TIMED if timed else _NOT_TIMED,
        table="\n".join([*head, *(lines[name] for name in named)]),
        reports="\n".join(reports[name] for name in named),
    )
    if before and before.partition("\n|")[0] != page.partition("\n|")[0]:
        raise ValueError("the page is of another machine or other versions: measure all models")
    return page


def _read_page(page: str) -> tuple[dict[str, str], dict[str, str]]:
    """The line and the report of each model of a page."""
    found = re.finditer(r"^- \*\*(.+?)\*\*:.*(?:\n  - .*)*", page, re.MULTILINE)
    reports = {report[1]: report[0] for report in found}
    starts = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines()}
    return {name: starts[name] for name in reports}, reports


def _round(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _describe(row: Row) -> str:
    """One paragraph on what was fused in a model, and what was left."""
    fused: dict[str, int] = {}
    left: dict[str, int] = {}
    for entry in row.report:
        reason = re.sub(r"\(/\S*/", "(", entry.reason)  # of the file its name only
        key = f"{entry.what}: {reason}" if reason else entry.becomes
        into = left if entry.reason else fused
        into[key] = into.get(key, 0) + 1
    parts = [
        f"- **{row.name}**: "
        + (", ".join(f"{n} {what}" for what, n in fused.items()) or "nothing")
        + "."
    ]
    parts += [f"  - left: {re.sub('[<>]', '', what)} ({n}x)" for what, n in left.items()]
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="model", help=", ".join(MODELS))
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="of steps of each model; 0: no times"
    )
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    size = SIZES[options.size]
    unknown = {*options.names} - {*MODELS}
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(MODELS)}")
    warnings.simplefilter("ignore")
    keeps = options.write and options.names and options.write.exists()
    before = options.write.read_text() if keeps else ""
    rows = []
    for name in options.names or MODELS:
        rows.append(measure(name, options.seconds, not options.no_compile, size))
        torch.compiler.reset()
        print(name, rows[-1].steps, flush=True)
        if options.seconds:
            training.table(rows[-1].steps).show()
        if options.write:  # after each, so that an interrupted run leaves what it has
            write_text(options.write, write_page(rows, version("transformers"), before, size))


if __name__ == "__main__":
    main()
