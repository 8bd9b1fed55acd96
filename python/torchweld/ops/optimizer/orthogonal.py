"""Newton-Schulz iterations: the nearest matrix with orthogonal rows, from products only.

A step of coefficients (a, b, c) maps each singular value s to a s + b s^3 + c s^5; after some steps
all are near 1. For n x m matrices with n <= m a step takes

    A = X X^T,  X <- a X + (b A + c A A) X

which is 4 n^2 m + 2 n^3 operations. The Gram variant iterates on A only, where all factors are
polynomials of A, so that they commute and are symmetric: with P = a + b A + c A A,

    Q <- P Q,  A <- P A P,  and X <- Q X at the end.

It begins again from X after three steps, and then after every two: rounding makes small eigenvalues
of A negative, and such an error grows from step to step. In bfloat16, beginning again after two of
five steps left singular values of 1.9 in matrices of condition 1e3, and after three 1.21, the
polynomial's own.

A symmetric product of many rows is computed up to the diagonal, and mirrored: in tiles by a kernel
on GPUs that have descriptors, elsewhere in blocks of rows by torch's GEMMs.
The bits of a matrix's products must depend neither on how many matrices there are nor on its place
among them: all operations are chosen by its own size. A GPU takes matrices in batches, since it is
faster than the host that launches its products. A library may choose its kernel by the size of a
batch, so batches of a size are all equally long, the last one with zeros at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from torchweld.dispatch.bare import BareOp
from torchweld.ops.gemm.product import is_converted, multiply, multiply_into
from torchweld.ops.optimizer.sum_of_squares import sum_of_squares
from torchweld.registry.processor import has_descriptors, has_warp_groups

Coefficients = Sequence[tuple[float, float, float]]
# Jordan's; torch.optim.Muon has them too.
QUINTIC = (3.4445, -4.775, 2.0315)
# The optimal polynomials of Amsel et al. (2025), for singular values from 1e-3, made safe for
# roundings: each is of s / 1.05.
_SAFETY = 1.05
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.875, -1.25, 0.375),  # further steps only polish
)
_FIRST, _LATER = 3, 2  # steps of a segment on the Gram matrix
_BLOCKS = 4


class _Limits(NamedTuple):
    """How many matrices a batch has, and from which size on blocks beat one product."""

    blocks_from: int  # rows
    batch: int  # elements
    is_filled: bool
    # At least this many matrices even if they exceed `batch`, but at most `most` elements.
    at_least: int = 1
    most: int = 0

    def count_matrices(self, elements: int) -> int:
        """Count the matrices of a batch, with this many elements each."""
        return max(1, self.batch // elements, min(self.at_least, self.most // elements))


# On the CPU a batch stays in a cache. On an H200 a product of 1024 rows takes 5 us and its launch
# as long: 16 matrices of 2048 x 2048, one by one and in blocks, took 78 ms, 5 of them for products.
# Four such matrices at a time fill its processors: 730 TFLOP/s, where one reaches 605.
_ON_CPU, _ON_GPU = _Limits(512, 2**18, False), _Limits(4096, 2**22, True, 4, 2**25)
# Rows from which the kernel for symmetric products beats one product, its multiple of columns, and
# the elements of a batch that its 32-bit places cannot reach.
_TILES_FROM, _MULTIPLE, _TOO_MANY = 2048, 8, 2**31


def _limits(x: torch.Tensor) -> _Limits:
    return _ON_GPU if x.is_cuda else _ON_CPU


def polar_express(steps: int) -> Coefficients:
    """The coefficients of Polar Express for this many steps."""
    last = len(_POLAR_EXPRESS) - 1
    chosen = [_POLAR_EXPRESS[min(i, last)] for i in range(steps)]
    s = _SAFETY
    return [
        (a / s, b / s**3, c / s**5) if i < last else (a, b, c) for i, (a, b, c) in enumerate(chosen)
    ]


def count_operations(rows: int, columns: int, steps: int, gram: bool) -> float:
    """The floating-point operations of one matrix, with symmetric products in full."""
    n, m = sorted((rows, columns))
    if not gram or n == m:
        return steps * (4.0 * n * n * m + 2.0 * n**3)
    segments = [len(segment) for segment in _segments(range(steps))]
    products = sum(k + 3 * (k - 1) for k in segments)
    return len(segments) * 4.0 * n * n * m + products * 2.0 * n**3


def orthogonalize(
    matrices: Sequence[torch.Tensor],
    coefficients: Coefficients,
    *,
    gram: bool,
    dtype: torch.dtype | None,
    eps: float,
    scale: float,
) -> None:
    """Overwrite matrices of one shape by nearly orthogonal ones, times a scale.

    The norm is taken before anything is rounded to `dtype`, the dtype of the products; None is
    bfloat16 where the device has units for it, else float32.
    """
    rows, columns = matrices[0].shape
    if rows == 0 or columns == 0:
        return
    first = matrices[0]
    if dtype is None:
        is_slow = is_converted(first, torch.bfloat16)
        dtype = torch.float32 if is_slow else torch.bfloat16
    limits = _limits(first)
    at_once = limits.count_matrices(rows * columns)
    for begin in range(0, len(matrices), at_once):
        some = list(matrices[begin : begin + at_once])
        x = _normalize(some, dtype, eps)
        if limits.is_filled and len(some) < at_once:
            x = torch.cat([x, x.new_zeros(at_once - len(some), rows, columns)])
        if rows > columns:
            x = x.mT.contiguous()
        # Square matrices gain nothing from the Gram variant.
        x = (_by_gram if gram and rows != columns else _by_steps)(x, coefficients)
        if rows > columns:
            x = x.mT
        torch._foreach_copy_(some, list(x[: len(some)]))
        if scale != 1:
            torch._foreach_mul_(some, scale)


def _normalize(some: list[torch.Tensor], dtype: torch.dtype, eps: float) -> torch.Tensor:
    """The matrices as a batch, each divided by its Frobenius norm."""
    norms = torch.stack([sum_of_squares([m]) for m in some]).sqrt().clamp(min=eps)
    wide = torch.stack(some) if len(some) > 1 else some[0].unsqueeze(0)
    return (wide / norms.to(wide.dtype).view(-1, 1, 1)).to(dtype)


def _by_steps(x: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    for a, b, c in coefficients:
        gram = _symmetric(x)
        x = _multiply_and_add(_symmetric(gram, alpha=c, beta=b), x, a)
    return x


def _by_gram(x: torch.Tensor, coefficients: Coefficients) -> torch.Tensor:
    for segment in _segments(coefficients):
        gram, whole = _symmetric(x), None
        for i, (a, b, c) in enumerate(segment):
            factor = _symmetric(gram, alpha=c, beta=b)  # b A + c A A
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
            whole = factor if whole is None else _symmetric(whole, factor)
            if i + 1 < len(segment):
                gram = _symmetric(factor, _symmetric(gram, factor))
        assert whole is not None
        x = multiply(whole, x)
    return x


def _segments(coefficients: Sequence[Any]) -> list[Sequence[Any]]:
    """The steps of each segment, which begins again from X."""
    later = range(_FIRST, len(coefficients), _LATER)
    every = [coefficients[:_FIRST], *(coefficients[at : at + _LATER] for at in later)]
    return [some for some in every if some]


# --- Products -------------------------------------------------------------------------------------


# alpha X Y^T + beta X. Without Y, X is both factors: no tensor is given twice, so that alike calls
# repeat a plan.
_SYMMETRIC = BareOp(
    "symmetric_product",
    "(Tensor x, Tensor? y, float alpha, float beta) -> Tensor",
    lambda x, *_: x.new_empty(len(x), x.shape[1], x.shape[1]),
    backends=(),
    triton="triton_kernels/symmetric.py",
    reference=lambda x, y, alpha, beta: multiply(
        x, (x if y is None else y).mT, x if beta else None, alpha=alpha, beta=beta
    ),
    sample=lambda *inputs: [v[:1] if isinstance(v, torch.Tensor) else v for v in inputs],
)


# P X + beta X. torch copies X first: on an H200 1.62 ms at 8192 x 8192, whose product takes 1.40.
_ADDED = BareOp(
    "added_product",
    "(Tensor factor, Tensor x, float beta) -> Tensor",
    lambda _, x, *__: torch.empty_like(x),
    backends=(),
    triton="triton_kernels/symmetric.py",
    reference=lambda factor, x, beta: multiply(factor, x, x, beta=beta),
    sample=lambda factor, x, beta: (factor[:1], x[:1], beta),
)


def _multiply_and_add(factor: torch.Tensor, x: torch.Tensor, beta: float) -> torch.Tensor:
    is_fit = _fits_tiles(x) and _fits_tiles(factor) and has_warp_groups(x.device)
    return _ADDED.run(factor, x, beta) if is_fit else multiply(factor, x, x, beta=beta)


def _fits_tiles(x: torch.Tensor) -> bool:
    """Whether the kernel for symmetric products takes such factors, and is worth it."""
    return (
        x.dtype.itemsize == 2
        and x.shape[-2] >= _TILES_FROM
        and x.shape[-1] % _MULTIPLE == 0
        and len(x) * x.shape[-2] * max(x.shape[-2:]) < _TOO_MANY
        and x.is_contiguous()
        and has_descriptors(x.device)
    )


def _in_blocks(n: int) -> list[tuple[int, int]]:
    each = -(-n // _BLOCKS)
    return [(begin, min(begin + each, n)) for begin in range(0, n, each)]


def _symmetric(
    x: torch.Tensor, y: torch.Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0
) -> torch.Tensor:
    """alpha X Y^T + beta X, which is symmetric; without Y, X is both factors."""
    n = x.shape[-2]
    if _fits_tiles(x):
        return _SYMMETRIC.run(x, y, alpha, beta)  # type: ignore[no-any-return]
    y, added = x if y is None else y, x if beta else None
    y = y if beta else y.mT  # what is added is symmetric
    if n < _limits(x).blocks_from:
        return multiply(x, y, added, alpha=alpha, beta=beta)
    result = x.new_empty(len(x), n, n)
    for i, to in enumerate(result):
        for begin, end in _in_blocks(n):
            left, right, out = x[i, begin:end], y[i, :, :end], to[begin:end, :end]
            part = None if added is None else added[i, begin:end, :end]
            multiply_into(out, left, right, part, alpha=alpha, beta=beta)
        _mirror(to)
    return result


def _mirror(matrix: torch.Tensor) -> None:
    """Copy what lies below the diagonal to above it."""
    if matrix.dtype.itemsize == 2 and not matrix.is_cuda:
        _MIRROR.run(matrix)
    else:
        _mirror_blocks(matrix)


def _mirror_blocks(matrix: torch.Tensor) -> None:
    for begin, end in _in_blocks(len(matrix)):
        matrix[begin:end, end:] = matrix[end:, begin:end].T


# torch copies 2 GB/s of transposed 16-bit elements, a tenth of a symmetric product's time.
_MIRROR = BareOp("mirror_", "(Tensor(a!) matrix) -> ()", reference=_mirror_blocks)
