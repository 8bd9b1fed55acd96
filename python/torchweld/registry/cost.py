"""The cost of an op: the bytes it must move and the operations it must do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchweld.registry.op import Op

# The forward pass without gradients; only the backward pass; both through autograd.
DIRECTIONS = ("fwd", "bwd", "full")


@dataclass(frozen=True)
class Traffic:
    """Bytes that an op reads and writes if it touches each tensor once."""

    reads: int
    writes: int
    in_place: bool = False  # everything written is also read

    @property
    def total(self) -> int:
        return self.reads + self.writes

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.reads + other.reads, self.writes + other.writes)


def traffic(op: Op, inputs: Sequence[Any], direction: str) -> Traffic:
    """Derive the traffic from the two schemas: every input is read, every result is written.

    `inputs` are the forward's arguments, on any device, even `meta`. Inputs that require a gradient
    get one.
    """
    if direction == "full":
        return traffic(op, inputs, "fwd") + traffic(op, inputs, "bwd")
    arguments = dict(zip(op.forward_signature.arguments, inputs, strict=True))
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    outputs = results(op, inputs)
    if direction == "fwd":
        return Traffic(_bytes(tensors.values()), _bytes(outputs.values()))
    values = tensors | outputs | {f"grad_{name}": outputs[name] for name in op.public}
    skipped = set(op.unsaved(*inputs)) if op.unsaved else set()
    read = [n for n in op.backward_signature.arguments if n in values and n not in skipped]
    same = {name for name, (_, when) in op.same_gradient.items() if when(*inputs)}
    made = [t for name, t in tensors.items() if t.requires_grad and name not in same]
    return Traffic(_bytes(values[name] for name in read), _bytes(made))


def flops(op: Op, inputs: Sequence[Any], direction: str) -> int:
    """Floating-point operations, as the op declares them; a multiply-add counts as two."""
    forward, backward = op.flops(*inputs)
    return {"fwd": forward, "bwd": backward, "full": forward + backward}[direction]


def results(op: Op, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """The forward's results by name, on meta."""
    shapes = [v.to("meta") if isinstance(v, torch.Tensor) else v for v in inputs]
    return dict(zip(op.forward_signature.results, op.make_fakes(*shapes), strict=True))


def count_per_element(forward: int, backward: int) -> Callable[..., tuple[int, int]]:
    """Operations for each element of the first argument."""
    return lambda x, *_: (forward * x.numel(), backward * x.numel())


def count_for_gemms(*products: int) -> tuple[int, int]:
    """Operations of GEMMs with these numbers of products; the backward pass has two for each."""
    return 2 * sum(products), 4 * sum(products)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.itemsize for t in tensors)
