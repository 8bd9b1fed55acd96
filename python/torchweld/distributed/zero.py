"""ZeRO's stages by torch's engines, with any optimizer: states, gradients, parameters are divided.

    zero1       DDP with torch's ZeroRedundancyOptimizer: a rank has the states of some parameters
    RowSharded  under DDP: a rank has the states of some rows of each parameter, as DTensors
    zero2       FSDP2 that keeps parameters gathered from forward to backward
    zero3       FSDP2

DeepSpeed's stages take torchweld's optimizers as they are: see docs/pipelines-and-memory.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from torchweld.distributed.memory import blocks_of


def zero1(
    model: torch.nn.Module,
    optimizer: type[torch.optim.Optimizer],
    *,
    group: dist.ProcessGroup | None = None,
    **settings: Any,
) -> tuple[DistributedDataParallel, ZeroRedundancyOptimizer]:
    """The model under DDP, and an optimizer that steps some of its parameters on each rank.

    What looks at all gradients at once, as max_grad_norm does, sees a rank's own: clip before the
    step, by torch.nn.utils.clip_grad_norm_, or take RowSharded. Its checkpoints have to be
    consolidated.

    Args:
        optimizer: a class of torchweld.optim's or torch.optim's.
        settings: the optimizer's.
    """
    wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    made = ZeroRedundancyOptimizer(trained, optimizer, process_group=group, **settings)
    return wrapped, made


class RowSharded:
    """Steps rows of each parameter on each rank, under DDP, and gathers what was stepped.

    The optimizer's parameters are DTensors, this rank's part of which is memory of the model's own.
    So its states are sharded DTensors: the norms of LAMB or max_grad_norm are those of whole
    tensors, states kept in 8 bits do not depend on the number of ranks, and torch's distributed
    checkpoints reshard them.

    Args:
        parameters: the model's, the same on all ranks of the mesh, whose gradients DDP averages.
        make: DTensors to an optimizer of torchweld.optim's.
        mesh: of one dimension.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        mesh: DeviceMesh,
    ) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._mesh = mesh
        self._shards = [torch.nn.Parameter(self._part(p.detach())) for p in self._parameters]
        self.optimizer = make(self._shards)

    def _part(self, whole: torch.Tensor) -> DTensor:
        """Rows of a tensor that all ranks have, in its own memory."""
        rows = _rows_of(whole, self._mesh.size(), self._mesh.get_local_rank())
        return DTensor.from_local(
            rows,
            self._mesh,
            [Shard(0)],
            run_check=False,
            shape=_at_least_1d(whole).shape,
            stride=_at_least_1d(whole).stride(),
        )

    @torch.no_grad()
    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """The optimizer's step, by way of the scaler where there is one; an all-gather a dtype."""
        for whole, shard in zip(self._parameters, self._shards, strict=True):
            shard.grad = None if whole.grad is None else self._part(whole.grad)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
        alike: dict[torch.dtype, list[torch.Tensor]] = {}
        for whole in self._parameters:
            alike.setdefault(whole.dtype, []).append(whole)
        for some in alike.values():
            self._gather(some)

    def _gather(self, wholes: list[torch.Tensor]) -> None:
        count, rank = self._mesh.size(), self._mesh.get_local_rank()
        sizes = [_rows_of(whole, count, 0).numel() for whole in wholes]  # the first has most
        sent = wholes[0].new_zeros(sum(sizes))
        for piece, whole in zip(sent.split(sizes), wholes, strict=True):
            rows = _rows_of(whole, count, rank).reshape(-1)
            piece[: rows.numel()].copy_(rows)
        received = sent.new_empty(count * sent.numel())
        dist.all_gather_into_tensor(received, sent, group=self._mesh.get_group())
        for other, row in enumerate(received.view(count, -1)):
            for piece, whole in zip(row.split(sizes), wholes, strict=True):
                rows = _rows_of(whole, count, other)
                rows.copy_(piece[: rows.numel()].view(rows.shape))

    def zero_grad(self) -> None:
        """Drop the gradients of the model's parameters; DDP's buckets keep their memory."""
        for p in (*self._parameters, *self._shards):
            p.grad = None


def _at_least_1d(t: torch.Tensor) -> torch.Tensor:
    return t.view(1) if t.ndim == 0 else t


def _rows_of(whole: torch.Tensor, count: int, rank: int) -> torch.Tensor:
    """A rank's rows, as DTensor cuts them: the last ranks may have fewer, or none."""
    whole = _at_least_1d(whole)
    each = -(-whole.shape[0] // count)
    return whole[rank * each : (rank + 1) * each]


def zero2(model: torch.nn.Module, mesh: DeviceMesh, **settings: Any) -> FSDPModule:
    """FSDP2 over each layer of the model and what is left, with states and gradients sharded.

    Parameters are sharded between steps; from the forward to the backward they are whole, which
    saves the second all-gather.

    Args:
        settings: of torch's fully_shard, such as mp_policy.
    """
    return _sharded(model, mesh, reshard=False, **settings)


def zero3(model: torch.nn.Module, mesh: DeviceMesh, **settings: Any) -> FSDPModule:
    """As zero2; a layer's parameters are whole only while it runs."""
    return _sharded(model, mesh, reshard=True, **settings)


def _sharded(model: Any, mesh: DeviceMesh, reshard: bool, **settings: Any) -> FSDPModule:
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, **settings)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard, **settings)
