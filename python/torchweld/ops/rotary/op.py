"""The op of rotary embeddings: one or two tensors that share their angles, and their norms."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from torchweld.dispatch.kernels import define
from torchweld.ops.rotary.arguments import prepare
from torchweld.ops.rotary.checked import DTYPES, NAME, check
from torchweld.ops.rotary.reference import (
    concatenate,
    empty_result,
    gather,
    laid_out_like,
    normalize,
    turn,
)
from torchweld.registry import Cases, Numerics, Op, Rows, activation, constant, parameter

# The arguments of both schemas after the tensors.
_HOW = (
    "SymInt rotary_dim, bool interleaved, bool proportional, float? norm_eps, bool plus_one,"
    " str rounded, int? heads"
)
_TABLES = "Tensor cos, Tensor sin, Tensor? positions, Tensor? norm_weight, Tensor? k_norm_weight"


_WIDEST_ON_GPU = 1024  # columns: a program holds whole rows in its registers


def _reference(
    x: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    *how: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    check(x, key, cos, sin, positions, weight, key_weight, *how)
    *layout, eps, plus_one, rounded, heads = how
    wide = torch.promote_types(x.dtype, torch.float32)
    angles = [gather(table, positions).to(wide) for table in (cos, sin)]

    def run(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        normed = x.to(wide) if eps is None else normalize(x, weight, eps, plus_one, rounded, heads)
        return laid_out_like(turn(normed, angles[0], angles[1], *layout), x)

    # Without a key the result has no elements, but is differentiable as all results are.
    return run(x, weight), x.flatten()[:0] if key is None else run(key, key_weight)


def _plain(
    x: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    rotary_dim: int,
    interleaved: bool,
    proportional: bool,
    eps: float | None,
    plus_one: bool,
    rounded: str,
    heads: int | None,
) -> tuple[torch.Tensor, ...]:
    """Rotate as models do: in the input's dtype, with the angles of a half repeated."""
    cos, sin = (gather(t, positions).to(x.dtype) for t in (cos, sin))
    if cos.shape[-1] != rotary_dim:
        cos, sin = (concatenate((t, t)) for t in (cos, sin))

    def run(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if eps is not None:
            wide = x.float() if x.dtype.itemsize == 2 else x
            x_hat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
            x = x_hat.to(x.dtype) if weight is None else weight * x_hat.to(x.dtype)
        x, rest = x.tensor_split((rotary_dim,), -1)
        first, second = x.chunk(2, -1)
        y = x * cos + concatenate((-second, first)) * sin
        return concatenate((y, rest)) if rest.shape[-1] else y

    results = [run(x, weight)]
    return (*results, x.flatten()[:0] if key is None else run(key, key_weight))


def _backward_reference(
    grad_y: torch.Tensor,
    grad_k_y: torch.Tensor,
    x: torch.Tensor | None,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor | None, ...]:
    *how, _, _, _, _ = rest
    *layout, eps, _, _, _ = how
    if eps is None:
        wide = torch.promote_types(grad_y.dtype, torch.float32)
        angles = [gather(table, positions).to(wide) for table in (cos, sin)]

        def back(grad: torch.Tensor) -> torch.Tensor:
            turned = turn(
                grad.to(wide), angles[0], angles[1], layout[0], layout[1], layout[2], True
            )
            return laid_out_like(turned, grad)

        has_key = grad_k_y.ndim == grad_y.ndim and grad_k_y.shape[-1] == grad_y.shape[-1]
        return back(grad_y), back(grad_k_y) if has_key else None, None, None
    assert x is not None
    tensors = (x, key, weight, key_weight)
    results = _reference(x, key, cos, sin, positions, weight, key_weight, *how)
    pairs = [
        (y, grad)
        for y, grad in zip(results, (grad_y, grad_k_y), strict=True)
        if y.requires_grad and y.shape == grad.shape
    ]
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    gradients = torch.autograd.grad(
        [y for y, _ in pairs],
        wanted,
        [grad for _, grad in pairs],
        create_graph=True,
        allow_unused=True,
    )
    by_tensor = {id(t): g for t, g in zip(wanted, gradients, strict=True)}
    return tuple([None if t is None else by_tensor.get(id(t)) for t in tensors])


def _unsaved(
    x: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    rotary_dim: int,
    interleaved: bool,
    proportional: bool,
    eps: float | None,
    *_: Any,
) -> Collection[str]:
    """Without a norm the op is linear, and its backward pass needs only the angles."""
    return ("x", "k", "rstd", "k_rstd") if eps is None else ()


def _refuses(backend: str, arguments: Mapping[str, Any]) -> str | None:
    cos, sin, x = arguments.get("cos"), arguments.get("sin"), arguments.get("x")
    if backend == "triton":
        if arguments.get("heads") is not None:
            return "a norm across heads has a kernel only on the CPU"
        if x is not None and x.shape and x.shape[-1] > _WIDEST_ON_GPU:
            return f"rows of {x.shape[-1]} are wider than {_WIDEST_ON_GPU}"
    if not isinstance(cos, torch.Tensor) or not isinstance(sin, torch.Tensor):
        return None
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        return "cos or sin requires a gradient, which eager gives"
    if isinstance(x, torch.Tensor):
        if x.ndim > 4:
            return f"x has {x.ndim} dimensions, and kernels take four"
        angles = arguments.get("positions")
        lead = cos.shape[:-1] if angles is None else angles.shape
        if len(lead) == 3 and 1 not in lead:
            return "every row has its own angles, which eager serves"
    return None


def _statistics(x: torch.Tensor, eps: float | None, heads: int | None) -> torch.Tensor:
    if eps is None:
        return x.new_empty(0)
    sizes = list(x.shape)
    if heads is not None:
        sizes[heads] = 1
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(sizes[:-1], dtype=dtype)


def _fake(
    x: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    rotary_dim: int,
    interleaved: bool,
    proportional: bool,
    eps: float | None,
    plus_one: bool,
    rounded: str,
    heads: int | None,
) -> tuple[torch.Tensor, ...]:
    key_y = x.new_empty(0) if key is None else empty_result(key)
    key_rstd = x.new_empty(0) if key is None else _statistics(key, eps, heads)
    return empty_result(x), key_y, _statistics(x, eps, heads), key_rstd


def _fake_backward(
    grad_y: torch.Tensor,
    grad_k_y: torch.Tensor,
    x: torch.Tensor | None,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    rotary_dim: int,
    interleaved: bool,
    proportional: bool,
    eps: float | None,
    plus_one: bool,
    rounded: str,
    heads: int | None,
    rstd: torch.Tensor,
    key_rstd: torch.Tensor,
    need_weight: bool,
    need_key_weight: bool,
) -> tuple[torch.Tensor, ...]:
    def like(grad: torch.Tensor, saved: torch.Tensor | None) -> torch.Tensor:
        return empty_result(grad if eps is None or saved is None else saved)

    def of(weight: torch.Tensor | None, needed: bool) -> torch.Tensor:
        absent = weight is None or not needed
        return grad_y.new_empty(0) if absent else weight.new_empty(weight.shape)  # type: ignore[union-attr]

    grads = like(grad_y, x), like(grad_k_y, key)
    return *grads, of(weight, need_weight), of(key_weight, need_key_weight)


def _columns(x: torch.Tensor, *rest: Any) -> int:
    """Count the whole dimensions: a norm across heads needs heads, columns and all between."""
    heads: int | None = rest[-1]
    return 1 if heads is None else -heads


def _sample_rows(inputs: Sequence[Any], rows: int) -> Sequence[Any]:
    """Take some rows. Positions are looked up first, since a table has other rows."""
    from torchweld.registry import take_rows

    arguments = list(inputs)
    if arguments[4] is not None:
        arguments[2], arguments[3] = (gather(t, arguments[4]) for t in arguments[2:4])
        arguments[4] = None
    return take_rows(arguments, rows, _columns(*arguments), ())


def _terms(
    x: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    *how: Any,
    grad_y: torch.Tensor,
    grad_k_y: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Sums of magnitudes; a bound must hold for either sign of a sine."""
    *layout, eps, plus_one, _, heads = how
    angles = [gather(t, positions).double().abs() for t in (cos, sin)]

    def turned(v: torch.Tensor, transposed: bool) -> torch.Tensor:
        """|v| times |cos| plus its partner's times |sin|."""
        one = [
            turn(v, angles[0], a, layout[0], layout[1], layout[2], transposed)
            for a in _signs(angles[1])
        ]
        return torch.maximum(*one) if v.numel() else v

    terms: dict[str, torch.Tensor] = {}
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


def _signs(sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return sin, -sin


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
) -> tuple[Any, ...]:
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


# Widths that no vector divides, no angles at all, all layouts, norms of every kind, more heads of
# queries than of keys, angles shared by batches and by heads, no rows.
_SAMPLES = (
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
)


def _model(
    batch: int, length: int, heads: int, key_heads: int, eps: float | None
) -> tuple[Any, ...]:
    shape = (batch, heads, length, 128)
    return sample(shape, key_heads=key_heads, tokens=(length,), eps=eps, full=True)


def _measured(*sizes: tuple[int, int, int, int]) -> tuple[tuple[Any, ...], ...]:
    """List arguments of these sizes, without and with a norm."""
    return tuple(_model(*size, eps) for size in sizes for eps in (None, 1e-6))


def _flops(x: torch.Tensor, key: torch.Tensor | None, *rest: Any) -> tuple[int, int]:
    elements = x.numel() + (0 if key is None else key.numel())
    return (3 * elements, 3 * elements) if rest[-4] is None else (8 * elements, 13 * elements)


OP = Op(
    name=NAME,
    forward=f"(Tensor x, Tensor? k, {_TABLES}, {_HOW})"
    " -> (Tensor y, Tensor k_y, Tensor rstd, Tensor k_rstd)",
    backward=f"(Tensor grad_y, Tensor grad_k_y, Tensor? x, Tensor? k, {_TABLES}, {_HOW},"
    " Tensor? rstd, Tensor? k_rstd, bool need_norm_weight, bool need_k_norm_weight)"
    " -> (Tensor grad_x, Tensor grad_k, Tensor grad_norm_weight, Tensor grad_k_norm_weight)",
    inputs=prepare,
    reference=_reference,
    cases=Cases(
        plain=_plain,
        # Half of the columns are rotated, so that the pairing of columns matters.
        sized=lambda leading, row: sample((*leading, *row), rotary_dim=row[-1] // 4 * 2),
        flops=_flops,
        samples=_SAMPLES,
        benchmarks=_measured((1, 128, 8, 2), (4, 1024, 16, 4), (1, 4096, 32, 8)),
        benchmarks_on_gpu=_measured((8, 4096, 32, 8), (1, 32768, 32, 8)),
        tiny=_model(1, 1, 4, 2, None),
        numerics=Numerics(
            fp32=dict.fromkeys(
                ("y", "k_y", "grad_x", "grad_k", "grad_norm_weight", "grad_k_norm_weight"), 2.0
            ),
            terms=_terms,
        ),
    ),
    backward_reference=_backward_reference,
    fake_backward=_fake_backward,
    unsaved=_unsaved,
    check=check,
    fake=_fake,
    sharding=Rows(_columns),
    sample=_sample_rows,
    dtypes=DTYPES,
    sources={
        "cpu": ("csrc/cpu/rotary.cpp",),
        "triton": ("triton_kernels/rotary.py",),
    },
    small=0,
    refuses=_refuses,
)
define(OP)
