"""Rows of docs/stack.md about seams and models, which other tests compute, for `make stack`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch


def keep(
    row: str,
    pairs: Iterable[tuple[Any, torch.Tensor]] = (),
    *,
    error: str = "",
    sent: Mapping[str, int] | None = None,
) -> None:
    """Write a row's figure, if results are wanted.

    Args:
        row: the row's name; of all ranks and calls the largest figure counts.
        pairs: gradients, and one process's gradients in float64.
        error: what every rank raises instead.
        sent: the bytes of its collectives, by kind.
    """
    if "TORCHWELD_STACK" not in os.environ:
        return
    differences, sizes = [0.0], [0.0]
    for found, wanted in pairs:
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        differences.append((found - wanted).abs().max().item())
        sizes.append(wanted.abs().max().item())
    # Over the largest of all: gradients of keys' biases are zero but for rounding.
    off = max(differences) / (max(sizes) or 1.0)
    figures = {"off": off, "error": error, "sent": dict(sent or {})}
    _write({"row": row, **figures})


def keep_model(model: str, found: Mapping[str, str]) -> None:
    """Write what a model's plans are, "right" or the reason of their refusal, by kind of plan."""
    if "TORCHWELD_STACK" in os.environ:
        _write({"planned": model, **found})


def _write(entry: Mapping[str, Any]) -> None:
    with open(os.environ["TORCHWELD_STACK"], "a") as file:
        file.write(json.dumps(entry) + "\n")
