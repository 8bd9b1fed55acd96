"""Biases, widths and one query: python -m torchweld.bench.studies.attention_biases.

The rival is torch's scaled_dot_product_attention: dense, with the bias of every pair as a tensor
that gets a gradient, and of one query over the same keys. Contenders take turns. It takes two
minutes on two cores.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from torchweld.bench import limits, machine
from torchweld.bench.machine import describe_machine
from torchweld.bench.report import show_machine
from torchweld.bench.studies.attention_costs import BLOCK, milliseconds, window
from torchweld.bench.timing import CpuClock
from torchweld.functional import block_sparse_attention
from torchweld.sparse import BlockBias, BlockLayout
from torchweld.table import Table

HEADS, LENGTH = 4, 4096
KEYS = (512, 2048, 8192, 65536)
Call = Callable[[], Any]
_dense: Callable[..., Any] = scaled_dot_product_attention


def _draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _training(function: Call, leaves: list[torch.Tensor]) -> Call:
    """Forward and backward."""

    def call() -> Any:
        y = function()
        return torch.autograd.grad(y, leaves, torch.ones_like(y))

    return call


def _buckets() -> torch.Tensor:
    return torch.arange(-128, 129).clamp(-16, 15) + 16


def _expand(table: torch.Tensor) -> torch.Tensor:
    """The bias of every pair, [1, heads, queries, keys]."""
    token = torch.arange(LENGTH)
    places = _buckets()[(token - token[:, None]).clamp(-128, 128) + 128]
    return table[:, places][None].contiguous().requires_grad_()


def biased(seconds: float, table: Table) -> None:
    """A table by relative position at density 1/8, against dense attention with all pairs' bias."""
    q, k, v = (_draw(1, HEADS, LENGTH, 64).requires_grad_() for _ in range(3))
    numbers, layout = _draw(HEADS, 32).requires_grad_(), window(LENGTH, LENGTH // BLOCK // 8)
    pairs, buckets = _expand(numbers.detach()), _buckets()

    def ours() -> Any:
        bias = BlockBias.relative(numbers, buckets)
        return block_sparse_attention(q, k, v, layout, bias=bias)

    plain: Call = lambda: block_sparse_attention(q, k, v, layout)  # noqa: E731
    dense: Call = lambda: _dense(q, k, v, pairs)  # noqa: E731
    calls = {
        "SDPA": _training(dense, [q, k, v, pairs]),
        "ours": _training(ours, [q, k, v, numbers]),
        "ours without the bias": _training(plain, [q, k, v]),
    }
    _add(table, "relative table, 4096 tokens, density 1/8", milliseconds(calls, seconds, 3))


def wide(seconds: float, table: Table) -> None:
    """MLA's widths at density 1/8, against dense attention."""
    q, k = (_draw(1, HEADS, LENGTH, 192).requires_grad_() for _ in range(2))
    v, layout = _draw(1, HEADS, LENGTH, 128).requires_grad_(), window(LENGTH, LENGTH // BLOCK // 8)
    calls = {
        "SDPA": _training(lambda: _dense(q, k, v), [q, k, v]),
        "ours": _training(lambda: block_sparse_attention(q, k, v, layout), [q, k, v]),
    }
    _add(table, "widths 192 and 128, 4096 tokens, density 1/8", milliseconds(calls, seconds, 3))


def one_query(seconds: float, table: Table) -> None:
    """One query over the keys of a cache: of every head, of shared heads and in a window."""
    for name, heads, key_heads, near in (
        ("8 heads", 8, 8, None),
        ("32 heads, 8 of keys", 32, 8, None),
        ("8 heads, the last 1024", 8, 8, 1024),
    ):
        for keys in KEYS:
            if near is not None and keys <= near:
                continue
            q = _draw(1, heads, 1, 64)
            k, v = (_draw(1, key_heads, keys, 64) for _ in range(2))
            layout = BlockLayout.dense((1, keys))
            if near is not None:
                layout = BlockLayout.sliding_window((1, keys), window_size=(near - 1, 0))
            own = [x if near is None else x[:, :, -near:] for x in (k, v)]
            calls: dict[str, Call] = {
                "SDPA": functools.partial(_dense, q, *own, enable_gqa=True),
                "ours": functools.partial(block_sparse_attention, q, k, v, layout),
            }
            times = milliseconds(calls, seconds, 101)
            _add(table, f"one query, {keys} keys, {name}", times)


def _add(table: Table, case: str, times: dict[str, float]) -> None:
    base = times["SDPA"]
    for name, ms in times.items():
        table.add(case, name, f"{ms:.3f}", f"{base / ms:.2f}x")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each row")
    seconds = parser.parse_args().seconds
    machine.settle(default_allocator=False)
    show_machine(describe_machine("cpu") | {"copy_gbps": limits.copy_gbps(CpuClock(), "cpu")})
    table = Table(["case", "contender", "ms", "SDPA = 1"], numbers_from=2)
    for measure in (biased, wide, one_query):
        measure(seconds, table)
    table.show()


if __name__ == "__main__":
    main()
