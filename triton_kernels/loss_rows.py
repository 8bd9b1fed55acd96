"""The rows of a cross entropy in Triton.

csrc/core/loss_rows.h has the formulas. A program serves one row. Forward reads the logits once,
rows x width x size bytes, and the probabilities if they are given. The gradient reads and writes
them once; between a chunk's forward and gradient they come from L2 where they fit. Nothing is
tuned at run time.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from .launch import Launch, launch, run
from .tensors import contiguous, empty_like

STATISTICS, COEFFICIENTS = 6, 5


@triton.jit
def _tanh(x):
    e = tl.exp(-2 * tl.abs(x))
    t = (1 - e) / (1 + e)
    small = x - x * x * x * (1.0 / 3 - x * x * (2.0 / 15))
    return tl.where(tl.abs(x) < 0.05, small, tl.where(x < 0, -t, t))


@triton.jit
def _transform(z, scale, softcap, inverse, CAPPED: tl.constexpr):
    """u of logits, and du / dz."""
    if CAPPED:
        t = _tanh(z * (scale / softcap))
        u = t * (softcap * inverse)
        slope = (1 - t) * (1 + t) * (scale * inverse)
    else:
        u = z * (scale * inverse)
        slope = z * 0 + scale * inverse
        slope = tl.where(slope == slope, slope, scale * inverse)
    return u, slope


@triton.jit
def _inverse(inverse_ptr, row):
    if inverse_ptr is None:
        return 1.0
    else:
        return tl.load(inverse_ptr + row)


@triton.jit
def _count(target_ptr, row, targets):
    """How many of a row's targets are not ignored."""
    counted = 0
    for k in range(0, targets):
        counted += tl.where(tl.load(target_ptr + row * targets + k) == -1, 0, 1)
    return counted


