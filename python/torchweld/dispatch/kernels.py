"""Makes the kernels of an op: overloads for each backend, their fakes and autograd functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchweld import state
from torchweld.dispatch.autograd import (
    Ready,
    as_tuple,
    autograd_function,
    complete_steps,
    exports_a_derivative,
    find_apply,
    tell_apart,
    wants_gradient,
)
from torchweld.dispatch.library import define_differentiable, define_overload, make_step
from torchweld.dispatch.warm.direct import make_direct
from torchweld.dispatch.warm.guards import has_lazy
from torchweld.registry import Op


def define(op: Op) -> None:
    """Make the kernels of a declared op, one for each backend that it has sources for."""
    for backend in op.sources:
        op.kernels[backend] = Kernel(op, backend, *_overloads(op, backend))


def _overloads(op: Op, backend: str) -> tuple[Any, Any]:
    """A backend's own ops for the two schemas."""
    how, backward = (op.sources[backend][0], op.visible), f"{op.name}_backward"
    return (
        define_overload(op.name, backend, op.forward, _fake_forward(op), *how),
        define_overload(backward, backend, op.backward, _fake_backward(op), *how),
    )


class Kernel:
    """An implementation of an op: its two overloads and their autograd function."""

    def __init__(self, op: Op, backend: str, forward: Any, backward: Any) -> None:
        self.backend, self.forward, self.backward = backend, forward, backward
        results = op.forward_signature.results
        self._public_at = [results.index(name) for name in op.public]
        self._results = len(results)
        self.steps = Ready(make_step(forward), make_step(backward))
        self._op = op
        self.function = autograd_function(self._op, self)
        self.ready_function = autograd_function(self._op, self, ready=True)
        self._apply, self._apply_ready = map(find_apply, (self.function, self.ready_function))
        arguments, _ = op.forward.split(" -> ")
        public = ", ".join(f"Tensor {name}" for name in op.public)
        schema = f"{arguments} -> ({public})"
        self._exported = define_differentiable(op.name, backend, schema, self._differentiable)

    def __call__(self, *inputs: Any) -> Any:
        """The public results, in autograd's graph if a gradient is needed."""
        if exports_a_derivative():
            return self._exported(*inputs)
        return self._differentiable(*inputs)

    def _differentiable(self, *inputs: Any) -> Any:
        if wants_gradient(*inputs):
            if state.is_compiling():
                return self.function.apply(*tell_apart(inputs))
            return self._apply(*inputs)
        results = as_tuple(self.forward(*inputs))
        if len(self._public_at) == 1:
            return results[self._public_at[0]]
        return tuple([results[i] for i in self._public_at])

    @functools.cached_property
    def direct(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Both steps without torch's dispatcher, for calls that a short way has compared."""
        if self.backend != "cpu":
            return self.steps[:2]
        both = (self.forward, self.steps.forward), (self.backward, self.steps.backward)
        forward, backward = [make_direct(*one) for one in both]
        return forward, backward

    def make_ready(
        self, inputs: Sequence[Any]
    ) -> tuple[Callable[..., Any], list[Any], Sequence[int], list[str]]:
        """What serves later calls like this one.

        It is a function, what it takes first, the positions of the inputs that it takes then, and
        where the public results are in `r`, all that it returns.
        """
        forward, backward = self.steps[:2] if has_lazy(inputs) else self.direct
        if wants_gradient(*inputs):
            places = [f"r[{at}]" for at in range(len(self._public_at))]
            ready = complete_steps(self._op, Ready(forward, backward), inputs)
            return (
                self._apply_ready,
                [ready],
                self._op.tensors_at,
                places if len(places) > 1 else ["r"],
            )
        places = [f"r[{at}]" for at in self._public_at]
        return forward, [], range(len(inputs)), places if self._results > 1 else ["r"]


@dataclass(frozen=True)
class Casting:
    """A kernel under autocast, whose floating-point tensors become this dtype."""

    kernel: Kernel
    dtype: torch.dtype

    def __call__(self, *inputs: Any) -> Any:
        cast = [value.to(self.dtype) if self.changes(value) else value for value in inputs]
        return self.kernel(*cast)

    def changes(self, value: Any) -> bool:
        """Whether autocast casts the value."""
        is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return is_floating and value.dtype is not self.dtype

    def make_ready(
        self, inputs: Sequence[Any]
    ) -> tuple[Callable[..., Any], list[Any], Sequence[int], list[str]]:
        """As of a kernel, whose inputs are cast: without numbers, for their properties."""
        like = [self._cast_like(value) if self.changes(value) else value for value in inputs]
        return self.kernel.make_ready(like)

    def _cast_like(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x, dtype=self.dtype, device="meta").requires_grad_(x.requires_grad)


def _fake_forward(op: Op) -> Callable[..., Any]:
    """The declared fake, which first checks that all arguments are on one device."""

    def fake(*inputs: Any) -> Any:
        devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
        if len(devices) > 1:
            raise RuntimeError(f"{op.name}: arguments are on several devices: {devices}")
        return _bare_if_single(op.make_fakes(*inputs))

    return fake


def _fake_backward(op: Op) -> Callable[..., Any]:
    """Make gradients like their inputs; unneeded gradients are empty.

    An input that was not saved is like the first result or its gradient, unless the declaration
    has a fake of its own.
    """
    if (declared := op.fake_backward) is not None:
        return lambda *inputs: _bare_if_single(declared(*inputs))
    types = zip(op.forward_signature.arguments, op.forward_signature.types, strict=True)
    optional = {name for name, kind in types if "Optional" in kind}

    def fake(*inputs: Any) -> Any:
        arguments = dict(zip(op.backward_signature.arguments, inputs, strict=True))
        first = op.public[0]
        flowing = arguments[f"grad_{first}"] if arguments.get(first) is None else arguments[first]

        def gradient(name: str) -> torch.Tensor:
            value = arguments.get(name)
            absent = name in arguments and value is None and name in optional
            if absent or not arguments.get(f"need_{name}", True):
                return flowing.new_empty(0)
            like = flowing if value is None else value
            dtype = arguments.get(f"{name}_dtype", like.dtype)
            return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)

        results = op.backward_signature.results
        return _bare_if_single(tuple(gradient(name.removeprefix("grad_")) for name in results))

    return fake


def _bare_if_single(results: tuple[torch.Tensor, ...]) -> Any:
    """Results as torch returns them: a single one without a tuple."""
    return results if len(results) > 1 else results[0]
