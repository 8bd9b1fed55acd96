"""Two submodules in a row that one of them computes, if the module around them asks it to."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchweld.fusion.flow import find_pairs, rewrite_pairs
from torchweld.fusion.modules import forward_of, why_not_change
from torchweld.fusion.weld import Change, Weld, is_bare, name_hooks, why_not_own_forward

# Packages whose hooks see to weights, not to results.
_OF_WEIGHTS = ("torch.distributed", "torchweld.distributed")


class Asked(NamedTuple):
    """Names of two submodules. One of them is skipped if the other has this weld."""

    first: str
    second: str
    weld: type[Weld]
    skips_second: bool
    skipped: type[torch.nn.Module]


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


class AskingForward(Asking):
    """A module whose forward is rewritten from its source."""

    forward: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "welded_from" in vars(cls):
            names = [pair[:2] for pair in cls.weld_pairs]
            cls.forward = rewrite_pairs(cls.welded_from.forward, names)
        super().__init_subclass__(**kwargs)  # a base of the module's may wrap the new forward

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
    if type(skipped) is asked.skipped and is_bare(skipped) and can_ask(works, asked.weld):
        return works(x, weld_asked=True)
    return second(first(x))


def can_ask(module: Any, weld: type[Weld]) -> bool:
    """Whether a module has this weld, and nobody sees its result first."""
    if not isinstance(module, weld) or is_bare(module):
        return isinstance(module, weld)
    own: Any = module
    return not (why_not_own_forward(own) or name_hooks(own, besides=_OF_WEIGHTS))


def find_asked(
    parent: torch.nn.Module,
    first: torch.nn.Module,
    second: torch.nn.Module,
    weld: type[Weld],
    skips_second: bool,
) -> tuple[Asked, Change] | str:
    """The pair and the change of the module around it that asks for it, or why there is none."""
    names = {id(child): name for name, child in parent._modules.items()}
    if id(first) not in names or id(second) not in names:
        return f"the layer before it is not {type(parent).__name__}'s own"
    skipped = type(second if skips_second else first)
    asked = Asked(names[id(first)], names[id(second)], weld, skips_second, skipped)
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
