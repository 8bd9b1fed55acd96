"""The sequence along a ring and heads along another dimension, on 2 x 2 processes, as in one."""

# Parameters and results are DTensors, which torch's annotations do not say.
# mypy: disable-error-code="attr-defined"

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
from torchweld.distributed import CountCollectives, ring_attention, ring_slice, tp_plan
from torchweld.errors import ArgumentError
from torchweld.random import Shard
from torchweld.sparse import BlockLayout

BATCH, HEADS, LENGTH, HEAD = 2, 4, 128, 8
SHAPE = (BATCH, HEADS, LENGTH, HEAD)
# The key heads, which the heads share two by two; each layout's name says what is special.
LAYOUTS = {
    "causal": (BlockLayout.dense(LENGTH, block=16), 2, True),
    "window": (BlockLayout.sliding_window(LENGTH, window_size=(20, 0), block=16), 2, False),
    "own of each head": (
        BlockLayout.bigbird(LENGTH, block=16, num_heads=HEADS, different_layout_per_head=True),
        4,
        False,
    ),
    "own of each sequence": (
        BlockLayout.from_scores(
            torch.rand(BATCH, HEADS, 8, 8, generator=torch.Generator().manual_seed(4)),
            3,
            block=16,
            seq_len=LENGTH,
        ),
        4,
        False,
    ),
}


def _mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "tensor"))


@pytest.mark.parametrize(
    ("dtype", "balanced"), [(torch.float64, False), (torch.float32, True)], ids=str
)
@pytest.mark.parametrize(
    ("name", "backend", "dim"), selection.combine(LAYOUTS, ("cpu", "eager"), (0, 1))
)
@on(4)
def test_attention_equals_one_process(
    rank: int, name: str, backend: str, dim: int, dtype: torch.dtype, balanced: bool
) -> None:
    """Dropout, slopes, sinks and padding, with the rest of the batch or of the heads elsewhere."""
    layout, key_heads, causal = LAYOUTS[name]
    mesh, generator = _mesh(), torch.Generator().manual_seed(1)
    group, place = mesh.get_group("ring"), mesh.get_local_rank("tensor")
    shapes = [SHAPE, *[(BATCH, key_heads, LENGTH, HEAD)] * 2]
    whole = [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]
    sinks = torch.randn(HEADS, generator=generator, dtype=dtype).requires_grad_()
    slopes = torch.rand(BATCH, HEADS, generator=generator, dtype=dtype)
    padding = torch.rand(BATCH, LENGTH, generator=generator) < 0.1
    grad = torch.randn(SHAPE, generator=generator, dtype=dtype)
    options: dict[str, Any] = {"causal": causal, "dropout_p": 0.3, "seed": 3}
    given: dict[str, Any] = {"key_padding_mask": padding, "alibi_slopes": slopes, "sinks": sinks}
    q, k, v = whole
    y, lse = functional.block_sparse_attention(q, k, v, layout, return_lse=True, **given, **options)
    sums = torch.randn(SHAPE[:3], generator=generator, dtype=lse.dtype) * lse.isfinite()
    wanted = torch.autograd.grad((y, lse), (*whole, sinks), (grad, sums))

    def half(x: torch.Tensor, at: int) -> torch.Tensor:
        return x.detach().chunk(2, at)[place]

    def mine(x: torch.Tensor) -> torch.Tensor:
        return ring_slice(half(x, dim), 2, group, balanced=balanced)

    parts = [mine(x).requires_grad_() for x in whole]
    given["alibi_slopes"] = half(slopes, dim)
    given["sinks"] = (half(sinks, 0) if dim else sinks.detach()).requires_grad_()
    if dim == 0:
        given["key_padding_mask"] = half(padding, 0)
    offsets = [0, 0, 0, 0]
    offsets[dim] = place * SHAPE[dim] // 2
    q, k, v = parts
    found, its = ring_attention(
        *(q, k, v, layout, group),
        **(given | options),
        shard=Shard(SHAPE, offsets),
        balanced=balanced,
        return_lse=True,
    )
    torch.autograd.backward((found, its), (mine(grad), mine(sums)))
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {}
    torch.testing.assert_close(found, mine(y), **tolerance)
    torch.testing.assert_close(its, mine(lse), **tolerance)
    for part, gradient in zip(parts, wanted[:3], strict=True):
        torch.testing.assert_close(part.grad, mine(gradient), **tolerance)
    of_sinks = given["sinks"].grad
    assert of_sinks is not None
    dist.all_reduce(of_sinks, group=group if dim else None)
    torch.testing.assert_close(of_sinks, half(wanted[3], 0) if dim else wanted[3], **tolerance)


WIDTH = HEADS * HEAD


