"""Times calls on a GPU: the GPU's own time, and the host's time to queue the call."""

from __future__ import annotations

import atexit
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

# The GPU waits for the host at most this long. A call that keeps the host busy for longer is
# compiling, or waits for the GPU itself.
_LONGEST_WAIT = 20.0
_CYCLES = 1_000_000


class Taken(NamedTuple):
    """Milliseconds of a call: the GPU's, the host's, and host time that the GPU waited for."""

    device: float
    host: float
    exposed: float


class Rate:
    """The GPU's clock, as nvidia-smi tells it ten times a second while this process lives."""

    _COMMAND = (
        "nvidia-smi",
        "--query-gpu=clocks.sm",
        "--format=csv,noheader,nounits",
        "-lms",
        "100",
    )

    def __init__(self, command: Sequence[str] = _COMMAND) -> None:
        self._told = list[tuple[float, int]]()
        try:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except OSError:  # rows then lack it
            return
        atexit.register(self._process.kill)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            if line.strip().isdigit():
                self._told.append((time.monotonic(), int(line)))

    def find_mhz(self, since: float) -> int | None:
        """The median since then on the monotonic clock; None if nothing was told."""
        told = [mhz for at, mhz in self._told if at >= since] or [m for _, m in self._told[-1:]]
        return int(statistics.median(told)) if told else None


class DeviceClock:
    """Times calls on the current stream while the GPU waits until the host has queued them.

    The time between two events is then only the GPU's work. Earlier calls say how long the GPU has
    to wait.
    """

    def __init__(self) -> None:
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._cycles_a_ms = 0.0
        for _ in range(2):  # the first loads the kernel
            self._start.record()
            torch.cuda._sleep(_CYCLES)
            self._stop.record()
            self._stop.synchronize()
            self._cycles_a_ms = _CYCLES / self._start.elapsed_time(self._stop)
        self._wait = 1.0

    def __call__(self, call: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> Taken:
        """The time of a call; `before` runs on the GPU first, untimed."""
        wait, begin = self._wait, time.perf_counter()
        torch.cuda._sleep(int(wait * self._cycles_a_ms))
        before()
        self._start.record()
        called = time.perf_counter()
        kept = call()
        done = time.perf_counter()
        self._stop.record()
        self._stop.synchronize()
        del kept  # freed behind the second event
        host = (done - called) * 1e3
        self._wait = min(max(0.9 * wait, 1.5 * (done - begin) * 1e3), _LONGEST_WAIT)
        exposed = max(0.0, (done - begin) * 1e3 - wait)
        return Taken(self._start.elapsed_time(self._stop), host, exposed)


def take_medians(
    calls: Sequence[Callable[[], Any]], clock: Callable[..., Taken], ms: float, at_least: int = 5
) -> list[float]:
    """The median of each call's GPU or host time, whichever is longer; takes about `ms` in all.

    The calls take turns, so that a slow moment of the machine affects all of them.
    """
    for call in calls:  # the clock learns how long the host takes
        clock(call)
    taken: list[list[Taken]] = [[] for _ in calls]
    start = time.perf_counter()
    while len(taken[-1]) < at_least or (time.perf_counter() - start) * 1e3 < ms:
        for at, call in enumerate(calls):
            taken[at].append(clock(call))
    return [
        max(statistics.median(t.device for t in of), statistics.median(t.host for t in of))
        for of in taken
    ]
