"""Cells of the matrix: one model trained with a parallel strategy, and in one process.

All runs have the same microbatches. Each data-parallel process takes some of them; a single process
takes all of them in turn. The elements that a layer drops depend on the layer and the microbatch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import selection
from torchweld import optim
from torchweld.distributed import (
    CountCollectives,
    LayerSeeds,
    no_sync,
    sequence_plan,
    tp_plan,
    zero2,
    zero3,
)
from transformer import Settings, Transformer, compute_loss, make_batch

# Errors show from the second step, in which states and the dropped elements are not the first's;
# DDP makes its buckets again there, and a step's bytes are counted in the third.
STEPS, MICROBATCHES, ROWS = 10 if selection.WHOLE else 3, 4, 2
_SIZES = Settings(vocabulary=64, length=32, width=32, heads=4, layers=4, dropout=0.2)
MODELS = {
    "GPT": _SIZES,
    "BERT": replace(_SIZES, causal=False),
    "sparse GPT": replace(_SIZES, sparse=True, length=64, window=1),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# A large eps: with a small one Adam amplifies the rounding errors of small gradients.
_OPTIMIZER: dict[str, Any] = {"lr": 3e-3, "eps": 1e-4}


@dataclass
class Run:
    """A run's losses, final parameters, and the collectives of its last step.

    Losses are means of the microbatches' of a step; this process's microbatches have theirs.
    """

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    calls: dict[str, int]
    bytes: dict[str, int]
    of_microbatches: list[float] = field(default_factory=list)


class Cell:
    """One run in progress, in one of its processes."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.settings, self.dtype = MODELS[name], dtype
        torch.manual_seed(0)
        self.model: Any = Transformer(self.settings)
        if dtype == torch.float64:
            self.model.double()
        self.seeds: list[LayerSeeds] = []
        self.losses: list[float] = []
        self.of_microbatches: list[torch.Tensor] = []

    def autocast(self) -> Any:
        """Autocast for 16 bits."""
        wanted = self.dtype == torch.bfloat16
        return torch.autocast("cpu", self.dtype) if wanted else nullcontext()

    def microbatch(self, step: int, number: int) -> tuple[torch.Tensor, ...]:
        """The tokens and targets of a microbatch."""
        return make_batch(self.settings, ROWS, STEPS * number + step)

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss, in float64 if the model is."""
        if self.dtype == torch.float64:
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return compute_loss(logits, targets)

    def seed(self, *modules: Any) -> None:
        """Make their layers drop the same elements as in one process."""
        self.seeds += [LayerSeeds(module.blocks.items(), seed=1) for module in modules]

    def begin(self, step: int, microbatch: int = 0) -> None:
        for seeds in self.seeds:
            seeds.begin(step, microbatch)

    def accumulate(self, model: Any, step: int, rank: int = 0, count: int = 1) -> torch.Tensor:
        """Run forward and backward of this process's microbatches, and return their mean loss."""
        each = MICROBATCHES // count
        self.begin(step, rank * each)
        total = torch.zeros((), dtype=torch.float64)
        for number in range(rank * each, (rank + 1) * each):
            last = number == (rank + 1) * each - 1
            tokens, targets = self.microbatch(step, number)
            with nullcontext() if last else no_sync(model):
                with self.autocast():
                    loss = self.loss(model(tokens), targets)
                (loss / each).backward()
            self.of_microbatches.append(loss.detach())
            total += loss.detach() / each
        return total

    def train(
        self, step: Callable[[int], torch.Tensor], optimizer: torch.optim.Optimizer
    ) -> CountCollectives:
        """Run all steps, and count the collectives of the last one."""
        if not self.seeds:
            self.seed(self.model)
        counted = CountCollectives()
        for number in range(STEPS):
            with counted if number == STEPS - 1 else nullcontext():
                loss = step(number)
                optimizer.step()
                optimizer.zero_grad()
            self.losses.append(loss)  # type: ignore[arg-type]
        return counted

    def left(
        self, counted: CountCollectives, modules: Any = None, over: Any = None, of: int = 1
    ) -> Run:
        """The finished run. Losses are averaged over the `of` processes of the group `over`."""
        losses = _mean_over(self.losses, over, of)
        modules = [self.model] if modules is None else modules
        parameters = {
            name.removeprefix("module.").replace("_orig_mod.", ""): _whole(parameter)
            for module in modules
            for name, parameter in module.named_parameters()
        }
        calls, sent = dict(counted.calls), dict(counted.bytes)
        return Run(losses, parameters, calls, sent, [x.item() for x in self.of_microbatches])


