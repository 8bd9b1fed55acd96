"""Gluon's names for Hopper. Triton 3.9 has others, and keeps some old ones only to refuse them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

copy_in = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
copy_out = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_IS_OLD = gl.constexpr(not hasattr(gl.shared_memory_descriptor, "reinterpret"))
wait_for_stores = tma.store_wait


@gluon.jit
def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    if _IS_OLD:
        return memory._reinterpret(dtype, shape, layout)
    else:
        return memory.reinterpret(dtype, shape, layout)


__all__ = [
    "TensorDescriptor",
    "copy_in",
    "copy_out",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "reinterpret",
    "wait_for_stores",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
