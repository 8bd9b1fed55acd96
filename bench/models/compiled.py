"""Models under torch.compile, with welds and without: python -m torchweld.bench.models.compiled.

CPU milliseconds of one thread for a forward and backward pass. The contenders of a model take turns
in one process, so run a process for each model. Medians, and medians of ratios within a turn.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchweld
from torchweld.bench.models import huggingface, training
from torchweld.bench.models.huggingface import Size
from torchweld.bench.models.whole import BACKEND, BOTH, COMPILED, FUSED
from torchweld.files import write_json
from torchweld.table import Table

SIZE = Size(words=8000, width=256, layers=2, heads=4, batch=2, length=128)
NAMES = ("GPT-2", "Llama", "BERT", "ViT", "T5", "Mixtral")
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    COMPILED: training.compiled,
    FUSED: torchweld.fuse,
    BOTH: lambda model: training.compiled(torchweld.fuse(model)),
    BACKEND: lambda model: training.compiled(model, backend="torchweld"),
}


def measure(name: str, turns: int, size: Size = SIZE) -> dict[str, dict[str, Any]]:
    """Milliseconds, their ratio to torch.compile's, and the peak memory of each contender."""
    model, batch = huggingface.build(name, size)
    model.train()
    made = {way: make(copy.deepcopy(model)) for way, make in WAYS.items()}
    for _ in range(3):
        for each in made.values():
            _step(each, batch)
    taken: dict[str, list[float]] = {way: [] for way in made}
    for turn in range(turns):
        ways = [*made]
        for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            taken[way].append(_step(made[way], batch))
    found = {}
    for way, times in taken.items():
        ratios = [mine / plain for mine, plain in zip(times, taken[COMPILED], strict=True)]
        peak = _find_peak(lambda way=way: _step(made[way], batch))  # type: ignore[misc]
        found[way] = {
            "ms": statistics.median(times),
            "ratio": statistics.median(ratios),
            "peak_bytes": peak,
        }
    return found


def _step(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> float:
    model.zero_grad(set_to_none=False)
    start = time.process_time()
    model(**batch).loss.backward()
    return 1e3 * (time.process_time() - start)


def _find_peak(call: Callable[[], Any]) -> int:
    """The most that the process holds during a call beyond what it held before.

    Compiled code does not allocate by torch's ops, so the system is asked, as Linux counts. Freed
    memory goes back first.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _read_status("VmRSS")
    call()
    return max(0, _read_status("VmHWM") - before)


def _read_status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))


def show(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """A row for each model and contender."""
    table = Table(["model", "contender", "CPU ms", "of compiled", "peak MB"], numbers_from=2)
    for name, ways in found.items():
        for way, row in ways.items():
            cells = (f"{row['ms']:.1f}", f"{row['ratio']:.2f}", f"{row['peak_bytes'] / 1e6:.0f}")
            table.add(name, way, *cells)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *huggingface.MODELS], help="default: six")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in options.names or NAMES:
        found[name] = measure(name, options.turns)
        torch.compiler.reset()
        if options.json:
            write_json(options.json, found)
    show(found).show()


if __name__ == "__main__":
    main()
