"""Ring attention on four processes: equal to one, and slices go only where they are seen."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import selection
import torchweld
from comparing import shares_rows
from processes import on
from torchweld import functional
from torchweld.distributed import (
    CountCollectives,
    ring_attention,
    ring_slice,
    sequence_plan,
)
from torchweld.distributed.ring import attention
from torchweld.errors import ArgumentError
from torchweld.sparse import BlockBias, BlockLayout

LENGTH, PROCESSES = 128, 4
SHAPE = (2, 4, LENGTH, 8)
# A layout, whether it is causal, and the numbers of chunks sent to processes that see some of them:
# with slices in order, and balanced.
LAYOUTS = {
    "dense": (BlockLayout.dense(LENGTH, block=16), False, 12, 24),
    "causal": (BlockLayout.dense(LENGTH, block=16), True, 6, 18),
    "window": (BlockLayout.sliding_window(LENGTH, window_size=(20, 0), block=16), False, 3, 11),
    "local": (BlockLayout.block_local(LENGTH, 2, block=16), False, 0, 8),
    "heads": (
        BlockLayout.bigbird(LENGTH, block=16, num_heads=4, different_layout_per_head=True),
        False,
        12,
        21,
    ),
    "key heads": (
        BlockLayout.bigbird(LENGTH, block=16, num_heads=2, different_layout_per_head=True),
        True,
        6,
        9,
    ),
}


SLOPES = torch.tensor([[0.5, 0.25, 0.1, 0.0], [0.3, 0.2, -0.1, 1.0]])
EVERY = {"dropout_p": 0.3, "alibi_slopes": SLOPES.double()}  # and sinks, and a table
SOME = {"softcap": 3.0, "alibi_slopes": SLOPES[0]}


def _sum_over_ranks(values: list[int]) -> list[int]:
    total = torch.tensor(values)
    dist.all_reduce(total)
    return total.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.float64, EVERY), (torch.float32, SOME)], ids=["every", "some"]
)
@pytest.mark.parametrize(
    ("name", "backend", "balanced"), selection.combine(LAYOUTS, ("cpu", "eager"), (False, True))
)
@on(PROCESSES)
def test_equals_one_process(
    rank: int, name: str, backend: str, balanced: bool, dtype: torch.dtype, options: Any
) -> None:
    """Every argument of attention, in float64 and in float32."""
    layout, causal, *sends = LAYOUTS[name]
    generator = torch.Generator().manual_seed(1)
    with_sinks = "dropout_p" in options
    deep = 12 if with_sinks else 8
    shapes = [SHAPE, (2, 2, LENGTH, 8), (2, 2, LENGTH, deep), (4,), (4, 5)]
    drawn = [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]
    *whole, sinks, table = drawn
    buckets = BlockBias.relative(table, torch.arange(41) * 3 % 5) if with_sinks else None
    grad = torch.randn((*SHAPE[:3], deep), generator=generator, dtype=dtype)
    padding = torch.rand(2, LENGTH, generator=generator) < 0.1
    options = {**options, "key_padding_mask": padding, "causal": causal}
    expected, lse = functional.block_sparse_attention(
        *(*whole, layout),
        seed=3,
        sinks=sinks if with_sinks else None,
        bias=buckets,
        return_lse=True,
        **options,
    )
    sums = torch.randn(SHAPE[:3], generator=generator, dtype=lse.dtype) * lse.isfinite()
    inputs = drawn if with_sinks else whole
    wanted = torch.autograd.grad((expected, lse), inputs, (grad, sums))
    mine = lambda x: ring_slice(x.detach(), 2, balanced=balanced)  # noqa: E731
    parts = [mine(x).requires_grad_() for x in whole]
    own_sinks = sinks.detach().requires_grad_() if with_sinks else None
    own_table = table.detach().requires_grad_()
    bias = None if buckets is None else buckets.with_table(own_table)
    with CountCollectives() as forward:
        y, its = ring_attention(
            *(parts[0], parts[1], parts[2], layout),
            seed=3,
            sinks=own_sinks,
            bias=bias,
            balanced=balanced,
            return_lse=True,
            **options,
        )
    with CountCollectives() as backward:
        torch.autograd.backward((y, its), (mine(grad), mine(sums)))
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {}
    torch.testing.assert_close(y, mine(expected), **tolerance)
    torch.testing.assert_close(its, mine(lse), **tolerance)
    for part, gradient in zip(parts, wanted[:3], strict=True):
        torch.testing.assert_close(part.grad, mine(gradient), **tolerance)
    if own_sinks is not None:
        dist.all_reduce(own_sinks.grad)
        torch.testing.assert_close(own_sinks.grad, wanted[3], **tolerance)
        dist.all_reduce(own_table.grad)
        torch.testing.assert_close(own_table.grad, wanted[4], **tolerance)
    sent = _sum_over_ranks([c.bytes["send"] for c in (forward, backward)])
    # Keys and values go out twice, and their gradients come back once.
    size = sends[balanced] * (parts[1].nbytes + parts[2].nbytes) // (1 + balanced)
    assert sent == [size, 2 * size], sends
    if not balanced:
        counts = _sum_over_ranks([c.calls["send"] for c in (forward, backward)])
        assert counts == [sends[0], 2 * sends[0]]


@on(PROCESSES)
def test_balanced_processes_have_equal_work(rank: int) -> None:
    """There are 36 blocks below and on the diagonal."""
    layout = BlockLayout.dense(LENGTH, block=16)
    work = []
    for balanced in (False, True):
        _, parts, *_ = attention._divide_layout(layout, True, rank, PROCESSES, balanced)
        work.append(sum(part.count for part in parts.values()))
    every: list = [None] * PROCESSES
    dist.all_gather_object(every, work)
    assert every == [[3, 9], [7, 9], [11, 9], [15, 9]]


class _Sinking(torch.nn.Module):
    """Attention with learnt sinks and slopes, followed by torch's dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.sinks = torch.nn.Parameter(torch.randn(4))
        self.register_buffer("slopes", SLOPES[0])
        layout = partial(BlockLayout.dense, block=16)
        self.drop = torch.nn.Dropout(0.2)
        self.attention = torchweld.nn.BlockSparseAttention(layout, 0.3, causal=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.mixed(x).unflatten(-1, (3, 4, 8)).transpose(1, 3).unbind(2)
        y = self.attention(*parts, alibi_slopes=self.slopes, sinks=self.sinks)
        return self.drop(self.out(y.transpose(1, 2).flatten(2)))


@shares_rows
@on(PROCESSES)
def test_a_module_learns_its_sinks(rank: int) -> None:
    """Sums of 256 rows of numbers around one."""
    torch.manual_seed(0)
    model = _Sinking()
    x, grad = torch.randn(2, 2, LENGTH, 32)
    torch.manual_seed(1)
    expected = model(x)
    wanted = torch.autograd.grad(expected, list(model.parameters()), grad)
    parallelize_module(model, init_device_mesh("cpu", (PROCESSES,)), sequence_plan(model))
    torch.manual_seed(1)
    y = model(ring_slice(x))
    torch.testing.assert_close(y, ring_slice(expected))
    y.backward(ring_slice(grad))
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient, rtol=1e-5, atol=1e-4)


