"""`torchweld link`: how fast a group's link is, and which compression pays on it, if any.

DistributedDataParallel's exchange hides behind the backward pass, two thirds of the computation. A
1-bit optimizer quantises and exchanges after the backward pass; its warm-up averages in float32.
FSDP2 also gathers parameters. The measure is time to a loss, not bytes: a 1-bit optimizer takes as
many steps as Adam. Adam on 1-bit gradients takes more steps, and their number cannot be predicted.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchweld.distributed.one_bit.link import Link, measure_link
from torchweld.table import Table

BACKWARD = 2 / 3  # of a step's computation
WARM_UP = 0.2  # of all steps of a 1-bit optimizer
PAYS = 1.05  # a smaller gain is within the variation of steps


@dataclass(frozen=True)
class Reduction:
    """One way to reduce gradients: the bytes per step, and the mean seconds over a whole run."""

    name: str
    sent: float
    step: float
    is_adam: bool = True  # whether it needs as many steps as Adam


def choices(link: Link, parameters: float, computing: float) -> list[Reduction]:
    """Ways to reduce the gradients of `parameters` when a step computes for `computing` seconds."""
    others = link.ranks - 1
    ring = 2 * others / link.ranks

    def behind_backward(name: str, of_element: float) -> Reduction:
        sent = ring * of_element * parameters
        shown = max(0.0, link.seconds(sent, 2 * others) - BACKWARD * computing)
        return Reduction(name, sent, computing + shown)

    plain = behind_backward("float32: DDP", 4)
    bits = ring * parameters / 8
    frozen = computing + link.seconds(bits, 3) + link.quantising * parameters
    warm = computing + link.seconds(plain.sent, 2 * others)
    return [
        plain,
        behind_backward("bfloat16: DDP, bf16_compress_hook", 2),
        # Half a ring, and parameters in bfloat16, gathered twice.
        behind_backward("8 bits: FSDP2, reduce_in_low_precision", (1 + 4 / 256 + 2 * 2) / 2),
        Reduction("1 bit: DDP, one_bit_hook", bits, frozen, is_adam=False),
        Reduction("1 bit: OneBitAdam", bits, WARM_UP * warm + (1 - WARM_UP) * frozen),
    ]


def verdict(ways: list[Reduction]) -> str:
    """Which choice pays, and by how much."""
    plain = ways[0]
    best = min((choice for choice in ways if choice.is_adam), key=lambda choice: choice.step)
    gain = plain.step / best.step
    if gain < PAYS:
        return "None pays: the exchange is hidden behind the computation, or nearly so."
    return f"{best.name} pays: a run takes {gain:.2f} times less time than with DDP in float32."


def show(link: Link, parameters: float, computing: float, batch: int) -> None:
    """Print the measurement, the choices and the recommendation."""
    print(
        f"{link.ranks} ranks, {link.bandwidth * 8 / 1e9:.3g} Gbit/s from each, "
        f"latency {link.latency * 1e3:.3g} ms; {parameters / 1e6:.4g} M parameters, "
        f"{computing * 1e3:.4g} ms of computation per step"
    )
    ways = choices(link, parameters, computing)
    print(table(ways, batch * link.ranks).plain())
    print(verdict(ways))


def table(ways: list[Reduction], batch: int) -> Table:
    """A table with a row for each choice."""
    shown = Table(["gradients", "Adam's loss", "MB a step", "ms a step", "samples/s", "gain"], 2)
    for choice in ways:
        shown.add(
            choice.name,
            "in as many steps" if choice.is_adam else "in more steps",
            f"{choice.sent / 1e6:.4g}",
            f"{choice.step * 1e3:.4g}",
            f"{batch / choice.step:.4g}",
            f"{ways[0].step / choice.step:.2f}",
        )
    return shown


def run(options: argparse.Namespace) -> int:
    """Measure the group in which torchrun started this process."""
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        print(
            "torchweld link measures a group of two or more: torchrun --nproc-per-node 2 "
            "-m torchweld link --parameters 350e6 --step-ms 400 --batch 8"
        )
        return 2
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if has_gpu else "gloo")
    try:
        link = measure_link()
        if dist.get_rank() == 0:
            show(link, options.parameters, options.step_ms / 1e3, options.batch)
    finally:
        dist.destroy_process_group()
    return 0
