"""Cases of softmax_dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchweld.bench.cases.declare import CASES, Arguments, Cases, vary
from torchweld.ops.softmax import OP, add_mask, softmax
from torchweld.random import drop
from torchweld.registry import boolean, constant


def _plain(scores: Tensor, mask: Any, scale: float, causal: bool, p: float, *rest: Any) -> Tensor:
    seed, *place = rest
    y = torch.softmax(add_mask(scores, mask, scale, causal, *place), -1)
    return torch.nn.functional.dropout(y, p) if seed is not None else y


def _terms(
    scores: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    p: float,
    seed: Tensor | None,
    *place: Any,
    grad_y: Tensor,
) -> dict[str, Tensor]:
    """Sums of magnitudes: an absolute error of z is a relative error of its exponential."""
    scores = scores.double()
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    s = softmax(scores, mask, scale, causal, *place)
    z = add_mask(scores, mask, scale, causal, *place)
    highest = z.amax(-1, keepdim=True) if z.shape[-1] else z.sum(-1, keepdim=True)
    exponent = (scores * scale).abs() + (z - highest).abs()
    if mask is not None and mask.dtype != torch.bool:
        exponent = exponent + mask.abs()
    exponent = torch.where(s > 0, exponent, 0)
    relative = s * (1 + exponent + (s * exponent).sum(-1, keepdim=True))
    g = drop(grad_y.double().abs(), p, seed, *place)
    projected = (relative * g).sum(-1, keepdim=True)
    inner = relative * (g + (s * g).sum(-1, keepdim=True)) + s * projected
    return {"y": drop(relative, p, seed, *place), "grad_input": inner * abs(scale)}


def _sample(
    shape: tuple[int, ...], mask: Any, scale: Any, causal: Any, p: Any, **shard: Any
) -> Arguments:
    changes = {"mask": mask, "scale": scale, "causal": causal, "p": p}
    return vary(OP.name, shape[:-1], shape[-1:], **changes, **shard)


def _measured(*shapes: tuple[int, ...]) -> tuple[Arguments, ...]:
    """Only scale and mask; only dropout; both, causal."""
    kinds = (True, 0.125, False, 0.0), (False, 1.0, False, 0.1), (False, 0.125, True, 0.1)
    return tuple(
        _sample(shape, boolean(shape[0], 1, 1, shape[-1]) if masked else None, *how)
        for shape in shapes
        for masked, *how in kinds
    )


# Masks with every kind of broadcast, queries that see nothing, odd, prime and wide rows, shards, no
# rows, no keys.
CASES[OP.name] = Cases(
    samples=(
        vary(OP.name, (5,), (48,)),
        _sample((1,), None, 1.0, False, 0.0),
        _sample((3, 1), None, 1.0, False, 0.5),
        _sample((5, 7), boolean(5, 7), 0.5, False, 0.0),
        _sample((5, 7), boolean(5, 1), 0.5, False, 0.25),
        _sample((2, 4, 7), None, 0.5, True, 0.25),
        _sample((2, 7, 4), None, -0.5, True, 0.0),
        _sample((7, 4), None, 0.5, True, 0.5),
        _sample((2, 3, 5, 31), boolean(2, 1, 1, 31), 0.2, False, 0.1),
        _sample((2, 3, 5, 31), constant(3, 5, 31), 0.2, True, 0.9),
        _sample((2, 3, 5, 31), constant(2, 1, 5, 1), 0.2, False, 0.0),
        _sample((2, 3, 2, 3, 5, 9), boolean(2, 1, 2, 1, 5, 9), 1.0, True, 0.1),
        _sample((33, 64), constant(33, 64), 0.125, True, 0.0),
        _sample((4, 50, 768), None, 0.3, True, 0.0),
        _sample((4, 5, 1000), None, 1.0, False, 0.3),
        _sample((3, 4096), constant(4096), 1.0, False, 0.1),
        _sample((2, 8193), boolean(1), 1.0, False, 0.1),
        _sample((1, 65536), None, 1.0, False, 0.0),
        _sample((2, 65539), None, 1.0, True, 0.1),
        _sample((2, 2, 4, 16), None, 1.0, True, 0.3, whole=[2, 6, 9, 16], offset=[0, 3, 5, 0]),
        _sample((0, 64), None, 1.0, True, 0.1),
        _sample((2, 0, 7), boolean(7), 1.0, False, 0.0),
        _sample((3, 0), None, 1.0, False, 0.1),
    ),
    benchmarks=_measured((2, 4, 64, 64), (4, 8, 512, 512), (1, 4, 2048, 2048)),
    benchmarks_on_gpu=_measured((8, 16, 512, 512), (4, 32, 2048, 2048), (1, 4, 8192, 8192)),
    tiny=_sample((1, 64), None, 1.0, False, 0.1),
    terms=_terms,
    rounding={"grad_input": 2.0},  # y was saved in 16 bits
    plain=_plain,
)
