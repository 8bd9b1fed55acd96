"""Times whole training steps: models that learn the same batches take turns."""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from torchweld.bench.measure.memory import peak_bytes
from torchweld.table import Table, progress


def compiled(model: nn.Module, backend: str = "inductor") -> nn.Module:
    """torch.compile's module; torch annotates it only as a callable."""
    made = torch.compile(model, backend=backend)
    assert isinstance(made, nn.Module)
    return made


# The loss of a model on the batch of a given step.
Loss = Callable[[nn.Module, int], torch.Tensor]


class StepTimes(NamedTuple):
    """Milliseconds of the phases of a training step."""

    forward: float
    backward: float
    step: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.step


@dataclass
class Learner:
    """A model, its optimizer and its losses so far."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss
    autocast: torch.dtype | None = None
    losses: list[float] = field(default_factory=list)

    @property
    def device(self) -> str:
        return next(self.model.parameters()).device.type

    def learn(self) -> StepTimes:
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
        return StepTimes(*[1e3 * phase for phase in seconds])

    def peak_bytes(self) -> int | None:
        """The most that a step holds beyond parameters, gradients and states.

        On the CPU the memory of a compiled step cannot be counted: torch's ops do not allocate it.
        """
        if self.device != "cuda" and hasattr(self.model, "_orig_mod"):
            return None
        self.optimizer.zero_grad(set_to_none=False)
        return peak_bytes(self.learn, self.device)

    def optimizer_bytes(self) -> int:
        """The bytes of the optimizer's tensors."""
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
    learners: Sequence[Learner], *, until: float, at_least: int = 3, at_most: int = 50
) -> list[list[StepTimes]]:
    """Run every learner's steps in rounds, so that drift of the machine affects all alike.

    The last round ends before `until`, as time.monotonic() counts, with time for one more.
    """
    taken: list[list[StepTimes]] = [[] for _ in learners]
    longest = 0.0
    for turn in range(at_most):
        start = time.monotonic()
        if turn >= at_least and start + 2 * longest > until:
            break
        for offset in range(len(learners)):
            at = (turn + offset) % len(learners)  # no learner always follows the same one
            taken[at].append(learners[at].learn())
        longest = max(longest, time.monotonic() - start)
    return taken


def measure(
    learners: Sequence[Learner], *, seconds: float, at_least: int = 3, at_most: int = 50
) -> list[dict[str, Any]]:
    """Warm up, take turns, and return a row per learner. The first learner is the unit.

    Each learner has about this many seconds, for its steps and two others.
    """
    until = time.monotonic() + seconds * len(learners)
    for at in progress([f"{learner.name}: warming up" for learner in learners]):
        learners[at].learn()
    steps = take_turns(learners, until=until, at_least=at_least, at_most=at_most)
    rows: list[dict[str, Any]] = []
    for learner, taken in zip(learners, steps, strict=True):
        middle = sorted(taken, key=lambda step: step.total)[len(taken) // 2]
        row: dict[str, Any] = {"contender": learner.name, **middle._asdict(), "total": middle.total}
        row["speed_up"] = rows[0]["total"] / middle.total if rows else 1.0
        row["peak_bytes"] = learner.peak_bytes()
        row["optimizer_bytes"] = learner.optimizer_bytes()
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]], **more: Callable[[dict[str, Any]], str]) -> Table:
    """The rows as a table for the terminal, with additional columns if given."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "forward": lambda row: f"{row['forward']:.1f}",
        "backward": lambda row: f"{row['backward']:.1f}",
        "optimizer": lambda row: f"{row['step']:.1f}",
        "step ms": lambda row: f"{row['total']:.1f}",
        "x": lambda row: f"{row['speed_up']:.2f}",
        "peak MB": lambda row: _megabytes(row["peak_bytes"]),
        "optimizer MB": lambda row: _megabytes(row["optimizer_bytes"]),
    }
    columns |= more
    table = Table(["", *columns], numbers_from=1)
    for row in rows:
        style = "dim" if row is rows[0] else ""
        table.add(row["contender"], *[column(row) for column in columns.values()], style=style)
    return table


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:.1f}"


def read_text() -> torch.Tensor:
    """A few megabytes of text that every Python installation has."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [library / "pydoc_data" / "topics.py", *sorted(library.glob("*.py"))]
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
