"""Contract 4: parameters, statistics and residuals in any memory layout, in every op and dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchweld
from oracle import Results, exact, incoming, run
from torchweld.bench.cases import CASES
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.ops.gemm import gemm
from torchweld.registry import Op, TensorSpec, materialize

# NaN between the elements makes stray reads visible.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second": lambda t: torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0],
    "a column": lambda t: torch.nn.functional.pad(t[..., None], (3, 5), value=torch.nan)[..., 3],
    "padded rows": lambda t: torch.nn.functional.pad(t, (3, 5), value=torch.nan)[..., 3:-5],
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded rows": lambda t: t[:1].expand_as(t),
    "expanded columns": lambda t: t[..., :1].expand_as(t),
    "offset by one element": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view_as(t),
    "negated": lambda t: torch._neg_view(-t),
}
DTYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bfloat16 with float32": (torch.bfloat16, torch.float32),
}


def _samples(op: Op) -> list[tuple[Any, ...]]:
    """Small samples with the most arguments, in training and in evaluation."""

    def fits(sample: tuple[Any, ...]) -> bool:
        return len(sample[0].shape) > 1 and 4 < math.prod(sample[0].shape) < 600

    def given(sample: tuple[Any, ...]) -> int:
        return sum(isinstance(v, TensorSpec) for v in sample)

    names = op.forward_signature.arguments
    at = names.index("training") if "training" in names else None
    found: dict[Any, tuple[Any, ...]] = {}
    for sample in filter(fits, CASES[op.name].samples):
        key = None if at is None else sample[at]
        if key not in found or given(sample) > given(found[key]):
            found[key] = sample
    return list(found.values())


def _running(op: Op, inputs: list[Any], name: str) -> bool:
    named = dict(zip(op.forward_signature.arguments, inputs, strict=True))
    return bool(named.get("training")) and name.startswith("running_")


@pytest.mark.targets(composites=True)
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_argument_in_every_layout(
    op: Op, dtype: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One argument at a time, with and without gradients, as exact as with packed arguments."""
    monkeypatch.setattr(gemm, "_SMALLEST", 0)
    names = op.forward_signature.arguments
    x_dtype, param_dtype = DTYPES[dtype]
    with torchweld.use_backend(backend):
        for sample in _samples(op):
            plain = materialize(sample, x_dtype, param_dtype=param_dtype)
            tensors = [at for at, v in enumerate(plain) if _is_data(v)]
            values = _exactly(op, plain)
            for at in tensors:
                for layout, lay in LAYOUTS.items():
                    if _running(op, plain, names[at]) and layout.startswith("expanded"):
                        continue  # the op writes to it
                    inputs = [v.clone() if isinstance(v, torch.Tensor) else v for v in plain]
                    inputs[at] = lay(inputs[at])
                    assert inputs[at].shape == plain[at].shape
                    changed = layout.startswith("expanded")
                    oracle, terms = _exactly(op, inputs) if changed else values
                    _assert_right(op, inputs, oracle, terms, f"{names[at]}, {layout}")


def _is_data(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1


def _exactly(op: Op, inputs: list[Any]) -> tuple[Results, Results]:
    """The oracle's results, and their sums of terms."""
    inputs = [v.clone() if isinstance(v, torch.Tensor) else v for v in inputs]
    oracle = exact(op, inputs)
    grads = {f"grad_{name}": incoming(oracle[name]) for name in op.public}
    return oracle, CASES[op.name].terms(*inputs, **grads)


def _assert_right(op: Op, inputs: list[Any], oracle: Results, terms: Results, what: str) -> None:
    unit = torch.finfo(inputs[0].dtype).eps / 2
    with torch.no_grad():
        found = dict(zip(op.public, as_tuple(call(op, *inputs)), strict=True))
    for results in (found, run(op, inputs)):
        for name, value in results.items():
            near = (value - oracle[name]).abs() <= 32 * unit * terms[name] + 1e-30
            assert near.all(), f"{name} where {what}"
