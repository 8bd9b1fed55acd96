"""Where and with what a run is made."""

from __future__ import annotations

import importlib
import platform
import time
from pathlib import Path
from typing import Any

import torch

import torchweld
from torchweld import _native
from torchweld.bench import conditions


def machine(device: str) -> dict[str, Any]:
    """All that a time depends on, and when it was taken."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "name": cpu_name(),
        "isa": _native.cpu_isa,
        "threads": torch.get_num_threads(),
        "conditions": conditions.describe(),
        "versions": versions(),
    }
    if device == "cuda":
        found["name"] = torch.cuda.get_device_name()
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    return found


def versions() -> dict[str, str | None]:
    """Versions of what a time, or a failure, depends on."""
    return {
        "torchweld": torchweld.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _triton_version(),
        "python": platform.python_version(),
    }


def _triton_version() -> str | None:
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return None


def cpu_name() -> str:
    """The CPU's own name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
