"""Optimizer steps beside torch's and other packages': python -m torchweld.bench.optimizers."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import torchweld
from torchweld import optim
from torchweld.bench import conditions
from torchweld.bench.machine import machine
from torchweld.bench.table import Table, progress
from torchweld.bench.timing import Clock, Sample, clock_for, interleaved

Shapes = Sequence[tuple[int, ...]]
Make = Callable[[list[torch.Tensor]], Any]


def _mixed(count: int, elements: int) -> Shapes:
    """As a model has them: half vectors, half matrices of all sizes, with so many elements."""
    choose = random.Random(0).choice
    vectors = [(choose((64, 256, 1024, 4096)),) for _ in range(count // 2)]
    matrices = [(choose((64, 256, 512)), choose((64, 128, 256))) for _ in range(count // 2 - 1)]
    left = elements - sum(torch.Size(shape).numel() for shape in [*vectors, *matrices])
    return [*vectors, *matrices, (left // 1024, 1024)]


ELEMENTS = 2**24
CASES: dict[str, Shapes] = {
    "16 tensors": [(1024, 1024)] * 16,
    "600 tensors": _mixed(600, ELEMENTS),
}


class _Clipped:
    """What max_grad_norm replaces."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self._params, self._optimizer = params, torch.optim.AdamW(params, fused=True)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._params, 1.0)
        self._optimizer.step()


class _Eager:
    """A step in eager torch, of a rule that torch has no optimizer for."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        with torchweld.use_backend("eager"):
            self._optimizer.step()


# Name -> bytes a parameter that have to move, and what makes it. The first of a rule is what the
# others are compared with.
ADAMW: dict[str, tuple[float, Make]] = {
    "torch, fused": (28, lambda p: torch.optim.AdamW(p, fused=True)),
    "torch, foreach": (28, lambda p: torch.optim.AdamW(p, foreach=True)),
    "torch, clip and fused": (32, _Clipped),
    "torchweld": (28, optim.AdamW),
    "torchweld, max_grad_norm": (32, lambda p: optim.AdamW(p, max_grad_norm=1.0)),
    "torchweld, bfloat16 states": (20, lambda p: optim.AdamW(p, state_dtype=torch.bfloat16)),
    "torchweld, 8-bit states": (16.0625, lambda p: optim.AdamW(p, state_dtype="8bit")),
}
LAMB: dict[str, tuple[float, Make]] = {
    "eager": (44, lambda p: _Eager(optim.LAMB(p))),
    "torchweld": (44, optim.LAMB),
    "torchweld, 8-bit states": (26.125, lambda p: optim.LAMB(p, state_dtype="8bit")),
}
ADAFACTOR: dict[str, tuple[float, Make]] = {
    "torch": (24, lambda p: torch.optim.Adafactor(p, foreach=False)),
    "torch, foreach": (24, lambda p: torch.optim.Adafactor(p, foreach=True)),
    "torchweld": (24, optim.Adafactor),
}
PEERS: dict[str, tuple[float, Callable[[Any], Make]]] = {
    "bitsandbytes": (16.0625, lambda module: module.optim.AdamW8bit),
}


def rules() -> dict[str, dict[str, tuple[float, Make]]]:
    """Rule -> contenders, with the packages that are installed."""
    adamw = dict(ADAMW)
    for package, (moved, made) in PEERS.items():
        if importlib.util.find_spec(package) is not None:
            adamw[f"{package}, 8-bit states"] = (moved, made(importlib.import_module(package)))
    return {"AdamW": adamw, "LAMB": LAMB, "Adafactor": ADAFACTOR}


def _draw(shapes: Shapes) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator) * 1e-2
    return params


def _check(name: str, expected: Sequence[torch.Tensor], params: Sequence[torch.Tensor]) -> None:
    """After one step, of lr = 1e-3 at most; clipped gradients feel eps where they are tiny."""
    off = sum((p - e).abs().sum().item() for p, e in zip(params, expected, strict=True)) / ELEMENTS
    if not off < 1e-6:
        raise RuntimeError(f"{name} is off by {off:.1e} on average after a step")


def _run(step: Callable[[], Any], clock: Clock) -> Sample:
    return clock(step)


def measure(
    contenders: dict[str, tuple[float, Make]], shapes: Shapes, seconds: float
) -> dict[str, tuple[float, float, float]]:
    """Milliseconds of a step: median, p20 and p80."""
    optimizers: dict[str, Any] = {}
    expected: list[torch.Tensor] = []
    for name, (_, make) in contenders.items():
        params = _draw(shapes)
        optimizers[name] = make(params)
        optimizers[name].step()
        expected = expected or [p.detach().clone() for p in params]
        _check(name, expected, params)
    times = interleaved(
        [partial(_run, optimizer.step) for optimizer in optimizers.values()],
        clock_for("cpu"),
        seconds=seconds,
        at_least=9,
        at_most=200,
    )
    return {
        name: (t.quantile(0.5), t.quantile(0.2), t.quantile(0.8))
        for name, t in zip(optimizers, times, strict=True)
    }


def main() -> None:
    """Measures on the CPU, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each case")
    options = parser.parse_args()
    conditions.settle(default_allocator=False)
    facts = machine("cpu")
    print(f"{facts['name']}, {torch.get_num_threads()} threads, {conditions.describe()}")
    headers = ["case", "rule", "by", "ms", "p20", "p80", "GB/s", "vs the first"]
    table = Table(headers, numbers_from=3)
    wanted = [(case, rule) for rule in rules() for case in CASES]
    for at in progress(wanted):
        case, rule = wanted[at]
        contenders, shapes = rules()[rule], CASES[case]
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        found = measure(contenders, shapes, options.seconds)
        first = next(iter(found.values()))[0]
        for i, (name, (median, p20, p80)) in enumerate(found.items()):
            gbps = contenders[name][0] * elements / median / 1e6
            cells = [f"{median:.2f}", f"{p20:.2f}", f"{p80:.2f}", f"{gbps:.1f}"]
            table.add(case, rule, name, *cells, f"{first / median:.2f}x", group=i == 0)
    table.show()


if __name__ == "__main__":
    main()
