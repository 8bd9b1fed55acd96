"""Mutants: modules that fuse() knows, with a change that few inputs show, give the same numbers.

A mutant differs from a known module only where it is called later: without gradients, on other
shapes, under autocast, after a global changed. Each is compared with its unfused self there, after
a call elsewhere was captured. test_graph_mutants.py has more forwards.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import nn

import torchweld
from changed import CASTS, FUNCTIONS, KINDS, NOISES, WIDTH, Mutant, draw, make
from fusable import small_inputs  # noqa: F401
from selection import combine
from torchweld import numerics

_MODULES = [kind for kind in KINDS if kind not in FUNCTIONS]
# --- Conditions -----------------------------------------------------------------------------------

Names = dict[str, Any]
During = Callable[[Names], AbstractContextManager[Any]]
Call = Callable[[nn.Module, Any], Any]


class Condition(NamedTuple):
    """An expression that is true only in this call."""

    test: str
    given: Callable[[], Any] = draw
    during: During = lambda names: nullcontext()
    call: Call = lambda model, x: model(x)


def _set(name: str, value: Any) -> During:
    @contextmanager
    def during(names: Names) -> Iterator[None]:
        before, names[name] = names[name], value
        yield
        names[name] = before

    return during


@contextmanager
def _change(read: Callable[[], Any], write: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


@contextmanager
def _environment(names: Names) -> Iterator[None]:
    os.environ["MUTANT"] = "1"
    yield
    del os.environ["MUTANT"]


def _compile(model: nn.Module, x: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(model, backend="eager")(x)


def _in_a_thread(model: nn.Module, x: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(model(x)))
    thread.start()
    thread.join()
    return found[0]


def _with_nan() -> torch.Tensor:
    x = draw().detach()
    x[0, 0, 0] = torch.nan
    return x


CONDITIONS = {
    "no gradients": Condition("not torch.is_grad_enabled()", during=lambda names: torch.no_grad()),
    "inference mode": Condition(
        "torch.is_inference_mode_enabled()", during=lambda names: torch.inference_mode()
    ),
    "an input that needs no gradient": Condition(
        "not x.requires_grad and torch.is_grad_enabled()", lambda: draw().detach()
    ),
    "a parameter's gradient": Condition(
        "x.grad_fn is not None and x.sum().item() == x.sum().item()", lambda: draw() * 1
    ),
    "no leaf": Condition("not x.is_leaf", lambda: draw() * 1),
    "rows": Condition("x.shape[-2] > 40", lambda: draw(2, 64)),
    "very many rows": Condition("x.shape[-2] > 5000", lambda: draw(1, 5003)),
    "batch": Condition("x.shape[0] == 7", lambda: draw(7, 6)),
    "elements": Condition("x.numel() > 1e5", lambda: draw(64, 64)),
    "length": Condition("len(x) > 20", lambda: draw(32, 4)),
    "dimensions": Condition("x.ndim > 4", lambda: draw(1, 2, 3, 1, 2)),
    "strides": Condition(
        "x.stride()[-1] != 1 or x.stride()[0] == 0", lambda: draw(1, 6).expand(4, -1, -1)
    ),
    "transposed": Condition("not x.is_contiguous()", lambda: draw(6, 4).transpose(0, 1)),
    "a place in memory": Condition("x.storage_offset() > 0", lambda: draw(8, 6)[4:]),
    "a parameter": Condition("isinstance(x, nn.Parameter)", lambda: nn.Parameter(draw().detach())),
    "compiling": Condition("torch.compiler.is_compiling()", call=_compile),
    "threads": Condition(
        "torch.get_num_threads() == 1",
        during=lambda names: _change(torch.get_num_threads, torch.set_num_threads, 1),
    ),
    "another thread": Condition(
        "threading.current_thread() is not threading.main_thread()", call=_in_a_thread
    ),
    "a global": Condition("SWITCH", during=_set("SWITCH", True)),
    "a dictionary": Condition('TABLE["on"]', during=_set("TABLE", {"on": True})),
    "an object": Condition("NUMBERS.on", during=_set("NUMBERS", SimpleNamespace(on=1))),
    "a list": Condition("len(LISTED) > 0", during=_set("LISTED", [1])),
    "a function of the file": Condition("helper(1) > 1", during=_set("helper", lambda y: 2 * y)),
    "the environment": Condition('os.environ.get("MUTANT")', during=_environment),
    "the default dtype": Condition(
        "torch.get_default_dtype() is torch.float64",
        during=lambda names: _change(
            torch.get_default_dtype, torch.set_default_dtype, torch.float64
        ),
    ),
    "autocast to float16": Condition(
        'torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.float16',
        during=lambda names: torch.autocast("cpu", torch.float16),
    ),
    "deterministic algorithms": Condition(
        "torch.are_deterministic_algorithms_enabled()",
        during=lambda names: _change(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
        ),
    ),
    "a seed": Condition(
        "torch.initial_seed() == 77",
        during=lambda names: _change(torch.initial_seed, torch.manual_seed, 77),
    ),
    "a number of the input": Condition(
        "float(x.detach().flatten()[0]) == 7.0",
        lambda: draw().detach().flatten().index_fill(0, torch.tensor(0), 7.0).view(4, 6, WIDTH),
    ),
    "no number": Condition("x.isnan().any()", _with_nan),
}
# How a condition decides.
FORMS = {
    "expression": "y = y * 3 if {test} else y",
    "statement": "if {test}:\n    y = y * 3",
    "return": "if {test}:\n    return y * 3",
    "product": "y = y * (1 + 2 * bool({test}))",
    "place": "y = (y, y * 3)[bool({test})]",
    "or": "y = y * (bool({test}) and 3 or 1)",
    "loop": "while {test}:\n    y = y * 3\n    break",
    "comprehension": "y = sum([y * 2 for _ in range(bool({test}))], y)",
    "call": "y = y.mul(1 + 2 * bool({test}))",
    "assignment": "y *= 1 + 2 * bool({test})",
    "error": "try:\n    1 / (not ({test}))\nexcept ZeroDivisionError:\n    y = y * 3",
    "lambda": "y = (lambda: y * 3 if {test} else y)()",
}
# More forms of a large number of rows.
_OF_ROWS = {
    "a difference": "y = y * 3 if x.shape[0] - 5000 > 0 else y",
    "a name": "n = x.size(0)\ny = y * 3 if n > 5000 else y",
    "a quotient": "y = y * (1 + x.shape[0] // 5000)",
    "a part": "y = y * 3 if x[5000:].numel() > 0 else y",
    "a minimum": "y = y * (min(len(x), 5000) / len(x))",
    "a count": "n = 0\nfor _ in x[:, 0].tolist():\n    n += 1\ny = y * 3 if n > 5000 else y",
    "places": "for at, row in enumerate(x):\n    y = y * 3 if at == 5000 else y",
    "a range": "for at in range(0, x.shape[0], 5000):\n    y = y * (1 + at)",
    "a comparison": "y = y * (1 + (x.numel() > 5000 * W))",
    "a method": "y = y * 3 if x.shape[0].__gt__(5000) else y",
    "fewer": "y = y * (1 + (torch.arange(x.shape[0]) > 500)[:, None])",
}
_FORMED = ("no gradients", "very many rows", "a global")


def _check(kind: str, change: str, condition: Condition, calls_before: bool = True) -> None:
    """Hold that a fused mutant gives what it gives unfused where its condition is true."""
    mutant, plain = make(kind, change), make(kind, "")

    def run(each: Mutant, model: nn.Module) -> Any:
        with condition.during(each.names):
            y = condition.call(model, condition.given())
        return y.detach()

    with torch.random.fork_rng([]):
        expected = run(mutant, copy.deepcopy(mutant.model))
        assert not torch.equal(expected, run(plain, plain.model)), "the condition was not true"
        fused = torchweld.fuse(mutant.model)
        if calls_before:
            fused(draw())
        near = numerics.HALF if "float16" in condition.test else {}
        torch.testing.assert_close(run(mutant, fused), expected, equal_nan=True, **near)


# What is inside of a model does not get the model's own input.
_INNER = [kind for kind in KINDS if " of " in kind and kind != "linear_act of a layer"]
_INNER.append("a rotation")
_OF_INPUTS = {
    *("an input that needs no gradient", "no leaf", "strides", "transposed", "a place in memory"),
    *("a parameter", "a number of the input"),
}
_MIXTURE = "experts_mlp of a mixture"
_IMPOSSIBLE = {
    ("an activation of torch's layer", "dimensions"),  # torch's layer takes three
    *((_MIXTURE, of) for of in ("batch", "dimensions")),  # it takes rows
    (_MIXTURE, "compiling"),  # its graph breaks before
}
CASES = [
    (kind, condition)
    for kind, condition in itertools.product(KINDS, CONDITIONS)
    if not (kind in _INNER and condition in _OF_INPUTS) and (kind, condition) not in _IMPOSSIBLE
]


def _pick(kinds: list[str], at: int) -> list[str]:
    """Two of them, others for each place."""
    return [kinds[at % len(kinds)], kinds[(at + len(kinds) // 2) % len(kinds)]]


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition(condition: str) -> None:
    """A branch by the state of torch, of the input or of the file."""
    kinds = [kind for kind, other in CASES if other == condition]
    of = CONDITIONS[condition]
    for kind in _pick(kinds, list(CONDITIONS).index(condition)):
        # Nothing can see a change of the environment.
        is_seen = condition != "the environment"
        _check(kind, FORMS["expression"].format(test=of.test), of, is_seen)


@pytest.mark.parametrize(("form", "condition"), combine(FORMS, _FORMED))
def test_a_form_of_a_condition(form: str, condition: str) -> None:
    of = CONDITIONS[condition]
    _check("rms_norm", FORMS[form].format(test=of.test), of)


@pytest.mark.parametrize("form", _OF_ROWS)
def test_experts_decide_by_rows(form: str) -> None:
    """fuse() took experts whose code decides by the number of rows once."""
    _check(_MIXTURE, _OF_ROWS[form], Condition("", lambda: draw(1, 5003)))


# --- Random numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize(("noise", "at"), combine(NOISES, range(2)))
def test_random_numbers(noise: str, at: int) -> None:
    """Drawn by the forward itself: the same seed gives the same numbers, then and later."""
    kinds = _pick([kind for kind in _MODULES if "dropout" not in kind], [*NOISES].index(noise))
    mutant = make(kinds[at], NOISES[noise].format(k=0.1))

    def run(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)
        with torch.no_grad():
            results = [model(draw()) for _ in range(4)]
        return [*results, torch.rand(3), torch.tensor(random.random())]

    with torch.random.fork_rng([]):
        expected = run(copy.deepcopy(mutant.model))
        assert noise in ("times zero", "rarely") or not torch.equal(*expected[:2])
        torch.testing.assert_close(run(torchweld.fuse(mutant.model)), expected)


# --- Dtypes and autocast --------------------------------------------------------------------------


@pytest.mark.parametrize(("cast", "at"), combine(CASTS, range(2)))
def test_a_branch_on_dtypes(cast: str, at: int) -> None:
    """In a model of 32 bits that is cast later, and under autocast."""
    of, factor = CASTS[cast], 1.03
    mutant = make(
        _pick(_MODULES, [*CASTS].index(cast))[at], f"y = y * {factor} if {of.test} else y"
    )

    def run(model: nn.Module) -> torch.Tensor:
        x = draw(64, 6).detach().to(of.dtype)
        on = torch.autocast("cpu", of.autocast) if of.autocast else nullcontext()
        with torch.no_grad(), on:
            y: torch.Tensor = model.to(of.dtype)(x)
        return y.double()

    expected = run(copy.deepcopy(mutant.model))
    fused = torchweld.fuse(mutant.model.float())
    fused(draw(64, 6))
    found = run(fused)
    # Roundings cancel out in the ratio, a factor does not.
    ratio = (found * expected).sum() / expected.square().sum()
    assert abs(float(ratio) - 1) < 0.01
