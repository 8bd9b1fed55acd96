"""quantize_one_bit, dequantize_one_bit and average_one_bit: signs, scales and error feedback.

    sign, scale of a block: x + error >= 0, the root of the mean of (x + error)^2
    new error = x + error - scale * sign

Like all quantisers, they have no Triton kernels: on the GPU they are CUDA C++.

Read on in: csrc/core/one_bit.h, csrc/cpu/one_bit.cpp, csrc/bind/one_bit.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch.bare import BareOp
from torchweld.errors import ArgumentError

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_ERRORS = (torch.float32, torch.bfloat16)
Quantized = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def quantize_one_bit(
    input: torch.Tensor, error: torch.Tensor | None = None, *, block: int | None = None
) -> Quantized:
    """The signs of input + error, the scale of each block, and the remaining error.

    A block's scale is ||input + error||_2 / sqrt(its elements). An element dequantises to the scale
    where input + error >= 0 and to minus the scale elsewhere. So input + error = dequantised + new
    error, up to the rounding of the new error.

    Args:
        input: of any shape; float32, bfloat16 or float16 (float64 is rounded to float32 first).
        error: the error from the last call, of input's shape; float32 or bfloat16.
        block: how many elements of the flattened tensor share a scale, a multiple of 8; None: all.

    Returns:
        bits, uint8, [ceil(elements / 8)]: the first element is the most significant bit of the
        first byte, 1 where input + error >= 0, and bits past the last element are 0; scale,
        float32, [blocks], at least one; the new error, of input's shape and error's dtype, float32
        without one. A NaN or an infinity makes its block's scale NaN or infinite, and so all of the
        block's dequantised elements. No gradient flows.
    """
    name = "quantize_one_bit"
    checks.dense(name, "input", input, _FLOATS)
    _check_error(name, error, input.shape, input, "input")
    dtype = torch.float32 if error is None else error.dtype
    new_error = torch.empty(input.shape, dtype=dtype, device=input.device)
    with torch.no_grad():
        bits, scale = quantize_into(input, error, new_error, _block(name, block, input.numel()))
    return bits, scale, new_error


def dequantize_one_bit(
    bits: torch.Tensor,
    scale: torch.Tensor,
    shape: int | Sequence[int],
    *,
    block: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The tensor that quantize_one_bit approximated.

    Args:
        bits, scale: from quantize_one_bit.
        shape: of the tensor, or its number of elements.
        block: as in quantize_one_bit.
        dtype: of the result: float32, bfloat16, float16 or float64.

    Returns:
        A tensor of this shape and dtype; each element is plus or minus its block's scale.
    """
    name = "dequantize_one_bit"
    sizes: list[Any] = list(shape) if isinstance(shape, (tuple, list)) else [shape]
    fits = all(isinstance(size, checks.INTEGER) and size >= 0 for size in sizes)
    checks.fits(name, "shape", shape, fits, "an int >= 0, or a sequence of them")
    size = math.prod(sizes)
    block = _block(name, block, size)
    _check_bits(name, bits, scale, (), size, block)
    if dtype not in _FLOATS:
        raise ArgumentError(name, "dtype", dtype, checks.names(_FLOATS))
    with torch.no_grad():
        dequantize = dequantize_reference if dtype == torch.float64 else _DEQUANTIZE.run
        return dequantize(bits, scale, sizes, block, dtype)


def average_one_bit(
    bits: torch.Tensor,
    scale: torch.Tensor,
    error: torch.Tensor | None = None,
    *,
    size: int,
    block: int | None = None,
) -> Quantized:
    """The mean of the workers' quantised tensors, quantised again, as a server does in a reduction.

    Args:
        bits: uint8, [workers, ceil(size / 8)].
        scale: float32, [workers, blocks].
        error: the error from the last call, [size]; float32 or bfloat16.
        size: the number of elements.
        block: as in quantize_one_bit.

    Returns:
        bits, scale and the new error of mean + error, as from quantize_one_bit.
    """
    name = "average_one_bit"
    block = _block(name, block, size)
    checks.dense(name, "bits", bits, [torch.uint8])
    if bits.ndim != 2 or len(bits) == 0:
        accepted = "[workers, bytes], one worker or more"
        raise ArgumentError(name, "bits", f"of shape {list(bits.shape)}", accepted)
    _check_bits(name, bits, scale, (len(bits),), size, block)
    _check_error(name, error, (size,), bits, "bits")
    dtype = torch.float32 if error is None else error.dtype
    new_error = torch.empty(size, dtype=dtype, device=bits.device)
    with torch.no_grad():
        result = mean_into(bits, scale, error, new_error, size, block)
    return *result, new_error