@on(PROCESSES)
def test_what_does_not_fit_is_named(rank: int) -> None:
    q = torch.zeros(1, 1, 24, 8)
    for layout in (BlockLayout.dense(96, block=16), BlockLayout.dense(64, block=16)):
        with pytest.raises(ArgumentError, match="layout"):
            ring_attention(q, q, q, layout)
    with pytest.raises(ArgumentError, match="q and k"):
        ring_attention(q[0], q[0], q[0], layout)
    q, layout = torch.zeros(1, 1, 16, 8), BlockLayout.dense(64, block=16)
    with pytest.raises(ArgumentError, match="2 chunk"):
        ring_attention(q, q, q, layout, balanced=True)
    with pytest.raises(ArgumentError, match="sinks"):
        ring_attention(q, q, q, layout, sinks=torch.zeros(2))
    with pytest.raises(ArgumentError, match="multiple of 8 chunks"):
        ring_slice(torch.zeros(1, 12), balanced=True)


def test_parts_of_a_layout_make_the_whole() -> None:
    for layout, causal, *_ in LAYOUTS.values():
        whole = layout.causal() if causal else layout
        for rows, columns in (((0, 32), (0, 64)), ((96, 128), (48, 128)), ((16, 16), (0, 128))):
            part = whole.part(rows, columns).to_mask()
            torch.testing.assert_close(part, whole.to_mask()[:, :, slice(*rows), slice(*columns)])
    with pytest.raises(ArgumentError, match="keys"):
        layout.part((0, 32), (8, 32))
