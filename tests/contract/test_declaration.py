"""Checks what declarations say about an op's size and cost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import torchweld
from oracle import total
from torchweld.bench.cases import CASES
from torchweld.bench.cases.declare import SHAPES, derive, derive_terms
from torchweld.dispatch.call import call
from torchweld.random import drop
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


def test_terms_of_a_sum_of_products_are_derived() -> None:
    """They are the sums of the magnitudes that the formula of bias_dropout_add has."""
    name = "bias_dropout_add"
    x, bias, residual, *how = inputs = materialize(CASES[name].samples[0], torch.float32)
    grad_y = torch.randn(x.shape)
    terms = derive_terms(name, *inputs, grad_y=grad_y)
    grad = drop(grad_y.double().abs(), *how)
    torch.testing.assert_close(
        terms,
        {
            "y": residual.double().abs() + drop(x.double().abs() + bias.double().abs(), *how),
            "grad_input": grad,
            "grad_bias": grad.sum(0),
            "grad_residual": grad_y.double().abs(),
        },
    )


def test_an_op_without_cases_has_derived_ones() -> None:
    cases = derive("bias_dropout_add")
    assert [sample[0].shape for sample in cases.samples] == [*SHAPES]
    assert cases.benchmarks_on_gpu[0][0].shape == (4096, 4096)
