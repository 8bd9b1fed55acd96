"""A small GPT trained with each state codec: python -m torchweld.bench.studies.convergence.

The text is the Python library's documentation and source, read byte by byte. Every codec starts
from the same weights and sees the same batches. The result is the mean loss of the last steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from torchweld import optim
from torchweld.bench.training import read_text
from torchweld.table import Table, progress

WIDTH, LAYERS, HEADS, LENGTH, BATCH = 128, 4, 4, 64, 16
LAST = 50  # steps whose mean is the final loss

# Name -> the parameters' dtype and AdamW's settings. The baseline is the first codec with the same
# dtype.
CODECS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16 states": (torch.float32, {"state_dtype": torch.bfloat16}),
    "8-bit states": (torch.float32, {"state_dtype": "8bit"}),
    "bfloat16, masters": (torch.bfloat16, {"master_weights": True}),
    "bfloat16, remainders": (torch.bfloat16, {"master_weights": "remainder"}),
    "bfloat16, remainders, 8-bit states": (
        torch.bfloat16,
        {"master_weights": "remainder", "state_dtype": "8bit"},
    ),
    "bfloat16, rounded stochastically": (torch.bfloat16, {"stochastic_rounding": True}),
    "bfloat16, rounded stochastically, 8-bit states": (
        torch.bfloat16,
        {"stochastic_rounding": True, "state_dtype": "8bit"},
    ),
    "bfloat16, rounded to the nearest": (torch.bfloat16, {}),
}


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """A GPT on bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place.weight
        return self.head(self.norm(self.blocks(x)))


def train(codec: str, seed: int, steps: int) -> list[float]:
    """The loss of every step."""
    dtype, settings = CODECS[codec]
    torch.manual_seed(seed)
    model = GPT().to(dtype)
    optimizer = optim.AdamW(
        model.parameters(),
        lr=2e-3,
        betas=(0.9, 0.99),
        weight_decay=0.1,
        max_grad_norm=1.0,
        **settings,
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    data, losses = read_text(), []
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH, 1))
        batch = data[starts + torch.arange(LENGTH + 1)].long()
        logits = model(batch[:, :-1]).float()
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def final(losses: Sequence[float]) -> float:
    return sum(losses[-LAST:]) / len(losses[-LAST:])


def plot(curves: dict[str, list[list[float]]], path: Path) -> None:
    """Plot the losses of the first seed, and each codec's distance from its baseline."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, ratios) = pyplot.subplots(
        2, 1, figsize=(9, 7), sharex=True, layout="constrained", height_ratios=(2, 1)
    )
    for at, (codec, of_seeds) in enumerate(curves.items()):
        colour = f"C{at}"
        smooth = torch.tensor(of_seeds[0]).unfold(0, LAST, 1).mean(1)
        steps = range(LAST, LAST + len(smooth))
        losses.plot(steps, smooth, label=codec, color=colour, linewidth=1.3)
        peer = torch.tensor(curves[compared_with(codec)][0]).unfold(0, LAST, 1).mean(1)
        ratios.plot(steps, 100 * (smooth / peer - 1), color=colour, linewidth=1.3)
    losses.set_ylabel(f"loss, mean of {LAST} steps")
    ratios.set_ylabel("% above the float32 states'")
    ratios.set_xlabel("step")
    losses.legend(frameon=False)
    for panel in (losses, ratios):
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"AdamW on a GPT of {LAYERS} layers, one seed")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def compared_with(codec: str) -> str:
    """The first codec with the same parameter dtype."""
    return next(name for name in CODECS if CODECS[name][0] is CODECS[codec][0])


def main() -> None:
    """Train, print a table of final losses, and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=Path, help="a PNG for the curves")
    options = parser.parse_args()
    runs = [(codec, seed) for codec in CODECS for seed in range(options.seeds)]
    curves: dict[str, list[list[float]]] = {codec: [] for codec in CODECS}
    for at in progress(runs):
        codec, seed = runs[at]
        curves[codec].append(train(codec, seed, options.steps))
    table = Table(["AdamW", "compared with", "final loss of each seed", "mean ratio"], 2)
    for codec, of_seeds in curves.items():
        finals = [final(losses) for losses in of_seeds]
        peers = [final(losses) for losses in curves[compared_with(codec)]]
        ratio = sum(f / p for f, p in zip(finals, peers, strict=True)) / len(finals)
        cells = " ".join(f"{loss:.4f}" for loss in finals)
        table.add(codec, compared_with(codec), cells, f"{ratio:.4f}")
    table.show()
    if options.plot:
        plot(curves, options.plot)


if __name__ == "__main__":
    main()
