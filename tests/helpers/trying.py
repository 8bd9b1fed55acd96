"""Trials without a GPU: CPU kernels stand for a GPU's, and made-up times for its clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from torchweld.dispatch import choice
from torchweld.dispatch.engine import asking
from torchweld.dispatch.engine.asking import Engine
from torchweld.dispatch.engine.question import Answer
from torchweld.dispatch.engine.store import Store
from torchweld.dispatch.warm import cache

CONDITIONS = {"device": "a GPU"}


@dataclass
class Trials:
    """The engine of the fake GPU, and the milliseconds that its clock finds, by contender."""

    engine: Engine
    ms: dict[str, float] = field(default_factory=dict)
    timed: list[list[str]] = field(default_factory=list)  # the contenders of each trial

    def take_times(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        self.timed.append(list(calls))
        return {name: self.ms[name] for name in calls}

    def run_and_time(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        """Run all contenders, as a GPU's clock does; one without a time takes 9 ms."""
        for run in calls.values():
            run()
        self.timed.append(list(calls))
        return {name: self.ms.get(name, 9.0) for name in calls}

    def answers(self) -> list[Answer]:
        return [entry.answer for entry in self.engine.entries()]


def try_on_cpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Trials:
    """Try CPU tensors as a GPU's, with answers of their own, as `torchweld tune` does."""
    trials = Trials(Engine(Store(folder / "answers.json"), CONDITIONS))
    monkeypatch.setattr(choice, "is_on_gpu", lambda x: not torch.compiler.is_compiling())
    monkeypatch.setattr(asking, "engine_for", lambda device: trials.engine)
    monkeypatch.setattr(asking, "take_times", trials.take_times)
    monkeypatch.setattr(asking, "has_trials", lambda device: True)
    monkeypatch.setattr(asking, "mode", "check")
    forget(monkeypatch)
    return trials


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what this process knows of calls, as a new one does."""
    monkeypatch.setattr(asking, "_served", {})
    cache.forget()
