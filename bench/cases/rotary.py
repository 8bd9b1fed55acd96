"""Cases of the op of rotary embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweld.bench.cases.declare import CASES, Arguments, Cases
from torchweld.ops.rotary.op import OP
from torchweld.ops.rotary.reference import concatenate, gather, turn
from torchweld.registry import activation, constant, parameter


def _plain(x: Tensor, key: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """Rotate as models do: in the input's dtype, with the angles of a half repeated."""
    cos, sin, positions, weight, key_weight, rotary_dim, _, _, eps, *_ = rest
    cos, sin = (gather(t, positions).to(x.dtype) for t in (cos, sin))
    if cos.shape[-1] != rotary_dim:
        cos, sin = (concatenate((t, t)) for t in (cos, sin))

    def run(x: Tensor, weight: Tensor | None) -> Tensor:
        if eps is not None:
            wide = x.float() if x.dtype.itemsize == 2 else x
            x_hat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
            x = x_hat.to(x.dtype) if weight is None else weight * x_hat.to(x.dtype)
        x, rest = x.tensor_split((rotary_dim,), -1)
        first, second = x.chunk(2, -1)
        y = x * cos + concatenate((-second, first)) * sin
        return concatenate((y, rest)) if rest.shape[-1] else y

    return run(x, weight), x.flatten()[:0] if key is None else run(key, key_weight)


def _terms(
    x: Tensor, key: Tensor | None, *rest: Any, grad_y: Tensor, grad_k_y: Tensor
) -> dict[str, Tensor]:
    """Sums of magnitudes; a bound must hold for either sign of a sine."""
    cos, sin, positions, weight, key_weight, *layout, eps, plus_one, _, heads = rest
    cos, sin = (gather(t, positions).double().abs() for t in (cos, sin))

    def turned(v: Tensor, transposed: bool) -> Tensor:
        """|v| times |cos| plus its partner's times |sin|."""
        signs = [turn(v, cos, s, layout, transposed) for s in (sin, -sin)]
        return torch.maximum(*signs) if v.numel() else v

    terms: dict[str, Tensor] = {}
    for prefix, t, w, grad in (("", x, weight, grad_y), ("k_", key, key_weight, grad_k_y)):
        name = prefix[:-1] or "x"
        if t is None:
            terms |= {f"{prefix}y": grad.double(), f"grad_{name}": grad.double()}
            continue
        value, g = t.detach().double(), turned(grad.double().abs(), True)
        if eps is None:
            terms |= {f"{prefix}y": turned(value.abs(), False), f"grad_{name}": g}
            continue
        dims = [-1] if heads is None else [heads, -1]
        rstd = value.square().mean(dims, keepdim=True).add(eps).rsqrt()
        x_hat = value.abs() * rstd
        scale = torch.ones((), dtype=torch.float64)
        if w is not None:
            scale = w.detach().double()
            scale = (1 + scale if plus_one else scale).abs()
            if heads is not None:
                scale = scale.view(t.shape[heads], *[1] * (-heads - 2), t.shape[-1])
        projected = (g * scale * x_hat).mean(dims, keepdim=True) * x_hat
        terms |= {
            f"{prefix}y": turned(x_hat * scale, False),
            f"grad_{name}": rstd * (g * scale + projected),
        }
        if w is not None:
            kept = {t.ndim - 1} | ({t.ndim + heads} if heads is not None else set())
            summed = [d for d in range(t.ndim) if d not in kept]
            parts = g * x_hat
            terms[f"grad_{prefix}norm_weight"] = (parts.sum(summed) if summed else parts).flatten()
    return terms


def sample(
    shape: Sequence[int],
    *,
    key_heads: int | None = None,
    has_key: bool = True,
    tokens: Sequence[int] | None = None,
    rotary_dim: int | None = None,
    full: bool = False,
    interleaved: bool = False,
    proportional: bool = False,
    eps: float | None = 1e-6,
    weights: bool = True,
    plus_one: bool = False,
    heads: int | None = None,
) -> Arguments:
    """Arguments for an input of this shape.

    `tokens` are the leading sizes of the angles, by default only the last of the shape's.
    """
    width = shape[-1]
    rotated = width - width % 2 if rotary_dim is None else rotary_dim
    lead = tuple(shape[-2:-1] if tokens is None else tokens)
    table = constant(*lead, rotated if full else rotated // 2)
    key_shape = list(shape)
    if key_heads is not None:
        key_shape[-3 if heads is None else heads] = key_heads
    sizes = [width * (1 if heads is None else s[heads]) for s in (shape, key_shape)]
    has_weights = weights and eps is not None
    return (
        activation(*shape),
        activation(*key_shape) if has_key else None,
        *(table, table, None),
        parameter(sizes[0]) if has_weights else None,
        parameter(sizes[1]) if has_weights and has_key else None,
        *(rotated, interleaved, proportional, eps, plus_one, "none", heads),
    )


def _model(batch: int, length: int, heads: int, key_heads: int, eps: float | None) -> Arguments:
    shape = (batch, heads, length, 128)
    return sample(shape, key_heads=key_heads, tokens=(length,), eps=eps, full=True)


def _measured(*sizes: tuple[int, int, int, int]) -> tuple[Arguments, ...]:
    """List arguments of these sizes, without and with a norm."""
    return tuple(_model(*size, eps) for size in sizes for eps in (None, 1e-6))


CASES[OP.name] = Cases(
    # Widths that no vector divides, no angles at all, all layouts, norms of every kind, more heads
    # of queries than of keys, angles shared by batches and by heads, no rows.
    samples=(
        sample((5, 48)),
        sample((1,)),
        sample((3, 1), eps=None),
        sample((2,), eps=None),
        sample((5, 7), eps=None),
        sample((5, 8), interleaved=True, full=True),
        sample((2, 3, 5, 16), key_heads=1, tokens=(2, 1, 5)),
        sample((2, 3, 4), interleaved=True, eps=None, has_key=False),
        sample((2, 3, 5, 16), key_heads=1, tokens=(5,), eps=None, full=True),
        sample((2, 4, 3, 12), tokens=(2, 1, 3), rotary_dim=6, plus_one=True),
        sample((2, 4, 3, 12), tokens=(3,), rotary_dim=6, proportional=True, full=True),
        sample((3, 2, 4, 16), tokens=(3, 2, 1), rotary_dim=8, interleaved=True, weights=False),
        sample((2, 3, 4, 8), tokens=(2, 3, 1), heads=-2, key_heads=2),
        sample((2, 3, 5, 8), tokens=(5,), heads=-3, key_heads=2, plus_one=True),
        sample((4, 50, 768), eps=None),
        sample((17, 1000), interleaved=True),
        sample((2, 8, 33, 64), key_heads=2, tokens=(33,), full=True),
        sample((2, 10007)),
        sample((0, 64)),
        sample((2, 0, 7), eps=None),
        sample((3, 0), eps=None),
    ),
    benchmarks=_measured((1, 128, 8, 2), (4, 1024, 16, 4), (1, 4096, 32, 8)),
    benchmarks_on_gpu=_measured((8, 4096, 32, 8), (1, 32768, 32, 8)),
    tiny=_model(1, 1, 4, 2, None),
    terms=_terms,
    plain=_plain,
)
