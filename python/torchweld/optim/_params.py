"""Checks that parameters are no duplicates and do not share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchweld import state
from torchweld.errors import ArgumentError
from torchweld.optim._shards import local_part

Group = dict[str, Any]


def drop_duplicates(group: Group) -> None:
    """Drop duplicate parameters from a group; torch has warned about them."""
    first = {p: i for i, p in reversed(list(enumerate(group["params"])))}
    if len(first) < len(group["params"]):
        for key in {"params", "param_names"} & group.keys():
            group[key] = [group[key][i] for i in sorted(first.values())]


class _Memory(NamedTuple):
    """The range of bytes that a parameter spans on a device, gaps included."""

    device: str
    begin: int
    end: int
    number: int  # of the parameter


def check_apart(function: str, groups: Sequence[Group]) -> None:
    """Check that no two parameters share memory: threads would write to it concurrently."""
    params = [p for group in groups for p in group["params"]]
    memories = sorted(filter(None, (_find_memory(i, p) for i, p in enumerate(params))))
    overlapping: list[_Memory] = []
    end = -1
    for memory in memories:
        if overlapping and memory.device == overlapping[0].device and memory.begin < end:
            overlapping.append(memory)
            end = max(end, memory.end)
            continue
        _check_elements(function, params, overlapping)
        overlapping, end = [memory], memory.end
    _check_elements(function, params, overlapping)


def _find_memory(number: int, p: torch.Tensor) -> _Memory | None:
    part = local_part(p.detach())
    if state.is_fake(part):
        return None
    try:
        begin = part.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        return None
    if begin == 0 or part.numel() == 0:
        return None
    last = sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
    return _Memory(str(part.device), begin, begin + (last + 1) * part.itemsize, number)


def _check_elements(function: str, params: list[torch.Tensor], overlapping: list[_Memory]) -> None:
    """Check elements one by one: columns of one matrix overlap in range, but share no memory."""
    if len(overlapping) < 2:
        return
    begin, end = overlapping[0].begin, max(memory.end for memory in overlapping)
    size = local_part(params[overlapping[0].number].detach()).itemsize
    taken = torch.zeros(-(-(end - begin) // size), dtype=torch.bool, device="cpu")
    for memory in overlapping:
        part = local_part(params[memory.number].detach())
        step = [
            0 if count == 1 else step for count, step in zip(part.shape, part.stride(), strict=True)
        ]
        count = [1 if not s else n for n, s in zip(part.shape, step, strict=True)]
        first, off = divmod(memory.begin - begin, size)
        aligned = part.itemsize == size and off == 0
        if not aligned or (elements := taken.as_strided(count, step, first)).any():
            actual = f"parameter {memory.number}, which shares memory with another"
            raise ArgumentError(function, "params", actual, "parameters that share none")
        elements.fill_(True)
