"""Autocast to both 16-bit dtypes, and dynamic loss scaling: as exact as what is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torchweld
from oracle import exact, run
from torchweld import functional, optim
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.registry import BACKENDS, Op, materialize

# Eager warns about mixing 16 bits with float32.
mixes = pytest.mark.filterwarnings("ignore:Mismatch dtype")

F32, BF16 = torch.float32, torch.bfloat16
NORMS: dict[str, tuple[Any, Any, int]] = {
    "layer": (functional.dropout_add_layer_norm, torch.nn.functional.layer_norm, 2),
    "rms": (functional.dropout_add_rms_norm, torch.nn.functional.rms_norm, 1),
}


@contextmanager
def _autocast(device: str) -> Iterator[None]:
    """For CUDA even without CUDA, with fake tensors. A graph would need the device."""
    torch.set_autocast_dtype(device, BF16)
    torch.set_autocast_enabled(device, True)
    try:
        with torch.no_grad():
            yield
    finally:
        torch.set_autocast_enabled(device, False)


@mixes
@pytest.mark.parametrize("residual", [None, F32, BF16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "triton", "eager"])
@pytest.mark.parametrize("norm", NORMS)
def test_dtypes_are_those_of_torchs_modules(
    norm: str, backend: str, residual: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """norm(dropout(x) + residual) with parameters in float32, on the CPU and on CUDA."""
    ours, theirs, count = NORMS[norm]
    for device in ("cpu", "cuda") if backend == "eager" else BACKENDS[backend].devices:
        monkeypatch.setattr(BACKENDS["triton"], "why_missing", lambda: None)
        with FakeTensorMode(), _autocast(device), torchweld.use_backend(backend):
            x = torch.empty(4, 64, dtype=BF16, device=device)
            added = None if residual is None else torch.empty(4, 64, dtype=residual, device=device)
            z = x if added is None else x + added
            parameters = [torch.empty(64, device=device) for _ in range(count)]
            y, stream = ours(x, added, *parameters, p=0.0, return_residual=True)
            assert y.dtype is theirs(z, [64], *parameters).dtype
            assert stream.dtype is z.dtype
            for dtype in (BF16, F32):
                assert ours(x, added, *parameters, y_dtype=dtype).dtype is dtype  # type: ignore[operator]


MODULATED: dict[str, tuple[Any, Any]] = {
    "layer": (functional.gated_residual_layer_norm, torch.nn.functional.layer_norm),
    "rms": (functional.gated_residual_rms_norm, torch.nn.functional.rms_norm),
}


@mixes
@pytest.mark.parametrize("stream", [F32, BF16], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "triton", "eager"])
@pytest.mark.parametrize("norm", MODULATED)
def test_dtypes_of_modulated_norms(
    norm: str, backend: str, stream: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """norm(x + gate * branch) * (1 + scale), where CUDA's autocast widens torch's norm.

    y had the stream's dtype. Every test under autocast was on the CPU, whose autocast does not.
    """
    ours, theirs = MODULATED[norm]
    for device in ("cpu", "cuda") if backend == "eager" else BACKENDS[backend].devices:
        monkeypatch.setattr(BACKENDS["triton"], "why_missing", lambda: None)
        with FakeTensorMode(), _autocast(device), torchweld.use_backend(backend):
            x = torch.empty(4, 3, 64, dtype=stream, device=device)
            gate, scale = torch.empty(2, 4, 1, 64, dtype=BF16, device=device)
            branch = torch.empty(4, 3, 64, dtype=BF16, device=device)
            z = x + gate * branch
            for _ in range(2):  # the second call is a warm one
                y, kept = ours(x, gate, branch, scale, return_residual=True)
                assert y.dtype is (theirs(z, [64]) * (1 + scale)).dtype
                assert kept.dtype is z.dtype
                assert ours(x, gate, branch, scale).dtype is y.dtype


@mixes
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_a_post_norm_block_has_torchs_gradient_error(backend: str) -> None:
    """Four layers as in BERT: with y in bfloat16 the error was a third above torch's."""
    torch.manual_seed(0)
    width, p = 64, 0.0
    linears = [torch.nn.Linear(width, width) for _ in range(4)]
    norms = [torch.nn.LayerNorm(width) for _ in linears]
    x = torch.randn(256, width)

    def run(fused: bool, autocast: bool, dtype: torch.dtype = F32) -> torch.Tensor:
        for module in (*linears, *norms):
            module.to(dtype)
            module.zero_grad()
        with torch.autocast("cpu", BF16, enabled=autocast), torchweld.use_backend(backend):
            h = x.to(dtype)
            for linear, norm in zip(linears, norms, strict=True):
                out = torch.nn.functional.gelu(linear(h))
                if fused:
                    h = functional.dropout_add_layer_norm(  # type: ignore[assignment]
                        out, h, norm.weight, norm.bias, p=p
                    )
                else:
                    h = norm(out + h)
            assert h.dtype is dtype
        h.square().mul(torch.arange(width)).sum().backward()
        grads = [p.grad.double() for m in (*linears, *norms) for p in m.parameters()]  # type: ignore[union-attr]
        return torch.cat([grad.flatten() / grad.norm() for grad in grads])

    exact = run(False, False, torch.float64)
    ours, theirs = ((run(fused, True) - exact).norm() for fused in (True, False))
    assert ours <= 1.05 * theirs


@mixes
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("wide", [False, True])
def test_numbers_of_a_wide_y(wide: bool, backend: str) -> None:
    """The norm computes y from z before z is rounded."""
    torch.manual_seed(0)
    x, residual = torch.randn(64, 96).bfloat16(), torch.randn(64, 96).bfloat16()
    weight, bias = torch.rand(96), torch.randn(96)
    with torchweld.use_backend(backend):
        y, z = functional.dropout_add_layer_norm(
            *(x, residual, weight, bias),
            return_residual=True,
            y_dtype=F32 if wide else None,
        )
    of = (x.double() + residual.double()) if backend == "cpu" else z.double()
    exact = torch.nn.functional.layer_norm(of, [96], weight.double(), bias.double())
    tolerance = {"rtol": 1e-6, "atol": 4e-6} if wide else {"rtol": 2**-8, "atol": 2**-8}
    torch.testing.assert_close(y.double(), exact, **tolerance)
    assert (y.dtype, z.dtype) == (F32 if wide else BF16, BF16)


# --- Autocast to both 16-bit dtypes on the CPU, and dynamic loss scaling through a fused step ---

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
    # Without gradients oneDNN may take 16-bit inputs as they are.
    other = materialize(op.sized((rows,), (96,)), {BF16: torch.float16}.get(dtype, BF16))
    with torch.no_grad(), torch.autocast("cpu", dtype), torchweld.use_backend(backend):
        both = [as_tuple(function(*other)) for function in (partial(call, op), op.reference)]
    assert [ours.dtype for ours in both[0]] == [eager.dtype for eager in both[1]]


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
    torch.testing.assert_close(params[-1], theirs[-1], rtol=0, atol=STEPS * 1e-3 * 0.05)


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
