"""A linear layer whose result only an activation module reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion.modules import why_not_change
from torchweld.fusion.patterns.edges import Pair, find_pair, propose_with_activation
from torchweld.fusion.proposals import Left, Proposal
from torchweld.fusion.view import View
from torchweld.fusion.weld import Weld
from torchweld.names import ActivationName, Approximation


class LinearAct(Weld):
    """A linear layer that computes its activation too if the module around it asks it to."""

    weld_activation: ActivationName
    weld_approximate: Approximation
    weld_transposed: bool
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, *args: Any, weld_asked: bool = False, **kwargs: Any) -> Any:
        if not weld_asked:
            return self.welded_from.forward(self, *args, **kwargs)
        # Not t(), which a DTensor does not have in inference mode.
        weight = self.weight.mT if self.weld_transposed else self.weight
        return functional.linear_act(
            args[0],
            weight,
            self.bias,
            activation=self.weld_activation,
            approximate=self.weld_approximate,
        )

    def extra_repr(self) -> str:
        inner = self.welded_from.extra_repr(self)
        return (
            f"{inner}, activation={self.weld_activation!r}, approximate={self.weld_approximate!r}"
        )


def find_linear_act(module: torch.nn.Module, view: View) -> Iterator[Proposal | Left]:
    """The activations among a module's children, with the preceding linear layers."""
    activations = [child for child in module.children() if view.activation(child)]
    for consumer in activations:
        yield from _find_known(consumer, module, view)
    for consumer in module.children():
        if view.is_unknown_activation(consumer):
            yield from _find_unknown(consumer, module, view)
    if type(module) is torch.nn.Sequential:  # it calls no functions
        return
    if not activations and any(view.linear(child) for child in module.children()):
        yield from _find_functions(module, view)


def _find_known(
    consumer: torch.nn.Module, parent: torch.nn.Module, view: View
) -> Iterator[Proposal | Left]:
    kind = view.activation(consumer)
    pair = find_pair(consumer, parent, view)
    if pair is None or kind is None:
        return
    if isinstance(pair, Left):
        yield pair
        return
    producer = pair.first
    form = view.linear(producer)
    what = f"{type(producer).__name__} + {type(consumer).__name__}"
    if form is None:
        if isinstance(producer, torch.nn.Linear):
            reason = why_not_change(producer) or "it is another kind of linear layer"
            yield Left(producer, what, reason)
        return
    transposed = form == "transposed"
    yield propose_with_activation(
        pair, parent, what, LinearAct, "linear_act", kind, transposed=transposed
    )


def _find_unknown(consumer: torch.nn.Module, parent: torch.nn.Module, view: View) -> Iterator[Left]:
    pair = find_pair(consumer, parent, view)
    if not isinstance(pair, Pair) or not view.linear(pair.first):
        return
    what = f"{type(pair.first).__name__} + {type(consumer).__name__}"
    yield Left(pair.first, what, "its activation is none of torchweld's")


def _find_functions(module: torch.nn.Module, view: View) -> Iterator[Left]:
    """Find activations of a linear layer, softmax and dropout that a module calls as functions.

    Only the module's own linear layers count.
    """
    scope = view.watch(module)
    if isinstance(scope, str):
        return
    own = [consumer for producer, consumer in scope.edges if producer is module]
    if own:
        what = " + ".join(dict.fromkeys(map(str, own)))
        yield Left(
            module, what, "functions, which fuse() cannot replace: call torchweld.functional"
        )
    for producer, consumer in scope.edges:
        if isinstance(consumer, str) and view.linear(producer):
            what = f"{type(producer).__name__} + {consumer}"
            yield Left(producer, what, "its activation is a function: there is no module to change")
