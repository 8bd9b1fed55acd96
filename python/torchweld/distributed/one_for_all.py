"""What processes tell each other: the result of one, the values of all, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from torchweld.errors import ArgumentError, CollectiveError

T = TypeVar("T")


def compute_once(
    function: str, compute: Callable[[], T], group: dist.ProcessGroup | None = None, rank: int = 0
) -> T:
    """Return on all ranks what `compute` returns on one of them.

    If it raises there, the others raise a CollectiveError instead of waiting for the result.
    """
    if not dist.is_initialized():
        return compute()
    box: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank(group) == rank:
        try:
            box = [compute(), None]
        except Exception as error:
            failure, box = error, [None, f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(box, group=group, group_src=rank)
    if failure is not None:
        raise failure
    if box[1] is not None:
        raise CollectiveError(function, f"rank {rank} raised an error. {box[1]}")
    return box[0]  # type: ignore[no-any-return]


@contextmanager
def fail_together(function: str) -> Iterator[None]:
    """Let all ranks leave this block by an error if one does.

    The others raise the same ArgumentError, or a CollectiveError that names another error.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # the others wait to hear of it
        failure = error
    is_ours = isinstance(failure, ArgumentError)
    sent = failure if is_ours or failure is None else f"{type(failure).__name__}: {failure}"
    errors = gather_objects(sent)
    if failure is not None:
        raise failure
    for rank, other in enumerate(errors):
        if isinstance(other, ArgumentError):
            raise other
        if other is not None:
            raise CollectiveError(function, f"rank {rank} raised an error. {other}")


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks, in their order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
