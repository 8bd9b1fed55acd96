"""Simulate the time and the memory of a step: python -m torchweld.optim.offload.simulation.

The device computes, a link copies in each direction, and the host steps. Each does one task at a
time, in the order of layers. Units are bytes, seconds and operations per second.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from torchweld.optim.offload.policy import MARGIN, ChunkState, Residency

# Bytes of a bfloat16 parameter with a float32 master and Adam's moments.
PARAM, GRAD, STATES, STEP = 2, 2, 12, 28
# Bytes to copy the states and the parameter before a step that may be undone.
UNDO = 2 * (STATES + PARAM)


@dataclass(frozen=True)
class Machine:
    """A device and its host."""

    capacity: float
    compute: float = 150e12
    memory: float = 1.5e12
    link: float = 25e9
    host: float = 100e9  # read and written by steps


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
        """Parameters of all layers."""
        return self.layers * self.of_layer

    def others(self, done: int) -> float:
        """Bytes of activations after so many layers: their inputs, and one layer's own."""
        kept = done * self.tokens * self.width * 2
        return kept + 34 * self.tokens * self.width

    def forward(self, machine: Machine) -> float:
        """Seconds of a layer's forward."""
        return 2 * self.of_layer * self.tokens / machine.compute


GPT_1B = Workload("GPT 1.3B", 24, 2048)
GPT_13B = Workload("GPT 13B", 40, 5120)


class Scheme(Enum):
    """When the host steps."""

    SERIAL = "nothing overlaps"
    PUBLISHED = "ZeRO-Offload"  # after the backward, beside the copies
    OVERLAPPED = "during the backward"


@dataclass(frozen=True)
class Plan:
    """How many first layers keep their states on the device, and how parameters stay there."""

    states_on_device: int
    streams: bool = False  # parameters arrive per layer, and stay as long as there is room
    scheme: Scheme = Scheme.OVERLAPPED
    margin: float = 1.0


@dataclass
class Outcome:
    """A step: its seconds, its peak bytes, and when each resource was busy."""

    seconds: float
    peak: float
    busy: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


class _Line:
    """A resource that does one task at a time."""

    def __init__(self) -> None:
        self.free = 0.0
        self.busy: list[tuple[float, float]] = []

    def take(self, ready: float, seconds: float) -> float:
        """The end of a task that is ready at this time and takes so long."""
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
    # Gradients of layers that step on the host leave at once; at most two are on the device.
    gradients = (on_device + min(2, count - on_device)) * GRAD * of_layer
    fixed = on_device * STATES * of_layer
    others = [work.others(n) + fixed + (gradients if i >= count else 0) for i, n in enumerate(done)]
    budget = plan.margin * machine.capacity
    chunk = PARAM * of_layer
    loads: list[tuple[int, ...]] = [()] * len(order)
    held = list(range(count))  # layers with parameters on the device at the end of the step
    if plan.streams:
        loads, held, peak = _streamed(on_device, chunk, order, others, budget)
    else:
        peak = max(others) + count * chunk
    if peak > budget:
        raise MemoryError(f"{peak:.3g} bytes on a device of {budget:.3g}")

    serial = plan.scheme is Scheme.SERIAL
    began = 0.0
    arrived: dict[int, float] = {}
    for moment, layer in enumerate(order):
        # The next layer's parameters arrive while this one runs.
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
        # A step that begins before the backward ends may have to be undone.
        early = max(host.free, ready) < finished
        end = host.take(ready, of_layer * (STEP + UNDO * early) / machine.host)
        if layer in held:
            back.take(max(end, finished, host.free if serial else 0), chunk / machine.link)
            if serial:
                host.free = back.free
    seconds = max(line.free for line in lines.values())
    return Outcome(seconds, peak, {name: line.busy for name, line in lines.items()})


