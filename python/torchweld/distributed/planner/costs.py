"""Predicted seconds and bytes of a declaration: compute, communication, pipelines, memory.

Compute takes flops / rate and traffic / bandwidth. A gather or a reduction of b bytes among n
processes takes (n - 1) latencies and b (n - 1) / n / bandwidth, an all-reduce twice as much. ZeRO-3
gathers a layer while the previous ones compute, and gradients are reduced during the last backward
pass, except for one layer. The exchanges of tensor parallelism, the sends of a pipeline and the
gathers of ZeRO-1 and ZeRO-2 overlap with nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchweld import checks
from torchweld.distributed.pipelines.stages import divide
from torchweld.distributed.pipelines.timeline import Action, Timeline
from torchweld.distributed.planner.work import Unit, Work, check_positive


@dataclass(frozen=True)
class Profile:
    """A device: the flops and bytes per second that training reaches, and the bytes of its memory.

    `source` says where the figures come from.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    source: str

    def __post_init__(self) -> None:
        rates = {"flops": self.flops, "bandwidth": self.bandwidth}
        check_positive("Profile", **rates, memory=self.memory)


# The shares that training reaches of the vendors' figures for dense bfloat16 and for bandwidth.
_REACHED = {"flops": 0.5, "bandwidth": 0.8}
_STATED = {
    "h200": (989e12, 4.8e12, 141e9),
    "h100": (989e12, 3.35e12, 80e9),
    "a100": (312e12, 2.039e12, 80e9),
    "4090": (165e12, 1.008e12, 24e9),
}
PROFILES = {
    name: Profile(
        name,
        flops * _REACHED["flops"],
        bandwidth * _REACHED["bandwidth"],
        memory,
        "stated by the vendor, times 0.5 for flops and 0.8 for bandwidth; not measured",
    )
    for name, (flops, bandwidth, memory) in _STATED.items()
}


@dataclass(frozen=True)
class Links:
    """Links inside a node of `node` devices, and between nodes.

    Bandwidths are bytes per second of each device; latencies are seconds. `overlaps` is false where
    the processors that compute also exchange, as on CPUs that gloo connects.
    """

    node: int = 8
    inside: float = 300e9
    between: float = 25e9
    latency_inside: float = 5e-6
    latency_between: float = 15e-6
    overlaps: bool = True

    def __post_init__(self) -> None:
        check_positive("Links", node=self.node, inside=self.inside, between=self.between)
        for name in ("latency_inside", "latency_between"):
            value = getattr(self, name)
            checks.number("Links", name, value, lambda v: v >= 0, "0 seconds or more")

    def exchange(self, size: float, count: int, span: int) -> float:
        """Return the seconds of an all-gather or a reduce-scatter of `size` bytes.

        `span` is the distance from the first to the last process, which decides on the link.
        """
        if count < 2:
            return 0.0
        bandwidth, latency = self._choose(span)
        return (count - 1) * (latency + size / count / bandwidth)

    def send(self, size: float, span: int) -> float:
        """Return the seconds of a send."""
        bandwidth, latency = self._choose(span)
        return latency + size / bandwidth

    def _choose(self, span: int) -> tuple[float, float]:
        if span < self.node:
            return self.inside, self.latency_inside
        return self.between, self.latency_between


class Choice(NamedTuple):
    """A point in the space that the planner searches."""

    tensor: int
    mode: str
    sequence: bool
    pipeline: int
    schedule: str
    replicas: int
    data: str
    rows: int
    checkpoint: str
    optimizer: str
    offload: str


# Bytes of an optimizer's states per float32 parameter, without the parameter and its gradient.
STATES = {"adamw": 8.0, "adamw8bit": 2.0 + 2 * 4 / 256, "sgd": 0.0}
_HOST = 16e9  # bytes per second between a device and its host


