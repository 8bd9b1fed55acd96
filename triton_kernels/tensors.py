"""Prepares tensors for a launch, and loads and stores their elements within a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def load(ptr, row, column, stride, inside):
    """Elements of a matrix in float32, 0 outside of it."""
    return tl.load(ptr + row * stride + column, mask=inside, other=0).to(tl.float32)


@triton.jit
def store(ptr, row, column, stride, value, inside):
    """Stores elements of a matrix in its dtype."""
    tl.store(ptr + row * stride + column, value.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_parameter(ptr, column, width, absent: tl.constexpr):
    """A row of a parameter in float32, or `absent` everywhere if there is no parameter."""
    if ptr is None:
        return tl.full(column.shape, absent, tl.float32)
    else:
        value = tl.load(ptr + column, mask=column < width, other=0, eviction_policy="evict_last")
        return value.to(tl.float32)


def check_like(x: torch.Tensor, *others: torch.Tensor) -> None:
    """Refuse tensors that do not match x: a kernel would read past the end of a smaller one."""
    if any(o.shape != x.shape or o.dtype != x.dtype or o.device != x.device for o in others):
        raise ValueError("tensors differ in shape, dtype or device")


def check_beside(
    x: torch.Tensor,
    shape: Sequence[int],
    *others: torch.Tensor | None,
    dtype: torch.dtype | None = None,
    narrow: bool = False,
) -> None:
    """Refuse tensors of another shape, or of a dtype that is neither x's nor float32.

    `narrow` also admits 16-bit tensors for float32 x.
    """
    dtypes = {dtype or x.dtype, torch.float32}
    if narrow and len(dtypes) == 1:
        dtypes |= {torch.bfloat16, torch.float16}
    for other in others:
        if other is not None and (
            other.shape != tuple(shape) or other.device != x.device or other.dtype not in dtypes
        ):
            raise ValueError("a parameter or a residual does not fit x")


def as_rows(tensor: torch.Tensor, rows: int, width: int) -> torch.Tensor:
    """x as [rows, width] with adjacent columns, copied only if the strides force it."""
    matrix = tensor.reshape(rows, width)
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """x as [rows, width]. The sizes are not inferred, since one of them may be 0."""
    return as_rows(tensor, tensor.shape[:-1].numel(), tensor.shape[-1])


_ALIGNMENT = 16  # that Triton's JIT looks for: of addresses in bytes, of strides in elements


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether Triton knows rows to be aligned; for odd widths, which never are, always True."""
    if tensor.dim() == 0 or tensor.shape[-1] % _ALIGNMENT:
        return True
    strides = (stride for stride in tensor.stride() if stride != 1)
    return _find_address(tensor) % _ALIGNMENT == 0 and not any(s % _ALIGNMENT for s in strides)


def _find_address(tensor: torch.Tensor) -> int:
    """The tensor's address; of a tensor of a trace, its place in memory that will be aligned."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.data_ptr()
    return tensor.storage_offset() * tensor.element_size()  # type: ignore[return-value]


def are_aligned(*values: Any) -> bool:
    """Whether all tensors among the values have aligned rows."""
    return all(is_aligned(value) for value in values if isinstance(value, torch.Tensor))


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a view that is not aligned, since GEMM kernels read their factors many times."""
    return tensor if is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def empty_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def gradient_of(parameter: torch.Tensor | None, needed: bool) -> torch.Tensor | None:
    """Allocate a parameter's gradient, if it is needed."""
    return None if parameter is None or not needed else empty_like(parameter)


def or_empty(gradient: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """The gradient, or an empty tensor if it is not needed."""
    return x.new_empty(0) if gradient is None else gradient
