"""Every function of the package has types: mypy sees to it, but for modules with Triton's kernels.

A kernel's parameters are what Triton makes of them. mypy exempts only whole modules, so here the
other functions of those modules are looked at, and the types of strings.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import get_args

import pytest

from torchweld import functional, names, nn, optim
from torchweld.dispatch import choice
from torchweld.ops import activation as activations
from torchweld.ops.loss import arguments, linear
from torchweld.optim._codecs import EIGHT_BIT
from torchweld.registry import BACKENDS, EAGER

NAMED = ("activation", "approximate", "reduction", "accumulate", "state_dtype")
FOLDER = Path(__file__).resolve().parents[2] / "triton_kernels"


def _without_types(source: str) -> list[str]:
    """The functions that are no kernels and lack the type of a parameter or of the result."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        if any("triton.jit" in each or "gluon.jit" in each for each in decorators):
            continue
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        untyped = [a for a in every if a and a.annotation is None and a.arg != "self"]
        if untyped or node.returns is None:
            found.append(node.name)
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_only_kernels_have_no_types(path: Path) -> None:
    assert _without_types(path.read_text()) == []


def test_a_missing_type_is_found() -> None:
    kernel = "@triton.jit(do_not_specialize=['n'])\ndef kernel(x, n):\n    pass\n"
    assert _without_types(kernel) == []
    assert _without_types(f"{kernel}def one(x: int, *rest) -> int:\n    return x\n") == ["one"]
    assert _without_types("def two(x: int):\n    return x\n") == ["two"]


def test_names_are_what_functions_accept() -> None:
    """Types of strings, for an editor or mypy, against the errors of the functions themselves."""
    assert {*get_args(names.ActivationName)} == {name for name, _ in activations.KINDS}
    assert {*get_args(names.Approximation)} == {form for _, form in activations.KINDS}
    assert {*get_args(names.BackendName)} == {EAGER, *BACKENDS, *choice.GROUPS}
    assert get_args(names.Reduction) == arguments.REDUCTIONS
    assert get_args(names.Accumulation) == linear._ACCUMULATE
    assert get_args(names.StateName) == (EIGHT_BIT,)


def test_public_strings_have_these_types() -> None:
    """No public function takes any string for one of these arguments."""
    untyped = [
        f"{function.__qualname__}, {parameter}"
        for room in (functional, nn, optim)
        for function in vars(room).values()
        if callable(function) and getattr(function, "__module__", "").startswith("torchweld")
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name in NAMED and parameter.annotation in ("str", str)
    ]
    assert untyped == ["CrossEntropyLoss, reduction: str = 'mean'"], "torch's own"
