"""A parameter that steps elsewhere, and the transfer of its gradient."""

from __future__ import annotations

import torch
from torch.utils.weak import TensorWeakRef

from torchweld.errors import ArgumentError
from torchweld.ops.optimizer.batch import is_foreign_to_kernels
from torchweld.optim._shards import local


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
        self.version = 0  # of the sent gradient
        self.reduced: torch.Tensor | None = None  # by DDP, which has not written it yet
        self.was_reduced = False  # when it was sent
        self.is_released = False  # whether the host has the only copy of the gradient
        self.stamp: tuple[int, int] = (0, 0)  # of the parameter when last copied to its twin

    def forget(self) -> None:
        """Reset the gradient."""
        self.fired, self.sent, self.is_released = 0, None, False
        if self.twin is not self.param:
            self.twin.grad = None

    def note_sent(self, grad: torch.Tensor) -> None:
        """Record identity and version of the gradient that the host has."""
        self.sent, self.version = TensorWeakRef(grad), local(grad)._version

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
        if grad is None or self.sent is None:
            return grad is None and self.sent is None
        return self.sent() is grad and local(grad)._version == self.version

    def stamp_now(self) -> tuple[int, int]:
        """Changes when anything writes the parameter or replaces its memory."""
        part = local(self.param.detach())
        return part.data_ptr(), part._version
