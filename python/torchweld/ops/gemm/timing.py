"""The choice of an epilogue: which fused GEMM, if any, serves a class of shapes.

The contenders are timed once on the current GPU. One of them is the unfused form, torch's GEMM and
a pass of bias_act, so the choice is never slower than that. The user's cache keeps the result.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchweld.dispatch import cache, clock, proof, verdicts
from torchweld.registry.constant import assume_constant_result
from torchweld.version import __version__

# Limit of the GPU milliseconds for the trial of a class of shapes.
_BUDGET = 30.0
# A fused GEMM must be ahead by more than the variation between runs.
_AHEAD = 1.02


class Contest(NamedTuple):
    """The contenders for a class of shapes, as functions of tensors with the same rows.

    `exact` computes the fused GEMMs' results in float64, and `trusted` with torch's own GEMMs. Both
    return results by name, as the fused GEMMs do.
    """

    tensors: Sequence[torch.Tensor]
    unfused: Callable[..., Any]
    fused: Mapping[int, Callable[..., proof.Results]]
    exact: Callable[..., proof.Results]
    trusted: Callable[..., proof.Results]
    products_a_row: int


class Timed(NamedTuple):
    """The tile of the fastest fused GEMM, and the milliseconds of it and the unfused form."""

    tile: int
    ms: float
    unfused_ms: float

    @property
    def chosen(self) -> int | None:
        """None: torch's GEMM and a pass."""
        return self.tile if self.ms * _AHEAD < self.unfused_ms else None

    @property
    def refused(self) -> bool:
        """Whether no fused GEMM was correct."""
        return self.ms == math.inf


def fastest(x: torch.Tensor, shapes: str, contest: Callable[[], Contest]) -> int | None:
    """The tile that serves a class of shapes, cached or found now; None: the unfused form.

    `shapes` names everything that a timing depends on besides the number of x's rows.
    """
    if torch.compiler.is_compiling():
        return _kept_while_compiling(x.device, shapes)
    timed = _kept(x.device, shapes, rows_of(x))
    if timed is None and _may_time(x):
        timed = _trial(x, shapes, contest)
    return None if timed is None else timed.chosen


def explain(unfused: str, x: torch.Tensor, shapes: str, reason: str | None) -> str:
    """Which form serves a class of shapes, and why; `reason` is why no fused GEMM can."""
    if reason is not None:
        return f"{unfused}: {reason}"
    timed = _kept(x.device, shapes, rows_of(x))
    if timed is None:
        return f"{unfused}: not timed yet, which a call outside of compiled code and graphs does"
    if timed.refused:
        return f"{unfused}: one kernel for all was wrong, or failed, on this GPU"
    ratio = timed.unfused_ms / timed.ms
    if timed.chosen is None:
        return f"{unfused}: one kernel for all was measured at {ratio:.2f}x its speed"
    return f"one kernel for all, measured at {ratio:.2f}x the speed of {unfused}"


def rows_of(x: torch.Tensor) -> int:
    """How many rows a GEMM of x has."""
    return x.shape[:-1].numel()


# --- The trial ------------------------------------------------------------------------------------


def _may_time(x: torch.Tensor) -> bool:
    return (
        verdicts.mode == "time"
        and x.device.type == "cuda"
        and not torch.cuda.is_current_stream_capturing()
    )


def _trial(x: torch.Tensor, shapes: str, contest: Callable[[], Contest]) -> Timed | None:
    """Check and time the contenders, and cache the result. Raises nothing.

    Returns None if the trial itself failed, perhaps for lack of memory; only this process remembers
    that.
    """
    conditions, name = _conditions(x.device, kernels().precision()), _name(shapes, rows_of(x))
    if (conditions, name) in _without_memory:
        return None
    try:
        contenders = contest()
        kind = x.device.type
        with torch.no_grad(), torch.autocast(kind, enabled=False), torch.cuda.device_of(x):
            timed = _timed(shapes, contenders)
    except Exception as error:  # the call continues without the contender
        if not isinstance(error, torch.OutOfMemoryError):
            proof.refuse(f"the fused GEMM of {shapes}", proof.in_a_line(error))
        _without_memory.add((conditions, name))
        return None
    _all_kept(conditions)[name] = timed
    _keep(conditions, name, timed)
    return timed


