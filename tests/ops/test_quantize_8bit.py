"""quantize_8bit and dequantize_8bit: the nearest code of the map, for every float."""

from __future__ import annotations

import pytest
import torch

import torchweld
from oracle import assert_same_bits_on_any_threads
from torchweld import numerics
from torchweld.functional import dequantize_8bit, quantize_8bit
from torchweld.ops.quantize_8bit import (
    BLOCK,
    MAPS,
    THRESHOLDS,
    quantize_reference,
    scales_shape,
)

SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
SHAPES = ((), (1,), (255,), (1000,), (0,), (3, 0), (0, 7), (33, 700), (5, 256), (3, 4, 100))


pytestmark = [pytest.mark.usefixtures("backend")]


def _codes_of(x: torch.Tensor, signed: bool, absmax: float = 1.0) -> torch.Tensor:
    """The codes of numbers up to absmax. Every block contains absmax."""
    rows = torch.nn.functional.pad(x, (0, -len(x) % (BLOCK - 1))).view(-1, BLOCK - 1)
    blocks = torch.nn.functional.pad(rows, (1, 0), value=absmax)
    codes, scales = quantize_8bit(blocks, signed=signed)
    assert (scales == blocks[0, 0]).all()
    return codes[:, 1:].flatten()[: len(x)]


def _nearest(fractions: torch.Tensor, signed: bool) -> torch.Tensor:
    """The nearest codes by distance to the values on both sides, exact in float64."""
    values = MAPS[signed].double()
    exact = fractions.double() if signed else fractions.double().abs()
    above = torch.searchsorted(values, exact).clamp(1, 255)
    below = above - 1
    distances = [(exact - values[codes]).abs() for codes in (below, above)]
    # The larger magnitude if two are equally near.
    is_larger = values[above].abs() > values[below].abs()
    is_above = (distances[1] < distances[0]) | ((distances[1] == distances[0]) & is_larger)
    return torch.where(is_above, above, below)


def _floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


@SIGNED
def test_the_nearest_code_of_every_bfloat16(signed: bool) -> None:
    bits = torch.arange(2**16, dtype=torch.int32)
    fractions = _floats(bits << 16)
    fractions = fractions[fractions.abs() <= 1]
    assert len(fractions) == 2 * (0x3F80 + 1)
    assert torch.equal(_codes_of(fractions, signed).long(), _nearest(fractions, signed))
    from_16_bits, from_32 = (
        quantize_8bit(x, signed=signed)[0] for x in (fractions.bfloat16(), fractions)
    )
    assert torch.equal(from_16_bits, from_32)


@SIGNED
def test_the_nearest_code_of_float32s(signed: bool) -> None:
    """Floats at every threshold and its neighbours, in every binade, and with random bits."""
    around = torch.arange(-3, 4).repeat(len(THRESHOLDS[signed]), 1)
    thresholds = THRESHOLDS[signed].view(torch.int32).unsqueeze(1) + around
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0x3F800001, (100_000,), generator=generator)
    binades = torch.arange(0, 0x3F800001, 0x800000).unsqueeze(1) + torch.arange(-2, 3)
    bits = torch.cat([thresholds.flatten(), random, binades.flatten().clamp(0, 0x3F800000)])
    fractions = _floats(bits)
    fractions = torch.cat([fractions, -fractions])
    assert torch.equal(_codes_of(fractions, signed).long(), _nearest(fractions, signed))
    # Multiplying by the inverse of these does not always give the quotient.
    for absmax in torch.tensor([1.1e-38, 3e-3, 0.7, 1.9, 3e38]):
        x = fractions * absmax
        expected = _nearest(x / absmax, signed)
        assert torch.equal(_codes_of(x, signed, absmax.item()).long(), expected)


