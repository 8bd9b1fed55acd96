"""The whole loss of logits in Triton, for rows with one class: two launches, and one for gradients.

A small loss is as long as its launches take the host. The floor is one pass over the rows, the sum
over them, which needs all of them, and one pass for the gradient. So the kernels of the rows read
targets, weights and temperatures as the caller gave them; torch's ops for the same take some 20
launches before the rows and 12 after them. rows.py says what is read and
written.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from ..launch import Launch, launch, replayed, run
from ..tensors import contiguous, empty_like
from .parts import differentiate, find_statistics, transform
from .rows import STATISTICS, in_rows, tile

# Rows that the sum takes at a time.
_BLOCK = 4096
# A gradient is padded as logits are whose rows have fewer elements of padding.
_PADDED = 128
# Rows of a linear layer's input are copied so many elements at a time.
_FEATURES = 1024


@triton.jit
def _read(inputs, width, ignored):
    """A row's class (-1 if it is ignored), whether it is one, and the weights of its terms."""
    target_ptr, weight_ptr, temperature_ptr, tokens_ptr, row = inputs
    t = tl.load(target_ptr + row).to(tl.int64)
    counts = t != ignored
    inside = counts & (t >= 0) & (t < width)
    weight = tl.where(counts, 1.0, 0.0)
    inverse = 1.0
    if tokens_ptr is not None:
        weight *= tl.load(tokens_ptr + row).to(tl.float32)
    of_target = weight
    if weight_ptr is not None:
        known = tl.where(inside, t, width - 1)  # the loss is NaN, if not 0
        of_target *= tl.load(weight_ptr + known).to(tl.float32)
    if temperature_ptr is not None:
        inverse = 1.0 / tl.load(temperature_ptr + row).to(tl.float32)
    return t, counts, inside, weight, of_target, inverse


@triton.jit
def _sum_weights(whole_ptr, width):
    if whole_ptr is None:
        return width.to(tl.float32)
    else:
        return tl.load(whole_ptr).to(tl.float32)


