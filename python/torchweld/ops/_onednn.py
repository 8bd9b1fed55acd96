"""linear_act on the CPU where no gradient is wanted: oneDNN's 16-bit GEMM, which activates as well.

It writes the result once, and rounds no sum before that. In float32 torch's own GEMM is faster by
more than the pass takes. relu is left out, since oneDNN's makes 0 of NaN.
"""

from __future__ import annotations

import functools

import torch

from torchweld.ops import _act

_NAMES = {"gelu": "gelu", "silu": "swish"}


def linear_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> torch.Tensor | None:
    """None where it cannot serve, or where what is given does not fit."""
    kind = (activation, approximate)
    if not _serves(x, weight, bias) or activation not in _NAMES or kind not in _act.KINDS:
        return None
    algorithm = approximate if activation == "gelu" else ""
    run = torch.ops.mkldnn._linear_pointwise
    return run(x, weight, bias, _NAMES[activation], [], algorithm)


def _serves(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    given = [t for t in (x, weight, bias) if t is not None]
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return False
    plain = all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in given)
    alike = all(t.dtype is x.dtype for t in given)
    wanted = _has(x.dtype) and torch._C._get_mkldnn_enabled()
    return plain and alike and wanted and _fit(x, weight, bias)


def _fit(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    if x.ndim < 2 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        return False
    there = x.numel() > 0 and weight.numel() > 0
    return there and (bias is None or bias.shape == weight.shape[:1])


@functools.cache
def _has(dtype: torch.dtype) -> bool:
    """Whether this CPU and this torch have it."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype is torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported()
