"""Activations as modules; each can be made without arguments, as transformers' ACT2FN does."""

import torch

from torchweld import functional
from torchweld.ops.activation import common as activations


class Activation(torch.nn.Module):
    """An activation by its name, in one pass forward and one backward.

    Args:
        activation: one of torchweld.functional.bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".
    """

    def __init__(self, activation: str, approximate: str = "none") -> None:
        super().__init__()
        activations.check(type(self).__name__, activation, approximate)
        self.activation, self.approximate = activation, approximate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.bias_act(x, None, self.activation, self.approximate)

    def extra_repr(self) -> str:
        return "" if self.approximate == "none" else f"approximate={self.approximate!r}"


class GELU(Activation):
    """torch.nn.GELU.

    Args:
        approximate: "none" (by erf, the default) or "tanh".
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__("gelu", approximate)


class QuickGELU(Activation):
    """x * sigmoid(1.702 x), as in CLIP."""

    def __init__(self) -> None:
        super().__init__("quick_gelu")


class ReLU(Activation):
    """torch.nn.ReLU, never in place."""

    def __init__(self) -> None:
        super().__init__("relu")


class ReLUSquared(Activation):
    """relu(x) ** 2, as in Nemotron."""

    def __init__(self) -> None:
        super().__init__("relu2")


class SiLU(Activation):
    """torch.nn.SiLU, never in place."""

    def __init__(self) -> None:
        super().__init__("silu")


class Sigmoid(Activation):
    """torch.nn.Sigmoid."""

    def __init__(self) -> None:
        super().__init__("sigmoid")


class Tanh(Activation):
    """torch.nn.Tanh."""

    def __init__(self) -> None:
        super().__init__("tanh")
