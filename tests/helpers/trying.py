"""Trials without a GPU: CPU kernels stand for a GPU's, and made-up times for its clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from torchweld.commands import tune
from torchweld.dispatch import choice, proof
from torchweld.dispatch.proof import Checker
from torchweld.dispatch.store import Answer, Store
from torchweld.dispatch.warm import cache

CONDITIONS = {"device": "a GPU"}


@dataclass
class Trials:
    """The checker of the fake GPU, and the milliseconds that its clock finds, by candidate."""

    checker: Checker
    ms: dict[str, float] = field(default_factory=dict)
    timed: list[list[str]] = field(default_factory=list)  # the candidates of each check

    def take_times(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        self.timed.append(list(calls))
        return {name: self.ms[name] for name in calls}

    def run_and_time(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        """Run all candidates, as a GPU's clock does; one without a time takes 9 ms."""
        for run in calls.values():
            run()
        self.timed.append(list(calls))
        return {name: self.ms.get(name, 9.0) for name in calls}

    def answers(self) -> list[Answer]:
        return [entry.answer for entry in self.checker.entries()]


def try_on_cpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Trials:
    """Try CPU tensors as a GPU's, with answers of their own, as `torchweld tune` does."""
    trials = Trials(Checker(Store(folder / "answers.json"), CONDITIONS))
    monkeypatch.setattr(choice, "is_on_gpu", lambda x: not torch.compiler.is_compiling())
    monkeypatch.setattr(proof, "checker_for", lambda device: trials.checker)
    time_by(monkeypatch, trials.take_times)
    monkeypatch.setattr(proof, "can_check", lambda device: True)
    monkeypatch.setattr(proof, "mode", "check")
    forget(monkeypatch)
    return trials


def time_by(
    monkeypatch: pytest.MonkeyPatch, take_times: Callable[[proof.Calls], dict[str, float]]
) -> None:
    """Choose tiles as `torchweld tune` does, by these milliseconds."""
    monkeypatch.setattr(tune, "take_times", take_times)
    monkeypatch.setattr(proof, "choose_fastest", tune.choose_fastest)


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what this process knows of calls, as a new one does."""
    monkeypatch.setattr(proof, "_served", {})
    cache.forget()
