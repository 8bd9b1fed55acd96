"""Pipelines of torch.distributed.pipelining from blocks, divided into stages of equal cost."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.utils._pytree import tree_leaves, tree_map_only

from torchweld.distributed.stepping import Stepping, ties_of
from torchweld.errors import ArgumentError

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
# The order of second stages is reversed: the first rank has the first stage and the last.
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
        """Whether this rank gives `schedule.step` the inputs."""
        return 0 in self.numbers

    @property
    def is_last(self) -> bool:
        """Whether this rank gives `schedule.step` the targets, and gets the losses."""
        return len(self.cuts) - 1 in self.numbers


def pipeline(
    blocks: Sequence[torch.nn.Module],
    schedule: Name,
    microbatches: int,
    loss_fn: Callable[..., torch.Tensor],
    example: tuple[Any, ...],
    *,
    costs: Costs | None = None,
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
        microbatches: how many a batch is divided into.
        loss_fn: computes the loss from a microbatch's results and targets.
        example: the first block's arguments, one microbatch of them.
        costs: the cost of each block, or a function that returns them; None: the first rank
            measures a forward and a backward of each on the example.
        per_rank: stages per rank, for schedules with several; two in schedules that fold.
        wrap: a wrapper applied to a stage's module first, such as FSDP2 or a checkpoint.
        group: the processes; None: all.
        settings: further arguments of the schedule, such as `scale_grads`.

    Returns:
        The Pipeline of this rank. Parameters of its parts are named as in
        torch.nn.Sequential(*blocks). A parameter of several blocks, such as that of an embedding
        and a head, has the sum of its stages' gradients after each step.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    count = ranks * _stages_of_a_rank(schedule, per_rank)
    if len(blocks) < count:
        came, accepted = f"{len(blocks)} of them", f"at least one for each of {count} stages"
        raise ArgumentError("pipeline", "blocks", came, accepted)
    found, flow = _agreed(blocks, example, costs, rank, group)
    cuts = balanced(found, count)
    numbers = placement(schedule, rank, ranks, per_rank)
    ties = ties_of(blocks, cuts)
    parts = [wrap(_Part({str(i): blocks[i] for i in cuts[number]})) for number in numbers]
    device = _device(parts[0], example)
    stages = [
        # Pass inputs and outputs: torch would find them by a step with all side effects.
        pipelining.PipelineStage(
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
    made = kind(
        stages[0] if schedule in _ONE_STAGE else stages,
        microbatches,
        loss_fn=loss_fn,
        **settings,
    )
    stepping = Stepping(made.step, example, microbatches, group, device)
    placed = {
        at: rank for rank in range(ranks) for at in placement(schedule, rank, ranks, per_rank)
    }
    stepping.share(ties, dict(zip(numbers, parts, strict=True)), [placed[i] for i in range(count)])
    made.step = stepping.step
    return Pipeline(made, torch.nn.ModuleList(parts), numbers, cuts)


def placement(schedule: Name, rank: int, ranks: int, per_rank: int = 2) -> tuple[int, ...]:
    """The stages that a rank has, in rising order."""
    each = _stages_of_a_rank(schedule, per_rank)
    if schedule in _FOLDED:
        return rank, 2 * ranks - 1 - rank
    return tuple(rank + turn * ranks for turn in range(each))


def _stages_of_a_rank(schedule: str, per_rank: int) -> int:
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


class _Part(torch.nn.ModuleDict):
    """Consecutive blocks, named by their numbers in the whole model."""

    def forward(self, *given: Any) -> Any:
        for block in self.values():
            result = block(*given)
            given = result if isinstance(result, tuple) else (result,)
        return tree_map_only(torch.Tensor, _handed_over, result)


def _handed_over(x: torch.Tensor) -> torch.Tensor:
    return _HandedOver.apply(x) if x._is_view() else x  # type: ignore[no-any-return]


class _HandedOver(torch.autograd.Function):
    """The same values in a tensor that is no view: torch's split backwards detach in place.

    Without it a stage that ends in a linear layer fails under zero bubble, as this does:

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


def _device(part: torch.nn.Module, example: tuple[Any, ...]) -> torch.device:
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
    """The layers of each stage, for a model that is not a list of blocks but can skip layers.

    Args:
        layers: the name of the list with the layers; modules before it count for the first stage,
            modules after it for the last.
        count: the number of stages.
        example: the model's arguments.
        costs: the cost of each layer, or a function that returns them; None: measured by the first
            rank.
        group: the processes; None: all, if there are several.
    """
    blocks = [*model.get_submodule(layers).children()]
    if len(blocks) < count:
        came, accepted = f"{len(blocks)} of them", f"at least one for each of {count} stages"
        raise ArgumentError("layer_cuts", "layers", came, accepted)
    box: list[Any] = [None]
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        box = [_said(costs, blocks) or _measured_inside(model, blocks, example)]
    if dist.is_initialized():
        dist.broadcast_object_list(box, group=group, group_src=0)
    return balanced(box[0], count)


# --- Costs ----------------------------------------------------------------------------------------


