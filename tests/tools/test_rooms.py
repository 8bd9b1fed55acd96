"""The house: imports and includes point down only, never in a circle, and files are short."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fresh
import lanes

ROOT = Path(__file__).resolve().parents[2]
# What a room may import besides itself; each module at the top of the package is its own room.
BELOW: dict[str, set[str]] = {
    "names": set(),
    "errors": set(),
    "version": set(),
    "table": set(),
    "files": set(),
    "pages": set(),
    "warmup": set(),
    "state": set(),
    "isolate": set(),
    "numerics": set(),
    "registry": {"state", "errors"},
    "dispatch": {
        *("state", "isolate", "numerics", "files"),
        *("registry", "errors", "names", "version"),
    },
    "checks": {"state", "errors"},
    "random": {"dispatch", "checks", "errors"},
    "sparse": {"state", "isolate", "errors"},
    "ops": {
        "state",
        "isolate",
        "dispatch",
        "registry",
        "random",
        "sparse",
        "checks",
        "errors",
        "names",
        "version",
    },
    "functional": {"ops"},
    "fusion": {
        "state",
        "isolate",
        "numerics",
        "nn",
        "functional",
        "ops",
        "sparse",
        "dispatch",
        "registry",
        "table",
        "errors",
        "names",
    },
    "graphs": {"state", "fusion", "dispatch", "warmup", "errors"},
    "explanation": {"functional", "dispatch", "registry", "errors"},
    "nn": {"functional", "ops", "sparse", "dispatch", "checks", "errors", "names"},
    "huggingface": {"state", "numerics", "fusion", "functional", "ops", "sparse", "errors"},
    "compat": {"functional", "sparse", "errors", "names"},
    "titan": {"state", "functional", "optim", "errors"},
    "collectives": {"ops", "dispatch", "checks", "errors"},
    "optim": {"state", "collectives", "ops", "dispatch", "checks", "errors", "names"},
    "distributed": {
        "state",
        *("optim", "collectives", "fusion", "nn", "functional", "ops", "sparse"),
        *("dispatch", "registry", "random", "table", "checks", "errors"),
    },
    "triton_kernels": set(),
}
# The commands may import any room; the package itself gathers the public names.
COMMANDS = {"bench", "commands", "__main__", "__init__"}
CSRC = {"core": set(), "cpu": {"core"}, "cuda": {"core"}, "bind": {"core", "cpu", "cuda"}}


def _modules() -> dict[str, Path]:
    """Dotted name below torchweld -> file."""
    found = {}
    for folder, prefix in (
        ("python/torchweld", ""),
        ("bench", "bench."),
        ("triton_kernels", "triton_kernels."),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = prefix + ".".join(path.relative_to(ROOT / folder).with_suffix("").parts)
            found[name.removesuffix(".__init__") or "__init__"] = path
    return found


MODULES = _modules()


def _walk(node: ast.AST, into_functions: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if into_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(child, into_functions)


@functools.cache
def _imports(name: str, in_functions: bool = True) -> set[str]:
    """The modules of torchweld that a module imports; without those of functions, when loaded."""
    path, found = MODULES[name], set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in _walk(ast.parse(path.read_text()), in_functions):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.partition(".")[0] == "torchweld"}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = ".".join(filter(None, ["torchweld", package, module]))
            if module.partition(".")[0] == "torchweld":
                full = {f"{module}.{a.name}" for a in node.names}
                found |= {f if f.removeprefix("torchweld.") in MODULES else module for f in full}
    return {f.removeprefix("torchweld").removeprefix(".") or "__init__" for f in found}


def _room(name: str) -> str:
    return name.partition(".")[0]


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_point_down(name: str) -> None:
    room = _room(name)
    used = {_room(other) for other in _imports(name)} - {room}
    if room in COMMANDS:
        assert room == "__main__" or "commands" not in used
        return
    assert used <= BELOW[room], f"{room} may import {sorted(BELOW[room])}"


def test_the_check_at_first_use_knows_neither_ops_nor_rules() -> None:
    home = {"dispatch.proof", "dispatch.store"}
    known = {"version", "state", "isolate", "numerics", "files"}
    assert {other for name in home for other in _imports(name)} <= home | known


def test_nothing_imports_in_a_circle() -> None:
    graph = {name: _imports(name) & MODULES.keys() - {name, "__init__"} for name in MODULES}
    TopologicalSorter(graph).prepare()


# Rooms that few ask for. A function imports one when its option is given. At their own import, only
# those that list public names import one, and the command of the link's test.
ANNEXES = (
    "collectives.one_bit",
    "distributed.one_bit",
    "distributed.pipelines.stashing",
    "distributed.planner.searchers",
    "distributed.tensor.grids",
    "optim.one_bit",
)
LOAD_ANNEXES = {"distributed", "optim", "commands.link"}


def _select_annexes(names: Iterable[str]) -> set[str]:
    return {name for name in names if f"{name}.".startswith(tuple(f"{a}." for a in ANNEXES))}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_nothing_loads_an_annex(name: str) -> None:
    loaded = _select_annexes(_imports(name, in_functions=False))
    assert not loaded or name in LOAD_ANNEXES | _select_annexes([name]), loaded


@pytest.mark.parametrize("name", ANNEXES)
def test_an_annex_says_what_it_is(name: str) -> None:
    tree = ast.parse(MODULES[name].read_text())
    assert (ast.get_docstring(tree) or "").startswith("Annex: ")
    assert len(tree.body) == 1, "its own file has this line and nothing else"


PLAIN = """
import sys
import torch
from torchweld.distributed import parallelize, plan_for

