"""Looks for what kernels on a GPU need, before a run spends its minutes and touches a record."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from torchweld import functional, use_backend
from torchweld.registry import BACKENDS

# Seconds that one kernel of each backend may take, Triton's compilers included.
PATIENCE = 120.0
_KERNELS = {"cuda": "quantize_8bit", "triton": "softmax_dropout"}


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
    hints = {
        "C compiler": "Triton builds its launchers with one: install gcc",
        "Python.h": "install the headers of this Python (python3-dev)",
        "ptxas": "it comes with Triton and with the CUDA toolkit",
    }
    lacks = [f"no {tool}: {hints[tool]}" for tool, at in find_tools().items() if at is None]
    with ThreadPoolExecutor() as pool:  # each starts a process
        reasons = dict(zip(_KERNELS, pool.map(why_not, _KERNELS), strict=True))
    return lacks + [f"{name}: {why}" for name, why in reasons.items() if why is not None]


def why_not(backend: str) -> str | None:
    """Why a kernel of this backend does not run on the GPU; None if one does.

    It runs in its own process, since a fault breaks the GPU for its process.
    """
    if reason := BACKENDS[backend].why_missing():
        return reason
    command = [sys.executable, "-m", "torchweld.bench.preflight", backend]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{_KERNELS[backend]} took longer than {PATIENCE:g} s"
    if ended.returncode == 0:
        return None
    last = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
    return f"{_KERNELS[backend]} does not run: {last}"


def run_one(backend: str, device: str = "cuda") -> None:
    """Run a kernel and compare its result with the reference's; raise an error if it differs."""
    x = torch.linspace(-1, 1, 64 * 256, device=device).view(64, 256)
    call = getattr(functional, _KERNELS.get(backend, "softmax_dropout"))
    with use_backend(backend):
        y = call(x)
    with use_backend("eager"):
        torch.testing.assert_close(y, call(x))


if __name__ == "__main__":
    run_one(sys.argv[1])
