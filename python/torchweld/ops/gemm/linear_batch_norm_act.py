"""linear_batch_norm_act: torch's GEMM, then batch_norm_act on its result."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from torchweld import checks
from torchweld.dispatch.bare import BareOp
from torchweld.dispatch.call import call, run_checkpointed, run_on
from torchweld.dispatch.way import short
from torchweld.names import ActivationName, Approximation
from torchweld.ops.activation import common as activations
from torchweld.ops.batch_norm import batch_norm_act, normalize_act
from torchweld.ops.batch_norm import common as batch_norms
from torchweld.ops.gemm import common as layers
from torchweld.ops.gemm import gemm
from torchweld.registry import ROWS, Cases, Composite, Numerics, constant, parameter, variance
from torchweld.registry.cost import count_for_gemms


@short()
def linear_batch_norm_act(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    bn_weight: torch.Tensor | None = None,
    bn_bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float | torch.Tensor = 0.1,
    eps: float = 1e-5,
    *,
    process_group: Any = None,
    activation: ActivationName = "gelu",
    approximate: Approximation = "none",
    recompute: bool = False,
) -> torch.Tensor:
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
        eps: added to the variance, >= 0.
        process_group: in training, statistics cover the rows of all its processes, see
            batch_norm_act; None: only this process's.
        activation: "gelu", "relu", "silu" or another of bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".
        recompute: save only input, and recompute the rest in the backward pass.

    Returns:
        A tensor [*, out_features].
    """
    how = (training, momentum, eps, process_group, activation, approximate)

    # Running statistics are not passed as arguments: a checkpoint checks its arguments for changes.
    def run(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        bn_weight: torch.Tensor | None,
        bn_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        return call(OP, input, weight, bias, running_mean, running_var, bn_weight, bn_bias, *how)

    learnt = (weight, bias, bn_weight, bn_bias)
    if recompute and torch.is_grad_enabled():
        return run_checkpointed(run, input, *learnt)
    return run(input, *learnt)


# normalize_act in place: no new pages, and half the lines in the caches.
BareOp(
    "normalize_act_",
    "(Tensor(a!) input, Tensor mean, Tensor var, Tensor? weight, Tensor? bias, float eps,"
    " str activation, str approximate) -> ()",
)


def _fused(
    backend: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    bn_weight: torch.Tensor | None,
    bn_bias: torch.Tensor | None,
    *how: Any,
) -> torch.Tensor:
    training, momentum, eps, group, *kind = how
    tensors = (x, weight, bias, running_mean, running_var, bn_weight, bn_bias)
    if not layers.fits(x, weight, bias) or not checks.all_dense(x, *tensors[3:]):
        _check(*tensors, *how)
    if not training:
        if not batch_norms.are_running(x, weight.shape[:1], running_mean, running_var):
            _check(*tensors, *how)
        mean, var = batch_norms.present(running_mean), batch_norms.present(running_var)
        return _evaluate(backend, x, weight, bias, mean, var, bn_weight, bn_bias, eps, *kind)
    z = gemm.linear(x, weight)
    if not batch_norm_act.is_training(z, running_mean, running_var, group):
        _check(*tensors, *how)
    if bias is not None:  # its gradient is zero, not absent
        like = next(t for t in (bn_bias, bn_weight, bias) if t is not None)
        alike = bias.to(like.dtype)
        bn_bias = alike * 0 if bn_bias is None else bn_bias.add(alike, alpha=0)
    columns = (running_mean, running_var, bn_weight, bn_bias)
    return batch_norm_act.normalize_training(
        backend, z, *columns, momentum, eps, group, *kind, offset=bias
    )


def _evaluate(
    backend: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    bn_weight: torch.Tensor | None,
    bn_bias: torch.Tensor | None,
    eps: float,
    *kind: str,
) -> torch.Tensor:
    trained = gemm.wants_gradient(x, weight, bias, bn_weight, bn_bias)
    z = gemm.linear(x, weight, bias if trained else None)
    if bias is not None and not trained:  # subtracted from the mean instead of added to z
        mean, var = batch_norms.wide(mean) - bias, batch_norms.wide(var)
    arguments = (z, mean, var, bn_weight, bn_bias, eps, *kind)
    if backend == "cpu" and not trained and layers.may_overwrite(z):
        torch.ops.torchweld.normalize_act_.cpu(*arguments)
        return z
    return run_on(normalize_act.OP, backend, *arguments)


def _reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    bn_weight: torch.Tensor | None,
    bn_bias: torch.Tensor | None,
    *how: Any,
) -> torch.Tensor:
    tensors = (x, weight, bias, running_mean, running_var, bn_weight, bn_bias)
    training, _, eps, group, *_ = how
    if not layers.fits(x, weight, bias) or not eps >= 0:
        _check(*tensors, *how)
    z = linear(x, weight, bias)
    wrong = training and not batch_norm_act.is_training(z, running_mean, running_var, group)
    if wrong or batch_norms.unlike(z, *tensors[3:]):
        _check(*tensors, *how)
    return batch_norm_act.reference(OP, z, running_mean, running_var, bn_weight, bn_bias, *how)


