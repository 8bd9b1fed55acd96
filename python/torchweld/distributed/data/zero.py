"""ZeRO's stages with torch's engines and any optimizer: shard states, gradients, parameters.

    zero1       DDP; with zero1_optimizer a rank has the states of some parameters
    RowSharded  under DDP: a rank has the states of some rows of each parameter, as DTensors
    zero2       FSDP2 that keeps parameters gathered from the forward to the backward pass
    zero3       FSDP2

Each of zero1, zero2 and zero3 takes a model and a mesh, and returns the model to train. Make the
optimizer from the returned model. DeepSpeed's stages take torchweld's optimizers directly: see
docs/pipelines-and-memory.md.
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

from torchweld.distributed.layers import add_path, find_blocks
from torchweld.errors import ArgumentError


def zero1(model: torch.nn.Module, mesh: DeviceMesh, **settings: Any) -> DistributedDataParallel:
    """Wrap the model in DDP over a mesh; `zero1_optimizer` then shards the optimizer's states.

    Args:
        mesh: a mesh of one dimension.
        settings: arguments of torch's DistributedDataParallel.
    """
    settings = {"gradient_as_bucket_view": True, **settings}
    return DistributedDataParallel(model, process_group=mesh.get_group(), **settings)


def zero1_optimizer(
    model: DistributedDataParallel, optimizer: type[torch.optim.Optimizer], **settings: Any
) -> ZeroRedundancyOptimizer:
    """Make an optimizer that steps some of the model's parameters on each rank.

    Options that use all gradients at once, such as max_grad_norm, see only the rank's own: clip
    with torch.nn.utils.clip_grad_norm_ before the step, or use RowSharded. Its checkpoints must be
    consolidated.

    Args:
        model: what `zero1` returned.
        optimizer: a class of torchweld.optim or torch.optim.
        settings: arguments of the optimizer.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    # Parameters are views of buckets, so that a rank's parameters are sent in one broadcast.
    settings = {"parameters_as_bucket_view": True, **settings}
    group = model.process_group
    return ZeroRedundancyOptimizer(trained, optimizer, process_group=group, **settings)


