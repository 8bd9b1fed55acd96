"""`torchweld demo`: a small GPT learns the text of Python's library, eager and fused.

Every contender starts from the same weights and sees the same batches. The baseline is torch's
best: scaled_dot_product_attention and torch.optim.AdamW(fused=True).
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import torchweld
from torchweld import optim
from torchweld.bench.measure import losses
from torchweld.bench.measure.machine import (
    Refusal,
    check_outputs,
    choose_device,
    describe_machine,
    parse_positive,
)
from torchweld.bench.models.training import Learner, compiled, measure, read_text, table
from torchweld.files import replace_file, write_json
from torchweld.table import Table, progress

LAYERS, HEADS, LENGTH, BATCH = 4, 8, 256, 16
WIDTH = {"cpu": 256, "cuda": 1024}
LEARNING_RATE = 1e-3
SECONDS = 15.0  # of a contender's steps for a table
WORDS = 32000  # of a real vocabulary
EAGER = "eager"
THREE_LINES = """\
import torchweld

model = torchweld.fuse(model)
optimizer = torchweld.optim.AdamW8bit(model.parameters(), lr=1e-3)  # or AdamW
"""


class GPT(nn.Module):
    """A GPT on bytes, made of torch's layers."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                *(width, HEADS, 4 * width, dropout),
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("causal", causal, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.token(tokens) + self.place.weight)
        for block in self.blocks:
            x = block(x, src_mask=self.causal, is_causal=True)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Setting:
    """The settings that all contenders share."""

    device: str
    dropout: float = 0.1
    autocast: torch.dtype | None = None
    batch: int = BATCH

    def __str__(self) -> str:
        precision = "float32" if self.autocast is None else "bfloat16 autocast"
        return f"{precision}, dropout {self.dropout:g}, {self.batch * LENGTH} tokens a step"

    def fit(self) -> Setting:
        """This setting, with fewer sequences in a batch where eager's step would be too slow.

        Three steps, one to warm up and one for the peak take a contender's time. Where torch
        multiplies 16 bits by a plain loop, a step takes ten times as long as in float32.
        """
        batch = 1
        while batch < BATCH:
            fitting = replace(self, batch=batch)
            [eager] = fitting.learners([EAGER], seed=0)
            if batch == 1:
                eager.learn()
            if eager.learn().total / 1e3 > SECONDS / 5 / 2:  # twice as many would take too long
                return fitting
            batch *= 2
        return replace(self, batch=BATCH)

    def learners(self, names: Sequence[str], seed: int) -> list[Learner]:
        """The contenders with these names, before their first step."""
        data = read_text()
        starts = torch.Generator().manual_seed(seed)
        batches: list[torch.Tensor] = []

        def batch(step: int) -> torch.Tensor:
            while len(batches) <= step:
                at = torch.randint(len(data) - LENGTH - 1, (self.batch, 1), generator=starts)
                batches.append(data[at + torch.arange(LENGTH + 1)].long())
            return batches[step].to(self.device)

        def loss(model: nn.Module, step: int) -> torch.Tensor:
            tokens = batch(step)
            logits = model(tokens[:, :-1])
            return cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

        learners = []
        for name in names:
            torch.manual_seed(seed)
            plain = GPT(WIDTH[self.device], self.dropout).to(self.device)
            model, optimizer = CONTENDERS[name](plain)
            learners.append(Learner(name, model, optimizer, loss, self.autocast))
        return learners


Made = tuple[nn.Module, torch.optim.Optimizer]


def _eager(model: nn.Module) -> Made:
    return model, torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)


def _compiled(model: nn.Module) -> Made:
    made, optimizer = _eager(model)
    return compiled(made), optimizer


def _fused(model: nn.Module) -> Made:
    model = torchweld.fuse(model)
    return model, optim.AdamW(model.parameters(), LEARNING_RATE)


def _fused_8bit(model: nn.Module) -> Made:
    model = torchweld.fuse(model)
    return model, optim.AdamW8bit(model.parameters(), LEARNING_RATE)


