"""A parameter that steps elsewhere, and the transfer of its gradient."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from torchweld.errors import ArgumentError
from torchweld.ops.optimizer.batch import is_foreign_to_kernels
from torchweld.optim._shards import is_one, local

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Stamp:
    """Tells whether an operation has written a tensor, or something has replaced its memory."""

    def __init__(self, t: torch.Tensor) -> None:
        self._found = _facts(t)
        # While it is known here, no other storage has this one's number.
        self._storage = StorageWeakRef(local(t).untyped_storage()) if self._found[2] else None

    def is_of(self, t: torch.Tensor) -> bool:
        """Whether nothing has changed since."""
        return self._found == _facts(t)


def _facts(t: torch.Tensor) -> tuple[int, int, int, int]:
    """Versions, address and storage.

    An operation on a DTensor moves its own version, and one on its part that of the part.
    """
    part = local(t)
    if part.layout is not torch.strided or is_foreign_to_kernels(part):
        return t._version, part._version, 0, 0
    return t._version, part._version, part.untyped_storage()._cdata, part.data_ptr()


def checksum(t: torch.Tensor) -> torch.Tensor:
    """The sum of the memory of a strided tensor, in integers that wrap around."""
    t = torch.view_as_real(t) if t.is_complex() else t
    if t.is_contiguous() and t.nbytes % 8 == 0 and t.data_ptr() % 8 == 0:
        return t.view(-1).view(torch.int64).sum()  # other integers are converted one by one
    return t.view(_INTEGERS[t.itemsize]).sum()


class Member:
    """A parameter of a bucket, and the state of its gradient."""

    def __init__(self, param: torch.Tensor) -> None:
        part = local(param.detach())
        if is_foreign_to_kernels(part) or part.layout is not torch.strided:
            came = f"a {type(part).__name__} of layout {part.layout}"
            raise ArgumentError("Offload", "a parameter", came, "a dense torch.Tensor or DTensor")
        self.param = param
        self.twin = param  # the one that steps
        self.landing = param  # receives the gradient
        self.expected = self.fired = 0  # how often a gradient accumulates before a step
        self.sent: TensorWeakRef | None = None
        self.sent_stamp: Stamp | None = None  # of the sent gradient
        self.sent_sum: torch.Tensor | None = None  # its checksum, if it is a DTensor
        self.reduced: torch.Tensor | None = None  # by DDP, which has not written it yet
        self.was_reduced = False  # when it was sent
        self.is_released = False  # whether the host has the only copy of the gradient
        self.stamp: Stamp | None = None  # of the parameter when last copied to its twin

    def forget(self) -> None:
        """Reset the gradient."""
        self.fired, self.sent, self.is_released = 0, None, False
        self.sent_sum = None
        if self.twin is not self.param:
            self.twin.grad = None

    def note_sent(self, grad: torch.Tensor) -> None:
        """Record the identity and the stamp of the gradient that the host has."""
        self.sent, self.sent_stamp = TensorWeakRef(grad), Stamp(grad)

    def sum_sent(self) -> None:
        """Record the checksum of a DTensor: torch's foreach operations move no counter of it.

        clip_grad_norm_ and clip_grad_value_ use them.
        """
        grad = self.param.grad
        if grad is not None and is_one(grad) and self.sent is not None:
            self.sent_sum = checksum(local(grad))

    def take_reduced(self) -> None:
        """Record the gradient that DDP has written as the one that was sent."""
        if self.reduced is not None and self.was_reduced and self.param.grad is not None:
            self.note_sent(self.param.grad)
        self.reduced, self.was_reduced = None, False

    def is_sent(self) -> bool:
        """Whether the host's gradient is up to date, or there is none and none was sent."""
        grad = self.param.grad
        if self.is_released:
            return grad is None
        if grad is None or self.sent is None or self.sent_stamp is None:
            return grad is None and self.sent is None
        return self.sent() is grad and self.sent_stamp.is_of(grad)

    def mark_copied(self) -> None:
        """Record that the twin has the parameter's current values."""
        self.stamp = Stamp(self.param)

    def is_changed(self) -> bool:
        """Whether something has written the parameter since it was copied to its twin."""
        return self.stamp is None or not self.stamp.is_of(self.param)
