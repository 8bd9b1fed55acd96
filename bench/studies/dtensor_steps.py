"""Steps on DTensors beside torch's: python -m torchweld.bench.studies.dtensor_steps.

A model of 600 small parameters is sharded by FSDP2 over processes that gloo connects. Three AdamW
take steps with the same gradients: ours, torch's fused and torch's foreach one. They take turns of
some steps, so that what else the machine does meets all of them. The results are the time of a step
on the host, and how many objects and how much memory each leaves behind.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from torchweld import optim
from torchweld.table import Table

BLOCKS, WIDTH, TURN = 150, 32, 10  # four parameters a block
MAKERS: dict[str, Any] = {
    "torchweld": lambda p: optim.AdamW(p),
    "torch, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "torch, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
}


def _make_model(mesh: Any) -> torch.nn.Module:
    from torch.distributed.fsdp import fully_shard

    linear = torch.nn.Linear
    blocks = [
        torch.nn.Sequential(linear(WIDTH, WIDTH), linear(WIDTH, WIDTH)) for _ in range(BLOCKS)
    ]
    model = torch.nn.Sequential(*blocks)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    return model


def _resident() -> int:
    """The bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _work(rank: int, folder: str, count: int, steps: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count
    )
    mesh = init_device_mesh("cpu", (count,))
    models = {name: _make_model(mesh) for name in MAKERS}
    optimizers = {name: make(models[name].parameters()) for name, make in MAKERS.items()}
    for optimizer in optimizers.values():
        optimizer.step()  # makes states
    figures: dict[str, Any] = {
        name: {"seconds": [], "objects": [0], "bytes": [0]} for name in MAKERS
    }
    for _ in range(steps // TURN):
        for name, optimizer in optimizers.items():
            gc.collect()
            objects, resident = len(gc.get_objects()), _resident()
            for _ in range(TURN):
                torch.distributed.barrier()
                begin = time.perf_counter()
                optimizer.step()
                figures[name]["seconds"].append(time.perf_counter() - begin)
            gc.collect()
            of = figures[name]
            of["objects"].append(of["objects"][-1] + len(gc.get_objects()) - objects)
            of["bytes"].append(of["bytes"][-1] + _resident() - resident)
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps(figures))
    torch.distributed.destroy_process_group()


def measure(count: int, steps: int) -> dict[str, Any]:
    """Times, live objects and bytes of rank 0, for each optimizer."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_work, (folder, count, steps), count)
        return json.loads(Path(folder, "figures.json").read_text())


def plot(results: dict[int, dict[str, Any]], path: Path) -> None:
    """Plot the times of steps, and the objects that are left, for each number of processes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2,
        len(results),
        figsize=(4.6 * len(results), 6),
        sharex=True,
        layout="constrained",
        squeeze=False,
    )
    for column, (count, figures) in enumerate(results.items()):
        times, objects = axes[0][column], axes[1][column]
        for at, (name, of) in enumerate(figures.items()):
            turns = torch.tensor(of["seconds"]).view(-1, TURN).median(1).values * 1e3
            steps = [TURN * (i + 1) for i in range(len(turns))]
            times.plot(steps, turns, label=name, color=f"C{at}", linewidth=1.3)
            objects.plot([0, *steps], of["objects"], color=f"C{at}", linewidth=1.3)
        times.set_title(f"{count} processes", loc="left", fontsize=11)
        times.set_ylim(bottom=0)
        objects.set_xlabel("step")
    axes[0][0].set_ylabel(f"ms a step, median of {TURN}")
    axes[1][0].set_ylabel("Python objects left behind")
    axes[0][0].legend(frameon=False)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"AdamW on {4 * BLOCKS} DTensors of FSDP2, torch {torch.__version__}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    """Measure, print a table, and draw the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--plot", type=Path, help="a PNG")
    options = parser.parse_args()
    results = {count: measure(count, options.steps) for count in options.ranks}
    heads = ["", "processes", "ms a step", "of the first 50", "of the last 50", "objects", "MiB"]
    table = Table(heads, 1)
    for count, figures in results.items():
        for name, of in figures.items():
            seconds = of["seconds"]
            parts = [1e3 * median(some) for some in (seconds, seconds[:50], seconds[-50:])]
            grown = f"{of['bytes'][-1] / 2**20:.1f}"
            cells = [str(count), *(f"{part:.2f}" for part in parts), str(of["objects"][-1]), grown]
            table.add(name, *cells)
    table.show()
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
