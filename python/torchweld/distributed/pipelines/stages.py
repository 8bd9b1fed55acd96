"""Pipelines of torch.distributed.pipelining made from blocks, with stages of equal cost."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.distributed import pipelining
from torch.utils._pytree import tree_leaves, tree_map_only

from torchweld import checks
from torchweld.dispatch.autograd import split_backward
from torchweld.distributed.one_for_all import compute_once
from torchweld.distributed.pipelines.stepping import Stepping, find_ties
from torchweld.errors import ArgumentError
from torchweld.optim._shards import local_part

Name = Literal[
    "gpipe",
    "1f1b",
    "interleaved1f1b",
    "loopedbfs",
    "interleavedzerobubble",
    "zbvzerobubble",
    "dualpipev",
]
Costs = Sequence[float] | Callable[[torch.nn.Module], float]
_ONE_STAGE = ("gpipe", "1f1b")
_LOOPED = ("interleaved1f1b", "loopedbfs", "interleavedzerobubble")
# The second stages are in reverse order: the first rank has the first and the last stage.
_FOLDED = ("zbvzerobubble", "dualpipev")


@dataclass(frozen=True)
class Pipeline:
    """This rank's share of a pipeline.

    Attributes:
        schedule: torch's schedule; `schedule.step(...)` runs a batch forward and backward.
        parts: the modules of this rank's stages, for the optimizer.
        numbers: the numbers of this rank's stages.
        cuts: the blocks of every stage.
    """

    schedule: Any
    parts: torch.nn.ModuleList
    numbers: tuple[int, ...]
    cuts: tuple[range, ...]

    @property
    def is_first(self) -> bool:
        """Whether this rank passes inputs to `schedule.step`."""
        return 0 in self.numbers

    @property
    def is_last(self) -> bool:
        """Whether this rank passes targets to `schedule.step` and gets the losses."""
        return len(self.cuts) - 1 in self.numbers


def pipeline(
    blocks: Sequence[torch.nn.Module],
    schedule: Name,
    microbatches: int,
    loss_fn: Callable[..., torch.Tensor],
    example: tuple[Any, ...],
    *,
    costs: Costs | None = None,
    cuts: Sequence[range] | None = None,
    per_rank: int = 2,
    wrap: Callable[[torch.nn.Module], torch.nn.Module] = lambda part: part,
    group: dist.ProcessGroup | None = None,
    **settings: Any,
) -> Pipeline:
    """Divide a model among the ranks of a group, and make torch's schedule for it.

    Args:
        blocks: the model, from embedding to head. Each block takes the result of the previous one,
            a tuple as several arguments. Fuse the model first.
        schedule: "gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble",
            "zbvzerobubble" or "dualpipev".
        microbatches: the number of microbatches in a batch.
        loss_fn: computes the loss from a microbatch's results and targets.
        example: the first block's arguments for one microbatch.
        costs: the cost of each block, or a function that returns them; None: the first rank
            measures a forward and a backward pass of each block on the example.
        cuts: the blocks of each stage, such as `plan_for(...).cuts`; None: balanced by costs.
        per_rank: stages per rank, for schedules with several stages per rank; 2 in
            "zbvzerobubble" and "dualpipev".
        wrap: a wrapper that is applied to each stage's module, such as FSDP2 or a checkpoint.
        group: the processes; None: all.
        settings: further arguments of the schedule, such as `scale_grads`.

    Returns:
        The Pipeline of this rank. Parameters of its parts are named as in
        torch.nn.Sequential(*blocks). A parameter that several blocks share, such as the weight of
        an embedding and a head, has the sum of its stages' gradients after each step.
    """
    checks.count("pipeline", "microbatches", microbatches, 1)
    checks.count("pipeline", "per_rank", per_rank, 1)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    count = ranks * _count_stages_per_rank(schedule, per_rank)
    if len(blocks) < count:
        actual, accepted = f"{len(blocks)} of them", f"at least one for each of {count} stages"
        raise ArgumentError("pipeline", "blocks", actual, accepted)
    if cuts is not None:
        _check_cuts(cuts, len(blocks), count)
        costs = [1.0] * len(blocks)
    block_costs, flow = _agree_on_costs(blocks, example, costs, group)
    cuts = balance(block_costs, count) if cuts is None else tuple(cuts)
    numbers = assign_stages(schedule, rank, ranks, per_rank)
    ties = find_ties(blocks, cuts)
    parts = [wrap(_Stage({str(i): blocks[i] for i in cuts[number]})) for number in numbers]
    device = _find_device(parts[0], example)
    stages = [
        # Pass inputs and outputs: torch would find them by running a step with all side effects.
        ScaledStage(
            part,
            number,
            count,
            device,
            input_args=flow[cuts[number].start],
            output_args=flow[cuts[number].stop],
            group=group,
        )
        for part, number in zip(parts, numbers, strict=True)
    ]
    kind = pipelining.schedules.get_schedule_class(schedule)
    torch_schedule = kind(
        stages[0] if schedule in _ONE_STAGE else stages,
        microbatches,
        loss_fn=loss_fn,
        **settings,
    )
    stepping = Stepping(torch_schedule.step, example, microbatches, group, device, parts)
    owners = {
        at: rank for rank in range(ranks) for at in assign_stages(schedule, rank, ranks, per_rank)
    }
    stepping.share(ties, dict(zip(numbers, parts, strict=True)), [owners[i] for i in range(count)])
    torch_schedule.step = stepping.step
    return Pipeline(torch_schedule, torch.nn.ModuleList(parts), numbers, cuts)


def _check_cuts(cuts: Sequence[range], blocks: int, count: int) -> None:
    """Check that cuts divide all blocks, in order, among this many stages."""
    if [*itertools.chain(*cuts)] != [*range(blocks)] or len(cuts) != count or not all(cuts):
        accepted = f"{count} ranges, one after another, of {blocks} blocks"
        raise ArgumentError("pipeline", "cuts", f"{[*cuts]}", accepted)


def assign_stages(schedule: Name, rank: int, ranks: int, per_rank: int = 2) -> tuple[int, ...]:
    """Return the numbers of a rank's stages, in ascending order."""
    each = _count_stages_per_rank(schedule, per_rank)
    if schedule in _FOLDED:
        return rank, 2 * ranks - 1 - rank
    return tuple(rank + turn * ranks for turn in range(each))


