"""Plans of Triton's calls: a fixture that counts those that run, and calls for them to serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from conftest import running_at
from selection import PLACES, TRITON, TRITON_DEVICE
from torchweld import numerics
from torchweld.bench.measure import launched
from torchweld.dispatch.warm import plans as warm_plans
from torchweld.registry import OPS, Composite
from torchweld.triton_kernels import launch

DEVICE = TRITON_DEVICE
kernels = pytest.mark.skipif(PLACES[TRITON][2] is not None, reason=str(PLACES[TRITON][2]))


def _list_replayed() -> set[str]:
    names: set[str] = set()
    for module in launched.list_modules():
        names |= {name for name, function in vars(module).items() if hasattr(function, "launching")}
    return names


# Composites have no plan of their own.
REPLAYED = {name for name in _list_replayed() & OPS.keys() if not isinstance(OPS[name], Composite)}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The plans that are run, in order."""
    ran: list[Any] = []
    run_plan = warm_plans.Plan.run

    def count(plan: Any, inputs: Sequence[Any]) -> Any:
        ran.append(plan)
        return run_plan(plan, inputs)

    def bind(plan: Any, otherwise: Any, matches: Any = None) -> Callable[..., Any]:
        """What hangs on a cached call or its node; others are run by Plan.run."""
        if not isinstance(otherwise, warm_plans.Planned):
            return bind_plan(plan, otherwise, matches)
        function = bind_plan(plan, lambda *inputs: (ran.pop(), otherwise(*inputs))[1], matches)
        return lambda *inputs: (ran.append(plan), function(*inputs))[1]

    bind_plan = warm_plans.Plan.bind
    monkeypatch.setattr(warm_plans.Plan, "run", count)
    monkeypatch.setattr(warm_plans.Plan, "bind", bind)
    for name in REPLAYED:  # as if no call had been made
        steps = OPS[name].kernels["triton"].steps
        for step in (steps.forward, steps.backward):
            monkeypatch.setattr(step, "_plans", {})
    with running_at(TRITON, monkeypatch):
        yield ran


def make_norm(rows: int = 6, width: int = 32, dtype: torch.dtype = torch.float32) -> list[Any]:
    x = torch.randn(rows, width, device=DEVICE).to(dtype)
    weight, bias = (torch.randn(width, device=DEVICE).to(dtype) for _ in range(2))
    return [x, [width], weight, bias, 1e-5]


def lay_beside(x: torch.Tensor) -> torch.Tensor:
    """The same values one element past an aligned place."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def make_plan(function: Callable[..., Any]) -> warm_plans.Planned:
    function = launch.replayed(function)
    return warm_plans.Planned(lambda: function, function)


def assert_equal(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **numerics.SAME)
