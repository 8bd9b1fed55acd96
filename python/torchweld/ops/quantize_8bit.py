"""quantize_8bit, dequantize_8bit: blocks of 256 elements as codes of a map and their absmax.

    code of x = the number of the map that is nearest to x / absmax of its block

Read on in: csrc/core/quant8.h, csrc/cpu/quant8.cpp, csrc/bind/quant8.cpp.
"""

from __future__ import annotations

from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch.bare import BareOp
from torchweld.errors import ArgumentError

BLOCK = 256
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def quantize_8bit(input: torch.Tensor, *, signed: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of 256 elements as bytes and a scale, in bitsandbytes' dynamic map.

    The first dimension counts rows, and a block lies within a row; a vector is one row. If the row
    length is a multiple of 256, the blocks equal bitsandbytes' blocks of the flattened tensor. An
    element becomes the code of the map's value nearest to element / absmax; a tie goes to the
    larger magnitude. Zero stays zero.

    Args:
        input: of any shape; float32, bfloat16 or float16 (float64 is rounded to float32 first).
        signed: whether the map has negative values; otherwise the sign of input is lost.

    Returns:
        codes, uint8, of input's shape, and absmax, float32, [rows, ceil(elements of a row / 256)].
        A NaN or an infinity becomes its block's absmax, and no dequantised element of the block is
        finite. No gradient flows.
    """
    checks.dense("quantize_8bit", "input", input, _FLOATS)
    checks.flag("quantize_8bit", "signed", signed)
    with torch.no_grad():
        quantize = quantize_reference if input.dtype == torch.float64 else _QUANTIZE.run
        return quantize(input, signed)


def dequantize_8bit(
    codes: torch.Tensor,
    absmax: torch.Tensor,
    *,
    signed: bool = True,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The tensor of these codes and absmax.

    Args:
        codes: uint8, from quantize_8bit.
        absmax: float32, from the same call.
        signed: as for quantize_8bit.
        dtype: of the result: float32, bfloat16, float16 or float64.

    Returns:
        A tensor of codes' shape: map[code] * absmax, in float32, then rounded to dtype.
    """
    checks.dense("dequantize_8bit", "codes", codes, [torch.uint8])
    checks.flag("dequantize_8bit", "signed", signed)
    checks.dense("dequantize_8bit", "absmax", absmax, [torch.float32])
    checks.like("dequantize_8bit", "absmax", absmax, codes, "codes")
    if absmax.shape != scales_shape(codes.shape):
        accepted = f"{list(scales_shape(codes.shape))}, for codes of shape {list(codes.shape)}"
        raise ArgumentError("dequantize_8bit", "absmax", f"of shape {list(absmax.shape)}", accepted)
    if dtype not in _FLOATS:
        raise ArgumentError("dequantize_8bit", "dtype", dtype, checks.names(_FLOATS))
    with torch.no_grad():
        dequantize = dequantize_reference if dtype == torch.float64 else _DEQUANTIZE.run
        return dequantize(codes, absmax, signed, dtype)


def rows_and_width(shape: torch.Size) -> tuple[int, int]:
    """The number of rows and their width; blocks do not cross rows."""
    if len(shape) < 2:
        return 1, shape.numel()
    return shape[0], shape[1:].numel()


def scales_shape(shape: torch.Size) -> torch.Size:
    """The shape of the absmax that goes with codes of this shape."""
    rows, width = rows_and_width(shape)
    return torch.Size((rows, -(-width // BLOCK)))


# --- The map ----------------------------------------------------------------------------------


def _magnitudes(signed: bool) -> torch.Tensor:
    """The map's non-negative values, in order; csrc/core/quant8.h defines them."""
    values = [torch.zeros(1, dtype=torch.float32)]
    tenth = torch.tensor(0.1, dtype=torch.float32)
    for decade in range(7):
        parts = 2 ** (decade if signed else decade + 1)
        step = (1 - tenth) / parts
        part = torch.arange(parts + 1, dtype=torch.float64)
        from_below = tenth.double() + step.double() * part
        from_above = 1 - step.double() * (parts - part)
        edges = torch.where(part < (parts + 1) // 2, from_below, from_above).float()
        power = torch.tensor(10.0 ** (decade - 6), dtype=torch.float32)
        values.append(power * ((edges[:-1] + edges[1:]) / 2))
    return torch.cat([*values, torch.ones(1, dtype=torch.float32)])


def _map(signed: bool) -> torch.Tensor:
    positive = _magnitudes(signed)
    return torch.cat([-positive[1:-1].flip(0), positive]) if signed else positive


def _thresholds(signed: bool) -> torch.Tensor:
    """The least float32 that is at least as near to a magnitude as to the one below it."""
    exact = _magnitudes(signed).double()
    middle = (exact[:-1] + exact[1:]) / 2
    rounded = middle.float()
    above = rounded.nextafter(torch.full_like(rounded, torch.inf))
    return torch.where(rounded.double() < middle, above, rounded)


# By `signed`: the value of every code, and the bounds between neighbouring magnitudes.
with torch.device("cpu"):  # on the CPU, whatever the default device is at import
    MAPS = {signed: _map(signed) for signed in (True, False)}
    THRESHOLDS = {signed: _thresholds(signed) for signed in (True, False)}


# --- Reference and fakes ----------------------------------------------------------------------


def _places(edges: torch.Tensor) -> torch.Tensor:
    """The positions of a row's elements when its pieces are padded to blocks."""
    sizes = edges.diff()
    piece = torch.arange(len(sizes), device=edges.device).repeat_interleave(sizes)
    return torch.arange(len(piece), device=edges.device) - edges[piece] + piece * BLOCK


def _blocks(x: torch.Tensor, edges: torch.Tensor | None) -> torch.Tensor:
    """[rows, blocks, 256], padded with zeros."""
    rows, width = rows_and_width(x.shape)
    if edges is not None:
        padded = x.new_zeros(rows, (len(edges) - 1) * BLOCK)
        padded[:, _places(edges)] = x.reshape(rows, width)
    else:
        fill = -width % BLOCK
        padded = torch.nn.functional.pad(x.reshape(rows, width), (0, fill))
    return padded.view(rows, padded.shape[1] // BLOCK, BLOCK)


def _join_blocks(
    blocks: torch.Tensor, shape: torch.Size, edges: torch.Tensor | None
) -> torch.Tensor:
    width = rows_and_width(shape)[1]
    places = slice(width) if edges is None else _places(edges)
    return blocks.flatten(1)[:, places].reshape(shape)


def absmax_reference(x: torch.Tensor, edges: torch.Tensor | None = None) -> torch.Tensor:
    """The absmax of each block, or of each piece of a block if `edges` divide the rows."""
    return _blocks(x.float(), edges).abs().amax(2)


def quantize_reference(
    x: torch.Tensor,
    signed: bool,
    edges: torch.Tensor | None = None,
    absmax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_8bit in eager torch, without its checks.

    If `edges` divide rows into pieces of blocks, `absmax` belongs to whole blocks.
    """
    blocks = _blocks(x.float(), edges)
    absmax = blocks.abs().amax(2) if absmax is None else absmax
    fraction = blocks / torch.where(absmax == 0, 1.0, absmax).unsqueeze(2)
    magnitude = fraction.abs().nan_to_num(1.0)
    number = torch.bucketize(magnitude, THRESHOLDS[signed].to(x.device), right=True)
    if signed:
        number = torch.where(fraction.signbit(), 127 - number.clamp(max=127), 127 + number)
    return _join_blocks(number.to(torch.uint8), x.shape, edges), absmax


def keep_positive(codes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The codes of a second moment; only zeros become zero.

    The first moment is divided by the second's root. If two gradients in a block differ by more
    than a factor of 2500, the smaller one's square would round to zero, but not its first moment.
    A step of lr * moment / eps would follow, unless another gradient came first.
    """
    return torch.where((codes == 0) & (x > 0), 1, codes)


def dequantize_reference(
    codes: torch.Tensor,
    absmax: torch.Tensor,
    signed: bool,
    dtype: torch.dtype,
    edges: torch.Tensor | None = None,
) -> torch.Tensor:
    """dequantize_8bit in eager torch, without its checks; `edges` divide rows into pieces."""
    values = MAPS[signed].to(codes.device)[_blocks(codes, edges).int()]
    return _join_blocks(values * absmax.unsqueeze(2), codes.shape, edges).to(dtype)


def _quantize_fake(x: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.uint8)
    return codes, x.new_empty(scales_shape(x.shape), dtype=torch.float32)


def _dequantize_fake(
    codes: torch.Tensor, absmax: torch.Tensor, signed: bool, dtype: torch.dtype
) -> torch.Tensor:
    return codes.new_empty(codes.shape, dtype=dtype)


# The number of elements in the check at a kernel's first use; tiles end within them.
_SAMPLED = 2**22 - 3


def _take_few(x: torch.Tensor, absmax: torch.Tensor | None = None) -> tuple[Any, Any]:
    """The first rows, or the first elements of a vector, and their absmax."""
    if x.ndim < 2:
        blocks = scales_shape(x[:_SAMPLED].shape)[1]
        return x[:_SAMPLED], None if absmax is None else absmax[:, :blocks]
    rows = max(1, _SAMPLED // max(rows_and_width(x.shape)[1], 1))
    return x[:rows], None if absmax is None else absmax[:rows]


_QUANTIZE = BareOp(
    "quantize_8bit",
    "(Tensor input, bool signed) -> (Tensor codes, Tensor absmax)",
    _quantize_fake,
    ("cpu", "cuda"),
    reference=quantize_reference,
    sample=lambda x, signed: (_take_few(x)[0], signed),
)
_DEQUANTIZE = BareOp(
    "dequantize_8bit",
    "(Tensor codes, Tensor absmax, bool signed, ScalarType dtype) -> Tensor",
    _dequantize_fake,
    ("cpu", "cuda"),
    reference=dequantize_reference,
    sample=lambda codes, absmax, *how: (*_take_few(codes, absmax), *how),
)
