"""Which GEMM with an activation in it serves a class of shapes, if one does.

They are timed once on the GPU at hand, with torch's GEMM and a pass of bias_act among them, so that
what is chosen is never slower than that. What was found is kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchweld.dispatch import cache
from torchweld.version import __version__

# 0: nothing is timed while a model runs. What was kept earlier serves.
TIMING_VARIABLE = "TORCHWELD_TIMING"
timing = os.environ.get(TIMING_VARIABLE, "1") != "0"

_ROUNDS = 11
# A fused GEMM has to be ahead by more than its time differs from one run to the next.
_AHEAD = 1.02


class Timed(NamedTuple):
    """The tile of the fastest fused GEMM, and the milliseconds that it and the unfused one took."""

    tile: int
    ms: float
    unfused_ms: float

    @property
    def chosen(self) -> int | None:
        """None: torch's GEMM and a pass."""
        return self.tile if self.ms * _AHEAD < self.unfused_ms else None


def kept(device: torch.device, shapes: str, rows: int | None) -> Timed | None:
    """What was found for a class of shapes and a number of rows on this GPU.

    Of any rows: the least favourable.
    """
    found = _all_kept(_conditions(device, kernels().precision()))
    if rows is not None:
        return found.get(_name(shapes, rows))
    alike = [timed for name, timed in found.items() if name.startswith(f"{shapes}, rows")]
    return min(alike, key=lambda timed: timed.unfused_ms / timed.ms, default=None)


def time(
    device: torch.device,
    shapes: str,
    rows: int,
    unfused: Callable[[], Any],
    fused: Mapping[int, Callable[[], Any]],
) -> Timed:
    """Times the contenders, and keeps what was found."""
    unfused_ms, *times = _medians([unfused, *fused.values()])
    ms, tile = min(zip(times, fused, strict=True))
    timed = Timed(tile, ms, unfused_ms)
    conditions, name = _conditions(device, kernels().precision()), _name(shapes, rows)
    _all_kept(conditions)[name] = timed
    _keep(conditions, name, timed)
    return timed


def _name(shapes: str, rows: int) -> str:
    """Rows are told apart by their number's bits."""
    return f"{shapes}, rows below {1 << rows.bit_length()}"


def kernels() -> Any:
    """The Triton module, which takes a while to import."""
    return importlib.import_module("torchweld.triton_kernels.linear_act")


def _medians(contenders: list[Callable[[], Any]]) -> list[float]:
    """Milliseconds of each on the current stream; infinite where it does not fit the GPU."""
    too_large = importlib.import_module("triton").OutOfResources
    events: dict[int, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
    for at, run in enumerate(contenders):
        try:
            run()  # compiles it
        except too_large:
            continue
        events[at] = []
    # The GPU is kept behind, so that it waits for no launch that it would not wait for in a model.
    for _ in range(_ROUNDS):
        contenders[0]()
    # In turns: what slows the GPU for a while slows all of them.
    for _ in range(_ROUNDS):
        for at, pairs in events.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            contenders[at]()
            end.record()
            pairs.append((begin, end))
    torch.cuda.current_stream().synchronize()
    times = {
        at: statistics.median(begin.elapsed_time(end) for begin, end in pairs)
        for at, pairs in events.items()
    }
    return [times.get(at, float("inf")) for at in range(len(contenders))]


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
    content = cache.read(_file())
    content.setdefault(conditions, {})[name] = list(timed)
    # Where nothing can be written, it is kept for this process alone.
    with contextlib.suppress(OSError):
        cache.write(_file(), content)
