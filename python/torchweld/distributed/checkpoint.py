"""Checkpoints that any strategy and any number of processes can resume from.

A checkpoint has the entries of torch's flat form, which names them by the parameters' names in the
whole model: the stages of a pipeline share those.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    _get_fqns,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.optim import ZeroRedundancyOptimizer

from torchweld.distributed.data.zero import RowSharded
from torchweld.distributed.one_for_all import fail_together
from torchweld.distributed.saves import check_folder, read, read_whole, write
from torchweld.errors import ArgumentError
from torchweld.optim._codecs import STEP
from torchweld.optim._shards import local_part, shard_like

_LOAD = "checkpoint.load"
# What the flat form has of a parameter: the entries of its state, and the settings of its group.
_STATE, _SETTINGS = "state", "param_groups"
Entries = dict[str, Any]


def save(folder: str | Path, model: Any, optimizer: Any, step: int = 0) -> None:
    """Write this process's part by names and whole shapes, using torch.distributed.checkpoint.

    A checkpoint that is in the folder already is kept until this one is complete. So the folder
    needs room for two. The model and the optimizer do not change.

    Args:
        folder: a folder that all processes can access.
        model: a model under DDP, FSDP2 or tensor parallelism, or a pipeline's stage that uses the
            names of the whole model.
        optimizer: its optimizer, a ZeroRedundancyOptimizer or a RowSharded.
        step: the number of steps taken, the same on all processes.
    """
    folder = check_folder("save", folder)
    named = _Named("checkpoint.save", model, _make_unsharded(optimizer, filled=True))
    content = {"model": get_model_state_dict(model), "optimizer": named.flatten(), "step": step}
    write(folder, content, step, {name: named.describe(p) for name, p in named.params.items()})


def load(folder: str | Path, model: Any, optimizer: Any) -> int:
    """Load a checkpoint that `save` wrote under any strategy; return the number of steps taken.

    All files are read, and found unchanged and of this model, this optimizer and its options,
    before anything changes. The settings of groups, such as lr, are the checkpoint's.
    """
    folder = check_folder("load", folder)
    entries, optimizers = read_whole(folder)
    whole = _make_unsharded(optimizer, filled=False)
    of_model = get_model_state_dict(model)
    with fail_together(_LOAD):
        named = _Named(_LOAD, model, whole)
        named.check_optimizers(folder, optimizers)
        _check_model(folder, of_model, entries)
        settings = _make_settings(entries, named)
    content: Entries = {"step": 0} | _without_empty(settings)
    read(folder, content)
    with fail_together(_LOAD):
        groups = named.find_groups(settings)
        states = named.make_states(folder, entries, groups)
    flat = {
        f"{_STATE}.{name}.{entry}": value
        for name, state in states.items()
        for entry, value in state.items()
    }
    read(folder, {"model": of_model} | _without_empty(flat))
    set_model_state_dict(model, of_model)  # in place: RowSharded's rows are views of it
    named.load(groups, states, flat)
    if whole is not optimizer:
        optimizer.load_state_dict(whole.state_dict())
    return int(content["step"])


class _Named:
    """An optimizer whose parameters have the model's names."""

    def __init__(self, function: str, model: Any, optimizer: Any) -> None:
        if isinstance(optimizer, RowSharded):  # its parameters are DTensors of rows
            model, optimizer = optimizer.name_shards(model), optimizer.optimizer
        self.optimizer = optimizer
        known = {p: next(iter(_get_fqns(model, name))) for name, p in model.named_parameters()}
        self.groups: list[dict[str, torch.Tensor]] = []
        for group in optimizer.param_groups:
            if any(p not in known for p in group["params"]):
                accepted = "one of the model's parameters only"
                raise ArgumentError(function, "optimizer", "of others too", accepted)
            self.groups.append({known[p]: p for p in group["params"]})
        self.params = {name: p for group in self.groups for name, p in group.items()}

    def describe(self, p: torch.Tensor) -> str:
        """The optimizer, and the options that the state of p depends on."""
        if hasattr(self.optimizer, "describe"):
            return self.optimizer.describe(p)
        return type(self.optimizer).__name__

    def flatten(self) -> Entries:
        """The entries of all states, and the settings of each parameter's group."""
        # 1-bit optimizers have entries of their own on each rank.
        get = getattr(self.optimizer, "whole_state_dict", self.optimizer.state_dict)
        saved = get()
        flat: Entries = {}
        for names, of_group in zip(self.groups, saved["param_groups"], strict=True):
            settings = {key: value for key, value in of_group.items() if key != "params"}
            for name, key in zip(names, of_group["params"], strict=True):
                state = saved["state"].get(key, {})
                flat |= {f"{_STATE}.{name}.{entry}": value for entry, value in state.items()}
                flat |= {f"{_SETTINGS}.{name}.{entry}": v for entry, v in settings.items()}
        return flat

    def check_optimizers(self, folder: Path, optimizers: dict[str, str]) -> None:
        """Check that this optimizer wrote the checkpoint, with the same options."""
        for name, p in self.params.items():
            own, theirs = self.describe(p), optimizers.get(name)
            if theirs is not None and own != theirs:
                accepted = f"{theirs}, which wrote {folder}"
                raise ArgumentError(_LOAD, "optimizer", f"{own} for {name}", accepted)

    def find_groups(self, settings: Entries) -> list[Entries]:
        """The saved settings of each group; a group without parameters keeps its own."""
        of_params: dict[str, Entries] = {}
        for key, value in settings.items():
            name, _, entry = key.removeprefix(f"{_SETTINGS}.").rpartition(".")
            of_params.setdefault(name, {})[entry] = value
        groups = []
        for names, own in zip(self.groups, self.optimizer.param_groups, strict=True):
            found = [of_params.get(name, {}) for name in names]
            for name, of_param in zip(names, found, strict=True):
                if not of_param:
                    raise ArgumentError(_LOAD, "optimizer", f"with {name}", "of saved parameters")
                if of_param != found[0]:
                    first, accepted = next(iter(names)), "the same settings of both"
                    actual = f"with {name} in the group of {first}, which had others"
                    raise ArgumentError(_LOAD, "optimizer", actual, accepted)
            groups.append(found[0] if found else {k: v for k, v in own.items() if k != "params"})
        return groups

    def make_states(
        self, folder: Path, entries: Entries, groups: list[Entries]
    ) -> dict[str, Entries]:
        """Make tensors for all saved states, sharded like the parameters, to read them into."""
        of_params: dict[str, Entries] = {}
        for key, known in entries.items():
            if key.startswith(f"optimizer.{_STATE}."):
                name, _, entry = key.removeprefix(f"optimizer.{_STATE}.").rpartition(".")
                of_params.setdefault(name, {})[entry] = known
        found = {}
        for names, group in zip(self.groups, groups, strict=True):
            for name, p in names.items():
                if saved := of_params.get(name):
                    found[name] = self._make_state(folder, name, p, saved, group)
        return found

    def _make_state(
        self, folder: Path, name: str, p: torch.Tensor, saved: Entries, group: Entries
    ) -> Entries:
        sizes = {e: m.size for e, m in saved.items() if isinstance(m, TensorStorageMetadata)}
        new: Entries = {}
        if hasattr(self.optimizer, "make_state"):
            new = self.optimizer.make_state(group, p)
            fits = all(new[entry].shape == sizes[entry] for entry in new.keys() & sizes.keys())
            lacks = new.keys() - saved.keys() - {STEP}
            more = sizes.keys() - new.keys() - self.optimizer.extra_entries
            if lacks or more or not fits:
                actual = f"{self.describe(p)}, whose state of {name} has {_list_sizes(new)}"
                accepted = f"the one that wrote {folder}, with {_list_sizes(saved)}"
                raise ArgumentError(_LOAD, "optimizer", actual, accepted)
        state: Entries = dict.fromkeys(saved)
        for entry, size in sizes.items():
            dtype, part = saved[entry].properties.dtype, local_part(p.detach())
            if entry in new:
                state[entry] = new[entry].to(dtype)
            elif size == p.shape:
                state[entry] = shard_like(p, torch.empty_like(part, dtype=dtype))
            else:
                state[entry] = torch.empty(size, dtype=dtype, device=part.device if size else "cpu")
        return state

    def load(self, groups: list[Entries], states: dict[str, Entries], flat: Entries) -> None:
        """Load these settings and states; `flat` has the values of states that were read."""
        numbers = {name: number for number, name in enumerate(self.params)}
        by_number = {
            numbers[name]: {entry: flat[f"{_STATE}.{name}.{entry}"] for entry in state}
            for name, state in states.items()
        }
        listed = [
            group | {"params": [numbers[name] for name in names]}
            for group, names in zip(groups, self.groups, strict=True)
        ]
        self.optimizer.load_state_dict({"state": by_number, "param_groups": listed})


