"""dropout_add_layer_norm: dropout, the residual connection and layer_norm in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import dropout

from torchweld.dispatch.call import call
from torchweld.dispatch.kernels import define
from torchweld.dispatch.way import short
from torchweld.ops.norm import common as norms
from torchweld.ops.norm import layer_norm
from torchweld.ops.residual import common
from torchweld.random import Shard, drop
from torchweld.registry import Cases, Op, Rows
from torchweld.registry.cost import count_per_element


@short()
def dropout_add_layer_norm(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    *,
    normalized_shape: Sequence[int] | None = None,
    eps: float = 1e-5,
    return_residual: bool = False,
    y_dtype: torch.dtype | None = None,
    p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | int | None = None,
    shard: Shard | None = None,
) -> Any:
    """layer_norm(z) with z = dropout(input, p) + residual.

    Post-norm needs only the result; pre-norm also needs z, the residual stream:

        x, stream = dropout_add_layer_norm(x, stream, weight, bias, p=0.1, return_residual=True)

    Args:
        input: [*, *normalized_shape]; float32, bfloat16, float16 (or float64).
        residual: of input's shape; of input's dtype, or float32 and 16 bits in either order; None:
            zeros.
        weight, bias: of normalized_shape, in input's dtype, or float32 and 16 bits in either order.
        normalized_shape: the last dimensions of input, which are normalised; None: weight's shape,
            or without a weight the last dimension.
        eps: added to the variance, >= 0.
        return_residual: return (y, z).
        y_dtype: dtype of y: input's, or float32 for 16-bit input; None: input's, or under autocast
            torch's norm's: float32 on CUDA and with a float32 residual.
        p: probability that an element of input is dropped if training is true.
        training: False drops nothing.
        seed: what to drop, see torchweld.random; None draws one from torch's generator.
        shard: the place of input in a larger tensor, sharded only in dimensions before
            normalized_shape.

    Returns:
        y; z, of the wider of input's and residual's dtypes.
    """
    inputs = _inputs(
        input, residual, weight, bias, p, eps, training, seed, shard, normalized_shape, y_dtype
    )
    if residual is None and not OP.draws(inputs):
        z, wide_y, shape = input, inputs[-1], inputs[2]
        y = common.normalize_input(layer_norm.OP, wide_y, input, shape, (weight, bias), eps)
    else:
        z, y = call(OP, *inputs)
    return (y, z) if return_residual else y


def _inputs(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    p: float,
    eps: float,
    training: bool,
    seed: torch.Tensor | int | None,
    shard: Shard | None,
    normalized_shape: Sequence[int] | None,
    y_dtype: torch.dtype | None,
    **_: Any,
) -> tuple[Any, ...]:
    return common.inputs(
        OP,
        input,
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


def _reference(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    p: float,
    eps: float,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
    wide_y: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    if not common.is_plain_exact(x, residual, (weight, bias), eps, whole):
        _check(x, residual, normalized_shape, weight, bias, p, eps, seed, whole, offset, wide_y)
    dropping = (p, seed, whole, offset, len(normalized_shape))
    z = common.stream(x, residual, lambda x: drop(x, *dropping))
    y = common.normalize(layer_norm.OP, z, x, wide_y, normalized_shape, (weight, bias), eps)
    return z, y


def _plain(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    p: float,
    eps: float,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
    wide_y: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    z = common.stream(x, residual, lambda x: dropout(x, p, seed is not None))
    y = common.normalize(layer_norm.OP, z, x, wide_y, normalized_shape, (weight, bias), eps)
    return z, y


def _backward_reference(
    grad_z: torch.Tensor | None,
    grad_y: torch.Tensor | None,
    z: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    p: float,
    eps: float,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
    *rest: Any,
) -> tuple[torch.Tensor | None, ...]:
    input_dtype = rest[2]
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
        input_dtype,
        centered=True,
    )


def _check(
    x: Any,
    residual: Any,
    normalized_shape: Any,
    weight: Any,
    bias: Any,
    p: Any,
    eps: Any,
    seed: Any,
    whole: Any,
    offset: Any,
    wide_y: Any,
) -> None:
    common.check(
        OP, x, residual, normalized_shape, eps, seed, whole, offset, weight=weight, bias=bias
    )


def _fake(
    x: torch.Tensor, residual: torch.Tensor | None, normalized_shape: Sequence[int], *rest: Any
) -> tuple[torch.Tensor, ...]:
    z, y, statistic = common.fake(x, residual, normalized_shape, *rest)
    return z, y, statistic, torch.empty_like(statistic)


OP = Op(
    name="dropout_add_layer_norm",
    forward="(Tensor input, Tensor? residual, SymInt[] normalized_shape, Tensor? weight, Tensor?"
    " bias, float p, float eps, Tensor? seed, SymInt[]? whole, SymInt[]? offset, bool wide_y)"
    " -> (Tensor z, Tensor y, Tensor mean, Tensor rstd)",
    backward="(Tensor? grad_z, Tensor? grad_y, Tensor z, SymInt[] normalized_shape,"
    " Tensor? weight, Tensor? bias, float p, float eps, Tensor? seed, SymInt[]? whole,"
    " SymInt[]? offset, Tensor mean, Tensor rstd, ScalarType input_dtype, bool need_input,"
    " bool need_residual, bool need_weight, bool need_bias)"
    " -> (Tensor grad_input, Tensor grad_residual, Tensor grad_weight, Tensor grad_bias)",
    inputs=_inputs,
    reference=_reference,
    cases=Cases(
        plain=_plain,
        sized=common.sized(2, 1e-5),
        flops=count_per_element(11, 16),
        samples=common.samples(2, 1e-5),
        benchmarks=common.benchmarks(norms.MEASURED, 2, 1e-5),
        benchmarks_on_gpu=common.benchmarks(norms.MEASURED_ON_GPU, 2, 1e-5),
        tiny=common.benchmarks([(1, 64)], 2, 1e-5)[0],
        numerics=common.numerics(centered=True),
    ),
    backward_reference=_backward_reference,
    same_gradient=common.SAME_GRADIENT,
    check=_check,
    fake=_fake,
    sharding=Rows(common.columns),
    sources=common.SOURCES,
    small=2**19,
    eager_rounds=True,
)
define(OP)
