"""parallelize: model, optimizer, steps and checkpoints of a training run, from a declaration."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, DistributedSampler

from torchweld import checks, optim
from torchweld.distributed import checkpoint
from torchweld.distributed.data.grad_norm import grad_norm
from torchweld.distributed.data.zero import RowSharded
from torchweld.distributed.layers import LayerSeeds, add_path, find_layers
from torchweld.distributed.one_for_all import compute_once
from torchweld.distributed.pipelines import stages
from torchweld.distributed.ring.attention import ring_slice
from torchweld.distributed.tensor.sums import no_sync
from torchweld.distributed.train.feasibility import check_fit
from torchweld.distributed.train.memory import Memory, memory_estimate
from torchweld.distributed.train.parallel import STASHING, Parallel
from torchweld.distributed.train.recompute import recompute
from torchweld.errors import ArgumentError

Microbatch = tuple[torch.Tensor, torch.Tensor]
_SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    **dict.fromkeys(STASHING, pipelining.Schedule1F1B),
}


def parallelize(
    model: torch.nn.Module,
    config: Mapping[str, Any] | str | Path,
    *,
    device: torch.device | str,
    example: tuple[torch.Tensor, ...],
    loss_fn: Callable[[Any, torch.Tensor], torch.Tensor],
    microbatches: int = 1,
    max_norm: float | None = None,
    autocast: torch.dtype | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> Training:
    """Share a model's training among all processes of torch.distributed, as declared.

    Args:
        model: a whole model, the same in every process; fuse it first. A pipeline needs an
            nn.Sequential, or a model whose `stage(number, count)` keeps only the modules of a
            stage, under their names.
        config: what `Parallel` reads: a mapping, a strategy's name or a TOML file.
        device: this process's device.
        example: the model's arguments for a microbatch with whole sequences, [rows, length, ...].
        loss_fn: computes the mean loss of a microbatch from the model's result and the targets.
        microbatches: microbatches per step over all processes.
        max_norm: the norm to which gradients are clipped; None or 0: they are not clipped.
        autocast: the dtype of autocast; None: without.
        seed: the seed of dropout. The dropped elements do not depend on the processes.
        quiet: whether to print nothing; otherwise the first process prints the plan and the
            memory estimate.

    Returns:
        A Training. Every process raises the same error for sizes that do not divide.
    """
    parallel = Parallel.from_config(config, dist.get_world_size())
    length = example[0].shape[1] if example and example[0].ndim > 1 else None
    check_fit(model, parallel, length=length, microbatches=microbatches)
    if max_norm is not None:
        accepted = "a number >= 0 or None"
        checks.number("parallelize", "max_norm", max_norm, lambda v: v >= 0, accepted)
    max_norm = max_norm or None
    checks.fits("parallelize", "seed", seed, isinstance(seed, checks.INTEGER), "an int")
    if max_norm is not None and parallel.stashes:
        accepted = f"None with {parallel.schedule}: stages update before others have gradients"
        raise ArgumentError("parallelize", "max_norm", str(max_norm), accepted)
    device = torch.device(device)
    training = Training(
        *(model, parallel, device, example, loss_fn, microbatches, max_norm, autocast, seed)
    )
    if not quiet and dist.get_rank() == 0:
        print(parallel)
        training.memory.show()
    return training


class Training:
    """A model, or this process's stages of it, in training.

    Attributes:
        model: this process's share of the model, with the whole model's names.
        optimizer: the optimizer of its parameters.
        parallel: how processes share the work.
        mesh: the processes, along the dimensions pipeline, data, ring and tensor.
        memory: an estimate of this process's memory.
        own: the numbers of a step's microbatches that this process takes.
    """

    def __init__(
        self,
        model: Any,
        parallel: Parallel,
        device: torch.device,
        example: tuple[torch.Tensor, ...],
        loss_fn: Callable[[Any, torch.Tensor], torch.Tensor],
        microbatches: int,
        max_norm: float | None,
        autocast: torch.dtype | None,
        seed: int,
    ) -> None:
        self.parallel, self.device, self._loss_fn = parallel, device, loss_fn
        self._max_norm, self._dtype = max_norm, autocast
        self.mesh = parallel.mesh(device.type)
        replica, each = self.mesh.get_local_rank("data"), microbatches // parallel.replicas
        self.own = range(replica * each, (replica + 1) * each)
        example = tuple(self.slice(x.to(device)) for x in example)
        self._numbers = parallel.assign_stages(self.mesh.get_local_rank("pipeline"))
        self._matrices = parallel.find_matrices(model)
        parts = [self._make_part(model, number) for number in self._numbers]
        flow = self._find_flow(parts, example) if parallel.pipeline > 1 else {}
        inputs = flow[self._numbers[0]] if flow else example
        self.memory = self._estimate(parts, inputs)
        wrapped = [parallel.wrap(part, self.mesh) for part in parts]
        self.model = wrapped[0] if len(wrapped) == 1 else join(wrapped)
        self.seeds = LayerSeeds(
            [pair for part in parts for pair in find_layers(part).items()], seed
        )
        self.optimizer = self._make_optimizer()
        self._averages = getattr(self.optimizer, "_exchanges_gradients", False)
        if self._averages and self.model is not parts[0]:
            self.optimizer.attach(self.model)
        self._schedule: Any = self._make_schedule(wrapped, flow) if flow else None
        self._example = example[0]

    # --- Making -------------------------------------------------------------------------------

    def _make_part(self, model: Any, number: int) -> Any:
        """Cut and shard a stage, and wrap its blocks that recompute."""
        p = self.parallel
        part = cut(model, number, p.stages, p.stages > p.pipeline) if p.pipeline > 1 else model
        part = p.shard(part.to(self.device), self.mesh)
        for name, block in find_layers(part).items() if p.checkpoint != "none" else ():
            part.set_submodule(name, recompute(block, keep=p.checkpoint == "selective"))
        return part

    def _find_flow(self, parts: Sequence[Any], example: Any) -> dict[int, tuple[Any, ...]]:
        """Run each stage once, in order, and describe its inputs and the results of the last.

        Otherwise torch would run the stages in the first step, with all side effects.
        """
        group, p = self.mesh.get_group("pipeline"), self.parallel
        owners = {at: place for place in range(p.pipeline) for at in p.assign_stages(place)}
        flow = {0: stages._describe(example)}
        for number in range(p.stages):

            def run(number: int = number) -> tuple[Any, ...]:
                args = tree_map_only(
                    torch.Tensor, lambda t: torch.zeros_like(t, device=self.device), flow[number]
                )
                with torch.random.fork_rng(), self._autocast(), torch.no_grad():
                    result = parts[self._numbers.index(number)](*args)
                result = result if isinstance(result, tuple) else (result,)
                return stages._describe(result, requires_grad=True)

            flow[number + 1] = compute_once("parallelize", run, group, owners[number])
        return flow

    def _make_schedule(self, parts: Sequence[Any], flow: dict[int, tuple[Any, ...]]) -> Any:
        if self._dtype is not None:
            for part in parts:
                part.forward = self._autocast()(part.forward)
        p = self.parallel
        kind: Any = stages.ScaledStage
        if p.stashes:
            # An annex: only its schedules load it.
            from torchweld.distributed.pipelines.stashing.stage import StashingStage

            every = (p.accumulate or len(self.own)) if p.schedule == "2bw" else 1
            kind = partial(StashingStage, rule=p.schedule, accumulate=every)
        made = [
            kind(
                *(part, number, p.stages, self.device),
                input_args=flow[number],
                output_args=flow[number + 1],
                group=self.mesh.get_group("pipeline"),
            )
            for part, number in zip(parts, self._numbers, strict=True)
        ]
        if p.stashes:
            made[0].optimizer = self.optimizer
        schedule: Any = _SCHEDULES[p.schedule]
        local_stages = made[0] if p.stages == p.pipeline else made
        return schedule(local_stages, len(self.own), loss_fn=self._loss_fn)

    def _make_optimizer(self) -> Any:
        optimizer = self.parallel.make_optimizer(self.model, self.mesh, self._matrices)
        if self.parallel.offload == "none":
            return optimizer
        if isinstance(optimizer, RowSharded):
            accepted = "'none' with zero1, whose optimizer steps views of the model's rows"
            raise ArgumentError("parallelize", "offload", repr(self.parallel.offload), accepted)
        place = "cpu" if self.parallel.offload == "optimizer" else "auto"
        return optim.Offload(optimizer, placement=place, pin_memory=self.device.type == "cuda")

    def _estimate(self, parts: Sequence[Any], example: Any) -> Memory:
        """Estimate this process's memory, for the dimension that divides most of it."""
        p = self.parallel
        strategy: Any = "zero1_rows" if p.data == "zero1" else p.data
        count, rank = p.sharers or p.replicas, 0
        if count == 1 and p.tensor * p.pipeline > 1:
            strategy, count = ("tp", p.tensor) if p.tensor > 1 else ("pp", p.pipeline)
        in_flight = None
        if p.pipeline > 1:
            rank = self._numbers[0] if strategy == "pp" else 0
            waiting = p.pipeline - self._numbers[0]
            in_flight = len(self.own) if p.schedule == "gpipe" else min(waiting, len(self.own))
        example = tree_map_only(
            torch.Tensor, lambda t: torch.zeros_like(t, device=self.device), example
        )
        model = parts[0] if len(parts) == 1 else join(parts)
        several = len(self.own) > 1 and p.pipeline == 1 and p.data in ("zero2", "zero3")
        versions = 0
        if p.stashes:
            # An annex: only its schedules load it.
            from torchweld.distributed.pipelines.stashing.stage import count_versions

            versions = count_versions(p.schedule, self._numbers[0], p.pipeline, len(self.own))
        return memory_estimate(
            model,
            p.optimizer_factory()(p.group_parameters(model, self._matrices)),
            *(strategy, count),
            rank=rank,
            example=example if len(parts) == 1 else None,
            in_flight=in_flight,
            accumulates=several,
            versions=versions,
        )

    def _autocast(self) -> Any:
        enabled = self._dtype is not None
        return torch.autocast(self.device.type, self._dtype or torch.bfloat16, enabled=enabled)

    # --- Data ---------------------------------------------------------------------------------

    @property
    def versions(self) -> list[int]:
        """The version of this stage's weights that each microbatch so far used."""
        return self._schedule._stage.used if self.parallel.stashes else []

    def slice(self, x: torch.Tensor) -> torch.Tensor:
        """Take this process's slice of sequences [rows, length, ...], along the ring."""
        return ring_slice(x, 1, self.mesh.get_group("ring")) if self.parallel.ring > 1 else x

    def sampler(self, dataset: Dataset[Any], **settings: Any) -> DistributedSampler[Any]:
        """Make a sampler of this replica's samples, for torch's DataLoader."""
        replicas, place = self.parallel.replicas, self.mesh.get_local_rank("data")
        return DistributedSampler(dataset, num_replicas=replicas, rank=place, **settings)

    # --- Steps --------------------------------------------------------------------------------

    def step(self, batch: Sequence[Microbatch], number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step; return the mean loss of this process's microbatches and the gradient norm.

        The norm is NaN under weight stashing, where each stage has updated its weights already.
        With one_bit_adam and one_bit_lamb it is the norm of this process's gradients, which only
        the step exchanges.

        Args:
            batch: inputs and targets of this process's microbatches, `own`, with whole sequences.
            number: the step's number, for dropout.
        """
        if len(batch) != len(self.own):
            accepted = f"{len(self.own)}, of the numbers in `own`"
            raise ArgumentError("Training.step", "batch", f"{len(batch)} microbatches", accepted)
        batch = [(self.slice(x), self.slice(y)) for x, y in batch]
        self.seeds.begin(number, self.own.start)
        loss = self._accumulate(batch) if self._schedule is None else self._run_stages(batch)
        if self.parallel.stashes:  # each stage has stepped its optimizer
            return loss, torch.full((), math.nan, device=self.device)
        among = self.mesh.get_group("pipeline") if self._schedule is not None else None
        norm = grad_norm(self.model.parameters(), among)
        if self._max_norm is not None and not self._averages:
            factor = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm

    def _accumulate(self, batch: Sequence[Microbatch]) -> torch.Tensor:
        total, parts = torch.zeros((), device=self.device), len(batch) * self.parallel.ring
        for at, (inputs, targets) in enumerate(batch):
            first = self.mesh.get_local_rank("ring") * inputs.shape[1]
            place = (first,) if self.parallel.ring > 1 else ()
            # Processes exchange gradients only after the last microbatch.
            with nullcontext() if at == len(batch) - 1 else no_sync(self.model):
                with self._autocast():
                    loss = self._loss_fn(self.model(inputs, *place), targets)
                (loss / parts).backward()
            total += loss.detach() / len(batch)
        if isinstance(self.model, DistributedDataParallel):
            self._check_exchanged(self.model)
        return total

    def _check_exchanged(self, model: DistributedDataParallel) -> None:
        """Refuse a backward pass that left a parameter out: torch notices in the next step."""
        try:
            model._check_reducer_finalized()
        except RuntimeError:
            trained = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]
            unused = [name for name, p in trained if p.grad is None] or [trained[0][0]]
            actual = f"without a gradient of {', '.join(unused[:3])} in process {dist.get_rank()}"
            accepted = "one that uses all trained parameters in every process and step"
            raise ArgumentError("Training.step", "model", actual, accepted) from None

    def _run_stages(self, batch: Sequence[Microbatch]) -> torch.Tensor:
        inputs, targets = (torch.cat(rows) for rows in zip(*batch, strict=True))
        losses: list[torch.Tensor] = []
        is_last = self.parallel.stages - 1 in self._numbers
        self._check_inputs(inputs)
        arguments = (inputs,) if 0 in self._numbers else ()
        self._schedule.step(*arguments, target=targets if is_last else None, losses=losses)
        # Only the last stage knows the dtype of its losses, but all stages receive one.
        loss = torch.zeros((), device=self.device)
        if is_last:
            loss += torch.stack(losses).mean().detach()
        dist.all_reduce(loss, group=self.mesh.get_group("pipeline"))
        return loss

    def _check_inputs(self, inputs: torch.Tensor) -> None:
        """Refuse inputs unlike the example: the next stage would receive what it does not expect.

        All stages have the same batch, so all raise the error.
        """
        rows, *rest = self._example.shape
        wanted = [len(self.own) * rows, *rest], self._example.dtype
        if ([*inputs.shape], inputs.dtype) != wanted:
            actual = f"microbatches of {[*inputs.shape]} and {inputs.dtype} in all"
            accepted = f"{wanted[0]} and {wanted[1]}, as in the example"
            raise ArgumentError("Training.step", "batch", actual, accepted)

    # --- Checkpoints --------------------------------------------------------------------------

    def save(self, folder: str | Path, step: int) -> None:
        """Write a checkpoint that any strategy on any number of processes can load."""
        checkpoint.save(folder, self.model, self.optimizer, step)

    def load(self, folder: str | Path) -> int:
        """Load a checkpoint; return the number of steps taken."""
        step = checkpoint.load(folder, self.model, self.optimizer)
        if self.parallel.stashes:
            self._schedule._stage.restart()
        return step


# --- Stages of a whole model ----------------------------------------------------------------------


def cut(model: Any, number: int, count: int, keeps: bool) -> Any:
    """Keep only the modules of a stage; in a copy, if the model is still needed."""
    if hasattr(model, "stage"):
        return (copy.deepcopy(model) if keeps else model).stage(number, count)
    if isinstance(model, torch.nn.Sequential):
        blocks = dict(model.named_children())
        chosen = stages.balance([sum(p.numel() for p in b.parameters()) for b in model], count)
        names = [*blocks]
        return stages._Stage({names[i]: blocks[names[i]] for i in chosen[number]})
    accepted = "an nn.Sequential, or one with a method stage(number, count)"
    raise ArgumentError("parallelize", "model", f"a {type(model).__name__}", accepted)


def join(parts: Sequence[torch.nn.Module]) -> torch.nn.Module:
    """Make a module with the parameters of all parts, under their names."""
    root = torch.nn.Module()
    for part in parts:
        for path, module in part.named_modules():
            ignored = ("", "_checkpoint_wrapped_module")
            at = add_path(root, (key for key in path.split(".") if key not in ignored))
            for name, p in module.named_parameters(recurse=False):
                at.register_parameter(name, p)
            for name, b in module.named_buffers(recurse=False):
                at.register_buffer(name, b, name not in module._non_persistent_buffers_set)
    return root
