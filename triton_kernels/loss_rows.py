"""The rows of a cross entropy in Triton.

csrc/core/loss_rows.h has the formulas. A program serves one row. Forward reads the logits once,
rows x width x size bytes, and the probabilities if they are given. The gradient reads and writes
them once. Both at once read them from L2 the second time: the rows of all programs that run, 256 KB
each at 131072 columns of 16 bits, are 34 MB with one program a multiprocessor. Nothing is tuned at
run time.

On an H200 an earlier form took 2.6 ms for the loss and the gradient of 4096 x 131072 in bfloat16,
where the floor is 0.8 ms: a thread had 14 instructions for an element's statistics and 29 for its
gradient. This form has 9 to 13 for either, and takes 0.74 ms.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from .launch import Launch, launch, replayed, run
from .tensors import contiguous, empty_like

STATISTICS, COEFFICIENTS = 6, 5


@triton.jit
def _exp(x):
    """e^x, but 0 below 2^-126: tl.exp takes three more instructions for such numbers."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _tanh(x):
    e = _exp(-2 * tl.abs(x))
    t = (1 - e) / (1 + e)
    small = x - x * x * x * (1.0 / 3 - x * x * (2.0 / 15))
    return tl.where(tl.abs(x) < 0.05, small, tl.where(x < 0, -t, t))


@triton.jit
def _transform(z, scale, softcap, inverse, CAPPED: tl.constexpr):
    """u of logits, and du / dz, which without a soft cap is one number."""
    if CAPPED:
        t = _tanh(z * (scale / softcap))
        u = t * (softcap * inverse)
        slope = (1 - t) * (1 + t) * (scale * inverse)
    else:
        u = z * (scale * inverse)
        slope = scale * inverse
    return u, slope


@triton.jit
def _inverse(inverse_ptr, row):
    if inverse_ptr is None:
        return 1.0
    else:
        return tl.load(inverse_ptr + row)


@triton.jit
def _is_ignored(target_ptr, row, targets):
    """Whether all targets of a row are ignored; not without targets."""
    counted = 0
    for k in range(0, targets):
        counted += tl.where(tl.load(target_ptr + row * targets + k) == -1, 0, 1)
    return (counted == 0) & (targets > 0)


@triton.jit
def _load(ptr, column, width, MASKED: tl.constexpr):
    """Load elements of a row in float32; a whole tile needs no mask.

    A mask of an odd width would have Triton load one element at a time.
    """
    if MASKED:
        return tl.load(ptr + column, mask=column < width, other=0).to(tl.float32)
    else:
        return tl.load(ptr + column).to(tl.float32)


@triton.jit
def _load_weight(weight_ptr, column, width, MASKED: tl.constexpr):
    if weight_ptr is None:
        return 1.0
    else:
        return _load(weight_ptr, column, width, MASKED)


