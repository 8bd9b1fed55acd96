"""Steps of parameters without data: on the meta device, and under FakeTensorMode."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from optimizers import KINDS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["meta", "fake"])
@pytest.mark.parametrize(
    "rule", range(len(KINDS)), ids=[f"{i} {cls.__name__}" for i, (cls, _) in enumerate(KINDS)]
)
def test_states_are_those_of_the_cpu(rule: int, where: str, dtype: torch.dtype) -> None:
    """Two steps of a matrix and a vector; states have the sizes and dtypes of real ones."""
    cls, settings = KINDS[rule]

    def states(device: str) -> list[Any]:
        shapes = ((64, 80), (80, 64))
        params = [torch.ones(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]
        optimizer = cls(params, **settings)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        return [
            (key, list(t.shape), t.dtype) if isinstance(t, torch.Tensor) else (key, type(t))
            for p in params
            for key, t in optimizer.state[p].items()
        ]

    expected = states("cpu")
    with FakeTensorMode() if where == "fake" else nullcontext():
        assert states("meta" if where == "meta" else "cpu") == expected
