"""The ways of a linear layer's loss, in order of preference, and what runs each.

- torch: its own ops, of few logits on a CPU (small.py).
- fused: the logits are kept, and the loss is one op (fused.py).
- kept: in chunks of rows; their gradients are computed with the loss, and kept (nodes.find_total).
- again: in chunks; the backward pass computes the logits again (nodes.find).
- eager: plain torch with all logits, for transforms and for targets that need a gradient.

`find_way` names the one that serves. chunks.find_rows says how many rows a chunk has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from torchweld import state
from torchweld.dispatch import choice
from torchweld.errors import ArgumentError
from torchweld.ops.loss import arguments, chunks, fused, nodes, results, rows, sharded, small
from torchweld.ops.loss.arguments import Place, Settings
from torchweld.ops.loss.chunks import Layer, Needs, Plan
from torchweld.ops.loss.results import RowResults, Wanted
from torchweld.ops.loss.rows import How
from torchweld.ops.loss.small import Run
from torchweld.registry import why_not_now

# With fewer logits torch's own ops are faster.
_FEW = 2**18
# With fewer, a CPU keeps the logits: chunks gain nothing.
_KEPT = 2**20
# On a GPU so many bytes of logits are kept, since two passes take the host less than chunks.
_FEW_BYTES = 2**26
# Up to so many, rows are not padded: a GEMM for unaligned matrices takes less than a second one.
_UNPADDED = 2**20


class Kind(NamedTuple):
    """What is decided once for all calls of a kind, from everything but numbers in tensors."""

    settings: Settings
    place: Place
    casts_to: torch.dtype | None  # autocast's dtype
    dtype: torch.dtype | None  # of a loss; None: as it is computed
    chunking: tuple[Any, ...]  # the fields of a Layer after its tensors
    into_grad: bool
    needs: Needs
    takes_eager: bool  # plain torch serves, with all logits
    is_free: bool  # no option says how the logits are computed
    is_plain: bool  # nor asks for more than torch's own ops compute
    returns_lse: bool = False
    wanted: Wanted | None = None  # besides log-probabilities; None: a loss is


def find_way(kind: Kind, *given: Any, in_chunks: bool = False) -> Run:
    """What serves a call: the first way that can, of all or of those in chunks.

    It is a function of the call's tensors: the layer's three, the target, and what a loss is made
    of: weights of classes, temperatures, and weights of rows; of log-probabilities temperatures.
    """
    parts, is_loss = given[:3], kind.wanted is None
    if not in_chunks and kind.is_plain and small.may_serve(_FEW, kind.settings, *given):
        of_any_size = kind._replace(settings=kind.settings._replace(leading=()))
        again = partial(_run_in_chunks, of_any_size)
        if is_loss:
            return small.linear_cross_entropy(kind.settings, any(kind.needs), parts, again)
        return small.linear_logprobs(kind.settings, parts, again)
    if not in_chunks and (run := _fuse(kind, *given)) is not None:
        return run if is_loss else partial(_negate, run)
    layer = make_layer(kind, *parts)
    if is_loss and _keeps_gradients(kind, layer, given[-1]):
        return partial(_run_kept, kind, _plan_both(kind, layer, given[-1]))
    run_rows = partial(_run_loss if is_loss else _run_logprobs, kind)
    if not kind.takes_eager:
        return partial(run_rows, partial(_compute_again, kind, _plan_again(kind, layer)))
    return partial(run_rows, partial(_compute_eagerly, kind))


def find_span(kind: Kind, x: torch.Tensor) -> dict[str, Any]:
    """The numbers of the input's elements for which the same way serves."""
    limits = (_FEW, _KEPT) if kind.is_plain else (_KEPT,)
    return small.find_span(kind.settings, x, *limits)


