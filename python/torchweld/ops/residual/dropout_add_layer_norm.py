"""dropout_add_layer_norm: dropout, the residual connection and layer_norm in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import dropout

from torchweld.dispatch.call import call
from torchweld.dispatch.kernels import define
from torchweld.ops.norm import common as norms
from torchweld.ops.norm import layer_norm
from torchweld.ops.residual import common
from torchweld.random import Shard, drop
from torchweld.registry import Op, Rows
from torchweld.registry.cost import per_element


def dropout_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    p: float = 0.0,
    eps: float = 1e-5,
    training: bool = True,
    return_residual: bool = False,
    seed: torch.Tensor | int | None = None,
    shard: Shard | None = None,
    normalized_shape: Sequence[int] | None = None,
    y_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """layer_norm(z) with z = dropout(x, p) + residual.

    Post-norm needs only the result; pre-norm also needs z, the residual stream:

        x, stream = dropout_add_layer_norm(x, stream, weight, bias, p=0.1, return_residual=True)

    Args:
        x: [*, *normalized_shape]; float32, bfloat16, float16 (or float64).
        residual: of x's shape; of x's dtype, or float32 and 16 bits in either order; None: zeros.
        weight, bias: of normalized_shape, in x's dtype, or float32 and 16 bits in either order.
        p: probability that an element of x is dropped if training is true.
        eps: added to the variance, >= 0.
        training: False drops nothing.
        return_residual: return (y, z).
        seed: what to drop, see torchweld.random; None draws one from torch's generator.
        shard: the place of x in a larger tensor, sharded only in dimensions before
            normalized_shape.
        normalized_shape: the last dimensions of x, which are normalised; None: weight's shape, or
            without a weight the last dimension.
        y_dtype: dtype of y: x's, or float32 beside a 16-bit x; None: x's, or under autocast that of
            torch's norm: float32 on CUDA and beside a float32 residual.

    Returns:
        y; z, of the wider of x's and residual's dtypes.
    """
    given = _inputs(
        x, residual, weight, bias, p, eps, training, seed, shard, normalized_shape, y_dtype
    )
    if residual is None and not OP.draws(given):
        z, y = x, common.alone(layer_norm.OP, given[-1], x, given[2], (weight, bias), eps)
    else:
        z, y = call(OP, *given)
    return (y, z) if return_residual else y


def _inputs(
    x, residual, weight, bias, p, eps, training, seed, shard, normalized_shape, y_dtype, **_
):
    return common.inputs(
        OP,
        x,
        residual,
        (weight, bias),
        p,
        eps,
        training,
        seed,
        shard,
        normalized_shape,
        y_dtype,
        layer_norm.OP,
    )


def _reference(x, residual, normalized_shape, weight, bias, p, eps, seed, whole, offset, wide_y):
    if not common.plainly_right(x, residual, (weight, bias), eps, whole):
        _check(x, residual, normalized_shape, weight, bias, p, eps, seed, whole, offset, wide_y)
    dropping = (p, seed, whole, offset, len(normalized_shape))
    z = common.stream(x, residual, lambda x: drop(x, *dropping))
    y = common.normalized(layer_norm.OP, z, x, wide_y, normalized_shape, (weight, bias), eps)
    return z, y


def _plain(x, residual, normalized_shape, weight, bias, p, eps, seed, whole, offset, wide_y):
    z = common.stream(x, residual, lambda x: dropout(x, p, seed is not None))
    y = common.normalized(layer_norm.OP, z, x, wide_y, normalized_shape, (weight, bias), eps)
    return z, y


def _backward_reference(
    grad_z, grad_y, z, normalized_shape, weight, bias, p, eps, seed, whole, offset, *rest
):
    x_dtype = rest[2]
    return common.gradients(
        grad_z,
        grad_y,
        z,
        normalized_shape,
        (weight, bias),
        p,
        eps,
        seed,
        whole,
        offset,
        x_dtype,
        centered=True,
    )


def _check(x, residual, normalized_shape, weight, bias, p, eps, seed, whole, offset, wide_y):
    common.check(
        OP, x, residual, normalized_shape, eps, seed, whole, offset, weight=weight, bias=bias
    )


def _fake(x, residual, normalized_shape, *rest):
    z, y, statistic = common.fake(x, residual, normalized_shape, *rest)
    return z, y, statistic, torch.empty_like(statistic)


OP = Op(
    name="dropout_add_layer_norm",
    forward="(Tensor x, Tensor? residual, SymInt[] normalized_shape, Tensor? weight, Tensor? bias,"
    " float p, float eps, Tensor? seed, SymInt[]? whole, SymInt[]? offset, bool wide_y)"
    " -> (Tensor z, Tensor y, Tensor mean, Tensor rstd)",
    backward="(Tensor? grad_z, Tensor? grad_y, Tensor z, SymInt[] normalized_shape,"
    " Tensor? weight, Tensor? bias, float p, float eps, Tensor? seed, SymInt[]? whole,"
    " SymInt[]? offset, Tensor mean, Tensor rstd, ScalarType x_dtype, bool need_x,"
    " bool need_residual, bool need_weight, bool need_bias)"
    " -> (Tensor grad_x, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)",
    inputs=_inputs,
    reference=_reference,
    plain=_plain,
    backward_reference=_backward_reference,
    same_gradient=common.SAME_GRADIENT,
    check=_check,
    fake=_fake,
    sharding=Rows(common.columns),
    sized=common.sized(2, 1e-5),
    flops=per_element(11, 16),
    sources=common.SOURCES,
    samples=common.samples(2, 1e-5),
    benchmarks=common.benchmarks(norms.MEASURED, 2, 1e-5),
    benchmarks_on_gpu=common.benchmarks(norms.MEASURED_ON_GPU, 2, 1e-5),
    tiny=common.benchmarks([(1, 64)], 2, 1e-5)[0],
    numerics=common.numerics(centered=True),
    small=2**19,
    eager_rounds=True,
)
define(OP)
