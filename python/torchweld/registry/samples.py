"""Sample inputs of ops: what kind of tensor an argument is, and its shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """A tensor argument of a sample, made on demand and always the same."""

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
        else:  # Away from zero mean and unit scale, where mistakes in statistics and weights show.
            values = values * 0.5 + 1.0 if argument.parameter else values * 1.5 + 0.25
        if argument.kind == "variance":
            values = values.abs()
        wide = argument.parameter or argument.kind == "residual"
        values = values.to((param_dtype or dtype) if wide else dtype)
        return values.requires_grad_(
            requires_grad and argument.kind not in ("constant", "variance")
        )

    return [draw(argument) for argument in arguments]
