"""Which GEMM with an activation in it serves a class of shapes, if one does.

They are timed once on the GPU at hand, with torch's GEMM and a pass of bias_act among them, so that
what is chosen is never slower than that. What was found is kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchweld.dispatch import cache, clock, proof
from torchweld.version import __version__

# Milliseconds of the GPU's that a class of shapes may take.
_BUDGET = 30.0
# A fused GEMM has to be ahead by more than its time differs from one run to the next.
_AHEAD = 1.02


class Contest(NamedTuple):
    """What is timed for a class of shapes: functions of tensors whose rows belong together.

    `exact` computes what the fused ones do in float64, `trusted` does so in torch's own GEMMs; each
    returns results by name.
    """

    tensors: Sequence[torch.Tensor]
    unfused: Callable[..., Any]
    fused: Mapping[int, Callable[..., proof.Results]]
    exact: Callable[..., proof.Results]
    trusted: Callable[..., proof.Results]
    products_a_row: int


class Timed(NamedTuple):
    """The tile of the fastest fused GEMM, and the milliseconds that it and the unfused one took."""

    tile: int
    ms: float
    unfused_ms: float

    @property
    def chosen(self) -> int | None:
        """None: torch's GEMM and a pass."""
        return self.tile if self.ms * _AHEAD < self.unfused_ms else None

    @property
    def refused(self) -> bool:
        """Whether no fused GEMM was right."""
        return self.ms == math.inf


def kept(device: torch.device, shapes: str, rows: int | None) -> Timed | None:
    """What was found for a class of shapes and a number of rows on this GPU.

    Of any rows: the least favourable.
    """
    found = _all_kept(_conditions(device, kernels().precision()))
    if rows is not None:
        return found.get(_name(shapes, rows))
    alike = [timed for name, timed in found.items() if name.startswith(f"{shapes}, rows")]
    return min(alike, key=lambda timed: timed.unfused_ms / timed.ms, default=None)


def time(device: torch.device, shapes: str, rows: int, contest: Contest) -> Timed | None:
    """Checks and times the contenders, and keeps what was found.

    None where memory did not suffice: that is kept for this process only. It raises nothing.
    """
    conditions, name = _conditions(device, kernels().precision()), _name(shapes, rows)
    if (conditions, name) in _without_memory:
        return None
    try:
        timed = _timed(shapes, contest)
    except Exception as error:  # the call goes on without what was on trial
        if not isinstance(error, torch.OutOfMemoryError):
            proof.refuse(f"the fused GEMM of {shapes}", proof.in_a_line(error))
        _without_memory.add((conditions, name))
        return None
    _all_kept(conditions)[name] = timed
    _keep(conditions, name, timed)
    return timed


# Conditions and names of shapes whose trial found no memory, or failed itself.
_without_memory: set[tuple[str, str]] = set()


def _timed(shapes: str, contest: Contest) -> Timed:
    """The fastest of the fused GEMMs that are right."""
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
    """What is wrong with each of the fused GEMMs, on some of the rows."""
    rows = max(_LEAST_ROWS, min(proof.ROWS, _PRODUCTS // max(contest.products_a_row, 1)))
    given = [proof.some_rows(t, rows) for t in contest.tensors]
    judge = proof.Judge(contest.exact(*given), contest.trusted(*given))
    return {tile: judge.fault_of(partial(one, *given)) for tile, one in contest.fused.items()}


# In float64, of which some GPUs do 64 times fewer a second: a fraction of a second on those.
_PRODUCTS, _LEAST_ROWS = 2**34, 64


def _medians(calls: list[Callable[[], Any]]) -> list[float]:
    """Milliseconds of each on the current stream."""
    return clock.medians(calls, clock.DeviceClock(), _BUDGET)


def _name(shapes: str, rows: int) -> str:
    """Rows are told apart by their number's bits."""
    return f"{shapes}, rows below {1 << rows.bit_length()}"


def kernels() -> Any:
    """The Triton module, which takes a while to import."""
    return importlib.import_module("torchweld.triton_kernels.linear_act")


# --- The cache ------------------------------------------------------------------------------------


def _file() -> Path:
    return cache.folder() / "gemm.json"


@functools.cache
def _conditions(device: torch.device, precision: str) -> str:
    """What makes times comparable: the GPU, the kernels, what compiled them, and their rival."""
    triton = importlib.import_module("triton").__version__
    folder = Path(kernels().__file__).parent
    digest = hashlib.sha256()
    for name in ("linear_act", "act", "chunks", "tensors", "launch"):
        digest.update((folder / f"{name}.py").read_bytes())
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    hashed = digest.hexdigest()[:16]
    ours = f"torchweld {__version__}, {hashed}"
    return f"{gpu}, {ours}, triton {triton}, torch {torch.__version__}, float32 as {precision}"


@functools.cache
def _all_kept(conditions: str) -> dict[str, Timed]:
    found = cache.read(_file()).get(conditions, {})
    return {name: Timed(*values) for name, values in found.items()}


def _keep(conditions: str, name: str, timed: Timed) -> None:
    def add(content: dict[str, Any]) -> None:
        content.setdefault(conditions, {})[name] = list(timed)

    # Where nothing can be written, it is kept for this process only.
    with contextlib.suppress(OSError):
        cache.update(_file(), add)
