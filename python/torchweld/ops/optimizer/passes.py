"""A step is a list of passes over batches, with named exchanges between them.

A pass works on every batch that it concerns, and returns its local results: its parts. Devices then
exchange the parts of all batches at once, and the next pass uses the result. A rule lists its
passes. The optimizer knows the devices, and therefore how to make each exchange.

A new kind of exchange, such as copies to the host, is a name here and a function in
torchweld.optim._shards. That function takes the parts of all batches and replaces them by the
result, in place. An exchange that needs an optimizer's state is the optimizer's `_exchange`, like
the exchange of compressed momentum in torchweld.optim.one_bit.adam. A pass may only list its parts,
and the last pass may end in an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch

from torchweld.ops.optimizer.batch import Task


class Exchange(Enum):
    """How devices combine their parts; the values of sums and maxima are torch's ReduceOps."""

    SUM = "SUM"
    LARGEST = "MAX"
    # For whole tensors on every process, in optimizers that reduce gradients themselves.
    MEAN = "AVG"
    ONE_BIT_MEAN = "1 bit"
    # Whole matrices become nearly orthogonal ones; Muon's.
    ORTHOGONAL = "orthogonal"


class Part(NamedTuple):
    """Numbers computed over some dimensions of the local part of a parameter.

    Devices with other parts of these dimensions exchange them, in place.
    """

    here: torch.Tensor
    param: torch.Tensor
    dims: Sequence[int]


def over_all(here: torch.Tensor, param: torch.Tensor) -> Part:
    """Numbers over all dimensions of a parameter."""
    return Part(here, param, range(param.ndim))


def across_rows(here: torch.Tensor, param: torch.Tensor) -> Part:
    """Numbers for each row, the first dimension, over all other dimensions."""
    return Part(here, param, range(1, param.ndim))


@dataclass(frozen=True)
class Pass:
    """The work on each batch, and the exchange that follows."""

    act: Callable[[Task], Iterable[Part]]
    exchange: Exchange | None = None
    concerns: Callable[[Task], bool] = lambda _: True


def run(
    passes: Iterable[Pass],
    tasks: Sequence[Task],
    exchange: Callable[[Exchange, Iterable[Part]], None],
) -> None:
    """Run one pass after another, each over all tasks."""
    for each in passes:
        parts = [part for task in filter(each.concerns, tasks) for part in each.act(task)]
        if each.exchange is not None:
            exchange(each.exchange, parts)
