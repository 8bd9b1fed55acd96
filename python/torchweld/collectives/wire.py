"""A process group that counts bytes, and whose ranks agree before they exchange tensors.

Ranks first compare a fingerprint of their tensors in one message of fixed size. So if tensors
differ, or are not finite on one rank, every rank raises an error before any tensor changes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist

from torchweld.errors import ArgumentError, CollectiveError


class Status(IntEnum):
    """The state of a rank before an exchange. The highest state of all ranks decides."""

    READY = 0
    SKIPS = 1  # this rank skips the step, so every rank does
    NOT_FINITE = 2
    FAILED = 3


class Wire:
    """A process group, or a single process if there is none."""

    def __init__(self, function: str, group: Any = None) -> None:
        has_processes = dist.is_available() and dist.is_initialized()
        if group is not None and not has_processes:
            accepted = "None, since torch.distributed is not initialized"
            raise ArgumentError(function, "group", repr(group), accepted)
        self.function, self.group = function, group
        self.size = dist.get_world_size(group) if has_processes else 1
        self.rank = dist.get_rank(group) if has_processes else 0
        if self.rank < 0:
            raise ArgumentError(function, "group", "one without this process", "one that has it")
        self.bytes_sent = 0  # by this rank to other ranks, since construction

    def agree(self, tensors: Sequence[torch.Tensor], status: Status, *phase: object) -> Status:
        """Compare tensors and phase with the other ranks; return the highest status.

        Raises CollectiveError if ranks differ, if a rank has numbers that are not finite, or if a
        rank raised an error.
        """
        sizes = [t.numel() for t in tensors]
        described = (f"{len(sizes)} tensors of {sum(sizes)} elements", *map(str, phase))
        fingerprint = zlib.crc32(repr((sizes, phase)).encode())
        device = tensors[0].device if tensors else torch.device("cpu")
        mine = torch.tensor([fingerprint, len(sizes), sum(sizes), int(status)], device=device)
        of_all = self.gather(mine).wait().tolist()
        statuses = [Status(row[3]) for row in of_all]
        if Status.FAILED in statuses:
            self._refuse(f"rank {statuses.index(Status.FAILED)} raised an error")
        for rank, row in enumerate(of_all):
            if row[0] != fingerprint:
                theirs = f"{row[1]} tensors of {row[2]} elements"
                mine_is = ", ".join(described)
                self._refuse(
                    f"rank {rank} has {theirs} and rank {self.rank} has {mine_is}; "
                    "their number, sizes, order or phase differ"
                )
        if Status.NOT_FINITE in statuses:
            ranks = [rank for rank, each in enumerate(statuses) if each is Status.NOT_FINITE]
            self._refuse(f"NaN or infinity on rank {', '.join(map(str, ranks))}")
        return max(statuses)

    def report_failure(self, device: torch.device) -> None:
        """Tell the ranks that wait in agree() that this rank raised an error."""
        if self.size > 1:
            mine = torch.tensor([0, 0, 0, int(Status.FAILED)], device=device)
            self.gather(mine).wait()

    def to_all(self, message: torch.Tensor) -> Pending:
        """Send row r of a message to rank r; row r of the result is from rank r."""
        if self.size == 1:
            return Pending(self, message)
        received = torch.empty_like(message)
        self.bytes_sent += (self.size - 1) * message[0].nbytes
        with self._translating_errors():
            work = dist.all_to_all_single(received, message, group=self.group, async_op=True)
        return Pending(self, received, work)

    def gather(self, message: torch.Tensor) -> Pending:
        """Gather the messages of all ranks, stacked."""
        received = message.new_empty(self.size, *message.shape)
        if self.size == 1:
            received[0] = message
            return Pending(self, received)
        self.bytes_sent += (self.size - 1) * message.nbytes
        with self._translating_errors():
            # torch 2.13 has renamed the function, and warns about the old name.
            gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            work = gather(received.view(-1), message.view(-1), group=self.group, async_op=True)
        return Pending(self, received, work)

    def average(self, flat: torch.Tensor) -> Pending:
        """Average over all ranks, in place; bytes are counted as for a ring."""
        if self.size == 1:
            return Pending(self, flat)
        self.bytes_sent += 2 * (self.size - 1) * flat.nbytes // self.size
        with self._translating_errors():
            work = dist.all_reduce(flat, group=self.group, async_op=True)
        return Pending(self, flat, work, lambda t: t.div_(self.size))

    def _refuse(self, why: str) -> None:
        raise CollectiveError(self.function, f"{why}. Nothing was changed")

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # from gloo or NCCL: a rank died or timed out
            why = str(error).strip().partition("\n")[0]
            raise CollectiveError(
                self.function,
                f"rank {self.rank} of {self.size}: an exchange failed, since a rank died, raised "
                f"an error or did not answer in time: {why}. Nothing was changed",
            ) from error


class Pending:
    """An exchange in progress."""

    def __init__(
        self,
        wire: Wire,
        result: torch.Tensor,
        work: Any = None,
        then: Callable[[torch.Tensor], torch.Tensor] = lambda t: t,
    ) -> None:
        self._wire, self._result, self._work, self._then = wire, result, work, then

    def wait(self) -> torch.Tensor:
        """Wait for the result and return it."""
        if self._work is not None:
            with self._wire._translating_errors():
                self._work.wait()
            self._result = self._then(self._result)
            self._work = None
        return self._result