@SIGNED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_blocks_lie_within_rows(signed: bool, dtype: torch.dtype) -> None:
    """Bitwise the reference's codes for any shape and magnitudes, within the error bound."""
    values = MAPS[signed].double()
    # Half the widest gap; -1 lies outside the signed map. Fractions are rounded to float32.
    widest = max(values.diff().max().item() / 2, 1 + values[0].item() if signed else 0) + 2**-24
    for seed, shape in enumerate(SHAPES):
        torch.manual_seed(seed)
        x = (torch.randn(shape) * torch.rand(shape).pow(9)).to(dtype)
        if not signed:
            x = x.abs()
        codes, absmax = quantize_8bit(x, signed=signed)
        expected = quantize_reference(x, signed)
        assert codes.shape == x.shape
        assert absmax.shape == scales_shape(x.shape) == expected[1].shape
        assert torch.equal(codes, expected[0])
        assert torch.equal(absmax, expected[1])
        y = dequantize_8bit(codes, absmax, signed=signed)
        scale = absmax.repeat_interleave(BLOCK, 1)[:, : x.numel() // max(absmax.shape[0], 1)]
        error = (y.double() - x.double()).abs()
        assert (error <= widest * scale.reshape(x.shape)).all()
        rounded = dequantize_8bit(codes, absmax, signed=signed, dtype=dtype)
        assert torch.equal(rounded, y.to(dtype))


@SIGNED
@pytest.mark.parametrize("magnitude", [1e-44, 1e-39, 1e-20, 1e20, 3e38])
def test_scales_of_any_magnitude(signed: bool, magnitude: float) -> None:
    """Also subnormal blocks, whose reciprocal would overflow."""
    x = torch.rand(4, 300).double().mul(magnitude).float()
    codes, absmax = quantize_8bit(x, signed=signed)
    fractions = x / absmax.repeat_interleave(BLOCK, 1)[:, :300]
    assert torch.equal(codes.long().flatten(), _nearest(fractions.flatten(), signed))


@SIGNED
def test_non_finite_values_mark_their_block(signed: bool) -> None:
    x = torch.ones(1, 3 * BLOCK)
    x[0, 5], x[0, BLOCK + 5] = torch.nan, torch.inf
    codes, absmax = quantize_8bit(x, signed=signed)
    assert absmax.isnan().tolist() == [[True, False, False]]
    assert absmax[0, 1:].tolist() == [torch.inf, 1]
    y = dequantize_8bit(codes, absmax, signed=signed)
    assert y[0, :BLOCK].isnan().all()
    assert not y[0, BLOCK : 2 * BLOCK].isfinite().any()
    assert (y[0, 2 * BLOCK :] == 1).all()


@SIGNED
@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 15, 16, 17, 40, 100, 127, 128, 129])
def test_narrow_rows_are_blocks_of_their_own(signed: bool, width: int) -> None:
    """Next to any neighbours: zeros next to subnormal, large and non-finite numbers."""
    generator = torch.Generator().manual_seed(width)
    # Mostly more than a thread's share of 16384 elements. The reference pads each row to 256.
    size = 4_001 if width < 3 else 20_001
    x = torch.randn(size // width, width, generator=generator)
    x *= torch.tensor([1.0, 0.0, 1e-42, 1e-20, 1e20])[torch.arange(len(x)) % 5].view(-1, 1)
    x[7::31, 0] = torch.nan
    x[11::31, -1] = -torch.inf
    codes, absmax = quantize_8bit(x, signed=signed)
    expected = quantize_reference(x, signed)
    assert torch.equal(codes, expected[0])
    torch.testing.assert_close(absmax, expected[1], **numerics.SAME, equal_nan=True)
    y = dequantize_8bit(codes, absmax, signed=signed)
    # NaNs' payloads may differ.
    scaled = MAPS[signed][codes.long()] * absmax
    torch.testing.assert_close(y, scaled, **numerics.SAME, equal_nan=True)


def test_views_and_the_memory_around_them() -> None:
    base = torch.randn(40, 1200)
    view = base.t()[7:900:3, 5:38]
    codes, absmax = quantize_8bit(view)
    packed = quantize_8bit(view.contiguous())
    assert torch.equal(codes, packed[0])
    assert torch.equal(absmax, packed[1])
    wide = torch.zeros(codes.shape[0], 2 * codes.shape[1], dtype=torch.uint8)
    wide[:, ::2] = codes
    assert torch.equal(dequantize_8bit(wide[:, ::2], absmax), dequantize_8bit(codes, absmax))


def test_the_same_bits_at_any_number_of_threads() -> None:
    x = torch.randn(300, 1000)
    assert_same_bits_on_any_threads(lambda: quantize_8bit(x))


def test_torchs_machinery(backend: str) -> None:
    x = torch.randn(5, 700, requires_grad=True)
    codes, absmax = quantize_8bit(x)
    assert not codes.requires_grad
    assert not dequantize_8bit(codes, absmax).requires_grad

    def both(x: torch.Tensor) -> torch.Tensor:
        return dequantize_8bit(*quantize_8bit(x))

    assert torch.equal(torch.compile(both, fullgraph=True, backend="aot_eager")(x), both(x))
    if backend == "cpu":
        ops = torch.ops.torchweld
        torch.library.opcheck(ops.quantize_8bit.cpu, (x.detach(), True))
        torch.library.opcheck(ops.dequantize_8bit.cpu, (codes, absmax, True, torch.bfloat16))


def test_a_backend_without_a_kernel_says_so() -> None:
    with torchweld.use_backend("triton"), pytest.raises(torchweld.BackendError, match="no triton"):
        quantize_8bit(torch.ones(2, 2))


@SIGNED
def test_the_map_is_the_documented_one(signed: bool) -> None:
    """The map has 127 negative numbers, 0 and 128 positive ones; or 0 and 255 positive ones."""
    values = MAPS[signed]
    assert len(values) == 256
    assert (values.diff() > 0).all()
    assert (values < 0).sum() == (127 if signed else 0)
    assert values[127 if signed else 0] == 0
    assert values[-1] == 1
    assert values[0] == (pytest.approx(-0.99297, abs=1e-5) if signed else 0)
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(dequantize_8bit(codes, torch.ones(1, 1), signed=signed), values)


@SIGNED
@pytest.mark.parametrize("width", [1, 15, 16, 17, 63, 64, 65, 127])
def test_every_code_in_rows_of_any_width(signed: bool, width: int) -> None:
    """Kernels treat whole and partial vectors of codes differently."""
    values = MAPS[signed]
    codes = torch.arange(256 * width).flip(0).remainder(256).view(-1, width).byte()
    absmax = torch.ones(len(codes), scales_shape(codes.shape)[1])
    found = dequantize_8bit(codes, absmax, signed=signed)
    assert torch.equal(found, values[codes.long()])
    # Each row has its own largest magnitude.
    for one, expected in zip(
        quantize_8bit(found, signed=signed), quantize_reference(found, signed), strict=True
    ):
        assert torch.equal(one, expected)
