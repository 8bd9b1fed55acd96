"""batch_norm_act: batch normalisation of the columns of a matrix, then an activation."""

from __future__ import annotations

from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch.autograd import (
    autograd_function,
    exports_a_derivative,
)
from torchweld.dispatch.bare import BareOp
from torchweld.dispatch.call import call, run_on
from torchweld.dispatch.library import make_step
from torchweld.dispatch.way import short
from torchweld.errors import ArgumentError
from torchweld.names import ActivationName, Approximation
from torchweld.ops.activation import common as activations
from torchweld.ops.batch_norm import common as batch_norms
from torchweld.ops.batch_norm import normalize_act
from torchweld.ops.batch_norm.columns import add_up, add_up_with_gradient, gather
from torchweld.registry import (
    BACKENDS,
    WHOLE,
    Cases,
    Composite,
    Numerics,
    Op,
    activation,
    constant,
    parameter,
    take_rows,
    variance,
)
from torchweld.registry.cost import count_per_element


@short()
def batch_norm_act(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float | torch.Tensor = 0.1,
    eps: float = 1e-5,
    *,
    process_group: Any = None,
    activation: ActivationName = "gelu",
    approximate: Approximation = "none",
) -> torch.Tensor:
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
        eps: added to the variance, >= 0.
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
    return call(OP, input, *columns, *how)


# --- Training -------------------------------------------------------------------------------------


def _fake_statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = batch_norms.wide(x.new_empty(x.shape[-1]))
    return mean, torch.empty_like(mean)


_TRITON = batch_norms.SOURCES["triton"][0]
BareOp(
    "column_statistics",
    "(Tensor input) -> (Tensor mean, Tensor var)",
    _fake_statistics,
    triton=_TRITON,
)
BareOp(
    "batch_norm_act_grad_x",
    "(Tensor grad_y, Tensor input, Tensor mean, Tensor var, Tensor? weight, Tensor? bias,"
    " Tensor mean_g, Tensor mean_g_x_hat, float eps, str activation, str approximate) -> Tensor",
    lambda grad_y, x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    triton=_TRITON,
)


