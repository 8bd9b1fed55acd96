"""Where every byte is over a step, and how long its phases take."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch

from torchweld.optim._shards import local
from torchweld.optim.offload._buckets import DEVICE

Bytes = dict[str, int]
FORWARD, BACKWARD, STEP = "forward", "backward", "step"


@dataclass
class Phase:
    """A phase of a step: its seconds, the bytes at its end, and the device's peak.

    Activations are counted at their peak, since they come and go within a phase.
    """

    seconds: float
    device: Bytes
    host: Bytes
    peak: int


class Timeline:
    """The phases of the last step."""

    def __init__(self) -> None:
        self.phases: dict[str, Phase] = {}
        self._began = time.perf_counter()
        self._is_forward = True

    def first_gradient(self, offload: Any) -> None:
        """Record the end of the forward; with accumulation, of the first one."""
        if self._is_forward:
            self._is_forward = False
            self.end(FORWARD, offload)

    def end(self, name: str, offload: Any) -> None:
        """Record the end of a phase."""
        now = time.perf_counter()
        device, host = on_device(offload), on_host(offload)
        device["activations"] = offload._activations.take_most()
        # Reading the peak resets it, so only "auto" may do that.
        peak = sum(device.values())
        if offload.placement == "auto":
            peak = offload._transfers.peak(peak)
        self.phases[name] = Phase(now - self._began, device, host, peak)
        self._began, self._is_forward = now, name == STEP


def on_device(offload: Any) -> Bytes:
    """The known bytes at this place, by kind."""
    params = list(offload._store.members)
    states = [b.state_bytes() for b in offload._store.buckets if b.home == DEVICE]
    return {
        "parameters": sum(local(p.detach()).nbytes for p in params),
        "gradients": sum(_of(local(p.grad)) for p in params if p.grad is not None),
        "states": sum(states),
        "activations": offload._activations.on_device(),
    }


def _of(grad: torch.Tensor) -> int:
    if grad.layout is torch.strided:
        return grad.nbytes
    return grad._values().nbytes + grad._indices().nbytes


def on_host(offload: Any) -> Bytes:
    """The optimizer's own bytes at this place, by kind."""
    buckets = [b for b in offload._store.buckets if b.home != DEVICE]
    return {
        "parameters and gradients": sum(b.host_buffers() for b in buckets),
        "states": sum(b.state_bytes() for b in buckets),
        "states to go back to": sum(b.undo_bytes() for b in buckets),
        "activations": offload._activations.on_host(),
    }


def report(offload: Any, plot: str | os.PathLike[str] | None) -> str:
    """The bytes at each phase's end, as a table, and as a picture if a file is named."""
    phases = offload._timeline.phases
    if not phases:
        return "Offload: no step yet"
    count = sum(bucket.home == DEVICE for bucket in offload._store.buckets)
    lines = [
        f"Offload: {len(offload._store.buckets)} buckets, {count} step on the device; "
        f"{offload._worker.threads} threads on the host",
        f"of the last step's buckets, {offload.counts['ahead']} stepped during the backward, "
        f"{offload.counts['undone']} were undone",
    ]
    for name, phase in phases.items():
        lines.append(f"{name}: {1e3 * phase.seconds:.1f} ms")
        for place, found in _places(phase).items():
            lines += [
                f"  {place:6} {what:26} {size / 1e6:12.3f} MB" for what, size in found.items()
            ]
    if plot is not None:
        _draw(phases, plot)
    return "\n".join(lines)


def _places(phase: Phase) -> dict[str, Bytes]:
    others = {"others, at the peak": phase.peak - sum(phase.device.values())}
    return {"device": phase.device | others, "host": phase.host}


def _draw(phases: dict[str, Phase], plot: str | os.PathLike[str]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axes, place in zip(figure.subplots(1, 2), ("device", "host"), strict=True):
        bottoms = [0.0] * len(phases)
        for what in _places(next(iter(phases.values())))[place]:
            heights = [_places(phase)[place][what] / 1e6 for phase in phases.values()]
            axes.bar(list(phases), heights, bottom=bottoms, label=what, width=0.6)
            bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
        axes.set_title(f"on the {place}")
        axes.set_ylabel("MB")
        axes.set_ylim(0, 1.5 * max(*bottoms, 1e-3))
        axes.legend(loc="upper left", frameon=False, fontsize=9, reverse=True)
    figure.savefig(plot, dpi=110)