class _Attention(torch.nn.Module):
    """With slopes, and torch's dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)
        )
        layout = partial(
            BlockLayout.bigbird, block=16, num_heads=HEADS, different_layout_per_head=True
        )
        self.attention = torchweld.nn.BlockSparseAttention(layout, 0.3)
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.1, 0.0]))
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        heads = [layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in layers]
        y = self.attention(*heads, alibi_slopes=self.slopes)
        return self.drop(self.o_proj(y.transpose(1, 2).flatten(2)))


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torchweld.nn.RMSNorm(WIDTH)
        self.attention = _Attention()
        self.mlp = torchweld.nn.GatedMLP(WIDTH, 48)
        self.add = torchweld.nn.BiasDropoutAdd(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return self.add(self.mlp(x), None, x)


class _Model(torch.nn.Module):
    """A layer and a dropout outside of the blocks too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.2)
        self.blocks = torch.nn.ModuleList(_Block() for _ in range(2))
        self.norm = torchweld.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


@shares_rows
@pytest.mark.parametrize("sequence_parallel", [False, True])
@on(4)
def test_a_model_equals_one_process(rank: int, sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    model = _Model()
    x, grad = torch.randn(2, BATCH, LENGTH, WIDTH)
    x.requires_grad_()
    torch.manual_seed(1)
    expected = model(x)
    wanted = torch.autograd.grad(expected, [x, *model.parameters()], grad)
    mesh = _mesh()
    group = mesh.get_group("ring")
    parallelize_module(model, mesh, tp_plan(model, sequence_parallel, ring=True))
    part = ring_slice(x.detach(), 1, group).requires_grad_()
    torch.manual_seed(1)
    with CountCollectives() as counted:
        y = model(part)
    # Two sums and a slice of keys and values per block. With a sequence along tensor too, the first
    # block cuts it and the last gathers it.
    sums = {"all-gather": 4 + 1, "reduce-scatter": 4} if sequence_parallel else {"all-reduce": 4}
    assert counted.calls == {**sums, "send": 2}
    torch.testing.assert_close(y, ring_slice(expected, 1, group))
    with CountCollectives() as counted:
        y.backward(ring_slice(grad, 1, group))
    # All gradients are summed along the ring together. In a block, norm's and o_proj.bias's are
    # also summed along tensor if the sequence is sharded there.
    reduces = 2 if sequence_parallel else sums["all-reduce"] + 1
    assert counted.calls == {**sums, "all-reduce": reduces, "send": 4}
    tolerance = {"rtol": 1e-5, "atol": 1e-4}  # sums of 256 rows of numbers around one
    torch.testing.assert_close(part.grad, ring_slice(wanted[0], 1, group), **tolerance)
    for (name, parameter), gradient in zip(model.named_parameters(), wanted[1:], strict=True):
        assert parameter.grad.placements == parameter.placements, name
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient, **tolerance)


@on(4)
def test_what_does_not_fit_is_named(rank: int) -> None:
    mesh, model = _mesh(), _Model()
    plan = tp_plan(model, ring=True)
    with pytest.raises(ArgumentError, match="device_mesh"):
        parallelize_module(
            model,
            mesh["tensor"],
            {"blocks.0.attention.attention": plan["blocks.0.attention.attention"]},
        )
    model.blocks[1].attention.attention = torchweld.nn.SoftmaxDropout()
    with pytest.raises(ArgumentError, match=r"blocks\.1\.attention"):
        tp_plan(model, ring=True)
    q, layout = torch.zeros(1, 2, 32, 8), BlockLayout.dense(64, block=16)
    group = mesh.get_group("ring")
    for shard in (
        Shard((1, 4, 64), (0, 0, 0)),
        Shard((1, 4, 128, 8), (0, 0, 0, 0)),
        Shard((1, 4, 64, 8), (0, 3, 0, 0)),
        Shard((1, 4, 64, 8), (0, 0, 32, 0)),
    ):
        with pytest.raises(ArgumentError, match="shard"):
            ring_attention(q, q, q, layout, group, shard=shard)
    own = BlockLayout.bigbird(64, block=16, num_heads=4, different_layout_per_head=True)
    with pytest.raises(ArgumentError, match="layout"):
        ring_attention(q, q, q, own, group)


def test_heads_of_a_layout_are_those_of_its_mask() -> None:
    for layout, *_ in LAYOUTS.values():
        mask = layout.to_mask()
        for batch, heads in (
            ((0, 2), (0, 4)),
            ((1, 2), (0, 4)),
            ((0, 1), (1, 3)),
            ((1, 1), (2, 2)),
        ):
            found = layout.of_heads(batch, heads).to_mask()
            rows = slice(*batch) if layout.batch > 1 else slice(None)
            cut = slice(*heads) if layout.heads > 1 else slice(None)
            assert torch.equal(found, mask[rows, cut])
    with pytest.raises(ArgumentError, match="heads"):
        layout.of_heads((0, 1), (2, 5))
