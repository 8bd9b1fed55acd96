"""Finds modules whose results only one other module reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchweld.fusion import probe
from torchweld.fusion.modules import forward_of, name_hooks
from torchweld.fusion.patterns.activation import Identity, in_words
from torchweld.fusion.proposals import Left, Proposal
from torchweld.fusion.view import Scope, View
from torchweld.fusion.weld import Change, Weld, why_not_merge


class Pair(NamedTuple):
    """A module whose result only one other module reads, and the scope in which they ran."""

    producer: torch.nn.Module
    scope: Scope


def find_pair(consumer: torch.nn.Module, parent: torch.nn.Module, view: View) -> Pair | Left | None:
    """Find the only module that feeds `consumer`, a child of `parent`."""
    scope = _find_in_sequence(parent, consumer) or view.find_scope(parent, consumer)
    what = f"{type(consumer).__name__} and the layer before it"
    if scope is None:
        return None
    if isinstance(scope, str):
        return Left(consumer, what, f"its producer is unknown: {scope}")
    producers = {edge.producer for edge in scope.edges if edge.consumer is consumer}
    if len(producers) != 1:
        several = sum(view.linear(producer) is not None for producer in producers) > 1
        return Left(consumer, what, "it follows several layers") if several else None
    (producer,) = producers
    if any(e.producer is producer and e.consumer is not consumer for e in scope.edges):
        return Left(consumer, what, f"the {type(producer).__name__} before it also feeds others")
    for part in (producer, consumer):
        for around in view.find_between(part, scope.module):
            if hooks := name_hooks(around, besides=None):
                name = view.names[id(around)]
                return Left(consumer, what, f"{name} has {hooks}, which would see another result")
    return Pair(producer, scope)


def propose_with_activation(
    pair: Pair,
    consumer: torch.nn.Module,
    what: str,
    weld: type[Weld],
    op: str,
    kind: tuple[str, str],
    **settings: Any,
) -> Proposal | Left:
    """Propose to compute the activation in the producer; the consumer becomes an identity."""
    producer = pair.producer
    for part in (producer, consumer):
        if reason := why_not_merge(part):
            return Left(part, what, reason)
    settings |= {"activation": kind[0], "approximate": kind[1]}
    return Proposal(
        producer,
        what,
        (
            Change(producer, weld, f"{op} ({in_words(kind)})", settings),
            Change(consumer, Identity),
        ),
        pair.scope.module,
        inner=(producer, consumer),
        inputs=pair.scope.inputs or None,
        part=torch.nn.Sequential(producer, consumer),
    )


def _find_in_sequence(parent: torch.nn.Module, consumer: torch.nn.Module) -> Scope | None:
    """Find the edge in a torch.nn.Sequential, which needs no run."""
    if forward_of(parent) is not torch.nn.Sequential.forward:
        return None
    children = list(parent.children())
    at = next(at for at, child in enumerate(children) if child is consumer)
    if at == 0 or not probe.is_leaf(children[at - 1]):
        return None
    pair = torch.nn.Sequential(children[at - 1], consumer)
    return Scope(pair, (), [probe.Edge(children[at - 1], consumer)])
