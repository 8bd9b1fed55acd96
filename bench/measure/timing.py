"""Times calls, each from the same state of the caches, in turns with its rivals."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchweld.bench.measure.clock import DeviceClock, Rate


class Sample(NamedTuple):
    """The milliseconds that a call took, and that its threads waited for a core meanwhile."""

    ms: float
    waited: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether other processes disturbed it, beyond the microseconds of waking a thread."""
        return self.waited > max(0.05 * self.ms, 0.02)


# Times a call from neutral caches.
Clock = Callable[[Callable[[], Any]], Sample]
# Prepares a call, untimed, and passes it to the clock.
Run = Callable[[Clock], Sample]


# Seconds of sleep before a call on a busy machine: the scheduler then lets it run uninterrupted.
REST = 0.01


class CpuClock:
    """Wall time. Each timed call starts from caches full of another, clean buffer.

    Otherwise a contender would find some of its inputs in the cache, and would have to write back
    its predecessor's dirty lines.
    """

    def __init__(self) -> None:
        self._buffer = torch.ones(2 * last_level_cache() // 4)
        self._busy = False

    def __call__(self, call: Callable[[], Any]) -> Sample:
        self._buffer.sum()
        if self._busy:
            time.sleep(REST)
        sample = wall_time(call)
        self._busy = sample.disturbed
        return sample


def wall_time(call: Callable[[], Any]) -> Sample:
    """Wall time, without touching the caches."""
    waited = _waited()
    start = time.perf_counter()
    kept = call()
    stop = time.perf_counter()
    waited = _waited() - waited
    del kept  # free the result after the clock has stopped
    return Sample((stop - start) * 1e3, waited)


class CudaClock:
    """Device time between two events, from an L2 full of another, clean buffer.

    The GPU waits until the host has queued the call. If it did not wait long enough, the call was
    disturbed. `bench/measure/overhead.py` measures the host's time.
    """

    def __init__(self) -> None:
        l2 = torch.cuda.get_device_properties().L2_cache_size
        self._buffer = torch.ones(4 * l2 // 4, device="cuda")
        self._clock = DeviceClock()
        self.rate = Rate()

    def __call__(self, call: Callable[[], Any]) -> Sample:
        taken = self._clock(call, before=self._buffer.sum)
        return Sample(taken.device, taken.exposed)


def clock_for(device: str) -> Clock:
    """The clock of a device type."""
    return CudaClock() if device == "cuda" else CpuClock()


def last_level_cache() -> int:
    """Bytes of the CPU's last-level cache, or a guess if the system does not say."""
    units = {"K": 2**10, "M": 2**20}
    files = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    matches = [re.fullmatch(r"(\d+)([KM])", path.read_text().strip()) for path in files]
    return max([int(m[1]) * units[m[2]] for m in matches if m], default=64 * 2**20)


def _waited() -> float:
    """The milliseconds in which threads of this process were ready to run but had no core."""
    files = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[1]) for path in files) / 1e6


class Times(NamedTuple):
    """A run's milliseconds, and how many of its calls were disturbed.

    Disturbed calls are left out, unless too few others remain. Then they count for every contender.
    """

    ms: list[float]
    disturbed: int
    reliable: bool

    def quantile(self, fraction: float) -> float:
        return torch.tensor(self.ms, dtype=torch.float64).quantile(fraction).item()


def interleaved(
    runs: Sequence[Run], clock: Clock, *, seconds: float, at_least: int, at_most: int
) -> list[Times]:
    """Time every run in rounds, so that drift of the machine affects all runs alike.

    Takes `seconds`, or up to twice that on a busy machine, until each run has `at_least`
    undisturbed calls.
    """
    for run in runs:
        run(clock)
    samples: list[list[Sample]] = [[] for _ in runs]
    start = time.monotonic()
    for turn in range(at_most):
        spent = time.monotonic() - start
        enough = turn >= at_least and min(map(_undisturbed, samples)) >= at_least
        if turn >= at_least and spent > (seconds if enough else 2 * seconds):
            break
        for offset in range(len(runs)):
            at = (turn + offset) % len(runs)  # no run always follows the same one
            samples[at].append(runs[at](clock))
    reliable = min(map(_undisturbed, samples)) >= min(at_least, 5)
    return [_times(taken, reliable) for taken in samples]


def _undisturbed(samples: Sequence[Sample]) -> int:
    return sum(not sample.disturbed for sample in samples)


def _times(samples: Sequence[Sample], reliable: bool) -> Times:
    kept = [sample.ms for sample in samples if not (reliable and sample.disturbed)]
    return Times(kept, len(samples) - _undisturbed(samples), reliable)
