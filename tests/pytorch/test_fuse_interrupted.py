"""Errors that do not come from a model's own code pass; nothing reads them as a refusal."""

from __future__ import annotations

import ast
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchweld
from torchweld import fusion
from torchweld.fusion import refusals
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


@pytest.mark.parametrize("name", PASSING)
def test_only_errors_of_a_models_code_are_read(name: str) -> None:
    error = PASSING[name]()
    if isinstance(error, Exception):
        with pytest.raises(type(error)) as caught:
            refusals.raise_others(error)
        assert caught.value is error
    for other in (Exception("no"), RuntimeError("no"), IndexError(3), NotImplementedError()):
        refusals.raise_others(other)


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
            refusals.raise_others(caught.value)
    finally:
        signal.signal(signal.SIGUSR1, before)
    refusals.raise_others(caught.value)


def test_each_handler_asks() -> None:
    """Whatever catches any exception asks the one function, or raises it again."""
    found = 0
    for path in Path(fusion.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and "Exception" in ast.unparse(
                node.type or node
            ):
                body = ast.unparse(ast.Module(node.body, []))
                assert "raise_others(" in body or body.endswith("raise"), (path.name, node.lineno)
                found += 1
    assert found >= 8


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
