"""Gated MLPs: a product of two linear layers, one of them activated, then a third linear layer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion import probe
from torchweld.fusion.patterns.activation import in_words
from torchweld.fusion.twin import Twin
from torchweld.fusion.view import View
from torchweld.fusion.weld import Proposal, Tried, propose
from torchweld.names import ActivationName, Approximation
from torchweld.ops.activation import ACTIVATIONS


class GatedMLP(Tried):
    """after(down(dropout(activation(gate(x)) * up(x)))), where `after` is another dropout.

    Its layers stay separate modules. Without `down` it ends at the product, as diffusers' GEGLU.
    """

    weld_gate: str
    weld_up: str | None  # None: one layer computes gate and up
    weld_down: str | None
    weld_dropout: str | None
    weld_after: str | None
    weld_gate_is_first: bool
    weld_activation: ActivationName
    weld_approximate: Approximation

    def weld_run(self, x: torch.Tensor) -> Any:
        gate = getattr(self, self.weld_gate)(x)
        if self.weld_up is None:
            first, second = gate.chunk(2, -1)
            gate, up = (first, second) if self.weld_gate_is_first else (second, first)
        else:
            up = getattr(self, self.weld_up)(x)
        hidden = functional.gated_act(
            gate, up, activation=self.weld_activation, approximate=self.weld_approximate
        )
        if self.weld_dropout is not None:
            hidden = getattr(self, self.weld_dropout)(hidden)
        if self.weld_down is None:
            return hidden
        down = getattr(self, self.weld_down)
        y = down(_cast_as_weight(hidden, down))
        return y if self.weld_after is None else getattr(self, self.weld_after)(y)


def _cast_as_weight(hidden: torch.Tensor, layer: torch.nn.Module) -> torch.Tensor:
    """Cast to the dtype of the layer's weight: T5 keeps the last layer in float32."""
    if "parametrizations" in layer._modules:  # reading the weight may change it
        return hidden
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype is hidden.dtype:
        return hidden
    if torch.is_autocast_enabled(hidden.device.type) or not weight.is_floating_point():
        return hidden
    return hidden.to(weight.dtype)


def find_gated_mlp(module: torch.nn.Module, view: View) -> Iterator[Proposal]:
    """A module of two or three linear layers, an activation and at most two dropouts.

    The activation may be a function, which the module calls on the result of a layer. timm's MLPs
    have an identity in place of a norm.
    """
    children = dict(module.named_children())
    if not 1 <= len(children) <= 7:
        return
    identities = [name for name, child in children.items() if type(child) is torch.nn.Identity]
    children = {name: child for name, child in children.items() if name not in identities}
    activations = [name for name, child in children.items() if view.activation(child)]
    dropouts = [name for name, child in children.items() if isinstance(child, torch.nn.Dropout)]
    layers = {name: size for name, child in children.items() if (size := view.sizes(child))}
    others = len(children) - len(activations) - len(dropouts) - len(layers)
    if len(activations) > 1 or others or len(dropouts) > 2:
        return
    ways = list(_list_ways(layers))
    widths = [size[1] for size in layers.values()]
    if not ways or (len(widths) == 1 and not _splits(module, widths[0], view)):
        return
    if activations:
        kinds = [kind for name in activations if (kind := view.activation(children[name]))]
    else:
        kinds = _find_functions(module, ways, view)
    inner = (*activations, *identities)
    parts = tuple(module.get_submodule(name) for name in inner)
    for way, kind, drops in itertools.product(ways, kinds, _list_places(dropouts)):
        settings = {**way, **drops, "activation": kind[0], "approximate": kind[1], "inner": inner}
        yield propose(module, GatedMLP, f"gated_act ({in_words(kind)})", settings, inner=parts)


def _list_places(dropouts: list[str]) -> list[dict[str, str | None]]:
    """List the places of dropouts: on the product, after the last layer, or one on each."""
    if len(dropouts) < 2:
        first = dropouts[0] if dropouts else None
        places = [(first, None), *([(None, first)] if dropouts else [])]
    else:
        places = [(dropouts[0], dropouts[1]), (dropouts[1], dropouts[0])]
    return [{"dropout": inside, "after": after} for inside, after in places]


def _splits(module: torch.nn.Module, width: int, view: View) -> bool:
    """Whether a module halves its layer's result, which no other module or function gets whole."""
    scope = view.watch(module)
    if isinstance(scope, str) or any(edge.producer is not module for edge in scope.edges):
        return False
    y = probe.call(Twin(module, view.device(module), torch.float32).module, scope.inputs)
    return isinstance(y, torch.Tensor) and 2 * y.shape[-1] == width


def _find_functions(
    module: torch.nn.Module, ways: list[dict[str, Any]], view: View
) -> list[tuple[str, str]]:
    """Find the activations that a module may call as a function on the result of a layer."""
    scope = view.watch(module) if ways else ""
    if isinstance(scope, str):
        return []
    functions = {edge.consumer for edge in scope.edges if isinstance(edge.consumer, str)}
    names = {name.rpartition(".")[2] for name in functions}
    return [kind for kind in ACTIVATIONS if kind[0] in names and kind[0] != "identity"]


def _list_ways(layers: dict[str, tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """List the roles that the layers' sizes allow, with the usual order first."""
    if len(layers) == 1 and (name := next(iter(layers))) and layers[name][1] % 2 == 0:
        for first in (False, True):
            yield {"gate": name, "up": None, "down": None, "gate_is_first": first}
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
