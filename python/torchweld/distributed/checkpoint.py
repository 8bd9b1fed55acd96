"""Checkpoints that any strategy and any number of processes can resume from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.optim import ZeroRedundancyOptimizer

from torchweld.distributed.zero import RowSharded

# Entries are keyed by the names of parameters, which the stages of a pipeline share.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save(folder: str | Path, model: Any, optimizer: Any, step: int = 0) -> None:
    """Write this process's part by names and whole shapes, using torch.distributed.checkpoint.

    Args:
        folder: a folder that all processes can access.
        model: a model under DDP, FSDP2 or tensor parallelism, or a pipeline's stage that uses the
            names of the whole model.
        optimizer: its optimizer, a ZeroRedundancyOptimizer or a RowSharded.
        step: the number of steps taken.
    """
    if isinstance(optimizer, RowSharded):
        parameters, states = _get_row_sharded(model, optimizer)
    else:
        whole = _make_unsharded(optimizer, filled=True)
        parameters, states = get_state_dict(model, whole, options=_FLAT)
    content = {"model": parameters, "optimizer": states, "step": step}
    dcp.save(content, checkpoint_id=folder)


def load(folder: str | Path, model: Any, optimizer: Any) -> int:
    """Load a checkpoint that `save` wrote under any strategy; return the number of steps taken."""
    if isinstance(optimizer, RowSharded):
        return _load_row_sharded(folder, model, optimizer)
    whole = _make_unsharded(optimizer, filled=False)
    parameters, states = get_state_dict(model, whole, options=_FLAT)
    content = {"model": parameters, "optimizer": states, "step": 0}
    dcp.load(content, checkpoint_id=folder)
    set_state_dict(
        model,
        whole,
        model_state_dict=content["model"],  # type: ignore[arg-type]
        optim_state_dict=content["optimizer"],  # type: ignore[arg-type]
        options=_FLAT,
    )
    if whole is not optimizer:
        optimizer.load_state_dict(whole.state_dict())
    return int(content["step"])  # type: ignore[call-overload,no-any-return]


def _get_row_sharded(model: Any, optimizer: RowSharded) -> tuple[Any, Any]:
    """Return the model's parameters, and states by its names, as DTensors of rows."""
    parameters = get_model_state_dict(model)
    states = get_optimizer_state_dict(
        optimizer.name_shards(model), optimizer.optimizer, options=_FLAT
    )
    return parameters, states


def _load_row_sharded(folder: str | Path, model: Any, optimizer: RowSharded) -> int:
    parameters, states = _get_row_sharded(model, optimizer)
    content: dict[str, Any] = {"model": parameters, "optimizer": states, "step": 0}
    dcp.load(content, checkpoint_id=folder)
    set_model_state_dict(model, content["model"])  # in place: the rows are views of it
    set_optimizer_state_dict(
        optimizer.name_shards(model),
        optimizer.optimizer,
        optim_state_dict=content["optimizer"],
        options=_FLAT,
    )
    return int(content["step"])


def _make_unsharded(optimizer: Any, filled: bool) -> torch.optim.Optimizer:
    """Return the optimizer, or one with all states if this one has only a part of them."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer  # type: ignore[no-any-return]
    inner: Any = optimizer
    groups = [dict(group) for group in inner.param_groups]  # each group keeps its own settings
    whole = inner._optim_constructor(groups, **inner._optim_defaults)
    if filled:
        group = optimizer.process_group
        for rank in range(dist.get_world_size(group)):  # one rank at a time gets the states
            optimizer.consolidate_state_dict(to=rank)
            if rank == dist.get_rank(group):
                whole.load_state_dict(optimizer.state_dict())
    return whole  # type: ignore[no-any-return]
