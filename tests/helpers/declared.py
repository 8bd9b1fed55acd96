"""Every declaration of parallelize(), as data, and what one of them computes."""

from __future__ import annotations

import functools
import itertools
import json
import math
import tempfile
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import selection
from comparing import whole_of
from torchweld.distributed import Parallel, Training, parallelize
from torchweld.errors import ArgumentError
from transformer import Settings, Transformer, compute_loss, make_batch

SETTINGS = Settings(vocabulary=64, length=32, width=32, heads=4, layers=4, dropout=0.2)
MICROBATCHES, ROWS, STEPS = 8 if selection.WHOLE else 4, 1, 2
MOST = 8  # processes

_PIPELINES: dict[str, Any] = {
    "": 1,
    **{f"PP {s}": {"size": 2, "schedule": s} for s in ("gpipe", "1f1b", "zbv")},
}
_TENSORS: dict[str, Any] = {"": 1, "TP": 2, "TP + SP": {"size": 2, "sequence": True}}
_RINGS: dict[str, Any] = {"": 1, "ring": 2}
# Replicas of a kind of data parallelism.
_DATA: dict[str, tuple[int, Any]] = {
    "": (1, "ddp"),
    "DDP": (2, "ddp"),
    "ZeRO-1": (2, "zero1"),
    "ZeRO-2": (2, "zero2"),
    "ZeRO-3": (2, "zero3"),
    "HSDP of ZeRO-2": (4, {"kind": "zero2", "shard": 2}),
    "HSDP of ZeRO-3": (4, {"kind": "zero3", "shard": 2}),
}
_CHECKPOINTS, _OFFLOADS = ("none", "full", "selective"), ("none", "optimizer", "auto")
# Adam divides a gradient by its own size, so a small eps would amplify rounding errors.
_ADAM = {"lr": 3e-3, "eps": 1e-4}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "lion": {"lr": 1e-4},
    "sgd": {"lr": 1e-2},
    "lamb": {"lr": 1e-3, "eps": 1e-4},
    "adafactor": {"lr": 3e-3},
    "adamw8bit": _ADAM,
    "lars": {"lr": 1e-1},
    "muon": {"lr": 1e-2, "ns_dtype": torch.float32},
    "one_bit_adam": _ADAM | {"freeze_step": 10},
    "one_bit_lamb": _ADAM | {"freeze_step": 10},
}


class Declaration(NamedTuple):
    """What is declared, for a number of processes."""

    processes: int
    name: str
    config: dict[str, Any]

    def __str__(self) -> str:
        others = (self.config[key] for key in ("checkpoint", "offload"))
        given = [self.config["optimizer"]["name"], *(o for o in others if o != "none")]
        return f"{self.name or 'one process'}: {', '.join(given)}"


def _accepted(*names: str) -> Iterator[Declaration]:
    """The declarations of one structure that `Parallel` accepts."""
    pipeline, tensor, ring = _PIPELINES[names[0]], _TENSORS[names[1]], _RINGS[names[2]]
    replicas, data = _DATA[names[3]]
    sizes = (pipeline, tensor, ring, replicas)
    count = math.prod(size["size"] if isinstance(size, dict) else size for size in sizes)
    structure = {"pipeline": pipeline, "tensor": tensor, "ring": ring, "data": data}
    name = " x ".join(filter(None, names))
    for checkpoint, offload, kind in itertools.product(_CHECKPOINTS, _OFFLOADS, OPTIMIZERS):
        optimizer = {"name": kind, **OPTIMIZERS[kind]}
        rest = {"checkpoint": checkpoint, "offload": offload, "optimizer": optimizer}
        declaration = Declaration(count, name, structure | rest)
        if count <= MOST and not (offload != "none" and data == "zero1"):
            try:
                Parallel.from_config(declaration.config, count)
            except ArgumentError:
                continue
            yield declaration


def _pairs(declaration: Declaration) -> set[Hashable]:
    values = [f"{key}={value}" for key, value in declaration.config.items()]
    return {*itertools.combinations(values, 2), (declaration.name, "")}