# Conditions and names of shapes whose trial ran out of memory or failed.
_without_memory: set[tuple[str, str]] = set()


def _timed(shapes: str, contest: Contest) -> Timed:
    """The fastest of the correct fused GEMMs."""
    faults = _faults(contest)
    for tile, reason in faults.items():
        if reason is not None and not reason.startswith("OutOfResources"):
            proof.refuse(f"the fused GEMM of {shapes} (tile {tile})", reason)
    right = [tile for tile, reason in faults.items() if reason is None]
    if not right:
        return Timed(next(iter(faults)), math.inf, 0.0)
    calls = [contest.unfused, *[contest.fused[tile] for tile in right]]
    unfused_ms, *times = _medians([partial(call, *contest.tensors) for call in calls])
    ms, tile = min(zip(times, right, strict=True))
    return Timed(tile, ms, unfused_ms)


def _faults(contest: Contest) -> dict[int, str | None]:
    """The errors of each fused GEMM, checked on some of the rows."""
    rows = max(_LEAST_ROWS, min(proof.ROWS, _PRODUCTS // max(contest.products_a_row, 1)))
    given = [proof.some_rows(t, rows) for t in contest.tensors]
    judge = proof.Judge(contest.exact(*given), contest.trusted(*given))
    return {tile: judge.fault_of(partial(one, *given)) for tile, one in contest.fused.items()}


# Limit of float64 products. GPUs with 1/64 of the rate take a fraction of a second for them.
_PRODUCTS, _LEAST_ROWS = 2**34, 64


def _medians(calls: list[Callable[[], Any]]) -> list[float]:
    """Milliseconds of each call on the current stream."""
    return clock.medians(calls, clock.DeviceClock(), _BUDGET)


def _name(shapes: str, rows: int) -> str:
    """The key of a class of shapes: row counts of equal bit length share one."""
    return f"{shapes}, rows below {1 << rows.bit_length()}"


def kernels() -> Any:
    """The Triton module, imported only when needed since that takes a while."""
    return importlib.import_module("torchweld.triton_kernels.linear_act")


# --- The cache ------------------------------------------------------------------------------------


def _file() -> Path:
    return cache.folder() / "gemm.json"


def _kept(device: torch.device, shapes: str, rows: int | None) -> Timed | None:
    """The result for a class of shapes on this GPU; for any rows, the least favourable one."""
    found = _all_kept(_conditions(device, kernels().precision()))
    if rows is not None:
        return found.get(_name(shapes, rows))
    alike = [timed for name, timed in found.items() if name.startswith(f"{shapes}, rows")]
    return min(alike, key=lambda timed: timed.unfused_ms / timed.ms, default=None)


@assume_constant_result
def _kept_while_compiling(device: torch.device, shapes: str) -> int | None:
    """The cached results, as a constant of the compiled graph."""
    timed = _kept(device, shapes, None)
    return None if timed is None else timed.chosen


@functools.cache
def _conditions(device: torch.device, precision: str) -> str:
    """What makes timings comparable: GPU, kernels, compilers, and the torch they compete with."""
    triton = importlib.import_module("triton").__version__
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    ours = f"torchweld {__version__}, {cache.kernel_hash()}"
    return f"{gpu}, {ours}, triton {triton}, torch {torch.__version__}, float32 as {precision}"


@functools.cache
def _all_kept(conditions: str) -> dict[str, Timed]:
    found = cache.read(_file()).get(conditions, {})
    return {name: Timed(*values) for name, values in found.items()}


def _keep(conditions: str, name: str, timed: Timed) -> None:
    def add(content: dict[str, Any]) -> None:
        content.setdefault(conditions, {})[name] = list(timed)

    # If the file cannot be written, only this process keeps the result.
    with contextlib.suppress(OSError):
        cache.update(_file(), add)
