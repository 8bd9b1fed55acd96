"""Cases of block_sparse_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchweld.bench.cases.declare import CASES, Arguments, Cases
from torchweld.ops.attention.block_sparse import OP
from torchweld.ops.attention.reference import (
    add_dims,
    distance,
    drop_weights,
    expand_bias,
    repeat_for_heads,
    scores,
    softmax,
    visible,
)
from torchweld.ops.attention.samples import NO_LISTS, list_lazily, sized
from torchweld.registry import SEED, TensorSpec, activation, constant, residual
from torchweld.sparse import BlockLayout


def _terms(*arguments: Any, grad_y: Tensor, grad_lse: Tensor) -> dict[str, Any]:
    """Sums of magnitudes that bound errors: an absolute error of a score is a relative error of its
    weight.
    """
    args = OP.Args(*arguments)
    q, k, v, sinks, bias, slopes = args.q, args.k, args.v, args.sinks, args.bias, args.alibi_slopes
    scale, softcap, offset = args.scale, args.softcap, args.offset
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape, "y": (*q.shape[:-1], v.shape[-1])}
    q, k, v = (add_dims(x.double()) for x in (q, k, v))
    heads, key_heads = q.shape[1], k.shape[1]
    k, v = (repeat_for_heads(x, heads, args.group, offset) for x in (k, v))
    sinks = None if sinks is None else sinks.double()
    grad_y, grad_lse = add_dims(grad_y.double()).abs(), grad_lse.double().view(q.shape[:-1])
    grad_lse = grad_lse.abs().unsqueeze(-1)
    lists = (args.rows, args.row_entries, args.masks)
    seen = visible(q, k, *lists, args.key_padding_mask, args.block, args.causal)
    z = scores(q, k, slopes, scale, softcap, offset)
    added = None
    if bias is not None:
        bias = bias.double().requires_grad_()
        with torch.enable_grad():
            added = expand_bias(bias, args.bias_row, *z.shape[-2:])
            added = added.expand(*z.shape)
        z = z + added.detach()
    weights, lse = softmax(z, seen, sinks)
    sums = q.abs() @ k.abs().mT * abs(scale)
    slope = 1 + 2 * sums / abs(softcap) if softcap else 1.0
    beside = 0.0 if slopes is None else slopes.double().abs() * distance(q, k, offset)
    if added is not None:
        beside = beside + added.detach().abs().nan_to_num(posinf=0)
    exponent = sums + beside + (z - lse.unsqueeze(-1)).abs()
    exponent = torch.where(weights > 0, exponent, 0)
    shared = (weights * exponent).sum(-1, keepdim=True)
    if sinks is not None:
        sink = torch.exp(sinks - lse.unsqueeze(-1))
        of_sink = (sinks - lse.unsqueeze(-1)).abs() + sinks.abs()
        shared = shared + sink * of_sink
    relative = weights * (1 + exponent + shared)
    factor = drop_weights(torch.ones_like(weights), args.p, args.seed, args.whole, offset)
    g = grad_y @ v.abs().mT * factor
    inner = (weights * g).sum(-1, keepdim=True) + grad_lse
    cross = (relative * g).sum(-1, keepdim=True)
    grad_bias = relative * (g + inner) + weights * cross
    grad_z = grad_bias * slope
    bounds = {
        "y": (relative * factor @ v.abs()).view(shapes["y"]),
        "lse": (lse.abs().unsqueeze(-1) + 1 + shared).view(shapes["q"][:-1]),
        "grad_q": (grad_z @ k.abs() * abs(scale)).view(shapes["q"]),
    }
    grad_k, grad_v = grad_z.mT @ q.abs() * abs(scale), (relative * factor).mT @ grad_y
    for name, grad in (("k", grad_k), ("v", grad_v)):
        grad = grad.unflatten(1, (key_heads, heads // max(key_heads, 1))).sum(2)
        bounds[f"grad_{name}"] = grad.view(shapes[name])
    if bias is not None and added is not None:
        (bounds["grad_bias"],) = torch.autograd.grad(added, bias, grad_bias)
    if sinks is not None:
        wide = sink * (1 + of_sink + shared)
        bounds["grad_sinks"] = (wide * inner + sink * cross).sum((0, 2), keepdim=True)[0]
    return bounds


def _sample(
    shape: tuple[int, ...],
    key_shape: tuple[int, ...] | None = None,
    layout: Callable[[], BlockLayout] | None = None,
    *,
    block: int = 16,
    group: int = 1,
    causal: bool = False,
    softcap: float = 0.0,
    sinks: bool = False,
    slopes: bool = False,
    p: float = 0.0,
    value_width: int | None = None,
    bias: TensorSpec | None = None,
    bias_row: int = 0,
) -> Arguments:
    heads = shape[-3] if len(shape) > 2 else 1
    of_head = (heads, 1, 1)
    key_shape = key_shape or shape
    value = (*key_shape[:-1], key_shape[-1] if value_width is None else value_width)
    return (
        *(activation(*shape), activation(*key_shape), activation(*value)),
        *(residual(*of_head) if sinks else None, bias),
        *(list_lazily(layout) if layout else NO_LISTS),
        *(None, constant(*of_head) if slopes else None, bias_row, block, group),
        *((shape[-1] or 1) ** -0.5, causal, softcap, p, SEED if p else None, None, None),
    )


# Lengths that are and are not multiples of the block, heads that share keys, every argument, one
# token, no tokens. Widths that are multiples of 32, which AMX multiplies in 16 bits, and others.
_SAMPLES = (
    sized((2, 3, 37), (24,)),
    sized((3,), (5,)),
    _sample((1, 1, 1, 1)),
    _sample((1, 2, 5, 3), causal=True, sinks=True),
    _sample((1, 2, 3, 5), (1, 1, 4, 5), group=2, causal=True, p=0.3),
    _sample((2, 2, 100, 32), layout=lambda: BlockLayout.bigbird(100, block=16), p=0.2),
    _sample(
        (1, 4, 70, 33),
        (1, 2, 131, 33),
        lambda: BlockLayout.sliding_window((70, 131), window_size=(40, 30), block=32),
        block=32,
        group=2,
        slopes=True,
    ),
    _sample(
        (2, 4, 150, 64),
        (2, 1, 150, 64),
        lambda: BlockLayout.longformer(150, block=64, num_sliding_window_blocks=1),
        block=64,
        group=4,
        causal=True,
        softcap=5.0,
    ),
    _sample(
        (3, 300, 40),
        layout=lambda: BlockLayout.fixed(
            300, block=32, num_heads=3, num_different_global_patterns=3
        ),
        block=32,
        p=0.1,
        sinks=True,
    ),
    _sample((1, 1, 200, 128), layout=lambda: BlockLayout.strided(200, block=128), block=128),
    _sample((2, 3, 60, 17), causal=True, slopes=True),
    # Values narrower and wider than keys.
    _sample((2, 4, 70, 96), (2, 2, 70, 96), group=2, causal=True, value_width=32, p=0.1),
    _sample(
        (1, 2, 90, 20),
        layout=lambda: BlockLayout.bigbird(90, block=32),
        block=32,
        value_width=130,
        sinks=True,
    ),
    # Biases for each pair, of the whole batch and of all heads, and by distance.
    _sample(
        (2, 3, 70, 32),
        (2, 3, 90, 32),
        lambda: BlockLayout.sliding_window((70, 90), 1, block=32),
        block=32,
        softcap=4.0,
        bias=activation(1, 3, 70, 90),
    ),
    _sample((2, 2, 33, 8), causal=True, bias=activation(2, 1, 33, 33), p=0.2),
    _sample(
        (2, 3, 150, 32),
        layout=lambda: BlockLayout.bigbird(150, block=64),
        block=64,
        value_width=64,
        causal=True,
        bias=residual(3, 1, 299),
        bias_row=150,
        p=0.1,
    ),
    _sample((3, 2, 35, 12), bias=residual(2, 1, 117), bias_row=7),
    # Enough distances, and enough heads, to pool the errors of biases and of sinks.
    _sample((1, 20, 300, 32), bias=residual(20, 1, 599), bias_row=300),
    _sample((1, 10000, 2, 3), causal=True, sinks=True, bias=residual(10000, 1, 3), bias_row=2),
    _sample((2, 0, 8, 16)),
    _sample((2, 3, 0, 16)),
)


def benchmark_window(
    length: int, heads: int = 8, width: int = 64, block: int = 64
) -> tuple[Arguments, ...]:
    def window(blocks: int) -> Callable[[], BlockLayout]:
        return lambda: BlockLayout.sliding_window(length, blocks, block=block)

    shape = (1, heads, length, width)
    blocks = length // block
    return (
        _sample(shape, layout=window(blocks // 8), block=block),
        _sample(shape, layout=window(blocks // 16), block=block),
        _sample(shape, layout=window(blocks // 16), block=block, causal=True, p=0.1),
    )


CASES[OP.name] = Cases(
    samples=_SAMPLES,
    benchmarks=benchmark_window(4096),
    benchmarks_on_gpu=(*benchmark_window(16384, 16), *benchmark_window(16384, 16, 128, 128)),
    tiny=_sample((1, 1, 64, 16)),
    terms=_terms,
    # y was rounded, and all gradients of a query depend on it. For y and grad_v, tensor cores
    # take rounded weights, as the reference does.
    rounding={
        **dict.fromkeys(("y", "grad_v"), 2.0),
        **dict.fromkeys(("grad_q", "grad_k", "grad_sinks", "grad_bias"), 3.0),
    },
    # The error of a rounded y, of up to sqrt(8) roundings, over the error of a weight's
    # gradient, which eager rounds once.
    eager={"grad_bias": 8**0.5},
    has_dense_reference=True,
)
