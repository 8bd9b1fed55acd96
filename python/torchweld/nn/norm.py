"""LayerNorm and RMSNorm."""

import torch

from torchweld import functional


class LayerNorm(torch.nn.LayerNorm):
    """torch.nn.LayerNorm, computed by torchweld.functional.layer_norm."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(torch.nn.RMSNorm):
    """torch.nn.RMSNorm, computed by torchweld.functional.rms_norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)
