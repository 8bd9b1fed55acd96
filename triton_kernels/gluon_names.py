"""Gluon's names for Hopper. Triton 3.9 changes some."""

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

_IS_OLD = gl.constexpr(hasattr(tma, "async_copy_global_to_shared"))
copy_in = tma.async_copy_global_to_shared if _IS_OLD else tma.async_load
copy_out = tma.async_copy_shared_to_global if _IS_OLD else tma.async_store
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