store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), torch.ones(1, 8)
plan_for(model, 4, 2, "h100", example=(x,))
training = parallelize(model, "ddp", device="cpu", example=(x,), loss_fn=torch.nn.MSELoss())
training.step([(x, x)], 0)
print(*sys.modules)
"""


def test_a_plain_training_loads_no_annex() -> None:
    """A function that imports one waits for its option. Public names bring the 1-bit exchanges."""
    ran = fresh.run(PLAIN)
    assert ran.returncode == 0, ran.stderr
    loaded = {word.removeprefix("torchweld.") for word in ran.stdout.split()}
    named = {"collectives.one_bit", "distributed.one_bit", "optim.one_bit"}
    assert loaded & {*ANNEXES, "distributed.one_bit.link"} == named


@pytest.mark.parametrize("room", sorted(CSRC))
def test_includes_point_down(room: str) -> None:
    for path in (ROOT / "csrc" / room).rglob("*"):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh"):
            included = set(re.findall(r'#include "(\w+)/', path.read_text())) & CSRC.keys()
            assert included <= CSRC[room] | {room}, path
            assert room == "bind" or not re.search(r"#include <(torch|ATen|c10)/", path.read_text())


def test_every_room_is_packaged() -> None:
    """An editable install finds a folder that a wheel would lack, as one without __init__.py."""
    package = ROOT / "python" / "torchweld"
    folders = {path.parent for path in package.rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)


@pytest.mark.parametrize(("name", "listed"), [*lanes.MARKS.items(), *lanes.LANES.items()])
def test_the_tests_that_lanes_name_exist(name: str, listed: tuple[str, ...]) -> None:
    for path, _, function in (each.partition("::") for each in listed):
        found = ROOT / "tests" / path
        assert found.exists(), path
        assert not function or f"def {function}(" in found.read_text(), function


# A question that many ask has one home: no other file has these words.
HOMES = {
    r"torch\._C\._(functorch|are_functorch|get_tracing|len_torch|get_dispatch_mode|current_graph_task)"
    r"|_TorchDispatchModeKey|_keep_graph\(|_will_engine|_is_exporting_flag"
    r"|is_current_stream_capturing\(|import FakeTensor$": {"state"},
    r"\b_current_level\b": {"state", "dispatch.warm.guards"},
    r"_disable_current_modes|temporarily_clear_interpreter_stack|DisableTorchFunction": {"isolate"},
    r"(?<![\w.`])(?<!def )(exec|eval)\((?!\))": {"dispatch.warm.generate"},
    r"\bTensorGuards\b": {"dispatch.warm.guards"},
    r"\b(allclose|assert_close)\(|\b[ar]tol\b|\bfinfo\(.*\)\.eps\b": {
        "numerics",
        *(
            "ops.residual",
            "ops.modulation",
            "optim.adafactor",
        ),  # epsilons that torch's formulas have
        "bench.measure.machine",  # torch's own tolerances
    },
}


# Lines of tests, by folder, with a tolerance that has no name in numerics.py. It may only fall.
TOLERANCES = {
    **{"contract": 4, "distributed": 22, "helpers": 7, "ops": 19},
    **{"optim": 29, "peers": 27, "pytorch": 7, "tools": 3},
}


def test_tolerances_have_names() -> None:
    """Six homes asked "equal up to rounding?", and 94 files of tests had numbers of their own."""
    found: Counter[str] = Counter()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        lines = re.findall(r"^.*\b[ar]tol\b.*$", path.read_text(), re.MULTILINE)
        found[path.relative_to(ROOT / "tests").parts[0]] += len(lines)
    assert found <= Counter(TOLERANCES), found


def test_arguments_have_names_to_the_end() -> None:
    """Attention unpacked 22 arguments by position in four files; an op has `Args` for that."""
    counted = r"\b(inputs|arguments|rest)\[(:\d\d|\d\d|-\d+:-)"
    for name, path in MODULES.items():
        assert not re.search(counted, path.read_text()), name


@pytest.mark.parametrize("words", HOMES)
def test_a_question_has_one_home(words: str) -> None:
    """Nine files asked torch what it is doing, and their lists differed: captures were in two."""
    found = {
        name
        for name, path in MODULES.items()
        if not name.startswith("triton_kernels")
        and re.search(words, path.read_text(), re.MULTILINE)
    }
    assert found <= HOMES[words], found - HOMES[words]
    assert found, "nothing has these words"


# Class names that stand for two things. The list may only fall.
SHARED = {
    *("Activation", "Config", "Form", "GELU", "GatedMLP", "LayerNorm", "LinearAct"),
    *("Plan", "QuickGELU", "RMSNorm", "SiLU"),
    *("Tile", "_Call"),
}


def test_a_class_name_stands_for_one_thing() -> None:
    """48 stood for several: to know what a `Job` is, a reader had to open both files."""
    defined = re.compile(r"^ *class (\w+)[(:]", re.MULTILINE)
    classes = [name for path in MODULES.values() for name in defined.findall(path.read_text())]
    found = {name for name, count in Counter(classes).items() if count > 1}
    assert found == SHARED, found ^ SHARED
