"""softmax_dropout with a mask that gets a gradient, as the position biases of T5 and Swin do."""

from __future__ import annotations

import math

import pytest
import torch

import torchweld
from conftest import Target
from oracle import incoming
from torchweld import functional

# Shapes of learnt masks; T5's and Swin's masks broadcast over the batch.
LEARNT = {"whole": (2, 3, 40, 64), "heads": (3, 40, 64), "keys": (64,), "queries": (2, 1, 40, 1)}


@pytest.mark.parametrize("scale", [1.0, 0.125, -3.0])
@pytest.mark.parametrize("shape", LEARNT)
@pytest.mark.targets("softmax_dropout", not_at=("interpreter",))
def test_a_learnt_mask(target: Target, dtype: torch.dtype, shape: str, scale: float) -> None:
    """Numbers, dtypes and blank rows match a mask that requires no gradient."""
    for mask_dtype in {dtype, torch.float32 if dtype.itemsize == 2 else dtype}:
        _check(target, dtype, shape, scale, mask_dtype)


def _check(
    target: Target, dtype: torch.dtype, shape: str, scale: float, mask_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 40, 64, generator=generator).mul(8).to(dtype).to(target.device)
    mask = torch.randn(LEARNT[shape], generator=generator).mul(5).to(mask_dtype)
    if mask.shape[-1] > 1:
        mask[..., :5] = -torch.inf  # with causal=True, rows that see nothing
    mask = mask.to(target.device)
    how = {"scale": scale, "causal": True, "p": 0.25, "seed": 5}

    def run_with(mask: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        x, mask = x.detach().requires_grad_(), mask.detach().requires_grad_()
        y = functional.softmax_dropout(x, mask, **how)
        return [y, *torch.autograd.grad(y, (x, mask), incoming(y))]

    plain = functional.softmax_dropout(x, mask, **how)
    y, grad_x, grad_mask = run_with(mask, x)
    with torchweld.use_backend("eager"):
        exact_y, exact_x, exact_mask = run_with(mask.double(), x.double())
    assert [t.dtype for t in (y, grad_x, grad_mask)] == [x.dtype, x.dtype, mask.dtype]
    assert exact_y.isfinite().all()
    unit = torch.finfo(dtype).eps / 2
    # Results are rounded once; gradient terms too, if they come from 16-bit scores. The
    # float32 arithmetic has an exponent of up to 100 and sums of 64 terms.
    arithmetic = 2**-24 * 500
    rms = (y - exact_y).square().mean().sqrt()
    assert rms <= (unit + arithmetic) * exact_y.square().mean().sqrt()
    torch.testing.assert_close(plain, y, rtol=2 * unit + arithmetic, atol=arithmetic)
    size = exact_x.square().mean().sqrt()
    assert (grad_x - exact_x).square().mean().sqrt() <= (3 * unit + arithmetic) * size
    terms = math.sqrt(x.numel() / mask.numel())  # that a gradient of the mask sums
    tolerance = (3 * unit + arithmetic) * terms * size / abs(scale)
    assert (grad_mask - exact_mask).square().mean().sqrt() <= tolerance


def test_a_learnt_mask_compiles_and_has_second_derivatives() -> None:
    x = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)

    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return functional.softmax_dropout(x, mask.square(), scale=0.5)

    with torchweld.use_backend("cpu"):
        assert torch.autograd.gradcheck(function, (x, mask))
        assert torch.autograd.gradgradcheck(function, (x, mask))
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        grads = [
            torch.autograd.grad(f(x, mask).square().sum(), (x, mask)) for f in (function, compiled)
        ]
    torch.testing.assert_close(*grads)
