"""The backward of norms in CUDA at the widths where the kernel changes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch

import matrix
from conftest import EMULATED, GPU
from oracle import assert_right
from torchweld.registry import OPS, materialize

# A row takes part of a warp, some warps of a block, or a block; rows are copied to shared memory
# three, two or one ahead.
WIDTHS = (64, 512, 520, 1024, 1536, 4096, 4104, 5120, 8192)
# Chunks of 6 and 7 rows, more than are copied ahead.
ROWS = 27
# Clusters of 2, 4 and 8 blocks, with shares that are full, that differ by an access, and that leave
# the last block less; widths that no cluster holds; and one that goes element by element.
WIDE = (8200, 12288, 16384, 16392, 20488, 32768, 32776, 65536, 65544, 16390)
# Slices of columns follow a pass over the row.
TWO_PASSES = (8200, 12288, 32776)


def _combine(widths: tuple[int, ...]) -> pytest.MarkDecorator:
    """The norm, the width, and the dtype."""
    axes = (("layer_norm", "rms_norm"), widths, (torch.float32, torch.bfloat16))
    return pytest.mark.parametrize(("name", "width", "dtype"), matrix.combine(*axes), ids=str)


@_combine(WIDTHS)
def test_backward(cuda_device: str, name: str, width: int, dtype: torch.dtype) -> None:
    op = OPS[name]
    inputs = materialize(op.sized((ROWS,), (width,)), dtype, cuda_device)
    assert_right(op, inputs)


@_combine(WIDE)
def test_backward_of_wide_rows(cuda_device: str, name: str, width: int, dtype: torch.dtype) -> None:
    """Two chunks, one of which has more rows than are copied ahead."""
    op = OPS[name]
    inputs = materialize(op.sized((9,), (width,)), dtype, cuda_device)
    before = 0 if GPU else _launches()
    assert_right(op, inputs)
    if not GPU:
        assert _launches() - before == (4 if width == 65544 else 3)  # one pass over the rows


# Few chunks of 8 rows; more than 32 of them; more bytes than one block adds up; rows that do not
# stay in registers.
@pytest.mark.skipif(GPU, reason="the emulator counts launches")
@pytest.mark.parametrize(
    ("rows", "width", "launches"),
    [
        (256, 64, 1),
        (61, 512, 1),
        (27, 4096, 1),
        (257, 64, 2),
        (136, 4096, 2),
        (9, 8192, 2),
        (27, 516, 2),
    ],
)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_the_last_block_adds_few_chunks(
    cuda_device: str,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    rows: int,
    width: int,
    launches: int,
) -> None:
    """In one launch, again and again, with the bits of two launches, which a graph captures."""
    x, grad = torch.randn(2, rows, width, device=cuda_device).bfloat16()
    parameters = [torch.randn(width, device=cuda_device).bfloat16() for _ in range(2)]
    mean, rstd = torch.randn(rows, device=cuda_device), torch.rand(rows, device=cuda_device)

    def backward() -> tuple[torch.Tensor, ...]:
        ops = torch.ops.torchweld
        if name == "rms_norm":
            given = (grad, x, [width], parameters[0], None, rstd, True)
            return tuple(ops.rms_norm_backward.cuda(*given))
        given = (grad, x, [width], *parameters, 1e-5, mean, rstd, True, True)
        return tuple(ops.layer_norm_backward.cuda(*given))

    captures = ctypes.c_int.in_dll(ctypes.CDLL(str(EMULATED)), "emulator_captures")
    monkeypatch.setattr(captures, "value", 1)
    before = _launches()
    expected = backward()
    assert _launches() - before == 2
    monkeypatch.setattr(captures, "value", 0)
    for _ in range(3):
        before = _launches()
        found = backward()
        assert _launches() - before == launches
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _launches() -> int:
    return ctypes.c_int64.in_dll(ctypes.CDLL(str(EMULATED)), "emulator_launches").value


@pytest.fixture
def no_clusters() -> Iterator[None]:
    """The emulated device is one below sm_90."""
    blocks = ctypes.c_int.in_dll(ctypes.CDLL(str(EMULATED)), "emulator_cluster_blocks")
    before, blocks.value = blocks.value, 0
    yield
    blocks.value = before


@pytest.mark.skipif(GPU, reason="a GPU has clusters or has none")
@pytest.mark.usefixtures("no_clusters")
@_combine(TWO_PASSES)
def test_backward_in_two_passes(
    cuda_device: str, name: str, width: int, dtype: torch.dtype
) -> None:
    op = OPS[name]
    inputs = materialize(op.sized((ROWS,), (width,)), dtype, cuda_device)
    before = _launches()
    assert_right(op, inputs)
    assert _launches() - before == 4  # the forward, two passes, and the sums of chunks


def _chunks(rows: int, *widths: int) -> dict[int, int]:
    library = ctypes.CDLL(str(EMULATED))
    library.norm_chunks.restype = ctypes.c_int64
    library.norm_chunks.argtypes = [ctypes.c_int64, ctypes.c_int64]
    guards = ctypes.c_int.in_dll(library, "emulator_device_guards")
    guards.value += 1
    found = {width: library.norm_chunks(rows, width) for width in widths}
    guards.value -= 1
    return found


@pytest.mark.skipif(GPU, reason="a GPU has its own sizes")
def test_chunks_fill_the_device(cuda_device: str) -> None:
    """As many blocks per multiprocessor as its registers allow, as many clusters as run at once,
    and 8 rows per chunk."""
    assert _chunks(10**6, 256, 1024, 4096, 8192) == {256: 160, 1024: 40, 4096: 40, 8192: 20}
    assert _chunks(10**6, 8200, 16392, 65536, 65544) == {8200: 10, 16392: 5, 65536: 2, 65544: 3}
    assert _chunks(256, 1024) == {1024: 32}


@pytest.mark.skipif(GPU, reason="a GPU has its own sizes")
@pytest.mark.usefixtures("no_clusters")
def test_chunks_of_two_passes_fill_the_device(cuda_device: str) -> None:
    assert _chunks(10**6, 8192, 8200, 65536) == {8192: 20, 8200: 14, 65536: 3}
