"""What the kernels of losses share: a row's statistics, and the gradient of its logits.

csrc/core/loss_rows.h has the formulas.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import triton
import triton.language as tl

from ..approximate import exp


@triton.jit
def _tanh(x):
    e = exp(-2 * tl.abs(x))
    t = (1 - e) / (1 + e)
    small = x - x * x * x * (1.0 / 3 - x * x * (2.0 / 15))
    return tl.where(tl.abs(x) < 0.05, small, tl.where(x < 0, -t, t))


@triton.jit
def transform(z, scale, softcap, inverse, CAPPED: tl.constexpr):
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
def load_inverse(inverse_ptr, row):
    if inverse_ptr is None:
        return 1.0
    else:
        return tl.load(inverse_ptr + row)


@triton.jit
def is_ignored(target_ptr, row, targets):
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
    u, _ = transform(z, scale, softcap, inverse, CAPPED)
    if MASKED:
        u = tl.where(column < width, u, -float("inf"))
    most = tl.max(u, 1)
    if argmax_ptr is not None:
        first = tl.min(tl.where(u == most[:, None], column, 2147483647), 1)
        best = tl.where(most > highest, first, best)
    raised = tl.maximum(highest, most)
    base = tl.where(raised == -float("inf"), 0, raised)
    step = tl.where(highest == -float("inf"), 0, highest - base)
    factor = exp(step)
    x = u - base[:, None]
    e = exp(x)
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
def find_statistics(
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
    """Reads a row and stores its statistics; returns the highest u, the sum, SMOOTH's and MASS."""
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
    factor = exp(step)
    if ENTROPY:
        entropy = factor * (entropy + step * total)
    if argmax_ptr is not None:
        first = tl.min(tl.where(highest == top, best, 2147483647), 0)
        tl.store(argmax_ptr + row, tl.where(ignored, -1, first).to(tl.int64))
    top, total = tl.where(ignored, 0, top), tl.where(ignored, 1, tl.sum(total * factor, 0))
    tl.store(at, top)
    tl.store(at + 1, total)
    tl.store(at + 2, tl.sum(entropy, 0))
    smooth = tl.sum(smooth, 0)
    tl.store(at + 3, smooth)
    tl.store(at + 4, tl.sum(dot, 0))
    mass = tl.sum(mass, 0)
    tl.store(at + 5, mass)
    if picked_ptr is not None:
        for k in range(0, targets):
            t = tl.load(target_ptr + row * targets + k)
            inside = (t >= 0) & (t < width)
            z = tl.load(logits_ptr + t, mask=inside, other=0).to(tl.float32)
            u, _ = transform(z, scale, softcap, inverse, CAPPED)
            absent = tl.where(t < 0, 0, float("nan"))
            tl.store(picked_ptr + row * targets + k, tl.where(inside, u, absent))
    return top, total, smooth, mass


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
    u, slope = transform(z, scale, softcap, inverse, CAPPED)
    log_p = (u - highest) - log_sum
    p = exp(log_p)
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
def load_coefficients(inputs, width, targets, SINGLE: tl.constexpr):
    """A row's coefficients, and its class and the gradient of that u if it has one target."""
    target_ptr, coefficients_ptr, grad_picked_ptr, row = inputs
    at = coefficients_ptr + row * 5
    target_ptr += row * targets
    on_p = tl.load(at)
    for k in range(0, targets):
        on_p = tl.where(tl.load(target_ptr + k) >= width, float("nan"), on_p)
    coefficients = on_p, tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    t, grad_picked = -1, 0.0
    if SINGLE:
        t, grad_picked = tl.load(target_ptr), tl.load(grad_picked_ptr + row)
    return (t, grad_picked), coefficients


@triton.jit
def differentiate(
    grad_ptr,
    inputs,
    single,
    coefficients,
    found,
    sizes,
    CAPPED: tl.constexpr,
    SINGLE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Reads a row again, or for the first time, and stores the gradient of its logits.

    `single`: the class of a row with one target, and the gradient of its u.
    """
    logits_ptr, target_ptr, grad_picked_ptr, weight_ptr, q_ptr, row = inputs
    t, grad_picked = single
    highest, total, mass, inverse, ignored = found
    scale, softcap, width, targets, grad_stride, logits_stride = sizes
    grad_ptr += row * grad_stride
    logits_ptr += row * logits_stride
    if not SINGLE:
        target_ptr += row * targets
        grad_picked_ptr += row * targets
    highest = tl.where(highest == -float("inf"), 0, highest)
    log_sum = tl.where(total == 0, 0, tl.log(tl.where(total == 0, 1, total)))
    on_p, on_lse, on_entropy, on_smooth, on_dot = coefficients
    on_p += tl.where(on_lse == 0, 0, on_lse * (highest + log_sum))
    if q_ptr is not None:
        on_p -= on_dot * mass
        q_ptr += row * width
    tensors, numbers = (weight_ptr, q_ptr), (inverse, scale, softcap, width)
    of_row = (highest, log_sum, on_p, on_entropy, on_smooth, on_dot)
    of_targets = (target_ptr, grad_picked_ptr, targets)
    if SINGLE:
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
        du = (du + grad_picked) * slope
        tl.debug_barrier()
        tl.store(grad_ptr + t, du.to(grad_ptr.dtype.element_ty), mask=inside)
    for start in range(seen, width, TILE):  # of an ignored row
        column = start + places
        nothing = tl.zeros([TILE], grad_ptr.dtype.element_ty)
        tl.store(grad_ptr + column, nothing, mask=column < width)
