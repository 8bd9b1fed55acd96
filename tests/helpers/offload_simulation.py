"""A simulation of the time and the memory of a step with offloaded states.

The device computes, a link copies in each direction, and the host takes the optimizer step. Each
does one task at a time, in the order of layers. Units are bytes, seconds and operations per second.

Streamed parameters are copied in chunks. A step is a period of moments, and each moment uses some
chunks. As in Gemini, chunks are evicted in the order of their next use, the farthest first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

from torchweld.optim.offload.policy import Placement, Seen

# Bytes of a bfloat16 parameter with a float32 master and Adam's moments.
PARAM, GRAD, STATES, STEP = 2, 2, 12, 28
# Bytes to copy the states and the parameter before a step that may be undone.
UNDO = 2 * (STATES + PARAM)


class ChunkState(Enum):
    """The state of a chunk: its use on the device, or its absence."""

    FREE = "free"
    HOLD = "hold"
    COMPUTE = "compute"
    HOLD_AFTER_BACKWARD = "hold after backward"  # its gradients are complete


_NEXT = {
    ChunkState.FREE: {ChunkState.HOLD, ChunkState.COMPUTE},
    ChunkState.HOLD: {ChunkState.COMPUTE, ChunkState.FREE},
    ChunkState.COMPUTE: {ChunkState.HOLD, ChunkState.HOLD_AFTER_BACKWARD},
    ChunkState.HOLD_AFTER_BACKWARD: {ChunkState.FREE, ChunkState.HOLD, ChunkState.COMPUTE},
}


class Moves(NamedTuple):
    """The chunks that a moment brings to the device, and the chunks evicted before that."""

    loaded: tuple[int, ...]
    evicted: tuple[int, ...]


class Residency:
    """Chunks on a device over a period that repeats.

    Args:
        sizes: the bytes of each chunk.
        uses: the chunks that each moment uses.
        rooms: the bytes for chunks at each moment.
    """

    def __init__(
        self, sizes: Sequence[int], uses: Sequence[Sequence[int]], rooms: Sequence[int]
    ) -> None:
        self._sizes, self._uses = sizes, uses
        # The chunks of a moment stay on the device for the next one.
        self._rooms = [min(pair) for pair in pairwise([*rooms, rooms[0]])] if rooms else []
        self.states = [ChunkState.FREE] * len(sizes)
        self._moments: dict[int, list[int]] = {}
        for moment, used in enumerate(uses):
            for chunk in used:
                self._moments.setdefault(chunk, []).append(moment)

    def held_bytes(self) -> int:
        """The bytes of all chunks on the device."""
        on_device = zip(self._sizes, self.states, strict=True)
        return sum(size for size, state in on_device if state is not ChunkState.FREE)

    def count_until_use(self, chunk: int, moment: int) -> int:
        """Count the moments until the chunk's next use; more than a period if there is none."""
        period = len(self._uses)
        waits = ((at - moment - 1) % period + 1 for at in self._moments.get(chunk, ()))
        return min(waits, default=2 * period)

    def enter(self, moment: int, after_backward: bool = False) -> Moves:
        """Bring the chunks that the moment uses, and evict other chunks as needed.

        Raises MemoryError if the moment's chunks do not fit.
        """
        used = self._uses[moment]
        for chunk, state in enumerate(self.states):
            if state is ChunkState.COMPUTE:
                self._to(chunk, _choose_state_after(after_backward))
        missing = [chunk for chunk in used if self.states[chunk] is ChunkState.FREE]
        room = self._rooms[moment] - sum(self._sizes[chunk] for chunk in missing)
        evicted = []
        while self.held_bytes() > room:
            others = [c for c, state in enumerate(self.states) if state is not ChunkState.FREE]
            others = [chunk for chunk in others if chunk not in used]
            if not others:
                needed = sum(self._sizes[chunk] for chunk in used)
                raise MemoryError(f"moment {moment} uses {needed} bytes; {room} are free")
            farthest = max(others, key=lambda chunk: (self.count_until_use(chunk, moment), chunk))
            self._to(farthest, ChunkState.FREE)
            evicted.append(farthest)
        for chunk in used:
            self._to(chunk, ChunkState.COMPUTE)
        return Moves(tuple(missing), tuple(evicted))

    def _to(self, chunk: int, state: ChunkState) -> None:
        assert state in _NEXT[self.states[chunk]] or state is self.states[chunk]
        self.states[chunk] = state


def _choose_state_after(backward: bool) -> ChunkState:
    return ChunkState.HOLD_AFTER_BACKWARD if backward else ChunkState.HOLD


