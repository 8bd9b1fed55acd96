"""Contract 1: errors against the float64 reference, beside eager's and beside rounding's."""

from __future__ import annotations

import pytest
import torch

from conftest import Target
from oracle import assert_bounded, sample_inputs


def _param_dtypes(dtype: torch.dtype) -> list[torch.dtype]:
    return [dtype, torch.float32] if dtype.itemsize == 2 else [dtype]


@pytest.mark.seams
def test_errors_are_bounded(target: Target, dtype: torch.dtype) -> None:
    """Pooled over all samples."""
    if dtype == torch.float64:
        pytest.skip("float64 is the oracle's own precision: test_gradients.py compares it")
    for param_dtype in _param_dtypes(dtype):
        assert_bounded(target.op, sample_inputs(target.op, dtype, target.device, param_dtype))
