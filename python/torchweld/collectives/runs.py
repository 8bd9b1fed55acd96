"""Lists of tensors: their sizes, all of them in one flat tensor, and runs of a limited size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def divide_into_runs(items: Iterable[T], size_of: Callable[[T], int], most: int) -> list[list[T]]:
    """Divide items into runs of at most this size; a larger item is its own run."""
    runs: list[list[T]] = []
    room = 0
    for item in items:
        size = size_of(item)
        if not runs or size > room:
            runs.append([])
            room = most
        runs[-1].append(item)
        room -= size
    return runs


def list_sizes(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Count the elements of each tensor."""
    return [t.numel() for t in tensors]


def flatten_all(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate all tensors, flattened, in float32."""
    return torch.cat([t.reshape(-1).float() for t in tensors])
