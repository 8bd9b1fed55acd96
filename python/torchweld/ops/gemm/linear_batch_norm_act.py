"""linear_batch_norm_act: torch's GEMM, then batch_norm_act on its result.

    y = batch_norm_act(x weight^T + bias)

Read on in: python/torchweld/ops/batch_norm/batch_norm_act.py,
python/torchweld/ops/batch_norm/statistics.py, python/torchweld/ops/gemm/gemm.py,
csrc/cpu/batch_norm.cpp, triton_kernels/batch_norm.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, float32
from torch.nn.functional import linear

from torchweld import checks
from torchweld.dispatch.bare import BareOp
from torchweld.dispatch.call import call, decide, run_checkpointed, run_on
from torchweld.dispatch.warm.cache import short
from torchweld.dispatch.warm.guards import are_comparable
from torchweld.names import ActivationName, Approximation
from torchweld.ops.batch_norm import batch_norm_act, statistics
from torchweld.ops.batch_norm import columns as of_columns
from torchweld.ops.batch_norm.normalize_act import NORMALIZE_ACT
from torchweld.ops.gemm import common as layers
from torchweld.ops.gemm import gemm
from torchweld.registry import ROWS, Composite, constant, parameter, variance
from torchweld.registry.cost import count_for_gemms


@short()
def linear_batch_norm_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    *,
    process_group: Any = None,
    activation: ActivationName = "gelu",
    approximate: Approximation = "none",
    recompute: bool = False,
) -> Tensor:
    """activation(batch_norm(linear(input, weight, bias))); every output feature is a channel.

    It saves input and the GEMM's result for the backward pass. In training the bias is not added,
    since subtracting the mean would cancel it: it only enters the running mean, and its gradient
    is zero.

    Args:
        input: [*, in_features], every leading dimension a part of the batch; float32, bfloat16,
            float16 (or float64).
        weight: [out_features, in_features].
        bias: [out_features].
        running_mean, running_var: [out_features], in input's dtype, or float32 and 16 bits in
            either order; required in evaluation; updated in training, where they may be None.
        bn_weight, bn_bias: [out_features], in input's dtype, or float32 and 16 bits in either
            order.
        training: normalise with the statistics of this batch.
        momentum: the weight of this batch in the running statistics; a tensor of one element if it
            changes from step to step.
        eps: added to the variance, >= 0; > 0 in training.
        process_group: in training, statistics cover the rows of all its processes, see
            batch_norm_act; None: only this process's.
        activation: "gelu", "relu", "silu" or another of bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".
        recompute: save only input, and recompute the rest in the backward pass.

    Returns:
        A tensor [*, out_features].
    """
    how = (training, momentum, eps, process_group, activation, approximate)

    running, affine = (running_mean, running_var), (bn_weight, bn_bias)
    if not (recompute and gemm.wants_gradient(input, weight, bias, *affine)):
        return decide(OP, input, weight, bias, *running, *affine, *how)  # type: ignore[no-any-return]

    # Running statistics are not passed as arguments: a checkpoint checks its arguments for changes.
    def run(input: Tensor, weight: Tensor, bias: Tensor | None, *affine: Tensor | None) -> Tensor:
        return call(OP, input, weight, bias, *running, *affine, *how)

    return run_checkpointed(run, input, weight, bias, *affine)


# normalize_act in place: no new pages, and half the lines in the caches.
_IN_PLACE = BareOp(
    "normalize_act_",
    "(Tensor(a!) input, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, float eps,"
    " str activation, str approximate) -> ()",
)
_normalize_act_ = _IN_PLACE.overload("cpu")


def _plan(backend: str, x: Tensor, *rest: Any) -> Callable[..., Tensor]:
    weight, bias, *columns, training, momentum, eps, group, activation, approximate = rest
    running_mean, running_var, bn_weight, bn_bias = columns
    kind, width = (activation, approximate), weight.shape[:1]
    statistics.check_numbers(OP, training, momentum, eps)
    if not layers.fits(x, weight, bias) or not checks.all_dense(x, *columns):
        _check(x, *rest)
    dtype = gemm.find_dtype(x)
    if checks.autocasts(x.device.type):
        kinds = {t.dtype for t in columns if t is not None}
        if dtype.itemsize == 2 and not kinds <= {float32, dtype}:
            return _reference  # columns of the other 16 bits
    is_plain, z = are_comparable((x, *rest)), x
    if is_plain:
        needs_z = gemm.wants_gradient(x, weight, None if training else bias)
        z = x.new_empty(0, dtype=dtype).requires_grad_(needs_z)
    if training:
        if not batch_norm_act.is_training(x, width, columns, group):
            _check(x, *rest)
        columns = [*columns[:3], _add_nothing(bias, bn_weight, bn_bias)]
        how = (momentum, eps, group, *kind)
        return partial(_train, batch_norm_act.plan_training(backend, z, columns, *how))
    if not of_columns.are_running(x, width, running_mean, running_var):
        _check(x, *rest)
    trains = gemm.wants_gradient(x, weight, bias, bn_weight, bn_bias)
    if is_plain and backend == "cpu" and not trains:
        return partial(_evaluate_in_place, (eps, *kind))
    if is_plain and (trains or bias is None):
        plan = batch_norm_act.plan_evaluation(backend, z, columns, eps, *kind)
        return partial(_differentiate, plan)
    return partial(_evaluate, backend)


def _add_nothing(
    bias: Tensor | None, bn_weight: Tensor | None, bn_bias: Tensor | None
) -> Tensor | None:
    """The norm's bias with zero times the layer's, whose gradient is zero and not absent."""
    if bias is None:
        return bn_bias
    like = next(t for t in (bn_bias, bn_weight, bias) if t is not None)
    alike = bias.to(like.dtype)
    return alike * 0 if bn_bias is None else bn_bias.add(alike, alpha=0)


def _evaluate_in_place(how: tuple[Any, ...], x: Tensor, *rest: Any) -> Tensor:
    weight, bias, mean, var, bn_weight, bn_bias, *_ = rest
    z = gemm.linear(x, weight)
    if bias is not None:
        mean, var = of_columns.wide(mean) - bias, of_columns.wide(var)
    _IN_PLACE.direct(z, mean, var, bn_weight, bn_bias, *how)
    return z


def _train(inner: Callable[..., Tensor], x: Tensor, *rest: Any) -> Tensor:
    weight, bias, mean, var, bn_weight, bn_bias, *how = rest
    columns = (mean, var, bn_weight, _add_nothing(bias, bn_weight, bn_bias))
    return inner(gemm.linear(x, weight), *columns, *how, offset=bias)


def _differentiate(inner: Callable[..., Tensor], x: Tensor, *rest: Any) -> Tensor:
    weight, bias, *columns = rest
    return inner(gemm.linear(x, weight, bias), *columns[:4])


def _evaluate(backend: str, x: Tensor, *rest: Any) -> Tensor:
    weight, bias, mean, var, bn_weight, bn_bias, _, _, eps, _, *kind = rest
    trained = gemm.wants_gradient(x, weight, bias, bn_weight, bn_bias)
    z = gemm.linear(x, weight, bias if trained else None)
    if bias is not None and not trained:  # subtracted from the mean instead of added to z
        mean, var = of_columns.wide(mean) - bias, of_columns.wide(var)
    arguments = (z, mean, var, bn_weight, bn_bias, eps, *kind)
    if backend == "cpu" and not trained and layers.may_overwrite(z):
        _normalize_act_(*arguments)
        return z
    return run_on(NORMALIZE_ACT, backend, *arguments)


def _reference(x: Tensor, *rest: Any) -> Tensor:
    weight, bias, *columns, training, momentum, eps, group, _, _ = rest
    statistics.check_numbers(OP, training, momentum, eps)
    if not layers.fits(x, weight, bias):
        _check(x, *rest)
    z = linear(x, weight, bias)
    wrong = training and not batch_norm_act.is_training(z, z.shape[-1:], columns, group)
    if wrong or of_columns.unlike(z, *columns):
        _check(x, *rest)
    return batch_norm_act.reference(OP, z, *rest[2:])


def _check(x: Any, weight: Any, bias: Any, *rest: Any) -> None:
    running_mean, running_var, bn_weight, bn_bias, training, momentum, eps, group, *kind = rest
    layers.check(OP.name, x, jagged=False, weight=weight, bias=bias)
    running = {"running_mean": running_mean, "running_var": running_var}
    pairs = running, {"bn_weight": bn_weight, "bn_bias": bn_bias}
    of_columns.check_columns(OP, x, weight.shape[:1], "the rows of weight", eps, kind, *pairs)
    batch_norm_act.check_training(OP, x, running, training, momentum, group)


def _size(leading: tuple[int, ...], row: tuple[int, ...]) -> tuple[Any, ...]:
    columns = (constant(*row), variance(*row), parameter(*row), parameter(*row))
    how = (True, 0.1, 1e-5, None, "gelu", "none")
    return (*layers.arguments(leading, *row, *row), *columns, *how)


OP = Composite(
    name="linear_batch_norm_act",
    forward="(Tensor input, Tensor weight, Tensor? bias, Tensor? running_mean, Tensor? running_var,"
    " Tensor? bn_weight, Tensor? bn_bias, bool training, float momentum, float eps,"
    " Any process_group, str activation, str approximate) -> (Tensor y)",
    backward="(Tensor grad_y, Tensor input, Tensor weight, Tensor? bias, Tensor? bn_weight,"
    " Tensor? bn_bias, bool training, float eps, Any process_group, str activation,"
    " str approximate) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias,"
    " Tensor grad_bn_weight, Tensor grad_bn_bias)",
    reference=_reference,
    plan=_plan,
    check=_check,
    fake=lambda x, weight, *_: (x.new_empty((*x.shape[:-1], weight.shape[0])),),
    sharding=ROWS,
    sized=_size,
    flops=lambda x, weight, *_: count_for_gemms(x.numel() * weight.shape[0]),
    sources=of_columns.SOURCES,
    slower=(torch.float64,),
    eager_rounds=True,
)
