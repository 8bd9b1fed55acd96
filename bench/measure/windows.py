"""Attention in a window of 128 tokens: python -m torchweld.bench.measure.windows [--json FILE].

128 heads of 64, 16384 tokens, batch 2, bfloat16, with and without sinks, beside FlexAttention
and cuDNN's block-sparse attention without them. cuDNN's sees whole blocks of 64, so up to 64 keys
more, and on an H100 and H200 has a backward pass for heads of 128 only. Forward, and both
directions; medians of turns in one process. Ours is checked first: the first tokens against
float64, and two runs for equal bits.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchweld.bench.measure.timing import clock_for, interleaved
from torchweld.dispatch.proof import in_a_line
from torchweld.files import write_json
from torchweld.functional import block_sparse_attention
from torchweld.sparse import BlockLayout
from torchweld.table import Table

WINDOW = 128
_CHECKED = 512  # tokens
Call = Callable[..., torch.Tensor]
FLEX, CUDNN = "flex", "cuDNN, whole blocks of 64"
PEERS = (FLEX, CUDNN)
_BLOCK = 64  # cuDNN's on an H100 and H200


def contenders(length: int, device: str, sinks: torch.Tensor) -> dict[str, Call]:
    """Functions of q, k and v."""

    def lay_out(block: int) -> BlockLayout:
        window = (WINDOW - 1, 0)
        return BlockLayout.sliding_window(length, window_size=window, block=block, device=device)

    def attend(layout: BlockLayout, **options: Any) -> Call:
        return lambda q, k, v: block_sparse_attention(q, k, v, layout, **options)

    made = {"blocks of 64, sinks": attend(lay_out(64), sinks=sinks)}
    made |= {f"blocks of {block}": attend(lay_out(block)) for block in (64, 128)}
    return made | {FLEX: _flex(length, device), CUDNN: _cudnn}


def _flex(length: int, device: str) -> Call:
    from torch.nn.attention import flex_attention as flex

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (query - key < WINDOW)

    mask = flex.create_block_mask(sees, None, None, length, length, device=device)
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def list_blocks(batch: int, heads: int, length: int, device: Any) -> list[torch.Tensor]:
    """The blocks of keys of each block of queries, and how many they are, as cuDNN takes them."""
    at = torch.arange(length // _BLOCK, dtype=torch.int32, device=device)
    most = WINDOW // _BLOCK + 1
    first = (at - most + 1).clamp_min(0)
    counts = at - first + 1
    within = torch.arange(most, dtype=torch.int32, device=device)
    blocks = torch.where(within < counts[:, None], first[:, None] + within, 0)
    return [x.expand(batch, heads, *x.shape).contiguous() for x in (blocks, counts)]


class _Cudnn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> torch.Tensor:
        from cudnn.block_sparse_attention import block_sparse_attention_forward

        batch, heads, length = q.shape[:3]
        blocks, counts = list_blocks(batch, heads, length, q.device)
        ctx.how = {"q2k_block_nums": counts, "sparse_block_size": _BLOCK}
        made = block_sparse_attention_forward(q, k, v, blocks, **ctx.how)
        ctx.save_for_backward(q, k, v, made["o_tensor"], made["lse_tensor"], blocks)
        return made["o_tensor"]  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        from cudnn.block_sparse_attention import block_sparse_attention_backward

        made = block_sparse_attention_backward(*grads, *ctx.saved_tensors, **ctx.how)
        return tuple(made[f"d{name}_tensor"] for name in "qkv")


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    if importlib.util.find_spec("cudnn") is None:
        raise ModuleNotFoundError("not installed: pip install nvidia-cudnn-frontend")
    return _Cudnn.apply(q, k, v)  # type: ignore[no-any-return]


def find_fault(call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any) -> str:
    """What is wrong with results and gradients; nothing if they are right."""

    def run(inputs: Sequence[torch.Tensor], attend: Call) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        y = attend(*leaves)
        return (y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y)))

    first = run((q, k, v), call)
    if any(not torch.equal(*pair) for pair in zip(first, run((q, k, v), call), strict=True)):
        return "two runs differ"
    # Tokens whose gradients no later token takes part in.
    own = min(_CHECKED, q.shape[2]), min(_CHECKED, q.shape[2]) - WINDOW
    exact = run([x[:1, :1, : own[0]].double() for x in (q, k, v)], partial(_exact, sinks=sinks))
    for name, ours, oracle in zip(("y", "grad_q", "grad_k", "grad_v"), first, exact, strict=True):
        count = own[0] if name in ("y", "grad_q") else own[1]
        error = (ours[:1, :1, :count].double() - oracle[:, :, :count]).abs().max()
        if not error <= 0.02 * oracle.abs().max():
            return f"{name} is off by {error:.3g} of {oracle.abs().max():.3g}"
    return ""


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any) -> torch.Tensor:
    at = torch.arange(q.shape[2], device=q.device)
    apart = at[:, None] - at
    scores = q @ k.mT * q.shape[3] ** -0.5
    scores = scores.masked_fill((apart < 0) | (apart >= WINDOW), -torch.inf)
    if sinks is not None:
        column = sinks[:1].double().view(1, 1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


def measure(
    heads: int, length: int, batch: int, device: str, dtype: torch.dtype, seconds: float
) -> list[dict[str, Any]]:
    """A row for each contender: milliseconds forward and of both directions, or its fault."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, heads, length, 64)
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(3))
    sinks = torch.randn(heads, generator=generator, device=device).to(dtype)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    grad = torch.randn(shape, generator=generator, device=device).to(dtype)
    rows: list[dict[str, Any]] = []

    def both(call: Call) -> Any:
        return torch.autograd.grad(call(*leaves), leaves, grad)

    def forward(call: Call) -> torch.Tensor:
        with torch.no_grad():
            return call(*leaves)

    directions = {"fwd": forward, "full": both}
    runs: dict[str, list[tuple[dict[str, Any], Call]]] = {name: [] for name in directions}
    for name, call in contenders(length, device, sinks).items():
        row: dict[str, Any] = {"contender": name, "fault": ""}
        rows.append(row)
        try:
            if name not in PEERS:
                row["fault"] = find_fault(call, q, k, v, sinks if "sinks" in name else None)
            for direction, run in directions.items() if not row["fault"] else ():
                run(call)
                runs[direction].append((row, call))
        except Exception as error:  # of the first direction that it does not have
            row["fault"] = in_a_line(error)
    clock = clock_for(device)
    for direction, run in directions.items():
        if not runs[direction]:
            continue
        timed = [lambda clock, c=call, r=run: clock(lambda: r(c)) for _, call in runs[direction]]
        found = interleaved(timed, clock, seconds=seconds, at_least=3, at_most=41)
        for (row, _), times in zip(runs[direction], found, strict=True):
            row[direction] = times.quantile(0.5)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; the exit status is 1 if ours was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try this script")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    sizes = (2, 640, 1) if options.tiny else (128, 16384, 2)
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    rows = measure(*sizes, options.device, dtype, 0.0 if options.tiny else 3.0)
    table = Table(["", "fwd ms", "full ms", ""], numbers_from=1)
    for row in rows:
        cells = [f"{row[each]:.3f}" if each in row else "" for each in ("fwd", "full")]
        table.add(row["contender"], *cells, row["fault"])
    table.show()
    if options.json:
        write_json(options.json, {"rows": rows})
    return int(any(row["fault"] for row in rows if row["contender"] not in PEERS))


if __name__ == "__main__":
    raise SystemExit(main())
