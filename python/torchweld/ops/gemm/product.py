"""Products of 16-bit matrices on CPUs without 16-bit units, by float32 GEMMs; else by torch.

There torch multiplies in plain loops, which take some ten times as long as its float32 GEMM. Here
threads take blocks of the result. A thread converts panels of both factors, 2**18 numbers at a
time, and rounds a block's float32 sums once: two buffers of at most 1 MiB for each thread. The
blocks depend only on sizes, so that the bits do not depend on the number of threads.

Bytes: each factor is read, and converted in the caches, once for each row or column of blocks of
256 x 256, or of 128 x 128 where those were few. Converting a number takes as long as some 16
products, so that at 256 a product takes 1 + 2 * 16 / 256 of the GEMM's time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchweld import state
from torchweld.dispatch.autograd import (
    carrying_tangents,
    list_reached,
    make_unaliased,
    wants_gradient,
)
from torchweld.dispatch.bare import BareOp
from torchweld.registry import BACKENDS, why_not_now
from torchweld.registry.processor import has_units

_ARGUMENTS = "Tensor left, Tensor right, Tensor? start, float alpha, float beta"
# out = alpha * left @ right + beta * start for matrices, or batches of them, with any strides. Sums
# are float32. `start` has the sizes of `out`, and may be `out`.
_MULTIPLY = BareOp("multiply_", f"(Tensor(a!) out, {_ARGUMENTS}) -> ()").overload("cpu")
PRODUCT = BareOp(
    "product",
    f"({_ARGUMENTS}) -> Tensor",
    lambda left, right, *_: left.new_empty((*left.shape[:-1], right.shape[-1])),
).overload("cpu")
# torch is as fast with fewer products, whose calls and buffers take longer than the GEMM, and with
# fewer rows of a left factor if a column of the right one is contiguous.
_SMALLEST, _FEW_ROWS = 2**18, 4


def multiply(
    left: torch.Tensor,
    right: torch.Tensor,
    start: torch.Tensor | None = None,
    *,
    alpha: float | None = None,
    beta: float = 1.0,
) -> torch.Tensor:
    """alpha * left @ right + beta * start, for matrices or batches of them; alpha is 1 by default.

    Without start, a left factor of any dimensions goes with a matrix.
    """
    # torch 2.10 traces a default number as a symbol, and fails.
    if start is None and alpha is None:
        if not serves(left, right):
            return left @ right
        trains = wants_gradient(left, right)
        return _Product.apply(left, right) if trains else _multiply(left, right)
    alpha = 1.0 if alpha is None else alpha
    if serves(left, right) and not wants_gradient(left, right, start):
        return PRODUCT(left, right, start, alpha, beta)  # type: ignore[no-any-return]
    if start is None:
        return left @ right * alpha
    add = torch.addmm if start.ndim == 2 else torch.baddbmm
    return add(start, left, right, beta=beta, alpha=alpha)


def _multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if right.ndim == 2:
        rows = left.reshape(left.shape[:-1].numel(), left.shape[-1])
    else:
        rows, right = left.flatten(0, -3), right.flatten(0, -3)
    made = PRODUCT(rows, right, None, 1.0, 1.0)
    return made if made.ndim == left.ndim else made.view(*left.shape[:-1], made.shape[-1])  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Any, right: Any) -> Any:
        ctx.save_for_backward(left, right)
        return make_unaliased(_multiply(left, right))

    @staticmethod
    @carrying_tangents
    def backward(ctx: Any, grad: Any) -> Any:
        (left, right), (to_left, to_right) = ctx.saved_tensors, list_reached(ctx)
        rows = [t.flatten(0, -2) if right.ndim == 2 else t for t in (left, grad)]
        return (
            multiply(grad, right.mT) if to_left else None,
            multiply(rows[0].mT, rows[1]) if to_right else None,
        )


def find_multiply(x: torch.Tensor) -> Callable[..., torch.Tensor]:
    """What multiplies matrices like x by others, in calls that guards have compared."""
    is_converting = is_converted(x, x.dtype) and may_run()
    return multiply_plain if is_converting else torch.matmul


def multiply_plain(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right of 16-bit CPU tensors that need no gradient; only sizes are left to decide."""
    rows, (terms, columns) = left.shape[:-1].numel(), right.shape
    if not pays(rows, columns, terms, right.stride(0)):
        return left @ right
    if left.ndim == 2:
        return PRODUCT(left, right, None, 1.0, 1.0)  # type: ignore[no-any-return]
    return _multiply(left, right)


def multiply_into(
    out: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    start: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> None:
    """Write alpha * left @ right + beta * start to a matrix; start is broadcast, and may be out.

    Where `serves` says so, out may be float32.
    """
    if serves(left, right):
        start = None if start is None else start.expand(out.shape)
        _MULTIPLY(out, left, right, start, alpha, beta)
    elif start is None and alpha == 1:
        torch.mm(left, right, out=out)
    else:
        given = (out, 0.0) if start is None else (start, beta)
        torch.addmm(given[0], left, right, beta=given[1], alpha=alpha, out=out)


def is_converted(x: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a product of this dtype on x's device is one of float32 here."""
    return x.is_cpu and dtype.itemsize == 2 and not has_units(dtype)


def serves(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether such factors are converted."""
    dtype, compiles = left.dtype, state.is_compiling()
    if not compiles and left.numel() * right.shape[-1] < _SMALLEST:
        return False
    if dtype.itemsize != 2 or not left.is_cpu or right.dtype is not dtype or has_units(dtype):
        return False
    if compiles:  # sizes must not become guards
        return may_run()
    terms, columns = right.shape[-2:]
    # Not by the batch: the bits of a matrix must not depend on how many others there are.
    rows = left.shape[-2] if right.ndim > 2 else left.shape[:-1].numel()
    return (
        pays(rows, columns, terms, 0 if right.ndim > 2 else right.stride(0))
        and type(left) in state.PLAIN
        and type(right) in state.PLAIN
        and right.is_cpu
        and (right.ndim == 2 or left.shape[:-2] == right.shape[:-2])
        and may_run(left, right)
    )


def is_small(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a layer has so few products that no form of it gains."""
    return x.numel() * weight.shape[:1].numel() < _SMALLEST


def pays(rows: int, columns: int, terms: int, stride: int) -> bool:
    """Whether a product of these sizes gains; `stride` is from one term to the next one."""
    return rows * columns * terms >= _SMALLEST and (rows >= _FEW_ROWS or stride != 1)


def may_run(*tensors: torch.Tensor | None) -> bool:
    """Whether the library is there, and no transform needs ops that it knows."""
    if BACKENDS["cpu"].why_missing() is not None:
        return False
    if state.is_compiling():
        return True
    given = [t for t in tensors if t is not None]
    return why_not_now() is None and not any(map(state.is_batched, given))