class RowSharded(torch.optim.Optimizer):
    """An optimizer under DDP that steps some rows of each parameter on each rank, and gathers them.

    The optimizer's parameters are DTensors whose local parts are views of the model's memory. So
    its states are sharded DTensors: LAMB and max_grad_norm take norms over whole tensors, 8-bit
    states do not depend on the number of ranks, and torch's distributed checkpoints can reshard
    them.

    Its groups, states, defaults and hooks belong to `optimizer`, which `make` returned.
    So learning-rate schedulers work with either.

    Args:
        parameters: the model's parameters, the same on all ranks of the mesh; DDP averages their
            gradients.
        make: makes an optimizer of torchweld.optim from DTensors.
        mesh: a mesh of one dimension.
    """

    # GradScaler then calls `step`, which says how to pass a scaler.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
        mesh: DeviceMesh,
    ) -> None:
        parameters = [*parameters]
        for p in parameters:
            if not isinstance(p, torch.Tensor):
                accepted = (
                    "parameters; make groups in `make`, of the DTensors that it gets in order"
                )
                actual = f"with a {type(p).__name__}"
                raise ArgumentError("RowSharded", "parameters", actual, accepted)
        self._parameters = [p for p in parameters if p.requires_grad]
        self._mesh, self._place = mesh, (mesh.size(), mesh.get_local_rank())
        self._shards = [torch.nn.Parameter(self._make_shard(p.detach())) for p in self._parameters]
        # Not torch's __init__: all it makes is the inner optimizer's, by __getattr__.
        self.optimizer = make(self._shards)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not made yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        raise ArgumentError("RowSharded", "self", "copied or pickled", "its state_dict()")

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's rows, as DTensors."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model as a group; the optimizer gets their rows."""
        added = param_group["params"]
        added = [added] if isinstance(added, torch.Tensor) else [*added]
        trained = [p for p in added if p.requires_grad]
        shards = [torch.nn.Parameter(self._make_shard(p.detach())) for p in trained]
        self.optimizer.add_param_group(param_group | {"params": shards})
        self._parameters += trained
        self._shards += shards

    def _make_shard(self, whole: torch.Tensor) -> DTensor:
        """Make a DTensor of this rank's rows of a replicated tensor, sharing its memory."""
        rows, whole = _slice_rows(whole, *self._place), _view_at_least_1d(whole)
        return DTensor.from_local(
            *(rows, self._mesh, [Shard(0)]),
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """Step the optimizer, through the scaler if there is one, and all-gather once per dtype.

        `closure`, if given, computes the gradients and returns the loss.
        """
        found = [vars(self).pop(name, None) for name in ("grad_scale", "found_inf")]
        if found != [None, None] or isinstance(closure, torch.amp.GradScaler):
            accepted = "step(scaler=scaler): gradients of rows exist only in the step"
            raise ArgumentError("RowSharded.step", "scaler", "not named", accepted)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for whole, shard in zip(self._parameters, self._shards, strict=True):
            shard.grad = None if whole.grad is None else self._make_shard(whole.grad)
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
        for dtype in dict.fromkeys(whole.dtype for whole in self._parameters):
            self._gather([whole for whole in self._parameters if whole.dtype == dtype])
        return loss

    def _gather(self, wholes: list[torch.nn.Parameter]) -> None:
        count, rank = self._place
        # The first rank has the most rows.
        sizes = [_slice_rows(whole, count, 0).numel() for whole in wholes]
        received = wholes[0].new_zeros(count, sum(sizes))
        sent = received[rank]  # in place: one buffer of the parameters' size, not more
        for piece, whole in zip(sent.split(sizes), wholes, strict=True):
            rows = _slice_rows(whole, count, rank).reshape(-1)
            piece[: rows.numel()].copy_(rows)
        dist.all_gather_into_tensor(received.view(-1), sent, group=self._mesh.get_group())
        for other, row in enumerate(received):
            for piece, whole in zip(row.split(sizes), wholes, strict=True) if other != rank else ():
                rows = _slice_rows(whole, count, other)
                rows.copy_(piece[: rows.numel()].view(rows.shape))

    def name_shards(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make a module that has this rank's rows under the names of the model's parameters."""
        shards = dict(zip(map(id, self._parameters), self._shards, strict=True))
        root = torch.nn.Module()
        for name, p in model.named_parameters():
            *path, own = unwrapped(name).split(".")
            if id(p) in shards:
                add_path(root, path).register_parameter(own, shards[id(p)])
        return root

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the model's parameters; DDP's buckets keep their memory."""
        for p in (*self._parameters, *self._shards):
            if p.grad is not None and not set_to_none:
                p.grad.zero_()
            else:
                p.grad = None


# What wrappers add to names: DDP, activation checkpoints and torch.compile.
_WRAPPERS = ("module", "_checkpoint_wrapped_module", "_orig_mod")


def unwrapped(name: str) -> str:
    """A parameter's name in the user's model."""
    return ".".join(key for key in name.split(".") if key not in _WRAPPERS)


def _view_at_least_1d(t: torch.Tensor) -> torch.Tensor:
    return t.view(1) if t.ndim == 0 else t


def _slice_rows(whole: torch.Tensor, count: int, rank: int) -> torch.Tensor:
    """Take a rank's rows, divided as in DTensor: the last ranks may have fewer rows, or none."""
    whole = _view_at_least_1d(whole)
    each = -(-whole.shape[0] // count)
    return whole[rank * each : (rank + 1) * each]


def zero2(model: torch.nn.Module, mesh: DeviceMesh, **settings: Any) -> FSDPModule:
    """Apply FSDP2 to each layer and the rest of the model, sharding states and gradients.

    Parameters are sharded between steps. They stay gathered from the forward to the backward pass,
    which saves the second all-gather.

    Args:
        settings: arguments of torch's fully_shard, such as mp_policy.
    """
    return _shard_layers(model, mesh, reshard=False, **settings)


def zero3(model: torch.nn.Module, mesh: DeviceMesh, **settings: Any) -> FSDPModule:
    """Like zero2, but a layer's parameters are gathered only while it runs."""
    return _shard_layers(model, mesh, reshard=True, **settings)


def _shard_layers(model: Any, mesh: DeviceMesh, reshard: bool, **settings: Any) -> FSDPModule:
    # FSDP2 cannot reduce gradients without elements. These parameters stay plain tensors.
    empty = {p for p in model.parameters() if p.numel() == 0}
    if empty:
        settings["ignored_params"] = {*settings.get("ignored_params", ()), *empty}
    for block in find_blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, **settings)
        _gather_in_forward(block)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshard, **settings)


def _gather_in_forward(block: torch.nn.Module) -> None:
    """Gather parameters also for `block.forward(...)`, as SqueezeBERT calls its layers.

    fully_shard gathers them in hooks, which torch runs only for `block(...)`.
    """
    forward, called = block.forward, [False]

    def note_call(*_: Any) -> None:
        called[0] = True

    def run(*args: Any, **kwargs: Any) -> Any:
        through_hooks, called[0] = called[0], False
        return forward(*args, **kwargs) if through_hooks else block(*args, **kwargs)

    block.register_forward_pre_hook(note_call)
    block.forward = run  # type: ignore[method-assign]