@dataclass(frozen=True)
class Machine:
    """A device and its host."""

    capacity: float
    compute: float = 150e12
    memory: float = 1.5e12
    link: float = 25e9
    host: float = 100e9  # bytes that the optimizer reads and writes


@dataclass(frozen=True)
class Workload:
    """A model of equal layers that recomputes its activations, and the tokens of a step."""

    name: str
    layers: int
    width: int
    tokens: int = 8192

    @property
    def of_layer(self) -> int:
        """Parameters of a layer; embeddings are among the first layer's."""
        return 12 * self.width**2

    @property
    def parameters(self) -> int:
        """The parameters of all layers."""
        return self.layers * self.of_layer

    def others(self, done: int) -> float:
        """Bytes of activations after `done` layers: their inputs, and those of one layer."""
        kept = done * self.tokens * self.width * 2
        return kept + 34 * self.tokens * self.width

    def forward(self, machine: Machine) -> float:
        """Seconds of the forward pass of a layer."""
        return 2 * self.of_layer * self.tokens / machine.compute


GPT_1B = Workload("GPT 1.3B", 24, 2048)
GPT_13B = Workload("GPT 13B", 40, 5120)


class Scheme(Enum):
    """When the host takes the optimizer step."""

    SERIAL = "nothing overlaps"
    PUBLISHED = "ZeRO-Offload"  # after the backward pass, while parameters are copied
    OVERLAPPED = "during the backward pass"


@dataclass(frozen=True)
class Plan:
    """How many first layers keep their states on the device, and how the others are stepped."""

    states_on_device: int
    streams: bool = False  # parameters are copied in per layer, and stay while there is room
    releases: bool = True  # a gradient is freed once it is copied to the host
    scheme: Scheme = Scheme.OVERLAPPED


@dataclass
class Outcome:
    """The seconds of a step, its peak bytes in each phase, and when each resource was busy."""

    seconds: float
    peaks: dict[str, float]
    busy: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    @property
    def peak(self) -> float:
        """The peak bytes of the step."""
        return max(self.peaks.values())


class _Line:
    """A resource that does one task at a time."""

    def __init__(self) -> None:
        self.free = 0.0
        self.busy: list[tuple[float, float]] = []

    def take(self, ready: float, seconds: float) -> float:
        """Do a task of `seconds` that can begin at `ready`; return when it ends."""
        begin = max(self.free, ready)
        self.free = begin + seconds
        if seconds > 0:
            self.busy.append((begin, self.free))
        return self.free


def simulate(work: Workload, machine: Machine, plan: Plan) -> Outcome:
    """Simulate a step with this plan. Raises MemoryError if the device has no room."""
    count, of_layer = work.layers, work.of_layer
    on_device = plan.states_on_device
    device, out, back, host = (_Line() for _ in range(4))
    lines = {"device": device, "to the host": out, "to the device": back, "host": host}
    order = [*range(count), *reversed(range(count))]
    done = [*range(1, count + 1), *range(count, 0, -1)]
    fixed = on_device * STATES * of_layer
    others = [work.others(n) + fixed for n in done]
    for moment, layer in enumerate(order[count:], count):
        others[moment] += _count_gradients(plan, count, layer) * GRAD * of_layer
    chunk = PARAM * of_layer
    loads: list[tuple[int, ...]] = [()] * len(order)
    held = list(range(count))  # layers with parameters on the device at the end of the step
    used = [other + count * chunk for other in others]
    if plan.streams:
        loads, held, used = _stream_parameters(on_device, chunk, order, others, machine.capacity)
    # The optimizer step on the device works in place.
    left = fixed + len(held) * chunk + _count_gradients(plan, count, 0, False) * GRAD * of_layer
    peaks = {"forward": max(used[:count]), "backward": max(used[count:]), "step": left}
    peak = max(peaks.values())
    if peak > machine.capacity:
        raise MemoryError(f"{peak:.3g} bytes on a device of {machine.capacity:.3g}")

    serial = plan.scheme is Scheme.SERIAL
    began = 0.0
    arrived: dict[int, float] = {}
    for moment, layer in enumerate(order):
        # The next layer's parameters are copied while this layer runs.
        ready = began
        for _ in loads[moment]:
            ready = back.take(device.free if serial else began, chunk / machine.link)
        backward = moment >= count
        seconds = work.forward(machine) * (3 if backward else 1)
        end = device.take(ready, seconds)
        began = end - seconds
        if backward and layer >= on_device:
            arrived[layer] = out.take(end, GRAD * of_layer / machine.link)
            if serial:
                device.free = out.free
    finished = device.free
    device.take(finished, on_device * of_layer * STEP / machine.memory)
    all_arrived = out.free
    for layer, at in arrived.items():
        ready = at if plan.scheme is Scheme.OVERLAPPED else max(all_arrived, finished)
        # A step that begins before the end of the backward pass may have to be undone.
        early = max(host.free, ready) < finished
        end = host.take(ready, of_layer * (STEP + UNDO * early) / machine.host)
        if layer in held:
            back.take(max(end, finished, host.free if serial else 0), chunk / machine.link)
            if serial:
                host.free = back.free
    seconds = max(line.free for line in lines.values())
    return Outcome(seconds, peaks, {name: line.busy for name, line in lines.items()})