def _run_in_chunks(kind: Kind, *given: Any) -> Any:
    """A call that torch refused, of any number of rows."""
    settings = kind.settings._replace(leading=tuple(given[0].shape[:-1]))
    return find_way(kind._replace(settings=settings), *given, in_chunks=True)(*given)


# --- Fused ----------------------------------------------------------------------------------------


def _fuse(kind: Kind, *given: Any) -> Run | None:
    """What keeps the logits until the backward pass, if they are few."""
    settings, parts, target, *terms = kind.settings, given[:3], *given[3:]
    weight, temperature, token_weights = terms if kind.wanted is None else (None, *terms, None)
    if kind.takes_eager or kind.returns_lse or not kind.is_free or any(kind.wanted or ()):
        return None
    is_whole = kind.place.mesh is None  # the kernels exchange nothing
    others = (*parts, target, weight, temperature)
    if not (is_whole and fused.may_serve(settings, token_weights, *others)):
        return None
    layer, count = make_layer(kind, *parts), math.prod(settings.leading)
    size, plan = layer.logits_dtype.itemsize, None
    if parts[0].is_cpu and not choice.is_on_gpu(parts[0]):
        if count * settings.classes >= _KEPT:
            return None
    else:
        plan = chunks.make_plan(layer, kind.needs, fused.FORWARD.find(layer.input))
        if plan.each < count or count * plan.stride * size > _FEW_BYTES:
            return None
        if plan.stride == settings.classes or count * plan.stride * size <= _UNPADDED:
            plan = None
    run = fused.make_run(settings, kind.dtype or settings.kind, layer, kind.needs, plan)
    if kind.casts_to is None and parts[0].ndim == 2:
        return run
    return partial(_run_layer, run, kind.casts_to)


def _run_layer(run: Run, casts_to: torch.dtype | None, *given: Any) -> torch.Tensor:
    return run(*_flatten(casts_to, *given[:3]), *given[3:])  # type: ignore[no-any-return]


def _negate(run: Run, *given: Any) -> torch.Tensor:
    """Log-probabilities of classes [*], or [*, 1], by their losses."""
    *layer, target, temperature = given
    losses: torch.Tensor = run(*layer, target, None, temperature, None)
    return -losses.view(target.shape)


# --- In chunks of rows ----------------------------------------------------------------------------


def _keeps_gradients(kind: Kind, layer: Layer, token_weights: torch.Tensor | None) -> bool:
    """Whether the gradients are computed with the loss: one number multiplies them later.

    In float16 that number is a loss scale, without which they would vanish. An exported graph
    needs no gradients, and the op that computes both does not exchange results of shared classes.
    """
    if kind.settings.reduction == "none" or kind.returns_lse or kind.into_grad:
        return False
    if not any(kind.needs) or state.is_exporting() or kind.takes_eager:
        return False
    if kind.place.classes is not None and torch.compiler.is_compiling():
        return False
    trains = token_weights is not None and token_weights.requires_grad
    return not trains and layer.input.dtype != torch.float16


def _plan_both(kind: Kind, layer: Layer, token_weights: torch.Tensor | None) -> Plan | None:
    """The plan of a loss and its gradients; None: numbers cannot be read."""
    if kind.place.classes is not None:
        run = partial(sharded.run_both, kind.place.classes)
        return chunks.make_plan(layer, kind.needs, run)
    if not state.can_read(*layer[:3], token_weights):
        return None
    return chunks.make_plan(layer, kind.needs, rows.BOTH_IN_PLACE.find(layer.input))


def _plan_again(kind: Kind, layer: Layer) -> tuple[Plan, Plan] | None:
    """The plans of a forward and a backward pass; None: numbers cannot be read."""
    if not state.can_read(*layer[:3]):
        return None
    forward, backward = (op.find(layer.input) for op in (rows.FORWARD, rows.BACKWARD_IN_PLACE))
    plan = chunks.make_plan(layer, chunks.NO_GRADIENT, forward)
    return plan, chunks.make_plan(layer, kind.needs, backward)


