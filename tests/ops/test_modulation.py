"""Adaptive norms and gated residuals: shapes and dtypes of modulations, parts of one tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchweld
from selection import TRITON_DEVICE
from torchweld import functional, numerics

pytestmark = pytest.mark.usefixtures("triton")
BACKENDS = ("eager", "cpu", "triton")


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _differentiate(y: Any, *leaves: torch.Tensor) -> list[torch.Tensor]:
    results = y if isinstance(y, tuple) else (y,)
    grads = [torch.ones_like(r) * (i + 1) for i, r in enumerate(results)]
    weighted = [r * torch.linspace(-1, 1, r.shape[-1], dtype=r.dtype) for r in results]
    return [*(r.detach() for r in results), *torch.autograd.grad(weighted, leaves, grads)]


@pytest.mark.skipif(TRITON_DEVICE != "cpu", reason="the tensors are on the CPU")
@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_one_projection(backend: str) -> None:
    """chunk(6) of [batch, 6 C] is read where it is, and gets the gradient of separate tensors."""
    x, branch = _draw(3, 20, 48).requires_grad_(), _draw(3, 20, 48).requires_grad_()
    parts = _draw(3, 6 * 48).requires_grad_()
    apart = [part.detach().clone().requires_grad_() for part in parts.chunk(6, dim=-1)]

    def run(shift: Any, scale: Any, gate: Any) -> Any:
        return functional.gated_residual_layer_norm(
            x, gate, branch, scale, shift, return_residual=True
        )

    with torchweld.use_backend(backend):
        found = _differentiate(run(*parts.chunk(6, dim=-1)[:3]), x, branch, parts)
        wanted = _differentiate(run(*apart[:3]), x, branch, *apart[:3])
    for one, two in zip(found[:4], wanted[:4], strict=True):
        assert torch.equal(one, two)
    assert torch.equal(found[4][:, : 3 * 48], torch.cat(wanted[4:], -1))
    assert not found[4][:, 3 * 48 :].any()


@pytest.mark.skipif(TRITON_DEVICE != "cpu", reason="the tensors are on the CPU")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("its", [(48,), (2, 48), (2, 1, 1, 48), (2, 3, 1, 48), (2, 3, 7, 48)])
def test_modulations_of_each_shape(its: tuple[int, ...], backend: str) -> None:
    x = _draw(2, 3, 7, 48).double().float().requires_grad_()
    scale, shift = _draw(*its).requires_grad_(), _draw(*its).neg().requires_grad_()
    rank = its if len(its) in (1, 4) else (2, 1, 1, 48)
    wide = [t.detach().double().requires_grad_() for t in (x, scale, shift)]
    normed = torch.nn.functional.layer_norm(wide[0], (48,))
    y = normed * (1 + wide[1].view(rank)) + wide[2].view(rank)
    with torchweld.use_backend(backend):
        found = _differentiate(functional.adaptive_layer_norm(x, scale, shift), x, scale, shift)
    for one, two in zip(found, _differentiate(y, *wide), strict=True):
        torch.testing.assert_close(one.double(), two, **numerics.SUMMED)


@pytest.mark.skipif(TRITON_DEVICE != "cpu", reason="the tensors are on the CPU")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wide", ["input", "branch", "gate", "input and gate"])
def test_wider_streams_and_gates(wide: str, backend: str) -> None:
    """As under autocast, and as in Wan, whose gates are float32; nothing is rounded on the way."""
    x, branch, gate, scale = _draw(2, 33, 64), _draw(2, 33, 64), _draw(2, 64), _draw(2, 64)
    x = x if "input" in wide else x.half()
    branch = branch if wide == "branch" else branch.half()
    gate, scale = (t if "gate" in wide else t.half() for t in (gate, scale))
    leaves = [t.detach().requires_grad_() for t in (x, gate, branch, scale)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    z = exact[0] + exact[1][:, None] * exact[2]
    y = torch.nn.functional.rms_norm(z, (64,), eps=1e-6) * (1 + exact[3][:, None])
    with torchweld.use_backend(backend):
        given = functional.gated_residual_rms_norm(*leaves, eps=1e-6, return_residual=True)
    assert {t.dtype for t in given} == {torch.promote_types(x.dtype, branch.dtype)}
    found = _differentiate(given, *leaves)
    for one, two in zip(found, _differentiate((y, z), *exact), strict=True):
        off = 2e-5 if one.dtype is given[0].dtype is torch.float32 else 2e-3
        assert (one.double() - two).abs().max() <= off * two.abs().max()
