"""Runs an op like `oracle.run`, and watches which memory its kernels read and write.

Running every sample is expensive in the emulator and the interpreter. One run therefore serves
three tests: the error bounds, the memory written, and the fakes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from oracle import Results, exact, incoming, run
from torchweld.bench.cases import CASES
from torchweld.dispatch.autograd import as_tuple
from torchweld.registry import Op

_CANARY, _BEFORE, _AFTER = 7.0, 33, 34


def watched(op: Op, backend: str, inputs: list[Any]) -> Results:
    """The results of a run, after checking the memory that it reads and writes.

    Inputs are views into larger buffers; neither they nor the memory around them may change. New
    memory is full of NaN, and none may remain: torchweld's bindings fill it in tests, and this does
    so for Triton's wrappers. The fakes of the kernels that ran must have the results' shapes,
    dtypes and strides.
    """
    views, buffers = _inside_buffers(inputs)
    before = [buffer.clone() for buffer in buffers]
    calls = _Calls(op, backend)
    with _new_tensors_full_of_nan(backend == "triton"), calls:
        results = run(op, views)
    for was, buffer in zip(before, buffers, strict=True):
        assert torch.equal(was, buffer), "a kernel wrote into its inputs, or around them"
    if inputs[0].numel():
        for name, value in results.items():
            assert not value.isnan().any(), f"{name} has elements that nothing wrote"
    calls.check()
    return results


def assert_right_if_watched(
    op: Op, backend: str, inputs: list[Any], *, sums_weights: bool = False
) -> None:
    """Errors within 16 roundings of the sum of terms, of a kernel that the contract leaves out.

    A subnormal weight is off by at most half of the smallest subnormal number.
    """
    oracle = exact(op, inputs)
    grads = {f"grad_{name}": incoming(oracle[name]) for name in op.public}
    terms = CASES[op.name].terms(*inputs, **grads)
    info = torch.finfo(inputs[0].dtype)
    unit = info.eps / 2
    weights = grads[f"grad_{op.public[0]}"].abs().sum().item() if sums_weights else 1
    for name, value in watched(op, backend, inputs).items():
        bound = 16 * unit * terms[name] + info.smallest_normal * unit * weights
        assert torch.all((value - oracle[name]).abs() <= bound), name


def _inside_buffers(inputs: list[Any]) -> tuple[list[Any], list[torch.Tensor]]:
    """Each tensor as a view into the middle of its own buffer, and the buffers."""
    buffers: list[torch.Tensor] = []

    def view(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        size = _BEFORE + value.numel() + _AFTER
        buffers.append(torch.full((size,), _CANARY, dtype=value.dtype, device=value.device))
        return buffers[-1][_BEFORE:-_AFTER].view_as(value).copy_(value)

    return [view(value) for value in inputs], buffers


@contextmanager
def _new_tensors_full_of_nan(wanted: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided") if wanted else ():
            original = getattr(torch, name)

            def poisoned(*args: Any, original: Any = original, **kwargs: Any) -> torch.Tensor:
                result = original(*args, **kwargs)
                return result.fill_(torch.nan) if result.is_floating_point() else result

            patch.setattr(torch, name, poisoned)
        yield


class _Calls(TorchDispatchMode):
    """The calls of an op's kernels: arguments and results."""

    def __init__(self, op: Op, backend: str) -> None:
        super().__init__()
        kernel = op.kernels[backend]
        self.kernels = (kernel.forward, kernel.backward)
        self.seen: list[tuple[Any, tuple[Any, ...], tuple[torch.Tensor, ...]]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in self.kernels:
            assert not kwargs
            self.seen.append((function, args, as_tuple(result)))
        return result

    def check(self) -> None:
        """Compare every fake with the result."""
        assert {function for function, _, _ in self.seen} == set(self.kernels)
        for function, args, real in self.seen:
            with FakeTensorMode(allow_non_fake_inputs=True):
                fake = [_imagine(v) if isinstance(v, torch.Tensor) else v for v in args]
                for imagined, actual in zip(as_tuple(function(*fake)), real, strict=True):
                    assert imagined.shape == actual.shape
                    assert imagined.dtype == actual.dtype
                    assert imagined.stride() == actual.stride()


def _imagine(real: torch.Tensor) -> torch.Tensor:
    """A fake of this tensor in a FakeTensorMode, sooner than `from_tensor`, which follows views."""
    sizes, strides = real.shape, real.stride()
    return torch.empty_strided(sizes, strides, dtype=real.dtype, device=real.device)
