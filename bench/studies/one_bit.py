"""A small GPT trained with Adam and with 1-bit Adam on two processes: python -m
torchweld.bench.studies.one_bit.

All start from the same weights and see the same batches. 1-bit Adam runs with error feedback and
without it. The result is the mean loss of the last steps, over both processes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from torchweld import optim
from torchweld.bench.studies.convergence import GPT, LAST, LENGTH, final
from torchweld.bench.training import read_text
from torchweld.collectives.one_bit import Errors
from torchweld.table import Table

RANKS, BATCH, RATE = 2, 8, 1e-3
WARM_UP = 0.25  # of all steps, before the freeze
ADAM, KEPT, DROPPED = "Adam", "1-bit Adam", "1-bit Adam without error feedback"


class WithoutFeedback(optim.OneBitAdam):
    """1-bit Adam that discards quantisation errors."""

    def _reduce(self, owned: Sequence[Any]) -> Any:
        entries = super()._reduce(owned)
        for _, _, errors in entries:
            for error in errors:
                if error is not None:
                    error.zero_()
        return [(p, packed, Errors(*errors)) for p, packed, errors in entries]


def _optimizer(name: str, model: torch.nn.Module, whole: Any, steps: int) -> Any:
    if name == ADAM:
        return optim.Adam(model.parameters(), lr=RATE)
    made = optim.OneBitAdam if name == KEPT else WithoutFeedback
    freeze_step = int(WARM_UP * steps)
    optimizer = made(model.parameters(), lr=RATE, freeze_step=freeze_step, bias_correction=True)
    optimizer.attach(whole)
    return optimizer


def _train(name: str, seed: int, steps: int) -> list[float]:
    """The loss of every step, averaged over both processes."""
    torch.manual_seed(seed)
    model = GPT()
    whole = DistributedDataParallel(model)
    optimizer = _optimizer(name, model, whole, steps)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    data, losses = read_text(), []
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH, 1), generator=generator)
        batch = data[starts + torch.arange(LENGTH + 1)].long()
        loss = cross_entropy(whole(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    return (mean / RANKS).tolist()


def _work(rank: int, folder: str, seeds: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    curves: dict[str, list[list[float]]] = {}
    for name in (ADAM, KEPT, DROPPED):
        curves[name] = [_train(name, seed, steps) for seed in range(seeds)]
        if rank == 0:
            print(name, *(f"{final(losses):.4f}" for losses in curves[name]), flush=True)
    if rank == 0:
        torch.save(curves, Path(folder, "curves.pt"))
    dist.destroy_process_group()


def plot(curves: dict[str, list[list[float]]], path: Path) -> None:
    """Plot the losses of all seeds, and their excess over Adam's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, ratios) = pyplot.subplots(
        2, 1, figsize=(9, 7), sharex=True, layout="constrained", height_ratios=(2, 1)
    )
    smooth = {name: torch.tensor(c).unfold(1, LAST, 1).mean(2) for name, c in curves.items()}
    for at, (name, of_seeds) in enumerate(smooth.items()):
        steps = range(LAST, LAST + of_seeds.shape[1])
        for seed, curve in enumerate(of_seeds):
            label = None if seed else name
            losses.plot(steps, curve, label=label, color=f"C{at}", linewidth=1.2)
            ratio = 100 * (curve / smooth[ADAM][seed] - 1)
            ratios.plot(steps, ratio, color=f"C{at}", linewidth=1.2)
    total = len(curves[ADAM][0])
    for panel in (losses, ratios):
        panel.axvline(WARM_UP * total, color="grey", linestyle=":", linewidth=1)
        panel.spines[["top", "right"]].set_visible(False)
    losses.set_ylim(top=min(smooth[ADAM].max().item(), losses.get_ylim()[1]))
    losses.set_ylabel(f"loss, mean of {LAST} steps")
    ratios.set_ylabel("% above Adam's")
    ratios.set_ylim(-2, 15)
    ratios.set_xlabel("step; dotted: second moments freeze")
    losses.legend(frameon=False)
    figure.suptitle(f"A GPT of 0.9 M parameters on {RANKS} processes, a line for each seed")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    """Train, print a table of final losses, and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="a PNG for the curves")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, options.seeds, options.steps)
        torch.multiprocessing.spawn(_work, arguments, RANKS)
        curves = torch.load(Path(folder, "curves.pt"))
    table = Table(["", "final loss of each seed", "mean ratio to Adam's"], 2)
    for name, of_seeds in curves.items():
        pairs = [(final(c), final(a)) for c, a in zip(of_seeds, curves[ADAM], strict=True)]
        ratio = sum(mine / adams for mine, adams in pairs) / len(pairs)
        table.add(name, " ".join(f"{mine:.4f}" for mine, _ in pairs), f"{ratio:.4f}")
    table.show()
    if options.plot:
        plot(curves, options.plot)


if __name__ == "__main__":
    main()