class _Training:
    """Forward and backward on one backend, two passes over x each.

    Between the passes, processes exchange sums of columns.
    """

    def __init__(self, backend: str) -> None:
        ops = torch.ops.torchweld
        self.backend = backend
        overloads = [
            getattr(op, backend) for op in (ops.column_statistics, ops.batch_norm_act_grad_x)
        ]
        normalization = normalize_act.OP.kernels[backend]
        self._while_compiling = (*overloads, normalization)
        self._steps = (*map(make_step, overloads), normalization.steps)
        self.function = autograd_function(OP, self, OP.forward_signature.results)

    def _find_parts(self) -> tuple[Any, Any, Any]:
        return self._while_compiling if torch.compiler.is_compiling() else self._steps

    def forward(
        self,
        x: torch.Tensor,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        training: bool,
        momentum: float | torch.Tensor,
        eps: float,
        group: Any,
        *kind: str,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        statistics, _, normalization = self._find_parts()
        mean, var = statistics(x)
        count = mean.new_full((), x.shape[:-1].numel())
        if group is not None:
            mean, var, count = _of_all(mean, var, count, group)
        y = normalization.forward(x, mean, var, weight, bias, eps, *kind)
        return y, mean, var, count

    def backward(
        self,
        grad_y: torch.Tensor,
        x: torch.Tensor,
        mean: torch.Tensor,
        var: torch.Tensor,
        count: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: Any,
        *rest: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        *kind, need_input, need_weight, need_bias = rest
        # The sums keep their precision, and are computed even without parameters.
        wide_weight = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        wide_bias = torch.zeros_like(mean) if bias is None else bias.to(mean.dtype)
        columns = (mean, var, wide_weight, wide_bias)
        _, grad_x, normalization = self._find_parts()
        _, grad_weight, grad_bias = normalization.backward(
            grad_y, x, *columns, eps, *kind, False, True, True
        )
        grad_input = None
        if need_input:
            sums = torch.stack([grad_bias, grad_weight])
            mean_g, mean_g_x_hat = (add_up(sums, group) / count).unbind()
            grad_input = grad_x(grad_y, x, *columns, mean_g, mean_g_x_hat, eps, *kind)
        return (
            grad_input,
            grad_weight.to(weight.dtype) if need_weight and weight is not None else None,
            grad_bias.to(bias.dtype) if need_bias and bias is not None else None,
        )


def _of_all(
    mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor, group: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Combine the processes' statistics and row counts."""
    own = torch.cat([mean, var, count.reshape(1)])
    sizes = [mean.numel(), var.numel(), 1]
    means, variances, counts = gather(own, group).split(sizes, 1)
    count = counts.sum()
    mean = (means * counts).sum(0) / count
    var = ((variances + (means - mean).square()) * counts).sum(0) / count
    return mean, var, count


def normalize_training(
    backend: str,
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float | torch.Tensor,
    eps: float,
    process_group: Any,
    *kind: str,
    offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result in training on this backend; `offset` only enters the running mean."""
    columns = (running_mean, running_var, weight, bias)
    arguments = (x, *columns, True, momentum, eps, process_group, *kind)
    if exports_a_derivative():  # no single op covers the exchange and the update
        return reference(OP, x if offset is None else x + offset, *arguments[1:])
    training = _TRAINING[backend]
    if torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, weight, bias)
    ):
        y, mean, var, count = training.function.apply(*arguments)
    else:
        y, mean, var, count = training.forward(*arguments)
    if x.numel() > 0 or process_group is not None:
        mean = mean if offset is None else mean + offset
        _track(running_mean, running_var, mean, var, count, momentum)
    return y


def is_first() -> bool:
    """Whether this forward is the first: False while a checkpoint recomputes it."""
    return torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1


@torch.no_grad()
def _track(
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    count: torch.Tensor,
    momentum: float | torch.Tensor,
) -> None:
    if running_mean is None or running_var is None or not is_first():
        return
    _move(running_mean, mean, momentum)
    _move(running_var, var * (count / (count - 1)), momentum)


def _move(running: torch.Tensor, to: torch.Tensor, momentum: float | torch.Tensor) -> None:
    if isinstance(momentum, torch.Tensor):
        momentum = momentum.to(to.dtype)
    if running.dtype is to.dtype:
        running.lerp_(to, momentum)
    else:
        running.copy_(torch.lerp(running.to(to.dtype), to, momentum))


# --- The seam -------------------------------------------------------------------------------------


def _fused(
    backend: str,
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float | torch.Tensor,
    eps: float,
    group: Any,
    *kind: str,
) -> torch.Tensor:
    columns = (running_mean, running_var, weight, bias)
    if not training:
        return run_on(normalize_act.OP, backend, x, *columns, eps, *kind)
    if not is_training(x, running_mean, running_var, group):
        _check_all(x, *columns, training, momentum, eps, group, *kind)
    return normalize_training(backend, x, *columns, momentum, eps, group, *kind)


def is_training(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    group: Any,
) -> bool:
    """Whether there are enough rows and running statistics fit; no kernel checks this."""
    alone = group is None or group.size() == 1
    if x.ndim == 0 or (alone and x.shape[:-1].numel() == 1):
        return False
    if running_mean is None or running_var is None:
        return running_mean is running_var
    return batch_norms.are_running(x, x.shape[-1:], running_mean, running_var)


def _reference(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    *how: Any,
) -> torch.Tensor:
    columns = (running_mean, running_var, weight, bias)
    wrong = not how[1] >= 0 or (training and not is_training(x, *columns[:2], how[2]))
    if wrong or batch_norms.unlike(x, *columns):
        _check_all(x, *columns, training, *how)
    return reference(OP, x, *columns, training, *how)


def reference(
    op: Op,
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float | torch.Tensor,
    eps: float,
    group: Any,
    *kind: str,
) -> torch.Tensor:
    """batch_norm_act in eager torch, without checks."""
    columns = (running_mean, running_var, weight, bias)
    if training and running_mean is not None and running_var is not None and not is_first():
        columns = (running_mean.clone(), running_var.clone(), weight, bias)
    if not training:
        unused = 0.0 if isinstance(momentum, torch.Tensor) else momentum
        return batch_norms.reference(op, x, *columns, False, unused, eps, *kind)
    if not isinstance(momentum, torch.Tensor) and group is None and x.numel() > 0:
        return batch_norms.reference(op, x, *columns, True, momentum, eps, *kind)
    rows = batch_norms.rows_of(batch_norms.wide(x))
    count = add_up(rows.new_full((), rows.shape[0]), group)
    mean = add_up_with_gradient(rows.sum(0), group) / count
    var = add_up_with_gradient((rows - mean).square().sum(0), group) / count
    if x.numel() > 0 or group is not None:
        _track(running_mean, running_var, mean, var, count, momentum)
    z = batch_norms.normalize(x, mean, var, weight, bias, eps)
    return activations.activate(op, z, *kind)


def _backward_reference(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    count: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    group: Any,
    *rest: Any,
) -> tuple[torch.Tensor | None, ...]:
    *kind, need_input, need_weight, need_bias = rest
    y = reference(OP, x, None, None, weight, bias, True, 0.0, eps, group, *kind)
    needs = {0: (x, need_input), 1: (weight, need_weight), 2: (bias, need_bias)}
    wanted = {at: value for at, (value, need) in needs.items() if need and value is not None}
    gradients = torch.autograd.grad(y, list(wanted.values()), grad_y, create_graph=True)
    by_position = dict(zip(wanted, gradients, strict=True))
    return tuple([by_position.get(at) for at in needs])


def _check_all(
    x: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any,
    bias: Any,
    training: Any,
    momentum: Any,
    eps: Any,
    group: Any,
    *kind: Any,
) -> None:
    running = {"running_mean": running_mean, "running_var": running_var}
    batch_norms.check(OP, x, eps, kind, running, {"weight": weight, "bias": bias})
    check_training(OP, x, running, training, momentum, group)


def check_training(
    op: Op, x: Any, running: dict[str, Any], training: Any, momentum: Any, group: Any
) -> None:
    """Check the number of rows, running statistics, momentum and process group."""
    for (name, value), other in zip(running.items(), reversed(running.values()), strict=True):
        if value is None and (other is not None or not training):
            accepted = "a tensor: only both are left out, and only where training is True"
            raise ArgumentError(op.name, name, "None", accepted)
    if not (
        isinstance(momentum, checks.NUMBER)
        or (isinstance(momentum, torch.Tensor) and momentum.numel() == 1)
    ):
        actual = repr(momentum)
        raise ArgumentError(op.name, "momentum", actual, "a number, or a tensor of one element")
    if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
        actual, accepted = f"a {type(group).__name__}", "a torch.distributed.ProcessGroup or None"
        raise ArgumentError(op.name, "process_group", actual, accepted)
    if training and x.shape[:-1].numel() == 1 and (group is None or group.size() == 1):
        accepted = "more than 1 value per channel when training"
        raise ArgumentError(op.name, "input", f"of shape {list(x.shape)}", accepted)


def _fake(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    mean, var = _fake_statistics(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, mean, var, mean.new_empty(())


def _terms(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    _: Any,
    activation: str,
    approximate: str,
    grad_y: torch.Tensor,
) -> dict[str, torch.Tensor]:
    mean, var = (None, None) if training else (running_mean, running_var)
    size, kind = x.double().abs(), (activation, approximate)
    return batch_norms.terms(x, size, mean, var, weight, bias, eps, kind, grad_y)


def _arguments(
    shape: tuple[int, ...], training: bool, *kind: str, tracked: bool = True, affine: bool = True
) -> tuple[Any, ...]:
    width = shape[-1]
    running = (constant(width), variance(width)) if tracked else (None, None)
    parameters = (parameter(width), parameter(width)) if affine else (None, None)
    return (activation(*shape), *running, *parameters, training, 0.1, 1e-5, None, *kind)


# Rows and widths as in activations.SHAPES, without single rows.
_SHAPES: tuple[tuple[int, ...], ...] = (
    (3, 1),
    (5, 7),
    (2, 3, 31),
    (2, 1, 3, 1, 48),
    (33, 64),
    (256, 67),
    (17, 1000),
    (3, 1, 2, 4096),
    (2, 8193),
    (1031, 13),
    (0, 64),
    (2, 0, 3, 7),
    (3, 0),
)


def _samples() -> tuple[tuple[Any, ...], ...]:
    samples = [
        _arguments(shape, True, "gelu", "none", tracked=shape != (5, 7)) for shape in _SHAPES
    ]
    samples += [
        _arguments(s, True, *kind) for s in ((5, 7), (256, 67)) for kind in activations.KINDS[1:]
    ]
    samples += [_arguments(s, False, "gelu", "none") for s in ((1, 5), (5, 7), (256, 67), (0, 64))]
    return (*samples, _arguments((6, 10), True, "silu", "none", affine=False))


_RESULTS = ("y", "grad_input", "grad_weight", "grad_bias")

OP = Composite(
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
    fused=_fused,
    made_of="passes of {}; processes exchange their statistics between them",
    saves="input, weight, bias, the statistics",
    check=_check_all,
    fake=_fake,
    sharding=WHOLE,
    sample=lambda inputs, rows: take_rows(inputs, rows, 1, ()),
    cases=Cases(
        sized=lambda leading, row: _arguments((*leading, *row), True, "gelu", "none"),
        flops=count_per_element(28, 40),
        samples=_samples(),
        benchmarks=tuple(_arguments(s, True, "gelu", "none") for s in batch_norms.MEASURED),
        benchmarks_on_gpu=tuple(
            _arguments(s, True, "gelu", "none") for s in batch_norms.MEASURED_ON_GPU
        ),
        tiny=_arguments((2, 64), True, "gelu", "none"),
        numerics=Numerics(fp32=dict.fromkeys(_RESULTS, 2.5), terms=_terms),
    ),
    sources=batch_norms.SOURCES,
    small=2**15,
    eager_rounds=True,
)

_TRAINING = {name: _Training(name) for name in BACKENDS if name in OP.sources}
