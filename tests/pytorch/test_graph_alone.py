"""What a module computes by itself: proven on its recorded forward, of mutants on none."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from mutants import MLP, MLPS, NORMS, ROOTS, WIDTH, Norm, make_odd
from torchweld.fusion.graph.alone import STATES, Alone, CannotRecordError, Known, State
from torchweld.fusion.graph.mlp import GatedMLP, read_gated_mlp
from torchweld.fusion.graph.patterns import rms_norm

KINDS = ("rounded", "wide", "plus_one", "promoted", "torch")
ODD = {
    **{name: make_odd(Norm, forward=forward) for name, forward in NORMS.items()},
    **{name: make_odd(Norm, root=root) for name, root in ROOTS.items()},
}


def _why_not(module: Any, state: State, kind: str) -> str:
    """Why a module is no RMSNorm of its weight and eps in one state."""
    try:
        alone = Alone(module, type(module).forward, [torch.empty(3, 5, WIDTH)], state)
    except CannotRecordError as error:
        return str(error)
    return alone.why_not(lambda twin, x: rms_norm.compute(x, twin.weight, twin.eps, kind))


def _is_norm(module: Any) -> bool:
    """As a layer of `kernels` would need it."""
    return all(any(not _why_not(module, state, kind) for kind in KINDS) for state in STATES)


def test_a_norm() -> None:
    module = Norm()
    before, tensor = dict(vars(module)), module.weight
    module.register_forward_hook(lambda *given: pytest.fail("a hook ran"))
    assert _is_norm(module)
    assert module.weight is tensor
    assert vars(module) == before
    module.eps = 1e-5
    assert _is_norm(module)


@pytest.mark.parametrize("name", ODD)
def test_no_mutant_is_a_norm(name: str) -> None:
    assert not _is_norm(ODD[name]())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a branch on the length", "decides by the sizes"),
        ("a counter", "changes its attributes"),
        ("a hook inside", "registers a hook"),
        ("a root without gradients", "a part without gradients"),
        ("a branch on values", "does not run on fake tensors"),
        ("an offset", "add by 0.25 stands where mul is expected"),
    ],
)
def test_reasons(name: str, reason: str) -> None:
    assert reason in _why_not(ODD[name](), State(), "rounded")


class Dropped(MLP):
    """One with a dropout in the place of T5's, or after the last layer."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.drop, self.after = nn.Dropout(0.3), after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.act(self.gate(x)) * self.up(x)
        return self.drop(self.down(hidden)) if self.after else self.down(self.drop(hidden))


class Packed(nn.Module):
    """One layer for gate and up, in this order or the other one."""

    def __init__(self, gate_is_first: bool) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(WIDTH, 2 * 48), nn.Linear(48, WIDTH)
        self.gate_is_first = gate_is_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, -1)
        gate, up = (gate, up) if self.gate_is_first else (up, gate)
        return self.out(nn.functional.silu(gate) * up)


@pytest.mark.parametrize(
    ("module", "parts"),
    [
        (MLP(), GatedMLP("gate", "up", "down")),
        (Dropped(False), GatedMLP("gate", "up", "down", dropout="drop")),
        (Dropped(True).eval(), GatedMLP("gate", "up", "down", after="drop")),
        (Packed(True), GatedMLP("both", None, "out")),
        (Packed(False), GatedMLP("both", None, "out", gate_is_first=False)),
    ],
)
def test_parts_of_gated_mlps(module: Any, parts: GatedMLP) -> None:
    found = read_gated_mlp(module)
    assert found is not None
    assert found[0] == parts
    assert found[1].name == "silu"


@pytest.mark.parametrize("name", [name for name in MLPS if name != "in place"])
def test_no_mutant_is_a_gated_mlp(name: str) -> None:
    assert read_gated_mlp(make_odd(MLP, forward=MLPS[name])()) is None


def test_equal_modules_are_asked_once() -> None:
    known, asked = Known(), []

    def ask(module: Any) -> float:
        asked.append(module)
        return float(module.eps)

    first, other, changed = Norm(), Norm(), Norm()
    changed.eps = 1e-5
    wide = copy.deepcopy(first).double()
    find = functools.partial(known.find, ask)
    assert [find(each) for each in (first, other, changed)] == [1e-6, 1e-6, 1e-5]
    find(wide)
    assert asked == [first, changed, wide]
