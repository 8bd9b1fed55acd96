"""Errors that do not come from a model's own code end fuse(); a trial does not swallow them."""

from __future__ import annotations

import ast
import copy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchweld
from fusable import MODELS
from torchweld import fusion
from torchweld.fusion import probe
from torchweld.fusion.graph import regions


class HandlersTimeoutError(Exception):
    """As a signal's handler raises it: pytest-timeout's, a scheduler's or a user's own."""


_CPU_IS_FULL = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: x"
PASSING: dict[str, Callable[[], BaseException]] = {
    "timeout": HandlersTimeoutError,
    "TimeoutError": TimeoutError,
    "interrupt": KeyboardInterrupt,
    "MemoryError": MemoryError,
    "OutOfMemoryError": torch.OutOfMemoryError,
    "allocator": lambda: RuntimeError(_CPU_IS_FULL),
}


class _RaisesAt:
    """Counts calls of modules, and raises at one of them."""

    def __init__(
        self, at: int = -1, error: Callable[[], BaseException] = HandlersTimeoutError
    ) -> None:
        self.at, self.error, self.count = at, error, 0
        self.original = nn.Module._call_impl

    def patch(self, patches: pytest.MonkeyPatch) -> _RaisesAt:
        patches.setattr(nn.Module, "_call_impl", lambda *given, **more: self.call(*given, **more))
        return self

    def call(self, *given: Any, **more: Any) -> Any:
        self.count += 1
        if self.count == self.at + 1:
            raise self.error()
        return self.original(*given, **more)


@pytest.mark.parametrize("name", MODELS)
def test_an_error_at_any_call_of_a_trial_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves the model as it was. Four moments of each model, each kind of error in turn."""
    model = MODELS[name]()
    # fuse() tries nothing of torch's own classes.
    for function in (torchweld.fuse, torchweld.explain_fusion):
        counted = _RaisesAt()
        with monkeypatch.context() as patches:
            counted.patch(patches)
            function(copy.deepcopy(model))
        if counted.count:
            break
    assert counted.count
    classes = [type(module) for module in model.modules()]
    first = list(MODELS).index(name)
    kinds = list(PASSING.values())
    for number, at in enumerate(range(0, counted.count, -(-counted.count // 4))):
        error = kinds[(first + number) % len(kinds)]
        with monkeypatch.context() as patches:
            _RaisesAt(at, error).patch(patches)
            with pytest.raises(type(error())):
                function(model)
        assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize("name", PASSING)
def test_only_errors_of_a_models_code_are_read(name: str) -> None:
    error = PASSING[name]()
    if isinstance(error, Exception):
        with pytest.raises(type(error)) as caught:
            probe.read_refusal(error)
        assert caught.value is error
    for other in (Exception("no"), RuntimeError("no"), IndexError(3), NotImplementedError()):
        assert probe.read_refusal(other) == f"it did not run: {type(other).__name__}"


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, Exception])
def test_what_a_handler_raises_passes(kind: type[Exception]) -> None:
    """Whatever its class: a scheduler's handler often raises a RuntimeError of its own."""

    def handle(number: int, frame: Any) -> None:
        raise kind("time is over")

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(kind) as caught:
            signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(kind, match="time is over"):
            probe.read_refusal(caught.value)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert probe.read_refusal(caught.value).startswith(f"it did not run: {kind.__name__}")


def test_each_trial_reads_its_errors() -> None:
    """Whatever catches any exception asks the one function, or raises it again."""
    found = 0
    for path in Path(fusion.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and "Exception" in ast.unparse(
                node.type or node
            ):
                body = ast.unparse(ast.Module(node.body, []))
                assert "read_refusal(" in body or body.endswith("raise"), (path.name, node.lineno)
                found += 1
    assert found >= 12


@pytest.mark.parametrize("name", [*PASSING, "handler"])
def test_an_error_in_a_capture_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo wraps what its backend raises: a timeout was read as a capture that failed."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU())
    x, expected = torch.ones(2, 8), model(torch.ones(2, 8))
    torchweld.fuse(model)
    kind = type(PASSING[name]()) if name in PASSING else RuntimeError

    def handle(*_: Any) -> None:
        raise RuntimeError("time is over")

    def fail(*_: Any) -> Any:
        if name not in PASSING:
            signal.raise_signal(signal.SIGUSR1)
        raise PASSING[name]()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with monkeypatch.context() as patches:
            patches.setattr(regions, "rewrite", fail)
            with pytest.raises(kind) as caught:
                model(x)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert type(caught.value) is kind
    torch.testing.assert_close(model(x), expected)
    assert [row.becomes for row in torchweld.explain_fusion(model)] == ["linear_act"]


class _Foreign(nn.Module):
    def __init__(self, error: Callable[[], Exception]) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error()


@pytest.mark.parametrize("error", [AssertionError, KeyError, NotImplementedError, Exception])
def test_a_models_own_error_is_said_with_its_place(error: Callable[[], Exception]) -> None:
    rows = [row for row in torchweld.explain_fusion(_Foreign(error)) if "did not run" in row.reason]
    (name,) = {type(error()).__name__}
    assert any(
        f"it did not run: {name} in forward (test_fuse_interrupted.py:" in r.reason for r in rows
    )