CONTENDERS: dict[str, Callable[[nn.Module], Made]] = {
    EAGER: _eager,
    "fused": _fused,
    "fused, 8-bit AdamW": _fused_8bit,
    "torch.compile": _compiled,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `torchweld demo`."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU if there is one")
    parser.add_argument("--compile", action="store_true", help="torch.compile takes part")
    parser.add_argument(
        "--seconds",
        type=parse_positive,
        default=45.0,
        help="how long to train for the curves; default: 45",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the loss curves")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    try:
        check_outputs(options)
        return _run(options, choose_device(options))
    except Refusal as refusal:
        print(f"torchweld demo: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("torchweld demo: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _run(options: argparse.Namespace, device: str) -> int:
    kept = torchweld.keep_pages() if device == "cpu" else None
    names = [name for name in CONTENDERS if name != "torch.compile" or options.compile]
    about = describe_machine(device)
    _say_what_runs(about, device, None if kept is None else kept.reason)
    setting = Setting(device).fit()
    first = setting.learners(names, options.seed)
    rows = {str(setting): _measured(first, setting)}
    _learn(first, options.seconds)
    _show_losses(first)
    for other in (replace(setting, dropout=0.0), Setting(device, autocast=torch.bfloat16).fit()):
        rows[str(other)] = _measured(other.learners(names, options.seed), other)
    words = _measure_words(setting)
    curves = {learner.name: learner.losses for learner in first}
    if options.plot:
        plot(curves, rows[str(setting)], about, options.plot)
        print(f"plot: {options.plot}")
    if options.json:
        content = {"machine": about, "settings": rows, "losses": curves, "words": words}
        write_json(options.json, content)
        print(f"results: {options.json}")
    print(f"\nIn your own script:\n\n{THREE_LINES}")
    return 0


def _say_what_runs(about: dict[str, Any], device: str, not_kept: str | None) -> None:
    made_of = about["versions"]
    print(f"torchweld {made_of['torchweld']}, torch {made_of['torch']}, on {about['name']}")
    print(f"a GPT of {LAYERS} layers, width {WIDTH[device]}, on bytes")
    if device == "cpu":
        pages = f"not kept: {not_kept}" if not_kept else "kept by torchweld.keep_pages()"
        print(f"for every contender: pages of large blocks are {pages}")


def _measured(learners: Sequence[Learner], setting: Setting) -> list[dict[str, Any]]:
    """Time the learners, and print the table."""
    rows = measure(learners, seconds=SECONDS)
    for row in rows:
        row["tokens_per_second"] = 1e3 * setting.batch * LENGTH / row["total"]
    print(f"\n{setting}")
    table(rows, **{"tokens/s": lambda row: f"{row['tokens_per_second']:.0f}"}).show()
    return rows


def _measure_words(setting: Setting) -> list[dict[str, Any]]:
    """Time the head and the loss of a real vocabulary, which bytes are not, and print the table."""
    device = setting.device
    inputs = losses.make(WORDS, setting.batch * LENGTH, WIDTH[device], torch.float32, device)
    ways = losses.contenders(*inputs)
    ways = {name: ways[name] for name in (EAGER, "linear_cross_entropy")}
    print(f"\nhead and loss of {WORDS} words, float32")
    shown = Table(["", "ms", "x", "peak MB"], numbers_from=1)
    rows: list[dict[str, Any]] = []
    for name, seconds, peak in losses.measure(ways, 3, device):
        rows.append({"contender": name, "total": 1e3 * seconds, "peak_bytes": peak})
        speed_up = rows[0]["total"] / rows[-1]["total"]
        shown.add(name, f"{1e3 * seconds:.1f}", f"{speed_up:.2f}", f"{peak / 1e6:.1f}")
    shown.show()
    return rows


# --- Losses -------------------------------------------------------------------------------------


def _learn(learners: Sequence[Learner], seconds: float) -> None:
    """Continue training all learners in turn for this long, with as many steps each."""
    start = time.monotonic()
    for turn in progress([f"learning, at most {seconds:.0f} s"] * 1000):
        if turn >= 5 and time.monotonic() - start > seconds:
            break
        for learner in learners:
            learner.learn()
    fewest = min(len(learner.losses) for learner in learners)
    for learner in learners:
        del learner.losses[fewest:]


def _final(losses: Sequence[float]) -> float:
    last = losses[-max(len(losses) // 10, 1) :]
    return sum(last) / len(last)


def _show_losses(learners: Sequence[Learner]) -> None:
    eager = _final(learners[0].losses)
    print(f"\nloss after {len(learners[0].losses)} steps of the same batches")
    shown = Table(["", "first", "last", "to eager's"], numbers_from=1)
    for learner in learners:
        last = _final(learner.losses)
        shown.add(
            learner.name, f"{learner.losses[0]:.3f}", f"{last:.3f}", f"{last / eager - 1:+.1%}"
        )
    shown.show()


def plot(
    curves: dict[str, list[float]],
    rows: Sequence[dict[str, Any]],
    about: dict[str, Any],
    path: Path,
) -> None:
    """Plot losses over steps and over time. Only over time do the contenders differ."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (by_step, by_time) = pyplot.subplots(
        1, 2, figsize=(11, 4.2), sharey=True, layout="constrained"
    )
    for (name, curve), row in zip(curves.items(), rows, strict=True):
        seconds = [row["total"] * (step + 1) / 1e3 for step in range(len(curve))]
        label = f"{name} ({row['speed_up']:.2f}x)"
        by_step.plot(range(1, len(curve) + 1), curve, label=label, linewidth=1.4)
        by_time.plot(seconds, curve, label=label, linewidth=1.4)
    by_step.set_xlabel("step")
    by_time.set_xlabel("seconds of training")
    by_step.set_ylabel("loss")
    by_time.legend(frameon=False)
    for panel in (by_step, by_time):
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"A GPT of {LAYERS} layers on {about['name']}, dropout 0.1", fontsize=11)
    replace_file(path, partial(figure.savefig, dpi=130))
    pyplot.close(figure)
