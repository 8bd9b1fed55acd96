"""compute_once: one process computes, and all have its result or its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from torchweld.errors import CollectiveError

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