@functools.cache
def cover() -> list[Declaration]:
    """Declarations that hold each structure, and each pair of values that are accepted together."""
    structures = itertools.product(_PIPELINES, _TENSORS, _RINGS, _DATA)
    some = [declaration for names in structures for declaration in _accepted(*names)]
    chosen = selection.cover(some, _pairs)
    return sorted(chosen, key=lambda declaration: declaration.processes)


# --- Runs -----------------------------------------------------------------------------------------


# A softmax does not change if all its scores grow alike, so the gradient of the keys' bias is only
# rounding error. LAMB and Lion make whole steps of it.
_ROUNDING = "k_proj.bias"


class Run(NamedTuple):
    """The norms of the gradients of each step, and the parameters before and after the steps."""

    norms: list[float]
    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]


def start(
    settings: Settings,
    config: Any,
    rows: int = ROWS,
    microbatches: int = MICROBATCHES,
    dtype: torch.dtype = torch.float32,
    **given: Any,
) -> Training:
    """Share a Transformer's training as declared, from the same weights in every run."""
    torch.manual_seed(0)
    example = (torch.zeros((rows, settings.length), dtype=torch.int64),)
    given = {"loss_fn": compute_loss, "example": example, "quiet": True} | given
    model = Transformer(settings).to(dtype)
    return parallelize(model, config, device="cpu", microbatches=microbatches, **given)


def take_step(training: Training, settings: Settings, step: int, rows: int = ROWS) -> list[float]:
    """Take a step; its loss, and the norm of its gradients."""
    batch = [make_batch(settings, rows, 10 * step + number) for number in training.own]
    return [each.item() for each in training.step(batch, step)]


def train(config: dict[str, Any]) -> Run:
    torch.manual_seed(0)
    before = {name: p.detach() for name, p in Transformer(SETTINGS).named_parameters()}
    training = start(SETTINGS, config)
    norms = [take_step(training, SETTINGS, step)[1] for step in range(STEPS)]
    after = {
        name.removeprefix("module.").replace("_checkpoint_wrapped_module.", ""): p.detach()
        for name, p in training.model.named_parameters()
    }
    after = {name: whole_of(p).clone() for name, p in after.items()}
    return Run(norms, before, after)


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for the runs of one process."""
    return tempfile.TemporaryDirectory()


def write_reference(rank: int, config: dict[str, Any], path: str) -> None:
    torch.save(tuple(train(config)), path)


def compare(rank: int, declared: Declaration, path: str, results: str | None) -> None:
    """Hold this process's part of a run to the run of one process."""
    wanted, run = Run(*torch.load(path)), train(declared.config)
    assert run.after.keys() <= wanted.after.keys()
    assert run.after
    names = [name for name in run.after if not name.endswith(_ROUNDING)]
    changed = torch.cat([(wanted.after[n] - wanted.before[n]).flatten() for n in names])
    differs = torch.cat([(run.after[n] - wanted.after[n]).flatten() for n in names])
    off = (differs.norm() / changed.norm()).item()
    # Lion steps by signs, as Adafactor's first steps of vectors do, and a rounding error can change
    # an 8-bit code. Such an element moves by up to a whole step, and few elements do.
    kind = declared.config["optimizer"]["name"]
    coarse = kind in ("adafactor", "adamw8bit", "lion")
    if not kind.startswith("one_bit") or declared.processes == 1:  # its step exchanges gradients
        both = f"norms {run.norms}, of one process {wanted.norms}"
        assert run.norms == pytest.approx(wanted.norms, rel=1e-3 if coarse else 1e-5), both
        assert run.norms[0] == pytest.approx(wanted.norms[0], rel=1e-5), both
    assert off <= (2e-2 if coarse else 1e-3), off
    if rank == 0 and results:
        row = {"declared": declared.name, "given": str(declared).partition(": ")[2]}
        with Path(results).open("a") as file:
            file.write(json.dumps(row | {"processes": declared.processes, "off": off}) + "\n")
