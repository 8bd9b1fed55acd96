"""LayerNorm and RMSNorm, also modulated by a condition."""

import torch

from torchweld import checks, functional


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm, computed by torchweld.functional.layer_norm."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm, computed by torchweld.functional.rms_norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class AdaptiveLayerNorm(torch.nn.Module):
    """layer_norm(input) * (1 + scale) + shift over the last dimension; it has no parameters."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        checks.epsilon("AdaptiveLayerNorm", eps)
        self.eps = eps

    def forward(
        self, input: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None
    ) -> torch.Tensor:
        return functional.adaptive_layer_norm(input, scale, shift, eps=self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class AdaptiveRMSNorm(torch.nn.Module):
    """rms_norm(input) * (1 + scale) + shift over the last dimension; it has no parameters."""

    def __init__(self, eps: float | None = None) -> None:
        super().__init__()
        checks.epsilon("AdaptiveRMSNorm", 0.0 if eps is None else eps)
        self.eps = eps

    def forward(
        self, input: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None = None
    ) -> torch.Tensor:
        return functional.adaptive_rms_norm(input, scale, shift, eps=self.eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
