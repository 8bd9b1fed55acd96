"""A bare op's kernels on trial on the GPU at hand, on clones of a call's arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchweld.dispatch import evidence, proof, trial
from torchweld.dispatch.autograd import as_tuple
from torchweld.registry import EAGER

# What the reference computes is no further from the truth than the kernels: sums in another order.
# Bugs are far beyond this part of the largest number.
_ROUNDED = 2.0**-20
_served: dict[tuple[Any, ...], str] = {}


def proven(op: Any, inputs: Sequence[Any]) -> str:
    """The backend that serves such a call on this GPU, tried now if it is the first one."""
    device = _tensors(inputs)[0].device
    of = class_of(op, inputs)
    if (known := _served.get(of)) is not None:
        return known
    if not any(t.numel() for t in _tensors(inputs)):
        return EAGER  # which is no verdict on the class: there is nothing to judge by
    on_trial = BareTrial(op, inputs)
    chosen = trial.checked(on_trial, device.index)
    if on_trial.may_run():
        _served[of] = chosen
    return chosen


def class_of(op: Any, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """What a verdict holds for: the op, the dtypes, and what is switched on."""
    words = [_word(value) for value in inputs]
    return op.name, _tensors(inputs)[0].device.index, *words


def _word(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, (list, tuple)):
        return _word(value[0]) if value else None
    return None if isinstance(value, int) and not isinstance(value, bool) else value


def _tensors(inputs: Sequence[Any]) -> list[torch.Tensor]:
    flat = [v for value in inputs for v in (value if isinstance(value, list) else [value])]
    return [v for v in flat if isinstance(v, torch.Tensor)]


class BareTrial(trial.OnGpu):
    """The trial of a bare op: its kernel's results against its reference's."""

    def __init__(self, op: Any, inputs: Sequence[Any]) -> None:
        self._op, self._inputs = op, inputs
        self.backends = [b for b in op.backends if op.why_not(b, _tensors(inputs)) is None]
        self._expected: proof.Results | None = None

    @property
    def key(self) -> str:
        """The class of calls in words."""
        name, _, *rest = class_of(self._op, self._inputs)
        return f"{name}, {' '.join(str(word).removeprefix('torch.') for word in rest)}"

    def against(self, backend: str) -> str | None:
        """Why evidence does not take this backend."""
        return evidence.against(self._op, backend, _tensors(self._inputs))

    def fault(self, backend: str) -> str | None:
        """What is wrong with the results, and with what is written to the arguments."""
        if self._expected is None:
            self._expected = self._results(EAGER)
        judge = proof.Judge(self._expected, self._expected, _ROUNDED)
        return judge.fault_of(lambda: self._results(backend))

    def times(self, backends: Sequence[str]) -> Mapping[str, float]:
        """Never asked for: a kernel replaces several passes."""
        raise NotImplementedError

    def _results(self, backend: str) -> proof.Results:
        """Results and tensors after a call with clones; what was one tensor still is."""
        clones: dict[int, torch.Tensor] = {}

        def cloned(value: Any) -> Any:
            if isinstance(value, list):
                return [cloned(one) for one in value]
            if isinstance(value, torch.Tensor):
                return clones.setdefault(id(value), value.detach().clone())
            return value

        given = [cloned(value) for value in self._inputs]
        call = self._op.overload(backend) or self._op.reference
        with torch.no_grad(), torch.cuda.device_of(_tensors(given)[0]):
            found = [*as_tuple(call(*given)), *_tensors(given)]
        return {f"tensor {at}": value for at, value in enumerate(found) if value.numel()}
