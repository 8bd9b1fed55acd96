"""Versions of what torchweld runs on, and the CPU's name."""

from __future__ import annotations

import importlib
import platform
from pathlib import Path

import torch

from torchweld.version import __version__


def versions() -> dict[str, str | None]:
    """The versions that timings and failures depend on."""
    return {
        "torchweld": __version__,
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
    """The CPU's model name, where the system reports it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
