"""A pipeline's steps: batches that divide, and parameters that several stages have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from torchweld.distributed.norm import COPIES
from torchweld.errors import ArgumentError, CollectiveError

# For each parameter of several stages: the stages and its name in each.
Ties = list[dict[int, str]]


def ties_of(blocks: Sequence[torch.nn.Module], cuts: Sequence[range]) -> Ties:
    """The parameters that blocks of different stages share."""
    found: dict[int, dict[int, str]] = {}
    for number, cut in enumerate(cuts):
        for i in cut:
            for name, p in blocks[i].named_parameters(remove_duplicate=False):
                found.setdefault(id(p), {}).setdefault(number, f"{i}.{name}")
    return [tie for tie in found.values() if len(tie) > 1]


class Stepping:
    """The step of a schedule, which checks its batch first and sums shared gradients last.

    Args:
        step: the schedule's own.
        example: the first block's arguments, one microbatch of them.
        microbatches: how many a batch is divided into.
        group: the ranks of the pipeline.
        device: where they exchange tensors.
    """

    def __init__(
        self,
        step: Any,
        example: tuple[Any, ...],
        microbatches: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._step, self._microbatches = step, microbatches
        self._group, self._device = group, device
        sizes = [x.shape[0] for x in tree_leaves(example) if isinstance(x, torch.Tensor) and x.ndim]
        self._rows = sizes[0] * microbatches if sizes else None
        self._shared: list[tuple[list[torch.nn.Parameter], dist.ProcessGroup | None]] = []

    def share(self, ties: Ties, parts: dict[int, torch.nn.Module], owners: Sequence[int]) -> None:
        """Sum the gradients of these parameters from now on.

        `parts` are this rank's stages, `owners` the rank of each stage.
        """
        groups: dict[tuple[int, ...], Any] = {}
        whole: Any = self._group or dist.group.WORLD
        rank = dist.get_rank(self._group)
        for tie in ties:
            ranks = tuple(sorted({owners[number] for number in tie}))
            if rank not in ranks:
                continue
            if len(ranks) == dist.get_world_size(self._group):
                groups[ranks] = whole
            if ranks not in groups and len(ranks) > 1:
                places = [dist.get_global_rank(whole, r) for r in ranks]
                groups[ranks] = dist.new_group(places, use_local_synchronization=True)
            mine = [
                _parameter(parts[number], name) for number, name in tie.items() if number in parts
            ]
            mine = [*dict.fromkeys(mine)]
            copies = torch.tensor(len(mine), device=self._device)
            if len(ranks) > 1:
                dist.all_reduce(copies, group=groups[ranks])
            for p in mine:
                setattr(p, COPIES, int(copies))
            self._shared.append((mine, groups.get(ranks)))

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Run a batch forward and backward, as the schedule does."""
        self._check(args, target)
        before = [[p.grad for p in some] for some, _ in self._shared]
        for some, _ in self._shared:
            for p in some:
                p.grad = None
        result = self._step(*args, target=target, **kwargs)
        for (some, group), grads in zip(self._shared, before, strict=True):
            self._sum(some, group, grads)
        return result

    def _check(self, args: tuple[Any, ...], target: Any) -> None:
        """Raise an error on every rank if a rank's batch has another size than was said."""
        sizes = [x.shape[0] for x in tree_leaves((args, target)) if _has_rows(x)]
        is_wrong = any(
            size % self._microbatches or self._rows not in (None, size) for size in sizes
        )
        wrong = torch.tensor(int(is_wrong), device=self._device)
        dist.all_reduce(wrong, group=self._group)
        if is_wrong:
            rows = "any number" if self._rows is None else str(self._rows // self._microbatches)
            accepted = f"{self._microbatches} microbatches of {rows}"
            raise ArgumentError("pipeline", "a batch", f"of {sizes} rows", accepted)
        if wrong:
            raise CollectiveError(
                "pipeline", "another rank's batch does not divide into the microbatches"
            )

    @torch.no_grad()
    def _sum(self, some: list[Any], group: Any, before: list[Any]) -> None:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in some]
        total = grads[0]
        for grad in grads[1:]:
            total = total + grad
        if group is not None:
            dist.all_reduce(total.to_local() if isinstance(total, DTensor) else total, group=group)
        for p, earlier in zip(some, before, strict=True):
            p.grad = total.clone() if earlier is None else earlier + total


def _has_rows(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 0


def _parameter(part: torch.nn.Module, name: str) -> torch.nn.Parameter:
    found = dict(part.named_parameters(remove_duplicate=False))
    if name not in found:
        accepted = "a wrapper that keeps the names of parameters that several stages share"
        raise ArgumentError("pipeline", "wrap", f"one that renames {name}", accepted)
    return found[name]
