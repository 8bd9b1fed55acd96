"""Checkpoints that any strategy and any number of processes can resume from.

A folder has a subfolder for the data of each save, whose name has the step and a unique id, and
`.metadata`, which says where the data of the last finished save is:

    .metadata
    step-200-<id>/__0_0.distcp, __1_0.distcp, ...

`save` writes a new subfolder and replaces `.metadata` once all processes have written their parts.
So an interrupted save leaves the last checkpoint as it was, and the next save first deletes what it
wrote. Each part has the name of its save, and `load` refuses parts that are of different saves.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.optim import ZeroRedundancyOptimizer

from torchweld.distributed.data.zero import RowSharded
from torchweld.distributed.one_for_all import compute_once
from torchweld.errors import ArgumentError

# Entries are keyed by the names of parameters, which the stages of a pipeline share.
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_METADATA = ".metadata"
_NAME = re.compile(r"step-\d+-[0-9a-f]{32}")


def save(folder: str | Path, model: Any, optimizer: Any, step: int = 0) -> None:
    """Write this process's part by names and whole shapes, using torch.distributed.checkpoint.

    A checkpoint that is in the folder already is kept until this one is complete. So the folder
    needs room for two.

    Args:
        folder: a folder that all processes can access.
        model: a model under DDP, FSDP2 or tensor parallelism, or a pipeline's stage that uses the
            names of the whole model.
        optimizer: its optimizer, a ZeroRedundancyOptimizer or a RowSharded.
        step: the number of steps taken, the same on all processes.
    """
    folder = _check_folder("save", folder)
    name = _choose_name(step)
    compute_once("checkpoint.save", lambda: _delete_unfinished(folder))
    content = _get_content(model, *_name_states(model, _make_unsharded(optimizer, filled=True)))
    content |= {"step": step, "part": {str(_rank()): name}}
    dcp.save(content, checkpoint_id=folder / name)
    compute_once("checkpoint.save", lambda: _publish(folder, name))


def load(folder: str | Path, model: Any, optimizer: Any) -> int:
    """Load a checkpoint that `save` wrote under any strategy; return the number of steps taken."""
    folder = _check_folder("load", folder)
    _check_parts(folder)
    whole = _make_unsharded(optimizer, filled=False)
    named, inner = _name_states(model, whole)
    content = _get_content(model, named, inner) | {"step": 0}
    dcp.load(content, checkpoint_id=folder)
    set_model_state_dict(model, content["model"])  # in place: RowSharded's rows are views of it
    states = content["optimizer"]
    set_optimizer_state_dict(named, inner, optim_state_dict=states, options=_FLAT)
    if whole is not optimizer:
        optimizer.load_state_dict(whole.state_dict())
    return int(content["step"])


def _name_states(model: Any, optimizer: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return an optimizer, and a module that has its parameters under the model's names."""
    if isinstance(optimizer, RowSharded):  # states are DTensors of rows
        return optimizer.name_shards(model), optimizer.optimizer
    return model, optimizer