@dataclass(frozen=True)
class Cost:
    """The predicted cost of a choice.

    Attributes:
        seconds: seconds per step.
        memory: bytes on the fullest device, by kind.
        cuts: the units of each stage.
        passes: seconds of a forward and a backward pass of a microbatch, for each stage.
    """

    seconds: float
    memory: dict[str, float]
    cuts: tuple[range, ...]
    passes: tuple[tuple[float, float], ...]

    @property
    def total(self) -> float:
        """All bytes on the fullest device."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Model:
    """The costs of a model's work on devices of a profile, for a batch of sequences."""

    work: Work
    profile: Profile
    links: Links
    batch: int

    def count_microbatches(self, c: Choice) -> int:
        """Count the microbatches of a replica."""
        return self.batch // (c.replicas * c.rows)

    def time_unit(self, unit: Unit, c: Choice) -> tuple[float, float]:
        """Return the seconds of a forward and a backward pass of a microbatch of a unit."""
        t = c.tensor
        # Without sequence parallelism every device runs all norms and dropouts of the stream.
        share = 1 / t if c.sequence or c.mode != "1d" else (1 + 1 / t) / 2
        products = c.rows * unit.flops / t / self.profile.flops
        others = c.rows * unit.traffic * share / self.profile.bandwidth
        sent = self._time_tensor(unit, c) if unit.flops else 0.0
        again = {"none": 0.0, "full": products + others + sent, "selective": others}
        gathers = self._time_gathers(unit, c)
        forward = products + others + sent
        backward = 2 * (products + others) + sent + again[c.checkpoint]
        if self.links.overlaps:
            return max(forward, gathers), max(backward, gathers)
        return forward + gathers, backward + gathers

    def _time_tensor(self, unit: Unit, c: Choice) -> float:
        """Return the seconds of a layer's exchanges in one direction."""
        if c.tensor == 1:
            return 0.0
        stream = c.rows * unit.out
        if c.mode == "1d":  # two all-reduces, or a gather and a reduce-scatter each
            return 4 * self.links.exchange(stream, c.tensor, c.tensor - 1)
        weights = 4.0 * unit.parameters
        if c.mode == "3d":
            q = round(c.tensor ** (1 / 3))
            size = (6 * stream + weights) / q**2  # the results of six layers
            return 3 * self.links.exchange(size, q, c.tensor - 1)
        q = round(c.tensor**0.5)
        blocks = (6 * stream + weights) / q
        return 1.5 * q * self.links.send(blocks / q, c.tensor - 1)

    def _time_gathers(self, unit: Unit, c: Choice) -> float:
        """Return the seconds that FSDP2 takes to gather a unit for a microbatch."""
        if c.data != "zero3" or c.pipeline > 1:
            return 0.0
        size = 4.0 * unit.parameters / c.tensor
        return self.links.exchange(size, c.replicas, c.tensor * c.replicas - 1)

    def _time_data(self, units: Sequence[Unit], c: Choice, hidden: float) -> float:
        """Return the seconds per step of exchanges among replicas that no computation hides."""
        size = 4.0 * sum(unit.parameters for unit in units) / c.tensor
        one = self.links.exchange(size, c.replicas, c.tensor * c.replicas - 1)
        # ZeRO-3 gathers during the passes.
        after = 0.0 if c.data == "zero3" and c.pipeline == 1 else one
        first = one / max(len(units), 1)
        hidden = hidden if self.links.overlaps else 0.0
        return max(one - hidden, first if c.replicas > 1 else 0.0) + after

    def _time_update(self, parameters: float, c: Choice) -> float:
        states = STATES[c.optimizer]
        own = parameters / c.tensor / (1 if c.data == "ddp" else c.replicas)
        moved = 8 * own / _HOST if c.offload == "optimizer" else 0.0
        return own * (12 + 2 * states) / self.profile.bandwidth + moved

    def estimate(self, c: Choice, cuts: Sequence[range]) -> Cost:
        """Estimate the cost of a step whose stages have these units."""
        stages = [[self.work.units[i] for i in cut] for cut in cuts]
        times = [[self.time_unit(unit, c) for unit in units] for units in stages]
        passes = tuple((sum(f for f, _ in some), sum(b for _, b in some)) for some in times)
        m, p = self.count_microbatches(c), c.pipeline
        send = 0.0
        if p > 1:
            span = c.tensor * c.replicas
            size = c.rows * max(unit.out for unit in self.work.units[:-1])
            send = self.links.send(size / (c.tensor if c.sequence else 1), span)
        both = [f + b for f, b in passes]
        bubble = sum(both) - max(both) + 2 * (p - 1) * send
        if c.schedule == "zbv":  # at most (p-1) (F + B - W), a third of the bubble of 1F1B
            bubble /= 3
        worst = max(
            self._time_data(units, c, hidden=b)
            + self._time_update(sum(u.parameters for u in units), c)
            for units, (_, b) in zip(stages, passes, strict=True)
        )
        seconds = m * max(both) + bubble + worst
        fullest = max(
            (self.count_memory(units, c, at) for at, units in enumerate(stages)),
            key=lambda kinds: sum(kinds.values()),
        )
        return Cost(seconds, fullest, tuple(cuts), passes)

    def count_memory(self, units: Sequence[Unit], c: Choice, stage: int) -> dict[str, float]:
        """Count the bytes of a stage's device by kind."""
        n = sum(unit.parameters for unit in units) / c.tensor
        sharded = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}[c.data] if c.replicas > 1 else 0
        m = self.count_microbatches(c)
        parts = c.replicas
        unsharded = 4 * n if sharded >= 2 and m > 1 else 0.0  # until the last microbatch
        states = STATES[c.optimizer] * n / (parts if sharded else 1)
        largest = sorted(4 * unit.parameters / c.tensor for unit in units)[-2:]
        gathered = {2: 4 * n, 3: min(sum(largest), 4 * n)}.get(sharded, 0.0)
        if c.pipeline > 1 and sharded == 3:
            gathered = 4 * n  # ZeRO-3 runs as ZeRO-2 in a pipeline
        waiting = m if c.schedule == "gpipe" else min(m, c.pipeline - stage)
        if c.schedule == "zbv":
            waiting = min(m, c.pipeline)
        return {
            "parameters": 4 * n / (parts if sharded >= 2 else 1),
            "gathered": gathered,
            "gradients": 4 * n / (parts if sharded >= 2 else 1) + unsharded,
            "states": 0.0 if c.offload == "optimizer" else states,
            "activations": c.rows * self._count_activations(units, c, waiting),
        }

    def _count_activations(self, units: Sequence[Unit], c: Choice, waiting: int) -> float:
        """Count the bytes that all microbatches in flight save, and one unit that recomputes."""
        inner = 1 / c.tensor
        # Without sequence parallelism a third of a layer's saved bytes is the whole stream.
        share = inner if c.sequence or c.mode != "1d" else (1 + 2 * inner) / 3
        saved = [unit.saved * share for unit in units]
        if c.checkpoint == "none":
            return waiting * sum(saved)
        stream = inner if c.sequence or c.mode != "1d" else 1.0
        held = [
            unit.out * stream + (unit.kept * inner if c.checkpoint == "selective" else 0.0)
            for unit in units
        ]
        # The embedding and the head do not recompute.
        held = [
            min(a, b) if unit.flops else b for unit, a, b in zip(units, held, saved, strict=True)
        ]
        return waiting * sum(held) + max(saved)


