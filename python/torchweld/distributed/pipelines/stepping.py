"""The step of a pipeline: it checks the batch and sums gradients of shared parameters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from torchweld.distributed.data.grad_norm import COPIES
from torchweld.distributed.tensor.sums import find_sums
from torchweld.errors import ArgumentError, CollectiveError
from torchweld.optim._shards import local_part

# For each parameter that several stages share: the stages and its name in each.
Ties = list[dict[int, str]]


def find_ties(blocks: Sequence[torch.nn.Module], cuts: Sequence[range]) -> Ties:
    """Find the parameters that blocks of different stages share."""
    names_by_parameter: dict[int, dict[int, str]] = {}
    for number, cut in enumerate(cuts):
        for i in cut:
            for name, p in blocks[i].named_parameters(remove_duplicate=False):
                names_by_parameter.setdefault(id(p), {}).setdefault(number, f"{i}.{name}")
    return [tie for tie in names_by_parameter.values() if len(tie) > 1]


class Stepping:
    """Wraps a schedule's step: checks the batch before it and sums shared gradients after it.

    Args:
        step: the schedule's own step.
        example: the first block's arguments for one microbatch.
        microbatches: the number of microbatches in a batch.
        group: the ranks of the pipeline.
        device: the device of the tensors that ranks exchange.
        parts: this rank's stages.
    """

    def __init__(
        self,
        step: Any,
        example: tuple[Any, ...],
        microbatches: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
        parts: Sequence[torch.nn.Module],
    ) -> None:
        self._step, self._microbatches = step, microbatches
        self._group, self._device = group, device
        sizes = [x.shape[0] for x in tree_leaves(example) if isinstance(x, torch.Tensor) and x.ndim]
        self._rows = sizes[0] * microbatches if sizes else None
        self._sums = find_sums(p for part in parts for p in part.parameters())
        self._shared: list[tuple[list[torch.nn.Parameter], dist.ProcessGroup | None]] = []

    def share(self, ties: Ties, parts: dict[int, torch.nn.Module], owners: Sequence[int]) -> None:
        """Sum the gradients of these shared parameters from now on.

        `parts` are this rank's stages by number, and `owners` has the rank of each stage.
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
                _get_parameter(parts[number], name)
                for number, name in tie.items()
                if number in parts
            ]
            mine = [*dict.fromkeys(mine)]
            copies = torch.tensor(len(mine), device=self._device)
            if len(ranks) > 1:
                _check_alike(tie, mine, groups[ranks])
                dist.all_reduce(copies, group=groups[ranks])
            for p in mine:
                setattr(p, COPIES, int(copies))
            self._shared.append((mine, groups.get(ranks)))

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Run the forward and backward passes of a batch, as the schedule does."""
        self._check(args, target)
        before = [[p.grad for p in copies] for copies, _ in self._shared]
        for copies, _ in self._shared:
            for p in copies:
                p.grad = None
        with ExitStack() as stack:
            for sums in self._sums:
                stack.enter_context(sums.postpone())
            result = self._step(*args, target=target, **kwargs)
        for sums in self._sums:
            sums.finish()
        for (copies, group), grads in zip(self._shared, before, strict=True):
            self._sum(copies, group, grads)
        return result

    def _check(self, args: tuple[Any, ...], target: Any) -> None:
        """Raise an error on every rank if a rank's batch does not have the declared size."""
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
    def _sum(self, copies: list[Any], group: Any, before: list[Any]) -> None:
        # In the parameter's dtype, which all ranks share; a gradient may have another one.
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.to(p.dtype) for p in copies]
        total = grads[0]
        for grad in grads[1:]:
            total = total + grad
        if group is not None:
            dist.all_reduce(local_part(total), group=group)
        for p, earlier in zip(copies, before, strict=True):
            p.grad = total.clone() if earlier is None else earlier + total


def _check_alike(tie: dict[int, str], copies: Sequence[Any], group: Any) -> None:
    """Check that `wrap` left all copies of a shared parameter with one dtype and size."""
    mine = [(str(p.dtype), [*local_part(p).shape]) for p in copies]
    of_all: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_all, mine, group=group)
    kinds = {f"{dtype} {shape}": None for each in of_all for dtype, shape in each}
    if len(kinds) > 1:
        accepted = "a wrapper that gives all stages of a shared parameter one dtype and placement"
        actual = f"one after which {' and '.join(tie.values())} are {' and '.join(kinds)}"
        raise ArgumentError("pipeline", "wrap", actual, accepted)


def _has_rows(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 0


def _get_parameter(part: torch.nn.Module, name: str) -> torch.nn.Parameter:
    parameters = dict(part.named_parameters(remove_duplicate=False))
    if name not in parameters:
        accepted = "a wrapper that keeps the names of parameters that several stages share"
        raise ArgumentError("pipeline", "wrap", f"one that renames {name}", accepted)
    return parameters[name]
