"""The matrix as data: its cells, and the bounds and traffic expected of each."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import torchweld
from stack import DTYPES, MICROBATCHES, MODELS, ROWS, STRATEGIES, Run, one_process

# Two runs with independent rounding errors differ by sqrt(2) times the error of either. The exact
# run is one process in float64. The largest difference of an element needs a larger bound than the
# mean. Of the losses of a step, five standard deviations are accepted.
RMS, MOST, LOSS = 2.0, 4.0, 5 * 2**0.5


class Cell(NamedTuple):
    """A model, a strategy and a dtype."""

    strategy: str
    model: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.strategy}, {self.model}, {self.dtype}"


ALL = [Cell(s, m, d) for s in STRATEGIES for m in MODELS for d in DTYPES]


def covering() -> list[Cell]:
    """Cells for CI: each strategy once, and each model with each dtype."""
    kinds = [(m, d) for d in DTYPES for m in MODELS]
    names = [name for name, strategy in STRATEGIES.items() if strategy.in_ci]
    return [Cell(name, *kinds[i % len(kinds)]) for i, name in enumerate(names)]


# --- The run of one process -----------------------------------------------------------------------


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@functools.cache
def reference(model: str, dtype: str) -> str:
    """A file with the run of one process and the exact run."""
    path = str(Path(_folder().name) / f"{model}-{dtype}.pt")
    torch.save([asdict(_run(model, kind)) for kind in (DTYPES[dtype], torch.float64)], path)
    return path


@functools.cache
def _run(model: str, dtype: torch.dtype) -> Run:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the other processes
    try:
        with torchweld.use_backend("cpu"):
            return one_process(model, dtype)
    finally:
        torch.set_num_threads(threads)


# --- What a step sends ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """The bytes of a process's parameters, and of a microbatch's stream and logits."""

    model: str
    parameters: int
    count: int
    stream: int
    # The stream and the logits as linear layers compute them: in 16 bits under autocast.
    computed: int
    logits: int
    layers: int
    norms: int  # parameters of norms inside blocks
    whole: int  # parameters that tensor parallelism does not shard
    # Parameters whose gradients kernels sum over devices, and their bytes on one of two
    # tensor-parallel devices.
    summed: int
    summed_bytes: int
    biases: int  # fc1's


Sent = dict[str, tuple[int, int]]  # kind to calls and bytes
_m = MICROBATCHES


def _both(some: Sent, more: Sent) -> Sent:
    """The sum of what two strategies send."""
    total = dict(some)
    for kind, (calls, size) in more.items():
        before = total.get(kind, (0, 0))
        total[kind] = (before[0] + calls, before[1] + size)
    return total


def _ddp(s: Sizes) -> Sent:
    return {"all-reduce": (1, s.parameters)}


def _zero1(s: Sizes) -> Sent:
    return {**_ddp(s), "broadcast": (2, s.parameters)}  # one from each process


def _sharded(times: int) -> Callable[[Sizes], Sent]:
    """Each block and the rest are gathered `times` times, and gradients reduce-scattered once."""

    def sent(s: Sizes) -> Sent:
        groups = s.layers + 1
        return {
            "all-gather": (times * groups, times * s.parameters),
            "reduce-scatter": (groups, s.parameters),
        }

    return sent


def _tensor(s: Sizes, microbatches: int = _m) -> Sent:
    """Two all-reduces each way per block, plus the embedding's, the head's and the logits'.

    The forward ones sum linear layers' results, the backward ones gradients of the stream.
    """
    reduces = 4 * s.layers + 2
    size = (2 * s.layers + 2) * s.stream + 2 * s.layers * s.computed
    n = microbatches
    return {"all-reduce": (n * reduces, n * size), "all-gather": (n, n * s.logits)}


def _sequence(s: Sizes) -> Sent:
    """One all-reduce a step for the gradients of all norms."""
    return _both(_shared_sequence(s), {"all-reduce": (1, s.norms)})


def _shared_sequence(s: Sizes, microbatches: int = _m, first_stage: bool = False) -> Sent:
    """An all-gather and a reduce-scatter replace each all-reduce.

    The first of two stages has the embedding but no head, and gathers the stream that it sends on.
    """
    n, halves, ends = microbatches, 2 * s.layers, 1 if first_stage else 2
    logits = (0, 0) if first_stage else (1, s.logits)
    inside = halves * (s.stream + s.computed)
    return {
        "all-reduce": (n * ends, n * ends * s.stream),
        "all-gather": (
            n * (2 * halves + 2 + logits[0]),
            n * (inside + 2 * s.stream + logits[1]),
        ),
        "reduce-scatter": (n * 2 * halves, n * inside),
    }


def _cut(s: Sizes) -> Sizes:
    """The sizes on one of two tensor-parallel devices."""
    return replace(s, parameters=(s.parameters + s.whole) // 2)


def _under_fsdp(s: Sizes, first_stage: bool = False) -> Sent:
    """Half of the microbatches. Kernels sum the gradient of each norm for each of them."""
    n = _m // 2
    norms = {"all-reduce": (n * 4 * s.layers, n * s.norms)}
    return _both(_shared_sequence(s, n, first_stage), norms)


def _sharded_tensor(s: Sizes) -> Sent:
    """Parameters are gathered twice for each microbatch."""
    return _both(_under_fsdp(s), _sharded(_m)(_cut(s)))


def _three_dimensions(s: Sizes) -> Sent:
    """The first stage's traffic. Parameters stay gathered after its first microbatch."""
    inside = _both(_under_fsdp(s, first_stage=True), _sharded(1)(_cut(s)))
    return {**inside, "send": (_m // 2, _m // 2 * s.stream)}


def _ring(s: Sizes, microbatches: int = _m) -> Sent:
    """One all-reduce a step for all gradients; keys and values, once each way, and their gradients.

    In a causal sequence of two slices only the first slice is sent on, and its gradients are sent
    back.
    """
    sends = microbatches * s.layers * (2 if MODELS[s.model].causal else 3)  # from the first process
    return {
        "all-reduce": (1, s.parameters),
        "send": (sends, sends * s.computed),  # halves of keys and of values
    }


def _halved(s: Sizes) -> Sizes:
    """The sizes of half of every sequence."""
    return replace(s, stream=s.stream // 2, computed=s.computed // 2, logits=s.logits // 2)


def _tensor_ring(s: Sizes) -> Sent:
    """Half of the stream and of the heads; gradients of a device's part summed along the ring.

    Autocast casts fc1's bias, and the cast's gradient is summed at once, in each microbatch.
    """
    here = _halved(s)
    sent = _both(_tensor(here), _ring(_cut(here)))
    if s.computed == s.stream:
        return sent
    return _both(sent, {"all-reduce": (_m * s.layers, (_m - 1) * s.biases // 2)})


def _sharded_tensor_ring(s: Sizes) -> Sent:
    """Half of the microbatches; parameters are gathered twice for each.

    Kernels sum the gradients of norms and of fc1's bias along the ring, for each microbatch. FSDP2
    has the others summed once.
    """
    n = _m // 2
    here, cut = _halved(s), _cut(s)
    sums = s.count + (n - 1) * s.summed
    size = cut.parameters + (n - 1) * s.summed_bytes
    ring = {"all-reduce": (sums, size), "send": _ring(_cut(here), n)["send"]}
    return _both(_both(_tensor(here, n), ring), _sharded(_m)(cut))


def _pipeline(boundaries: int) -> Callable[[Sizes], Sent]:
    """Streams or their gradients, over the given number of this process's stage boundaries."""
    return lambda s: {"send": (_m * boundaries, _m * boundaries * s.stream)}


def _deepspeed(reductions: int) -> Callable[[Sizes], Sent]:
    """Gradients reduced `reductions` times, an overflow flag, and the parameters after the step.

    ZeRO-2 reduces for every microbatch of a process, ZeRO-1 only for the last.
    """
    return lambda s: {
        "all-reduce": (reductions + 1, reductions * s.parameters + _FLAG),
        "all-gather": (1, s.parameters),
    }


def _deepspeed3(s: Sizes) -> Sent:
    """Gradients reduce-scattered for each microbatch, and an overflow flag in float64.

    Parameters as small as these stay whole between steps, and are gathered after a step.
    """
    times = _m // 2
    return {
        "reduce-scatter": (times, times * s.parameters),
        "all-reduce": (1, 2 * _FLAG),
        "all-gather": (s.count, s.parameters),
    }


_FLAG = 4

TEXTBOOK: dict[str, Callable[[Sizes], Sent]] = {
    "DDP": _ddp,
    "ZeRO-1": _zero1,
    "ZeRO-2 (FSDP2)": _sharded(_m // 2),
    "ZeRO-3 (FSDP2)": _sharded(_m),
    "DDP, compiled": _ddp,
    "ZeRO-3 (FSDP2), compiled": _sharded(_m),
    "TP": _tensor,
    "TP + SP": _sequence,
    "TP, compiled": _tensor,
    "TP + SP, compiled": _sequence,
    "FSDP2 x TP + SP": _sharded_tensor,
    "FSDP2 x TP + SP x PP": _three_dimensions,
    "ring SP": _ring,
    "TP x ring SP": _tensor_ring,
    "FSDP2 x TP x ring SP": _sharded_tensor_ring,
    "PP GPipe": _pipeline(1),
    "PP 1F1B": _pipeline(1),
    "PP interleaved 1F1B": _pipeline(3),
    "PP ZBV": _pipeline(2),
    "PP DualPipeV": _pipeline(2),
    "DeepSpeed ZeRO-1": _deepspeed(1),
    "DeepSpeed ZeRO-2": _deepspeed(_m // 2),
    "DeepSpeed ZeRO-3": _deepspeed3,
}


def sizes_of(cell: Cell, parameters: dict[str, torch.Tensor]) -> Sizes:
    """The sizes for a process that trains these parameters."""
    s, width = MODELS[cell.model], DTYPES[cell.dtype].itemsize
    size = {name: 4 * p.numel() for name, p in parameters.items()}
    uncut = ("norm", "o_proj.bias", "fc2.bias", "place")
    norms = [n for name, n in size.items() if "norm" in name]
    biases = [n for name, n in size.items() if "fc1.bias" in name]
    return Sizes(
        model=cell.model,
        parameters=sum(size.values()),
        count=len(size),
        stream=4 * ROWS * s.length * s.width,
        computed=width * ROWS * s.length * s.width,
        logits=width * ROWS * s.length * s.vocabulary,
        layers=len({name.split(".")[1] for name in size if name.startswith("blocks.")}),
        norms=sum(n for name, n in size.items() if ".norm" in name),
        whole=sum(n for name, n in size.items() if any(part in name for part in uncut)),
        summed=len(norms) + len(biases),
        summed_bytes=sum(norms) + sum(biases) // 2,
        biases=sum(biases),
    )


# --- A cell, in one of its processes --------------------------------------------------------------


def differences(a: Any, b: Any, names: Any) -> torch.Tensor:
    """The differences of all elements of the named parameters in two runs."""
    found = [(a["parameters"][n].double() - b["parameters"][n].double()).flatten() for n in names]
    return torch.cat(found)


def _loss_unit(one: Any, exact: Any) -> torch.Tensor:
    """The rounding of a step's loss, from the independent roundings of all microbatches."""
    losses = [one["of_microbatches"], exact["of_microbatches"]]
    errors = torch.tensor(losses, dtype=torch.float64).diff(dim=0)
    return errors.square().mean().sqrt() / MICROBATCHES**0.5


def run(rank: int, cell: Cell, path: str, results: str | None) -> None:
    """Run a cell and compare it with one process."""
    strategy = STRATEGIES[cell.strategy]
    hold(rank, cell, strategy.run(cell.model, DTYPES[cell.dtype]), path, results)


def hold(rank: int, cell: Cell, made: Run, path: str, results: str | None) -> None:
    """Compare a run with one process's. Rank 0 writes the result."""
    found = asdict(made)
    one, exact = torch.load(path)
    names = found["parameters"].keys()
    off, unit = differences(found, one, names), differences(one, exact, names)
    rms, most = (off.square().mean() / unit.square().mean()).sqrt(), off.abs().max()
    losses = torch.tensor([found["losses"], one["losses"]], dtype=torch.float64)
    loss = (losses[0] - losses[1]).abs().max() / _loss_unit(one, exact)
    if rank == 0 and results is not None:
        row = {"rms": rms.item(), "bitwise": not off.any().item(), "loss": loss.item()}
        with open(results, "a") as file:
            file.write(json.dumps({**cell._asdict(), **row, "sent": found["bytes"]}) + "\n")
    assert rms <= RMS, f"{cell}: parameters differ by {rms:.2f} times their rounding"
    assert most <= MOST * unit.abs().max(), f"{cell}: a parameter differs by {most:.2e}"
    assert loss <= LOSS, f"{cell}: losses differ by {loss:.2f} times their rounding"
    # A stage's input is a leaf, so autocast casts it once for all uses and sums its gradients in 16
    # bits. Inside a model it does not.
    same_order = cell.strategy in STRATEGIES and STRATEGIES[cell.strategy].same_order
    if same_order and cell.dtype == "fp32":
        assert not off.any(), f"{cell}: not bitwise equal, {most:.2e}"
    if rank == 0:
        expected = TEXTBOOK[cell.strategy](sizes_of(cell, found["parameters"]))
        sent = {kind: (calls, found["bytes"][kind]) for kind, calls in found["calls"].items()}
        assert sent == expected, f"{cell}: calls and bytes {sent}, expected {expected}"


def results_file() -> str | None:
    """The file for `make stack`'s results."""
    return os.environ.get("TORCHWELD_STACK")
