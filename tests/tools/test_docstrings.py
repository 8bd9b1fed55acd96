"""Docstrings describe each argument once, in an entry of its own; prose keeps to plain words."""

from __future__ import annotations

import importlib
import inspect
import io
import pkgutil
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import torchweld

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("python", "csrc", "triton_kernels", "tests", "bench", "docs")
# CONTRIBUTING.md: the field's word, or the noun again, in place of these. Lower MOST with each use
# that goes; 20 may stay.
MOST = 14
STILTED = re.compile(r"\b(beside|anew|of which|those of)\b", re.IGNORECASE)


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
        except ModuleNotFoundError as error:  # of packages that only some pages need
            if str(error.name).startswith("torchweld"):
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


def _read_prose(path: Path) -> str:
    """A page, or the comments and strings of a source: identifiers do not count."""
    text = path.read_text()
    if path.suffix == ".md":
        return text
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        return "\n".join(token.string for token in tokens if token.type != tokenize.NAME)
    return "\n".join(re.findall(r'//.*|"[^"\n]*"', text))


def test_prose_has_the_fields_words() -> None:
    """Few uses of words that a systems engineer would not write are left."""
    kinds = {".py", ".md", ".cpp", ".h", ".cu"}
    paths = {p.resolve() for room in ROOMS for p in (ROOT / room).rglob("*") if p.suffix in kinds}
    paths |= {ROOT / name for name in ("README.md", "CHANGELOG.md")}
    counts = {
        str(path.relative_to(ROOT)): len(STILTED.findall(_read_prose(path)))
        for path in paths - {Path(__file__).resolve()}
    }
    assert sum(counts.values()) <= MOST, {name: count for name, count in counts.items() if count}