def _count_stages_per_rank(schedule: str, per_rank: int) -> int:
    if schedule in _ONE_STAGE:
        return 1
    if schedule in _LOOPED:
        return per_rank
    if schedule not in _FOLDED:
        accepted = ", ".join((*_ONE_STAGE, *_LOOPED, *_FOLDED))
        raise ArgumentError("pipeline", "schedule", repr(schedule), f"one of {accepted}")
    if per_rank != 2:
        raise ArgumentError("pipeline", "per_rank", str(per_rank), f"2 in {schedule}")
    return 2


class ScaledStage(pipelining.PipelineStage):
    """torch's stage, whose results may be views, and whose gradients DTensors of parts.

    torch < 2.12 cannot divide such a DTensor in place; each device can divide its own part.

    Zero bubble adds a microbatch's gradients in the order of a set. Where adding two DTensors sums
    over devices, as for norms on a sharded sequence, that order must be the same on all of them:
    else one device's weight is summed with another's bias, of the same shape.
    """

    def __init__(self, submodule: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(submodule, *args, **kwargs)
        submodule.register_forward_hook(
            lambda _, __, result: tree_map_only(torch.Tensor, _replace_view, result)
        )

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a backward pass or a part of it.

        A pass of inputs leaves gradients over for the pass of weights that continues it. That one
        adds them in the stage's order.
        """
        if backward_type == "weight":
            weights = [p for p in self.submod.parameters() if p.requires_grad]
            place_of = {get_gradient_edge(p).node: place for place, p in enumerate(weights)}
            for group in bwd_kwargs["param_groups"]:
                group["params"] = sorted(group["params"], key=place_of.__getitem__)
        parts: dict[str, Any] = {"input": "inputs", "weight": "weights"}
        part = parts.get(backward_type)
        with split_backward(part) if part else nullcontext():
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *args, **kwargs)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients, as the schedule asks after its last microbatch."""
        if grad_scale_factor == 1:
            return
        for p in self.submod.parameters():
            if p.grad is not None:
                local_part(p.grad).div_(grad_scale_factor)


class _Stage(torch.nn.ModuleDict):
    """Consecutive blocks, named by their numbers in the whole model."""

    def forward(self, *args: Any) -> Any:
        for block in self.values():
            result = block(*args)
            args = result if isinstance(result, tuple) else (result,)
        return result


def _replace_view(x: torch.Tensor) -> torch.Tensor:
    return _ReplaceView.apply(x) if x._is_view() else x  # type: ignore[no-any-return]


class _ReplaceView(torch.autograd.Function):
    """Return the same values in a tensor that is not a view.

    torch detaches outputs in place when it splits backward passes. Without this function a stage
    that ends in a linear layer fails under zero bubble, as this code does:

        stage = PipelineStage(torch.nn.Linear(8, 8), rank, 2, device)  # of [rows, length, 8]
        ScheduleInterleavedZeroBubble([stage], 2, loss_fn).step(x)

    "Can't detach views in-place": `stage_backward_input` calls `detach_` on the stage's output.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


def _find_device(part: torch.nn.Module, example: tuple[Any, ...]) -> torch.device:
    tensors = itertools.chain(part.parameters(), part.buffers(), tree_leaves(example))
    return next(t.device for t in tensors if isinstance(t, torch.Tensor))


def layer_cuts(
    model: torch.nn.Module,
    layers: str,
    count: int,
    example: tuple[Any, ...],
    *,
    costs: Costs | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[range, ...]:
    """Choose the layers of each stage, for a model that is no list of blocks but can skip layers.

    Args:
        layers: the name of the list of layers. The cost of modules before it counts for the first
            stage, and the cost of modules after it for the last.
        count: the number of stages.
        example: the model's arguments.
        costs: the cost of each layer, or a function that returns them; None: measured by the first
            rank.
        group: the processes; None: all processes, if torch.distributed is initialised.
    """
    checks.count("layer_cuts", "count", count, 1)
    blocks = [*model.get_submodule(layers).children()]
    if len(blocks) < count:
        actual, accepted = f"{len(blocks)} of them", f"at least one for each of {count} stages"
        raise ArgumentError("layer_cuts", "layers", actual, accepted)
    block_costs = compute_once(
        "layer_cuts",
        lambda: _evaluate_costs(costs, blocks) or _measure_inside(model, blocks, example),
        group,
    )
    return balance(block_costs, count)


# --- Costs ----------------------------------------------------------------------------------------


def balance(costs: Sequence[float], count: int) -> tuple[range, ...]:
    """Divide a list of blocks into stages so that the costliest one is as cheap as possible.

    Of equal divisions the least sum of squared costs wins, which evens out the other stages.
    """
    cuts = divide(costs, count)
    assert cuts is not None
    total = [0.0, *itertools.accumulate(costs)]
    worst = max(total[cut.stop] - total[cut.start] for cut in cuts)
    even = divide(costs, count, lambda sum, cost: sum + cost**2 if cost <= worst else math.inf)
    assert even is not None
    return even


def divide(
    costs: Sequence[float],
    count: int,
    add: Callable[[float, float], float] = max,
    fits: Callable[[int, int, int], bool] = lambda *_: True,
) -> tuple[range, ...] | None:
    """Divide a list into ranges with the least value that `add` accumulates over their sums.

    By default that is the largest sum. `fits` takes the begin, the end and the number of a range.
    If it refuses a range, it also refuses every range that contains it. None: nothing fits.
    """
    sums, n = [0.0, *itertools.accumulate(costs)], len(costs)
    # Maps a number of blocks to their best division into the ranges so far.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for stage in range(count):
        better: dict[int, tuple[float, tuple[int, ...]]] = {}
        for begin, (value, ends) in best.items():
            # Leave a block for each later range.
            last = [n] if stage == count - 1 else range(begin + 1, n - (count - 1 - stage) + 1)
            for end in last:
                new = add(value, sums[end] - sums[begin])
                if end in better and better[end][0] <= new:
                    continue
                if not fits(begin, end, stage):
                    break
                better[end] = (new, (*ends, end))
        best = better
    return tuple(itertools.starmap(range, itertools.pairwise(best[n][1]))) if n in best else None


def _measure_chain(
    blocks: Sequence[torch.nn.Module], example: tuple[Any, ...], runs: int
) -> tuple[list[float], list[tuple[Any, ...]]]:
    """Measure the seconds of each block, and describe the values between blocks by meta tensors.

    The first run is a warm-up if there are several.
    """
    args, block_costs, flow = example, [], [_describe(example)]
    for block in blocks:
        seconds, result = _time_block(block, runs, args, {})
        block_costs.append(seconds)
        args = result if isinstance(result, tuple) else (result,)
        flow.append(_describe(args, requires_grad=True))
    return block_costs, flow


def _describe(args: tuple[Any, ...], requires_grad: bool = False) -> tuple[Any, ...]:
    """Describe a stage's arguments by meta tensors."""

    def to_meta(t: torch.Tensor) -> torch.Tensor:
        wanted = requires_grad and t.is_floating_point()
        return torch.empty_like(t, device="meta").requires_grad_(wanted)

    return tree_map_only(torch.Tensor, to_meta, args)


def _measure_inside(
    model: torch.nn.Module, blocks: Sequence[torch.nn.Module], example: tuple[Any, ...]
) -> list[float]:
    """Measure the seconds of each block with the arguments that the model passes to it.

    The first block's cost includes three times the forward time before it, and the last block's
    cost three times the forward time after it.
    """
    calls: list[Any] = []
    times: list[float] = []

    def note_call(_: Any, args: Any, kwargs: Any) -> None:
        calls.append(tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs)))
        times.append(time.perf_counter())

    hooks = [block.register_forward_pre_hook(note_call, with_kwargs=True) for block in blocks]
    ends = blocks[-1].register_forward_hook(lambda *_: times.append(time.perf_counter()))
    with torch.random.fork_rng(), torch.no_grad():
        start = time.perf_counter()
        model(*example)
        times.append(time.perf_counter())
    for hook in (*hooks, ends):
        hook.remove()
    block_costs = [
        _time_block(block, 4, *call)[0] for block, call in zip(blocks, calls, strict=True)
    ]
    block_costs[0] += 3 * (times[0] - start)
    block_costs[-1] += 3 * (times[-1] - times[-2])
    return block_costs