def cut_stages(model: Model, c: Choice) -> tuple[range, ...] | None:
    """Divide units among stages by dynamic programming; None: no division fits the memory.

    The slowest stage is as fast as possible, and every stage fits.
    """
    units, limit = model.work.units, model.profile.memory
    # The fullest stage holds at least the mean over all stages.
    if sum(model.count_memory(units, c, c.pipeline - 1).values()) > limit * c.pipeline:
        return None
    times = tuple(sum(model.time_unit(unit, c)) for unit in units)

    def fits(begin: int, end: int, stage: int) -> bool:
        return sum(model.count_memory(units[begin:end], c, stage).values()) <= limit

    cuts = _divide(times, c.pipeline)
    if all(fits(cut.start, cut.stop, stage) for stage, cut in enumerate(cuts)):
        return cuts
    return divide(times, c.pipeline, fits=fits)


@functools.lru_cache(maxsize=4096)
def _divide(times: tuple[float, ...], count: int) -> tuple[range, ...]:
    cuts = divide(times, count)
    assert cuts is not None
    return cuts


def simulate(cost: Cost, microbatches: int, schedule: str = "1f1b") -> Timeline:
    """Simulate a step of GPipe or 1F1B, without sends and exchanges."""
    stages = len(cost.passes)
    orders = []
    for stage in range(stages):
        ahead = microbatches if schedule == "gpipe" else min(stages - stage, microbatches)
        order = [("forward", i) for i in range(ahead)]
        for i in range(microbatches):
            order.append(("full", i))
            if ahead + i < microbatches:
                order.append(("forward", ahead + i))
        orders.append(order)
    ends: dict[tuple[str, int, int], float] = {}
    actions: list[Action] = []
    at, clock = [0] * stages, [0.0] * stages
    while len(actions) < 2 * stages * microbatches:
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                kind, i = order[at[stage]]
                other = stage + (-1 if kind == "forward" else 1)
                if 0 <= other < stages and (kind, other, i) not in ends:
                    break
                begin = max(clock[stage], ends.get((kind, other, i), 0.0))
                end = begin + cost.passes[stage][kind == "full"]
                ends[kind, stage, i] = clock[stage] = end
                actions.append(Action(stage, stage, i, kind, begin, end))
                at[stage] += 1
    return Timeline(sorted(actions, key=lambda a: a.begin))
