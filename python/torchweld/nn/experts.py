"""A mixture's experts as a module."""

from __future__ import annotations

import torch

from torchweld import checks, functional
from torchweld.names import ActivationName, Approximation
from torchweld.ops import activation as activations


class ExpertsMLP(torch.nn.Module):
    """The feed-forward blocks of a mixture's experts with gates, such as SwiGLU.

    Its parameters are stacked: `gate_up` is [num_experts, 2 * hidden_features, in_features], `down`
    is [num_experts, in_features, hidden_features], as in transformers.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        hidden_features: int,
        *,
        activation: ActivationName = "silu",
        approximate: Approximation = "none",
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        activations.check("ExpertsMLP", activation, approximate)
        sizes = {"in_features": in_features, "hidden_features": hidden_features}
        for argument, size in ({"num_experts": num_experts} | sizes).items():
            checks.count("ExpertsMLP", argument, size)
        self.num_experts, self.in_features = num_experts, in_features
        self.hidden_features = hidden_features
        self.activation, self.approximate, self.recompute = activation, approximate, recompute
        shapes = ((2 * hidden_features, in_features), (in_features, hidden_features))
        self.gate_up, self.down = (
            torch.nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))
            for shape in shapes
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's parameters as torch.nn.Linear does."""
        for parameter in (self.gate_up, self.down):
            bound = max(parameter.shape[-1], 1) ** -0.5
            torch.nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self, input: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum over the experts of each token, [*, in_features].

        `indices` and `weights` are [*, k], as `functional.route` returns them.
        """
        return functional.experts_mlp(
            input,
            self.gate_up,
            self.down,
            indices,
            weights,
            activation=self.activation,
            approximate=self.approximate,
            recompute=self.recompute,
        )

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, in_features={self.in_features},"
            f" hidden_features={self.hidden_features}, activation={self.activation!r}"
        )
