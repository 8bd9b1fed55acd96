"""Times and peak memory of losses of large vocabularies: python -m torchweld.bench.measure.losses.

Forward and backward of each contender, in turns in one process; medians. Eager has all logits.
torch's chunked linear_cross_entropy takes chunks of the size that it would take of 4096 rows, and
so does ours, so that fewer rows show the same cost per row.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from torchweld import functional
from torchweld.bench.measure.memory import peak_bytes
from torchweld.files import write_json
from torchweld.table import Table

VOCABULARIES = (32768, 128256, 262144)
ROWS_OF_A_BATCH = 4096
Call = Callable[[], Any]


def make(
    vocabulary: int, rows: int, features: int, dtype: torch.dtype, device: str = "cpu"
) -> list[torch.Tensor]:
    """A head's input, its weight and targets."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.empty(rows, features, dtype=dtype, device=device)
    weight = torch.empty(vocabulary, features, dtype=dtype, device=device)
    x.normal_(generator=generator)
    weight.normal_(std=features**-0.5, generator=generator)
    target = torch.randint(0, vocabulary, (rows,), generator=generator, device=device)
    return [x.requires_grad_(), weight.requires_grad_(), target]


def _chunk_of_torch(vocabulary: int, features: int) -> int:
    """The rows of torch's chunks, of 4096 rows."""
    rows = ROWS_OF_A_BATCH // -(-vocabulary // features)
    return int(2 ** max(0, (max(rows, 1) - 1).bit_length()))


def contenders(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> dict[str, Call]:
    """The losses of a linear layer with their gradients."""

    def eager() -> Any:
        return torch.autograd.grad(F.cross_entropy(F.linear(x, weight), target), (x, weight))

    def ours(**how: Any) -> Any:
        loss: Any = functional.linear_cross_entropy(x, weight, target, **how)
        return torch.autograd.grad(loss, (x, weight))

    ways: dict[str, Call] = {"eager": eager}
    if hasattr(F, "linear_cross_entropy"):
        each = _chunk_of_torch(*weight.shape)
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=each)

        def chunked() -> Any:
            loss = F.linear_cross_entropy(x, weight, target, options=options)
            return torch.autograd.grad(loss, (x, weight))

        ways["torch, chunked"] = chunked
    ways["linear_cross_entropy"] = ours
    if x.dtype.itemsize == 2:
        ways['accumulate="parameter"'] = lambda: ours(accumulate="parameter")
    return ways


def of_logits(
    vocabulary: int, rows: int, dtype: torch.dtype, device: str = "cpu"
) -> list[dict[str, Call]]:
    """What is computed of given logits: a loss, and log-probabilities with entropy."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(rows, vocabulary, generator=generator, device=device).to(dtype)
    logits = logits.requires_grad_()
    target = torch.randint(0, vocabulary, (rows,), generator=generator, device=device)

    def by_torch(logits: torch.Tensor, target: torch.Tensor) -> list[torch.Tensor]:
        log_p = logits.float().log_softmax(-1)
        return [log_p.gather(-1, target[:, None]), -(log_p.exp() * log_p).sum(-1)]

    def ours(logits: torch.Tensor, target: torch.Tensor) -> Any:
        return functional.logprobs(logits, target, return_entropy=True)

    def run(function: Callable[..., Any]) -> Any:
        made = function(logits, target)
        parts = made if isinstance(made, (list, tuple)) else (made,)
        return torch.autograd.grad([part.sum() for part in parts], logits)

    def run_forward(function: Callable[..., Any]) -> Any:
        with torch.no_grad():
            return function(logits, target)

    names = {"eager logprobs, entropy": by_torch, "logprobs, entropy": ours}
    return [
        {
            "eager cross_entropy": lambda: run(F.cross_entropy),
            "cross_entropy": lambda: run(functional.cross_entropy),
        },
        {f"{name}, forward": partial(run_forward, way) for name, way in names.items()},
        {name: partial(run, way) for name, way in names.items()},
    ]


def _log_probabilities(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor
) -> dict[str, Call]:
    """Log-probabilities with entropy, and the four GEMMs that they need."""
    logits = x.new_empty(x.shape[0], weight.shape[0])
    plain, head = x.detach(), weight.detach()

    def gemms() -> None:
        for _ in range(2):
            torch.mm(plain, head.t(), out=logits)
        torch.mm(logits, head)
        torch.mm(logits.t(), plain)

    def ours() -> Any:
        log_p, entropy = functional.linear_logprobs(x, weight, target, return_entropy=True)
        return torch.autograd.grad(log_p.sum() + entropy.sum(), (x, weight))

    return {"its GEMMs": gemms, "linear_logprobs, entropy": ours}


def measure(
    ways: dict[str, Call], rounds: int, device: str = "cpu"
) -> list[tuple[str, float, int]]:
    """The median seconds and the peak bytes of each way, which take turns."""
    peaks = {name: peak_bytes(way, device) for name, way in ways.items()}  # warms up too
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        names = [*ways]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            begin = time.perf_counter()
            ways[name]()
            if device == "cuda":
                torch.cuda.synchronize()
            taken[name].append(time.perf_counter() - begin)
    return [(name, statistics.median(taken[name]), peaks[name]) for name in ways]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--features", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, action="append")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), action="append")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gpu", action="store_true", help="the sizes that GPUs are compared at")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try this script")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.gpu:
        options.rows, options.features, options.rounds = 8192, 4096, 5
        options.vocabulary, options.dtype = [151936], ["bfloat16"]
    if options.tiny:
        options.rows, options.features, options.rounds, options.vocabulary = 32, 64, 1, [512]
    isa = os.environ.get("TORCHWELD_CPU_ISA", "the best instruction set")
    print(f"torch {torch.__version__}, {isa}, {options.rows} x {options.features}")
    found: list[dict[str, Any]] = []
    table = Table(["vocabulary", "dtype", "", "ms", "x", "peak MiB"], numbers_from=3)
    for name in options.dtype or ("float32", "bfloat16"):
        for vocabulary in options.vocabulary or VOCABULARIES:
            dtype = getattr(torch, name)
            inputs = make(vocabulary, options.rows, options.features, dtype, options.device)
            groups = [contenders(*inputs), _log_probabilities(*inputs)]
            groups += of_logits(vocabulary, options.rows, dtype, options.device)
            for ways in groups:
                rows = measure(ways, options.rounds, options.device)
                for way, seconds, peak in rows:
                    cells = [str(vocabulary), name, way, f"{1e3 * seconds:.0f}"]
                    cells += [f"{rows[0][1] / seconds:.2f}", f"{peak / 2**20:.0f}"]
                    print("\t".join(cells), flush=True)
                    table.add(*cells)
                    row = dict(zip(("vocabulary", "dtype", "way"), cells, strict=False))
                    found.append({**row, "ms": 1e3 * seconds, "peak_bytes": peak})
                if options.json:
                    write_json(options.json, {"rows": found})
    table.show()


if __name__ == "__main__":
    main()
