"""Forwards rewritten from their source keep their decorators; newer transformers are named."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchweld
from torchweld import numerics
from torchweld.commands import cli
from torchweld.fusion import peer, rewrite

_Method = Callable[..., Any]


def deprecate_kwarg(old: str, new_name: str) -> Callable[[_Method], _Method]:
    """As transformers has it, without the warning."""

    def wrap(function: _Method) -> _Method:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if old in kwargs:
                kwargs[new_name] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapped

    return wrap


def can_return_tuple(function: _Method) -> _Method:
    """As transformers has it."""

    @functools.wraps(function)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        gives_dict = kwargs.pop("return_dict", True)
        result = function(self, *args, **kwargs)
        return result if gives_dict else (result,)

    return wrapped


def merge_with_config_defaults(function: _Method) -> _Method:
    """As transformers has it, for one argument."""

    @functools.wraps(function)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **{"factor": self.factor, **kwargs})

    return wrapped


def auto_docstring(function: _Method) -> _Method:
    function.__doc__ = "Anything."
    return function


def doubled(function: _Method) -> _Method:
    """A decorator that nobody knows."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return 2 * function(*args, **kwargs)

    return wrapped


def hidden(function: _Method) -> _Method:
    """A decorator without functools.wraps."""
    return lambda *args: function(*args)


def turn(x: Any, angle: Any) -> Any:
    return x + angle


class Module(torch.nn.Module):
    """Forwards that read `turn` from their file."""

    factor = 3.0

    def turn(self, x: Any, angle: Any) -> Any:
        return 1000 * turn(x, angle)

    def plain(self, x: Any, angle: Any = None, factor: float = 1.0) -> Any:
        return turn(x, angle) * factor

    @deprecate_kwarg("old", new_name="angle")
    @can_return_tuple
    @auto_docstring
    def named(self, x: Any, angle: Any = None, factor: float = 1.0) -> Any:
        return turn(x, angle) * factor

    @merge_with_config_defaults
    @auto_docstring
    @deprecate_kwarg("old", new_name="angle")
    @can_return_tuple
    @deprecate_kwarg("older", new_name="angle")
    def merged(self, x: Any, angle: Any = None, factor: float = 1.0) -> Any:
        return turn(x, angle) * factor

    @can_return_tuple
    @doubled
    def unknown(self, x: Any, angle: Any = None) -> Any:
        return turn(x, angle)

    @torch.no_grad()
    def dotted(self, x: Any, angle: Any = None) -> Any:
        return turn(x, angle)

    @hidden
    def hides(self, x: Any, angle: Any = None) -> Any:
        return turn(x, angle)

    def calls_super(self, x: Any, angle: Any = None) -> Any:
        super().train()
        return turn(x, angle)


_CALLS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"angle": 1}, {"angle": 1, "factor": 5.0}],
    "named": [{"angle": 1}, {"old": 1}, {"old": 1, "return_dict": False}],
    "merged": [
        *({"angle": 1}, {"old": 1}, {"older": 1}, {"older": 1, "factor": 5.0}),
        {"older": 1, "return_dict": False},
    ],
}


@pytest.mark.parametrize("name", _CALLS)
def test_a_rewritten_forward_takes_and_returns_the_same(name: str) -> None:
    """Under the same decorators, in the same order."""
    forward = getattr(Module, name)
    made = rewrite.rewrite(forward, "turn", "turn")
    for given in _CALLS[name]:
        expected, found = forward(Module(), 2, **given), made(Module(), 2, **given)
        if isinstance(expected, tuple):
            (expected,), (found,) = expected, found
        assert found == 1000 * expected, given
    layers: list[str] = []
    for function in (forward, made):
        while hasattr(function, "__wrapped__"):
            layers.append(function.__code__.co_filename + function.__code__.co_name)
            function = function.__wrapped__
    assert layers[: len(layers) // 2] == layers[len(layers) // 2 :]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unknown", "its forward is decorated by doubled, which fuse() does not know"),
        ("dotted", "its forward is decorated by torch.no_grad, which fuse() does not know"),
        ("hides", "its forward is hidden's closure"),
        ("calls_super", "its forward calls super(): name the base class there"),
        ("turn", "its forward does not read nothing itself"),
    ],
)
def test_another_forward_is_refused_by_name(name: str, reason: str) -> None:
    read = "nothing" if name == "turn" else "turn"
    found = rewrite.why_not(lambda: rewrite.rewrite(getattr(Module, name), read, "_"))
    if not hasattr(inspect.unwrap(Module.hides).__code__, "co_qualname"):  # Python 3.10
        reason = reason.replace("hidden", "<lambda>")
    assert found == reason


