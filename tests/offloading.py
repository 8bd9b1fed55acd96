"""Trains small models with an optimizer and with its offloaded version, for comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchweld import optim

Make = Callable[[list[torch.Tensor]], Any]
BUCKET = 20000  # bytes: the model has four buckets


def small_model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A model with matrices, vectors, and a row that is not a multiple of a block."""
    torch.manual_seed(0)
    layers = nn.Linear(40, 300), nn.GELU(), nn.Linear(300, 64), nn.LayerNorm(64), nn.Linear(64, 90)
    return nn.Sequential(*layers).to(dtype)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return model(x).float().square().mean()


def backward(model: nn.Module, step: int, micro: int = 1, scale: float = 1.0) -> None:
    for k in range(micro):
        (loss_of(model, 100 * step + k) * scale).backward()


def drained(optimizer: Any) -> None:
    """Wait for steps that began during the backward, so that tests are deterministic."""
    if isinstance(optimizer, optim.Offload):
        optimizer._worker.call(lambda: None)


def train(
    make: Make, dtype: torch.dtype = torch.bfloat16, steps: int = 4, micro: int = 1
) -> tuple[nn.Module, Any, int]:
    """The model, its optimizer, and the number of buckets that stepped before step()."""
    model = small_model(dtype)
    optimizer = make(list(model.parameters()))
    ahead = 0
    for step in range(steps):
        backward(model, step, micro)
        drained(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        ahead += getattr(optimizer, "counts", {"ahead": 0})["ahead"]
    return model, optimizer, ahead


def offloaded(make: Make, **arguments: Any) -> Make:
    settings = {"bucket_bytes": BUCKET, "threads": 1, "undo_bytes": 1 << 30} | arguments
    return lambda params: optim.Offload(make(params), **settings)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same_run(found: tuple[nn.Module, Any], expected: tuple[nn.Module, Any]) -> None:
    """Compare parameters, and the keys, dtypes and bits of the state_dicts."""
    pairs = zip(found[0].parameters(), expected[0].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    a, b = found[1].state_dict(), expected[1].state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for key, state in b["state"].items():
        assert list(a["state"][key]) == list(state)
        for name, value in state.items():
            assert a["state"][key][name].dtype == value.dtype
            assert torch.equal(a["state"][key][name], value), (key, name)
