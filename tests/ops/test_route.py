"""route: the choice, the weights and both losses, against formulas written out in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchweld
from torchweld import functional, numerics


def _choose(scores: list[float], k: int) -> list[int]:
    """The best first, the lower index first among equals."""
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:k]


@settings(max_examples=60, deadline=None)
@given(
    k=st.integers(1, 3),
    scores=st.sampled_from(["softmax", "sigmoid"]),
    biased=st.booleans(),
    groups=st.sampled_from([(1, 1, 2), (4, 2, 2), (4, 2, 1), (2, 1, 2)]),
    renormalize=st.booleans(),
    seed=st.integers(0, 100),
)
def test_the_choice_and_its_weights(**drawn: Any) -> None:
    """Small whole logits, so that many are equal; bfloat16 holds them exactly."""
    k, scores, biased, groups, renormalize, seed = drawn.values()
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 4, (5, 8), generator=generator).bfloat16()
    bias = torch.randint(-1, 2, (8,), generator=generator).float() / 4 if biased else None
    number, top, best = groups
    found = functional.route(
        logits,
        k,
        scores=scores,
        choice_bias=bias,
        groups=number,
        top_groups=top,
        best_of_group=best,
        renormalize=renormalize,
        scale=2.5,
    )
    wide = logits.float()
    own = wide.softmax(-1) if scores == "softmax" else wide.sigmoid()
    choice = own if bias is None else own + bias
    for token in range(5):
        values, size = choice[token].tolist(), 8 // number
        if number > 1:
            parts = [values[g * size : (g + 1) * size] for g in range(number)]
            sums = [torch.tensor(sorted(part)[::-1][:best]).sum().item() for part in parts]
            kept = _choose(sums, top)
            values = [v if e // size in kept else -torch.inf for e, v in enumerate(values)]
        chosen = _choose(values, k)
        assert found.indices[token].tolist() == chosen
        weights = own[token, chosen].double()
        weights = 2.5 * (weights / weights.sum() if renormalize else weights)
        torch.testing.assert_close(found.weights[token].double(), weights, rtol=1e-6, atol=0)
    assert found.weights.dtype is torch.float32


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("masked", [False, True])
def test_losses(scores: str, masked: bool) -> None:
    logits = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([True, True, False, True, False, True]) if masked else None
    found = functional.route(logits, 2, scores=scores, token_mask=mask)
    own = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
    own = own / own.sum(-1, keepdim=True)
    rows = [t for t in range(6) if mask is None or mask[t]]
    counts = [sum(e in found.indices[t].tolist() for t in rows) for e in range(4)]
    balance = 4 * sum(
        counts[e] / (2 * len(rows)) * float(sum(own[t, e] for t in rows)) / len(rows)
        for e in range(4)
    )
    z = sum(float(logits[t].exp().sum().log()) ** 2 for t in rows) / len(rows)
    assert float(found.balance_loss) == pytest.approx(balance, rel=1e-12)
    assert float(found.z_loss) == pytest.approx(z, rel=1e-12)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_derivatives(scores: str) -> None:
    """First and second derivatives of the weights and both losses."""
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def function(logits: torch.Tensor) -> Any:
        return functional.route(logits, 2, scores=scores, renormalize=True)[1:]

    assert torch.autograd.gradcheck(function, logits)
    assert torch.autograd.gradgradcheck(function, logits)


def test_a_bias_gets_no_gradient_and_changes_no_weight() -> None:
    logits = torch.randn(7, 6, requires_grad=True)
    bias = torch.tensor([9.0, 9.0, 0, 0, 0, 0], requires_grad=True)
    found = functional.route(logits, 2, choice_bias=bias)
    assert {*found.indices.flatten().tolist()} == {0, 1}
    found.weights.sum().backward()
    assert bias.grad is None
    expected = logits.detach().softmax(-1).gather(-1, found.indices)
    torch.testing.assert_close(found.weights.detach(), expected, **numerics.ROUNDED)


def test_it_compiles_whole() -> None:
    compiled = torch.compile(functional.route, fullgraph=True, backend="aot_eager")
    for rows in (3, 5, 9):
        logits = torch.randn(rows, 8)
        torch.testing.assert_close(
            compiled(logits, 2), functional.route(logits, 2), **numerics.SAME
        )


def test_a_mixture_learns() -> None:
    """The router and the module of the experts together."""
    torch.manual_seed(0)
    router = torch.nn.Linear(16, 4, bias=False)
    experts = torchweld.nn.ExpertsMLP(4, 16, 32)
    x, target = torch.randn(64, 16), torch.randn(64, 16)
    optimizer = torch.optim.Adam([*router.parameters(), *experts.parameters()], 1e-2)
    losses = []
    for _ in range(30):
        routes = functional.route(router(x), 2, renormalize=True)
        loss = (experts(x, routes.indices, routes.weights) - target).square().mean()
        (loss + 0.01 * routes.balance_loss + 1e-3 * routes.z_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
