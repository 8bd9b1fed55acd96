"""dropout_add_rms_norm: dropout, the residual connection and rms_norm in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import dropout

from torchweld.dispatch.call import call
from torchweld.dispatch.kernels import define
from torchweld.ops.norm import common as norms
from torchweld.ops.norm import rms_norm
from torchweld.ops.residual import common
from torchweld.random import Shard, drop
from torchweld.registry import Op, Rows
from torchweld.registry.cost import per_element


def dropout_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    *,
    p: float = 0.0,
    eps: float | None = None,
    training: bool = True,
    return_residual: bool = False,
    seed: torch.Tensor | int | None = None,
    shard: Shard | None = None,
    normalized_shape: Sequence[int] | None = None,
    y_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """rms_norm(z) with z = dropout(x, p) + residual.

    Post-norm needs only the result; pre-norm also needs z, the residual stream:

        x, stream = dropout_add_rms_norm(x, stream, weight, p=0.1, return_residual=True)

    Args:
        x: [*, *normalized_shape]; float32, bfloat16, float16 (or float64).
        residual: of x's shape; of x's dtype, or float32 and 16 bits in either order; None: zeros.
        weight: of normalized_shape, in x's dtype, or float32 and 16 bits in either order.
        p: probability that an element of x is dropped if training is true.
        eps: added to the mean square, >= 0; None: as in rms_norm.
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
    given = _inputs(x, residual, weight, p, eps, training, seed, shard, normalized_shape, y_dtype)
    if residual is None and not OP.draws(given):
        z, y = x, common.alone(rms_norm.OP, given[-1], x, given[2], (weight,), eps)
    else:
        z, y = call(OP, *given)
    return (y, z) if return_residual else y


def _inputs(x, residual, weight, p, eps, training, seed, shard, normalized_shape, y_dtype, **_):
    return common.inputs(
        OP,
        x,
        residual,
        (weight,),
        p,
        eps,
        training,
        seed,
        shard,
        normalized_shape,
        y_dtype,
        rms_norm.OP,
    )


def _reference(x, residual, normalized_shape, weight, p, eps, seed, whole, offset, wide_y):
    if not common.plainly_right(x, residual, (weight,), eps, whole):
        _check(x, residual, normalized_shape, weight, p, eps, seed, whole, offset, wide_y)
    dropping = (p, seed, whole, offset, len(normalized_shape))
    z = common.stream(x, residual, lambda x: drop(x, *dropping))
    y = common.normalized(rms_norm.OP, z, x, wide_y, normalized_shape, (weight,), eps)
    return z, y


def _plain(x, residual, normalized_shape, weight, p, eps, seed, whole, offset, wide_y):
    z = common.stream(x, residual, lambda x: dropout(x, p, seed is not None))
    y = common.normalized(rms_norm.OP, z, x, wide_y, normalized_shape, (weight,), eps)
    return z, y


def _backward_reference(
    grad_z, grad_y, z, normalized_shape, weight, p, eps, seed, whole, offset, *rest
):
    x_dtype = rest[1]
    return common.gradients(
        grad_z,
        grad_y,
        z,
        normalized_shape,
        (weight,),
        p,
        eps,
        seed,
        whole,
        offset,
        x_dtype,
        centered=False,
    )


def _check(x, residual, normalized_shape, weight, p, eps, seed, whole, offset, wide_y):
    eps = 0.0 if eps is None else eps
    common.check(OP, x, residual, normalized_shape, eps, seed, whole, offset, weight=weight)


def _fake(x, residual, normalized_shape, *rest):
    return common.fake(x, residual, normalized_shape, *rest)


OP = Op(
    name="dropout_add_rms_norm",
    forward="(Tensor x, Tensor? residual, SymInt[] normalized_shape, Tensor? weight,"
    " float p, float? eps, Tensor? seed, SymInt[]? whole, SymInt[]? offset, bool wide_y)"
    " -> (Tensor z, Tensor y, Tensor rstd)",
    backward="(Tensor? grad_z, Tensor? grad_y, Tensor z, SymInt[] normalized_shape,"
    " Tensor? weight, float p, float? eps, Tensor? seed, SymInt[]? whole,"
    " SymInt[]? offset, Tensor rstd, ScalarType x_dtype, bool need_x,"
    " bool need_residual, bool need_weight)"
    " -> (Tensor grad_x, Tensor grad_residual, Tensor grad_weight)",
    inputs=_inputs,
    reference=_reference,
    plain=_plain,
    backward_reference=_backward_reference,
    same_gradient=common.SAME_GRADIENT,
    check=_check,
    fake=_fake,
    sharding=Rows(common.columns),
    sized=common.sized(1, 1e-5),
    flops=per_element(8, 14),
    sources=common.SOURCES,
    samples=common.samples(1, 1e-6),
    benchmarks=common.benchmarks(norms.MEASURED, 1, 1e-6),
    benchmarks_on_gpu=common.benchmarks(norms.MEASURED_ON_GPU, 1, 1e-6),
    tiny=common.benchmarks([(1, 64)], 1, 1e-6)[0],
    numerics=common.numerics(centered=False),
    small=8192,
    eager_rounds=True,
)
define(OP)