def _count_gradients(plan: Plan, count: int, layer: int, leaving: bool = True) -> int:
    """Count the layers with gradients on the device after the backward pass of this layer."""
    if not plan.releases:
        return count - layer
    of_host = min(2, count - max(layer, plan.states_on_device)) if leaving else 0
    return max(0, plan.states_on_device - layer) + of_host


def _stream_parameters(
    on_device: int, chunk: int, order: Sequence[int], others: Sequence[float], budget: float
) -> tuple[list[tuple[int, ...]], list[int], list[float]]:
    """Plan the streaming of parameters.

    Returns the layers that are copied in at each moment, the layers on the device at the end of the
    period, and the bytes in use at each moment.

    Layers whose states are on the device keep their parameters there.
    """
    stay = on_device * chunk
    rooms = [int(budget - stay - other) for other in others]
    uses = [[layer - on_device] if layer >= on_device else [] for layer in order]
    count = max(order) + 1
    residency = Residency([chunk] * (count - on_device), uses, rooms)
    loads: list[tuple[int, ...]] = []
    used: list[float] = []
    for _ in range(2):  # only the second period begins as all later ones do
        loads, used = [], []
        for moment, other in enumerate(others):
            loads.append(residency.enter(moment, moment > count).loaded)
            used.append(residency.held_bytes() + stay + other)
    held = [at + on_device for at, s in enumerate(residency.states) if s is not ChunkState.FREE]
    return loads, held, used


def settle_plan(
    work: Workload,
    machine: Machine,
    releases: bool = False,
    rule: Callable[[], Placement] = Placement,
) -> tuple[Plan, Outcome]:
    """Apply the rule of placement="auto" step after step, until its plan no longer changes."""
    placement = rule()
    plans = [Plan(0, releases=releases)]
    while len(plans) < 8 or len(set(plans[-8:])) > 1:
        plan = plans[-1]
        outcome = simulate(work, machine, plan)
        of_layer, stay = work.of_layer, plan.states_on_device
        size = of_layer * (STATES + GRAD * releases)
        phases = {}
        for name, peak in outcome.peaks.items():
            ended = {"forward": 0, "backward": stay, "step": stay}[name]
            placed = of_layer * (stay * STATES + ended * GRAD * releases)
            may_come = work.parameters * GRAD if name == "forward" and not releases else 0
            phases[name] = Seen(int(peak), placed, may_come)
        chosen = placement.decide(phases, [size] * work.layers, int(machine.capacity))
        plans.append(replace(plan, states_on_device=sum(chosen)))
        if len(plans) > 1000:
            raise RuntimeError(f"the placement does not settle: {plans[-8:]}")
    return plan, outcome


def list_static_plans(work: Workload, scheme: Scheme) -> dict[str, Plan]:
    """List the placements that never change."""
    return {
        "all on the device": Plan(work.layers, scheme=scheme),
        "states on the host": Plan(0, scheme=scheme),
        "all on the host": Plan(0, streams=True, scheme=scheme),
    }


def compare(work: Workload, machine: Machine) -> dict[str, float | None]:
    """Simulate each placement and scheme; None instead of seconds: the device has no room."""
    rows: dict[str, float | None] = {}
    for scheme in (Scheme.SERIAL, Scheme.PUBLISHED, Scheme.OVERLAPPED):
        for name, plan in list_static_plans(work, scheme).items():
            if name == "all on the device" and scheme is not Scheme.SERIAL:
                continue  # nothing is copied
            label = name if name == "all on the device" else f"{name}, {scheme.value}"
            try:
                rows[label] = simulate(work, machine, plan).seconds
            except MemoryError:
                rows[label] = None
    for releases, label in AUTO.items():
        try:
            rows[label] = settle_plan(work, machine, releases)[1].seconds
        except MemoryError:
            rows[label] = None
    return rows


AUTO = {False: "auto", True: "auto, gradients released"}
CASES = [(work, Machine(gb * 1e9)) for work in (GPT_1B, GPT_13B) for gb in (24, 80)]
