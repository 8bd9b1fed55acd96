"""quantize_one_bit, dequantize_one_bit and average_one_bit, against numpy's packing and float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import selection
from oracle import assert_same_bits_on_any_threads
from torchweld import numerics
from torchweld.functional import average_one_bit, dequantize_one_bit, quantize_one_bit
from torchweld.ops.quantize_one_bit import quantize_into

pytestmark = [pytest.mark.usefixtures("backend")]

PIECE = 8192  # elements of a partial sum
SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 1000, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5)
STRIP = 1 << 21  # elements of the long blocks that a launch covers in CUDA
BLOCKS = (None, 8, 24, 64, 2048, PIECE, PIECE + 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LENGTHS = st.integers(0, 300) | st.sampled_from(SIZES)


def _drawn(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * torch.rand(size, generator=generator).pow(9)
    x[3::17] = 0
    x[5::17] = -0.0
    return x


def _blocks(x: np.ndarray, block: int | None) -> list[np.ndarray]:
    block = block or max(len(x), 1)
    return [x[i : i + block] for i in range(0, max(len(x), 1), block)]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_scales_and_errors(dtype: torch.dtype, block: int | None) -> None:
    combinations = selection.combine(DTYPES, BLOCKS, SIZES)
    sizes = tuple(size for *of, size in combinations if of == [dtype, block])
    _check_bits_scales_and_errors(dtype, block, sizes)


def test_blocks_of_several_strips() -> None:
    _check_bits_scales_and_errors(torch.float32, 2 * PIECE, (STRIP + 2 * PIECE + 5,))


def _check_bits_scales_and_errors(
    dtype: torch.dtype, block: int | None, sizes: tuple[int, ...]
) -> None:
    for size in sizes:
        x, error = _drawn(size).to(dtype), _drawn(size, 1)
        bits, scale, rest = quantize_one_bit(x, error, block=block)
        value = x.float().numpy() + error.numpy()
        assert np.array_equal(bits.numpy(), np.packbits(value >= 0))
        of_blocks = [
            np.sqrt(np.square(b.astype(np.float64)).mean()) if len(b) else 0.0
            for b in _blocks(value, block)
        ]
        np.testing.assert_allclose(scale.numpy(), of_blocks, rtol=2**-23, atol=0)
        back = dequantize_one_bit(bits, scale, x.shape, block=block)
        of_elements = np.repeat(scale.numpy(), block or max(size, 1))[:size]
        assert np.array_equal(back.numpy(), np.where(value >= 0, of_elements, -of_elements))
        # x + error = dequantised + new error: the difference is rounded once.
        assert np.array_equal(rest.numpy(), value - back.numpy())


@given(size=LENGTHS, workers=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_mean_of_workers(size: int, workers: int, seed: int) -> None:
    sent = [quantize_one_bit(_drawn(size, seed + w), block=64) for w in range(workers)]
    bits, scale = (torch.stack([s[i] for s in sent]) for i in (0, 1))
    error = _drawn(size, seed + 50)
    got, got_scale, rest = average_one_bit(bits, scale, error, size=size, block=64)
    total = np.zeros(size, np.float32)
    for w in range(workers):
        total += dequantize_one_bit(bits[w], scale[w], size, block=64).numpy()
    value = total / np.float32(workers) + error.numpy()
    again, its_scale, its_rest = quantize_one_bit(torch.from_numpy(value), block=64)
    assert torch.equal(got, again)
    torch.testing.assert_close(got_scale, its_scale, rtol=2**-23, atol=0)
    torch.testing.assert_close(rest, its_rest, rtol=0, atol=2**-23 * float(its_scale.max()))


@given(size=LENGTHS, seed=st.integers(0, 99), narrow=st.booleans())
def test_nothing_is_lost_over_many_calls(size: int, seed: int, narrow: bool) -> None:
    """The sum of inputs equals the sum of outputs plus the last error, except for rounding."""
    dtype = torch.bfloat16 if narrow else torch.float32
    error = torch.zeros(size, dtype=dtype)
    came, went, bound = (torch.zeros(size, dtype=torch.float64) for _ in range(3))
    for step in range(8):
        x = _drawn(size, seed + step)
        bits, scale, new = quantize_one_bit(x, error)
        assert new.dtype == dtype
        came += x
        went += dequantize_one_bit(bits, scale, size)
        # Two roundings in float32, of the sum and the difference, and one of the error.
        unit = 2.0**-8 if narrow else 0.0
        bound += new.abs().double() * unit + 2.0**-23 * (x.abs() + error.abs() + scale)
        error = new
    assert ((came - went - error.double()).abs() <= bound).all()


def test_in_place_is_the_same() -> None:
    for size in SIZES:
        x, error = _drawn(size), _drawn(size, 1)
        expected = quantize_one_bit(x, error)
        bits, scale = quantize_into(x, error, error, max(8, -(-size // 8) * 8))
        torch.testing.assert_close((bits, scale, error), expected, **numerics.SAME)


def test_shapes_and_strides() -> None:
    x = _drawn(60 * 50).view(60, 50)
    for view in (x, x.t(), x[::2, 3:], x.view(3, 20, 50)):
        bits, scale, error = quantize_one_bit(view)
        flat = quantize_one_bit(view.flatten())
        assert torch.equal(bits, flat[0])
        assert torch.equal(scale, flat[1])
        assert error.shape == view.shape
        assert torch.equal(error.flatten(), flat[2])
        back = dequantize_one_bit(bits, scale, view.shape, dtype=torch.bfloat16)
        assert back.shape == view.shape
        assert torch.equal(back, (view - error).sign().where(view < 0, 1) * scale.bfloat16())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_mark_their_block(bad: float) -> None:
    x = torch.ones(3 * 64)
    x[70] = bad
    bits, scale, error = quantize_one_bit(x, block=64)
    assert scale.isfinite().tolist() == [True, False, True]
    assert (int(bits[8]) >> 1 & 1) == (bad == torch.inf)  # bit 6 of the second block's first byte
    back = dequantize_one_bit(bits, scale, 192, block=64)
    assert not back[64:128].isfinite().any()
    assert torch.equal(back[128:], x[128:])
    assert not error[64:128].isfinite().any()
    mean = average_one_bit(bits.view(1, -1), scale.view(1, -1), size=192, block=64)
    assert mean[1].isfinite().tolist() == [True, False, True]


def test_the_same_bits_at_any_number_of_threads() -> None:
    x, error = _drawn(9 * PIECE + 77), _drawn(9 * PIECE + 77, 1)
    assert_same_bits_on_any_threads(lambda: quantize_one_bit(x, error))


def test_a_compiled_graph_has_the_same() -> None:
    def there_and_back(x: torch.Tensor, error: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bits, scale, error = quantize_one_bit(x, error)
        mean = average_one_bit(bits.view(1, -1), scale.view(1, -1), size=x.numel())
        return dequantize_one_bit(mean[0], mean[1], x.shape), error

    given = _drawn(1001), _drawn(1001, 1)
    compiled = torch.compile(there_and_back, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*given), there_and_back(*given), **numerics.SAME)