def _time_block(block: torch.nn.Module, runs: int, args: Any, kwargs: Any) -> tuple[float, Any]:
    """Return the median time of runs of a copy after a warm-up, and the result."""
    block = copy.deepcopy(block)
    seconds, result = [], None
    with torch.random.fork_rng(), torch.enable_grad():
        for _ in range(runs):
            begin = time.perf_counter()
            result = _run_forward_and_backward(block, args, kwargs)
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:] or seconds), result


def _run_forward_and_backward(block: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Run the block forward and backward, wait for the device, and return the result."""
    args, kwargs = tree_map_only(torch.Tensor, _make_leaf, (args, kwargs))
    result = block(*args, **kwargs)
    outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    for device in {t.device for t in outputs if t.is_cuda}:
        torch.cuda.synchronize(device)
    return tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def _make_leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().requires_grad_() if t.is_floating_point() else t


def _agree_on_costs(
    blocks: Sequence[torch.nn.Module],
    example: tuple[Any, ...],
    costs: Costs | None,
    group: dist.ProcessGroup | None,
) -> tuple[list[float], list[tuple[Any, ...]]]:
    """Return the costs of the blocks and the values between them, the same on every rank."""

    def measure() -> tuple[list[float], list[tuple[Any, ...]]]:
        measured, flow = _measure_chain(blocks, example, 4 if costs is None else 1)
        return _evaluate_costs(costs, blocks) or measured, flow

    block_costs, flow = compute_once("pipeline", measure, group)
    if len(block_costs) != len(blocks):
        actual, accepted = f"{len(block_costs)} of them", f"one for each of {len(blocks)} blocks"
        raise ArgumentError("pipeline", "costs", actual, accepted)
    return block_costs, flow


def _evaluate_costs(costs: Costs | None, blocks: Sequence[torch.nn.Module]) -> list[float]:
    """Return the declared costs, or an empty list if they must be measured."""
    if callable(costs):
        return [*map(costs, blocks)]
    return [] if costs is None else [*costs]
