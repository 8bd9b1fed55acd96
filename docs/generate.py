"""Writes docs/ops.md and the table in docs/optimizers.md: python docs/generate.py."""

from __future__ import annotations

from pathlib import Path

import torch

from torchweld import optim
from torchweld.registry import OPS, Composite, Op

HEADER = """# Ops

`python docs/generate.py` writes this page from the declarations of the ops. For each op it lists:

- the schemas of its forward and its backward;
- the dtypes it takes;
- its kernels by backend, and the tensors it saves for the backward;
- the size below which it falls back to eager, since a call of ours would cost more than it
  gains. A call that draws random numbers does not fall back.
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
    if op.small == 0:
        return "runs a kernel at any size"
    return f"falls back to eager below {op.small} elements"


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
            # A step reads the master in place of the parameter.
            moved = 2 * kept + p.itemsize - (p.itemsize if masters is True else 0)
            settings = (dtype, masters, rounding, state_dtype)
            names = [str(value).removeprefix("torch.") for value in settings]
            lines.append(f"| {' | '.join(names)} | {kept:.2f} | {moved:.2f} |")
    return "\n".join(lines)


def optimizers() -> str:
    """Return docs/optimizers.md with a current table."""
    text = (Path(__file__).parent / "optimizers.md").read_text()
    before, rest = text.split("<!-- bytes -->")
    return (
        f"{before}<!-- bytes -->\n{optimizer_bytes()}\n<!-- end -->{rest.split('<!-- end -->')[1]}"
    )


if __name__ == "__main__":
    (Path(__file__).parent / "ops.md").write_text(table())
    (Path(__file__).parent / "optimizers.md").write_text(optimizers())
