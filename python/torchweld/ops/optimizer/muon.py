"""The two steps of Muon: the momentum, and then the parameter.

Between them each direction is orthogonalised as a whole matrix, wherever its parts are. That is an
exchange, which the optimizer makes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from torchweld.ops.optimizer.batch import Batch, Task, Tensors
from torchweld.ops.optimizer.cautious import agree, oppose
from torchweld.ops.optimizer.passes import Exchange, Part, Pass, over_all
from torchweld.ops.optimizer.rule import Rule


class MuonSettings(NamedTuple):
    """As csrc/core/muon.h has them."""

    momentum: float
    weight_decay: float
    nesterov: bool
    cautious_decay: bool = False  # decay only where the step does not oppose the parameter


def _update(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: Tensors,
    t: torch.Tensor,
    lr: torch.Tensor,
    s: MuonSettings,
) -> tuple[torch.Tensor, Tensors]:
    if not moments:
        decayed = p * (1 - lr * s.weight_decay).to(p.dtype)
        p = torch.where(oppose(g, p), p, decayed) if s.cautious_decay else decayed
        return p - g * lr.to(p.dtype), []
    momentum = moments[0] + (g - moments[0]) * (1 - s.momentum)
    return g + (momentum - g) * s.momentum if s.nesterov else momentum, [momentum]


class _MuonRule(Rule):
    """A step in two halves: `handed_on` is the task of the first one.

    The first half takes buffers for parameters and overwrites them with directions. The second one
    takes the orthogonalised directions for gradients, and has no moments.
    """

    def _passes(self) -> tuple[Pass, ...]:
        self._absmaxes_op = self._define("_absmaxes", ["new_absmaxes"])
        return (
            Pass(self._find_new_absmaxes, Exchange.LARGEST, lambda task: bool(task.batch.splits)),
            Pass(self._find_directions, Exchange.ORTHOGONAL),
            Pass(self._mask, Exchange.SUM, _is_cautious),
            Pass(self._move),
        )

    def _find_new_absmaxes(self, task: Task) -> Iterable[Part]:
        task.handed_on = _begin(task)
        return self._find_absmaxes(task.handed_on)

    def _find_directions(self, task: Task) -> Iterable[Part]:
        first = task.handed_on = task.handed_on or _begin(task)
        self._step(first)
        return map(over_all, _directions(first.batch), task.batch.wholes)

    def _mask(self, task: Task) -> Iterable[Part]:
        """Leave only what agrees with the gradient, and count it."""
        batch = task.batch
        counts = []
        for u, g in zip(_directions(task.handed_on.batch), batch.grads, strict=True):
            agreed = agree(u, g) if task.grad_factor is None else agree(u, g * task.grad_factor)
            u.masked_fill_(~agreed, 0)
            counts.append(agreed.sum(dtype=torch.float64))
        task.sums = torch.stack(counts).view(-1, 1)
        return map(over_all, task.sums, batch.wholes) if batch.is_sharded else ()

    def _move(self, task: Task) -> Iterable[Part]:
        batch, first = task.batch, task.handed_on.batch
        if task.sums is not None:
            assert task.ratios_of is not None
            roots = task.sums[:, 0].sqrt()
            ratios = task.ratios_of(roots, roots)
            for u, ratio in zip(_directions(first), ratios, strict=True):
                u.mul_(ratio.to(u.dtype))
        if first.masters:
            torch._foreach_copy_(first.params, first.masters)
        moved = Batch(
            params=batch.params,
            grads=first.params,
            masters=batch.masters,
            steps=batch.steps,
            rounding_offsets=batch.rounding_offsets,
            companions=batch.companions,
            wholes=batch.wholes,
        )
        self.step(replace(task, batch=moved, grad_factor=None, handed_on=None, sums=None))
        task.handed_on = task.sums = None
        return ()


def _begin(task: Task) -> Task:
    """The task of the first half, with buffers for the directions."""
    batch = task.batch
    # An element that 8-bit momentum skips keeps what the buffer has.
    make = torch.zeros_like if batch.absmaxes else torch.empty_like
    grads = [g.detach() for g in batch.grads]
    contiguous = torch.contiguous_format
    # Sixteen bits are too few for directions: their norms and sums are taken later.
    narrow = grads[0].dtype in (torch.bfloat16, torch.float16)
    wide = [make(g, dtype=torch.float32, memory_format=contiguous) for g in grads if narrow]
    count = torch.zeros((), dtype=torch.float32, device=grads[0].device)  # of no use here
    directions = Batch(
        params=[make(g, memory_format=contiguous) for g in grads],
        grads=batch.grads,
        masters=wide,
        moments=batch.moments,
        absmaxes=batch.absmaxes,
        new_absmaxes=batch.new_absmaxes,
        steps=[count] * len(grads),
        edges=batch.edges,
        splits=batch.splits,
        block_absmaxes=batch.block_absmaxes,
        wholes=batch.wholes,
        is_sharded=batch.is_sharded,
    )
    return replace(task, batch=directions, handed_on=None, average_rate=None)


def _is_cautious(task: Task) -> bool:
    return task.ratios_of is not None


def _directions(batch: Batch) -> Tensors:
    return batch.masters or batch.params


MUON = _MuonRule(
    "muon",
    MuonSettings,
    signed=(True,),
    update=_update,
)
