"""The machine and software of a run."""

from __future__ import annotations

import time
from typing import Any

import torch

from torchweld.bench import conditions
from torchweld.dispatch import native
from torchweld.machine import cpu_name, versions


def machine(device: str) -> dict[str, Any]:
    """The facts that a time depends on, and the date."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "name": cpu_name(),
        "isa": native.cpu_isa,
        "threads": torch.get_num_threads(),
        "conditions": conditions.describe(),
        "versions": versions(),
    }
    if device == "cuda":
        found["name"] = torch.cuda.get_device_name()
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    return found