def balanced(costs: Sequence[float], count: int) -> tuple[range, ...]:
    """Divide a list of blocks into stages so that the costliest one is as cheap as possible.

    Ties are resolved by the least sum of squared costs, which evens out the other stages.
    """
    worst, _ = _cut(costs, count, max)
    _, cuts = _cut(costs, count, lambda sum, cost: sum + cost**2 if cost <= worst else math.inf)
    return tuple(itertools.starmap(range, itertools.pairwise((0, *cuts))))


def _cut(
    costs: Sequence[float], count: int, add: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The least value, accumulated by `add` over the stages' costs, and where the stages end."""
    total = [0.0, *itertools.accumulate(costs)]
    # For each number of blocks: the best division into the stages so far.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(count):
        ends = range(stage + 1, len(costs) - (count - 1 - stage) + 1)  # a block for each later one
        best = {
            end: min(
                (add(value, total[end] - total[start]), (*cuts, end))
                for start, (value, cuts) in best.items()
                if start < end
            )
            for end in ends
        }
    return best[len(costs)]


def measured(
    blocks: Sequence[torch.nn.Module], example: tuple[Any, ...], repeats: int = 3
) -> list[float]:
    """Seconds of a forward and a backward of each block: the median of `runs` after a warm-up.

    They run on copies, one at a time: statistics and generators do not change.
    """
    return _run_through(blocks, example, repeats + 1)[0]


def _run_through(
    blocks: Sequence[torch.nn.Module], example: tuple[Any, ...], runs: int
) -> tuple[list[float], list[tuple[Any, ...]]]:
    """Seconds of each block; and the values between blocks on meta, from the first input on.

    A single run counts; otherwise the first one warms up.
    """
    given, found, flow = example, [], [_described(example)]
    for block in blocks:
        seconds, result = _time(block, runs, given, {})
        found.append(seconds)
        given = result if isinstance(result, tuple) else (result,)
        flow.append(_described(given, requires_grad=True))
    return found, flow


def _described(given: tuple[Any, ...], requires_grad: bool = False) -> tuple[Any, ...]:
    def described(t: torch.Tensor) -> torch.Tensor:
        wanted = requires_grad and t.is_floating_point()
        return torch.empty_like(t, device="meta").requires_grad_(wanted)

    return tree_map_only(torch.Tensor, described, given)


def _measured_inside(
    model: torch.nn.Module, blocks: Sequence[torch.nn.Module], example: tuple[Any, ...]
) -> list[float]:
    """Seconds of each block with the arguments that the model gives it.

    The first block includes the time before it, and the last the time after it, as three forwards.
    """
    given: list[Any] = []
    times: list[float] = []

    def begins(_: Any, args: Any, kwargs: Any) -> None:
        given.append(tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs)))
        times.append(time.perf_counter())

    hooks = [block.register_forward_pre_hook(begins, with_kwargs=True) for block in blocks]
    ends = blocks[-1].register_forward_hook(lambda *_: times.append(time.perf_counter()))
    with torch.random.fork_rng(), torch.no_grad():
        start = time.perf_counter()
        model(*example)
        times.append(time.perf_counter())
    for hook in (*hooks, ends):
        hook.remove()
    found = [_time(block, 4, *call)[0] for block, call in zip(blocks, given, strict=True)]
    found[0] += 3 * (times[0] - start)
    found[-1] += 3 * (times[-1] - times[-2])
    return found


def _time(block: torch.nn.Module, runs: int, args: Any, kwargs: Any) -> tuple[float, Any]:
    """The median of runs of a copy after a warm-up, and the result."""
    block = copy.deepcopy(block)
    seconds, result = [], None
    with torch.random.fork_rng(), torch.enable_grad():
        for _ in range(runs):
            begin = time.perf_counter()
            result = _there_and_back(block, args, kwargs)
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:] or seconds), result


def _there_and_back(block: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """The block's result, once the device has finished it."""
    args, kwargs = tree_map_only(torch.Tensor, _leaf, (args, kwargs))
    result = block(*args, **kwargs)
    outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])
    for device in {t.device for t in outputs if t.is_cuda}:
        torch.cuda.synchronize(device)
    return tree_map_only(torch.Tensor, torch.Tensor.detach, result)


def _leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().requires_grad_() if t.is_floating_point() else t


def _agreed(
    blocks: Sequence[torch.nn.Module],
    example: tuple[Any, ...],
    costs: Costs | None,
    rank: int,
    group: dist.ProcessGroup | None,
) -> tuple[list[float], list[tuple[Any, ...]]]:
    """The costs of the blocks, and the values between them; the same on every rank."""
    box: list[Any] = [None]
    if rank == 0:
        found, flow = _run_through(blocks, example, 4 if costs is None else 1)
        box = [(_said(costs, blocks) or found, flow)]
    dist.broadcast_object_list(box, group=group, group_src=0)
    if len(box[0][0]) != len(blocks):
        came, accepted = f"{len(box[0][0])} of them", f"one for each of {len(blocks)} blocks"
        raise ArgumentError("pipeline", "costs", came, accepted)
    return box[0]


def _said(costs: Costs | None, blocks: Sequence[torch.nn.Module]) -> list[float]:
    """The given costs; None if they must be measured."""
    if callable(costs):
        return [*map(costs, blocks)]
    return [] if costs is None else [*costs]
