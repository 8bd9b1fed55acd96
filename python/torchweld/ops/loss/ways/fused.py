"""Losses of rows with one class in one op forward, and one for the logits' gradient.

The general path (rows.py and results.py) prepares targets, weights and coefficients by some 20 ops
of torch, which take longer than a small loss. It serves soft targets and further results, and is
the reference here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from torchweld import state
from torchweld.dispatch import choice
from torchweld.dispatch.autograd import (
    carrying_tangents,
    differentiate,
    find_apply,
    make_views,
    wants_gradient,
)
from torchweld.dispatch.warm.guards import has_lazy
from torchweld.ops.gemm import product
from torchweld.ops.gemm.gemm import find_linear
from torchweld.ops.loss import arguments, chunks, results, rows
from torchweld.ops.loss.arguments import Settings
from torchweld.ops.loss.chunks import NO_GRADIENT, Gemms, Layer, Needs, Plan
from torchweld.ops.loss.rows import RowOp, accumulate_type
from torchweld.ops.loss.ways import eager
from torchweld.ops.loss.ways.kind import LossKind, flatten, make_layer
from torchweld.ops.loss.ways.torch import Run

_GIVEN = (
    "Tensor? weight, Tensor? sum_of_weights, Tensor? temperature, Tensor? token_weights,"
    " float scale, float softcap, float smoothing, float z_loss, int ignored"
)
_TRITON = "triton_kernels/loss/fused.py"


def _prepare(logits: torch.Tensor, target: torch.Tensor, reduction: str, *given: Any) -> Any:
    """What the general path makes of the same arguments."""
    weight, _, temperature, tokens, scale, cap, smoothing, z_loss, ignored = given
    kind = accumulate_type(logits.dtype)
    shared = (tuple(target.shape), logits.shape[1], ignored, 1, scale, cap, logits.dtype, kind)
    settings = Settings("cross_entropy", *shared, reduction, smoothing, z_loss)
    marked, how = arguments.read_rows(settings, target, weight, temperature)
    return (settings, marked, how, *results.make_factors(settings, marked, how, tokens))


def _find_reference(
    logits: torch.Tensor, target: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The general path from the same arguments."""
    *given, reduction, dtype = rest
    settings, marked, how, factors, count = _prepare(logits, target, reduction, *given)
    smooths = settings.label_smoothing != 0
    made = rows.forward_reference(logits, marked, *how[1:6], False, smooths, False)
    found = results.find(made, marked, how, factors.find_outputs())
    loss = results.reduce(settings, factors, found, count).to(dtype)
    return loss, count.view(1) if reduction == "mean" else count.new_empty(0), made[1]