def _get_content(
    model: Any, named: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    states = get_optimizer_state_dict(named, optimizer, options=_FLAT)
    return {"model": get_model_state_dict(model), "optimizer": states}


def _make_unsharded(optimizer: Any, filled: bool) -> Any:
    """Return the optimizer, or one with all states if this one has only a part of them."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer
    inner: Any = optimizer
    groups = [dict(group) for group in inner.param_groups]  # each group keeps its own settings
    whole = inner._optim_constructor(groups, **inner._optim_defaults)
    if filled:
        group = optimizer.process_group
        for rank in range(dist.get_world_size(group)):  # one rank at a time gets the states
            optimizer.consolidate_state_dict(to=rank)
            if rank == dist.get_rank(group):
                whole.load_state_dict(optimizer.state_dict())
    return whole


# --- Saves that are whole or absent ---------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _exchange(value: Any) -> Iterator[Any]:
    """Give the values of all processes, in the order of ranks, without None."""
    values = [value]
    if dist.is_initialized():
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
    return (each for each in values if each is not None)


def _check_folder(function: str, folder: str | Path) -> Path:
    if "://" in str(folder):
        accepted = "a folder of a file system, where a file can be replaced in one step"
        raise ArgumentError(f"checkpoint.{function}", "folder", repr(folder), accepted)
    return Path(folder)


def _choose_name(step: int) -> str:
    """Choose the name of a save, on the first process, and check that all save the same step."""
    names = [*_exchange(f"step-{step}-{uuid.uuid4().hex}")]
    steps = sorted({int(name.split("-")[1]) for name in names})
    if len(steps) > 1:
        actual = f"{', '.join(map(str, steps))} on different processes"
        raise ArgumentError("checkpoint.save", "step", actual, "the same on all")
    return names[0]


def _delete_unfinished(folder: Path) -> None:
    """Delete the data of interrupted saves, as of a full disk: later saves need its room."""
    if folder.is_dir():
        paths = _list_files(folder) if (folder / _METADATA).exists() else ()
        _delete_saves(folder, {relative.split("/")[0] for relative in paths})


def _delete_saves(folder: Path, kept: set[str]) -> None:
    for path in folder.iterdir():
        if _NAME.fullmatch(path.name) and path.name not in kept:
            shutil.rmtree(path)


def _publish(folder: Path, name: str) -> None:
    """Make a finished save the folder's checkpoint in one step, and delete the data of others."""
    metadata, old = _read_metadata(folder / name), set[str]()
    for info in metadata.storage_data.values():
        info.relative_path = f"{name}/{info.relative_path}"
    if (folder / _METADATA).exists():
        old = _list_files(folder)
    new = folder / name / "published"
    with new.open("wb") as file:
        pickle.dump(metadata, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / _METADATA)
    _sync_folder(folder)  # before anything is deleted
    _delete_saves(folder, {name})
    for relative in old:  # data of torch's own saves, which is in the folder itself
        (folder / relative).unlink(missing_ok=True)


def _read_metadata(folder: Path) -> Any:
    return dcp.FileSystemReader(folder).read_metadata()


def _list_files(folder: Path) -> set[str]:
    """The files of a finished save, as paths in the folder."""
    return {info.relative_path for info in _read_metadata(folder).storage_data.values()}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_parts(folder: Path) -> None:
    """Raise an error on all processes unless all parts are there, and are of one save."""
    rank, count = _rank(), dist.get_world_size() if dist.is_initialized() else 1
    _raise_fault(folder, _find_incomplete(folder, rank, count))
    metadata = _read_metadata(folder)
    numbers = [key.split(".")[1] for key in metadata.state_dict_metadata if key[:5] == "part."]
    parts: dict[str, Any] = dict.fromkeys(numbers[rank::count])
    dcp.load({"part": parts}, checkpoint_id=folder)
    saves = {Path(info.relative_path).parent.name for info in metadata.storage_data.values()}
    others = (
        f"whose part {number} is of {name}" for number, name in parts.items() if {name} != saves
    )
    fault = next(others, None)
    _raise_fault(folder, fault and f"{fault}, and others of {', '.join(sorted(saves))}")


def _raise_fault(folder: Path, fault: str | None) -> None:
    if fault := next(_exchange(fault), None):
        accepted = "the folder of a finished and complete save"
        raise ArgumentError("checkpoint.load", "folder", f"{folder}, {fault}", accepted)


def _find_incomplete(folder: Path, rank: int, count: int) -> str | None:
    """Find a file that is missing or cut short among each process's share of them."""
    if not (folder / _METADATA).exists():
        return f"which has no {_METADATA}: no save has finished"
    ends: dict[str, int] = {}
    try:
        for info in _read_metadata(folder).storage_data.values():
            end = info.offset + info.length
            ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
    except Exception as error:  # the others wait to hear of it
        return f"whose {_METADATA} cannot be read ({error})"
    for relative in sorted(ends)[rank::count]:
        path = folder / relative
        size = path.stat().st_size if path.exists() else 0
        if size < ends[relative]:
            return f"whose {relative} has {size} of {ends[relative]} bytes"
    return None
