"""Contract 1 and 5: bounded errors and nothing unwritten, in every sample."""

from __future__ import annotations

import functools

import pytest
import torch

from conftest import Target
from oracle import assert_bounded, run, sample_inputs
from torchweld.registry import Composite
from watched import watched


def _param_dtypes(dtype: torch.dtype) -> list[torch.dtype]:
    return [dtype, torch.float32] if dtype.itemsize == 2 else [dtype]


@pytest.mark.targets(composites=True)
def test_every_sample(target: Target, dtype: torch.dtype) -> None:
    """Errors pooled over all samples are bounded, fakes are right, and every element is written.

    float64 is the oracle's own precision; test_gradients.py checks it.
    """
    op = target.op
    if target.place == "interpreter" and op.name == "block_sparse_attention":
        pytest.skip("ten thousand heads take too many programs: see test_block_sparse_triton.py")
    # A composite's kernels are those of its ops.
    ours = run if isinstance(op, Composite) else functools.partial(watched, backend=target.backend)
    for param_dtype in _param_dtypes(dtype):
        samples = sample_inputs(op, dtype, target.device, param_dtype)
        if dtype == torch.float64:
            for inputs in samples:
                ours(op, inputs=inputs)
        else:
            assert_bounded(op, samples, lambda inputs: ours(op, inputs=inputs))
