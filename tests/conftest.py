"""Prepares a session, and prints a summary at its end. helpers/selection.py says what runs."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Waiting threads sleep: with a test on every core, spinning would slow the threads that they wait
# for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported
# NumPy multiplies for Triton's interpreter and the imitation of Gluon. With a test on every core a
# second thread for such small products only waits: they took 6 ms, not 0.1.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy is imported
# Inductor compiles in the test's process: another one for its pool would only import torch again.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# The compiler that built torchweld knows this CPU's vectors. Inductor would compile and load a file
# of each kind to find out, in every process.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
# Tests ask for kernels by name. Tests of the trial at first use switch it on.
os.environ.setdefault("TORCHWELD_TUNE", "off")
os.environ["TORCHWELD_POISON"] = "1"  # every test sees NaN in elements that a kernel left unwritten

import pytest
from hypothesis import HealthCheck, settings

import interpreting
import lanes
import lean
import torchweld
from selection import EMULATED, GPU, KERNELS, PLACES, TRITON, Target, choose_targets
from torchweld.dispatch.proof import is_out_of_memory
from torchweld.dispatch.warm import cache
from torchweld.optim._base import FusedOptimizer
from torchweld.registry import BACKENDS
from trying import Trials, try_on_cpu

if os.environ.get("TRITON_INTERPRET") == "1":
    interpreting.make_faster()
    interpreting.refuse_division_by_zero()
    interpreting.find_maxima_as_a_gpu_does()

settings.register_profile(
    "torchweld",
    deadline=None,
    max_examples=25,
    derandomize=True,
    # `target` only determines where to run, which is the same for every example. An emulated
    # processor draws slowly.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("torchweld")

TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in lanes.find_marks(item.path.relative_to(TESTS).as_posix(), item.name):
            item.add_marker(mark)
    # The longest tests begin first, so that the last minutes have work for every worker.
    items.sort(key=lambda item: "test_triton_aot" not in item.nodeid)


def pytest_collection_finish() -> None:
    """Leave modules and tests out of collections of garbage, which searched them at great cost."""
    lean.leave_out_modules()


def pytest_runtest_logfinish() -> None:
    """Leave out what a test imported, too."""
    lean.leave_out_modules()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise `target` (every op in every place), `op`, and `dtype` (every dtype of the
    target).

    `@pytest.mark.targets` takes the arguments of `choose_targets`.
    """
    names = set(metafunc.fixturenames)
    marker = metafunc.definition.get_closest_marker("targets")
    ops, targets = choose_targets(*marker.args, **marker.kwargs) if marker else choose_targets()
    if {"target", "dtype"} <= names:
        pairs = [(target, dtype) for target in targets for dtype in target.dtypes]
        ids = [f"{target}-{str(dtype).removeprefix('torch.')}" for target, dtype in pairs]
        metafunc.parametrize(("target", "dtype"), pairs, ids=ids, indirect=["target"])
    elif "target" in names:
        metafunc.parametrize("target", targets, ids=str, indirect=True)
    elif "op" in names:
        metafunc.parametrize("op", ops, ids=str)


@pytest.fixture
def own_graphs() -> Iterator[None]:
    """Graphs of one test serve no other one."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """The target, with its backend selected by name."""
    target: Target = request.param
    with running_at(target.place, monkeypatch):
        yield target


@contextmanager
def running_at(place: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A context in which the place's backend is selected by name and runs there."""
    backend = PLACES[place][0]
    if place == "emulator":
        torch.ops.load_library(str(EMULATED))
        monkeypatch.setattr(BACKENDS["cuda"], "why_missing", lambda: None)
        # Only kernels of the CPU take settings of each parameter. These tensors stand for a GPU's.
        monkeypatch.setattr(FusedOptimizer, "_may_vary", lambda *_: False)
    if place in ("emulator", "interpreter"):
        monkeypatch.setattr(BACKENDS[backend], "devices", {"cpu"})
    with torchweld.use_backend(backend):
        yield
    cache.forget()  # a backend serves other devices now


@pytest.fixture(params=["cpu", "eager"])
def on_cpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels, then eager torch, selected by name."""
    with torchweld.use_backend(request.param):
        yield request.param


@pytest.fixture
def kernels() -> Iterator[None]:
    """The CPU's kernels serve small inputs too."""
    with torchweld.use_backend("cpu"):
        yield


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton is selected by name, on a GPU or in its interpreter."""
    with running_at(TRITON, monkeypatch):
        yield


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trials:
    """CPU tensors are tried as a GPU's."""
    return try_on_cpu(monkeypatch, tmp_path)


@pytest.fixture
def alone_on_the_gpu() -> Iterator[None]:
    """Tests that fill a GPU wait for each other, also across processes."""
    if not GPU:
        yield
        return
    with (Path(tempfile.gettempdir()) / "torchweld-large-tests").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record in a test's report which op ran where; pytest-xdist passes it on.

    A GPU that lacks memory says nothing about a kernel: the test is skipped.
    """
    report = yield
    error = call.excinfo and call.excinfo.value
    if report.failed and "gpu-" in item.nodeid and error and is_out_of_memory(error):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, "Skipped: out of memory")
    if report.when == "call" and "target" in getattr(item, "fixturenames", ()):
        assert isinstance(item, pytest.Function)
        target: Any = item.callspec.params["target"]
        report.user_properties.append(("ran", (target.place, target.op.name)))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many kernels ran in each place, and how many did not run."""
    passed = terminalreporter.stats.get("passed", [])
    properties = [
        value for report in passed for name, value in report.user_properties if name == "ran"
    ]
    lines = []
    for place, (backend, _, missing) in PLACES.items():
        ops = [op.name for op in KERNELS if backend in op.sources]
        ran = {op for where, op in properties if where == place and op in ops}
        # Forward and backward are one kernel each.
        line = f"{place:12} {2 * len(ran):3} kernels ran, {2 * (len(ops) - len(ran)):3} did not run"
        lines.append(line + (f": {missing}" if missing else ""))
    terminalreporter.section("kernels")
    terminalreporter.write_line("\n".join(lines))


# Fixtures for ops outside the registry, whose tests name the places where they run.


def _place(name: str) -> Any:
    missing = PLACES[name][2]
    return pytest.param(name, marks=pytest.mark.skipif(missing is not None, reason=str(missing)))


@pytest.fixture(params=["cpu", "eager", _place("emulator")])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A backend that runs on CPU tensors here, selected by name."""
    if request.param == "emulator":
        with running_at(request.param, monkeypatch):
            yield request.param
    else:
        with torchweld.use_backend(request.param):
            yield request.param


@pytest.fixture(params=[_place("emulator"), _place("gpu-cuda")])
def cuda_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device on whose tensors the CUDA kernels run here, with the backend selected by name."""
    with running_at(request.param, monkeypatch):
        yield PLACES[request.param][1]
