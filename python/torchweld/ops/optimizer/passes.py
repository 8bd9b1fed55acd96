"""A step is a list of passes over batches, with named exchanges between them.

A pass does one thing to every batch that it concerns, and returns what it found of the parts of
tensors that are here. Devices then exchange the parts of all batches at once, and the next pass
goes by what became of them. A rule lists its passes. The optimizer knows the devices, and so how
each exchange is made.

A new kind of exchange, such as copies to the host, is a name here and a function in
torchweld.optim._exchanges. That function takes the parts of all batches and leaves in them what
becomes of them. An exchange that needs what an optimizer keeps is its `_exchange`, as that of
compressed momentum in torchweld.optim._one_bit. A pass may do nothing but list its parts, and the
last pass may end in an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from torchweld.ops.optimizer.batch import Task


class Exchange(Enum):
    """What devices make of their parts; the values of sums and maxima are torch's ReduceOps."""

    SUM = "SUM"
    LARGEST = "MAX"
    # Of whole tensors that every process has, by optimizers that reduce gradients themselves.
    MEAN = "AVG"
    ONE_BIT_MEAN = "1 bit"


class Part(NamedTuple):
    """Numbers found over some dimensions of this device's part of a parameter.

    Devices that have other parts of these dimensions exchange them, in place.
    """

    here: torch.Tensor
    param: torch.Tensor
    dims: Sequence[int]


def over_all(here: torch.Tensor, param: torch.Tensor) -> Part:
    """Numbers over all dimensions of a parameter."""
    return Part(here, param, range(param.ndim))


def across_rows(here: torch.Tensor, param: torch.Tensor) -> Part:
    """Numbers for each row, which its first dimension counts, over what the row has."""
    return Part(here, param, range(1, param.ndim))


@dataclass(frozen=True)
class Pass:
    """What is done to each batch, and what is then exchanged of it."""

    act: Callable[[Task], Iterable[Part]]
    exchange: Exchange | None = None
    concerns: Callable[[Task], bool] = lambda _: True


def run(
    passes: Iterable[Pass],
    tasks: Sequence[Task],
    exchange: Callable[[Exchange, Iterable[Part]], None],
) -> None:
    """One pass after another, each over all tasks."""
    for each in passes:
        concerned = [task for task in tasks if each.concerns(task)]
        parts = [part for task in concerned for part in each.act(task)]
        if each.exchange is not None:
            exchange(each.exchange, parts)
