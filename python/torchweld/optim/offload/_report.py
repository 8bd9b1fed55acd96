"""Reports of the bytes on the device and on the host, and the seconds, of each phase of a step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from torchweld.optim._shards import local_part
from torchweld.optim.offload._buckets import DEVICE

Bytes = dict[str, int]
FORWARD, BACKWARD, STEP = "forward", "backward", "step"


@dataclass
class Phase:
    """A phase of a step: its seconds, the bytes at its end, and the device's peak.

    Activations are counted at their peak, since they are saved and freed within a phase.
    """

    seconds: float
    device: Bytes
    host: Bytes
    peak: int
    gradients_that_stay: int  # bytes of gradients of the buckets that are stepped on the device


class Timeline:
    """The phases of the last step."""

    def __init__(self) -> None:
        self.phases: dict[str, Phase] = {}
        self._began = time.perf_counter()
        self._is_forward = True

    def first_gradient(self, offload: Any) -> None:
        """Record the end of the forward pass; with accumulation, of the first one."""
        if self._is_forward:
            self._is_forward = False
            self.end(FORWARD, offload)

    def end(self, name: str, offload: Any) -> None:
        """Record the end of a phase."""
        now = time.perf_counter()
        device, host = count_on_device(offload), count_on_host(offload)
        device["activations"] = offload._activations.take_most()
        # Reading the peak resets it, so only "auto" may do that.
        peak = sum(device.values())
        if offload.placement == "auto":
            peak = offload._transfers.peak(peak)
        seconds, stay = now - self._began, count_device_gradients(offload)
        self.phases[name] = Phase(seconds, device, host, peak, stay)
        self._began, self._is_forward = now, name == STEP


def count_device_gradients(offload: Any) -> int:
    """The bytes of gradients of the buckets that are stepped on the device."""
    buckets = (b for b in offload._store.buckets if b.home == DEVICE)
    return _count_gradients(m.param for bucket in buckets for m in bucket.members)


def count_on_device(offload: Any) -> Bytes:
    """The bytes on the device that Offload knows of, by kind."""
    params = list(offload._store.members)
    states = [b.state_bytes() for b in offload._store.buckets if b.home == DEVICE]
    return {
        "parameters": sum(local_part(p.detach()).nbytes for p in params),
        "gradients": _count_gradients(params),
        "states": sum(states),
        "activations": offload._activations.device_bytes(),
    }


def _count_gradients(params: Iterable[torch.Tensor]) -> int:
    return sum(_count_bytes(local_part(p.grad)) for p in params if p.grad is not None)


def _count_bytes(grad: torch.Tensor) -> int:
    if grad.layout is torch.strided:
        return grad.nbytes
    return grad._values().nbytes + grad._indices().nbytes


def count_on_host(offload: Any) -> Bytes:
    """The bytes of the optimizer on the host, by kind."""
    buckets = [b for b in offload._store.buckets if b.home != DEVICE]
    return {
        "parameters and gradients": sum(b.host_buffer_bytes() for b in buckets),
        "states": sum(b.state_bytes() for b in buckets),
        "activations": offload._activations.host_bytes(),
    }


def write_report(offload: Any, plot: str | os.PathLike[str] | None) -> str:
    """Write the bytes at the end of each phase as a table, and as a picture to a file."""
    phases = offload._timeline.phases
    if not phases:
        return "Offload: no step yet"
    count = sum(bucket.home == DEVICE for bucket in offload._store.buckets)
    lines = [
        f"Offload: {len(offload._store.buckets)} buckets, {count} stepped on the device; "
        f"{offload._worker.threads} threads on the host",
    ]
    for name, phase in phases.items():
        lines.append(f"{name}: {1e3 * phase.seconds:.1f} ms")
        for place, sizes in _list_places(phase).items():
            lines += [
                f"  {place:6} {what:26} {size / 1e6:12.3f} MB" for what, size in sizes.items()
            ]
    if plot is not None:
        _draw(phases, plot)
    return "\n".join(lines)


def _list_places(phase: Phase) -> dict[str, Bytes]:
    others = {"other memory, at the peak": phase.peak - sum(phase.device.values())}
    return {"device": phase.device | others, "host": phase.host}


def _draw(phases: dict[str, Phase], plot: str | os.PathLike[str]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axes, place in zip(figure.subplots(1, 2), ("device", "host"), strict=True):
        bottoms = [0.0] * len(phases)
        for what in _list_places(next(iter(phases.values())))[place]:
            heights = [_list_places(phase)[place][what] / 1e6 for phase in phases.values()]
            axes.bar(list(phases), heights, bottom=bottoms, label=what, width=0.6)
            bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
        axes.set_title(f"on the {place}")
        axes.set_ylabel("MB")
        axes.set_ylim(0, 1.5 * max(*bottoms, 1e-3))
        axes.legend(loc="upper left", frameon=False, fontsize=9, reverse=True)
    figure.savefig(plot, dpi=110)
