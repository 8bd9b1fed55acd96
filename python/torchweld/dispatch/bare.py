"""Ops outside the registry: ops without a gradient, and in-place ops.

Like all ops they have an overload for each backend, and the same rules choose among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchweld import state
from torchweld.dispatch import choice, proof
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.choice import choose
from torchweld.dispatch.library import define_overload, make_step
from torchweld.dispatch.proof import Question, Results
from torchweld.dispatch.warm.direct import make_direct
from torchweld.dispatch.warm.plans import Planned
from torchweld.numerics import REORDERED
from torchweld.registry import BACKENDS, EAGER
from torchweld.registry.constant import assume_constant_result


class BareOp:
    """The definition of such an op; `fake` is left out if the op returns nothing.

    `triton` is the file with its Triton kernel. `reference` takes the same arguments; on a GPU the
    kernels are checked against it at their first use. `sample` cuts the call's arguments for this
    check, so that their copies fit in memory next to the model.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        fake: Callable[..., Any] = lambda *_: None,
        backends: tuple[str, ...] = ("cpu",),
        triton: str | None = None,
        reference: Callable[..., Any] | None = None,
        sample: Callable[..., Sequence[Any]] = lambda *inputs: inputs,
    ) -> None:
        self.name = name
        self.reference = reference
        self._sample = sample
        self.backends = (*backends, "triton") if triton else backends
        self._overloads = {
            backend: define_overload(name, backend, schema, fake, triton)
            for backend in self.backends
        }
        self._steps = {backend: planned(overload) for backend, overload in self._overloads.items()}

    def run(self, *inputs: Any) -> Any:
        """Run the op on the backend that serves these inputs, or its reference if none does."""
        return self.find(inputs[0][0] if isinstance(inputs[0], list) else inputs[0])(*inputs)

    def find(self, first: torch.Tensor) -> Callable[..., Any]:
        """What runs the op where its first tensor is like this one."""
        if choice.forced is None and choice.is_on_gpu(first):
            return self._run_on_gpu
        return self._serving(choose(self, [first]))

    def _run_on_gpu(self, *inputs: Any) -> Any:
        first = inputs[0][0] if isinstance(inputs[0], list) else inputs[0]
        return self._serving(self._choose_on_gpu(first, inputs)[0])(*inputs)

    def find_for_all(self, first: torch.Tensor, *others: BareOp) -> list[Callable[..., Any]]:
        """As find, of this op and others with its backends, for calls of one class.

        A short way has compared them: a GPU's answer for them is looked up once, and a CPU kernel
        is called without the dispatcher.
        """
        run, ops = self.find(first), (self, *others)
        if run == self._run_on_gpu:
            return [op._ask_once() for op in ops]
        if run is self._overloads.get("cpu"):
            return [op._overloads["cpu"] if state.has_modes() else op.direct for op in ops]
        return [run, *(op.find(first) for op in others)]

    @functools.cached_property
    def direct(self) -> Callable[..., Any]:
        """The CPU kernel without torch's dispatcher, for calls that a short way has compared."""
        overload = self._overloads["cpu"]
        return make_direct(overload, overload)

    def _ask_once(self) -> Callable[..., Any]:
        serving = None

        def run(*inputs: Any) -> Any:
            nonlocal serving
            if serving is not None:
                return serving(*inputs)
            backend, is_final = self._choose_on_gpu(inputs[0], inputs)
            found = self._serving(backend)
            serving = found if is_final else None
            return found(*inputs)

        return run

    def _serving(self, backend: str) -> Callable[..., Any]:
        serving = self.step(backend) or self.reference
        assert serving is not None, f"{self.name} has no reference"
        return serving  # type: ignore[no-any-return]

    def _choose_on_gpu(self, first: torch.Tensor, inputs: Sequence[Any]) -> tuple[str, bool]:
        """The backend, and whether it is final for calls of this class."""
        if state.is_compiling():
            backend = find_agreed(self.name, first.device.index)
            return backend if self.why_not(backend, [first]) is None else EAGER, False
        has_numbers = first.numel() or any(t.numel() for t in _tensors(inputs))
        if not has_numbers or not choice.is_tried(first):
            return EAGER, False
        call_class = (self.name, first.device.index, *map(_word, inputs))
        return proof.pick(call_class, lambda: self._make_question(first, inputs))

    def _make_question(self, first: torch.Tensor, inputs: Sequence[Any]) -> Question:
        """Check only: a kernel replaces several passes, and may write to its arguments."""
        inputs = self._sample(*inputs)

        def run(backend: str) -> Results:
            copies = _clone(inputs)
            with torch.no_grad():
                returned = self._serving(backend)(*copies)
            results = [] if returned is None else [*as_tuple(returned)]
            return {
                f"tensor {at}": t for at, t in enumerate(results + _tensors(copies)) if t.numel()
            }

        return Question(
            kind={"op": self.name, "arguments": [*map(_word, inputs)]},
            device=first.device,
            fallback=EAGER,
            candidates=[b for b in self.backends if self.why_not(b, [first]) is None],
            run=run,
            trusted=lambda: run(EAGER),
            exact=lambda: run(EAGER),
            rounded=REORDERED,
        )

    def kernel(self, *inputs: Any) -> Any:
        """The overload that serves these inputs; None if the reference does.

        Raises BackendError if no selected backend can serve.
        """
        return self.overload(choose(self, inputs))

    def overload(self, backend: str) -> Any:
        """The backend's own op; None for eager, which the reference serves."""
        return self._overloads.get(backend)

    def step(self, backend: str) -> Any:
        """The same for calls that may be alike: Triton's then repeat a plan."""
        return self._steps.get(backend)

    def why_not(self, backend: str, inputs: Sequence[Any]) -> str | None:
        """Why this backend has no kernel for these inputs; the first one's device decides."""
        if backend == EAGER:
            return None
        if backend not in self.backends:
            return f"{self.name} has no {backend} kernel"
        device: torch.device = inputs[0].device
        if device.type not in BACKENDS[backend].devices:
            return f"the tensors are on {device}"
        return BACKENDS[backend].why_not(device)


