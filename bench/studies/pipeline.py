"""Bubble and overhead of pipeline schedules: python -m torchweld.bench.studies.pipeline --ranks 2.

Stages consist of layers that compute, one thread each, or with --sleep of layers that sleep for a
known time. Sleeping measures only the schedule, even with fewer cores than ranks. The table has the
shortest step, and the median of all steps' idle shares.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

import torchweld
from torchweld.dispatch.autograd import list_reached
from torchweld.distributed import pipeline, record, stages
from torchweld.distributed.timeline import Timeline, estimate_bubble
from torchweld.table import Table


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        to_x, to_weight, _ = list_reached(ctx)
        # Sleep even if x needs no gradient.
        time.sleep(ctx.seconds * (to_x + to_weight + (not ctx.needs_input_grad[0])))
        return grad if to_x else None, grad.sum(0) if to_weight else None, None


class Sleeper(nn.Module):
    """Sleeps for `seconds` in the forward pass and in each half of the backward pass."""

    def __init__(self, seconds: float, width: int = 4) -> None:
        super().__init__()
        self.seconds, self.weight = seconds, nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Asleep.apply(x, self.weight, self.seconds)


class Layer(nn.Module):
    """The feed-forward half of a transformer layer, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torchweld.nn.LayerNorm(width)
        self.mlp = torchweld.nn.MLP(width, 4 * width)
        self.add = torchweld.nn.BiasDropoutAdd(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add(self.mlp(self.norm(x)), None, x)


class Shift(nn.Module):
    """A learnt shift before the first layer, which then computes its input's gradient as others do.

    Without it the first stage has less work than the others and idles more than the formula says.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def measure(schedule: stages.Name, options: argparse.Namespace) -> list[Timeline]:
    """Several steps, the shortest first, after one warm-up step."""
    device = torch.device("cuda" if options.cuda else "cpu")
    width, layers = options.width, 2 * options.layers * dist.get_world_size()
    blocks: list[nn.Module] = [
        Sleeper(options.sleep / 1e3, width) if options.sleep else Layer(width)
        for _ in range(layers)
    ]
    blocks = [block.to(device) for block in (Shift(width), *blocks)]
    batch = torch.randn(options.microbatches * options.rows, width, device=device)
    pipe = pipeline(
        blocks,
        schedule,
        options.microbatches,
        lambda y, _: y.square().mean(),
        (batch[: options.rows],),
        costs=[0.0] + [1.0] * layers,
    )
    timelines = []
    for _ in range(options.steps + 1):
        with record(pipe.schedule) as timeline:
            arguments = (batch,) if pipe.is_first else ()
            pipe.schedule.step(*arguments, target=batch if pipe.is_last else None)
        timelines.append(timeline)
    return sorted(timelines[1:], key=lambda timeline: timeline.span[1] - timeline.span[0])


def _work(rank: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if options.cuda:
        torch.cuda.set_device(rank)
    backend = "nccl" if options.cuda else "gloo"
    dist.init_process_group(backend, f"file://{store}", rank=rank, world_size=options.ranks)
    columns = ("schedule", "step ms", "idle", "median idle", "(p-1)/(m+p-1)", "overhead")
    table, expected = Table(columns, 1), estimate_bubble(options.ranks, options.microbatches)
    for schedule in options.schedules:
        timelines = measure(schedule, options)
        timeline, median = timelines[0], statistics.median(t.bubble() for t in timelines)
        begin, end = timeline.span
        every = (timeline.bubble(), median, expected, timeline.overhead())
        shares = [f"{share:.1%}" for share in every]
        table.add(schedule, f"{1e3 * (end - begin):.1f}", *shares)
        if rank == 0 and options.plot:
            options.plot.mkdir(parents=True, exist_ok=True)
            timeline.draw(options.plot / f"{schedule}.png")
    if rank == 0:
        table.show()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, print a table, and draw the timelines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedules", nargs="+", default=get_args(stages.Name))
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=1, help="half of a rank's layers")
    parser.add_argument("--rows", type=int, default=512, help="of a microbatch")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument(
        "--sleep", type=float, default=0.0, help="milliseconds to sleep instead of computing"
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--plot", type=Path, help="folder for the timelines")
    options = parser.parse_args()
    options.cuda = torch.cuda.device_count() >= options.ranks
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        arguments = (str(Path(folder) / "store"), options)
        torch.multiprocessing.spawn(_work, arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
