"""Which sizes may differ between calls that are alike, learnt from calls that differ in no more.

A batch has another length, a cache has grown: guards of exact sizes would never meet such calls
again. A public function declares the dimensions that decide nothing (cache.py). Where two of its
calls differ only there, later calls may differ there as well, if all tensors follow: sizes that
were equal in both calls stay equal, and a tensor lies in memory as it did.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch


class Extent(NamedTuple):
    """The sizes and strides of a tensor, and whether it is contiguous."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    is_packed: bool


# The tensors of a call, by position of the argument.
Extents = Mapping[int, Extent]


def measure(given: Sequence[Any]) -> dict[int, Extent]:
    """The extents of the tensors among a call's arguments."""
    return {
        at: Extent(tuple(t.shape), t.stride(), t.is_contiguous())
        for at, t in enumerate(given)
        if isinstance(t, torch.Tensor)
    }


class Varying(NamedTuple):
    """What guards compare of tensors: None for a size or stride that may vary."""

    sizes: Mapping[int, list[int | None]]
    strides: Mapping[int, list[int | None]]
    conditions: Sequence[str]  # on the arguments a0, a1, ...


def find_varying(
    calls: Sequence[Extents], sources: Mapping[int, Collection[int]]
) -> Varying | None:
    """What may vary between calls with these extents; None if they are not alike otherwise.

    `sources` has the arguments with sizes that may vary, and the dimensions of theirs that may not.
    Any other size that varies must be equal to one of a source in each call. Sizes of 0 and 1 do
    not vary: they broadcast.
    """
    ranks = [{at: len(extent.sizes) for at, extent in call.items()} for call in calls]
    if any(rank != ranks[0] for rank in ranks):
        return None
    columns = {
        (at, dim): tuple(call[at].sizes[dim] for call in calls)
        for at, rank in ranks[0].items()
        for dim in range(rank)
    }
    varying = {place: column for place, column in columns.items() if len({*column}) > 1}
    allowed = {
        column
        for (at, dim), column in varying.items()
        if at in sources and not {dim, dim - ranks[0][at]} & {*sources[at]}
    }
    if not varying or any(c not in allowed or min(c) < 2 for c in varying.values()):
        return None
    conditions = [*_write_equalities(varying)]
    sizes, strides = {}, {}
    for at, rank in ranks[0].items():
        own = [call[at] for call in calls]
        sizes[at] = [None if (at, d) in varying else own[0].sizes[d] for d in range(rank)]
        steps = [{extent.strides[d] for extent in own} for d in range(rank)]
        strides[at] = [step.pop() if len(step) == 1 else None for step in steps]
        loose = [d for d in range(rank) if strides[at][d] is None]
        if loose and all(extent.is_packed for extent in own):
            conditions.append(f"a{at}.is_contiguous()")
        elif loose:
            for dim in loose:
                inner = _find_inner(own, dim)
                if inner is None:
                    return None
                lies = f"a{at}.stride({dim}) == a{at}.stride({inner}) * a{at}.size({inner})"
                conditions.append(lies)
    return Varying(sizes, strides, conditions)


def _write_equalities(varying: Mapping[tuple[int, int], tuple[int, ...]]) -> Iterator[str]:
    """The code that finds each varying size, and compares those that were equal in all calls."""
    names: dict[tuple[int, ...], str] = {}
    for (at, dim), column in varying.items():
        size = f"a{at}.size({dim})"
        if column in names:
            yield f"{size} == {names[column]}"
        else:
            names[column] = f"n{len(names)}"
            yield f"({names[column]} := {size}) > 1"


def _find_inner(extents: Sequence[Extent], dim: int) -> int | None:
    """A dimension whose end is the next element of `dim`, in every call; None without one."""
    for inner in range(len(extents[0].sizes)):
        if inner != dim and all(
            extent.strides[dim] == extent.strides[inner] * extent.sizes[inner] for extent in extents
        ):
            return inner
    return None
