"""Predicted and measured steps of eight declarations.

python -m torchweld.bench.studies.planned_steps

Rates of a process and of a link are measured for 1, 2 and 4 processes at work at the same time,
which share this machine's cores. The planner's cost model then predicts a step of each declaration.
Steps are timed in turns: each round takes some steps of every declaration. The model is that of
examples/, so that the study runs from a checkout. It takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from torchweld.distributed import parallelize
from torchweld.distributed.costs import Choice, Links, Model, Profile, cut_stages
from torchweld.distributed.link_probe import measure_link
from torchweld.distributed.work import measure_work
from torchweld.table import Table

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BATCH, ROWS = 16, 2  # sequences of a step, and of a microbatch
WARM, TIMED = 1, 3  # steps of a round
# Processes, and a declaration.
DECLARATIONS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {}),
    (2, {"data": "ddp"}),
    (2, {"data": "zero3"}),
    (2, {"tensor": {"size": 2}}),
    (2, {"pipeline": {"size": 2, "schedule": "1f1b"}}),
    (4, {"data": "ddp"}),
    (4, {"pipeline": {"size": 4, "schedule": "1f1b"}}),
    (4, {"tensor": {"size": 2}, "data": "zero2"}),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, predict and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = [{"times": []} for _ in DECLARATIONS]
    rates = {count: _run(count, "rates", options) for count in (1, 2, 4)}
    for _ in range(options.rounds):
        for at, (count, config) in enumerate(DECLARATIONS):
            rows[at]["times"] += _run(count, "steps", options, config)
    for row, (count, config) in zip(rows, DECLARATIONS, strict=True):
        row |= {"processes": count, "declaration": config}
        row["measured"] = statistics.median(row.pop("times"))
        row["predicted"] = _predict(count, config, rates[count], options)
    _show(rows)
    if options.json:
        options.json.write_text(json.dumps({"rates": rates, "rows": rows}, indent=1))
    return 0


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(("declaration", "processes", "measured, ms", "predicted, ms", "ratio"), 1)
    for row in sorted(rows, key=lambda row: row["predicted"]):
        ratio = row["predicted"] / row["measured"]
        name = json.dumps(row["declaration"]) if row["declaration"] else "one process"
        times = (f"{1e3 * row[key]:.0f}" for key in ("measured", "predicted"))
        table.add(name, str(row["processes"]), *times, f"{ratio:.2f}")
    table.show()
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    first = min(rows, key=lambda row: row["predicted"])
    place = sorted(row["measured"] for row in rows).index(first["measured"]) + 1
    print(f"median error {statistics.median(errors):.0%}; the first choice is number {place}")


def _predict(count: int, config: dict[str, Any], rates: Any, options: Any) -> float:
    example = _import_example()
    settings = example.Settings(
        width=options.width, layers=options.layers, length=options.length, dropout=0.0
    )
    with torch.device("meta"):
        model = example.Transformer(settings)
    work = measure_work(
        model, (torch.zeros((1, options.length), dtype=torch.int64),), lambda _: True
    )
    profile = Profile("this CPU", rates["flops"], rates["bandwidth"], 1e12, "measured")
    links = Links(
        node=8,
        inside=rates.get("link", 1e9),
        latency_inside=rates.get("latency", 0.0),
        overlaps=False,
    )
    tensor = config.get("tensor", {}).get("size", 1)
    stages = config.get("pipeline", {}).get("size", 1)
    choice = Choice(
        tensor=tensor,
        mode="1d",
        sequence=False,
        pipeline=stages,
        schedule="1f1b",
        replicas=count // tensor // stages,
        data=config.get("data", "ddp"),
        rows=ROWS,
        checkpoint="none",
        optimizer="adamw",
        offload="none",
    )
    costs = Model(work, profile, links, BATCH)
    cuts = cut_stages(costs, choice)
    assert cuts is not None
    return costs.estimate(choice, cuts).seconds


def _import_example() -> Any:
    sys.path.insert(0, str(_EXAMPLES))
    import transformer

    return transformer


# --- Processes ------------------------------------------------------------------------------------


def _run(count: int, what: str, options: Any, config: dict[str, Any] | None = None) -> Any:
    """Run some processes, and return what the first of them measured."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (count, what, options, config, folder)
        torch.multiprocessing.spawn(_work, arguments, nprocs=count)
        return json.loads((Path(folder) / "figures").read_text())


def _work(rank: int, count: int, what: str, options: Any, config: Any, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
    figures = _measure_rates(count, options) if what == "rates" else _time_steps(config, options)
    if rank == 0:
        (Path(folder) / "figures").write_text(json.dumps(figures))
    dist.destroy_process_group()


def _measure_rates(count: int, options: Any) -> dict[str, float]:
    """Measure products and additions of the model's sizes, while all processes do."""
    x = torch.randn(ROWS * options.length, options.width)
    weight = torch.randn(4 * options.width, options.width)
    flops = 2 * x.shape[0] * weight.numel()
    rates = {"flops": flops / _time(lambda: torch.nn.functional.linear(x, weight))}
    y = torch.empty_like(x)
    rates["bandwidth"] = 3 * x.nbytes / _time(lambda: torch.add(x, x, out=y))
    if count > 1:
        link = measure_link()
        rates |= {"link": link.bandwidth, "latency": link.latency}
    return rates


def _time(call: Any) -> float:
    times = []
    for _ in range(5):
        dist.barrier()
        began, calls = time.perf_counter(), 0
        while time.perf_counter() - began < 0.2:
            call()
            calls += 1
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times)


def _time_steps(config: Any, options: Any) -> list[float]:
    example = _import_example()
    settings = example.Settings(
        width=options.width, layers=options.layers, length=options.length, dropout=0.0
    )
    torch.manual_seed(0)
    training = parallelize(
        example.Transformer(settings),
        config,
        device="cpu",
        example=(torch.zeros((ROWS, options.length), dtype=torch.int64),),
        loss_fn=example.compute_loss,
        microbatches=BATCH // ROWS,
        quiet=True,
    )
    batch = [example.make_batch(settings, ROWS, number) for number in training.own]
    times = []
    for step in range(WARM + TIMED):
        dist.barrier()
        began = time.perf_counter()
        training.step(batch, step)
        dist.barrier()
        times.append(time.perf_counter() - began)
    return times[WARM:]


if __name__ == "__main__":
    sys.exit(main())
