"""What a capture reads in a short way has the result of the long way, and the same guards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torchweld.fusion.graph import answers, shortcuts
from words import Words, compare, fuse_two, list_ops, make_ids, step

pytestmark = pytest.mark.usefixtures("own_graphs")


class Settings:
    """A configuration whose attributes pass through its own code."""

    names: dict[str, str] = {}  # noqa: RUF012 - for copies, which begin without
    other: float

    def __init__(self) -> None:
        self.names, self.scale, self.inner = {"factor": "scale"}, 1.0, Inner()

    def __getattribute__(self, name: str) -> Any:
        names = super().__getattribute__("names")
        if name == "deep":
            return super().__getattribute__("inner").size
        return super().__getattribute__(names.get(name, name))


class Inner:
    """A part of a configuration."""

    size = 1.0


KNOWN = {type(f"Known{at}", (), {}) for at in range(100)}


class Reading(Words):
    """A forward that does something between two readings of its settings."""

    def __init__(self, change: Callable[[Reading], None] | None = None) -> None:
        super().__init__()
        self.settings, self.change, self.kind = Settings(), change, next(iter(KNOWN))
        self.kinds = set(KNOWN)
        self.count = len(self.layers)

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids) * self.settings.factor * self.settings.deep
        if self.kind in self.kinds:
            x = x * 0.5
        for layer in self.layers[: self.count]:
            x = layer(x) * self.settings.factor * self.settings.deep
        if self.change is not None:
            self.change(self)
        for at, layer in enumerate(self.layers[1 : self.count]):
            x = layer(x) * self.settings.factor * self.settings.deep + at
        if self.kind not in self.kinds:
            x = x * 0.25
        logits = self.head(self.norm(x))
        target = ids.roll(-1, 1).view(-1)
        return nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), target), logits


def _set_scale(model: Reading) -> None:
    model.settings.scale = model.settings.scale * 0.5


def _set_names(model: Reading) -> None:
    model.settings.names = {"factor": "other"}
    model.settings.other = 0.75


def _write_names(model: Reading) -> None:
    model.settings.names["factor"] = "other"
    model.settings.other = 0.75


def _hold_another(model: Reading) -> None:
    inner = Inner()
    model.settings.inner = inner
    inner.size = 0.5  # of a new object, to which one from outside refers


def _hold_before(model: Reading) -> None:
    held = Inner()
    names = {"held": held}
    model.settings.inner = held
    assert model.settings.deep == 1.0
    names["held"].size = 0.5


CHANGES = (_set_scale, _set_names, _write_names, _hold_another, _hold_before)


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_forward_changes_between_two_readings(change: Callable[[Reading], None]) -> None:
    torch.manual_seed(0)
    got, want = fuse_two(Reading(change))
    for _ in range(3):  # what it changes stays changed
        compare(step(got, make_ids()), step(want, make_ids()))
    assert got.settings.scale == want.settings.scale
    assert (got.kind in got.kinds) == (want.kind in want.kinds)
    assert "linear_cross_entropy" in list_ops(got)


class Kinds(set[type]):
    """Another class."""


WRITES: dict[str, Callable[[Reading], Any]] = {
    "discard": lambda model: model.kinds.discard(model.kind),
    "remove": lambda model: model.kinds.remove(model.kind) if model.kind in model.kinds else None,
    "clear": lambda model: model.kinds.clear(),
    "pop": lambda model: model.kinds.pop() if model.kinds else None,
    "add": lambda model: model.kinds.add(Inner),
    "update": lambda model: model.kinds.update({Inner}),
    "difference_update": lambda model: model.kinds.difference_update({model.kind}),
}


@pytest.mark.parametrize("cls", [set, Kinds])
@pytest.mark.parametrize("name", WRITES)
def test_a_set_that_the_forward_writes(name: str, cls: type) -> None:
    """Dynamo forgot what a forward does to a set from outside: the next step was wrong in silence,
    as is torch.compile's. No test had such a forward.
    """
    torch.manual_seed(0)
    got, want = fuse_two(Reading(WRITES[name]))
    got.kinds, want.kinds = cls({Settings}), cls({Settings})
    got.kind = want.kind = Inner if name in ("add", "update") else Settings
    for _ in range(2):
        compare(step(got, make_ids()), step(want, make_ids()))
        assert got.kinds == want.kinds


def _later(name: str, value: Any) -> Callable[[Reading], None]:
    return lambda model: setattr(model.settings, name, value)


LATER = {
    "scale": _later("scale", 0.5),
    "names": _later("names", {}),
    "written names": lambda model: model.settings.names.pop("factor") and None,
    "inner": lambda model: setattr(model.settings.inner, "size", 0.5),
    "set": lambda model: model.kinds.remove(model.kind),
    "kind": lambda model: setattr(model, "kind", Inner),
    "count": lambda model: setattr(model, "count", 1),
    "layers": lambda model: model.layers.append(model.layers[0]),
}


@pytest.mark.parametrize("name", LATER)
def test_what_changes_after_the_first_call(name: str) -> None:
    torch.manual_seed(0)
    got, want = fuse_two(Reading())
    compare(step(got, make_ids()), step(want, make_ids()))
    for model in (got, want):
        model.settings.factor = 0.125  # what is left of it where no name is mapped
        LATER[name](model)
        model.count = min(model.count, len(model.layers))
    compare(step(got, make_ids()), step(want, make_ids()))


def test_it_is_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each setting is evaluated once, no variable is made of the set's classes, and no list."""
    torch.manual_seed(0)
    got, _ = fuse_two(Reading())
    evaluated: list[str] = []
    settings: Any = shortcuts.UserDefinedObjectVariable
    answers._install()
    read = getattr(settings, shortcuts.READ).__closure__[0].cell_contents

    def note(variable: Any, tx: Any, name: str) -> Any:
        if variable.value is got.settings:
            evaluated.append(name)
        return read(variable, tx, name)

    monkeypatch.setattr(settings, shortcuts.READ, shortcuts._remember(note))
    made: list[Any] = []
    begin = shortcuts.LazyVariableTracker.realize

    def realize(lazy: Any) -> Any:
        if not lazy.is_realized():
            made.append(lazy.peek_value())
        return begin(lazy)

    monkeypatch.setattr(shortcuts.LazyVariableTracker, "realize", realize)
    step(got, make_ids())
    assert sorted(evaluated) == ["deep", "factor"]
    classes = [each for each in made if isinstance(each, type)]
    assert len(set(classes) & KNOWN) <= 1
