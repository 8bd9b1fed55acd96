"""Memory of the twelve whole models of the benchmark, trained on batches of different lengths.

They are trained one after another in a process of its own, eager or fused.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from pathlib import Path

import torch

import fresh
import torchweld
from torchweld.bench.models import LENGTH, MODELS, build

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from test_memory_over_calls import read_resident


def train_all(which: str) -> list[int]:
    """Resident kB after eight steps of each model; its memory is freed before the next one."""
    torch.set_num_threads(1)
    order, resident = random.Random(0), []
    for name in MODELS:
        model, batch = build(name)
        if which == "fused":
            torchweld.fuse(model)
        optimizers = torchweld.optim if which == "fused" else torch.optim
        optimizer = optimizers.AdamW(model.train().parameters(), 1e-4)
        for _ in range(8):
            rows, length = order.choice((1, 2)), order.choice((24, 56, LENGTH))
            part = {
                key: value[:rows] if name == "ViT" else value[:rows, :length].contiguous()
                for key, value in batch.items()
            }
            model(**part).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        resident.append(read_resident())
    return resident


def test_training_twelve_models_stays_bounded() -> None:
    """The fused models take at most a fifth more; eager's own largest varies by an eighth."""
    eager, fused = (json.loads(fresh.run_file(__file__, which)) for which in ("eager", "fused"))
    assert statistics.median(fused[len(fused) // 2 :]) <= 1.2 * max(eager)


if __name__ == "__main__":
    print(json.dumps(train_all(sys.argv[1])))