@triton.jit
def _add_tile(
    sums,
    column,
    tensors,
    numbers,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SMOOTH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds a tile of columns to the maximum and the sums of each lane."""
    highest, best, total, entropy, smooth, dot, mass = sums
    logits_ptr, weight_ptr, q_ptr, argmax_ptr = tensors
    inverse, scale, softcap, width = numbers
    z = _load(logits_ptr, column, width, MASKED)
    u, _ = _transform(z, scale, softcap, inverse, CAPPED)
    if MASKED:
        u = tl.where(column < width, u, -float("inf"))
    most = tl.max(u, 1)
    if argmax_ptr is not None:
        first = tl.min(tl.where(u == most[:, None], column, 2147483647), 1)
        best = tl.where(most > highest, first, best)
    raised = tl.maximum(highest, most)
    base = tl.where(raised == -float("inf"), 0, raised)
    step = tl.where(highest == -float("inf"), 0, highest - base)
    factor = _exp(step)
    x = u - base[:, None]
    e = _exp(x)
    if ENTROPY:
        entropy = factor * (entropy + step * total) + tl.sum(tl.where(e == 0, 0, e * x), 1)
    total = total * factor + tl.sum(e, 1)
    if SMOOTH:
        terms = _load_weight(weight_ptr, column, width, MASKED) * u
        if MASKED:
            terms = tl.where(column < width, terms, 0)
        smooth += tl.sum(terms, 1)
    if q_ptr is not None:
        w = _load_weight(weight_ptr, column, width, MASKED)
        q = w * _load(q_ptr, column, width, MASKED)
        dot += tl.sum(tl.where(q == 0, 0, q * u), 1)
        mass += tl.sum(q, 1)
    return raised, best, total, entropy, smooth, dot, mass


@triton.jit
def _statistics(
    results,
    inputs,
    sizes,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    SMOOTH: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Reads a row and stores its statistics; returns the highest u and the sum."""
    at, picked_ptr, argmax_ptr = results
    logits_ptr, target_ptr, weight_ptr, q_ptr, row, inverse, ignored = inputs
    scale, softcap, width, targets, logits_stride = sizes
    places = tl.arange(0, LANES)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    logits_ptr += row * logits_stride
    if q_ptr is not None:
        q_ptr += row * width
    tensors, numbers = (logits_ptr, weight_ptr, q_ptr, argmax_ptr), (inverse, scale, softcap, width)
    # Each lane keeps the maximum and the sums of its own columns, a few at a time: there is one
    # exponential a column, and no reduction across threads before the end.
    nothing = tl.zeros([LANES], tl.float32)
    highest, best = tl.full([LANES], -float("inf"), tl.float32), tl.zeros([LANES], tl.int32)
    sums = (highest, best, nothing, nothing, nothing, nothing, nothing)
    tile: tl.constexpr = LANES * COLUMNS
    seen = tl.where(ignored, 0, width)
    whole = seen // tile * tile
    for start in tl.range(0, whole, tile, num_stages=STAGES):
        sums = _add_tile(sums, start + places, tensors, numbers, CAPPED, ENTROPY, SMOOTH, False)
    if whole < seen:
        sums = _add_tile(sums, whole + places, tensors, numbers, CAPPED, ENTROPY, SMOOTH, True)
    highest, best, total, entropy, smooth, dot, mass = sums
    top = tl.max(highest, 0)
    base = tl.where(top == -float("inf"), 0, top)
    step = tl.where(highest == -float("inf"), 0, highest - base)
    factor = _exp(step)
    if ENTROPY:
        entropy = factor * (entropy + step * total)
    if argmax_ptr is not None:
        first = tl.min(tl.where(highest == top, best, 2147483647), 0)
        tl.store(argmax_ptr + row, tl.where(ignored, -1, first).to(tl.int64))
    top, total = tl.where(ignored, 0, top), tl.where(ignored, 1, tl.sum(total * factor, 0))
    tl.store(at, top)
    tl.store(at + 1, total)
    tl.store(at + 2, tl.sum(entropy, 0))
    tl.store(at + 3, tl.sum(smooth, 0))
    tl.store(at + 4, tl.sum(dot, 0))
    mass = tl.sum(mass, 0)
    tl.store(at + 5, mass)
    for k in range(0, targets):
        t = tl.load(target_ptr + row * targets + k)
        inside = (t >= 0) & (t < width)
        z = tl.load(logits_ptr + t, mask=inside, other=0).to(tl.float32)
        u, _ = _transform(z, scale, softcap, inverse, CAPPED)
        absent = tl.where(t < 0, 0, float("nan"))
        tl.store(picked_ptr + row * targets + k, tl.where(inside, u, absent))
    return top, total, mass


@triton.jit
def _derive(
    z,
    column,
    tensors,
    numbers,
    of_row,
    CAPPED: tl.constexpr,
    EVERY: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The derivative by u but for targets, and du / dz; EVERY adds entropy and smoothing."""
    weight_ptr, q_ptr = tensors
    inverse, scale, softcap, width = numbers
    highest, log_sum, on_p, on_entropy, on_smooth, on_dot = of_row
    u, slope = _transform(z, scale, softcap, inverse, CAPPED)
    log_p = (u - highest) - log_sum
    p = _exp(log_p)
    du = p * on_p
    if EVERY:
        du += tl.where(p == 0, 0, p * log_p * on_entropy)
        du += on_smooth * _load_weight(weight_ptr, column, width, MASKED)
    if q_ptr is not None:
        w = _load_weight(weight_ptr, column, width, MASKED)
        du += on_dot * w * _load(q_ptr, column, width, MASKED)
    return du, slope


@triton.jit
def _differentiate_tile(
    grad_ptr,
    logits_ptr,
    column,
    tensors,
    numbers,
    of_row,
    of_targets,
    CAPPED: tl.constexpr,
    SINGLE: tl.constexpr,
    EVERY: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Stores the gradient of a tile of columns, without the target's own part if it is SINGLE."""
    target_ptr, grad_picked_ptr, targets = of_targets
    width = numbers[3]
    z = _load(logits_ptr, column, width, MASKED)
    du, slope = _derive(z, column, tensors, numbers, of_row, CAPPED, EVERY, MASKED)
    if not SINGLE:
        for k in range(0, targets):
            t = tl.load(target_ptr + k)
            du += tl.where(column == t, tl.load(grad_picked_ptr + k), 0)
    du = (du * slope).to(grad_ptr.dtype.element_ty)
    if MASKED:
        tl.store(grad_ptr + column, du, mask=column < width)
    else:
        tl.store(grad_ptr + column, du)


@triton.jit
def _differentiate(
    grad_ptr,
    inputs,
    found,
    sizes,
    CAPPED: tl.constexpr,
    SINGLE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Reads a row again, or for the first time, and stores the gradient of its logits."""
    logits_ptr, target_ptr, grads, weight_ptr, q_ptr, row = inputs
    coefficients_ptr, grad_picked_ptr = grads
    highest, total, mass, inverse, ignored = found
    scale, softcap, width, targets, grad_stride, logits_stride = sizes
    grad_ptr += row * grad_stride
    logits_ptr += row * logits_stride
    target_ptr += row * targets
    grad_picked_ptr += row * targets
    highest = tl.where(highest == -float("inf"), 0, highest)
    log_sum = tl.where(total == 0, 0, tl.log(tl.where(total == 0, 1, total)))
    on_p = tl.load(coefficients_ptr + row * 5)
    on_lse = tl.load(coefficients_ptr + row * 5 + 1)
    on_entropy = tl.load(coefficients_ptr + row * 5 + 2)
    on_smooth = tl.load(coefficients_ptr + row * 5 + 3)
    on_dot = tl.load(coefficients_ptr + row * 5 + 4)
    on_p += tl.where(on_lse == 0, 0, on_lse * (highest + log_sum))
    if q_ptr is not None:
        on_p -= on_dot * mass
        q_ptr += row * width
    for k in range(0, targets):
        on_p = tl.where(tl.load(target_ptr + k) >= width, float("nan"), on_p)
    tensors, numbers = (weight_ptr, q_ptr), (inverse, scale, softcap, width)
    of_row = (highest, log_sum, on_p, on_entropy, on_smooth, on_dot)
    of_targets = (target_ptr, grad_picked_ptr, targets)
    if SINGLE:
        t = tl.load(target_ptr)
        inside = (t >= 0) & (t < width)
        at_target = tl.load(logits_ptr + t, mask=inside, other=0).to(tl.float32)
    # Each thread reads the targets' logits, here and above, before any thread overwrites them.
    tl.debug_barrier()
    places = tl.arange(0, TILE)
    seen = tl.where(ignored, 0, width)
    whole = seen // TILE * TILE
    # Most losses have no entropy and no smoothing. A branch within the loop takes more registers.
    if (on_entropy != 0) | (on_smooth != 0):
        for start in tl.range(0, whole, TILE, num_stages=STAGES):
            at = (grad_ptr, logits_ptr, start + places, tensors, numbers, of_row, of_targets)
            _differentiate_tile(*at, CAPPED, SINGLE, True, False)
    else:
        for start in tl.range(0, whole, TILE, num_stages=STAGES):
            at = (grad_ptr, logits_ptr, start + places, tensors, numbers, of_row, of_targets)
            _differentiate_tile(*at, CAPPED, SINGLE, False, False)
    if whole < seen:
        at = (grad_ptr, logits_ptr, whole + places, tensors, numbers, of_row, of_targets)
        _differentiate_tile(*at, CAPPED, SINGLE, True, True)
    if SINGLE:
        # Once for the row, in place of a comparison with each column.
        t = tl.where(inside, t, 0)
        du, slope = _derive(at_target, t, tensors, numbers, of_row, CAPPED, True, True)
        du = (du + tl.load(grad_picked_ptr)) * slope
        tl.debug_barrier()
        tl.store(grad_ptr + t, du.to(grad_ptr.dtype.element_ty), mask=inside)
    for start in range(seen, width, TILE):  # of an ignored row
        column = start + places
        nothing = tl.zeros([TILE], grad_ptr.dtype.element_ty)
        tl.store(grad_ptr + column, nothing, mask=column < width)


@triton.jit
def _forward(
    picked_ptr,
    statistics_ptr,
    argmax_ptr,
    logits_ptr,
    target_ptr,
    coefficients_ptr,
    grad_picked_ptr,
    weight_ptr,
    q_ptr,
    inverse_ptr,
    scale,
    softcap,
    width,
    targets,
    logits_stride,
    CAPPED: tl.constexpr,
    SINGLE: tl.constexpr,
    ENTROPY: tl.constexpr,
    SMOOTH: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """With coefficients the gradient takes the place of the logits, which it reads from L2."""
    row = tl.program_id(0).to(tl.int64)
    inverse = _inverse(inverse_ptr, row)
    ignored = _is_ignored(target_ptr, row, targets)
    results = (statistics_ptr + row * 6, picked_ptr, argmax_ptr)
    inputs = (logits_ptr, target_ptr, weight_ptr, q_ptr, row, inverse, ignored)
    sizes = (scale, softcap, width, targets, logits_stride)
    top, total, mass = _statistics(
        results, inputs, sizes, CAPPED, ENTROPY, SMOOTH, LANES, COLUMNS, STAGES
    )
    if coefficients_ptr is not None:
        grads = (coefficients_ptr, grad_picked_ptr)
        given = (logits_ptr, target_ptr, grads, weight_ptr, q_ptr, row)
        found = (top, total, mass, inverse, ignored)
        with_grad = (scale, softcap, width, targets, logits_stride, logits_stride)
        tile: tl.constexpr = LANES * COLUMNS
        _differentiate(logits_ptr, given, found, with_grad, CAPPED, SINGLE, tile, STAGES)


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
    grad_stride,
    logits_stride,
    CAPPED: tl.constexpr,
    SINGLE: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    inverse = _inverse(inverse_ptr, row)
    ignored = _is_ignored(target_ptr, row, targets)
    at = statistics_ptr + row * 6
    found = (tl.load(at), tl.load(at + 1), tl.load(at + 5), inverse, ignored)
    grads = (coefficients_ptr, grad_picked_ptr)
    inputs = (logits_ptr, target_ptr, grads, weight_ptr, q_ptr, row)
    sizes = (scale, softcap, width, targets, grad_stride, logits_stride)
    tile: tl.constexpr = LANES * COLUMNS
    _differentiate(grad_ptr, inputs, found, sizes, CAPPED, SINGLE, tile, STAGES)


# --- Launches ---------------------------------------------------------------------------------


def _tile(logits: torch.Tensor, warps: int, accesses: int, stages: int = 1) -> dict[str, Any]:
    """Options of a launch of at most so many warps.

    In each iteration a thread loads 16 bytes so many times, `stages` - 1 iterations ahead.
    """
    columns = 16 // logits.element_size()
    lanes = max(32, triton.next_power_of_2(triton.cdiv(logits.shape[1], columns)))
    lanes = min(32 * warps * accesses, lanes)
    warps = max(1, lanes // (32 * accesses))
    return {"LANES": lanes, "COLUMNS": columns, "STAGES": stages, "num_warps": warps}


def _check(logits: torch.Tensor, target: torch.Tensor, how: tuple[Any, ...]) -> None:
    """Refuse tensors that do not fit: a kernel would read past the end of a smaller one."""
    weight, q, inverse = how[:3]
    rows, width = logits.shape
    fits = target.dtype == torch.int64 and target.ndim == 2 and target.shape[0] == rows
    fits = fits and (weight is None or weight.shape == (width,))
    fits = fits and (q is None or q.shape == logits.shape)
    if not fits or (inverse is not None and inverse.shape != (rows,)):
        raise ValueError("tensors do not fit the logits")


def _is_in_rows(logits: torch.Tensor) -> bool:
    return logits.shape[1] < 2 or logits.stride(1) == 1


def _in_rows(logits: torch.Tensor) -> torch.Tensor:
    """The logits with adjacent columns; rows may have any distance, as padded ones have."""
    return logits if _is_in_rows(logits) else logits.contiguous()


def _check_in_place(logits: torch.Tensor) -> None:
    rows, width = logits.shape
    if not _is_in_rows(logits) or (rows > 1 and logits.stride(0) < width):
        accepted = "adjacent columns, and rows that do not overlap"
        raise ValueError(f"logits that are overwritten need {accepted}")


def _forward_launch(
    logits: torch.Tensor,
    target: torch.Tensor,
    grads: tuple[torch.Tensor | None, torch.Tensor | None],
    how: tuple[Any, ...],
    sums: tuple[bool, bool],
    results: tuple[Any, ...],
) -> Launch:
    """`grads`: coefficients and the gradients of what is picked, if the gradient is wanted too."""
    weight, q, inverse, scale, softcap = how
    tensors = (*results, logits, target, *grads, weight, q, inverse)
    sizes = (logits.shape[1], target.shape[1], logits.stride(0))
    flags = {"CAPPED": softcap != 0, "SINGLE": target.shape[1] == 1}
    flags |= {"ENTROPY": sums[0], "SMOOTH": sums[1]}
    needs_registers, aligned = any(sums) or q is not None or softcap != 0, False
    if grads[0] is not None:
        # With so many threads a multiprocessor has one program, and the rows of all programs stay
        # in L2. An H200 takes 0.74 ms for 4096 x 131072 in bfloat16, as long as copies of as many
        # bytes; with loads ahead in their place 0.82.
        aligned = not needs_registers and not (logits.stride(0) % 16 or logits.data_ptr() % 16)
        flags |= _tile(logits, 32, 2) if aligned else _tile(logits, 32, 1, stages=4)
    else:
        flags |= _tile(logits, 8, 2 if needs_registers else 4)
        if any(sums):
            flags["maxnreg"] = 96  # without a limit ptxas spills although registers are free
    arguments = (*tensors, scale, softcap, *sizes)
    made = launch(_forward, logits.shape[0], *arguments, **flags)
    return made._replace(spreads=not aligned, aligned=aligned)


def _gradient_launch(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    of_rows: tuple[torch.Tensor, ...],
    how: tuple[Any, ...],
) -> Launch:
    weight, q, inverse, scale, softcap = how
    tensors = (grad, logits, target, *of_rows, weight, q, inverse)
    sizes = (logits.shape[1], target.shape[1], grad.stride(0), logits.stride(0))
    flags = {"CAPPED": softcap != 0, "SINGLE": target.shape[1] == 1, **_tile(logits, 8, 2)}
    arguments = (*tensors, scale, softcap, *sizes)
    return launch(_gradient, logits.shape[0], *arguments, **flags)._replace(spreads=True)


def _laid_out(how: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*(contiguous(t) for t in how[:3]), *how[3:])


def _run_forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    grads: tuple[torch.Tensor | None, torch.Tensor | None],
    how: tuple[Any, ...],
    entropy: bool,
    smooth: bool,
    argmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Check the tensors, and return picked, statistics and argmax."""
    how, target = _laid_out(how), target.contiguous()
    _check(logits, target, how)
    rows = logits.shape[0]
    picked = logits.new_empty(target.shape, dtype=torch.float32)
    statistics = logits.new_empty((rows, STATISTICS), dtype=torch.float32)
    best = target.new_empty((rows if argmax else 0,))
    results = (picked, statistics, best if argmax else None)
    run(logits, _forward_launch(logits, target, grads, how, (entropy, smooth), results))
    return picked, statistics, best


def _run_gradient(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistics: torch.Tensor,
    coefficients: torch.Tensor,
    grad_picked: torch.Tensor,
    *others: Any,
) -> None:
    how, target = _laid_out(others), target.contiguous()
    _check(logits, target, how)
    of_rows = tuple(t.contiguous() for t in (statistics, coefficients, grad_picked))
    run(logits, _gradient_launch(grad, logits, target, of_rows, how))


# --- Called by dispatch, with the signatures of the ops' schemas ---


@replayed
def loss_rows(
    logits: torch.Tensor, target: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _run_forward(_in_rows(logits), target, (None, None), others[:5], *others[5:])


@replayed
def loss_rows_backward_(logits: torch.Tensor, *others: Any) -> None:
    _check_in_place(logits)
    _run_gradient(logits, logits, *others)


@replayed
def loss_rows_backward(logits: torch.Tensor, *others: Any) -> torch.Tensor:
    logits = _in_rows(logits)
    grad = empty_like(logits)
    _run_gradient(grad, logits, *others)
    return grad


@replayed
def loss_rows_both_(
    logits: torch.Tensor,
    target: torch.Tensor,
    coefficients: torch.Tensor,
    grad_picked: torch.Tensor,
    *others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_in_place(logits)
    grads = (coefficients.contiguous(), grad_picked.contiguous())
    return _run_forward(logits, target, grads, others[:5], False, *others[5:])


def aot_cases() -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""
    for dtype, width, stride, softcap in (
        (torch.bfloat16, 128256, 128256, 0.0),
        (torch.bfloat16, 256000, 256000, 30.0),
        (torch.bfloat16, 50257, 50304, 0.0),  # as linear losses pad them
        (torch.float32, 32001, 32001, 0.0),
    ):
        logits = torch.empty(4, stride, dtype=dtype, device="meta")[:, :width]
        rows = logits.new_empty(4, dtype=torch.float32)
        target = logits.new_empty((4, 1), dtype=torch.int64)
        statistics = logits.new_empty((4, STATISTICS), dtype=torch.float32)
        coefficients = logits.new_empty((4, COEFFICIENTS), dtype=torch.float32)
        picked = logits.new_empty((4, 1), dtype=torch.float32)
        weight = logits.new_empty(width, dtype=torch.float32)
        how = (weight, None, rows, 1.0, softcap)
        name = f"loss {dtype} {width} {softcap}".replace("torch.", "")
        none = (None, None)
        best = (picked, statistics, target)
        yield name, _forward_launch(logits, target, none, how, (True, True), best)
        of_rows = (statistics, coefficients, picked)
        yield name, _gradient_launch(logits, logits, target, of_rows, how)
        plain, results = (None, None, None, 1.0, softcap), (picked, statistics, None)
        for case, grads in (("plain", none), ("both", (coefficients, picked))):
            launched = _forward_launch(logits, target, grads, plain, (False, False), results)
            yield f"{name} {case}", launched