def _mean_over(losses: list[float], group: Any, of: int) -> list[float]:
    """Losses averaged over the `of` processes of a group."""
    mean = torch.stack([torch.as_tensor(loss).double() for loss in losses]) / of
    if of > 1:
        dist.all_reduce(mean, group=group)
    return mean.tolist()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def adamw(model: Any) -> Any:
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else model
    return optim.AdamW(parameters, **_OPTIMIZER)


# --- Strategies: functions of a model's name and a dtype that return a run ------------------------


def one_process(name: str, dtype: torch.dtype) -> Run:
    cell = Cell(name, dtype)
    counted = cell.train(lambda step: cell.accumulate(cell.model, step), adamw(cell.model))
    return cell.left(counted)


def _compile(cell: Cell) -> None:
    """Compile each block to one graph with Inductor."""
    with torch.no_grad():
        cell.model(cell.microbatch(0, 0)[0])  # makes the layout, outside the graph
    blocks = cell.model.blocks
    for key, block in blocks.items():
        blocks[key] = torch.compile(block, fullgraph=True)


def _ddp(
    name: str, dtype: torch.dtype, sharded_states: bool = False, compiled: bool = False
) -> Run:
    cell, rank, count = Cell(name, dtype), dist.get_rank(), dist.get_world_size()
    if compiled:
        _compile(cell)
    model = DistributedDataParallel(cell.model)
    optimizer = (
        ZeroRedundancyOptimizer(
            model.parameters(), optim.AdamW, parameters_as_bucket_view=True, **_OPTIMIZER
        )
        if sharded_states
        else adamw(model)
    )
    counted = cell.train(lambda step: cell.accumulate(model, step, rank, count), optimizer)
    return cell.left(counted, of=count)


def _fsdp(name: str, dtype: torch.dtype, keep: bool, compiled: bool = False) -> Run:
    cell, rank, count = Cell(name, dtype), dist.get_rank(), dist.get_world_size()
    if compiled:
        _compile(cell)
    (zero2 if keep else zero3)(cell.model, init_device_mesh("cpu", (count,)))
    step = lambda step: cell.accumulate(cell.model, step, rank, count)  # noqa: E731
    return cell.left(cell.train(step, adamw(cell.model)), of=count)


def _tensor(name: str, dtype: torch.dtype, sequence: bool = False, compiled: bool = False) -> Run:
    cell = Cell(name, dtype)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(cell.model, mesh, tp_plan(cell.model, sequence))
    if compiled:
        _compile(cell)
    step = lambda step: cell.accumulate(cell.model, step)  # noqa: E731
    return cell.left(cell.train(step, adamw(cell.model)))


def _fsdp_tensor(name: str, dtype: torch.dtype) -> Run:
    cell, count = Cell(name, dtype), dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (count, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(cell.model, mesh["tensor"], tp_plan(cell.model, True))
    zero3(cell.model, mesh["data"])
    rank = mesh.get_local_rank("data")
    step = lambda step: cell.accumulate(cell.model, step, rank, count)  # noqa: E731
    counted = cell.train(step, adamw(cell.model))
    return cell.left(counted, over=mesh.get_group("data"), of=count)


def _ring(name: str, dtype: torch.dtype) -> Run:
    cell, count = Cell(name, dtype), dist.get_world_size()
    parallelize_module(cell.model, init_device_mesh("cpu", (count,)), sequence_plan(cell.model))
    return _along_a_ring(cell, dist.get_rank(), count, None)


def _tensor_ring(name: str, dtype: torch.dtype) -> Run:
    cell = Cell(name, dtype)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "tensor"))
    parallelize_module(cell.model, mesh, tp_plan(cell.model, ring=True))
    return _along_a_ring(cell, mesh.get_local_rank("ring"), 2, mesh.get_group("ring"))


