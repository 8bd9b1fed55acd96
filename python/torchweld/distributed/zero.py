"""ZeRO's stages with torch's engines and any optimizer: shard states, gradients, parameters.

    zero1       DDP with torch's ZeroRedundancyOptimizer: a rank has the states of some parameters
    RowSharded  under DDP: a rank has the states of some rows of each parameter, as DTensors
    zero2       FSDP2 that keeps parameters gathered from forward to backward
    zero3       FSDP2

DeepSpeed's stages take torchweld's optimizers directly: see docs/pipelines-and-memory.md.
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

    Options that use all gradients at once, such as max_grad_norm, see only the rank's own: clip
    with torch.nn.utils.clip_grad_norm_ before the step, or use RowSharded. Its checkpoints must be
    consolidated.

    Args:
        optimizer: a class of torchweld.optim or torch.optim.
        settings: arguments of the optimizer.
    """
    wrapped = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    # In buckets, so that a rank's parameters are sent in one broadcast.
    settings = {"parameters_as_bucket_view": True, **settings}
    made = ZeroRedundancyOptimizer(trained, optimizer, process_group=group, **settings)
    return wrapped, made


class RowSharded:
    """Steps some rows of each parameter on each rank, under DDP, and gathers the results.

    The optimizer's parameters are DTensors whose local parts are views of the model's memory. So
    its states are sharded DTensors: the norms of LAMB or max_grad_norm are those of whole tensors,
    8-bit states do not depend on the number of ranks, and torch's distributed checkpoints can
    reshard them.

    Args:
        parameters: the model's parameters, the same on all ranks of the mesh; DDP averages their
            gradients.
        make: makes an optimizer of torchweld.optim from DTensors.
        mesh: a mesh of one dimension.
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
        """A DTensor over the rows of a replicated tensor, sharing its memory."""
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
        """Step the optimizer, through the scaler if given; then one all-gather per dtype."""
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
        sizes = [_rows_of(whole, count, 0).numel() for whole in wholes]  # the first rank has most
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
    """A rank's rows, divided as in DTensor: the last ranks may have fewer, or none."""
    whole = _at_least_1d(whole)
    each = -(-whole.shape[0] // count)
    return whole[rank * each : (rank + 1) * each]


def zero2(model: torch.nn.Module, mesh: DeviceMesh, **settings: Any) -> FSDPModule:
    """Apply FSDP2 to each layer and the rest of the model, sharding states and gradients.

    Parameters are sharded between steps, but stay gathered from the forward to the backward, which
    saves the second all-gather.

    Args:
        settings: arguments of torch's fully_shard, such as mp_policy.
    """
    return _sharded(model, mesh, reshard=False, **settings)


def zero3(model: torch.nn.Module, mesh: DeviceMesh, **settings: Any) -> FSDPModule:
    """Like zero2, but a layer's parameters are gathered only while it runs."""
    return _sharded(model, mesh, reshard=True, **settings)


def _sharded(model: Any, mesh: DeviceMesh, reshard: bool, **settings: Any) -> FSDPModule:
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, **settings)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard, **settings)
