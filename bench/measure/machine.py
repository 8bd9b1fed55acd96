"""The machine of a run, the conditions for CPU times, what GPUs need, and errors in one line."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchweld import functional, use_backend
from torchweld.dispatch import native
from torchweld.registry import BACKENDS
from torchweld.version import __version__


def describe_machine(device: str) -> dict[str, Any]:
    """The facts that times depend on, and the date."""
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "name": cpu_name(),
        "isa": f"{native.cpu_isa} with AMX" if native.has_tiles else native.cpu_isa,
        "threads": torch.get_num_threads(),
        "conditions": describe_conditions(),
        "versions": versions(),
    }
    if device == "cuda":
        facts["name"] = torch.cuda.get_device_name()
        facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    return facts


def versions() -> dict[str, str | None]:
    """The versions that timings and failures depend on."""
    return {
        "torchweld": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _find_triton_version(),
        "python": platform.python_version(),
    }


def _find_triton_version() -> str | None:
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return None


def cpu_name() -> str:
    """The CPU's model name, where the system reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


# --- Conditions for CPU times, the same for every contender ---------------------------------------

# By default glibc maps every large block again, and its pages fault in one by one. That takes
# longer than a norm. A training process reuses its blocks.
RESIDENT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**28),
}
# If two threads of a team share a core, one stalls for a time slice of the scheduler.
BOUND = {"OMP_PROC_BIND": "true"}
# The tests fill new tensors with NaN, which takes time.
UNWANTED = "TORCHWELD_POISON"


def settle(*, default_allocator: bool) -> None:
    """Restart this command with the environment set: a process reads it only at its start."""
    wanted = BOUND | ({} if default_allocator else RESIDENT)
    here = {name: value for name, value in os.environ.items() if name != UNWANTED}
    settled = {**here, **wanted} if platform.libc_ver()[0] == "glibc" else here
    if settled != dict(os.environ):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], settled)


def describe_conditions() -> str:
    """The conditions in words."""
    bound = all(os.environ.get(name) == value for name, value in BOUND.items())
    resident = all(os.environ.get(name) == value for name, value in RESIDENT.items())
    blocks = "stay resident" if resident else "are the default allocator's"
    return f"threads {'bound to cores' if bound else 'not bound'}, large blocks {blocks}"


# --- What kernels on a GPU need -------------------------------------------------------------------

# An op with a kernel of each backend, and the seconds that one may take, its compilers included.
ON_GPUS = {"cuda": "quantize_8bit", "triton": "softmax_dropout"}
_PATIENCE = 120.0
_HINTS = {
    "C compiler": "Triton builds its launchers with one: install gcc",
    "Python.h": "install the headers of this Python (python3-dev)",
    "ptxas": "it comes with Triton and with the CUDA toolkit",
}


def find_tools() -> dict[str, str | None]:
    """The tools with which Triton makes kernels, and where each is; None: it is missing."""
    asked = os.environ.get("CC")
    compilers = map(shutil.which, [asked] if asked else ["cc", "gcc", "clang"])
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return {
        "C compiler": next(filter(None, compilers), None),
        "Python.h": str(header) if header.exists() else None,
        "ptxas": _find_ptxas(),
    }


def _find_ptxas() -> str | None:
    """The assembler that Triton takes: the one asked for, its own, or the toolkit's."""
    if asked := os.environ.get("TRITON_PTXAS_PATH"):
        return asked if os.access(asked, os.X_OK) else None
    triton = importlib.util.find_spec("triton")
    for folder in (triton and triton.submodule_search_locations) or ():
        own = Path(folder) / "backends" / "nvidia" / "bin" / "ptxas"
        if own.exists():
            return str(own)
    return shutil.which("ptxas")


def list_missing() -> list[str]:
    """What a run on the GPU lacks, each in a line: tools, and kernels that do not run."""
    lacks = [f"no {tool}: {_HINTS[tool]}" for tool, at in find_tools().items() if at is None]
    reasons = {backend: why_not(backend) for backend in ON_GPUS}
    return lacks + [f"{name}: {why}" for name, why in reasons.items() if why is not None]


def why_not(backend: str) -> str | None:
    """Why a kernel of this backend does not run on the GPU; None if one does.

    It runs in its own process, since a fault breaks the GPU for its process.
    """
    if reason := BACKENDS[backend].why_missing():
        return reason
    command = [sys.executable, "-c", f"from {__name__} import run_one; run_one({backend!r})"]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{ON_GPUS[backend]} took longer than {_PATIENCE:g} s"
    if ended.returncode == 0:
        return None
    last = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
    return f"{ON_GPUS[backend]} does not run: {last}"


def run_one(backend: str, device: str = "cuda") -> None:
    """Run a kernel and compare its result with the reference's; raise an error if it differs."""
    x = torch.linspace(-1, 1, 64 * 256, device=device).view(64, 256)
    call = getattr(functional, ON_GPUS.get(backend, "softmax_dropout"))
    with use_backend(backend):
        y = call(x)
    with use_backend("eager"):
        torch.testing.assert_close(y, call(x))


# --- Errors in one line ---------------------------------------------------------------------------


class Refusal(Exception):  # noqa: N818
    """The command cannot run here. The message says why, in one line."""


def choose_device(options: argparse.Namespace) -> str:
    """The device to measure on: the requested one, else a GPU if there is one."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise Refusal("--device cuda needs a GPU; torch sees none here")
    return device


PICTURES = (".png", ".pdf", ".svg", ".jpg")


def check_outputs(options: argparse.Namespace, *, pictures: Sequence[str] = ("plot",)) -> None:
    """Refuse a file that cannot be written or drawn, before measuring anything."""
    for name in (*pictures, "json", "csv", "markdown", "write"):
        value = getattr(options, name, None)
        if value is None or str(value) == "-":
            continue
        if name in pictures:
            _check_picture(name, Path(value))
        folder = Path(value).absolute().parent
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        if Path(value).is_dir() or not existing.is_dir() or not os.access(existing, os.W_OK):
            raise Refusal(f"--{name}: {value} cannot be written")


def _check_picture(name: str, path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise Refusal(f"--{name} needs matplotlib: pip install torchweld[bench]")
    if path.suffix.lower() not in PICTURES:
        accepted = ", ".join(PICTURES)
        raise Refusal(f"--{name}: {path} is not a picture; accepted endings: {accepted}")


def parse_positive(text: str) -> float:
    """The type of an option that is a number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number
