"""The device and the software on which a kernel's correctness and speed depend."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from torchweld.version import __version__

_PACKAGE = Path(__file__).parents[2]


def describe_device(device: torch.device) -> dict[str, Any]:
    """The key of all answers on a device: the device, the kernels, and torch's version."""
    return {"device": _name(device), **_software()}


def _name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    gpu = torch.cuda.get_device_properties(device)
    return f"{gpu.name}, {gpu.multi_processor_count} SMs, sm_{gpu.major}{gpu.minor}"


@functools.cache
def _software() -> dict[str, str]:
    has_triton = importlib.util.find_spec("triton") is not None
    return {
        "torchweld": __version__,
        "kernels": _hash_kernels(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__ if has_triton else "none",
    }


def _hash_kernels() -> str:
    """A hash of the Triton sources and of the sources that the build recorded."""
    sources = sorted((_PACKAGE / "triton_kernels").glob("*.py"))
    sources += sorted((_PACKAGE.parent.parent / "triton_kernels").glob("*.py"))
    digest = hashlib.sha256()
    for file in [*sources, _PACKAGE / "lib" / "built.json"]:
        if file.exists():
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
