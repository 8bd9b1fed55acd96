"""Learning rates for large batches: scaled with the batch size, with a warm-up and a decay.

The schedulers work like torch.optim.lr_scheduler's, with any optimizer. Call step() once per batch.
"""

from __future__ import annotations

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
        name, more = type(self).__name__, warmup_steps + 1

        def check(argument: str, value: object, fits: bool, accepted: str) -> None:
            checks.fits(name, argument, value, fits, accepted)

        check("batch_size", batch_size, batch_size > 0, "a number > 0")
        check("base_batch_size", base_batch_size, base_batch_size > 0, "a number > 0")
        check("warmup_steps", warmup_steps, warmup_steps >= 0, "an int >= 0")
        check("warmup_start", warmup_start, 0 <= warmup_start <= 1, "a number in [0, 1]")
        check("power", power, power >= 0, "a number >= 0")
        fits = total_steps is None or total_steps >= more
        check("total_steps", total_steps, fits, f"None or an int >= {more}")
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
