"""What this processor, or a GPU, computes with."""

from __future__ import annotations

import functools

import torch

from torchweld.registry.constant import assume_constant_result


@assume_constant_result
def has_units(dtype: torch.dtype) -> bool:
    """Whether torch has a GEMM of this 16-bit dtype for this CPU, by oneDNN."""
    return _find(dtype)


@assume_constant_result
def has_descriptors(device: torch.device) -> bool:
    """Whether a GPU copies tiles by descriptors, as Hopper does."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@assume_constant_result
def has_warp_groups(device: torch.device) -> bool:
    """Whether a GPU multiplies by groups of four warps (wgmma), as only Hopper does."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def _find(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-any-return]
    return dtype is torch.float16 and torch.ops.mkldnn._is_mkldnn_fp16_supported()
