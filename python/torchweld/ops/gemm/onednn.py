"""linear_act on the CPU where no gradient is wanted: oneDNN's 16-bit GEMM, which activates as well.

It writes the result once, and rounds no sum before that. In float32 torch's own GEMM is faster by
more than the pass takes. relu is left out, since oneDNN's makes 0 of NaN.
"""

from __future__ import annotations

import torch

from torchweld.ops.activation import common as activations
from torchweld.ops.gemm.linear import onednn, served_by_onednn, trained

_NAMES = {"gelu": "gelu", "silu": "swish", "sigmoid": "sigmoid", "tanh": "tanh"}


def linear_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> torch.Tensor | None:
    """None where it cannot serve, or where what is given does not fit."""
    if activation not in _NAMES or (activation, approximate) not in activations.KINDS:
        return None
    if trained(x, weight, bias) or not served_by_onednn(x, weight, bias):
        return None
    algorithm = approximate if activation == "gelu" else ""
    return onednn(x, weight, bias, _NAMES[activation], algorithm)
