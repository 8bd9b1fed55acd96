"""Finds modules whose results only one other module reads."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchweld.fusion import probe
from torchweld.fusion.modules import forward_of
from torchweld.fusion.patterns.activation import in_words
from torchweld.fusion.patterns.pairs import PairOnly, find_asked
from torchweld.fusion.proposals import Left, Proposal
from torchweld.fusion.view import Scope, View
from torchweld.fusion.weld import Change, Weld


class Pair(NamedTuple):
    """A module whose result only a second one reads, and the scope in which they ran.

    The scope is None in a torch.nn.Sequential, which needs no run.
    """

    first: torch.nn.Module
    second: torch.nn.Module
    scope: Scope | None


def find_pair(consumer: torch.nn.Module, parent: torch.nn.Module, view: View) -> Pair | Left | None:
    """Find the only module that feeds `consumer`, a child of `parent`."""
    if before := _find_in_sequence(parent, consumer):
        return Pair(before, consumer, None)
    scope = view.find_scope(parent, consumer)
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
    return Pair(producer, consumer, scope)


def propose_with_activation(
    pair: Pair,
    parent: torch.nn.Module,
    what: str,
    weld: type[Weld],
    op: str,
    kind: tuple[str, str],
    **settings: Any,
) -> Proposal | Left:
    """Propose that the first module computes its activation, the second one, too."""
    settings |= {"activation": kind[0], "approximate": kind[1]}
    change = Change(pair.first, weld, f"{op} ({in_words(kind)})", settings)
    return propose_pair(pair, parent, what, change)


def propose_pair(
    pair: Pair, parent: torch.nn.Module, what: str, change: Change, drops: bool = False
) -> Proposal | Left:
    """Propose that the changed one of two modules computes both where `parent` asks it to."""
    skips_second = change.module is pair.first
    found = find_asked(parent, pair.first, pair.second, change.weld, skips_second)
    if isinstance(found, str):
        return Left(change.module, what, found)
    asked, asking = found
    part = PairOnly(pair.first, pair.second, asked)
    return Proposal(
        change.module,
        what,
        (change, asking),
        part if pair.scope is None else pair.scope.module,
        inner=(pair.first, pair.second),
        inputs=None if pair.scope is None else pair.scope.inputs,
        part=part,
        drops=drops,
    )


def _find_in_sequence(parent: torch.nn.Module, consumer: torch.nn.Module) -> torch.nn.Module | None:
    """Find the leaf before `consumer` in a torch.nn.Sequential."""
    if forward_of(parent) is not torch.nn.Sequential.forward:
        return None
    children = list(parent.children())
    at = next(at for at, child in enumerate(children) if child is consumer)
    return children[at - 1] if at and probe.is_leaf(children[at - 1]) else None