def _check_model(folder: Path, of_model: Entries, entries: Entries) -> None:
    """Check that the checkpoint has all entries of a model, of these sizes."""
    for name, value in of_model.items():
        known = entries.get(f"model.{name}")
        sizes = [list(t.size()) for t in (value,) if isinstance(t, torch.Tensor)]
        if known is not None and sizes and list(getattr(known, "size", ())) == sizes[0]:
            continue
        if known is None or sizes:
            actual = f"one with {name}" + (f" of shape {sizes[0]}" if sizes else "")
            has = "no such entry" if known is None else f"one of shape {list(known.size)}"
            raise ArgumentError(_LOAD, "model", actual, f"the one saved in {folder}, with {has}")


def _make_settings(entries: Entries, named: _Named) -> Entries:
    """Make the entries to read the saved settings of groups into."""
    settings: Entries = {}
    for key, known in entries.items():
        kind, _, entry = key.removeprefix("optimizer.").partition(".")
        if kind != _SETTINGS or entry.rpartition(".")[0] not in named.params:
            continue
        is_tensor = isinstance(known, TensorStorageMetadata)
        value = torch.empty(known.size, dtype=known.properties.dtype) if is_tensor else None
        settings[f"{_SETTINGS}.{entry}"] = value
    return settings


def _without_empty(of_optimizer: Entries) -> Entries:
    """The entries to read; torch would look for a value in the place of an empty mapping."""
    return {"optimizer": of_optimizer} if of_optimizer else {}


def _list_sizes(entries: Entries) -> str:
    sizes = {name: getattr(t, "size", None) for name, t in entries.items()}
    shown = {name: list(size() if callable(size) else size or ()) for name, size in sizes.items()}
    return ", ".join(f"{name} {shape}" for name, shape in sorted(shown.items()))


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
