"""The backward of norms in CUDA at the widths where the kernel changes."""

from __future__ import annotations

import ctypes

import pytest
import torch

from conftest import EMULATED, GPU
from oracle import assert_right
from torchweld.registry import OPS, materialize

# A row takes part of a warp, some warps of a block, or a block; rows are copied to shared memory
# three, two or one ahead; slices of columns follow a pass over the row.
WIDTHS = (64, 512, 520, 1024, 1536, 4096, 4104, 5120, 8192, 8200, 12288)
# Chunks of 13 and 14 rows, more than are copied ahead.
ROWS = 27


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_backward(cuda_device: str, name: str, width: int, dtype: torch.dtype) -> None:
    op = OPS[name]
    inputs = materialize(op.sized((ROWS,), (width,)), dtype, cuda_device)
    assert_right(op, inputs)


@pytest.mark.skipif(GPU, reason="a GPU has its own sizes")
def test_chunks_fill_the_device(cuda_device: str) -> None:
    """As many blocks per multiprocessor as its registers allow, and 16 rows per chunk."""
    library = ctypes.CDLL(str(EMULATED))
    library.norm_chunks.restype = ctypes.c_int64
    library.norm_chunks.argtypes = [ctypes.c_int64, ctypes.c_int64]
    guards = ctypes.c_int.in_dll(library, "emulator_device_guards")
    guards.value += 1
    chunks = {width: library.norm_chunks(10**6, width) for width in (256, 1024, 4096, 8192, 65536)}
    few = library.norm_chunks(256, 1024)
    guards.value -= 1
    assert chunks == {256: 160, 1024: 40, 4096: 40, 8192: 20, 65536: 3}
    assert few == 16