@triton.jit
def _forward(
    picked_ptr,
    statistics_ptr,
    argmax_ptr,
    logits_ptr,
    target_ptr,
    weight_ptr,
    q_ptr,
    inverse_ptr,
    scale,
    softcap,
    width,
    targets,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inverse = _inverse(inverse_ptr, row)
    counted = _count(target_ptr, row, targets)
    ignored = (counted == 0) & (targets > 0)
    seen = tl.where(ignored, 0, width)
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    best = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    entropy = tl.zeros([BLOCK], tl.float32)
    smooth = tl.zeros([BLOCK], tl.float32)
    dot = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    # Each lane keeps its own maximum and sums: no reduction across threads before the end.
    for start in range(0, seen, BLOCK):
        column = start + lane
        inside = column < width
        z = tl.load(logits_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
        u, _ = _transform(z, scale, softcap, inverse, CAPPED)
        u = tl.where(inside, u, -float("inf"))
        best = tl.where(u > highest, column, best)
        raised = tl.maximum(highest, u)
        base = tl.where(raised == -float("inf"), 0, raised)
        step = tl.where(highest == -float("inf"), 0, highest - base)
        factor = tl.exp(step)
        x = u - base
        e = tl.exp(x)
        if ENTROPY:
            entropy = factor * (entropy + step * total) + tl.where(e == 0, 0, e * x)
        total = total * factor + e
        highest = raised
        if weight_ptr is None:
            w = tl.full([BLOCK], 1.0, tl.float32)
        else:
            w = tl.load(weight_ptr + column, mask=inside, other=0)
        if SMOOTH:
            smooth += tl.where(inside, w * u, 0)
        if q_ptr is not None:
            q = w * tl.load(q_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
            dot += tl.where(q == 0, 0, q * u)
            mass += tl.where(inside, q, 0)
    top = tl.max(highest, 0)
    base = tl.where(top == -float("inf"), 0, top)
    step = tl.where(highest == -float("inf"), 0, highest - base)
    factor = tl.exp(step)
    if ENTROPY:
        entropy = factor * (entropy + step * total)
    at = statistics_ptr + row * 6
    tl.store(at, tl.where(ignored, 0, top))
    tl.store(at + 1, tl.where(ignored, 1, tl.sum(total * factor, 0)))
    tl.store(at + 2, tl.sum(entropy, 0))
    tl.store(at + 3, tl.sum(smooth, 0))
    tl.store(at + 4, tl.sum(dot, 0))
    tl.store(at + 5, tl.sum(mass, 0))
    if argmax_ptr is not None:
        first = tl.min(tl.where(highest == top, best, 2147483647), 0)
        tl.store(argmax_ptr + row, tl.where(ignored, -1, first).to(tl.int64))
    for k in range(0, targets):
        t = tl.load(target_ptr + row * targets + k)
        inside = (t >= 0) & (t < width)
        z = tl.load(logits_ptr + row * width + t, mask=inside, other=0).to(tl.float32)
        u, _ = _transform(z, scale, softcap, inverse, CAPPED)
        absent = tl.where(t < 0, 0, float("nan"))
        tl.store(picked_ptr + row * targets + k, tl.where(inside, u, absent))


@triton.jit
def _gradient(
    grad_ptr,
    logits_ptr,
    target_ptr,
    statistics_ptr,
    coefficients_ptr,
    grad_picked_ptr,
    weight_ptr,
    q_ptr,
    inverse_ptr,
    scale,
    softcap,
    width,
    targets,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inverse = _inverse(inverse_ptr, row)
    highest = tl.load(statistics_ptr + row * 6)
    highest = tl.where(highest == -float("inf"), 0, highest)
    total = tl.load(statistics_ptr + row * 6 + 1)
    log_sum = tl.where(total == 0, 0, tl.log(tl.where(total == 0, 1, total)))
    on_p = tl.load(coefficients_ptr + row * 5)
    on_lse = tl.load(coefficients_ptr + row * 5 + 1)
    on_entropy = tl.load(coefficients_ptr + row * 5 + 2)
    on_smooth = tl.load(coefficients_ptr + row * 5 + 3)
    on_dot = tl.load(coefficients_ptr + row * 5 + 4)
    on_p += tl.where(on_lse == 0, 0, on_lse * (highest + log_sum))
    if q_ptr is not None:
        on_p -= on_dot * tl.load(statistics_ptr + row * 6 + 5)
    ignored = (_count(target_ptr, row, targets) == 0) & (targets > 0)
    for k in range(0, targets):
        t = tl.load(target_ptr + row * targets + k)
        on_p = tl.where(t >= width, float("nan"), on_p)
    for start in range(0, width, BLOCK):
        column = start + lane
        inside = column < width
        z = tl.load(logits_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
        u, slope = _transform(z, scale, softcap, inverse, CAPPED)
        log_p = (u - highest) - log_sum
        p = tl.exp(log_p)
        du = p * on_p + tl.where(p == 0, 0, p * log_p * on_entropy)
        if weight_ptr is None:
            w = tl.full([BLOCK], 1.0, tl.float32)
        else:
            w = tl.load(weight_ptr + column, mask=inside, other=0)
        du += on_smooth * w
        if q_ptr is not None:
            q = tl.load(q_ptr + row * width + column, mask=inside, other=0).to(tl.float32)
            du += on_dot * w * q
        for k in range(0, targets):
            t = tl.load(target_ptr + row * targets + k)
            du += tl.where(column == t, tl.load(grad_picked_ptr + row * targets + k), 0)
        du = tl.where(ignored, 0, du * slope)
        at = grad_ptr + row * width + column
        tl.store(at, du.to(grad_ptr.dtype.element_ty), mask=inside)


# --- Launches ---------------------------------------------------------------------------------


def _tile(width: int, columns: int) -> dict[str, Any]:
    """Options of a launch with so many columns a thread, and up to 16 warps."""
    block = min(512 * columns, max(16, triton.next_power_of_2(width)))
    return {"BLOCK": block, "num_warps": min(16, max(1, block // (32 * columns)))}


def _check(logits: torch.Tensor, target: torch.Tensor, how: tuple[Any, ...]) -> None:
    """Refuse tensors that do not fit: a kernel would read past the end of a smaller one."""
    weight, q, inverse = how[:3]
    rows, width = logits.shape
    fits = target.dtype == torch.int64 and target.ndim == 2 and target.shape[0] == rows
    fits = fits and (weight is None or weight.shape == (width,))
    fits = fits and (q is None or q.shape == logits.shape)
    if not fits or (inverse is not None and inverse.shape != (rows,)):
        raise ValueError("tensors do not fit the logits")


def _forward_launch(
    logits: torch.Tensor,
    target: torch.Tensor,
    how: tuple[Any, ...],
    sums: tuple[bool, bool],
    results: tuple[Any, ...],
) -> Launch:
    weight, q, inverse, scale, softcap = how
    tensors = (*results, logits, target, weight, q, inverse)
    numbers = (scale, softcap, logits.shape[1], target.shape[1])
    flags = {"CAPPED": softcap != 0, "ENTROPY": sums[0], "SMOOTH": sums[1], "maxnreg": 128}
    flags |= _tile(logits.shape[1], 4)
    return launch(_forward, logits.shape[0], *tensors, *numbers, **flags)


def _gradient_launch(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    of_rows: tuple[torch.Tensor, ...],
    how: tuple[Any, ...],
) -> Launch:
    weight, q, inverse, scale, softcap = how
    tensors = (grad, logits, target, *of_rows, weight, q, inverse)
    numbers = (scale, softcap, logits.shape[1], target.shape[1])
    flags = {"CAPPED": softcap != 0, **_tile(logits.shape[1], 8)}
    return launch(_gradient, logits.shape[0], *tensors, *numbers, **flags)


def _laid_out(how: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*(contiguous(t) for t in how[:3]), *how[3:])


# --- Called by dispatch, with the signatures of the ops' schemas ---


def loss_rows(
    logits: torch.Tensor, target: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    how, (entropy, smooth, argmax) = _laid_out(others[:5]), others[5:]
    logits, target = logits.contiguous(), target.contiguous()
    _check(logits, target, how)
    picked = logits.new_empty(target.shape, dtype=torch.float32)
    statistics = logits.new_empty((logits.shape[0], STATISTICS), dtype=torch.float32)
    best = target.new_empty((logits.shape[0] if argmax else 0,))
    results = (picked, statistics, best if argmax else None)
    run(logits, _forward_launch(logits, target, how, (entropy, smooth), results))
    return picked, statistics, best


def loss_rows_backward_(
    logits: torch.Tensor,
    target: torch.Tensor,
    statistics: torch.Tensor,
    coefficients: torch.Tensor,
    grad_picked: torch.Tensor,
    *others: Any,
    out: torch.Tensor | None = None,
) -> None:
    how, target = _laid_out(others), target.contiguous()
    _check(logits, target, how)
    of_rows = tuple(t.contiguous() for t in (statistics, coefficients, grad_picked))
    run(logits, _gradient_launch(logits if out is None else out, logits, target, of_rows, how))


def loss_rows_backward(logits: torch.Tensor, *others: Any) -> torch.Tensor:
    logits = logits.contiguous()
    grad = empty_like(logits)
    loss_rows_backward_(logits, *others, out=grad)
    return grad


def loss_rows_both_(
    logits: torch.Tensor,
    target: torch.Tensor,
    coefficients: torch.Tensor,
    grad_picked: torch.Tensor,
    *others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    how, (smooth, argmax) = others[:5], others[5:]
    results = loss_rows(logits, target, *how, False, smooth, argmax)
    loss_rows_backward_(logits, target, results[1], coefficients, grad_picked, *how)
    return results


def aot_cases() -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""
    for dtype, width, softcap in (
        (torch.bfloat16, 128256, 0.0),
        (torch.bfloat16, 256000, 30.0),
        (torch.float32, 32001, 0.0),
    ):
        logits = torch.empty(4, width, dtype=dtype, device="meta")
        rows = logits.new_empty(4, dtype=torch.float32)
        target = logits.new_empty((4, 1), dtype=torch.int64)
        statistics = logits.new_empty((4, STATISTICS), dtype=torch.float32)
        coefficients = logits.new_empty((4, COEFFICIENTS), dtype=torch.float32)
        picked = logits.new_empty((4, 1), dtype=torch.float32)
        weight = logits.new_empty(width, dtype=torch.float32)
        how = (weight, None, rows, 1.0, softcap)
        name = f"loss {dtype} {width} {softcap}".replace("torch.", "")
        yield name, _forward_launch(logits, target, how, (True, True), (picked, statistics, target))
        of_rows = (statistics, coefficients, picked)
        yield name, _gradient_launch(logits, logits, target, of_rows, how)
