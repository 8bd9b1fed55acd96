"""A small GPT in a pipeline of four stages: python -m torchweld.bench.studies.stashing.

1F1B waits for all microbatches before it updates weights; PipeDream, vertical sync and 2BW
update while microbatches are in flight, with weights that are some updates old. All see the same
text in the same order. The plot shows the loss over sequences, since the schedules take different
numbers of updates.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from torchweld.bench.studies.convergence import BATCH, LENGTH, WIDTH, Block
from torchweld.bench.training import read_text
from torchweld.distributed import parallelize
from torchweld.table import Table

STAGES, MICROBATCHES = 4, 8
SCHEDULES = ("1f1b", "2bw", "pipedream", "vertical")
# An update of a microbatch has an eighth of the sequences of a step's.
RATES = {"1f1b": 2e-3, "2bw": 2e-3, "pipedream": 7e-4, "vertical": 7e-4}
LAST = 20  # steps whose mean is the final loss


class Embedding(nn.Module):
    """Tokens and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.place.weight


def compute_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute the mean cross-entropy over a microbatch's tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _train(rank: int, schedule: str, steps: int, seed: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=STAGES)
    torch.manual_seed(seed)
    layers = [Block() for _ in range(STAGES)]
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))
    optimizer = {"name": "adamw", "lr": RATES[schedule], "betas": (0.9, 0.99)}
    rows = BATCH // MICROBATCHES
    training = parallelize(
        nn.Sequential(Embedding(), *layers, head),
        {"pipeline": {"size": STAGES, "schedule": schedule}, "optimizer": optimizer},
        device="cpu",
        example=(torch.zeros((rows, LENGTH), dtype=torch.int64),),
        loss_fn=compute_loss,
        microbatches=MICROBATCHES,
        quiet=True,
    )
    data, losses = read_text(), []
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH, 1), generator=generator)
        batch = data[starts + torch.arange(LENGTH + 1)].long()
        pairs = [(part[:, :-1], part[:, 1:]) for part in batch.chunk(MICROBATCHES)]
        losses.append(training.step(pairs, step)[0].item())
    if rank == 0:
        (Path(folder) / "losses").write_text(json.dumps(losses))
    dist.destroy_process_group()


def train(schedule: str, steps: int, seed: int = 0) -> list[float]:
    """Return the loss of every step."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_train, (schedule, steps, seed, folder), nprocs=STAGES)
        return json.loads((Path(folder) / "losses").read_text())  # type: ignore[no-any-return]


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """Plot smoothed losses over the sequences seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for schedule, losses in curves.items():
        smooth = torch.tensor(losses).unfold(0, LAST, 1).mean(1)
        seen = [BATCH * step for step in range(LAST, LAST + len(smooth))]
        panel.plot(seen, smooth, label=schedule, linewidth=1.3)
    panel.set_xlabel("sequences")
    panel.set_ylabel(f"loss, mean of {LAST} steps")
    panel.legend(frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"A GPT in {STAGES} stages, {MICROBATCHES} microbatches of a step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with each schedule, print the final losses, and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--plot", type=Path, help="a PNG for the curves")
    options = parser.parse_args(arguments)
    curves = {schedule: train(schedule, options.steps) for schedule in SCHEDULES}
    table = Table(("schedule", "learning rate", "final loss"), 1)
    for schedule, losses in curves.items():
        final = sum(losses[-LAST:]) / LAST
        table.add(schedule, f"{RATES[schedule]:g}", f"{final:.4f}")
    table.show()
    if options.plot:
        plot(curves, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