def _streamed(
    on_device: int, chunk: int, order: Sequence[int], others: Sequence[float], budget: float
) -> tuple[list[tuple[int, ...]], list[int], float]:
    """The parameters that arrive at each moment, those present at the period's end, and the peak.

    Layers whose states are on the device keep their parameters there.
    """
    stay = on_device * chunk
    rooms = [int(budget - stay - other) for other in others]
    uses = [[layer - on_device] if layer >= on_device else [] for layer in order]
    count = max(order) + 1
    residency = Residency([chunk] * (count - on_device), uses, rooms)
    peak = 0.0
    loads: list[tuple[int, ...]] = []
    for _ in range(2):  # the first period begins with an empty device
        loads = []
        for moment, other in enumerate(others):
            loads.append(residency.enter(moment, moment > count).loaded)
            peak = max(peak, residency.held() + stay + other)
    held = [at + on_device for at, s in enumerate(residency.states) if s is not ChunkState.FREE]
    return loads, held, peak


def automatic(work: Workload, machine: Machine, margin: float = MARGIN) -> tuple[Plan, Outcome]:
    """The fastest plan that keeps the margin."""
    plans = [
        Plan(on_device, streams, margin=margin)
        for on_device in range(work.layers + 1)
        for streams in (False, True)
    ]
    return min(fitting(work, machine, plans), key=lambda found: found[1].seconds)


def fitting(work: Workload, machine: Machine, plans: Sequence[Plan]) -> list[tuple[Plan, Outcome]]:
    """The plans that fit on the device."""
    found = []
    for plan in plans:
        try:
            found.append((plan, simulate(work, machine, plan)))
        except MemoryError:
            continue
    if not found:
        raise MemoryError(f"{work.name} has no plan on a device of {machine.capacity:.3g} bytes")
    return found


def static(work: Workload, scheme: Scheme) -> dict[str, Plan]:
    """Static placements."""
    return {
        "all on the device": Plan(work.layers, scheme=scheme),
        "states on the host": Plan(0, scheme=scheme),
        "all on the host": Plan(0, streams=True, scheme=scheme),
    }


def compare(work: Workload, machine: Machine) -> dict[str, float | None]:
    """Seconds of a step for each placement and scheme; None: the device has no room."""
    rows: dict[str, float | None] = {}
    for scheme in (Scheme.SERIAL, Scheme.PUBLISHED, Scheme.OVERLAPPED):
        for name, plan in static(work, scheme).items():
            if name == "all on the device" and scheme is not Scheme.SERIAL:
                continue  # nothing leaves it
            label = name if name == "all on the device" else f"{name}, {scheme.value}"
            try:
                rows[label] = simulate(work, machine, plan).seconds
            except MemoryError:
                rows[label] = None
    rows["auto"] = automatic(work, machine)[1].seconds
    return rows


CASES = [(work, Machine(gb * 1e9)) for work in (GPT_1B, GPT_13B) for gb in (24, 80)]


def draw(path: str) -> None:
    """A chart of all cases."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 7), layout="constrained")
    for axes, (work, machine) in zip(figure.subplots(2, 2).flat, CASES, strict=True):
        rows = compare(work, machine)
        names = list(rows)[::-1]
        seconds = [rows[name] or 0.0 for name in names]
        colours = ["tab:orange" if name == "auto" else "tab:blue" for name in names]
        axes.barh(names, seconds, color=colours)
        for at, name in enumerate(names):
            text = " no room" if rows[name] is None else f" {rows[name]:.2f} s"
            axes.text(seconds[at], at, text, va="center")
        axes.set_xlim(0, 1.3 * max(seconds))
        axes.set_title(f"{work.name} on {machine.capacity / 1e9:.0f} GB", fontsize=11)
        axes.set_xlabel("seconds a step")
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the step times of all cases, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", help="a PNG of the step times")
    parser.add_argument("--tokens", type=int, default=8192, help="of a step")
    asked = parser.parse_args(arguments)
    for work, machine in CASES:
        work = replace(work, tokens=asked.tokens)
        plan, outcome = automatic(work, machine)
        print(f"{work.name}, {machine.capacity / 1e9:.0f} GB: auto has the states of", end=" ")
        print(f"{plan.states_on_device} of {work.layers} layers on the device", end="")
        print(", and streams parameters" if plan.streams else "")
        for name, seconds in compare(work, machine).items():
            shown = "no room" if seconds is None else f"{seconds:8.3f} s"
            print(f"  {name:60} {shown}")
        print(f"  {'peak of auto':60} {outcome.peak / 1e9:8.1f} GB")
    if asked.plot:
        draw(asked.plot)


if __name__ == "__main__":
    main()
