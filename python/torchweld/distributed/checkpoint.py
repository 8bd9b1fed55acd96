"""Checkpoints that any strategy and any number of processes can resume from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.optim import ZeroRedundancyOptimizer

# Entries keyed by the names of parameters, common to the stages of a pipeline.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def save(folder: str | Path, model: Any, optimizer: Any, step: int = 0) -> None:
    """Write this process's part by names and whole shapes, with torch.distributed.checkpoint.

    Args:
        folder: a folder that all processes see.
        model: a model under DDP, FSDP2 or tensor parallelism, or a pipeline's stage that uses the
            names of the whole model.
        optimizer: its optimizer, or ZeroRedundancyOptimizer around one.
        step: how many steps were taken.
    """
    parameters, states = get_state_dict(model, _with_all(optimizer, filled=True), options=_FLAT)
    content = {"model": parameters, "optimizer": states, "step": step}
    dcp.save(content, checkpoint_id=folder)


def load(folder: str | Path, model: Any, optimizer: Any) -> int:
    """Read what `save` wrote with any strategy; return how many steps were taken."""
    whole = _with_all(optimizer, filled=False)
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


def _with_all(optimizer: Any, filled: bool) -> torch.optim.Optimizer:
    """The optimizer; for one that has a part of the states, one with all of them."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer  # type: ignore[no-any-return]
    inner: Any = optimizer
    groups = [dict(group) for group in inner.param_groups]  # with their own settings
    made = inner._optim_constructor(groups, **inner._optim_defaults)
    if filled:
        group = optimizer.process_group
        for rank in range(dist.get_world_size(group)):  # each rank has the states only in its turn
            optimizer.consolidate_state_dict(to=rank)
            if rank == dist.get_rank(group):
                made.load_state_dict(optimizer.state_dict())
    return made  # type: ignore[no-any-return]
