"""What block-sparse attention costs on a CPU: python -m torchweld.bench.studies.attention_costs.

It measures training against dense attention and FlexAttention at 4096 tokens, training at 16384
tokens, also with a new layout at every step, the time to build layouts, and time over the number of
blocks. The contenders of a table take turns. It takes a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import torchweld
from torchweld.bench import attention, limits, machine
from torchweld.bench.machine import describe_machine
from torchweld.bench.memory import peak_bytes
from torchweld.bench.report import show_machine
from torchweld.bench.timing import CpuClock, interleaved
from torchweld.functional import block_sparse_attention
from torchweld.ops.attention.block_sparse import OP
from torchweld.sparse import BlockLayout
from torchweld.table import Table

HEADS, WIDTH, BLOCK = 8, 64, 64
Call = Callable[[], Any]


def _inputs(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, length, WIDTH)
    return [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]


def _training(function: Callable[..., Any], inputs: list[torch.Tensor]) -> Call:
    """Forward and backward."""
    grad = torch.ones_like(inputs[0])

    def call() -> Any:
        return torch.autograd.grad(function(*inputs), inputs, grad)

    return call


def _sparse(layout: BlockLayout) -> Callable[..., Any]:
    return lambda q, k, v: block_sparse_attention(q, k, v, layout)


def milliseconds(calls: dict[str, Call], seconds: float, rounds: int) -> dict[str, float]:
    """The median time of each call; calls take turns."""
    runs = [lambda clock, call=call: clock(call) for call in calls.values()]
    with torchweld.use_backend("cpu"):
        times = interleaved(runs, CpuClock(), seconds=seconds, at_least=rounds, at_most=101)
    return {name: t.quantile(0.5) for name, t in zip(calls, times, strict=True)}


def _show(title: str, times: dict[str, float], base: str) -> None:
    table = Table([title, "ms", f"{base} = 1"], numbers_from=1)
    for name, ms in times.items():
        table.add(name, f"{ms:.1f}", f"{times[base] / ms:.2f}x")
    table.show()


def window(length: int, blocks: int) -> BlockLayout:
    return BlockLayout.sliding_window(length, blocks, block=BLOCK)


def globals_and_equals(length: int, width: int = 8) -> tuple[BlockLayout, BlockLayout]:
    """A band with two global rows, and as many blocks in rows of nearly equal length."""
    rows = length // BLOCK
    at = torch.arange(rows)
    away = (at - at[:, None]) % rows
    banded = away < width
    banded[[0, rows // 2]] = True
    count = int(banded.sum())
    even = away < count // rows
    even |= (away == count // rows) & (at[:, None] < count % rows)
    assert int(even.sum()) == count
    made = [BlockLayout.from_blocks(blocks, block=BLOCK) for blocks in (banded, even)]
    return made[0], made[1]


def ratios(seconds: float) -> None:
    """Time block-sparse attention against dense attention and FlexAttention."""
    length = 4096
    inputs, blocks = _inputs(length), length // BLOCK
    dense = "dense SDPA"
    banded, even = globals_and_equals(length)
    layouts = {
        "dense layout": BlockLayout.dense(length, block=BLOCK),
        "density 1/8": window(length, blocks // 8),
        "density 1/16": window(length, blocks // 16),
    }
    calls = {dense: _training(scaled_dot_product_attention, inputs)}
    calls |= {name: _training(_sparse(layout), inputs) for name, layout in layouts.items()}
    _show(f"forward + backward, {length} tokens", milliseconds(calls, seconds, 5), dense)
    calls = {
        "rows of equal length": _training(_sparse(even), inputs),
        "two global rows": _training(_sparse(banded), inputs),
    }
    times = milliseconds(calls, seconds, 11)
    _show(f"forward + backward, {even.count} blocks", times, "rows of equal length")
    flex = attention.flex(flex_attention)
    detached = [x.detach() for x in inputs]
    calls = {}
    for name, layout in layouts.items():
        function = _sparse(layout)
        if layout.lists is None:  # block_mask needs the lists
            layout = BlockLayout.from_blocks(torch.ones(blocks, blocks).bool(), block=BLOCK)
        assert OP.inputs is not None
        arguments = OP.inputs(*detached, layout)
        calls[f"{name}: FlexAttention"] = partial(flex, *arguments)
        calls[name] = partial(function, *detached)
    with torch.no_grad():
        times = milliseconds(calls, seconds, 5)
    for name in layouts:
        pair = {n: ms for n, ms in times.items() if n.partition(":")[0] == name}
        _show(f"forward, {length} tokens", pair, f"{name}: FlexAttention")


def long(seconds: float) -> None:
    """Time training at 16384 tokens, and a new layout from scores at every step."""
    length = 16384
    inputs, blocks = _inputs(length), length // BLOCK
    dense = "dense SDPA"
    calls = {
        dense: _training(scaled_dot_product_attention, inputs),
        "density 1/8": _training(_sparse(window(length, blocks // 8)), inputs),
        "density 1/16": _training(_sparse(window(length, blocks // 16)), inputs),
    }
    _show(f"forward + backward, {length} tokens", milliseconds(calls, seconds, 2), dense)
    scores = torch.rand(HEADS, blocks, blocks, generator=torch.Generator().manual_seed(0))
    kept = BlockLayout.from_scores(scores, blocks // 8, block=BLOCK)
    calls = {
        "attention, top-k layout": _training(_sparse(kept), inputs),
        "from_scores": lambda: BlockLayout.from_scores(scores, blocks // 8, block=BLOCK),
    }
    times = milliseconds(calls, seconds, 5)
    _show(f"{length} tokens, top {blocks // 8} of {blocks} blocks", times, "from_scores")


def building() -> None:
    """Measure the time and peak memory of building layouts."""
    length, heads, shape = 2**17, 64, (49152, 245760)
    step = shape[1] // shape[0]
    builders: dict[str, Call] = {
        "random, 64 heads x 128k tokens, 64 a row": lambda: BlockLayout.random(
            length, 64, block=64, num_heads=heads, different_layout_per_head=True
        ),
        "bigbird, 64 heads x 128k tokens, 60 a row": lambda: BlockLayout.bigbird(
            length,
            block=64,
            num_heads=heads,
            different_layout_per_head=True,
            num_random_blocks=48,
            num_sliding_window_blocks=11,
        ),
        "sliding_window, shared, 128k tokens, 63 a row": lambda: window(length, 63),
        "from_mask_fn, 49152 x 245760, window": lambda: BlockLayout.from_mask_fn(
            lambda b, h, q, k: (q * step - k).abs() < 4096, shape
        ),
        "from_mask_fn, 49152 x 245760, causal": lambda: BlockLayout.from_mask_fn(
            lambda b, h, q, k: q + (shape[1] - shape[0]) >= k, shape
        ),
    }
    table = Table(["layout", "s", "blocks", "MB kept", "MB at the peak"], numbers_from=1)
    for name, build in builders.items():
        begin = time.perf_counter()
        layout = build()
        taken = time.perf_counter() - begin
        peak = peak_bytes(build, "cpu")
        sizes = (layout.count, layout.nbytes / 2**20, peak / 2**20)
        table.add(name, f"{taken:.2f}", *[f"{n:,.0f}" for n in sizes])
    table.show()


def curves(seconds: float) -> dict[str, dict[int, float]]:
    """Milliseconds over blocks per row at 4096 tokens, and over tokens at 9 blocks per row."""
    length = 4096
    inputs = _inputs(length)
    numbers = (1, 3, 5, 9, 17, 33, 63)
    calls = {str(n): _training(_sparse(rows_of(length, n)), inputs) for n in numbers}
    by_blocks = milliseconds(calls, seconds, 5)
    calls = {
        str(n): _training(_sparse(rows_of(n, 9)), _inputs(n)) for n in (1024, 2048, 4096, 8192)
    }
    by_length = milliseconds(calls, seconds, 5)
    by_title = {
        f"blocks a row, {length} tokens": {int(n): ms for n, ms in by_blocks.items()},
        "tokens, 9 blocks a row": {int(n): ms for n, ms in by_length.items()},
    }
    for title, times in by_title.items():
        table = Table([title, "ms", "ms / 1000 blocks"], numbers_from=0)
        for n, ms in times.items():
            blocks = n * length // BLOCK if "row," in title else 9 * n // BLOCK
            table.add(f"{n}", f"{ms:.2f}", f"{ms / (HEADS * blocks) * 1e3:.2f}")
        table.show()
    return by_title


def rows_of(length: int, blocks: int) -> BlockLayout:
    """A band along the diagonal that wraps around, so that all rows have the same length."""
    at = torch.arange(length // BLOCK)
    return BlockLayout.from_blocks((at - at[:, None]) % len(at) < blocks, block=BLOCK)


def plot(by_title: dict[str, dict[int, float]], path: Path) -> None:
    """Plot time over blocks and over tokens. Both should be straight lines through zero."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(by_title), figsize=(9, 3.6), layout="constrained")
    for panel, (title, times) in zip(axes, by_title.items(), strict=True):
        most = max(times)
        panel.plot([0, most], [0, times[most]], color="lightgrey", label="proportional")
        panel.plot(list(times), list(times.values()), marker="o", color="#2f6db5", label="measured")
        panel.set(xlabel=title, ylabel="forward + backward, ms", xlim=(0, None), ylim=(0, None))
        panel.legend(frameon=False)
    where = describe_machine("cpu")
    figure.suptitle(f"block_sparse_attention, float32, 8 heads of 64\n{where['name']}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    parts = ("ratios", "long", "building", "curves")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--part", action="append", choices=parts, help="may be repeated; default: all"
    )
    parser.add_argument("--seconds", type=float, default=10, help="minimum for each table")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the curves")
    options = parser.parse_args(arguments)
    if arguments is None:
        machine.settle(default_allocator=False)
    show_machine(describe_machine("cpu") | {"copy_gbps": limits.copy_gbps(CpuClock(), "cpu")})
    wanted = options.part or parts
    if "ratios" in wanted:
        ratios(options.seconds)
    if "long" in wanted:
        long(options.seconds)
    if "building" in wanted:
        building()
    if "curves" in wanted:
        by_title = curves(options.seconds)
        if options.plot:
            plot(by_title, options.plot)
            print(f"plot: {options.plot}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
