"""A fake of torch.cuda.make_graphed_callables on the CPU, with the memory of real graphs.

Inputs, results and gradients are static. A replay of the forward pass writes to memory that the
backward pass keeps gradients in, and the backward pass to what the forward pass saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from torchweld import graphs


class FakeGraphs:
    """Counts captures and replays."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.captures = self.forwards = self.backwards = 0
        self.error: Exception | None = None

    def make(
        self, function: Callable[..., Any], static: tuple[torch.Tensor, ...], **_: Any
    ) -> Callable[..., Any]:
        """Stands for make_graphed_callables with one function of tensors."""
        assert all(t.is_leaf and isinstance(t, torch.Tensor) for t in static)
        assert not (torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled())
        wanted = [t for t in static if t.requires_grad]
        if self.error is not None:
            raise self.error
        warnings.warn(
            "The AccumulateGrad node's stream does not match ...", stacklevel=1
        )  # as torch
        self.captures += 1
        kept: dict[str, Any] = {}
        autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        results = [t.detach().clone() for t in function(*static)]
        gradients = [torch.zeros_like(t) if t.requires_grad else None for t in static]
        fake = self
        proxies = static[len(static) - len([*self.model.parameters()]) :]

        class Graphed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: torch.Tensor) -> Any:
                with torch.no_grad():
                    for own, given in zip(static, inputs, strict=True):
                        if own.data_ptr() != given.data_ptr():
                            own.copy_(given)
                    for gradient in gradients:
                        if gradient is not None:
                            gradient.fill_(torch.nan)
                with (
                    torch.enable_grad(),
                    torch.autocast("cpu", autocast[1], autocast[0], cache_enabled=False),
                    graphs._replaced(fake.model, [*fake.model.parameters()], proxies),
                ):
                    kept["made"] = function(*static)
                for own, value in zip(results, kept["made"], strict=True):
                    own.copy_(value.detach())
                fake.forwards += 1
                return tuple(t.detach() for t in results)

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx: Any, *given: torch.Tensor) -> Any:
                pairs = [
                    (t, g) for t, g in zip(kept["made"], given, strict=True) if t.requires_grad
                ]
                made, grads = zip(*pairs, strict=True)
                found = iter(torch.autograd.grad(made, wanted, grads, allow_unused=True))
                returned: list[Any] = []
                for gradient in gradients:
                    value = None if gradient is None else next(found)
                    if gradient is not None and value is not None:
                        gradient.copy_(value)
                    returned.append(None if value is None else gradient.detach())
                kept["made"] = None  # its memory is used again
                fake.backwards += 1
                return tuple(returned)

        return lambda *inputs: Graphed.apply(*inputs)
