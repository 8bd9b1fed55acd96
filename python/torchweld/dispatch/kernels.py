"""Makes the kernels of an op: overloads for each backend, their fakes and autograd functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from torchweld.dispatch.autograd import (
    Differentiable,
    as_tuple,
    autograd_function,
    exports_a_derivative,
)
from torchweld.dispatch.library import define_differentiable, define_overload
from torchweld.registry import BACKENDS, Op


def define(op: Op) -> None:
    """Make the kernels of a declared op, one for each backend that it has sources for.

    GPU backends share one schema, so that each backward pass can read what any forward pass saved:
    a trial may find the forward pass of one backend and the backward pass of another fastest.
    """
    for backend in op.sources:
        op.kernels[backend] = Kernel(op, backend, *_overloads(op, backend))
    on_gpu = [op.kernels[name] for name in op.sources if "cuda" in BACKENDS[name].devices]
    for one, other in itertools.permutations(on_gpu, 2):
        both = f"{one.backend}/{other.backend}"
        op.kernels[both] = Kernel(op, both, one.forward, other.backward)


def _overloads(op: Op, backend: str) -> tuple[Any, Any]:
    """A backend's own ops for the two schemas."""
    source, backward = op.sources[backend][0], f"{op.name}_backward"
    return (
        define_overload(op.name, backend, op.forward, _fake_forward(op), source),
        define_overload(backward, backend, op.backward, _fake_backward(op), source),
    )


class Kernel:
    """An implementation of an op: its two overloads and their autograd function."""

    def __init__(self, op: Op, backend: str, forward: Any, backward: Any) -> None:
        self.backend, self.forward, self.backward = backend, forward, backward
        results = op.forward_signature.results
        self._public_at = [results.index(name) for name in op.public]
        self.function = autograd_function(Differentiable.of(op), self)
        # torch's apply without its search for wrappers of transforms, in which eager serves.
        base: Any = super(torch.autograd.Function, self.function)
        self._apply = base.apply
        arguments, _ = op.forward.split(" -> ")
        public = ", ".join(f"Tensor {name}" for name in op.public)
        schema = f"{arguments} -> ({public})"
        self._exported = define_differentiable(op.name, backend, schema, self._differentiable)

    def run(self, inputs: Sequence[Any]) -> Any:
        """The public results, in autograd's graph if a gradient is needed."""
        return (self._exported if exports_a_derivative() else self._differentiable)(*inputs)

    def _differentiable(self, *inputs: Any) -> Any:
        if torch.is_grad_enabled():
            for value in inputs:
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    return (self.function.apply if is_compiling() else self._apply)(*inputs)
        return self.public(as_tuple(self.forward(*inputs)))

    def public(self, results: tuple[torch.Tensor, ...]) -> Any:
        """The forward's results that the public function returns."""
        if len(self._public_at) == 1:
            return results[self._public_at[0]]
        return tuple([results[i] for i in self._public_at])


def _fake_forward(op: Op) -> Callable[..., Any]:
    """The declared fake, which first checks that all arguments are on one device."""

    def fake(*inputs: Any) -> Any:
        devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
        if len(devices) > 1:
            raise RuntimeError(f"{op.name}: arguments are on several devices: {devices}")
        return _bare_if_single(op.fake(*inputs))

    return fake


def _fake_backward(op: Op) -> Callable[..., Any]:
    """Make gradients like their inputs; those that are not needed are empty.

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
