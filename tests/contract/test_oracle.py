"""Contract 1 and 5: bounded errors and nothing unwritten, in every sample."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

import selection
import torchweld
from conftest import Target
from oracle import Pool, Results, assert_bounded, exact, run, sample_inputs
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.registry import OPS, Composite, Op, materialize
from watched import watched


@pytest.mark.targets(composites=True)
def test_every_sample(target: Target, dtype: torch.dtype) -> None:
    """Errors pooled over all samples are bounded, fakes are right, and every element is written.

    float64 is the oracle's own precision; test_gradients.py checks it.
    """
    op = target.op
    if target.place == "interpreter" and op.name == "block_sparse_attention":
        pytest.skip("ten thousand heads take too many programs: see test_block_sparse_triton.py")
    # A composite has no kernels of its own: its ops' kernels run.
    ours = run if isinstance(op, Composite) else functools.partial(watched, backend=target.backend)
    for param_dtype in [dtype, torch.float32] if dtype.itemsize == 2 else [dtype]:
        samples = sample_inputs(op, dtype, target.device, param_dtype)
        samples = selection.choose_samples(samples, target, dtype, param_dtype)
        if dtype == torch.float64:
            for inputs in samples:
                ours(op, inputs=inputs)
        else:
            assert_bounded(op, samples, lambda inputs: ours(op, inputs=inputs))


def _widen_range(inputs: list[Any]) -> list[Any]:
    """One row a hundred times larger and one like another: real activations, not normals."""
    wide = []
    for value in inputs:
        rows = isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim >= 2
        if rows and value.shape[-2] > 2:
            changed = value.detach().clone()
            changed[..., 1, :] *= 100
            changed[..., -1, :] = changed[..., 0, :]
            value = changed.requires_grad_(value.requires_grad)
        wide.append(value)
    return wide


@pytest.mark.targets
def test_a_wide_range(target: Target) -> None:
    """Errors are in units of the terms that are summed, so that a large row hides no other.

    Where kernels are imitated, these are the samples that test_every_sample has only in 16 bits.
    """
    op = target.op
    if target.place == "interpreter" and op.name == "block_sparse_attention":
        pytest.skip("ten thousand heads take too many programs: see test_block_sparse_triton.py")
    samples = [_widen_range(inputs) for inputs in sample_inputs(op, torch.float32, target.device)]
    samples = selection.choose_samples(samples, target, torch.float32, torch.float32, turn=1)
    ours = functools.partial(watched, op, backend=target.backend)
    assert_bounded(op, samples, lambda inputs: ours(inputs=inputs))


def test_a_failure_names_its_sample() -> None:
    """Errors are pooled, and nothing told which of sixty samples was wrong."""
    op = OPS["rms_norm"]
    samples = sample_inputs(op, torch.float32, "cpu")

    def ours(inputs: list[Any]) -> Results:
        results = run(op, inputs)
        return results | {"y": results["y"] + 0.01 * (inputs is samples[3])}

    shape = re.escape(str([*samples[3][0].shape]))
    line = f"input=float32 {shape}.*\nrepeat: pytest tests/contract/test_oracle.py -k 'test_a_f"
    with pytest.raises(AssertionError, match=line):
        assert_bounded(op, samples, ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_16_bit_calls_round_once(op: Op, dtype: torch.dtype) -> None:
    """The automatic choice is as exact for few elements as for many."""
    errors, roundings = Pool(), Pool()
    for seed in range(8):
        inputs = materialize(op.sized((8,), (64,)), dtype, requires_grad=False, seed=seed)
        results = as_tuple(call(op, *inputs))
        for name, y in zip(op.public, results, strict=True):
            expected = exact(op, inputs)[name]
            one = torch.ones_like(expected)
            errors.add(y - expected, one)
            roundings.add(expected.to(dtype) - expected, one)
    assert errors.rms <= 1.1 * roundings.rms


def test_a_batchs_size_changes_no_value() -> None:
    """relu(300)^2 * 0.01 is 900, though its square is beyond float16."""
    gate, up = torch.full((8192, 64), 300.0).half(), torch.full((8192, 64), 0.01).half()
    for rows in (1, 8192):
        y = torchweld.functional.gated_act(gate[:rows], up[:rows], activation="relu2")
        assert torch.all(y == y.new_tensor(900.0))
