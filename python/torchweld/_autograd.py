"""The autograd function of an op's kernel, derived from the names in its two schemas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchweld.registry import Kernel, Op


def as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    """An op's results: torch hands a single one over bare."""
    return results if isinstance(results, tuple) else (results,)


def autograd_function(op: Op, kernel: Kernel) -> type[torch.autograd.Function]:
    """One class for each backend, so that a backward runs where its forward ran."""
    inputs, outputs = op.forward_signature.arguments, op.forward_signature.results
    wanted, gradients = op.backward_signature.arguments, op.backward_signature.results
    is_tensor = ["Tensor" in kind for kind in op.forward_signature.types]

    public = op.public
    # Tensors go through save_for_backward, which watches them for changes in place.
    saved = [name for name, tensor in zip(inputs, is_tensor, strict=True) if tensor]
    kept = [name for name in outputs if name in wanted]
    plain = [name for name in inputs if name not in saved]

    positions = {name: ("saved", i) for i, name in enumerate(saved + kept)}
    positions |= {name: ("plain", i) for i, name in enumerate(plain)}
    positions |= {f"grad_{name}": ("grad", i) for i, name in enumerate(public)}
    positions |= {f"need_{name}": ("need", i) for i, name in enumerate(inputs)}
    backward_arguments = [positions[name] for name in wanted]
    forward_arguments = [positions[name] for name in inputs]
    gradient_of = [
        gradients.index(f"grad_{name}") if f"grad_{name}" in gradients else None for name in inputs
    ]

    saved_at = [inputs.index(name) for name in saved]
    kept_at = [outputs.index(name) for name in kept]
    plain_at = [inputs.index(name) for name in plain]

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            results = as_tuple(kernel.forward(*given))
            ctx.save_for_backward(*[given[i] for i in saved_at], *[results[i] for i in kept_at])
            ctx.plain = [given[i] for i in plain_at]
            return kernel.public(results)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            needs = ctx.needs_input_grad
            values = {"saved": ctx.saved_tensors, "plain": ctx.plain, "grad": grads, "need": needs}
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                given = [values[kind][i] for kind, i in forward_arguments]
                return _differentiable(op.reference, given, needs, grads)
            wanted_values = [values[kind][i] for kind, i in backward_arguments]
            results = as_tuple(kernel.backward(*wanted_values))
            return tuple(
                [
                    results[at] if need and at is not None else None
                    for at, need in zip(gradient_of, needs, strict=True)
                ]
            )

    Fused.__name__ = Fused.__qualname__ = f"{op.name}_{kernel.backend}"
    return Fused


def _differentiable(reference: Any, given: list[Any], needs: Any, grads: Any) -> Any:
    """Gradients with a graph of their own (create_graph=True): the reference's."""
    sources = [value for value, need in zip(given, needs, strict=True) if need]
    results = reference(*given)
    found = iter(torch.autograd.grad(results, sources, grads, create_graph=True))
    return tuple([next(found) if need else None for need in needs])
