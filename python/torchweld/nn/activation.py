"""Activations as modules; each can be made without arguments, as transformers' ACT2FN does."""

import torch

from torchweld import functional
from torchweld.errors import ArgumentError
from torchweld.names import ActivationName, Approximation
from torchweld.ops import activation as activations


class Activation(torch.nn.Module):
    """An activation by its name, in one pass forward and one backward.

    Args:
        activation: one of torchweld.functional.bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".
    """

    def __init__(self, activation: ActivationName, approximate: Approximation = "none") -> None:
        super().__init__()
        activations.check(type(self).__name__, activation, approximate)
        self.activation, self.approximate = activation, approximate

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.bias_act(input, activation=self.activation, approximate=self.approximate)

    def extra_repr(self) -> str:
        return "" if self.approximate == "none" else f"approximate={self.approximate!r}"


class GELU(Activation):
    """torch.nn.GELU.

    Args:
        approximate: "none" (by erf, the default) or "tanh".
    """

    def __init__(self, approximate: Approximation = "none") -> None:
        super().__init__("gelu", approximate)


class QuickGELU(Activation):
    """x * sigmoid(1.702 x), as in CLIP."""

    def __init__(self) -> None:
        super().__init__("quick_gelu")


class ReLU(Activation):
    """torch.nn.ReLU, never in place.

    Args:
        inplace: torch's argument. Only False is accepted: the backward pass reads the input.
    """

    def __init__(self, inplace: bool = False) -> None:
        super().__init__("relu")
        _check_inplace("ReLU", inplace)


class ReLUSquared(Activation):
    """relu(x) ** 2, as in Nemotron."""

    def __init__(self) -> None:
        super().__init__("relu2")


class SiLU(Activation):
    """torch.nn.SiLU, never in place.

    Args:
        inplace: torch's argument. Only False is accepted: the backward pass reads the input.
    """

    def __init__(self, inplace: bool = False) -> None:
        super().__init__("silu")
        _check_inplace("SiLU", inplace)


class Sigmoid(Activation):
    """torch.nn.Sigmoid."""

    def __init__(self) -> None:
        super().__init__("sigmoid")


class Tanh(Activation):
    """torch.nn.Tanh."""

    def __init__(self) -> None:
        super().__init__("tanh")


def _check_inplace(module: str, inplace: bool) -> None:
    if inplace:
        accepted = "False: the backward pass reads the input, so the result needs memory of its own"
        raise ArgumentError(module, "inplace", repr(inplace), accepted)
