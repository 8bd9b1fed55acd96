"""Autocast to both 16-bit dtypes on the CPU, and dynamic loss scaling through a fused step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchweld
from oracle import exact, run
from torchweld import optim
from torchweld.registry import Op, materialize

WIDTH, STEPS, BROKEN = 64, 8, 3


@pytest.mark.targets(composites=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("backend", "rows"), [("cpu", 128), (None, 4)], ids=["cpu", "few"])
def test_every_op_under_autocast(
    op: Op, backend: str | None, rows: int, dtype: torch.dtype
) -> None:
    """From float32 inputs: eager's dtypes of results and gradients, and no larger error."""
    inputs = materialize(op.sized((rows,), (96,)), torch.float32)
    truth = exact(op, inputs)
    with torch.autocast("cpu", dtype):
        with torchweld.use_backend(backend):
            ours = run(op, inputs)
        eager = run(op, inputs, op.reference)
    for name, value in eager.items():
        assert ours[name].dtype == value.dtype, name
        error, theirs = ((v.double() - truth[name]).square().mean() for v in (ours[name], value))
        # Where eager happens to be exact to float32, so are we: its unit roundoff, of the largest.
        floor = (truth[name].abs().max() * 2**-24 * 8) ** 2
        # A few rows pool too few errors.
        assert rows < 128 or error <= max(1.1**2 * theirs, floor), name


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = torchweld.nn.LayerNorm(WIDTH), torchweld.nn.MLP(WIDTH, 128)
        self.add = torchweld.nn.BiasDropoutAdd(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.add(self.mlp(self.norm(x)), None, x)


def _train(
    dtype: torch.dtype, make: Any
) -> tuple[list[float], list[float], list[list[torch.Tensor]]]:
    """Losses, scales and parameters after each step; the gradients of one step are infinite."""
    torch.manual_seed(0)
    model = nn.Sequential(_Block(), _Block(), nn.Linear(WIDTH, 8))
    optimizer = make(model.parameters(), lr=1e-3, eps=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    losses, scales, params = [], [], []
    for step in range(STEPS):
        x = torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(step))
        with torch.autocast("cpu", dtype):
            loss = model(x).float().square().mean()
        if step == BROKEN:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        params.append([p.detach().clone() for p in model.parameters()])
    return losses, scales, params


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_training_with_dynamic_loss_scaling(dtype: torch.dtype) -> None:
    """torch's optimizer has the same scales; a step is lr at most, and differs by float32's."""
    with torchweld.use_backend("cpu"):
        losses, scales, params = _train(dtype, optim.AdamW)
        expected, their_scales, theirs = _train(dtype, torch.optim.AdamW)
    # Doubled after two steps that succeed, halved by the one that does not.
    assert scales == their_scales == [1024, 2048, 2048, 1024, 1024, 2048, 2048, 4096]
    for step in range(1, STEPS):
        same = map(torch.equal, params[step], params[step - 1])
        assert all(same) if step == BROKEN else not any(same)
    finite = [loss for step, loss in enumerate(losses) if step != BROKEN]
    assert finite == pytest.approx(
        [loss for step, loss in enumerate(expected) if step != BROKEN], rel=1e-3
    )
    # A difference in a parameter's last bit sometimes changes the rounding of 16-bit activations.
    for found, wanted in zip(params[-1], theirs[-1], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=STEPS * 1e-3 * 0.05)


def test_float16_overflows_until_the_scale_fits() -> None:
    """Gradients of 2**-6 times a scale exceed 65504 from 2**22 on; bfloat16 holds them."""
    found = {}
    for dtype in (torch.float16, torch.bfloat16):
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=100)
        before, scales, moved = model.weight.detach().clone(), [], []
        for _ in range(5):
            with torch.autocast("cpu", dtype):
                loss = model(torch.ones(1, WIDTH)).float().mul(2.0**-6).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            moved.append(not torch.equal(model.weight, before))
        found[dtype] = (scales, moved)
    halved = [2.0**23, 2.0**22, 2.0**21, 2.0**21, 2.0**21]
    assert found[torch.float16] == (halved, [False, False, False, True, True])
    assert found[torch.bfloat16] == ([2.0**24] * 5, [True] * 5)
