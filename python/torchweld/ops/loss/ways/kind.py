"""A kind of call of a linear layer's loss, and what all ways do around the results of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchweld.ops.loss import arguments, results
from torchweld.ops.loss.arguments import Settings
from torchweld.ops.loss.chunks import Layer, Needs
from torchweld.ops.loss.results import Outputs, RowResults
from torchweld.ops.loss.rows import LossTransform, as_matrix
from torchweld.ops.loss.sharding import Sharding


class LossKind(NamedTuple):
    """What is decided once for all calls of a kind, from everything but numbers in tensors."""

    settings: Settings
    sharding: Sharding
    casts_to: torch.dtype | None  # autocast's dtype
    dtype: torch.dtype | None  # of a loss; None: as it is computed
    chunking: tuple[Any, ...]  # the fields of a Layer after its tensors
    into_grad: bool
    needs: Needs
    takes_eager: bool  # plain torch serves, with all logits
    is_free: bool  # no option says how the logits are computed
    is_plain: bool  # nor asks for more than torch's own ops compute
    returns_lse: bool = False
    wanted: Outputs | None = None  # besides log-probabilities; None: a loss is


def make_layer(
    kind: LossKind, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> Layer:
    """The layer of rows in one dimension."""
    return Layer(*flatten(kind.casts_to, input, weight, bias), *kind.chunking)


def flatten(
    casts_to: torch.dtype | None,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The tensors of a layer of rows in one dimension, in autocast's dtype if it casts."""
    if casts_to is not None:
        input, weight = input.to(casts_to), weight.to(casts_to)
        bias = None if bias is None else bias.to(casts_to)
    return as_matrix(input), weight, bias


# Computes the results of rows that are wanted.
Compute = Callable[[Layer, torch.Tensor, LossTransform, Outputs], RowResults]


def run_loss(kind: LossKind, compute: Compute, *given: Any) -> Any:
    *parts, target, weight, temperature, token_weights = given
    settings, sharding = kind.settings, kind.sharding
    target, how = arguments.read_rows(settings, target, weight, temperature)
    factors, count = results.make_factors(settings, target, how, token_weights)
    count = sharding.add_up(count) if settings.reduction == "mean" else count
    target, how = sharding.take_classes(target, how)
    found = compute(make_layer(kind, *parts), target, how, factors.find_outputs())
    made = results.reduce(settings, factors, found, count, sharding.add_up)
    made = made.to(kind.dtype or made.dtype)
    return (made, found.lse.reshape(settings.leading)) if kind.returns_lse else made


def run_logprobs(kind: LossKind, compute: Compute, *given: Any) -> Any:
    *parts, target, temperature = given
    wanted = kind.wanted or Outputs()
    marked, how = arguments.read_rows(kind.settings, target, None, temperature)
    marked, how = kind.sharding.take_classes(marked, how)
    found = compute(make_layer(kind, *parts), marked, how, wanted)
    return shape_logprobs(found, target, kind.settings.leading, wanted, kind.returns_lse)


def shape_logprobs(
    found: RowResults,
    target: torch.Tensor,
    leading: tuple[int, ...],
    wanted: Outputs,
    returns_lse: bool,
) -> Any:
    """The log-probabilities of target's shape, and what else is wanted of each row."""
    asked = (wanted.entropy, returns_lse, wanted.argmax)
    each = zip(asked, (found.entropy, found.lse, found.argmax), strict=True)
    more = [result.reshape(leading) for is_asked, result in each if is_asked]
    made = found.log_probabilities.reshape(target.shape)
    return (made, *more) if more else made
