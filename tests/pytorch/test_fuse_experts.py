"""fuse() on experts with stacked weights, written as in transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

import torchweld
from fusable import check_fused, run
from torchweld import numerics
from torchweld.fusion.patterns import experts

E, H, F = 4, 16, 24


class TinyExperts(torch.nn.Module):
    """A gated mixture's experts; subclasses change one thing."""

    limit = 7.0

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.hidden_dim = E, H
        self.gate_up_proj = torch.nn.Parameter(torch.randn(E, 2 * F, H) / 4)
        self.down_proj = torch.nn.Parameter(torch.randn(E, H, F) / 4)
        self.act_fn = torch.nn.SiLU()

    def gate(self, z: torch.Tensor) -> torch.Tensor:
        gate, up = z.chunk(2, -1)
        return self.act_fn(gate) * up

    def skip(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> Any:
        result = torch.zeros_like(x)
        for expert in indices.unique().tolist():
            rows, columns = torch.where(indices == expert)
            if expert < self.num_experts:
                hidden = self.gate(linear(x[rows], self.gate_up_proj[expert]))
                made = linear(hidden, self.down_proj[expert])
            else:
                made = self.skip(x[rows])
            made = made * weights[rows, columns, None]
            result = result.index_add(0, rows, made.to(x.dtype))
        return result


class ClampedExperts(TinyExperts):
    """As in gpt-oss, with an activation in no module."""

    def gate(self, z: torch.Tensor) -> torch.Tensor:
        gate, up = z.chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)

    def __init__(self) -> None:
        super().__init__()
        del self.act_fn


class CappedExperts(TinyExperts):
    """No form of experts_mlp."""

    def gate(self, z: torch.Tensor) -> torch.Tensor:
        return super().gate(z).tanh()


class FarClampedExperts(TinyExperts):
    """Another form for large values only."""

    def gate(self, z: torch.Tensor) -> torch.Tensor:
        return super().gate(z).clamp(max=65504.0)


class NoisyExperts(TinyExperts):
    """Another form in training."""

    def gate(self, z: torch.Tensor) -> torch.Tensor:
        return super().gate(2 * z if self.training else z)


class GradientExperts(TinyExperts):
    """It computes something else without gradients, which no trial takes."""

    def gate(self, z: torch.Tensor) -> torch.Tensor:
        return super().gate(z) if torch.is_grad_enabled() else 2 * super().gate(z)


class NarrowExperts(TinyExperts):
    """In 16 bits it computes something else."""

    def forward(self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> Any:
        y = super().forward(x, indices, weights)
        return y * 3 if x.dtype == torch.bfloat16 else y


class DroppingExperts(TinyExperts):
    """It drops so few numbers that a trial sees none."""

    def gate(self, z: torch.Tensor) -> torch.Tensor:
        y = super().gate(z)
        return y * (torch.rand_like(y) > 0.001)


class IdentityExperts(TinyExperts):
    """Indices from the number of experts on pass a token through."""

    def skip(self, x: torch.Tensor) -> torch.Tensor:
        return x


class UnequalExperts(TinyExperts):
    """More first matrices than last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(E + 1, 2 * F, H))


class Router(torch.nn.Module):
    """A router and its experts."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.router, self.experts = torch.nn.Linear(H, E), experts

    def forward(self, x: torch.Tensor) -> Any:
        weights, indices = self.router(x).softmax(-1).topk(2)
        return x + self.experts(x, indices, weights)


@pytest.mark.parametrize("kind", [TinyExperts, ClampedExperts])
def test_experts_are_welded(kind: type[torch.nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = Router(kind()), 4 * torch.randn(50, H)
    becomes = check_fused(model, lambda: run(model, x), rtol=1e-4, atol=1e-3)
    assert any(name.startswith("experts_mlp") for name in becomes)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("kind", [TinyExperts, ClampedExperts])
def test_settings_are_those_of_now(kind: type[torch.nn.Module]) -> None:
    """The activation and the limit, as they are after fuse()."""
    model: Any = kind()
    model.limit = 7.0
    x, indices, weights = 4 * torch.randn(5, H), torch.tensor([[0, 3]] * 5), torch.rand(5, 2)
    weld: Any = torchweld.fuse(copy.deepcopy(model))
    assert weld.weld_may_skip()
    for one in (model, weld):
        if kind is TinyExperts:
            one.act_fn = torch.nn.Tanh()
        else:
            one.limit = 0.5
    expected = model(x, indices, weights)
    torch.testing.assert_close(weld(x, indices, weights), expected, **numerics.CHAINED)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        *((kind, "something else") for kind in (CappedExperts, FarClampedExperts, NoisyExperts)),
        (GradientExperts, "reads is_grad_enabled"),
        (NarrowExperts, "reads bfloat16"),
        (DroppingExperts, "reads rand_like"),
        (IdentityExperts, "does not skip"),
        (UnequalExperts, "different numbers"),
    ],
)
def test_other_experts_are_left_with_the_reason(kind: type[torch.nn.Module], reason: str) -> None:
    model = Router(kind()).eval()
    (row,) = [row for row in torchweld.explain_fusion(model) if row.where == "experts"]
    assert reason in row.reason
    torchweld.fuse(model)
    assert type(model.experts) is kind


@pytest.mark.parametrize("served", [True, False])
def test_on_a_gpu_the_own_forward_runs_unless_a_kernel_serves(
    served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Router(TinyExperts()), torch.randn(50, H)
    before = model(x)
    calls: list[str] = []
    own = TinyExperts.forward

    def record(self: Any, x: Any, indices: Any, weights: Any) -> torch.Tensor:
        calls.append("own")
        return own(self, x, indices, weights)

    def choose(op: Any, inputs: Any) -> str:
        op.check(*inputs)
        return "triton" if served else "eager"

    monkeypatch.setattr(TinyExperts, "forward", record)
    torchweld.fuse(model)
    calls.clear()
    monkeypatch.setattr(experts, "choose_automatically", choose)
    monkeypatch.setattr(experts, "_is_on_cpu", lambda _: False)
    torch.testing.assert_close(model(x), before)
    assert calls == ([] if served else ["own"])
