"""A training step on the CPU under each allocator: `python -m torchweld.bench.studies.allocators`.

The allocators are plain glibc, glibc with keep_pages(), and jemalloc and tcmalloc, preloaded if
they are installed. Each runs in its own process, since a process has one allocator.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
from ctypes.util import find_library

import torch
from torch.nn.functional import cross_entropy

import torchweld
from torchweld import optim
from torchweld.bench.demo import BATCH, GPT, LENGTH
from torchweld.bench.training import Learner
from torchweld.table import Table

DEFAULT, KEPT = "glibc", "glibc, keep_pages()"
# Library names without lib and .so.
PRELOADED = ("jemalloc", "tcmalloc_minimal")
WIDTH, STEPS, WARM = 256, 3, 1


def main() -> None:
    """Print a table of step times and memory."""
    allocators = [DEFAULT, KEPT, *(name for name in PRELOADED if find_library(name))]
    table = Table(
        ["allocator", "model", "step ms", "page faults a step", "peak MB", "MB after"],
        numbers_from=2,
    )
    print(f"a GPT of 4 layers, width {WIDTH}, {BATCH * LENGTH} tokens a step, float32, dropout 0.1")
    for allocator in allocators:
        for model in ("eager", "fused"):
            figures = _in_a_process(allocator, model)
            table.add(allocator, model, *figures, group=model == "eager")
    table.show()


def _in_a_process(allocator: str, model: str) -> list[str]:
    environment = dict(os.environ)
    if library := find_library(allocator) if allocator in PRELOADED else None:
        environment["LD_PRELOAD"] = library
    command = [sys.executable, "-m", __spec__.name, allocator, model]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: list[str] = json.loads(done.stdout)
    return figures


def _measure(allocator: str, name: str) -> list[str]:
    """The median step in ms, its page faults, and the process's peak and final resident size."""
    if allocator != DEFAULT:
        kept = torchweld.keep_pages()
        assert bool(kept) == (allocator == KEPT), kept.reason
    torch.manual_seed(0)
    model = GPT(WIDTH, 0.1)
    if name == "fused":
        torchweld.fuse(model)
        optimizer: torch.optim.Optimizer = optim.AdamW(model.parameters(), 1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    tokens = torch.randint(256, (BATCH, LENGTH + 1))

    def loss(model: torch.nn.Module, _: int) -> torch.Tensor:
        return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    learner = Learner(name, model, optimizer, loss)
    for _ in range(WARM):
        learner.learn()
    faults = _count_faults()
    times = [learner.learn().total for _ in range(STEPS)]
    faults = (_count_faults() - faults) // STEPS
    resident, peak = _read_status("VmRSS"), _read_status("VmHWM")
    return [
        f"{statistics.median(times):.0f}",
        f"{faults}",
        f"{peak / 1e6:.0f}",
        f"{resident / 1e6:.0f}",
    ]


def _count_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _read_status(name: str) -> int:
    """Read one of this process's sizes in bytes; `ru_maxrss` would begin at its parent's."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields[name].split()[0]) * 1024


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(_measure(*sys.argv[1:])))
    else:
        main()
