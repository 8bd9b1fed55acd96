"""Docstrings describe each argument once, prose has plain words, functions have types."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import torchweld
from torchweld import functional, names, nn, optim
from torchweld.dispatch import choice
from torchweld.ops import activation as activations
from torchweld.ops.loss import arguments, linear
from torchweld.optim._codecs import EIGHT_BIT
from torchweld.registry import BACKENDS, EAGER, OPS

ROOT = Path(__file__).resolve().parents[2]


def _sections(text: str) -> dict[str, list[str]]:
    """The lines of a docstring's sections, by their titles."""
    found: dict[str, list[str]] = {"": []}
    title = ""
    for line in inspect.cleandoc(text).splitlines():
        if re.fullmatch(r"(Args|Returns|Yields|Attributes|Raises):", line):
            title = line[:-1]
            found[title] = []
        elif line and not line.startswith(" "):
            title = ""
        found[title].append(line)
    return found


def _entries(lines: list[str]) -> list[str]:
    """The entries of a section, whose further lines are indented."""
    entries: list[str] = []
    for line in filter(None, lines[1:] if lines and lines[0].endswith("Args:") else lines):
        if line.startswith("     ") and entries:
            entries[-1] += " " + line.strip()
        elif line.startswith("    "):
            entries.append(line.strip())
    return entries


def why_run_together(text: str, parameters: set[str]) -> str | None:
    """How a docstring's arguments run into each other, or None."""
    seen: set[str] = set()
    for entry in _entries(_sections(text).get("Args", [])):
        head, colon, rest = entry.partition(": ")
        names = [name.strip(" *`") for name in head.split(",")]
        if not colon or not all(re.fullmatch(r"\w+", name) for name in names):
            return f"no argument before the colon: {entry!r}"
        if twice := seen & set(names):
            return f"twice: {sorted(twice)}"
        seen |= set(names)
        # `name: ` inside an entry is a second one, unless it is code.
        plain = re.sub(r"`[^`]*`", "", rest)
        for inner in re.findall(r"(?<![\w.])\*{0,2}(\w+): ", plain):
            if inner in parameters - set(names):
                return f"{inner} inside the entry of {head}"
    return None


def _public() -> Iterator[tuple[str, Any]]:
    """All public functions, classes and methods of public modules."""
    names = ["torchweld"]
    for info in pkgutil.walk_packages(torchweld.__path__, "torchweld."):
        if not any(part.startswith("_") for part in info.name.split(".")):
            names.append(info.name)
    for name in names:
        try:
            module = importlib.import_module(name)
        except ImportError as error:  # of packages that only some pages need
            cause = error.__cause__ or error
            missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
            if missing is None or missing.startswith("torchweld"):
                raise
            continue
        for attribute, value in vars(module).items():
            at = getattr(value, "__module__", None)
            if attribute.startswith("_") or at != name or not callable(value):
                continue
            yield f"{name}.{attribute}", value
            if inspect.isclass(value):
                for method, function in vars(value).items():
                    function = getattr(function, "__func__", function)
                    if inspect.isfunction(function) and not method.startswith("_"):
                        yield f"{name}.{attribute}.{method}", function


def _parameters(value: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(value).parameters)
    except (ValueError, TypeError):
        return set()


def test_no_arguments_run_together() -> None:
    found = dict(_public())
    described = {n: v for n, v in found.items() if v.__doc__ and "Args:" in v.__doc__}
    assert len(described) > 60
    faults = {}
    for name, value in described.items():
        if reason := why_run_together(value.__doc__, _parameters(value)):
            faults[name] = reason
    assert not faults


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "F.\n\nArgs:\n    model: any. verify: False skips it.\n",
            "verify inside the entry of model",
        ),
        ("F.\n\nArgs:\n    model: any\n        verify: False skips.\n", "verify inside"),
        ("F.\n\nArgs:\n    model: any.\n    model: again.\n", "twice"),
        ("F.\n\nArgs:\n    a module.\n", "no argument"),
        ("F.\n\nArgs:\n    model, verify: any.\n", None),
        ("F.\n\nArgs:\n    model: as `verify: x` has it.\n    verify: False skips it.\n", None),
    ],
)
def test_what_runs_together_is_found(text: str, words: str | None) -> None:
    found = why_run_together(text, {"model", "verify"})
    assert (found is None) == (words is None)
    assert words is None or words in str(found)


# --- An op is read in one sitting ---


@pytest.mark.parametrize("name", functional.__all__)
def test_an_ops_file_says_where_to_read_on(name: str) -> None:
    """In at most six files, its kernels among them."""
    function = inspect.unwrap(getattr(functional, name))
    about: str = sys.modules[function.__module__].__doc__ or ""
    paths = about.partition("Read on in:")[2].replace(",", " ").split()
    assert 0 < len(paths) <= 6
    files = [path.rstrip(".") for path in paths]
    assert all((ROOT / file).is_file() for file in files), files
    sources = OPS[name].sources if name in OPS else {}
    assert {source for source, *_ in sources.values()} <= {*files}


# --- Every function of the package has types ---

NAMED = ("activation", "approximate", "reduction", "accumulate", "state_dtype")
FOLDER = Path(__file__).resolve().parents[2] / "triton_kernels"
KERNELS = ("triton.jit", "gluon.jit", "constexpr_function")  # the last run while kernels compile


def _without_types(source: str) -> list[str]:
    """The functions that are no kernels and lack the type of a parameter or of the result."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        if any(kernel in each for kernel in KERNELS for each in decorators):
            continue
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        untyped = [a for a in every if a and a.annotation is None and a.arg != "self"]
        if untyped or node.returns is None:
            found.append(node.name)
    return found


@pytest.mark.parametrize(
    "path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER))
)
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
