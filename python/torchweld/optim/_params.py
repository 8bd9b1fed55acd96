"""Checks of an optimizer's parameters: no duplicates, no shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torchweld.errors import ArgumentError
from torchweld.optim._shards import local

Group = dict[str, Any]


def drop_duplicates(group: Group) -> None:
    """Drop duplicates from a group; torch has warned about them."""
    first = {p: i for i, p in reversed(list(enumerate(group["params"])))}
    if len(first) < len(group["params"]):
        for key in {"params", "param_names"} & group.keys():
            group[key] = [group[key][i] for i in sorted(first.values())]


class _Memory(NamedTuple):
    """The range of bytes on a device that a tensor spans, gaps included."""

    device: str
    begin: int
    end: int
    number: int  # of the parameter


def check_apart(function: str, groups: Sequence[Group]) -> None:
    """Check that no two parameters share memory, to which threads would write concurrently."""
    params = [p for group in groups for p in group["params"]]
    memories = sorted(filter(None, (_memory(i, p) for i, p in enumerate(params))))
    together: list[_Memory] = []  # overlapping ranges
    end = -1
    for memory in memories:
        if together and memory.device == together[0].device and memory.begin < end:
            together.append(memory)
            end = max(end, memory.end)
            continue
        _check_elements(function, params, together)
        together, end = [memory], memory.end
    _check_elements(function, params, together)


def _memory(number: int, p: torch.Tensor) -> _Memory | None:
    part = local(p.detach())
    if isinstance(part, FakeTensor):
        return None
    try:
        begin = part.data_ptr()
    except RuntimeError:  # a subclass without memory of its own
        return None
    if begin == 0 or part.numel() == 0:
        return None
    last = sum((size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True))
    return _Memory(str(part.device), begin, begin + (last + 1) * part.itemsize, number)


def _check_elements(function: str, params: list[torch.Tensor], together: list[_Memory]) -> None:
    """Compare element by element: interleaved columns of a matrix share no memory."""
    if len(together) < 2:
        return
    begin, end = together[0].begin, max(memory.end for memory in together)
    size = local(params[together[0].number].detach()).itemsize
    taken = torch.zeros(-(-(end - begin) // size), dtype=torch.bool, device="cpu")
    for memory in together:
        part = local(params[memory.number].detach())
        step = [
            0 if count == 1 else step for count, step in zip(part.shape, part.stride(), strict=True)
        ]
        count = [1 if not s else n for n, s in zip(part.shape, step, strict=True)]
        first, off = divmod(memory.begin - begin, size)
        aligned = part.itemsize == size and off == 0
        if not aligned or (elements := taken.as_strided(count, step, first)).any():
            came = f"parameter {memory.number}, which shares memory with another"
            raise ArgumentError(function, "params", came, "parameters that share none")
        elements.fill_(True)
