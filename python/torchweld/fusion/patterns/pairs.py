"""Fuses two consecutive submodules when the parent's forward requests it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchweld.fusion.probe import is_leaf
from torchweld.fusion.rewrite import find_pairs, rewrite_pairs
from torchweld.fusion.view import Scope, View
from torchweld.fusion.weld import (
    Change,
    Kind,
    Proposal,
    Rewritten,
    Skipped,
    Weld,
    forward_of,
    has_global_hooks,
    is_bare,
    is_of_kind,
    kind_of,
    name_hooks,
    why_not_change,
    why_not_own_forward,
)

# Packages whose hooks see to weights, not to results.
_OF_WEIGHTS = ("torch.distributed", "torchweld.distributed")


class Asked(NamedTuple):
    """Names of two submodules. One of them is skipped if the other has this weld.

    The other is told what to compute: it may be the layer of another activation since.
    """

    first: str
    second: str
    weld: type[Weld]
    skips_second: bool
    skipped: Kind
    what: Any  # the weld's argument


class Asking(Weld):
    """A module around pairs. Its own forward asks; any other call means what it meant."""

    weld_shares = True
    weld_pairs: tuple[Asked, ...]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "welded_from" in vars(cls):
            cls.weld_inner = tuple(
                pair.second if pair.skips_second else pair.first for pair in cls.weld_pairs
            )


class AskingForward(Asking, Rewritten):
    """A module whose forward is rewritten from its source."""

    @classmethod
    def weld_rewrite(cls, forward: Any) -> Any:
        return rewrite_pairs(forward, [pair[:2] for pair in cls.weld_pairs])

    def weld_pair(self, at: int, x: Any) -> Any:
        """Call both submodules of pair number `at`, or one for both."""
        asked, own = self.weld_pairs[at], self
        return run_pair(getattr(own, asked.first), getattr(own, asked.second), asked, x)


class AskingSequence(Asking):
    """A torch.nn.Sequential."""

    _modules: dict[str, Any]

    def forward(self, input: Any) -> Any:
        pairs = {pair.first: pair for pair in self.weld_pairs}
        names = list(self._modules)
        at = 0
        while at < len(names):
            asked, module = pairs.get(names[at]), self._modules[names[at]]
            if asked is not None and names[at + 1 : at + 2] == [asked.second]:
                input = run_pair(module, self._modules[asked.second], asked, input)
                at += 2
            else:
                input = module(input)
                at += 1
        return input


class PairOnly(torch.nn.Module):
    """Two modules in a row, to be tried or measured on their own."""

    def __init__(self, first: torch.nn.Module, second: torch.nn.Module, asked: Asked) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.asked = asked._replace(first="first", second="second")

    def forward(self, x: Any) -> Any:
        return run_pair(self.first, self.second, self.asked, x)


def run_pair(first: Any, second: Any, asked: Asked, x: Any) -> Any:
    """second(first(x)), by one of them if both are as they were when they were fused."""
    works, skipped = (first, second) if asked.skips_second else (second, first)
    as_then = is_of_kind(skipped, asked.skipped) and is_bare(skipped) and not has_global_hooks()
    if as_then and can_ask(works, asked.weld):
        return works(x, weld_asked=asked.what)
    return second(first(x))


def can_ask(module: Any, weld: type[Weld]) -> bool:
    """Whether a module has this weld, and nobody sees its result first."""
    if not isinstance(module, weld) or is_bare(module):
        return isinstance(module, weld)
    own: Any = module
    return not (why_not_own_forward(own) or name_hooks(own, besides=_OF_WEIGHTS))


# --- Recognition ----------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A module whose result only a second one reads, and the scope in which they ran.

    The scope is None in a torch.nn.Sequential, which needs no run.
    """

    first: torch.nn.Module
    second: torch.nn.Module
    scope: Scope | None

    @property
    def what(self) -> str:
        """The pair in words."""
        return f"{type(self.first).__name__} + {type(self.second).__name__}"


def find_pair(
    consumer: torch.nn.Module, parent: torch.nn.Module, view: View
) -> Pair | Skipped | None:
    """Find the only module that feeds `consumer`, a child of `parent`."""
    if before := _find_in_sequence(parent, consumer):
        return Pair(before, consumer, None)
    scope = view.find_scope(parent, consumer)
    what = f"{type(consumer).__name__} and the layer before it"
    if scope is None:
        return None
    if isinstance(scope, str):
        return Skipped(consumer, what, f"its producer is unknown: {scope}")
    producers = {edge.producer for edge in scope.edges if edge.consumer is consumer}
    if len(producers) != 1:
        several = sum(view.linear(producer) is not None for producer in producers) > 1
        return Skipped(consumer, what, "it follows several layers") if several else None
    (producer,) = producers
    if any(e.producer is producer and e.consumer is not consumer for e in scope.edges):
        return Skipped(consumer, what, f"the {type(producer).__name__} before it also feeds others")
    return Pair(producer, consumer, scope)


def propose_pair(
    pair: Pair, parent: torch.nn.Module, change: Change, asked: Any, drops: bool = False
) -> Proposal | Skipped:
    """Propose that the changed one of two modules computes both where `parent` asks it to."""
    skips_second = change.module is pair.first
    found = _find_asked(parent, pair, change.weld, skips_second, asked)
    if isinstance(found, str):
        return Skipped(change.module, pair.what, found)
    made, asking = found
    part = PairOnly(pair.first, pair.second, made)
    return Proposal(
        change.module,
        pair.what,
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
    return children[at - 1] if at and is_leaf(children[at - 1]) else None


def _find_asked(
    parent: torch.nn.Module, pair: Pair, weld: type[Weld], skips_second: bool, what: Any
) -> tuple[Asked, Change] | str:
    """The pair and the change of the module around it that asks for it, or why there is none."""
    first, second, _ = pair
    names = {id(child): name for name, child in parent._modules.items()}
    if id(first) not in names or id(second) not in names:
        return f"the layer before it is not {type(parent).__name__}'s own"
    skipped = kind_of(second if skips_second else first)
    asked = Asked(names[id(first)], names[id(second)], weld, skips_second, skipped, what)
    if reason := why_not_change(parent):
        return f"{type(parent).__name__}: {reason}"
    if forward_of(parent) is torch.nn.Sequential.forward:
        order = list(parent._modules)
        if order.index(asked.second) != order.index(asked.first) + 1:
            return "another module stands between them"
        return asked, Change(parent, AskingSequence, "", {"pairs": (asked,)})
    pairs, reason = find_pairs(forward_of(parent))
    if (asked.first, asked.second) not in pairs:
        return f"{type(parent).__name__}: {reason}" if reason else _NOT_STRAIGHT
    return asked, Change(parent, AskingForward, "", {"pairs": (asked,)})


_NOT_STRAIGHT = "the code around it does not pass the layer's result straight to it"
