"""Contract 1: errors against the float64 reference, beside eager's and beside rounding's."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from conftest import Target
from oracle import Pool, exact, incoming, run, sample_inputs


def _param_dtypes(dtype: torch.dtype) -> list[torch.dtype]:
    return [dtype, torch.float32] if dtype.itemsize == 2 else [dtype]


@pytest.mark.seams
def test_errors_are_bounded(target: Target, dtype: torch.dtype) -> None:
    """Pooled over all samples, result by result; docs/numerics.md derives the bounds."""
    op = target.op
    if dtype == torch.float64:
        pytest.skip("float64 is the oracle's own precision: test_gradients.py compares it")
    for param_dtype in _param_dtypes(dtype):
        pools: dict[Any, dict[str, Pool]] = defaultdict(lambda: defaultdict(Pool))
        for inputs in sample_inputs(op, dtype, target.device, param_dtype):
            oracle = exact(op, inputs)
            grads = {f"grad_{name}": incoming(oracle[name]) for name in op.public}
            terms = op.numerics.terms(*inputs, **grads)
            mine, theirs = run(op, inputs), run(op, inputs, op.reference)
            for name, value in oracle.items():
                assert mine[name].dtype == theirs[name].dtype
                assert mine[name].shape == theirs[name].shape
                pool = pools[name, mine[name].dtype]
                pool["ours"].add(mine[name] - value, terms[name])
                pool["eager"].add(theirs[name] - value, terms[name])
                pool["rounding"].add(value.to(mine[name].dtype) - value, terms[name])
                pool["terms"].add(terms[name], terms[name])
        for (name, result_dtype), pool in pools.items():
            assert pool["ours"].count >= 10_000
            for measure in ("rms", "max"):
                error, eager, rounding, sums = (
                    getattr(pool[kind], measure) for kind in ("ours", "eager", "rounding", "terms")
                )
                if result_dtype == torch.float32:
                    bound = max(1.1 * eager, op.numerics.fp32[name] * 2**-24 * sums)
                else:
                    bound = min(1.1 * eager, op.numerics.rounding.get(name, 1.1) * rounding)
                slack = 1 if measure == "rms" else 4
                report = f"{name} {result_dtype} {measure}: {error:.3g}, bound {slack * bound:.3g}"
                print(f"{report}, eager {eager:.3g}, rounding {rounding:.3g}")
                assert error <= slack * bound, report