def make_layer(
    kind: Kind, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> Layer:
    """The layer of rows in one dimension."""
    return Layer(*_flatten(kind.casts_to, input, weight, bias), *kind.chunking)


def _flatten(
    casts_to: torch.dtype | None,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The tensors of a layer of rows in one dimension, in autocast's dtype if it casts."""
    if casts_to is not None:
        input, weight = input.to(casts_to), weight.to(casts_to)
        bias = None if bias is None else bias.to(casts_to)
    return input.reshape(math.prod(input.shape[:-1]), input.shape[-1]), weight, bias


def _run_kept(kind: Kind, plan: Plan | None, *given: Any) -> torch.Tensor:
    *parts, target, weight, temperature, token_weights = given
    settings, place, averages = kind.settings, kind.place, kind.settings.reduction == "mean"
    layer, begun = make_layer(kind, *parts), None
    if plan is not None and settings.several is not None and place.classes is None:
        with torch.no_grad():  # the node that takes it has the derivative
            begun = chunks.begin(plan, layer, target.reshape(-1, 1), settings.ignored)
    target, how = arguments.read_rows(settings, target, weight, temperature)
    factors, count = results.make_factors(settings, target, how, token_weights)
    if averages:
        count = place.add_up(count)
        factors = factors.divide(count)
    target, how = place.take_classes(target, how)
    rest = (factors, kind.needs, plan, place.classes, begun)
    made = place.add_up(nodes.find_total(layer, target, how, *rest))
    made = torch.where(count == 0, torch.nan, made) if averages else made
    return made.to(kind.dtype or made.dtype)


# Computes the results of rows that are wanted.
Compute = Callable[[Layer, torch.Tensor, How, Wanted], RowResults]


def _run_loss(kind: Kind, compute: Compute, *given: Any) -> Any:
    *parts, target, weight, temperature, token_weights = given
    settings, place = kind.settings, kind.place
    target, how = arguments.read_rows(settings, target, weight, temperature)
    factors, count = results.make_factors(settings, target, how, token_weights)
    count = place.add_up(count) if settings.reduction == "mean" else count
    target, how = place.take_classes(target, how)
    found = compute(make_layer(kind, *parts), target, how, factors.find_wanted())
    made = results.reduce(settings, factors, found, count, place.add_up)
    made = made.to(kind.dtype or made.dtype)
    return (made, found.lse.reshape(settings.leading)) if kind.returns_lse else made


def _run_logprobs(kind: Kind, compute: Compute, *given: Any) -> Any:
    *parts, target, temperature = given
    wanted = kind.wanted or Wanted()
    marked, how = arguments.read_rows(kind.settings, target, None, temperature)
    marked, how = kind.place.take_classes(marked, how)
    found = compute(make_layer(kind, *parts), marked, how, wanted)
    asked = (wanted.entropy, kind.returns_lse, wanted.argmax)
    each = zip(asked, (found.entropy, found.lse, found.argmax), strict=True)
    more = [result.reshape(kind.settings.leading) for is_asked, result in each if is_asked]
    made = found.log_probabilities.reshape(target.shape)
    return (made, *more) if more else made


def _compute_again(
    kind: Kind,
    plans: tuple[Plan, Plan] | None,
    layer: Layer,
    target: torch.Tensor,
    how: How,
    wanted: Wanted,
) -> RowResults:
    return nodes.find(layer, target, how, wanted, kind.into_grad, kind.place.classes, plans)


def _compute_eagerly(
    kind: Kind, layer: Layer, target: torch.Tensor, how: How, wanted: Wanted
) -> RowResults:
    if kind.place.classes is not None:
        accepted = "one that no transform sees: devices share its classes"
        function = kind.settings.function
        raise ArgumentError(function, "linear_weight", why_not_now(), accepted)
    return nodes.find_by_reference(layer, target, how, wanted)
