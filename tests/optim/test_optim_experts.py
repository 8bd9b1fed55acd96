"""Optimizers on stacked experts [E, n, m]: the bits of matrices, also of experts without rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchweld
from torchweld import optim

E, H, F, STEPS = 4, 24, 40, 6


def _experts() -> torchweld.nn.ExpertsMLP:
    torch.manual_seed(0)
    return torchweld.nn.ExpertsMLP(E, H, F)


def _train(
    stacked: torchweld.nn.ExpertsMLP,
    others: list[torch.Tensor],
    read: Callable[[torch.Tensor], list[torch.Tensor]],
    optimizers: list[Any],
) -> None:
    """Step both with the gradients of the stacked experts, whose last one gets no rows."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(30, H, generator=generator)
        indices = torch.randint(0, E - 1, (30, 2), generator=generator)
        optimizers[0].zero_grad()
        stacked(x, indices, torch.rand(30, 2, generator=generator)).square().sum().backward()
        grads = [part for p in stacked.parameters() for part in read(p.grad)]  # type: ignore[arg-type]
        for other, grad in zip(others, grads, strict=True):
            other.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()


def _make_rows(p: torch.Tensor) -> list[torch.Tensor]:
    return [p.detach().flatten(1)]


RULES: dict[str, Callable[[Any], Any]] = {
    "8 bits": lambda params: optim.AdamW(params, 0.01, state_dtype="8bit", min_quantized_size=0),
    "AdamW8bit": lambda params: optim.AdamW8bit(params, 0.01),
    "Lion, 8 bits": lambda params: optim.Lion(
        params, 1e-3, state_dtype="8bit", min_quantized_size=0
    ),
    "1 bit": lambda params: optim.OneBitAdam(params, 1e-4, freeze_step=2),
    "1 bit, LAMB": lambda params: optim.OneBitLAMB(params, 0.01, freeze_step=2),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_stack_steps_as_a_matrix_with_a_row_an_expert(rule: str) -> None:
    """So blocks of 8-bit states end with an expert, and shards of experts have the same bits."""
    stacked = _experts()
    before = [p.detach().clone() for p in stacked.parameters()]
    others = [rows.clone().requires_grad_() for p in before for rows in _make_rows(p)]
    optimizers = [RULES[rule](params) for params in ([*stacked.parameters()], others)]
    _train(stacked, others, _make_rows, optimizers)
    for p, q, old in zip(stacked.parameters(), others, before, strict=True):
        assert not torch.equal(p[:-1], old[:-1])
        if "1 bit" in rule:  # bits have no zero
            assert torch.equal(p[-1], old[-1])
        assert torch.equal(p.flatten(1), q)
        state, other = (o.state[t] for o, t in zip(optimizers, (p, q), strict=True))
        assert state.keys() == other.keys()
        for name, entry in state.items():
            if isinstance(entry, torch.Tensor):
                assert torch.equal(entry.flatten(), other[name].flatten()), name


def test_muon_takes_each_expert_as_a_matrix() -> None:
    """An expert without rows has a gradient of zeros, and does not move."""
    stacked, how = _experts(), {"lr": 0.02, "weight_decay": 0.0, "ns_dtype": torch.float32}
    before = [p.detach().clone() for p in stacked.parameters()]
    others = [matrix.clone().requires_grad_() for p in before for matrix in p]
    groups = optim.muon_groups(stacked, verbose=False)
    assert [name for name, _ in groups[0]["params"]] == ["gate_up", "down"]
    optimizers: list[Any] = [optim.Muon(groups, **how), optim.Muon(others, **how)]
    _train(stacked, others, lambda grad: [*grad.detach()], optimizers)
    assert torch.equal(
        torch.cat([p.flatten() for p in stacked.parameters()]),
        torch.cat([p.flatten() for p in others]),
    )
    for p, old in zip(stacked.parameters(), before, strict=True):
        assert torch.equal(p[-1], old[-1])
        moved = (p[:-1] - old[:-1]).flatten(1).norm(dim=1)
        # STEPS updates whose singular values are about one, times 0.02 and torch's factor.
        least = 0.02 * min(p.shape[1:]) ** 0.5
        assert bool((moved > least).all())
