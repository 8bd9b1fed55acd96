"""bias_dropout_add: bias, dropout and the addition to a residual stream in one pass."""

from __future__ import annotations

import torch

from torchweld import checks
from torchweld.dispatch.call import call
from torchweld.dispatch.kernels import define
from torchweld.errors import ArgumentError
from torchweld.ops.norm.common import MEASURED, MEASURED_ON_GPU
from torchweld.ops.residual.common import as_wide
from torchweld.random import Shard, drawn, drop, place
from torchweld.registry import ELEMENTS, SEED, Numerics, Op, activation, parameter, residual
from torchweld.registry.cost import per_element


def bias_dropout_add(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    p: float = 0.0,
    training: bool = True,
    *,
    seed: torch.Tensor | int | None = None,
    shard: Shard | None = None,
) -> torch.Tensor:
    """residual + dropout(x + bias, p).

    Args:
        x: [*, width]; float32, bfloat16, float16 (or float64).
        bias: [width], in x's dtype, or float32 beside a 16-bit x; None: no bias.
        residual: of x's shape; of x's dtype, or float32 and 16 bits in either order.
        p: probability that an element is dropped if training is true.
        training: False drops nothing.
        seed: what to drop, see torchweld.random; None draws one from torch's generator.
        shard: the place of x in a larger tensor, sharded in any dimensions.

    Returns:
        A contiguous tensor of residual's shape, of the wider of the two dtypes. The backward needs
        only the seed and the bias.
    """
    return call(OP, *_inputs(x, bias, residual, p, training, seed, shard))


def _inputs(x, bias, residual, p, training, seed, shard):
    p, seed = drawn("bias_dropout_add", "x", x, p, training, seed)
    return x, bias, as_wide(residual, x), p, seed, *place(shard)


def _plainly_right(x, bias, residual, whole):
    """Whether the full check can be skipped; torch itself would accept more."""
    return (
        x.dtype in OP.dtypes
        and x.ndim > 0
        and residual.dtype is x.dtype
        and residual.shape == x.shape
        and (bias is None or (bias.dtype is x.dtype and bias.shape == x.shape[-1:]))
        and not whole
        and checks.all_dense(x, bias, residual)
    )


def _reference(x, bias, residual, p, seed, whole, offset):
    if not _plainly_right(x, bias, residual, whole):
        _check(x, bias, residual, p, seed, whole, offset)
    if residual.dtype is not x.dtype:  # add to a wider residual without rounding first
        x = x.to(torch.promote_types(x.dtype, residual.dtype))
    y = x if bias is None else x + bias
    return (residual + drop(y, p, seed, whole, offset)).to(residual.dtype).contiguous()


def _plain(x, bias, residual, p, seed, whole, offset):
    y = x if bias is None else x + bias
    y = torch.nn.functional.dropout(y, p) if seed is not None else y
    return (residual + y).to(residual.dtype)


def _backward_reference(grad_y, bias, p, seed, whole, offset, x_dtype, need_x, need_bias):
    grad = drop(grad_y, p, seed, whole, offset)
    grad_bias = None if bias is None else grad.sum_to_size(bias.shape).to(bias.dtype)
    return grad.to(x_dtype), grad_bias


def _check(x, bias, residual, p, seed, whole, offset):
    name = OP.name
    checks.dense(name, "x", x, OP.dtypes, jagged=seed is None)
    if x.ndim == 0:
        raise ArgumentError(name, "x", "of no dimensions", "at least one")
    dtypes = checks.beside(x)
    if bias is not None:
        checks.dense(name, "bias", bias, dtypes, "x")
        checks.like(name, "bias", bias, x, "x")
        checks.shaped(name, "bias", bias, x.shape[-1:], "x's last dimension")
    checks.dense(name, "residual", residual, dtypes, "x", jagged=x.is_nested)
    checks.like(name, "residual", residual, x, "x")
    checks.shaped(name, "residual", residual, x.shape, "x's shape")
    checks.dropout(name, "x", x, seed, whole, offset)


def _fake(x, bias, residual, p, seed, whole, offset):
    return (torch.empty_like(residual, memory_format=torch.contiguous_format),)


def _terms(x, bias, residual, p, seed, whole, offset, *, grad_y):
    """Sums of magnitudes."""
    added = x.double().abs() if bias is None else x.double().abs() + bias.double().abs()
    grad_x = drop(grad_y.double().abs(), p, seed, whole, offset)
    return {
        "y": residual.double().abs() + drop(added, p, seed, whole, offset),
        "grad_x": grad_x,
        "grad_bias": grad_x.sum_to_size(grad_x.shape[-1:]),
        "grad_residual": grad_y.double().abs(),
    }


def _sample(shape, p, *, bias=True, whole=(), offset=()):
    tensors = (activation(*shape), parameter(shape[-1]) if bias else None, residual(*shape))
    return (*tensors, p, SEED if p else None, list(whole), list(offset))


# Tests resize the first one.
_SAMPLES = (
    _sample((5, 48), 0.1),
    _sample((1,), 0.0),
    _sample((3, 1), 0.5),
    _sample((7,), 0.25),
    _sample((5, 7), 0.25, bias=False),
    _sample((5, 7), 0.0, bias=False),
    _sample((2, 3, 31), 0.9),
    _sample((33, 64), 0.0),
    _sample((4, 50, 768), 0.1),
    _sample((17, 1000), 0.0),
    _sample((2, 8193), 0.1),
    _sample((2, 3, 2, 3, 5, 9), 1.0),
    _sample((2, 2, 4, 18), 0.3, whole=(2, 6, 9, 64), offset=(0, 3, 5, 27)),
    _sample((0, 64), 0.1),
    _sample((2, 0, 7), 0.0),
    _sample((3, 0), 0.1),
)


def _measured(shapes):
    return tuple(_sample(shape, p) for shape in shapes for p in (0.0, 0.1))


OP = Op(
    name="bias_dropout_add",
    forward="(Tensor x, Tensor? bias, Tensor residual, float p, Tensor? seed, SymInt[]? whole,"
    " SymInt[]? offset) -> Tensor y",
    backward="(Tensor grad_y, Tensor? bias, float p, Tensor? seed, SymInt[]? whole,"
    " SymInt[]? offset, ScalarType x_dtype, bool need_x, bool need_bias)"
    " -> (Tensor grad_x, Tensor grad_bias)",
    inputs=_inputs,
    reference=_reference,
    plain=_plain,
    backward_reference=_backward_reference,
    same_gradient={
        "residual": ("grad_y", lambda *_: True),
        "x": (
            "grad_y",
            lambda x, _, residual, p, seed, *__: seed is None and x.dtype is residual.dtype,
        ),
    },
    check=_check,
    fake=_fake,
    sharding=ELEMENTS,
    sized=lambda leading, row: _sample((*leading, *row), 0.1),
    flops=per_element(4, 2),
    sources={
        "cpu": ("csrc/cpu/bias_dropout_add.cpp",),
        "triton": ("triton_kernels/bias_dropout_add.py",),
    },
    samples=_SAMPLES,
    benchmarks=_measured(MEASURED),
    benchmarks_on_gpu=_measured(MEASURED_ON_GPU),
    tiny=_sample((1, 64), 0.1),
    numerics=Numerics(
        fp32=dict.fromkeys(("y", "grad_x", "grad_bias", "grad_residual"), 2.0), terms=_terms
    ),
    small=2**20,
    eager_rounds=True,
)
define(OP)
