"""Sample inputs of ops: what kind of tensor an argument is, and its shape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument of a sample: its shape, and what kind of tensor it is."""

    shape: tuple[int, ...]
    kind: str = "activation"

    @property
    def parameter(self) -> bool:
        """Whether its shape is only the trailing sizes of the activations."""
        return self.kind in ("parameter", "boolean", "constant", "variance")


@dataclass(frozen=True)
class Made:
    """A tensor argument of a sample, computed on demand and the same every time."""

    make: Callable[[], torch.Tensor]


def activation(*shape: int) -> TensorSpec:
    """An activation: of the tested dtype."""
    return TensorSpec(shape)


def parameter(*shape: int) -> TensorSpec:
    """A learnt tensor: of the tested dtype, or float32 if that has 16 bits."""
    return TensorSpec(shape, "parameter")


def residual(*shape: int) -> TensorSpec:
    """An activation with the dtype of a parameter."""
    return TensorSpec(shape, "residual")


def weight(*shape: int) -> TensorSpec:
    """A factor of a GEMM, of the tested dtype, scaled so that sums of products are near 1."""
    return TensorSpec(shape, "weight")


def constant(*shape: int) -> TensorSpec:
    """A tensor like a parameter that gets no gradient."""
    return TensorSpec(shape, "constant")


def variance(*shape: int) -> TensorSpec:
    """A constant that is not negative."""
    return TensorSpec(shape, "variance")


def boolean(*shape: int) -> TensorSpec:
    """A boolean tensor; most elements are True."""
    return TensorSpec(shape, "boolean")


def padding(*shape: int) -> TensorSpec:
    """A boolean tensor; few elements are True."""
    return TensorSpec(shape, "padding")


# The most elements of a sample whose results are computed in float64.
MOST_ELEMENTS = 2**25

# The seed of dropout: a number that uses both halves of its 64 bits.
SEED = TensorSpec((1,), "seed")
_SEED = 0x1234_5678_9ABC_DEF0


def materialize(
    arguments: Sequence[Any],
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    *,
    param_dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    seed: int = 0,
) -> list[Any]:
    """The sample's arguments with its tensors drawn from a normal distribution."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(argument: Any) -> Any:
        if isinstance(argument, Made):
            return argument.make().to(device)
        if not isinstance(argument, TensorSpec):
            return argument
        if argument.kind == "seed":
            return torch.full(argument.shape, _SEED + seed, dtype=torch.int64, device=device)
        values = torch.randn(argument.shape, generator=generator, device=device)
        if argument.kind == "boolean":
            return values > -0.7
        if argument.kind == "padding":
            return values > 1.0
        if argument.kind == "weight":
            values = values / max(argument.shape[-1], 1) ** 0.5
        else:  # Not of zero mean and unit scale, so that mistakes in statistics and weights show.
            values = values * 0.5 + 1.0 if argument.parameter else values * 1.5 + 0.25
        if argument.kind == "variance":
            values = values.abs()
        wide = argument.parameter or argument.kind == "residual"
        values = values.to((param_dtype or dtype) if wide else dtype)
        return values.requires_grad_(
            requires_grad and argument.kind not in ("constant", "variance")
        )

    return [draw(argument) for argument in arguments]


def take_rows(
    inputs: Sequence[Any], rows: int, columns: int, weights_at: Collection[int]
) -> list[Any]:
    """Cut inputs to about `rows` of the first one's rows, fewer if they are wide.

    A row has the first input's last `columns` sizes. Other inputs are cut where they have its
    sizes, factors of GEMMs nowhere.
    """
    x = inputs[0]
    sizes, leading = list(x.shape), max(x.ndim - columns, 0)
    rows = max(1, min(rows, MOST_ELEMENTS // max(torch.Size(sizes[leading:]).numel(), 1)))
    for at in range(leading):
        others = torch.Size(sizes[:at] + sizes[at + 1 : leading]).numel()
        sizes[at] = min(sizes[at], max(1, rows // max(others, 1)))
    return [
        value if at in weights_at else _narrow(value, x.shape, sizes, leading)
        for at, value in enumerate(inputs)
    ]


def _narrow(value: Any, shape: Sequence[int], sizes: Sequence[int], leading: int) -> Any:
    """Narrow the leading dimensions that a tensor shares with `shape` to `sizes`."""
    if not isinstance(value, torch.Tensor) or value.ndim > len(shape):
        return value
    for at in range(value.ndim):
        beside = len(shape) - value.ndim + at
        if beside < leading and value.shape[at] == shape[beside]:
            value = value.narrow(at, 0, sizes[beside])
    return value
