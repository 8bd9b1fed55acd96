"""Finds modules whose results only one other module reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchweld.fuse import probe
from torchweld.fuse.patterns.activation import Identity, in_words
from torchweld.fuse.view import Left, Proposal, Scope, View, forward_of, hooks_in_words
from torchweld.fuse.weld import Change, Weld, why_not_merged


class Pair(NamedTuple):
    """A module whose result only one other module reads, and the scope that was run to find it."""

    producer: torch.nn.Module
    scope: Scope


def pair_before(
    consumer: torch.nn.Module, parent: torch.nn.Module, view: View
) -> Pair | Left | None:
    """The only module that feeds `consumer`, a child of `parent`, if there is one."""
    scope = _in_sequence(parent, consumer) or view.scope(parent, consumer)
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
        for around in view.between(part, scope.module):
            if hooks := hooks_in_words(around, besides=None):
                called = view.names[id(around)]
                return Left(consumer, what, f"{called} has {hooks}, which would see another result")
    return Pair(producer, scope)


def with_activation(
    pair: Pair,
    consumer: torch.nn.Module,
    what: str,
    weld: type[Weld],
    op: str,
    kind: tuple[str, str],
    **settings: Any,
) -> Proposal | Left:
    """Compute the activation in the producer with this op; the activation becomes an identity."""
    producer = pair.producer
    for part in (producer, consumer):
        if reason := why_not_merged(part):
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


def _in_sequence(parent: torch.nn.Module, consumer: torch.nn.Module) -> Scope | None:
    """The edge in a torch.nn.Sequential, which needs no run."""
    if forward_of(parent) is not torch.nn.Sequential.forward:
        return None
    children = list(parent.children())
    at = next(at for at, child in enumerate(children) if child is consumer)
    if at == 0 or not probe.is_leaf(children[at - 1]):
        return None
    pair = torch.nn.Sequential(children[at - 1], consumer)
    return Scope(pair, (), [probe.Edge(children[at - 1], consumer)])