@triton.jit(do_not_specialize=["ignored"])
def _losses(
    losses_ptr,
    weights_ptr,
    statistics_ptr,
    logits_ptr,
    target_ptr,
    weight_ptr,
    whole_ptr,
    temperature_ptr,
    tokens_ptr,
    scale,
    softcap,
    smoothing,
    z_loss,
    ignored,
    width,
    logits_stride,
    CAPPED: tl.constexpr,
    SMOOTH: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    given = (target_ptr, weight_ptr, temperature_ptr, tokens_ptr, row)
    t, counts, inside, weight, of_target, inverse = _read(given, width, ignored)
    sizes = (scale, softcap, width, 0, logits_stride)
    results = (statistics_ptr + row * 6, None, None)
    inputs = (logits_ptr, target_ptr, weight_ptr, None, row, inverse, counts == 0)
    top, total, smooth, _ = find_statistics(
        results, inputs, sizes, CAPPED, False, SMOOTH, LANES, COLUMNS, STAGES
    )
    z = tl.load(logits_ptr + row * logits_stride + t, mask=inside, other=0).to(tl.float32)
    u, _ = transform(z, scale, softcap, inverse, CAPPED)
    log_sum = tl.log(total)
    log_p = tl.where(inside, (u - top) - log_sum, tl.where(counts, float("nan"), 0))
    loss = -log_p * ((1 - smoothing) * of_target)
    lse = top + log_sum
    if SMOOTH:
        every = lse * _sum_weights(whole_ptr, width) - smooth
        loss += every * (weight * (smoothing / width))
    loss += tl.where(z_loss == 0, 0, lse * lse * (weight * z_loss))
    tl.store(losses_ptr + row, loss.to(losses_ptr.dtype.element_ty))
    if weights_ptr is not None:
        tl.store(weights_ptr + row, of_target)


@triton.jit(do_not_specialize=["rows"])
def _add_up(
    loss_ptr, count_ptr, losses_ptr, weights_ptr, rows, MEAN: tl.constexpr, BLOCK: tl.constexpr
):
    loss, count = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        loss += tl.load(losses_ptr + row, mask=row < rows, other=0)
        if MEAN:
            count += tl.load(weights_ptr + row, mask=row < rows, other=0)
    total = tl.sum(loss, 0)
    if MEAN:
        whole = tl.sum(count, 0)
        tl.store(count_ptr, whole)
        total = total / whole
    tl.store(loss_ptr, total.to(loss_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["ignored", "grad_step"])
def _gradients(
    grad_ptr,
    kept_ptr,
    x_ptr,
    grad_loss_ptr,
    logits_ptr,
    target_ptr,
    statistics_ptr,
    count_ptr,
    weight_ptr,
    whole_ptr,
    temperature_ptr,
    tokens_ptr,
    scale,
    softcap,
    smoothing,
    z_loss,
    ignored,
    width,
    features,
    grad_step,
    grad_stride,
    logits_stride,
    CAPPED: tl.constexpr,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """The gradient of the logits. `kept` is x without ignored rows, for a linear layer's weight.

    Their gradient is 0, which does not help if they hold infinity.
    """
    row = tl.program_id(0).to(tl.int64)
    given = (target_ptr, weight_ptr, temperature_ptr, tokens_ptr, row)
    t, counts, inside, weight, of_target, inverse = _read(given, width, ignored)
    if x_ptr is not None:
        for start in range(0, features, FEATURES):
            column = start + tl.arange(0, FEATURES)
            known = column < features
            x = tl.load(x_ptr + row * features + column, mask=known & counts, other=0)
            tl.store(kept_ptr + row * features + column, x, mask=known)
    grad = tl.load(grad_loss_ptr + row * grad_step).to(tl.float32)
    if count_ptr is not None:
        grad = grad / tl.load(count_ptr)
    of_picked = -grad * ((1 - smoothing) * of_target)
    of_smooth = grad * (weight * (smoothing / width))
    on_p = -of_picked + of_smooth * _sum_weights(whole_ptr, width)
    on_p = tl.where(inside | (counts == 0), on_p, float("nan"))
    coefficients = (on_p, grad * (2 * weight * z_loss), 0.0, -of_smooth, 0.0)
    at = statistics_ptr + row * 6
    found = (tl.load(at), tl.load(at + 1), 0.0, inverse, counts == 0)
    sizes = (scale, softcap, width, 1, grad_stride, logits_stride)
    inputs = (logits_ptr, target_ptr, None, weight_ptr, None, row)
    single = (tl.where(inside, t, -1), of_picked)
    of_tile: tl.constexpr = LANES * COLUMNS
    rest = (single, coefficients, found, sizes)
    differentiate(grad_ptr, inputs, *rest, CAPPED, True, of_tile, STAGES)


# --- Launches ---------------------------------------------------------------------------------


def _check(logits: torch.Tensor, target: torch.Tensor, given: tuple[Any, ...]) -> None:
    """Refuse tensors that do not fit: a kernel would read past the end of a smaller one."""
    weight, whole, temperature, tokens = given
    rows, width = logits.shape
    fits = target.shape == (rows,) and (weight is None or weight.shape == (width,))
    fits = fits and all(t is None or t.shape == (rows,) for t in (temperature, tokens))
    if not fits or (whole is not None and whole.numel() != 1):
        raise ValueError("tensors do not fit the logits")


def _losses_launch(
    logits: torch.Tensor, results: tuple[Any, ...], given: tuple[Any, ...], numbers: tuple[Any, ...]
) -> Launch:
    flags = {"CAPPED": numbers[1] != 0, "SMOOTH": numbers[2] != 0}
    flags |= tile(logits, 8, 2 if any(flags.values()) else 4)
    if flags["SMOOTH"]:
        flags["maxnreg"] = 96  # without a limit ptxas spills although registers are free
    sizes = (logits.shape[1], logits.stride(0))
    made = launch(_losses, logits.shape[0], *results, logits, *given, *numbers, *sizes, **flags)
    return made._replace(spreads=True)


def _sum_launch(results: tuple[Any, ...], rows: int, mean: bool) -> Launch:
    return launch(_add_up, 1, *results, rows, MEAN=mean, BLOCK=_BLOCK, num_warps=16)


def _gradients_launch(
    grad: torch.Tensor,
    kept: tuple[torch.Tensor | None, torch.Tensor | None],
    of_loss: torch.Tensor,
    logits: torch.Tensor,
    given: tuple[Any, ...],
    numbers: tuple[Any, ...],
) -> Launch:
    features = 0 if kept[0] is None else kept[0].shape[1]
    step = of_loss.stride(0) if of_loss.ndim else 0
    sizes = (logits.shape[1], features, step, grad.stride(0), logits.stride(0))
    flags = {"CAPPED": numbers[1] != 0, **tile(logits, 8, 2), "FEATURES": _FEATURES}
    arguments = (grad, *kept, of_loss, logits, *given, *numbers, *sizes)
    return launch(_gradients, logits.shape[0], *arguments, **flags)._replace(spreads=True)


# --- Called by dispatch, with the signatures of the ops' schemas ---


@replayed
def loss_of_logits(
    logits: torch.Tensor, target: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *tensors, scale, softcap, smoothing, z_loss, ignored, reduction, dtype = rest
    logits, given = in_rows(logits), tuple(map(contiguous, (target, *tensors)))
    _check(logits, target, given[1:])
    rows, adds, mean = logits.shape[0], reduction != "none", reduction == "mean"
    numbers = (scale, softcap, smoothing, z_loss, ignored)
    statistics = logits.new_empty((rows, STATISTICS), dtype=torch.float32)
    losses = logits.new_empty(rows, dtype=torch.float32 if adds else dtype)
    weights = logits.new_empty(rows, dtype=torch.float32) if mean else None
    count = logits.new_empty(1 if mean else 0, dtype=torch.float32)
    run(logits, _losses_launch(logits, (losses, weights, statistics), given, numbers))
    if not adds:
        return losses, count, statistics
    loss = logits.new_empty((), dtype=dtype)
    of_sum = (loss, count if mean else None, losses, weights)
    run(logits, _sum_launch(of_sum, rows, mean))
    return loss, count, statistics


@replayed
def loss_of_logits_backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    statistics: torch.Tensor,
    count: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    *tensors, scale, softcap, smoothing, z_loss, ignored, x = rest
    logits, given = in_rows(logits), tuple(map(contiguous, (target, *tensors)))
    _check(logits, target, given[1:])
    numbers = (scale, softcap, smoothing, z_loss, ignored)
    if 0 < logits.stride(0) - logits.shape[1] < _PADDED:  # for GEMMs
        made = logits.new_empty_strided(logits.shape, logits.stride())
    else:
        made = empty_like(logits)
    x = contiguous(x)
    kept = logits.new_empty(0) if x is None else torch.empty_like(x)
    saved = (given[0], statistics, count if count.numel() else None, *given[1:])
    pair = (None, None) if x is None else (kept, x)
    run(logits, _gradients_launch(made, pair, grad, logits, saved, numbers))
    return made, kept


def aot_cases() -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""
    for dtype, width, stride, softcap, is_full in (
        (torch.bfloat16, 128256, 128256, 0.0, False),
        (torch.bfloat16, 256000, 256000, 30.0, True),
        (torch.bfloat16, 50257, 50304, 0.0, True),  # as linear losses pad them
        (torch.float32, 1000, 1000, 0.0, False),
    ):
        logits = torch.empty(4, stride, dtype=dtype, device="meta")[:, :width]
        rows, number = (logits.new_empty(n, dtype=torch.float32) for n in (4, 1))
        target = logits.new_empty(4, dtype=torch.int64)
        statistics = logits.new_empty((4, STATISTICS), dtype=torch.float32)
        weight, x = logits.new_empty(width), logits.new_empty(4, 1024)
        terms = (weight, number, rows, rows) if is_full else (None,) * 4
        numbers = (1.0, softcap, 0.1 if is_full else 0.0, 0.0, -100)
        name = f"loss {dtype} {width}".replace("torch.", "")
        results = (rows, rows, statistics)
        yield name, _losses_launch(logits, results, (target, *terms), numbers)
        saved = (target, statistics, number, *terms)
        kept = (x, x) if is_full else (None, None)
        yield name, _gradients_launch(logits, kept, number, logits, saved, numbers)
    yield "sum", _sum_launch((number, number, rows, rows), 4, True)
