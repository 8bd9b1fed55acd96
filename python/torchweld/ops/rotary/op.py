"""The op of rotary embeddings: one or two tensors that share their angles, and their norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweld.dispatch.autograd import differentiate, make_views
from torchweld.dispatch.kernels import define
from torchweld.ops.rotary.arguments import prepare
from torchweld.ops.rotary.checked import DTYPES, NAME, check
from torchweld.ops.rotary.reference import empty_result, gather, laid_out_like, normalize, turn
from torchweld.registry import Op, Rows, activation, constant, parameter, take_rows

# The arguments of both schemas after the tensors.
_HOW = (
    "SymInt rotary_dim, bool interleaved, bool proportional, float? norm_eps, bool plus_one,"
    " str rounded, int? heads"
)
_TABLES = "Tensor cos, Tensor sin, Tensor? positions, Tensor? norm_weight, Tensor? k_norm_weight"

_WIDEST_ON_GPU = 1024  # columns: a program holds whole rows in its registers


def _reference(x: Tensor, key: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    check(x, key, *rest)
    cos, sin, positions, weight, key_weight, *layout, eps, plus_one, rounded, heads = rest
    wide = torch.promote_types(x.dtype, torch.float32)
    angles = [gather(table, positions).to(wide) for table in (cos, sin)]

    def run(x: Tensor, weight: Tensor | None) -> Tensor:
        normed = x.to(wide) if eps is None else normalize(x, weight, eps, plus_one, rounded, heads)
        return laid_out_like(turn(normed, angles[0], angles[1], layout), x)

    # Without a key the result has no elements, but is differentiable as all results are.
    return run(x, weight), x.flatten()[:0] if key is None else run(key, key_weight)


def _backward_reference(*arguments: Any) -> tuple[Tensor | None, ...]:
    args = OP.backward_signature.Args(*arguments)
    grad_y, grad_k_y = args.grad_y, args.grad_k_y
    if args.norm_eps is None:
        wide = torch.promote_types(grad_y.dtype, torch.float32)
        angles = [gather(table, args.positions).to(wide) for table in (args.cos, args.sin)]
        layout = (args.rotary_dim, args.interleaved, args.proportional)

        def back(grad: Tensor) -> Tensor:
            return laid_out_like(turn(grad.to(wide), angles[0], angles[1], layout, True), grad)

        has_key = grad_k_y.ndim == grad_y.ndim and grad_k_y.shape[-1] == grad_y.shape[-1]
        return back(grad_y), back(grad_k_y) if has_key else None, None, None
    names = ("x", "k", "norm_weight", "k_norm_weight")
    tensors = make_views([getattr(args, name) for name in names])
    args = args._replace(**dict(zip(names, tensors, strict=True)))
    results = _reference(*[getattr(args, name) for name in OP.forward_signature.arguments])
    pairs = zip(results, (grad_y, grad_k_y), strict=True)
    grads = [grad if y.shape == grad.shape else None for y, grad in pairs]
    return tuple(differentiate(results, tensors, grads))


def _unsaved(*arguments: Any) -> tuple[str, ...]:
    """Without a norm the op is linear, and its backward pass needs only the angles."""
    return ("x", "k", "rstd", "k_rstd") if OP.Args(*arguments).norm_eps is None else ()


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


def _statistics(x: Tensor, eps: float | None, heads: int | None) -> Tensor:
    if eps is None:
        return x.new_empty(0)
    sizes = list(x.shape)
    if heads is not None:
        sizes[heads] = 1
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(sizes[:-1], dtype=dtype)


def _fake(x: Tensor, key: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    args = OP.Args(x, key, *rest)
    eps, heads = args.norm_eps, args.heads
    key_y = x.new_empty(0) if key is None else empty_result(key)
    key_rstd = x.new_empty(0) if key is None else _statistics(key, eps, heads)
    return empty_result(x), key_y, _statistics(x, eps, heads), key_rstd


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:
    args = OP.backward_signature.Args(*arguments)

    def like(grad: Tensor, saved: Tensor | None) -> Tensor:
        has_norm = args.norm_eps is not None
        return empty_result(saved if has_norm and saved is not None else grad)

    def of(weight: Tensor | None, needed: bool) -> Tensor:
        absent = weight is None or not needed
        return args.grad_y.new_empty(0) if absent else weight.new_empty(weight.shape)  # type: ignore[no-any-return, union-attr]

    grads = like(args.grad_y, args.x), like(args.grad_k_y, args.k)
    of_weights = of(args.norm_weight, args.need_norm_weight)
    return *grads, of_weights, of(args.k_norm_weight, args.need_k_norm_weight)


def _columns(*arguments: Any) -> int:
    """Count the whole dimensions: a norm across heads needs heads, columns and all between."""
    heads: int | None = OP.Args(*arguments).heads
    return 1 if heads is None else -heads


def _sample_rows(args: Any, rows: int) -> Sequence[Any]:
    """Take some rows. Positions are looked up first, since a table has other rows."""
    if args.positions is not None:
        cos, sin = (gather(table, args.positions) for table in (args.cos, args.sin))
        args = args._replace(cos=cos, sin=sin, positions=None)
    return take_rows(args, rows, _columns(*args), ())


def _size(leading: tuple[int, ...], row: tuple[int, ...]) -> tuple[Any, ...]:
    """Half of the columns are rotated, so that the pairing of columns matters."""
    x, rotated, norm = activation(*leading, *row), row[-1] // 4 * 2, parameter(row[-1])
    table = constant(*x.shape[-2:-1], rotated // 2)
    layout = (rotated, False, False)
    return (x, x, table, table, None, norm, norm, *layout, 1e-6, False, "none", None)


def _flops(x: Tensor, key: Tensor | None, *rest: Any) -> tuple[int, int]:
    elements = x.numel() + (0 if key is None else key.numel())
    has_norm = OP.Args(x, key, *rest).norm_eps is not None
    return (8 * elements, 13 * elements) if has_norm else (3 * elements, 3 * elements)


OP = Op(
    name=NAME,
    forward=f"(Tensor x, Tensor? k, {_TABLES}, {_HOW})"
    " -> (Tensor y, Tensor k_y, Tensor rstd, Tensor k_rstd)",
    backward=f"(Tensor grad_y, Tensor grad_k_y, Tensor? x, Tensor? k, {_TABLES}, {_HOW},"
    " Tensor? rstd, Tensor? k_rstd, bool need_norm_weight, bool need_k_norm_weight)"
    " -> (Tensor grad_x, Tensor grad_k, Tensor grad_norm_weight, Tensor grad_k_norm_weight)",
    inputs=prepare,
    reference=_reference,
    backward_reference=_backward_reference,
    fake_backward=_fake_backward,
    unsaved=_unsaved,
    check=check,
    fake=_fake,
    sharding=Rows(_columns),
    sized=_size,
    sample=_sample_rows,
    flops=_flops,
    dtypes=DTYPES,
    sources={
        "cpu": ("csrc/cpu/rotary.cpp",),
        "triton": ("triton_kernels/rotary.py",),
    },
    refuses=_refuses,
    left_to_compiler=lambda *_: True,
)
define(OP)
