"""Activations that eager torch computes in several passes, or slowly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion import probe
from torchweld.fusion.modules import is_welded, why_not_change
from torchweld.fusion.proposals import Left, Proposal
from torchweld.fusion.view import View
from torchweld.fusion.weld import Change, Weld
from torchweld.names import ActivationName, Approximation

# Eager torch's kernels for these modules move no more bytes than ours.
_FAST_IN_EAGER = (torch.nn.ReLU, torch.nn.Sigmoid, torch.nn.Tanh, torch.nn.SiLU)


class Activation(Weld):
    """An activation in one pass."""

    weld_activation: ActivationName
    weld_approximate: Approximation

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.weld_arguments(args, kwargs)
        if arguments is None:
            return self.welded_from.forward(self, *args, **kwargs)
        (x,) = arguments
        return functional.bias_act(
            x, activation=self.weld_activation, approximate=self.weld_approximate
        )


def in_words(kind: tuple[str, str]) -> str:
    """An activation's name in tables."""
    return kind[0] if kind[1] == "none" else f"{kind[0]} by {kind[1]}"


def find_activation(module: torch.nn.Module, view: View) -> Iterator[Proposal | Left]:
    """A module that computes one of torchweld's activations in any way."""
    if is_welded(module) or type(module) in _FAST_IN_EAGER:
        return
    kind = view.activation(module)
    if kind is None or kind[0] in ("relu", "sigmoid", "tanh"):
        return
    what = type(module).__name__
    if getattr(module, "inplace", False):
        yield Left(module, what, "it works in place, and torchweld's would need another tensor")
    elif reason := why_not_change(module):
        yield Left(module, what, reason)
    else:
        settings = {"activation": kind[0], "approximate": kind[1]}
        changes = (Change(module, Activation, f"bias_act ({in_words(kind)})", settings),)
        inputs = (probe.values((4, 5, 48), view.device(module)),)
        yield Proposal(module, what, changes, module, inputs=inputs)
