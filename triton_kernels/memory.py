"""The shared memory of GPUs, by which tiles are chosen."""

from __future__ import annotations

import functools

import torch

# Bytes for a program: of GPUs with the least, as sm_86, sm_89 and sm_120, and of those with the
# most, as sm_90 and sm_100.
LEAST_SHARED_MEMORY, MOST_SHARED_MEMORY = 99 * 1024, 227 * 1024


def memory_of(capability: int) -> int:
    """The least that a GPU of this compute capability has, for compiles without one."""
    return MOST_SHARED_MEMORY if capability in (90, 100) else LEAST_SHARED_MEMORY


@functools.cache
def find_shared_memory(device: torch.device) -> int:
    """Bytes that a program may take; elsewhere (interpreter, meta tensors) the most."""
    if device.type != "cuda":
        return MOST_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED_MEMORY)
