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

from ..launch import Launch, launch, replayed, run
from ..tensors import contiguous, empty_like
from .parts import differentiate, find_statistics, is_ignored, load_coefficients, load_inverse

STATISTICS, COEFFICIENTS = 6, 5


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
    inverse = load_inverse(inverse_ptr, row)
    ignored = is_ignored(target_ptr, row, targets)
    results = (statistics_ptr + row * 6, picked_ptr, argmax_ptr)
    inputs = (logits_ptr, target_ptr, weight_ptr, q_ptr, row, inverse, ignored)
    sizes = (scale, softcap, width, targets, logits_stride)
    top, total, _, mass = find_statistics(
        results, inputs, sizes, CAPPED, ENTROPY, SMOOTH, LANES, COLUMNS, STAGES
    )
    if coefficients_ptr is not None:
        given = (logits_ptr, target_ptr, grad_picked_ptr, weight_ptr, q_ptr, row)
        of_row = (target_ptr, coefficients_ptr, grad_picked_ptr, row)
        single, coefficients = load_coefficients(of_row, width, targets, SINGLE)
        found = (top, total, mass, inverse, ignored)
        with_grad = (scale, softcap, width, targets, logits_stride, logits_stride)
        tile: tl.constexpr = LANES * COLUMNS
        rest = (single, coefficients, found, with_grad)
        differentiate(logits_ptr, given, *rest, CAPPED, SINGLE, tile, STAGES)


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
    inverse = load_inverse(inverse_ptr, row)
    ignored = is_ignored(target_ptr, row, targets)
    at = statistics_ptr + row * 6
    found = (tl.load(at), tl.load(at + 1), tl.load(at + 5), inverse, ignored)
    given = (logits_ptr, target_ptr, grad_picked_ptr, weight_ptr, q_ptr, row)
    of_row = (target_ptr, coefficients_ptr, grad_picked_ptr, row)
    single, coefficients = load_coefficients(of_row, width, targets, SINGLE)
    sizes = (scale, softcap, width, targets, grad_stride, logits_stride)
    tile: tl.constexpr = LANES * COLUMNS
    rest = (single, coefficients, found, sizes)
    differentiate(grad_ptr, given, *rest, CAPPED, SINGLE, tile, STAGES)


# --- Launches ---------------------------------------------------------------------------------


def tile(logits: torch.Tensor, warps: int, accesses: int, stages: int = 1) -> dict[str, Any]:
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


def in_rows(logits: torch.Tensor) -> torch.Tensor:
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
        flags |= tile(logits, 32, 2) if aligned else tile(logits, 32, 1, stages=4)
    else:
        flags |= tile(logits, 8, 2 if needs_registers else 4)
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
    flags = {"CAPPED": softcap != 0, "SINGLE": target.shape[1] == 1, **tile(logits, 8, 2)}
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
    return _run_forward(in_rows(logits), target, (None, None), others[:5], *others[5:])


@replayed
def loss_rows_backward_(logits: torch.Tensor, *others: Any) -> None:
    _check_in_place(logits)
    _run_gradient(logits, logits, *others)


@replayed
def loss_rows_backward(logits: torch.Tensor, *others: Any) -> torch.Tensor:
    logits = in_rows(logits)
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
