"""Runs launches on a stand-in for NVIDIA's driver. The stand-in records each call.

As a script, with TRITON_INTERPRET=0, it tells as JSON what the driver was given: `kernels` of each
kernel, by Triton, by the twin in Python and by the leaf in C; `plans` what plans do.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl

from torchweld.bench.measure import launched
from torchweld.dispatch.warm import plans
from torchweld.registry import OPS
from torchweld.triton_kernels import launch as launching

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("driver.cpp")
FLAGS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-fvisibility=hidden")
_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.[bufs](\d+)[^\[,\n]*(?:\[(\d+)\])?")
state = {"stream": 0x51, "device": 0}


def compile_driver() -> Path:
    """Compile the stand-in, with the CUDA headers that Triton brings; returns its folder."""
    headers = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    digest = hashlib.sha256(SOURCE.read_bytes() + triton.__version__.encode()).hexdigest()[:16]
    folder = ROOT / "build" / "stand-in" / digest
    if not (folder / "libcuda.so.1").exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f"{os.getpid()}.so"
        name = "-Wl,-soname,libcuda.so.1"
        command = ["g++", *FLAGS, f"-I{headers}", str(SOURCE), name, "-o", str(made)]
        subprocess.run(command, check=True)
        made.replace(folder / "libcuda.so.1")
    return folder


class Driver:
    """The stand-in, in place of the driver: what opens libcuda.so.1 finds it already loaded."""

    def __init__(self, writes: bool = True) -> None:
        folder = compile_driver()
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        self._library = ctypes.CDLL(str(folder / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
        self._library.stand_in_read.restype = ctypes.c_char_p
        self._library.stand_in_write(writes)
        cuda: Any = torch._C
        cuda._cuda_getCurrentRawStream = lambda _: state["stream"]
        cuda._cuda_getDevice = lambda: state["device"]
        from triton.backends.nvidia.driver import CudaDriver

        active = CudaDriver()
        active.get_device_capability = lambda *_: (9, 0)
        active.get_current_device = lambda: 0
        active.get_current_stream = lambda _: state["stream"]
        triton.runtime.driver.set_active(active)

    def declare(self, compiled: Any) -> None:
        """Tell it the sizes of a kernel's parameters, by its compiled code."""
        entry = re.search(r"\.entry [^(]*\(([^)]*)\)", compiled.asm["ptx"])
        assert entry is not None
        sizes = [int(bits) // 8 * int(n or 1) for bits, n in _PARAMETER.findall(entry[1])]
        compiled._init_handles()
        array = (ctypes.c_size_t * len(sizes))(*sizes)
        self._library.stand_in_declare(ctypes.c_void_p(compiled.function), array, len(sizes))

    def fail(self, code: int) -> None:
        """Refuse launches with this error; 0: not any more."""
        self._library.stand_in_fail(code)

    def read(self) -> list[str]:
        """The launches since the last time, a line each."""
        lines: list[str] = self._library.stand_in_read().decode().splitlines()
        self._library.stand_in_clear()
        return lines


# --- Each kernel ----------------------------------------------------------------------------------


class Ways(NamedTuple):
    """What starts a compiled kernel, and what a plan gives to its leaf and its twin."""

    compiled: Any
    by_triton: Callable[[], None]
    twin: Callable[..., None]
    leaf: Callable[..., None] | None
    given: list[torch.Tensor]


def find_ways(driver: Driver, launch: Any) -> Ways:
    """Compile a launch for sm_90, on tensors of the CPU whose memory nobody touches."""
    made: list[torch.Tensor] = []
    launch = launch._replace(args=tuple(_allocate(x, made) for x in launch.args))
    signature = launched.sign(launch)
    options = {k: v for k, v in launch.options.items() if k not in signature[0]}
    compiled = launched.compile_launch(launch.kernel, signature, options)
    driver.declare(compiled)
    rest = [launch.options[name] for name in launch.kernel.arg_names[len(launch.args) :]]
    recorder = plans._Recorder(launching)
    launch_by_triton = plans._launch
    with mock.patch.object(plans, "_launch", _refuse):  # a leaf must not take its twin
        step: Any = recorder._make_step(made, None, launch, launch.options, compiled)
    pairs = (*step.places, *step.described)
    return Ways(
        compiled,
        partial(compiled[(launch.grid, 1, 1)], *launch.args, *rest),
        partial(launch_by_triton, step, [at for at, _ in pairs]),
        step.leaf,
        [made[number] for _, number in pairs],
    )


def _refuse(*_: Any) -> None:
    raise AssertionError("the leaf took its twin")


def _allocate(value: Any, made: list[torch.Tensor]) -> Any:
    if hasattr(value, "block_shape"):
        return plans._describe(_allocate(value.base, made), value)
    if isinstance(value, torch.Tensor):
        made.append(torch.empty(max(1, value.numel()), dtype=value.dtype))
        return made[-1]
    return value


def compare(driver: Driver, ways: Ways) -> list[list[str]]:
    """What the driver is given by Triton, by the twin, and by the leaf if there is one."""
    ways.by_triton()
    found = [driver.read()]
    for way in filter(None, (ways.twin, ways.leaf)):
        way(state["stream"], *ways.given)
        found.append(driver.read())
    return found


def _list_smallest() -> Iterator[tuple[str, Any]]:
    """For each kernel the launch that test_triton_aot.py compiles in any case."""
    import resources

    kept, smallest = resources.read(90), dict[str, tuple[int, Any]]()
    for case, launch in resources.launches(90):
        each = resources.Compile(case, launch, True)
        taken = kept.get(each.key, {"registers": 255})["registers"]
        if each.kernel not in smallest or taken < smallest[each.kernel][0]:
            smallest[each.kernel] = taken, launch
    yield from ((kernel, launch) for kernel, (_, launch) in smallest.items())


@triton.jit
def take(  # type: ignore[no-untyped-def]
    x_ptr, y_ptr, negative, wide, huge, flag, real, rows, size: tl.constexpr
):
    """A kernel with numbers of all kinds."""
    at = tl.program_id(0) * size + tl.arange(0, size)
    value = tl.load(x_ptr + at) * real + negative + wide + huge + rows
    tl.store(y_ptr + at, tl.where(flag, value, 0))


NUMBERS = -5, 2**40 + 3, 2**63 + 1, False, 0.3, 48
OPTIONS: dict[str, dict[str, Any]] = {
    "numbers": {},
    "clusters": {"num_ctas": 2},
    "a cooperative grid": {"launch_cooperative_grid": True},
    "a launch that may begin early": {"launch_pdl": True},
    "all of them": {"num_ctas": 2, "launch_cooperative_grid": True, "launch_pdl": True},
}


def make_take(**options: Any) -> Any:
    x = torch.empty(64, device="meta")
    return launching.launch(take, 5, x, x, *NUMBERS, size=64, num_warps=4, **options)


def tell_kernels(driver: Driver, few: bool) -> dict[str, list[list[str]]]:
    """By kernel or option, what the driver is given in each way."""
    from torchweld.triton_kernels import symmetric

    launches = [] if few else [*_list_smallest()]
    x = torch.empty(2, 128, 128, dtype=torch.bfloat16, device="meta")
    launches.append(("small descriptors", symmetric._launch(x, x, x, 1.0, 0.5)))
    launches += [(name, make_take(**options)) for name, options in OPTIONS.items()]
    return {name: compare(driver, find_ways(driver, launch)) for name, launch in launches}


def tell_faults(driver: Driver) -> dict[str, list[str]]:
    """What the driver is given if a call were wrong; "" is right."""
    ways = find_ways(driver, make_take())
    (x, y), stream = ways.given, state["stream"]
    wrong = {"": (stream, x, y), "swapped": (stream, y, x), "a stale stream": (stream + 1, x, y)}
    told = {}
    for name, given in wrong.items():
        assert ways.leaf is not None
        ways.leaf(*given)
        told[name] = driver.read()
    return told


def tell_unknown(driver: Driver) -> dict[str, bool]:
    """Whether launches that differ from what the compiled code says have a leaf."""

    def has_leaf(change: Callable[[Any], Any]) -> bool:
        compile_launch = launched.compile_launch

        def changed(*given: Any) -> Any:
            compiled = compile_launch(*given)
            compiled._init_handles()
            change(compiled)
            return compiled

        with mock.patch.object(launched, "compile_launch", changed):
            return find_ways(driver, make_take()).leaf is not None

    def rename(name: str, kind: str) -> Callable[[Any], None]:
        return lambda compiled: compiled.src.signature.update({name: kind})

    return {
        "": has_leaf(lambda compiled: None),
        "a wide integer": has_leaf(rename("negative", "i64")),
        "a narrow integer": has_leaf(rename("wide", "i32")),
        "an unknown type": has_leaf(rename("real", "fp8")),
        "memory of Triton's": has_leaf(lambda c: setattr(c._run, "global_scratch_size", 8)),
    }


# --- Plans ----------------------------------------------------------------------------------------


def _name_addresses(lines: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[str]:
    for at, tensor in enumerate(tensors):
        address = tensor.data_ptr().to_bytes(8, "little").hex()
        lines = [line.replace(address, f"<{at}>") for line in lines]
    return [*lines]


def tell_plans(driver: Driver) -> dict[str, Any]:
    """What a norm's calls give to the driver, and what they raise."""
    start = launching.start
    compiled: list[Any] = []

    def declare(launch: Any, options: dict[str, Any]) -> Any:
        compiled.append(start(launch, options))
        driver.declare(compiled[-1])
        return compiled[-1]

    planned = OPS["layer_norm"].kernels["triton"].steps.forward
    weight, bias = torch.empty(64), torch.empty(64)

    def call(x: torch.Tensor | None = None) -> list[str]:
        x = torch.empty(8, 64) if x is None else x
        made = planned(x, [64], weight, bias, 1e-5)
        return _name_addresses(driver.read(), [x, weight, bias, *made])

    def refuse(given: torch.Tensor | None = None) -> str:
        try:
            call(given)
        except RuntimeError as error:
            return f"{error}"
        return ""

    told: dict[str, Any] = {}
    launch_by_triton, twins = plans._launch, list[Any]()

    def count(*given: Any) -> None:
        twins.append(given)
        launch_by_triton(*given)

    with (
        mock.patch.object(launching, "start", declare),
        mock.patch.object(plans, "_launch", count),
    ):
        call()
        told["by Triton"] = _again(driver, compiled[0], call)
    starts = len(compiled)
    told["by a plan"] = call()
    state["stream"] += 1
    told["on another stream"] = call()
    freed = torch.empty(8, 64)
    freed.untyped_storage().resize_(0)
    told["freed"] = refuse(freed), driver.read()
    view = torch.empty(2, 8, 64)[1]
    view.untyped_storage().resize_(0)
    told["a freed view"] = refuse(view), driver.read()
    told["twins before errors"] = len(twins)
    driver.fail(700)
    told["refused"] = refuse(), driver.read()
    driver.fail(0)
    thread = threading.Thread(target=lambda: told.update({"in a new thread": call()}))
    thread.start()
    thread.join()
    hooks: list[str] = []
    for kind, chain in zip(("enter", "leave"), launching.find_hooks(), strict=True):
        chain.add(_append(hooks, kind))
    told["with hooks"] = call(), [*hooks]
    for chain in launching.find_hooks():
        chain.calls.clear()
    told["twins"], told["planned"] = len(twins), len(compiled) == starts
    told["elsewhere"] = _call_elsewhere(driver, planned, (weight, bias))
    return told


def _append(to: list[str], what: str) -> Callable[[Any], None]:
    return lambda _: to.append(what)


def _again(driver: Driver, compiled: Any, call: Callable[[], list[str]]) -> list[str]:
    """A call without plans: its parameters' sizes are known by now."""
    with mock.patch.object(plans.Planned, "__call__", lambda self, *x: self._find()(*x)):
        return call()


def _call_elsewhere(driver: Driver, planned: Any, parameters: Any) -> Any:
    """A plan of one GPU where another one is current."""
    ((_, plan),) = next(iter(planned._plans.values()))
    assert all(step.leaf for step in plan.steps)
    function = plan._replace(device=0).bind(lambda *given: "the whole path")
    x = torch.empty(8, 64)
    state["device"] = 1
    found = [function(x, [64], *parameters, 1e-5), driver.read()]
    state["device"] = 0
    function(x, [64], *parameters, 1e-5)
    return [*found, len(driver.read())]


def main() -> None:
    """Tell what was asked for."""
    driver = Driver()
    told = {
        "kernels": lambda: tell_kernels(driver, False),
        "numbers": lambda: tell_kernels(driver, True),
        "faults": lambda: tell_faults(driver),
        "unknown": lambda: tell_unknown(driver),
        "plans": lambda: tell_plans(driver),
    }
    json.dump({name: told[name]() for name in sys.argv[1:]}, sys.stdout)


if __name__ == "__main__":
    main()