def planned(overload: Any) -> Callable[..., Any]:
    """The overload, whose alike calls repeat a plan if it is Triton's; compiled graphs call it."""
    step = make_step(overload)
    if not isinstance(step, Planned):
        return overload  # type: ignore[no-any-return]
    return lambda *inputs: (overload if state.is_compiling() else step)(*inputs)


@assume_constant_result
def find_agreed(name: str, index: int | None) -> str:
    """The backend of all answers for an op or a rule, if they agree; compiled code uses it."""
    device = torch.device("cpu") if index is None else torch.device("cuda", index)
    return proof.checker_for(device).agreed(EAGER, op=name)


def _word(value: Any) -> Any:
    """The part of an argument that an answer depends on: its dtype, a flag, or whether it is 0.

    Scalars that change every step must not trigger a new check.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, (list, tuple)):
        return _word(value[0]) if value else None
    if isinstance(value, float):
        return value != 0
    return None if isinstance(value, int) else value


def _tensors(inputs: Sequence[Any]) -> list[torch.Tensor]:
    flat = [v for value in inputs for v in (value if isinstance(value, list) else [value])]
    return [v for v in flat if isinstance(v, torch.Tensor)]


def _clone(inputs: Sequence[Any]) -> list[Any]:
    """Clone the arguments; a tensor that occurs twice is cloned once."""
    clones: dict[int, torch.Tensor] = {}

    def clone(value: Any) -> Any:
        if isinstance(value, list):
            return [clone(one) for one in value]
        if isinstance(value, torch.Tensor):
            return clones.setdefault(id(value), _clone_as_it_lies(value.detach()))
        return value

    return [clone(value) for value in inputs]


def _clone_as_it_lies(x: torch.Tensor) -> torch.Tensor:
    """Clone a tensor with its strides, which padded rows would lose: kernels differ by them."""
    if any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True)):
        return x.clone()
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