def _fsdp_tensor_ring(name: str, dtype: torch.dtype) -> Run:
    cell = Cell(name, dtype)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "ring", "tensor"))
    parallelize_module(cell.model, mesh["ring", "tensor"], tp_plan(cell.model, ring=True))
    zero3(cell.model, mesh["data"])
    data = (mesh.get_group("data"), mesh.get_local_rank("data"), 2)
    return _along_a_ring(cell, mesh.get_local_rank("ring"), 2, mesh.get_group("ring"), data)


def _along_a_ring(
    cell: Cell, rank: int, count: int, group: Any, data: tuple[Any, int, int] = (None, 0, 1)
) -> Run:
    """Each process has a slice of every sequence, and its part of the mean loss.

    `data` is the group, rank and size of data parallelism.
    """
    first = rank * cell.settings.length // count
    here = slice(first, first + cell.settings.length // count)
    over, place, of = data
    each = MICROBATCHES // of

    def step(number: int) -> torch.Tensor:
        cell.begin(number, place * each)
        total = torch.zeros((), dtype=torch.float64)
        for m in range(place * each, (place + 1) * each):
            tokens, targets = (x[:, here] for x in cell.microbatch(number, m))
            last = m == (place + 1) * each - 1
            with nullcontext() if last else no_sync(cell.model):
                with cell.autocast():
                    loss = cell.loss(cell.model(tokens, first), targets)
                (loss / count / each).backward()
            total += loss.detach() / each
        return total

    counted = cell.train(step, adamw(cell.model))
    cell.losses = _mean_over(cell.losses, over, of)
    return cell.left(counted, over=group, of=count)


def _pipeline(
    schedule: Any, at: Callable[[int, int], tuple[int, ...]], name: str, dtype: torch.dtype
) -> Run:
    """A pipeline where at(rank, count) are a rank's stages; the last stage has the losses."""
    cell, rank, count = Cell(name, dtype), dist.get_rank(), dist.get_world_size()
    return _staged(cell, dist.group.WORLD, rank, count, schedule, at)


def _staged(
    cell: Cell,
    group: Any,
    rank: int,
    count: int,
    schedule: Any,
    at: Any,
    wrap: Callable[..., Any] = lambda part: part,
    data: tuple[Any, int, int] = (None, 0, 1),
) -> Run:
    """Train stages `at` of a pipeline. `data` is the group, rank and size of data parallelism."""
    numbers = at(rank, count)
    total = count * len(numbers)
    modules = []
    for number in numbers:
        part = copy.deepcopy(cell.model).stage(number, total)
        if cell.dtype == torch.bfloat16:
            part.forward = torch.autocast("cpu", cell.dtype)(part.forward)
        modules.append(part)
    cell.seed(*modules)
    modules = [wrap(part) for part in modules]
    shapes = _shapes(cell.settings, total)
    stages = [
        pipelining.PipelineStage(
            *(part, number, total, torch.device("cpu"), *shapes[number : number + 2]), group=group
        )
        for part, number in zip(modules, numbers, strict=True)
    ]
    single = len(stages) == 1 and not issubclass(schedule, _MULTI)
    over, place, of = data
    each = MICROBATCHES // of
    run = schedule(stages[0] if single else stages, each, loss_fn=cell.loss)
    optimizer = adamw([p for part in modules for p in part.parameters()])

    def step(number: int) -> torch.Tensor:
        cell.begin(number, place * each)
        mine = range(place * each, (place + 1) * each)
        parts = [cell.microbatch(number, m) for m in mine]
        tokens, targets = (torch.cat(some) for some in zip(*parts, strict=True))
        losses: list[torch.Tensor] = []
        given = (tokens,) if 0 in numbers else ()
        run.step(*given, target=targets if total - 1 in numbers else None, losses=losses)
        return count * torch.stack(losses).double().mean().detach() if losses else torch.zeros(())

    counted = cell.train(step, optimizer)
    cell.losses = _mean_over(cell.losses, over, of)  # each is that of its part of the batch
    return cell.left(counted, modules, over=group, of=count)


def _shapes(s: Settings, stages: int) -> list[torch.Tensor]:
    """The shapes that enter each stage and leave the last; else torch runs the stages for them."""
    tokens = torch.zeros((ROWS, s.length), dtype=torch.int64)
    stream, logits = (
        torch.zeros((ROWS, s.length, n), requires_grad=True) for n in (s.width, s.vocabulary)
    )
    return [tokens, *[stream] * (stages - 1), logits]


_MULTI = (pipelining.ScheduleInterleaved1F1B, pipelining.ScheduleZBVZeroBubble)


def _loop(rank: int, count: int) -> tuple[int, ...]:
    return rank, rank + count


def _vee(rank: int, count: int) -> tuple[int, ...]:
    return rank, 2 * count - 1 - rank


def _one_each(rank: int, count: int) -> tuple[int, ...]:
    return (rank,)


def _fsdp_tensor_pipeline(name: str, dtype: torch.dtype) -> Run:
    cell = Cell(name, dtype)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pipe", "data", "tensor"))

    def wrap(part: Any) -> Any:
        parallelize_module(part, mesh["tensor"], tp_plan(part, True))
        return zero2(part, mesh["data"])

    group, rank = mesh.get_group("pipe"), mesh.get_local_rank("pipe")
    data = (mesh.get_group("data"), mesh.get_local_rank("data"), 2)
    return _staged(cell, group, rank, 2, pipelining.Schedule1F1B, _one_each, wrap, data)


@dataclass(frozen=True)
class Strategy:
    """A way to train a model on a number of processes."""

    processes: int
    run: Callable[[str, torch.dtype], Run]
    # Whether every sum has the order of one process, so that results are bitwise equal.
    same_order: bool = False
    # Others are left to `make stack`: test_graph_distributed.py captures blocks under FSDP2 and a
    # plan, and test_saves.py trains declarations that four processes share.
    in_ci: bool = True


STRATEGIES = {
    "DDP": Strategy(2, _ddp),
    "ZeRO-1": Strategy(2, partial(_ddp, sharded_states=True)),
    "ZeRO-2 (FSDP2)": Strategy(2, partial(_fsdp, keep=True)),
    "ZeRO-3 (FSDP2)": Strategy(2, partial(_fsdp, keep=False)),
    "DDP, compiled": Strategy(2, partial(_ddp, compiled=True), in_ci=False),
    "ZeRO-3 (FSDP2), compiled": Strategy(2, partial(_fsdp, keep=False, compiled=True), in_ci=False),
    "TP": Strategy(2, _tensor),
    "TP + SP": Strategy(2, partial(_tensor, sequence=True)),
    "TP, compiled": Strategy(2, partial(_tensor, compiled=True), in_ci=False),
    "TP + SP, compiled": Strategy(2, partial(_tensor, sequence=True, compiled=True), in_ci=False),
    "ring SP": Strategy(2, _ring),
    "TP x ring SP": Strategy(4, _tensor_ring, in_ci=False),
    "PP GPipe": Strategy(2, partial(_pipeline, pipelining.ScheduleGPipe, _one_each), True),
    "PP 1F1B": Strategy(2, partial(_pipeline, pipelining.Schedule1F1B, _one_each), True),
    "PP interleaved 1F1B": Strategy(
        2, partial(_pipeline, pipelining.ScheduleInterleaved1F1B, _loop), True
    ),
    "PP ZBV": Strategy(2, partial(_pipeline, pipelining.ScheduleZBVZeroBubble, _vee)),
    "PP DualPipeV": Strategy(2, partial(_pipeline, pipelining.ScheduleDualPipeV, _vee)),
    "FSDP2 x TP + SP": Strategy(4, _fsdp_tensor, in_ci=False),
    "FSDP2 x TP + SP x PP": Strategy(8, _fsdp_tensor_pipeline, in_ci=False),
    "FSDP2 x TP x ring SP": Strategy(8, _fsdp_tensor_ring, in_ci=False),
}
