"""A call on small tensors costs hardly more than torch's own: too small to gain goes to eager."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

import torchweld

SHAPE = (64,)


def _ratio(ours: Callable[[], object], theirs: Callable[[], object]) -> float:
    """Of times in turns that are so short that most are not interrupted: other tests run beside."""

    def seconds(function: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(100):
            function()
        return time.perf_counter() - start

    return statistics.median(seconds(ours) / seconds(theirs) for _ in range(501))


@pytest.mark.parametrize(("requires_grad", "budget"), [(False, 1.6), (True, 1.6)])
def test_small_softmaxes(requires_grad: bool, budget: float) -> None:
    x = torch.randn(1, *SHAPE, requires_grad=requires_grad)
    ours = torchweld.functional.softmax_dropout
    ratio = _ratio(lambda: ours(x, scale=0.125), lambda: torch.softmax(x * 0.125, -1))
    print(f"softmax_dropout: {ratio:.3f}x torch's time on 1 x 64")
    assert ratio <= budget


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize(("requires_grad", "budget"), [(False, 1.15), (True, 1.5)])
def test_small_calls(name: str, requires_grad: bool, budget: float) -> None:
    x = torch.randn(1, *SHAPE, requires_grad=requires_grad)
    weight = torch.ones(SHAPE, requires_grad=requires_grad)
    ours = getattr(torchweld.functional, name)
    theirs = getattr(torch.nn.functional, name)
    ratio = _ratio(lambda: ours(x, SHAPE, weight), lambda: theirs(x, SHAPE, weight))
    print(f"{name}: {ratio:.3f}x torch's time on 1 x 64")
    assert ratio <= budget
