"""batch_norm_act: batch normalisation of columns, then an activation.

    y = act((x - mean(x)) / sqrt(var(x) + eps) * weight + bias), of each column

Read on in: python/torchweld/ops/batch_norm/columns.py,
python/torchweld/ops/batch_norm/normalize_act.py, python/torchweld/ops/batch_norm/statistics.py,
csrc/cpu/batch_norm.cpp, triton_kernels/batch_norm.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchweld import checks, state
from torchweld.dispatch import choice
from torchweld.dispatch.autograd import (
    Ready,
    autograd_function,
    complete_steps,
    exports_a_derivative,
    find_apply,
    make_views,
    tell_apart,
    wants_gradient,
)
from torchweld.dispatch.bare import BareOp
from torchweld.dispatch.call import decide, run_on
from torchweld.dispatch.library import make_step
from torchweld.dispatch.warm.cache import short
from torchweld.dispatch.warm.guards import are_comparable
from torchweld.errors import ArgumentError
from torchweld.names import ActivationName, Approximation
from torchweld.ops import activation as activations
from torchweld.ops.batch_norm import statistics
from torchweld.ops.batch_norm.columns import (
    SOURCES,
    are_running,
    by_torch,
    check,
    normalize,
    rows_of,
    size,
    unlike,
    wide,
)
from torchweld.ops.batch_norm.normalize_act import NORMALIZE_ACT
from torchweld.registry import (
    BACKENDS,
    WHOLE,
    Composite,
    Op,
    take_rows,
)
from torchweld.registry.cost import count_per_element


@short()
def batch_norm_act(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
    *,
    process_group: Any = None,
    activation: ActivationName = "gelu",
    approximate: Approximation = "none",
) -> Tensor:
    """activation(batch_norm(input)), as torch.nn.functional.batch_norm; a column is a channel.

    Training reads input once for the statistics and once for the result, and saves input for the
    backward. A checkpoint that recomputes does not update the running statistics again: each batch
    counts once.

    Args:
        input: [*, width], every leading dimension a part of the batch; float32, bfloat16, float16
            (or float64).
        running_mean, running_var: [width], in input's dtype, or float32 and 16 bits in either
            order; required in evaluation; updated in training, where they may be None.
        weight, bias: [width], in input's dtype, or float32 and 16 bits in either order.
        training: normalise with the statistics of input.
        momentum: the weight of this batch in the running statistics; a tensor of one element if it
            changes from step to step.
        eps: added to the variance, >= 0; > 0 in training.
        process_group: in training, statistics cover the rows of all its processes, which may differ
            in number; None: only this process's. Gradients of weight and bias are this process's
            share of the sum, as in torch.nn.SyncBatchNorm.
        activation: "gelu", "relu", "silu" or another of bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".

    Returns:
        A tensor of input's shape and dtype.
    """
    columns = (running_mean, running_var, weight, bias)
    how = (training, momentum, eps, process_group, activation, approximate)
    return decide(BATCH_NORM_ACT, input, *columns, *how)


def _fake_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    mean = wide(x.new_empty(x.shape[-1]))
    return mean, torch.empty_like(mean)


_STATISTICS = BareOp(
    "column_statistics",
    "(Tensor input) -> (Tensor mean, Tensor var)",
    _fake_statistics,
    triton=SOURCES["triton"][0],
)
_GRAD_X = BareOp(
    "batch_norm_act_grad_x",
    "(Tensor grad_y, Tensor input, Tensor mean, Tensor var, Tensor? weight, Tensor? bias,"
    " Tensor mean_g, Tensor mean_g_x_hat, float eps, str activation, str approximate) -> Tensor",
    lambda grad_y, x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    triton=SOURCES["triton"][0],
)


class _Training:
    """Forward and backward on one backend, two passes over x each.

    Between the passes, processes exchange sums of columns.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        ops, normalization = (_STATISTICS, _GRAD_X), NORMALIZE_ACT.kernels[backend]
        overloads = [op.overload(backend) for op in ops]
        self._while_compiling = (*overloads, normalization)
        self._steps = (*map(make_step, overloads), normalization.steps)
        results = BATCH_NORM_ACT.forward_signature.results
        self.function = autograd_function(BATCH_NORM_ACT, self, results)
        self._ready_function = autograd_function(BATCH_NORM_ACT, self, results, ready=True)
        self.apply_ready = find_apply(self._ready_function)

    def _find_parts(self) -> tuple[Any, Any, Any]:
        return self._while_compiling if state.is_compiling() else self._steps

    @functools.cached_property
    def ready(self) -> Ready:
        """Both passes for calls that a short way has compared."""
        parts = self._steps
        if self.backend == "cpu":
            normalization = Ready(*NORMALIZE_ACT.kernels["cpu"].direct)
            parts = (_STATISTICS.direct, _GRAD_X.direct, normalization)
        return Ready(partial(self._run_forward, parts), partial(self._run_backward, parts))

    def forward(self, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._run_forward(self._find_parts(), x, *rest)

    def _run_forward(
        self, parts: tuple[Any, Any, Any], x: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _, _, weight, bias, _, _, eps, group, *kind = rest
        find, _, normalization = parts
        mean, var = find(x)
        count = mean.new_full((), x.shape[:-1].numel())
        if group is not None:
            mean, var, count = statistics.find_of_all(mean, var, count, group)
        y = normalization.forward(x, mean, var, weight, bias, eps, *kind)
        return y, mean, var, count

    def backward(self, *given: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self._run_backward(self._find_parts(), *given)

    def _run_backward(
        self,
        parts: tuple[Any, Any, Any],
        grad_y: Tensor,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        *rest: Any,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        eps, group, *kind, need_input, need_weight, need_bias = rest
        # The sums keep their precision, and are computed even without parameters.
        wide_weight = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        wide_bias = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
        columns = (mean, var, wide_weight, wide_bias)
        _, grad_x, normalization = parts
        _, grad_weight, grad_bias = normalization.backward(
            grad_y, x, *columns, eps, *kind, False, True, True
        )
        grad_input = None
        if need_input:
            sums = torch.stack([grad_bias, grad_weight])
            mean_g, mean_g_x_hat = (statistics.add_up(sums, group) / count).unbind()
            grad_input = grad_x(grad_y, x, *columns, mean_g, mean_g_x_hat, eps, *kind)
        return (
            grad_input,
            grad_weight.to(weight.dtype) if need_weight and weight is not None else None,
            grad_bias.to(bias.dtype) if need_bias and bias is not None else None,
        )


def plan_training(
    backend: str,
    x: Tensor,
    columns: Sequence[Tensor | None],
    momentum: float | Tensor,
    eps: float,
    group: Any,
    *kind: str,
) -> Callable[..., Tensor]:
    """What serves training: a function of x, columns, the other arguments and an offset."""
    run = _TRAINING[backend]
    if group is not None or isinstance(momentum, Tensor) or not are_comparable((x, *columns)):
        return partial(_train_in_group, run)
    how = (True, momentum, eps, None, *kind)
    ready: Ready | None = None
    if wants_gradient(x, *columns[2:]):
        ready = complete_steps(BATCH_NORM_ACT, run.ready, (x, *columns, *how))
    return partial(_train, run, ready, how, _find_few(backend, x, *columns))


def plan_evaluation(
    backend: str, x: Tensor, columns: Sequence[Tensor | None], eps: float, *kind: str
) -> Callable[..., Tensor]:
    """What serves evaluation: a function of x and columns."""
    if not are_comparable((x, *columns)):
        return partial(_evaluate, partial(run_on, NORMALIZE_ACT, backend), (eps, *kind))
    made = NORMALIZE_ACT.kernels[backend].make_ready((x, *columns, eps, *kind))
    function, first, taken_at, _ = made
    how = (eps, *kind) if 5 in taken_at else ()
    return partial(_evaluate, partial(function, *first), how)


def _evaluate(
    function: Callable[..., Tensor], how: tuple[Any, ...], x: Tensor, *rest: Any
) -> Tensor:
    return function(x, *rest[:4], *how)


# With fewer elements running statistics take longer than the kernels: torch's op has both in one.
_FEW = 2**13, 2**16  # in 32 bits, in 16 bits


def _find_few(backend: str, x: Tensor, *columns: Tensor | None) -> int:
    """The number of elements from which on kernels serve; torch's op has to take the columns."""
    running_mean, running_var, weight, bias = columns
    given = [t for t in columns if t is not None]
    is_taken = all(
        t.dtype is x.dtype and t.shape == x.shape[-1:] and t.is_contiguous() for t in given
    )
    is_known = weight is not None or bias is None  # see `by_torch`
    are_fixed = not any(t is not None and t.requires_grad for t in (running_mean, running_var))
    is_torchs = backend == "cpu" and choice.forced is None
    return _FEW[x.dtype.itemsize == 2] * (is_torchs and is_taken and is_known and are_fixed)


def _run_few(
    x: Tensor, columns: Sequence[Tensor | None], how: Sequence[Any], offset: Tensor | None
) -> Tensor:
    """Train by torch's op; the recomputation of a checkpoint updates copies of the statistics."""
    mean, var, weight, bias = columns
    momentum, eps, activation, approximate = how
    if not (mean is None or var is None or statistics.is_first()):
        mean, var = mean.clone(), var.clone()
    if offset is not None:
        x = x + offset.detach()
    rows = x if x.ndim == 2 else rows_of(x)
    z = torch.batch_norm(rows, weight, bias, mean, var, True, momentum, eps, False)
    y = activations.ACTIVATIONS[activation, approximate].function(z)
    return y if x.ndim == 2 else y.view(x.shape)


def _train(
    run: _Training,
    ready: Ready | None,
    how: tuple[Any, ...],
    few: int,
    x: Tensor,
    *rest: Any,
    offset: Tensor | None = None,
) -> Tensor:
    columns = rest[:4]
    if x.numel() < few:
        return _run_few(x, columns, (*how[1:3], *how[4:]), offset)
    if ready is None:
        y, *made = run.ready.forward(x, *columns, *how)
    else:
        y, *made = run.apply_ready(ready, x, *columns)
    statistics.finish(x, columns, offset, *made, how[1], None)  # type: ignore[call-arg]
    return y  # type: ignore[no-any-return]


def _train_in_group(run: _Training, x: Tensor, *rest: Any, offset: Tensor | None = None) -> Tensor:
    *columns, training, momentum, eps, group, activation, approximate = rest
    how = (training, momentum, eps, group, activation, approximate)
    if exports_a_derivative():  # no single op covers the exchange and the update
        return reference(BATCH_NORM_ACT, x if offset is None else x + offset, *columns, *how)
    trains = wants_gradient(x, *columns[2:])
    y, *made = (run.function.apply if trains else run.forward)(*tell_apart((x, *columns)), *how)
    statistics.finish(x, columns, offset, *made, momentum, group)  # type: ignore[call-arg]
    return y  # type: ignore[no-any-return]


def _plan(backend: str, x: Tensor, *rest: Any) -> Callable[..., Tensor]:
    *columns, training, momentum, eps, group, activation, approximate = rest
    kind = (activation, approximate)
    statistics.check_numbers(BATCH_NORM_ACT, training, momentum, eps)
    if not training:
        return plan_evaluation(backend, x, columns, eps, *kind)
    if not is_training(x, x.shape[-1:], columns, group):
        _check_all(x, *rest)
    return plan_training(backend, x, columns, momentum, eps, group, *kind)


def is_training(
    x: Tensor, width: Sequence[int], columns: Sequence[Tensor | None], group: Any
) -> bool:
    """Whether there are enough rows and running statistics fit; no kernel checks this."""
    running_mean, running_var, *_ = columns
    is_alone = group is None or group.size() == 1
    if x.ndim == 0 or (is_alone and x.shape[:-1].numel() == 1):
        return False
    if running_mean is None or running_var is None:
        return running_mean is running_var
    return are_running(x, width, running_mean, running_var)


def _reference(x: Tensor, *rest: Any) -> Tensor:
    *columns, training, momentum, eps, group, _, _ = rest
    statistics.check_numbers(BATCH_NORM_ACT, training, momentum, eps)
    wrong = training and not is_training(x, x.shape[-1:], columns, group)
    if wrong or unlike(x, *columns):
        _check_all(x, *rest)
    return reference(BATCH_NORM_ACT, x, *rest)


def reference(op: Op, x: Tensor, *rest: Any) -> Tensor:
    """batch_norm_act in eager torch, without checks."""
    *columns, training, momentum, eps, group, activation, approximate = rest
    running_mean, running_var, weight, bias = columns
    kind = (activation, approximate)
    if (
        training
        and running_mean is not None
        and running_var is not None
        and not statistics.is_first()
    ):
        columns = [running_mean.clone(), running_var.clone(), weight, bias]
    if not training:
        unused = 0.0 if isinstance(momentum, Tensor) else momentum
        return by_torch(op, x, columns, False, unused, eps, *kind)
    if not isinstance(momentum, Tensor) and group is None and x.numel() > 0:
        return by_torch(op, x, columns, True, momentum, eps, *kind)
    rows = rows_of(wide(x))
    count = statistics.add_up(rows.new_full((), rows.shape[0]), group)
    mean = statistics.add_up_with_gradient(rows.sum(0), group) / count
    var = statistics.add_up_with_gradient((rows - mean).square().sum(0), group) / count
    if x.numel() > 0 or group is not None:
        statistics.track(running_mean, running_var, mean, var, count, momentum)
    return activations.activate(op, normalize(x, mean, var, weight, bias, eps), *kind)


def _backward_reference(grad_y: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    _, _, _, weight, bias, eps, group, *kind, need_input, need_weight, need_bias = rest
    x, weight, bias = make_views((x, weight, bias))
    how = (True, 0.0, eps, group, *kind)
    y = reference(BATCH_NORM_ACT, x, None, None, weight, bias, *how)
    needs = {0: (x, need_input), 1: (weight, need_weight), 2: (bias, need_bias)}
    wanted = {at: value for at, (value, need) in needs.items() if need and value is not None}
    gradients = torch.autograd.grad(y, list(wanted.values()), grad_y, create_graph=True)
    by_position = dict(zip(wanted, gradients, strict=True))
    return tuple([by_position.get(at) for at in needs])


def _check_all(x: Any, *rest: Any) -> None:
    running_mean, running_var, weight, bias, training, momentum, eps, group, *kind = rest
    running = {"running_mean": running_mean, "running_var": running_var}
    check(BATCH_NORM_ACT, x, eps, kind, running, {"weight": weight, "bias": bias})
    check_training(BATCH_NORM_ACT, x, running, training, momentum, group)


def check_training(
    op: Op, x: Any, running: dict[str, Any], training: Any, momentum: Any, group: Any
) -> None:
    """Check the number of rows, running statistics, momentum and process group."""
    for (name, value), other in zip(running.items(), reversed(running.values()), strict=True):
        if value is None and (other is not None or not training):
            accepted = "a tensor: only both are left out, and only where training is True"
            raise ArgumentError(op.name, name, "None", accepted)
    if not (
        (isinstance(momentum, checks.NUMBER) and abs(momentum) < math.inf)
        or (isinstance(momentum, Tensor) and momentum.numel() == 1)
    ):
        actual = repr(momentum)
        raise ArgumentError(op.name, "momentum", actual, "a number, or a tensor of one element")
    if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
        actual, accepted = f"a {type(group).__name__}", "a torch.distributed.ProcessGroup or None"
        raise ArgumentError(op.name, "process_group", actual, accepted)
    if training and x.shape[:-1].numel() == 1 and (group is None or group.size() == 1):
        accepted = "more than 1 value per channel when training"
        raise ArgumentError(op.name, "input", f"of shape {list(x.shape)}", accepted)


def _fake(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    mean, var = _fake_statistics(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, mean, var, mean.new_empty(())


BATCH_NORM_ACT = Composite(
    name="batch_norm_act",
    forward="(Tensor input, Tensor? running_mean, Tensor? running_var, Tensor? weight,"
    " Tensor? bias, bool training, float momentum, float eps, Any process_group, str activation,"
    " str approximate) -> (Tensor y, Tensor mean, Tensor var, Tensor count)",
    backward="(Tensor grad_y, Tensor input, Tensor mean, Tensor var, Tensor count, Tensor? weight,"
    " Tensor? bias, float eps, Any process_group, str activation, str approximate, bool need_input,"
    " bool need_weight, bool need_bias) -> (Tensor grad_input, Tensor grad_weight,"
    " Tensor grad_bias)",
    reference=_reference,
    backward_reference=_backward_reference,
    plan=_plan,
    made_of="passes of {}; processes exchange their statistics between them",
    saves="input, weight, bias, the statistics",
    check=_check_all,
    fake=_fake,
    sharding=WHOLE,
    sample=lambda inputs, rows: take_rows(inputs, rows, 1, ()),
    sized=lambda leading, row: size(leading, row, True, 0.1, 1e-5, None),
    flops=count_per_element(28, 40),
    slower=(torch.float64,),
    sources=SOURCES,
    eager_rounds=True,
)

_TRAINING = {name: _Training(name) for name in BACKENDS if name in BATCH_NORM_ACT.sources}