def _backward_reference(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistics: torch.Tensor,
    count: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    *given, x = rest
    _, marked, how, factors, _ = _prepare(logits, target, "none", *given)
    divided = factors.divide(count) if count.numel() else factors
    scaled = results.LossFactors(*[None if factor is None else factor * grad for factor in divided])
    coefficients = scaled.make_coefficients(marked, how)
    made = rows.backward_reference(logits, marked, statistics, *coefficients, *how[1:6])
    return made, logits.new_empty(0) if x is None else torch.where(marked == -1, 0, x)


def _fake_forward(logits: torch.Tensor, target: torch.Tensor, *rest: Any) -> Any:
    reduction, dtype = rest[-2:]
    kind = accumulate_type(logits.dtype)
    return (
        logits.new_empty(target.shape if reduction == "none" else (), dtype=dtype),
        logits.new_empty(1 if reduction == "mean" else 0, dtype=kind),
        logits.new_empty((logits.shape[0], rows.STATISTICS), dtype=kind),
    )


FORWARD = RowOp(
    "loss_of_logits",
    f"(Tensor logits, Tensor target, {_GIVEN}, str reduction, ScalarType dtype)"
    " -> (Tensor loss, Tensor count, Tensor statistics)",
    _fake_forward,
    triton=_TRITON,
    sample=rows.take_rows_but(1),
    reference=_find_reference,
)
BACKWARD = RowOp(
    "loss_of_logits_backward",
    f"(Tensor grad_loss, Tensor logits, Tensor target, Tensor statistics, Tensor count, {_GIVEN},"
    " Tensor? x) -> (Tensor grad_logits, Tensor kept)",
    lambda _, logits, *rest: (
        torch.empty_like(logits, memory_format=torch.contiguous_format),
        torch.empty_like(logits.new_empty(0) if rest[-1] is None else rest[-1]),
    ),
    triton=_TRITON,
    sample=rows.take_rows_but(4),
    reference=_backward_reference,
)


class _Call(NamedTuple):
    """What all calls of a kind have in common."""

    settings: Settings  # without the sizes of the rows
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    linear: Any  # of a layer: its logits
    product: Callable[..., torch.Tensor]  # of two matrices, for gradients
    numbers: tuple[Any, ...]
    dtype: torch.dtype  # of the loss
    layer: tuple[Any, ...]  # the fields of a Layer after its tensors
    needs: Needs  # of a layer's gradients
    plan: Plan | None  # of a layer's GEMMs on padded logits; None: each is a single one

    def run(self, *given: Any) -> tuple[torch.Tensor, ...]:
        """The loss, what the backward pass needs of it, and the logits."""
        input, weight, bias, target, *terms = given
        if weight is None:
            logits = input
        elif self.plan is None:
            logits = self.linear(input, weight, bias)
        else:
            plan = self.plan._replace(needs=NO_GRADIENT)
            logits = Gemms(Layer(input, weight, bias, *self.layer), plan).compute_logits(input)
        made = self.forward(
            logits, target, *terms, *self.numbers, self.settings.reduction, self.dtype
        )
        return (*made, logits)

    def multiply(
        self, of_logits: torch.Tensor, x: torch.Tensor, layer: Layer
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of a layer; `x` are its rows that count."""
        needs, plan = self.needs, self.plan
        if plan is None:
            return (
                self.product(of_logits, layer.weight) if needs.input else None,
                self.product(of_logits.t(), x) if needs.weight else None,
                of_logits.sum(0) if needs.bias else None,
            )
        gemms = Gemms(layer, plan, logits=of_logits)
        of_x = torch.empty_like(layer.input) if needs.input else None
        if of_x is not None:
            gemms.compute_grad_input(of_logits, of_x)
        gemms.add_grad_weight(of_logits, x)
        return (of_x, *gemms.finish())

    def run_eagerly(self, layer: Layer, target: torch.Tensor, *terms: Any) -> torch.Tensor:
        """The loss by plain torch, which differentiates it any number of times."""
        weight, _, temperature, tokens = terms
        settings = self.settings._replace(leading=tuple(target.shape))
        marked, how = arguments.read_rows(settings, target, weight, temperature)
        factors, count = results.make_factors(settings, marked, how, tokens)
        found = eager.find_by_reference(layer, marked, how, factors.find_outputs())
        return results.reduce(settings, factors, found, count).to(self.dtype)


class _Loss(torch.autograd.Function):
    """A loss of given logits, or of a linear layer's, whose weight is given then."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *given: Any) -> torch.Tensor:
        loss, count, statistics, logits = call.run(*given)
        ctx.call = call
        own = None if given[1] is None else logits
        ctx.save_for_backward(*given, own, statistics, count)
        return loss

    @staticmethod
    @carrying_tangents
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call = ctx.call
        x, weight, bias, target, *terms, logits, statistics, count = ctx.saved_tensors
        if torch.is_grad_enabled() or not state.can_read(grad):
            layer = Layer(x, weight, bias, *call.layer)
            made = _differentiate_eagerly(call, layer, grad, target, *terms)
            return (None, *made, None, None, None, None, None)
        rest = (target, statistics, count, *terms, *call.numbers)
        if weight is None:
            of_logits, _ = call.backward(grad, x, *rest, None)
            return None, of_logits, None, None, None, None, None, None, None
        of_logits, kept = call.backward(grad, logits, *rest, x if call.needs.weight else None)
        made = call.multiply(of_logits, kept, Layer(x, weight, bias, *call.layer))
        return (None, *made, None, None, None, None, None)


_apply = find_apply(_Loss)


def _differentiate_eagerly(call: _Call, layer: Layer, grad: torch.Tensor, *rest: Any) -> Any:
    """With a graph where one is asked for; torch may have batched the gradient."""
    is_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        x, weight, bias = make_views(layer[:3])
        layer = layer._replace(input=x, weight=weight, bias=bias)
        loss = call.run_eagerly(layer, *rest)
        return differentiate([loss], layer[:3], [grad], is_graph)


def _flatten(of_rows: Any) -> torch.Tensor | None:
    """Numbers of rows in one dimension; a temperature that is one number is a part of the scale."""
    if not isinstance(of_rows, torch.Tensor):
        return None
    return of_rows if of_rows.ndim == 1 else of_rows.reshape(-1)


def may_serve(settings: Settings, token_weights: torch.Tensor | None, *tensors: Any) -> bool:
    """Whether a kernel may serve: one class a row, and nothing else that needs a gradient."""
    x = tensors[0]
    if settings.several != 1 or settings.classes == 0:
        return False
    if wants_gradient(token_weights) or not state.can_read(*tensors, token_weights):
        return False
    if has_lazy((*tensors, token_weights)):  # kernels read numbers
        return False
    if choice.forced is None and choice.is_on_gpu(x):
        return settings.kind == torch.float32
    backend = choice.choose(rows.FORWARD, [x])
    return backend == "cpu" or (backend == "triton" and settings.kind == torch.float32)


def make_run(
    settings: Settings,
    dtype: torch.dtype,
    layer: Layer,
    needs: Needs = NO_GRADIENT,
    plan: Plan | None = None,
) -> Callable[..., torch.Tensor]:
    """What serves calls of a kind: a function of a layer's tensors, targets and a loss's terms.

    A layer without a weight has given logits. Without a plan any number of rows is of the kind.
    """
    forward, backward = FORWARD.find_for_all(layer.input, BACKWARD)
    call = _Call(
        settings._replace(leading=()),
        forward,
        backward,
        find_linear(layer.input, layer.weight, layer.bias) if layer.weight is not None else None,
        product.find_multiply(layer.input),
        (
            settings.scale,
            settings.softcap,
            settings.label_smoothing,
            settings.z_loss,
            settings.ignored,
        ),
        dtype,
        layer[3:],
        needs,
        plan,
    )
    is_shaped = settings.reduction == "none" and len(settings.leading) != 1
    checks_itself = forward in (FORWARD.direct, FORWARD.overload("cpu"))
    return partial(_run, call, wants_gradient(*layer[:3]), is_shaped, checks_itself)


def _run(
    call: _Call, trains: bool, is_shaped: bool, checks_itself: bool, *given: Any
) -> torch.Tensor:
    input, layer_weight, bias, target, weight, temperature, token_weights = given
    settings, whole = call.settings, None
    if not checks_itself and arguments.is_checked(target):
        arguments.mark_ignored(settings.function, target, settings.classes, settings.ignored)
    if settings.label_smoothing and weight is not None:
        whole = weight.detach().to(settings.kind).sum()
    flat = target if target.ndim == 1 else target.reshape(-1)
    terms = (flat, weight, whole, _flatten(temperature), _flatten(token_weights))
    try:
        if trains:
            loss = _apply(call, input, layer_weight, bias, *terms)
        else:
            loss = call.run(input, layer_weight, bias, *terms)[0]
    except RuntimeError:  # an error that names the target is better, if one is at fault
        arguments.mark_ignored(settings.function, target, settings.classes, settings.ignored)
        raise
    return loss.view(target.shape) if is_shaped else loss


# --- Of a linear layer


# With fewer, a CPU keeps the logits: chunks gain nothing.
KEPT = 2**20
# On a GPU so many bytes of logits are kept, since two passes take the host less than chunks.
_FEW_BYTES = 2**26
# Up to so many, rows are not padded: a GEMM for unaligned matrices takes less than a second one.
_UNPADDED = 2**20


def find(kind: LossKind, *given: Any) -> Run | None:
    """What keeps the logits until the backward pass, if they are few."""
    settings, parts, target, *terms = kind.settings, given[:3], *given[3:]
    weight, temperature, token_weights = terms if kind.wanted is None else (None, *terms, None)
    if kind.takes_eager or kind.returns_lse or not kind.is_free or any(kind.wanted or ()):
        return None
    is_whole = kind.sharding.mesh is None  # the kernels exchange nothing
    others = (*parts, target, weight, temperature)
    if not (is_whole and may_serve(settings, token_weights, *others)):
        return None
    layer, count = make_layer(kind, *parts), math.prod(settings.leading)
    size, plan = layer.logits_dtype.itemsize, None
    if parts[0].is_cpu and not choice.is_on_gpu(parts[0]):
        if count * settings.classes >= KEPT:
            return None
    else:
        plan = chunks.make_plan(layer, kind.needs, FORWARD.find(layer.input))
        if plan.each < count or count * plan.stride * size > _FEW_BYTES:
            return None
        if plan.stride == settings.classes or count * plan.stride * size <= _UNPADDED:
            plan = None
    run = make_run(settings, kind.dtype or settings.kind, layer, kind.needs, plan)
    if kind.casts_to is None and parts[0].ndim == 2:
        return run
    return partial(_run_layer, run, kind.casts_to)


def _run_layer(run: Run, casts_to: torch.dtype | None, *given: Any) -> torch.Tensor:
    return run(*flatten(casts_to, *given[:3]), *given[3:])  # type: ignore[no-any-return]


def negate(run: Run, *given: Any) -> torch.Tensor:
    """Log-probabilities of classes [*], or [*, 1], by their losses."""
    *layer, target, temperature = given
    losses: torch.Tensor = run(*layer, target, None, temperature, None)
    return -losses.view(target.shape)
