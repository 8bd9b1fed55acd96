"""Ring attention on four processes: exact against one, and slices go only where they are seen."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from processes import processes
from torchweld import functional
from torchweld.distributed import CountCollectives, ring_attention
from torchweld.errors import ArgumentError
from torchweld.sparse import BlockLayout

LENGTH, PROCESSES = 128, 4
SHAPE = (2, 4, LENGTH, 8)
# A layout, and how many slices it sends to processes that see something of them.
LAYOUTS = {
    "dense": (BlockLayout.dense(LENGTH, block=16), False, 12),
    "causal": (BlockLayout.dense(LENGTH, block=16), True, 6),
    "window": (BlockLayout.sliding_window(LENGTH, window_size=(20, 0), block=16), False, 3),
    "local": (BlockLayout.block_local(LENGTH, 2, block=16), False, 0),
    "heads": (
        BlockLayout.bigbird(LENGTH, block=16, num_heads=4, different_layout_per_head=True),
        False,
        12,
    ),
}


def _equals_one_process(rank: int, name: str, dtype: torch.dtype, options: dict) -> None:
    layout, causal, sends = LAYOUTS[name]
    generator = torch.Generator().manual_seed(1)
    shapes = [SHAPE, (2, 2, LENGTH, 8), (2, 2, LENGTH, 8)]
    whole = [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]
    grad = torch.randn(SHAPE, generator=generator, dtype=dtype)
    padding = torch.rand(2, LENGTH, generator=generator) < 0.1
    options = {**options, "key_padding_mask": padding, "causal": causal}
    expected = functional.block_sparse_attention(*whole, layout, seed=3, **options)
    wanted = torch.autograd.grad(expected, whole, grad)
    here = slice(rank * LENGTH // PROCESSES, (rank + 1) * LENGTH // PROCESSES)
    parts = [x.detach()[:, :, here].requires_grad_() for x in whole]
    with CountCollectives() as forward:
        y = ring_attention(*parts, layout, seed=3, **options)
    with CountCollectives() as backward:
        y.backward(grad[:, :, here])
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {}
    torch.testing.assert_close(y, expected[:, :, here], **tolerance)
    for part, gradient in zip(parts, wanted, strict=True):
        torch.testing.assert_close(part.grad, gradient[:, :, here], **tolerance)
    counts = torch.tensor([c.calls["send"] for c in (forward, backward)])
    sent = torch.tensor([c.bytes["send"] for c in (forward, backward)])
    dist.all_reduce(counts)
    dist.all_reduce(sent)
    # Keys and values go out twice, and their gradients come back once.
    assert counts.tolist() == [sends, 2 * sends]
    size = 2 * parts[1].nbytes
    assert sent.tolist() == [sends * size, 2 * sends * size]


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_one_process(name: str, backend: str) -> None:
    with processes(PROCESSES) as four:
        four.run(backend, _equals_one_process, name, torch.float64, {"dropout_p": 0.3})
        four.run(backend, _equals_one_process, name, torch.float32, {"softcap": 3.0})


def _refused(rank: int) -> None:
    q = torch.zeros(1, 1, 24, 8)
    for layout in (BlockLayout.dense(96, block=16), BlockLayout.dense(64, block=16)):
        with pytest.raises(ArgumentError, match="layout"):
            ring_attention(q, q, q, layout)
    with pytest.raises(ArgumentError, match="q and k"):
        ring_attention(q[0], q[0], q[0], layout)


def test_what_does_not_fit_is_named() -> None:
    with processes(PROCESSES) as four:
        four.run("cpu", _refused)


def test_parts_of_a_layout_make_the_whole() -> None:
    for layout, causal, _ in LAYOUTS.values():
        whole = layout.causal() if causal else layout
        for rows, columns in (((0, 32), (0, 64)), ((96, 128), (48, 128)), ((16, 16), (0, 128))):
            part = whole.part(rows, columns).to_mask()
            torch.testing.assert_close(part, whole.to_mask()[:, :, slice(*rows), slice(*columns)])
    with pytest.raises(ArgumentError, match="keys"):
        layout.part((0, 32), (8, 32))
