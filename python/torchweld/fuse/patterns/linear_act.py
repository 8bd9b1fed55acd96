"""A linear layer whose result goes only into an activation module."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchweld import functional
from torchweld.fuse import probe
from torchweld.fuse.patterns.activation import Identity, in_words
from torchweld.fuse.view import Left, Proposal, Scope, View
from torchweld.fuse.weld import Change, Weld


class LinearAct(Weld, torch.nn.Module):
    """A linear layer with its activation; no torch.nn.Linear, as torchweld.nn.LinearAct is none."""

    weld_keeps_class = False
    weld_activation: str
    weld_approximate: str
    weld_transposed: bool
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight.t() if self.weld_transposed else self.weight
        return functional.linear_act(
            input,
            weight,
            self.bias,
            activation=self.weld_activation,
            approximate=self.weld_approximate,
        )

    def extra_repr(self) -> str:
        inner = self.welded_from.extra_repr(self)  # type: ignore[attr-defined]
        return (
            f"{inner}, activation={self.weld_activation!r}, approximate={self.weld_approximate!r}"
        )


def find_linear_act(module: torch.nn.Module, view: View) -> Iterator[Proposal | Left]:
    """The activations among a module's children, with the linear layers before them."""
    activations = [child for child in module.children() if view.activation(child)]
    for consumer in activations:
        yield from _with(consumer, module, view)
    if not activations and any(view.linear(child) for child in module.children()):
        yield from _functional(module, view)


def _with(
    consumer: torch.nn.Module, parent: torch.nn.Module, view: View
) -> Iterator[Proposal | Left]:
    kind = view.activation(consumer)
    assert kind is not None
    scope = sequential(parent, consumer) or view.scope(parent, consumer)
    what = type(consumer).__name__
    if isinstance(scope, str):
        yield Left(consumer, what, f"whether a linear layer feeds it is not known: {scope}")
        return
    producers = {e.producer for e in scope.edges if e.consumer is consumer}
    if len(producers) != 1:
        if sum(view.linear(producer) is not None for producer in producers) > 1:
            yield Left(consumer, what, "it follows several linear layers")
        return
    (producer,) = producers
    form = view.linear(producer)
    if form is None:
        return
    what = f"{type(producer).__name__} + {what}"
    if any(e.producer is producer and e.consumer is not consumer for e in scope.edges):
        yield Left(producer, what, "the result goes elsewhere too")
        return
    changes = (
        Change(
            producer,
            LinearAct,
            f"linear_act ({in_words(kind)})",
            {"activation": kind[0], "approximate": kind[1], "transposed": form == "transposed"},
        ),
        Change(consumer, Identity),
    )
    yield Proposal(
        producer,
        what,
        changes,
        scope.module,
        inner=(producer, consumer),
        inputs=scope.inputs or None,
    )


def sequential(parent: torch.nn.Module, consumer: torch.nn.Module) -> Scope | None:
    """In a torch.nn.Sequential the edge is known without a run."""
    if type(parent).forward is not torch.nn.Sequential.forward:
        return None
    children = list(parent)  # type: ignore[call-overload]
    at = next(at for at, child in enumerate(children) if child is consumer)
    if at == 0:
        return None
    pair = torch.nn.Sequential(children[at - 1], consumer)
    return Scope(pair, (), [probe.Edge(children[at - 1], consumer)])


def _functional(module: torch.nn.Module, view: View) -> Iterator[Left]:
    """Functions that the module calls on what a linear layer of its own returned."""
    scope = view.watched(module)
    if isinstance(scope, str):
        return
    known = ("gelu", "relu", "silu", "sigmoid", "tanh")
    for producer, consumer in scope.edges:
        if isinstance(consumer, str) and consumer.endswith(known) and view.linear(producer):
            what = f"{type(producer).__name__} + {consumer}"
            yield Left(producer, what, "its activation is a function: there is no module to change")
