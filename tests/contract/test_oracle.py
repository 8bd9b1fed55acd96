"""Contract 1 and 5: bounded errors and nothing unwritten, in every sample."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import matrix
import torchweld
from conftest import PLACES, Target
from oracle import LEAST_POOL, Pool, assert_bounded, exact, run, sample_inputs
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.registry import Composite, Op, materialize
from watched import watched

pytestmark = [pytest.mark.numbers, pytest.mark.lane]


def _param_dtypes(dtype: torch.dtype) -> list[torch.dtype]:
    return [dtype, torch.float32] if dtype.itemsize == 2 else [dtype]


def _choose(
    samples: list[list[Any]], target: Target, dtype: torch.dtype, param_dtype: torch.dtype
) -> list[list[Any]]:
    """Every second sample, which has this dtype of parameters, and enough others for the pools.

    The other samples have the other dtype of parameters. In the other 16-bit dtype they swap.
    """
    first = ([*PLACES].index(target.place) + (dtype == torch.float16) + (param_dtype == dtype)) % 2
    chosen = {*range(first, len(samples), 2)}
    for at, argument in enumerate(samples[0]):
        if not isinstance(argument, torch.Tensor) or not argument.is_floating_point():
            continue
        sizes = [0 if s[at] is None else s[at].numel() for s in samples]
        others = sorted({*range(len(samples))} - chosen, key=sizes.__getitem__)
        while sum(sizes[i] for i in chosen) < LEAST_POOL and others:
            chosen.add(others.pop())
    return [samples[i] for i in sorted(chosen)]


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
    for param_dtype in _param_dtypes(dtype):
        samples = sample_inputs(op, dtype, target.device, param_dtype)
        # The CPU takes all samples: they cost least there.
        if dtype.itemsize == 2 and target.place in ("emulator", "interpreter"):
            samples = samples if matrix.WHOLE else _choose(samples, target, dtype, param_dtype)
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
    """Errors are in units of the terms that are summed, so that a large row hides no other."""
    op = target.op
    if target.place == "interpreter" and op.name == "block_sparse_attention":
        pytest.skip("ten thousand heads take too many programs: see test_block_sparse_triton.py")
    samples = [_widen_range(inputs) for inputs in sample_inputs(op, torch.float32, target.device)]
    if target.place in ("emulator", "interpreter"):
        samples = _choose(samples, target, torch.float32, torch.float32)
    ours = functools.partial(watched, op, backend=target.backend)
    assert_bounded(op, samples, lambda inputs: ours(inputs=inputs))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_small_16_bit_calls_round_once(op: Op, dtype: torch.dtype) -> None:
    """The automatic choice is as exact for few elements as for many."""
    errors, roundings = Pool(), Pool()
    for seed in range(8):
        inputs = materialize(op.cases.sized((8,), (64,)), dtype, requires_grad=False, seed=seed)
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
