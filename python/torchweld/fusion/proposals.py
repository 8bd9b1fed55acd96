"""The items that a recogniser yields: a proposal to weld a module, or the reason not to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchweld.fusion.weld import Change


@dataclass(frozen=True)
class Proposal:
    """Changes that make one weld.

    If a recogniser yields several for one module, the first that computes the same is used.
    """

    module: torch.nn.Module
    what: str
    changes: tuple[Change, ...]  # the first one changes `module`
    scope: torch.nn.Module  # the module to run when trying the changes of modules in it
    inner: tuple[torch.nn.Module, ...] = ()  # modules no longer called, or with another result
    inputs: tuple[Any, ...] | None = None  # inputs of `scope`; None: find some
    part: torch.nn.Module | None = None  # the module whose traffic is measured; None: `scope`
    drops: bool = False  # whether dropout is drawn from torchweld's stream
    tried: bool = False  # whether the recogniser has tried the changes, on a smaller model
    known: bool = False  # whether the classes are torch's own, so that fuse() need not try them

    def list_changes(self, scope: torch.nn.Module) -> tuple[Change, ...]:
        """The changes of modules in a scope."""
        inside = {id(module) for module in scope.modules()}
        return tuple(change for change in self.changes if id(change.module) in inside)

    @property
    def becomes(self) -> str:
        """The function that runs in the module's place, in words."""
        return self.changes[0].becomes


@dataclass(frozen=True)
class Left:
    """A module that resembles a known kind, and the reason not to change it."""

    module: torch.nn.Module
    what: str
    reason: str
