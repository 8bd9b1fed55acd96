"""Checks what declarations say about an op's size and cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import torchweld
from oracle import total
from torchweld.bench.cases import CASES
from torchweld.dispatch.call import call
from torchweld.registry import OPS, Composite, Op, TensorSpec, materialize
from torchweld.registry.cost import flops


def _tensors(arguments: Any) -> list[TensorSpec]:
    return [value for value in arguments if isinstance(value, TensorSpec)]


@pytest.mark.targets(composites=True)
def test_sized_arguments_have_every_tensor(op: Op) -> None:
    tensors = _tensors(op.sized((3, 2), (5,)))
    assert tensors[0].shape == (3, 2, 5)
    assert len(tensors) == max(len(_tensors(sample)) for sample in CASES[op.name].samples)


@pytest.mark.parametrize("name", [op.name for op in OPS.values() if isinstance(op, Composite)])
def test_declared_operations_are_those_of_the_gemms(name: str) -> None:
    """The declared operations equal torch's count."""
    op = OPS[name]
    inputs = materialize(op.sized((4, 8), (16,)), torch.float32, requires_grad=True)
    with torchweld.use_backend("eager"), FlopCounterMode(display=False) as forward:
        result = call(op, *inputs)
    with FlopCounterMode(display=False) as backward:
        total(result).backward()
    counted = forward.get_total_flops(), backward.get_total_flops()
    if counted == (0, 0):  # no GEMM: operations are counted per element
        assert min(op.flops(*inputs)) > 0
    else:
        assert (flops(op, inputs, "fwd"), flops(op, inputs, "bwd")) == counted
    assert flops(op, inputs, "full") == sum(op.flops(*inputs))
