"""Learning rates for large batches: scaled with the batch size, with a warm-up and a decay.

The schedulers work like torch.optim.lr_scheduler's, with any optimizer. Call step() once per batch.
"""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchweld import checks


class _Scaled(LRScheduler):
    exponent: float  # of the batch size

    def __init__(
        self,
        optimizer: Optimizer,
        batch_size: int,
        base_batch_size: int,
        *,
        warmup_steps: int = 0,
        total_steps: int | None = None,
        power: float = 1.0,
        warmup_start: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        name = type(self).__name__
        for argument, size in (("batch_size", batch_size), ("base_batch_size", base_batch_size)):
            accepted = "a finite number > 0"
            checks.number(name, argument, size, lambda v: 0 < v < math.inf, accepted)
        checks.count(name, "warmup_steps", warmup_steps)
        accepted = "a number in [0, 1]"
        checks.number(name, "warmup_start", warmup_start, lambda v: 0 <= v <= 1, accepted)
        checks.number(name, "power", power, lambda v: 0 <= v < math.inf, "a finite number >= 0")
        if total_steps is not None:
            checks.count(name, "total_steps", total_steps, warmup_steps + 1)
        checks.count(name, "last_epoch", last_epoch, -1)
        self.scale = (batch_size / base_batch_size) ** self.exponent
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.power = power
        self.warmup_start = warmup_start
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """Each group's initial rate times the factor of this step."""
        return [lr * self._factor(self.last_epoch) for lr in self.base_lrs]

    def _factor(self, step: int) -> float:
        if step < self.warmup_steps:
            share = step / self.warmup_steps
            return self.scale * (self.warmup_start + (1 - self.warmup_start) * share)
        if self.total_steps is None:
            return self.scale
        left = (self.total_steps - step) / (self.total_steps - self.warmup_steps)
        return self.scale * max(left, 0.0) ** self.power


class LinearScaling(_Scaled):
    """A learning rate in proportion to the batch size (Goyal et al. 2017), as for SGD and LARS.

    Args:
        optimizer: an optimizer whose learning rates are meant for base_batch_size.
        batch_size: the batch size over all devices and accumulated steps.
        base_batch_size: the batch size that the learning rates are meant for.
        warmup_steps: steps of a linear rise from warmup_start times the scaled rate.
        total_steps: the step at which the rate reaches 0, after a polynomial decay from the end of
            the warm-up. None: no decay.
        power: exponent of the decay: 1 is linear, as for BERT with LAMB; 2 is quadratic, as for
            ResNet-50 with LARS.
        last_epoch: the number of steps taken before, as in torch's schedulers.
    """

    exponent = 1.0


class SqrtScaling(_Scaled):
    """A learning rate in proportion to the batch size's square root (You et al. 2020), as for LAMB.

    Takes LinearScaling's arguments.
    """

    exponent = 0.5