def _check(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    bn_weight: Any,
    bn_bias: Any,
    *how: Any,
) -> None:
    training, momentum, eps, group, *kind = how
    layers.check(OP.name, x, jagged=False, weight=weight, bias=bias)
    running = {"running_mean": running_mean, "running_var": running_var}
    pairs = running, {"bn_weight": bn_weight, "bn_bias": bn_bias}
    batch_norms.check_columns(OP, x, weight.shape[:1], "the rows of weight", eps, kind, *pairs)
    batch_norm_act.check_training(OP, x, running, training, momentum, group)


def _fake(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return (x.new_empty((*x.shape[:-1], weight.shape[0])),)


def _terms(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    bn_weight: torch.Tensor | None,
    bn_bias: torch.Tensor | None,
    *how: Any,
    grad_y: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """batch_norm_act's terms, counting every product of the GEMMs as a term."""
    training, _, eps, _, *kind = how
    x, weight = x.double(), weight.double()
    shift = x.new_zeros(()) if bias is None else bias.double()
    z = linear(x, weight) + shift
    x, weight = x.abs(), weight.abs()
    size = linear(x, weight) + shift.abs()
    mean, var = (None, None) if training else (running_mean, running_var)
    terms = batch_norms.terms(z, size, mean, var, bn_weight, bn_bias, eps, tuple(kind), grad_y)
    grad_z = terms["grad_input"]
    return {
        "y": terms["y"],
        "grad_input": grad_z @ weight,
        "grad_weight": layers.outer(grad_z, x),
        "grad_bias": grad_z.sum_to_size(grad_z.shape[-1:]),
        "grad_bn_weight": terms["grad_weight"],
        "grad_bn_bias": terms["grad_bias"],
    }


def _arguments(
    rows: tuple[int, ...],
    width: int,
    features: int,
    training: bool,
    *kind: str,
    bias: bool = False,
    tracked: bool = True,
) -> tuple[Any, ...]:
    x, weight, with_bias = layers.arguments(rows, width, features)
    running = (constant(features), variance(features)) if tracked else (None, None)
    columns = (*running, parameter(features), parameter(features))
    how = (training, 0.1, 1e-5, None)
    return (x, weight, with_bias if bias else None, *columns, *how, *kind)


def _samples() -> tuple[tuple[Any, ...], ...]:
    """Training samples have no bias: its gradient is zero, and eager's is only rounding error.

    relu is left to tests/ops/test_batch_norm.py: its derivative jumps where a 16-bit z is rounded.
    """
    gelu, *others = [kind for kind in activations.KINDS if kind[0] != "relu"]
    shapes = (((8,), 3, 5), ((24,), 5, 7), ((2, 9), 31, 13), ((256,), 67, 127), ((17,), 7, 8193))
    samples = [
        _arguments(rows, width, features, True, *gelu, tracked=features != 7)
        for rows, width, features in (*shapes, ((0,), 8, 5))
    ]
    samples += [_arguments(*shapes[3], True, *kind) for kind in others[:2]]
    evaluated = (((1,), 3, 5), ((3,), 5, 4096), *shapes, ((0,), 8, 5))
    samples += [
        _arguments(rows, width, features, False, *gelu, bias=True)
        for rows, width, features in evaluated
    ]
    samples.append(_arguments(*shapes[3], False, "silu", "none"))
    # Last, so that a new activation does not change the seeds of the others.
    return (*samples, *(_arguments(*shapes[3], True, *kind) for kind in others[2:]))


_RESULTS = ("y", "grad_input", "grad_weight", "grad_bias", "grad_bn_weight", "grad_bn_bias")

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
    fused=_fused,
    check=_check,
    fake=_fake,
    sharding=ROWS,
    cases=Cases(
        sized=lambda leading, row: _arguments(
            leading, row[0], row[0], True, "gelu", "none", bias=True
        ),
        flops=lambda x, weight, *_: count_for_gemms(x.numel() * weight.shape[0]),
        samples=_samples(),
        benchmarks=tuple(
            _arguments((rows,), width, features, True, "gelu", "none", bias=True)
            for rows, width, features in ((64, 768, 3072), (2048, 768, 3072), (2048, 4096, 11008))
        ),
        benchmarks_on_gpu=tuple(
            _arguments((8192,), *features, True, "gelu", "none", bias=True)
            for features in ((1024, 4096), (4096, 16384))
        ),
        tiny=_arguments((2,), 64, 64, True, "gelu", "none", bias=True),
        # A 16-bit z, or its gradient, is rounded before the result is.
        numerics=Numerics(
            fp32=dict.fromkeys(_RESULTS, 2.5), terms=_terms, rounding=dict.fromkeys(_RESULTS, 2.0)
        ),
    ),
    sources=batch_norms.SOURCES,
    small=65536,
    eager_rounds=True,
)
