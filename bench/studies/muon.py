"""A small GPT trained with AdamW and with Muon: python -m torchweld.bench.studies.muon.

The model, the text and the batches are those of the study of codecs. Each learning rate is the best
of a few for its optimizer; --rates tries them. The result is the mean loss of the last steps.
--times compares steps with torch's Muon, in turns.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from torchweld import optim
from torchweld.bench import machine
from torchweld.bench.studies.attention_costs import milliseconds
from torchweld.bench.studies.convergence import BATCH, GPT, LAST, LENGTH, final
from torchweld.bench.training import read_text
from torchweld.table import Table, progress

ADAMW, MUON, EIGHT_BITS = "AdamW", "Muon", "Muon, 8-bit momentum"
RATES = {ADAMW: 1e-2, MUON: 2e-2, EIGHT_BITS: 2e-2}
REST = 2e-3  # of what Muon leaves to AdamW
GPT_LAYER = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
MATRICES = {
    "126 of 64 x 64": [(64, 64)] * 126,
    "126 of 64 x 256": [(64, 256)] * 126,
    "8 of 256 x 1024": [(256, 1024)] * 8,
    "2 of 768 x 3072": [(768, 3072)] * 2,
    "12 layers of a GPT of width 768": GPT_LAYER * 12,
}
TIMED: dict[str, dict[str, Any]] = {
    "standard": {},
    "gram": {"algorithm": "gram"},
    "standard, float32": {"ns_dtype": torch.float32},
    "gram, float32": {"algorithm": "gram", "ns_dtype": torch.float32},
}


def _make(name: str, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    settings: dict[str, Any] = {"betas": (0.9, 0.99), "weight_decay": 0.1}
    if name == ADAMW:
        return optim.AdamW(model.parameters(), lr, max_grad_norm=1.0, **settings)
    groups = optim.muon_groups(model, verbose=False, lr=REST, **settings)
    state_dtype: Any = "8bit" if name == EIGHT_BITS else torch.float32
    return optim.Muon(groups, lr, max_grad_norm=1.0, state_dtype=state_dtype)


def train(name: str, seed: int, steps: int, lr: float) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(seed)
    model = GPT()
    optimizer = _make(name, model, lr)
    highest = [group["lr"] for group in optimizer.param_groups]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, highest, total_steps=steps, cycle_momentum=False
    )
    data, losses = read_text(), []
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH, 1))
        batch = data[starts + torch.arange(LENGTH + 1)].long()
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def time_steps(seconds: float) -> None:
    """Print the time of torch's step, and each of ours relative to it."""
    table = Table(["matrices", "torch, ms", *(f"{name}, torch = 1" for name in TIMED)], 1)
    for name, shapes in MATRICES.items():
        makers: dict[str, Any] = {"torch": torch.optim.Muon}
        for way, settings in TIMED.items():
            makers[way] = functools.partial(optim.Muon, **settings)
        steps = {}
        for way, make in makers.items():
            params = [torch.nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes]
            for p in params:
                p.grad = torch.randn_like(p)
            steps[way] = make(params).step
        times = milliseconds(steps, seconds, 3)
        ratios = (f"{times['torch'] / times[way]:.2f}x" for way in TIMED)
        table.add(name, f"{times['torch']:.1f}", *ratios)
    table.show()


def plot(curves: dict[str, list[list[float]]], path: Path) -> None:
    """Plot the losses of all seeds, and their distance from Muon's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, ratios) = pyplot.subplots(
        2, 1, figsize=(8, 6.5), sharex=True, layout="constrained", height_ratios=(2, 1)
    )
    smooth = {name: torch.tensor(c).unfold(1, LAST, 1).mean(2) for name, c in curves.items()}
    for at, (name, of_seeds) in enumerate(smooth.items()):
        steps = range(LAST, LAST + of_seeds.shape[1])
        style = "--" if name == EIGHT_BITS else "-"
        for seed, curve in enumerate(of_seeds):
            label = None if seed else name
            losses.plot(steps, curve, style, label=label, color=f"C{at}", linewidth=1.2)
            ratio = 100 * (curve / smooth[MUON][seed] - 1)
            ratios.plot(steps, ratio, style, color=f"C{at}", linewidth=1.2)
    losses.set_ylabel(f"loss, mean of {LAST} steps")
    ratios.set_ylabel("% above Muon's")
    ratios.set_xlabel("step")
    losses.legend(frameon=False)
    for panel in (losses, ratios):
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle("A GPT of 0.9 M parameters, a line for each seed")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> None:
    """Train, print a table of final losses, and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", help="only try these, with one seed")
    parser.add_argument("--plot", type=Path, help="a PNG for the curves")
    parser.add_argument("--times", type=float, metavar="SECONDS", help="only time steps: each row")
    options = parser.parse_args()
    if options.times:
        machine.settle(default_allocator=False)
        return time_steps(options.times)
    if options.rates:
        table = Table(["", "lr", "final loss"], 1)
        for name in (ADAMW, MUON):
            for lr in options.rates:
                table.add(name, f"{lr:g}", f"{final(train(name, 0, options.steps, lr)):.4f}")
        return table.show()
    runs = [(name, seed) for name in RATES for seed in range(options.seeds)]
    curves: dict[str, list[list[float]]] = {name: [] for name in RATES}
    for at in progress(runs):
        name, seed = runs[at]
        curves[name].append(train(name, seed, options.steps, RATES[name]))
    table = Table(["", "final loss of each seed", "mean ratio to Muon's"], 2)
    for name, of_seeds in curves.items():
        pairs = [(final(c), final(m)) for c, m in zip(of_seeds, curves[MUON], strict=True)]
        ratio = sum(mine / of_muon for mine, of_muon in pairs) / len(pairs)
        table.add(name, " ".join(f"{mine:.4f}" for mine, _ in pairs), f"{ratio:.4f}")
    table.show()
    if options.plot:
        plot(curves, options.plot)


if __name__ == "__main__":
    main()
