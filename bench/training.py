"""Whole training steps: models that learn the same batches, timed in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from torchweld.bench.memory import peak_bytes

# The loss of a model on the batch of a step.
Loss = Callable[[nn.Module, int], torch.Tensor]
PHASES = ("forward", "backward", "step")


class Step(NamedTuple):
    """Milliseconds of the phases of a training step."""

    forward: float
    backward: float
    step: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.step


@dataclass
class Learner:
    """A model, its optimizer, and what it has learnt so far."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    autocast: torch.dtype | None = None
    losses: list[float] = field(default_factory=list)

    @property
    def device(self) -> str:
        return next(self.model.parameters()).device.type

    def learn(self) -> Step:
        """Take the next step, and time its phases."""
        self.optimizer.zero_grad()
        start = self._now()
        with self._precision():
            loss = self.loss(self.model, len(self.losses))
        forward = self._now()
        loss.backward()
        backward = self._now()
        self.optimizer.step()
        done = self._now()
        self.losses.append(loss.item())
        seconds = (forward - start, backward - forward, done - backward)
        return Step(*[1e3 * phase for phase in seconds])

    def peak_bytes(self) -> int:
        """The most that a step holds beyond parameters, gradients and states."""
        self.optimizer.zero_grad(set_to_none=False)
        return peak_bytes(self.learn, self.device)

    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's tensors."""
        states = [v for state in self.optimizer.state.values() for v in state.values()]
        tensors = [v for v in states if isinstance(v, torch.Tensor)]
        return sum(t.numel() * t.itemsize for t in tensors)

    def _precision(self) -> AbstractContextManager[object]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device, self.autocast)

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def take_turns(
    learners: Sequence[Learner], *, seconds: float, at_least: int, at_most: int
) -> list[list[Step]]:
    """The steps of every learner, in rounds, so that drift of the machine affects all alike."""
    taken: list[list[Step]] = [[] for _ in learners]
    start = time.monotonic()
    for turn in range(at_most):
        if turn >= at_least and time.monotonic() - start > seconds:
            break
        for offset in range(len(learners)):
            at = (turn + offset) % len(learners)  # no learner always follows the same one
            taken[at].append(learners[at].learn())
    return taken


def median(steps: Sequence[Step]) -> Step:
    """The step whose total is the median."""
    return sorted(steps, key=lambda step: step.total)[len(steps) // 2]
