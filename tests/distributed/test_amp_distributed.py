"""Dynamic loss scaling over ranks: one rank's infinite gradient makes all ranks skip the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import torchweld
from processes import on
from torchweld import optim
from torchweld.distributed.data import zero
from torchweld.distributed.tensor.styles import ActivationParallel

WIDTH, ROWS, STEPS, BROKEN = 32, 16, 4, 2
GIVEN: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4}


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.norm = torchweld.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def _model() -> _Model:
    torch.manual_seed(0)
    return _Model()


def _train(model: Any, step: Any, zero_grad: Any, part: slice, poison: Any) -> torch.amp.GradScaler:
    """`poison` names a parameter whose gradient is infinite once, in one rank's part."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(ROWS, WIDTH, generator=generator)
        loss = model(x[part]).square().mul(torch.arange(float(WIDTH))).mean()
        scaler.scale(loss).backward()
        if number == BROKEN:
            grad = poison.grad.to_local() if isinstance(poison.grad, DTensor) else poison.grad
            grad[..., -1] = torch.inf
        step(scaler)
        scaler.update()
        zero_grad()
    return scaler


def _one_process() -> _Model:
    """Without a scaler, and without the step."""
    model = _model()
    optimizer = optim.AdamW(model.parameters(), **GIVEN)
    for number in (n for n in range(STEPS) if n != BROKEN):
        generator = torch.Generator().manual_seed(number)
        y = model(torch.randn(ROWS, WIDTH, generator=generator))
        y.square().mul(torch.arange(float(WIDTH))).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class _Unpoisoned:
    grad = torch.zeros(1)


@on(2)
def test_a_step_is_left_out_on_all_ranks(rank: int) -> None:
    expected = [p.detach() for p in _one_process().parameters()]
    part = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    mesh = init_device_mesh("cpu", (2,))

    def finish(model: Any, scaler: torch.amp.GradScaler) -> None:
        assert scaler.get_scale() == 128.0
        for found, wanted in zip(model.parameters(), expected, strict=True):
            whole = found.full_tensor() if isinstance(found, DTensor) else found
            torch.testing.assert_close(whole.detach(), wanted, rtol=0, atol=1e-5)

    step: Any
    # Only one rank's shard is infinite.
    for recipe in (zero.zero2, zero.zero3):
        model: Any = _model()
        recipe(model, mesh)
        optimizer = optim.AdamW(model.parameters(), **GIVEN)
        poison = model.layers[0].weight if rank else _Unpoisoned
        step = lambda scaler, o=optimizer: scaler.step(o)  # noqa: E731
        finish(model, _train(model, step, optimizer.zero_grad, part, poison))

    model = _model()
    # The norm too: torch's scaler takes either only DTensors or none.
    plan = {
        "layers.0": ColwiseParallel(),
        "layers.1": RowwiseParallel(),
        "norm": ActivationParallel(Replicate()),
    }
    parallelize_module(model, mesh, plan)
    optimizer = optim.AdamW(model.parameters(), **GIVEN)
    poison = model.layers[0].weight if rank else _Unpoisoned
    step = lambda scaler: scaler.step(optimizer)  # noqa: E731
    finish(model, _train(model, step, optimizer.zero_grad, slice(None), poison))

    # DDP has averaged them: both ranks have the infinite one, but its rows belong to one rank.
    model = _model()
    bias = model.norm.bias
    rows = zero.RowSharded(model.parameters(), lambda s: optim.AdamW(s, **GIVEN), mesh)
    ddp = DistributedDataParallel(model)
    finish(model, _train(ddp, rows.step, rows.zero_grad, part, bias))
    model = _model()
    ddp = zero.zero1(model, mesh)
    sharded = zero.zero1_optimizer(ddp, optim.AdamW, **GIVEN)
    step = lambda scaler: scaler.step(sharded)  # noqa: E731
    finish(model, _train(ddp, step, sharded.zero_grad, part, model.norm.bias))
