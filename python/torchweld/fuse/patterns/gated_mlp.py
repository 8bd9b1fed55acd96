"""Gated MLPs: a product of two linear layers, one of them activated, then a third linear layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.fuse.patterns.activation import in_words
from torchweld.fuse.view import Left, Proposal, View, is_welded, why_fixed
from torchweld.fuse.weld import Change, Weld
from torchweld.ops.activation.common import ACTIVATIONS


class GatedMLP(Weld):
    """down(dropout(activation(gate(x)) * up(x))). Its layers stay separate modules."""

    weld_gate: str
    weld_up: str | None  # None: one layer computes gate and up
    weld_down: str
    weld_dropout: str | None
    weld_gate_is_first: bool
    weld_activation: str
    weld_approximate: str

    def forward(self, *given: Any, **named: Any) -> Any:
        tried = self.weld_tried(given, named)
        if tried is None:
            return self.welded_from.forward(self, *given, **named)
        (x,) = tried
        gate = getattr(self, self.weld_gate)(x)
        if self.weld_up is None:
            first, second = gate.chunk(2, -1)
            gate, up = (first, second) if self.weld_gate_is_first else (second, first)
        else:
            up = getattr(self, self.weld_up)(x)
        hidden = functional.gated_act(gate, up, self.weld_activation, self.weld_approximate)
        if self.weld_dropout is not None:
            hidden = getattr(self, self.weld_dropout)(hidden)
        down = getattr(self, self.weld_down)
        return down(_as_weight(hidden, down))


def _as_weight(hidden: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    """Cast to the weight's dtype: T5 keeps the last layer in float32."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype is hidden.dtype:
        return hidden
    if torch.is_autocast_enabled(hidden.device.type) or not weight.is_floating_point():
        return hidden
    return hidden.to(weight.dtype)


def find_gated_mlp(module: torch.nn.Module, view: View) -> Iterator[Proposal | Left]:
    """A module of two or three linear layers, an activation and optionally a dropout.

    The activation may be a function, which the module calls on the result of a layer.
    """
    children = dict(module.named_children())
    if is_welded(module) or not 2 <= len(children) <= 5:
        return
    activations = [name for name, child in children.items() if view.activation(child)]
    dropouts = [name for name, child in children.items() if isinstance(child, torch.nn.Dropout)]
    layers = {name: size for name, child in children.items() if (size := view.sizes(child))}
    others = len(children) - len(activations) - len(dropouts) - len(layers)
    if len(activations) > 1 or others or len(dropouts) > 1:
        return
    ways = list(_ways(layers))
    if not ways:
        return
    if activations:
        kinds = [kind for name in activations if (kind := view.activation(children[name]))]
    else:
        ways = [way for way in ways if way["up"] is not None]
        kinds = _functions(module, ways, view)
    what = type(module).__name__
    if reason := why_fixed(module):
        yield Left(module, what, reason)
        return
    for way, kind in itertools.product(ways, kinds):
        settings: dict[str, Any] = {
            **way,
            "dropout": dropouts[0] if dropouts else None,
            "activation": kind[0],
            "approximate": kind[1],
            "inner": tuple(activations),
        }
        yield Proposal(
            module,
            what,
            (Change(module, GatedMLP, f"gated_act ({in_words(kind)})", settings),),
            module,
            inner=tuple(children[name] for name in activations),
        )


def _functions(
    module: torch.nn.Module, ways: list[dict[str, Any]], view: View
) -> list[tuple[str, str]]:
    """The activations that a module may call as a function on one of its layers' results."""
    scope = view.watched(module) if ways else ""
    if isinstance(scope, str):
        return []
    called = {edge.consumer for edge in scope.edges if isinstance(edge.consumer, str)}
    names = {name.rpartition(".")[2] for name in called}
    return [kind for kind in ACTIVATIONS if kind[0] in names and kind[0] != "identity"]


def _ways(layers: dict[str, tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """The roles that the layers' sizes allow, with the usual order first."""
    for down, (hidden, _) in layers.items():
        rest = [name for name in layers if name != down]
        if len(rest) == 1 and layers[rest[0]][1] == 2 * hidden:
            for first in (True, False):
                yield {"gate": rest[0], "up": None, "down": down, "gate_is_first": first}
        if (
            len(rest) == 2
            and len({layers[name] for name in rest}) == 1
            and hidden == layers[rest[0]][1]
        ):
            for gate, up in (rest, rest[::-1]):
                yield {"gate": gate, "up": up, "down": down, "gate_is_first": True}
