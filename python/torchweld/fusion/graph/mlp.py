"""The parts of a gated MLP, as proven by what the module computes by itself."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchweld.fusion.graph.alone import Alone, CannotRecordError, State
from torchweld.fusion.graph.patterns.activation import Activation, compute
from torchweld.fusion.weld import why_not_change

_MOST = 7  # children of an MLP


class GatedMLP(NamedTuple):
    """Names of children: down(dropout(activation(gate(x)) * up(x))).

    Without `up` one layer computes both, in the order of `gate_is_first`. Another dropout may
    follow `down`.
    """

    gate: str
    up: str | None
    down: str
    gate_is_first: bool = True
    dropout: str | None = None
    after: str | None = None

    def compute(self, module: Any, x: torch.Tensor, kind: Activation) -> Any:
        """The reference, in plain torch."""
        gate = getattr(module, self.gate)(x)
        if self.up is None:
            gate, up = gate.chunk(2, -1) if self.gate_is_first else gate.chunk(2, -1)[::-1]
        else:
            up = getattr(module, self.up)(x)
        hidden = compute(gate, kind) * up
        if self.dropout is not None:
            hidden = getattr(module, self.dropout)(hidden)
        down = getattr(module, self.down)
        if not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(down.weight.dtype)  # T5 keeps the last layer in float32
        y = down(hidden)
        return y if self.after is None else getattr(module, self.after)(y)


def read_gated_mlp(module: Any) -> tuple[GatedMLP, Activation] | None:
    """The parts of a module that is a gated MLP, and its activation."""
    children = dict(module.named_children())
    dropouts = [name for name, child in children.items() if isinstance(child, torch.nn.Dropout)]
    layers = {name: size for name, child in children.items() if (size := _read_sizes(child))}
    ways = list(_list_ways(layers)) if len(children) <= _MOST else []
    if not ways or len(dropouts) > 2 or why_not_change(module):
        return None
    width, weight = layers[ways[0].gate][0], children[ways[0].gate].weight
    x = torch.empty(3, 5, width, dtype=weight.dtype, device=weight.device)
    try:
        alone = Alone(module, type(module).forward, [x], State(training=True))
    except CannotRecordError:
        return None
    places = itertools.permutations([*dropouts, None, None], 2)
    for way, (dropout, after) in itertools.product(ways, dict.fromkeys(places)):
        mlp = way._replace(dropout=dropout, after=after)
        for kind in alone.list_kinds():
            if not alone.why_not(lambda twin, x, mlp=mlp, kind=kind: mlp.compute(twin, x, kind)):
                return mlp, kind
    return None


def _read_sizes(module: Any) -> tuple[int, int] | None:
    """The widths of the input and the result of a linear layer, or of GPT-2's Conv1D."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or module._modules:
        return None
    if hasattr(module, "in_features"):
        return weight.shape[1], weight.shape[0]
    return (weight.shape[0], weight.shape[1]) if hasattr(module, "nf") else None


def _list_ways(layers: dict[str, tuple[int, int]]) -> Iterator[GatedMLP]:
    """The roles that sizes allow, in the usual order first."""
    for down, (hidden, _) in reversed(layers.items()):
        rest = [name for name in layers if name != down]
        if len(rest) == 1 and layers[rest[0]][1] == 2 * hidden:
            yield from (GatedMLP(rest[0], None, down, first) for first in (True, False))
        if len(rest) == 2 and layers[rest[0]] == layers[rest[1]] and hidden == layers[rest[0]][1]:
            yield from (GatedMLP(gate, up, down) for gate, up in (rest, rest[::-1]))