@pytest.mark.parametrize("name", _CALLS)
@pytest.mark.parametrize("more", [(doubled,), (auto_docstring, doubled), (doubled, doubled)])
def test_what_others_wrapped_is_not_lost(name: str, more: tuple[Any, ...]) -> None:
    """A forward that somebody wrapped after its class was made: its source does not say so."""
    forward = getattr(Module, name)
    for wrap in more:
        forward = wrap(forward)
    reason = rewrite.why_not(lambda: rewrite.rewrite(forward, "turn", "_"))
    named = hasattr(forward.__code__, "co_qualname")  # not in Python 3.10
    assert (
        reason == f"its forward is wrapped by {'doubled' if named else 'wrapped'}: fuse before that"
    )


class GradientCheckpointingLayer(torch.nn.Module):
    """As in transformers 5.24: it wraps the forward of each subclass."""

    passes = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        forward = cls.forward

        @functools.wraps(forward)
        def forward_with_checkpointing(self: Any, *args: Any, **kwargs: Any) -> Any:
            if type(self).forward is forward_with_checkpointing:
                self.passes += 1  # a checkpoint
            return forward(self, *args, **kwargs)

        cls.forward = forward_with_checkpointing


class Layer(GradientCheckpointingLayer):
    """A layer of transformers with its linear layers in it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act = torch.nn.Linear(8, 16), torch.nn.GELU()

    @deprecate_kwarg("old", new_name="x")
    def forward(self, x: torch.Tensor) -> Any:
        x = self.fc1(x)
        x = self.act(x)
        return x


class Inherits(Layer):
    """Its forward is wrapped twice."""


@pytest.mark.parametrize("kind", [Layer, Inherits])
def test_what_a_base_class_wraps_is_wrapped_again(kind: type[Layer]) -> None:
    """The rewritten forward too, once, under the decorators of its own."""
    layer, x = kind(), torch.randn(4, 8)
    expected = layer(old=x)
    torchweld.fuse(layer)
    (row,) = torchweld.explain_fusion(layer)
    assert row.becomes.startswith("linear_act"), row.reason
    assert row.welded
    called: list[Any] = []
    weld: Any = layer
    pair = weld.weld_pair
    weld.weld_pair = lambda *args: called.append(args) or pair(*args)
    layer.passes = 0
    torch.testing.assert_close(layer(old=x), expected, **numerics.CHAINED_SMALL)
    assert len(called) == 1
    assert layer.passes == 1


# --- Releases of transformers that are newer than the tested one ---

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """A model with a class of a module of transformers."""
    module = types.ModuleType("transformers.models.some")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    cls = type("SomeNorm", (torch.nn.LayerNorm,), {"__module__": module.__name__})
    return torch.nn.Sequential(cls(8))


@pytest.mark.parametrize(
    ("version", "warns"),
    [("4.56.0", False), ("5.24.3", False), ("5.25.0.dev0", True), ("6", True), ("10.0", True)],
)
def test_newer_releases_are_named(
    version: str,
    warns: bool,
    model: torch.nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: version if name == "transformers" else known(name),
    )
    said = f"transformers {version} is newer than 5.24"
    assert (said in str(torchweld.explain_fusion(model))) is warns
    assert "newer" not in str(torchweld.explain_fusion(torch.nn.Sequential(torch.nn.LayerNorm(8))))
    cli.main(["doctor"])
    assert (said in " ".join(capsys.readouterr().out.split())) is warns


def test_the_tested_release_is_the_one_of_the_peer_tests() -> None:
    pins = re.findall(r"transformers==(\d+\.\d+)\.\d+", (ROOT / "Makefile").read_text())
    newest, oldest, _ = pins  # the third is for kernels of the package index
    floor = re.search(r"transformers>=(\d+\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert floor
    assert [newest, oldest] == [peer.TESTED, floor[1]]