def bytes_of(size: int) -> int:
    """The number of bytes for the bits of `size` elements."""
    return -(-size // 8)


def blocks_of(size: int, block: int) -> int:
    """The number of scales for `size` elements."""
    return max(1, -(-size // block))


def whole(size: int) -> int:
    """The block size to use for `size` elements."""
    return max(8, 8 * bytes_of(size))


def _block(name: str, block: int | None, size: int) -> int:
    if not isinstance(size, int) or size < 0:
        raise ArgumentError(name, "size", repr(size), "an int >= 0")
    if block is None:
        return whole(size)
    if not isinstance(block, int) or block <= 0 or block % 8:
        raise ArgumentError(name, "block", repr(block), "a positive multiple of 8, or None")
    return block


def _check_error(
    name: str,
    error: torch.Tensor | None,
    shape: Sequence[int],
    beside: torch.Tensor,
    beside_name: str,
) -> None:
    if error is not None:
        checks.dense(name, "error", error, _ERRORS)
        checks.like(name, "error", error, beside, beside_name)
        checks.shaped(name, "error", error, shape, "that of what is quantised")


def _check_bits(
    name: str,
    bits: torch.Tensor,
    scale: torch.Tensor,
    leading: tuple[int, ...],
    size: int,
    block: int,
) -> None:
    checks.dense(name, "bits", bits, [torch.uint8])
    checks.dense(name, "scale", scale, [torch.float32])
    checks.like(name, "scale", scale, bits, "bits")
    checks.shaped(name, "bits", bits, (*leading, bytes_of(size)), "a bit for each element")
    checks.shaped(name, "scale", scale, (*leading, blocks_of(size, block)), "one for each block")


# --- Without checks -----------------------------------------------------------------------------


def quantize_into(
    x: torch.Tensor, error: torch.Tensor | None, new_error: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_one_bit, writing the new error; in place if both errors are the same tensor."""
    quantize = quantize_reference if x.dtype == torch.float64 else _QUANTIZE.run
    return quantize(x, error, new_error, block)


# --- Reference and fakes ------------------------------------------------------------------------


def _weights(device: torch.device) -> torch.Tensor:
    """The values of a byte's bits, the first element's first."""
    return 2 ** torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


def _pad(t: torch.Tensor, multiple: int) -> torch.Tensor:
    """Flatten, and pad with zeros to a multiple."""
    return torch.nn.functional.pad(t.flatten(), (0, -t.numel() % multiple))


def _of_elements(scale: torch.Tensor, size: int, block: int) -> torch.Tensor:
    return scale.repeat_interleave(block, -1)[..., :size]


def quantize_reference(
    x: torch.Tensor, error: torch.Tensor | None, new_error: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """quantize_into in eager torch."""
    value = x.float() if error is None else x.float() + error.float()
    flat, count = value.flatten(), blocks_of(x.numel(), block)
    sums = _pad(flat.double().square(), block)
    sums = sums.view(count, -1).sum(1) if sums.numel() else flat.new_zeros(1, dtype=torch.float64)
    counts = (x.numel() - block * torch.arange(count, device=x.device)).clamp(1, block)
    scale = (sums / counts).sqrt().float()
    positive = flat >= 0
    ones = _pad(positive.byte(), 8).view(-1, 8)
    bits = (ones * _weights(x.device)).sum(1, dtype=torch.uint8)
    of_elements = _of_elements(scale, x.numel(), block)
    rest = flat - torch.where(positive, of_elements, -of_elements)
    new_error.copy_(rest.view(x.shape))
    return bits, scale


def dequantize_reference(
    bits: torch.Tensor, scale: torch.Tensor, sizes: Sequence[int], block: int, dtype: torch.dtype
) -> torch.Tensor:
    """dequantize_one_bit in eager torch; also takes rows of bits and scales."""
    size = math.prod(sizes)
    ones = (bits.unsqueeze(-1) & _weights(bits.device)).ne(0).flatten(-2)[..., :size]
    of_elements = _of_elements(scale, size, block)
    values = torch.where(ones, of_elements, -of_elements).to(dtype)
    return values.view(*bits.shape[:-1], *sizes)


def mean_reference(
    bits: torch.Tensor,
    scale: torch.Tensor,
    error: torch.Tensor | None,
    new_error: torch.Tensor,
    size: int,
    block: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """average_one_bit in eager torch, without checks, writing the new error."""
    total = torch.zeros(size, dtype=torch.float32, device=bits.device)
    for values in dequantize_reference(bits, scale, [size], block, torch.float32):
        total = total + values  # in this order, as the kernels do
    return quantize_reference(total / len(bits), error, new_error, block)


def _bits_and_scale(like: torch.Tensor, size: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    bits = like.new_empty(bytes_of(size), dtype=torch.uint8)
    return bits, like.new_empty(blocks_of(size, block), dtype=torch.float32)


_BACKENDS = ("cpu", "cuda")
# The number of elements in the check at a kernel's first use: whole bytes, in which blocks end.
_SAMPLED = 2**22 - 24


def _take_elements(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """The first elements of flattened tensors; a tensor that occurs twice is cut once."""
    cuts: dict[int, torch.Tensor] = {}

    def take(t: torch.Tensor) -> torch.Tensor:
        return cuts.setdefault(id(t), t.flatten()[:_SAMPLED])

    return [None if t is None else take(t) for t in tensors]


def _take_coded(
    bits: torch.Tensor, scale: torch.Tensor, size: int, block: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The first bits, their scales, and their number."""
    size = min(size, _SAMPLED)
    return bits[..., : bytes_of(size)], scale[..., : blocks_of(size, block)], size


def _take_few_to_mean(
    bits: torch.Tensor,
    scale: torch.Tensor,
    error: torch.Tensor | None,
    new_error: torch.Tensor,
    size: int,
    block: int,
) -> tuple[Any, ...]:
    bits, scale, size = _take_coded(bits, scale, size, block)
    return bits, scale, *_take_elements(error, new_error), size, block


def _take_few_to_decode(
    bits: torch.Tensor, scale: torch.Tensor, sizes: Sequence[int], block: int, dtype: torch.dtype
) -> tuple[Any, ...]:
    bits, scale, size = _take_coded(bits, scale, math.prod(sizes), block)
    return bits, scale, [size], block, dtype


_QUANTIZE = BareOp(
    "quantize_one_bit",
    "(Tensor input, Tensor? error, Tensor(a!) new_error, int block) -> (Tensor bits, Tensor scale)",
    lambda x, error, new_error, block: _bits_and_scale(x, x.numel(), block),
    _BACKENDS,
    reference=quantize_reference,
    sample=lambda x, error, new, block: (*_take_elements(x, error, new), block),
)
_MEAN = BareOp(
    "average_one_bit",
    "(Tensor bits, Tensor scale, Tensor? error, Tensor(a!) new_error, int size, int block)"
    " -> (Tensor bits_of_mean, Tensor scale_of_mean)",
    lambda bits, scale, error, new_error, size, block: _bits_and_scale(bits, size, block),
    _BACKENDS,
    reference=mean_reference,
    sample=_take_few_to_mean,
)
mean_into = _MEAN.run  # average_one_bit without checks, writing the new error
_DEQUANTIZE = BareOp(
    "dequantize_one_bit",
    "(Tensor bits, Tensor scale, int[] sizes, int block, ScalarType dtype) -> Tensor",
    lambda bits, scale, sizes, block, dtype: bits.new_empty(sizes, dtype=dtype),
    _BACKENDS,
    reference=dequantize_reference,
    sample=_take_few_to_decode,
)
