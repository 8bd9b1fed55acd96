"""Adaptive norms and gated residuals in Triton; csrc/core/modulation.h has the formulas.

modulation_rows.py has the kernels, norm_rows.py the statistics, norm.py the argument for the
shapes. A unit below is rows x width elements, once over DRAM. A modulation has one row for `period`
rows of x; it comes from L1 and L2 unless there is one for each token, which adds a unit for each
modulation.

Forward: an adaptive norm moves 2 units, x and y; a gated residual 3, x, branch and z; both in one
pass 4. Eager moves 8 for the adaptive norm (the norm 2, the product and the sum 3 each with its
modulation in cache, so 6 without counting 1 + scale), and 5 and 11 for the others.
    _forward holds whole rows in registers (width <= 16384, or 8192 with a branch). Modulations are
    loaded after the statistics. Wider rows are read three times, from L1 or L2 after the first.

Backward, and the partial sums: an adaptive norm moves 3 units, grad_y, x and grad_x; a gated
residual 3, grad_y, branch and grad_branch; both 6, grad_z, grad_y, z, branch, grad_x and
grad_branch.
    A program walks a chunk of the rows of one modulation, which stays in registers with the sums
    for its gradients, as in norm.py. Each chunk writes its sums once. They are added in a fixed
    order: no atomics, the same bits every run. One chunk for a modulation writes the gradient
    itself. Rows wider than registers hold take two launches: sums of whole rows, and then tiles of
    columns, which read grad_y and z again.

The floors at bf16 32768 x 3072 and the 4.3 TB/s of a copy on an H200: 0.094 ms forward and 0.14 ms
backward for the adaptive norm, 0.19 and 0.28 ms with a gated residual. The aims are 90% of a copy
forward, 80% backward.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton

from .chunks import partials_of
from .launch import Launch, launch, processors, replayed, run
from .modulation_rows import _add, _add_chunks, _backward, _forward, _forward_wide, _sum_rows
from .norm_rows import _backward_tile, epsilon_of, forward_tile, statistics
from .tensors import (
    are_aligned,
    as_rows,
    check_beside,
    check_like,
    empty_like,
    gradient_of,
    or_empty,
    rows_of,
)

# The widest rows that fit the registers without a spill.
_WIDEST_ROW, _WIDEST_GATED_ROW = 16384, 8192
# Columns per iteration for wider rows.
_WIDE_BLOCK = 2048


def _stride(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.shape[0] == 1 else tensor.stride(0)


class Modulations(NamedTuple):
    """Matrices [rows of x / period, width] as kernels read them."""

    gate: torch.Tensor | None
    scale: torch.Tensor | None
    shift: torch.Tensor | None
    period: int

    @property
    def rows(self) -> int:
        given = self.scale if self.gate is None else self.gate
        assert given is not None
        return given.shape[0]


def _forward_launch(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    its: Modulations,
    z: torch.Tensor | None,
    y: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
    eps: float,
) -> Launch:
    rows, width = x.shape
    strides = (x.stride(0), _stride(branch), _stride(its.gate))
    if y is None:
        tile = _gated_tile(width)
        return launch(
            _add,
            triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(width, tile["BLOCK"]),
            *(x, branch, its.gate, z, rows, its.period, width, *strides),
            **tile,
        )._replace(spreads=True)
    tensors = (x, branch, its.gate, its.scale, its.shift, z, y, mean, rstd)
    sizes = (its.period, width, *strides, _stride(its.scale), _stride(its.shift), eps)
    centered = mean is not None
    aligned = width % 16 == 0 and are_aligned(*tensors)
    widest = _WIDEST_ROW if branch is None else _WIDEST_GATED_ROW
    if width > (widest if aligned else widest // 2):
        return launch(
            _forward_wide,
            rows,
            *(*tensors, *sizes),
            CENTERED=centered,
            BLOCK=_WIDE_BLOCK,
            num_warps=16,
        )._replace(spreads=True)
    tile = forward_tile(width, 32 // x.element_size())
    return launch(
        _forward,
        triton.cdiv(rows, tile["ROWS"]),
        *(*tensors, rows, *sizes),
        CENTERED=centered,
        # Without a limit ptxas spills a few bytes although registers are free.
        maxnreg=64 if width <= 8192 and branch is None else 128,
        **tile,
    )._replace(spreads=width <= widest // 2, aligned=width > widest // 2)


@functools.cache
def _gated_tile(width: int) -> dict[str, int]:
    """A tile of 2048 elements: enough columns for wide accesses, and rows if columns are few."""
    block = max(8, min(512, triton.next_power_of_2(max(width, 1))))
    return {"ROWS": 2048 // block, "BLOCK": block, "num_warps": 4, "maxnreg": 128}


def _backward_launches(
    grad_z: torch.Tensor | None,
    grad_y: torch.Tensor | None,
    z: torch.Tensor | None,
    branch: torch.Tensor | None,
    its: Modulations,
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
    grad_x: torch.Tensor | None,
    grad_branch: torch.Tensor | None,
    gradients: Sequence[torch.Tensor | None],
) -> Iterator[Launch]:
    """`gradients` are those of gate, scale and shift."""
    like = z if grad_z is None else grad_z
    assert like is not None
    width, sums, period = like.shape[1], None, its.period
    if not width or not its.rows:
        return
    centered, normed = mean is not None, grad_y is not None
    tensors = (grad_z, grad_y, z, branch, its.gate, its.scale, mean, rstd)
    if normed:
        aligned = are_aligned(*tensors, grad_x, grad_branch)
        columns = 16 if branch is None else 8
        read = sum(t is not None for t in tensors[:4])
        tile = dict(_backward_tile(width, like.element_size(), columns, aligned, read))
    else:
        tile = _gated_tile(width) | {"STAGES": 3}
    if width % 16 and width > tile["BLOCK"]:  # addresses of single elements take registers
        tile["num_warps"] *= 2
    while tile["ROWS"] > max(1, period) and tile["num_warps"] > 1:  # a modulation for few rows
        tile |= {"ROWS": tile["ROWS"] // 2, "num_warps": tile["num_warps"] // 2}
    column_tiles = triton.cdiv(width, tile["BLOCK"])
    if normed and column_tiles > 1:
        sums = like.new_empty((its.rows * period, 2), dtype=torch.float32)
        sizes = (period, width, _stride(grad_y), _stride(z), _stride(its.scale))
        yield launch(
            _sum_rows,
            its.rows * period,
            *(grad_y, z, its.scale, mean, rstd, sums, *sizes),
            CENTERED=centered,
            BLOCK=_WIDE_BLOCK,
            num_warps=16,
        )
    # Programs that are resident at once; several waves of tiles of columns.
    resident = processors(like.device) * (16 // tile["num_warps"])
    if column_tiles > 1:
        resident = max(1, 4 * resident // column_tiles)
    chunks = max(1, min(resident // its.rows, triton.cdiv(period, tile["ROWS"])))
    partials = list(gradients) if chunks == 1 else partials_of(gradients, its.rows * chunks, width)
    strides = [_stride(t) for t in (grad_z, grad_y, z, branch, its.gate, its.scale)]
    fills = normed and column_tiles == 1 and width % 16 == 0 and tile["num_warps"] == 16
    yield launch(
        _backward,
        its.rows * chunks * column_tiles,
        *(*tensors, sums, grad_x, grad_branch, *partials, period, chunks, width, *strides),
        CENTERED=centered,
        **tile,
    )._replace(spreads=not fills, aligned=fills)
    if chunks > 1 and any(gradient is not None for gradient in gradients):
        yield launch(
            _add_chunks,
            its.rows * triton.cdiv(width, 32),
            *(*gradients, *partials, chunks, width),
            CHUNKS=32,
            BLOCK=32,
            num_warps=4,
            maxnreg=128 if width % 16 else 64,
        )


def _modulations(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    dtype: torch.dtype,
) -> Modulations:
    """The modulations of x; refuse what the native bindings refuse too."""
    first = scale if gate is None else gate
    assert first is not None
    if x.dim() == 0 or first.dim() != x.dim():
        raise ValueError("a modulation's rank is not x's")
    leading, its, at = x.shape[:-1], first.shape[:-1], 0
    while at < len(its) and its[at] == leading[at]:
        at += 1
    if any(size != 1 for size in its[at:]):
        raise ValueError("a modulation does not fit x")
    given = [t for t in (gate, scale, shift) if t is not None]
    check_beside(x, (*its, x.shape[-1]), *given, dtype=dtype, narrow=True)
    if len({t.dtype for t in given}) > 1:
        raise ValueError("modulations differ in dtype")
    matrices = [None if t is None else rows_of(t) for t in (gate, scale, shift)]
    gate_rows, scale_rows, shift_rows = matrices
    return Modulations(gate_rows, scale_rows, shift_rows, leading[at:].numel())


def _check_branch(x: torch.Tensor, branch: torch.Tensor) -> None:
    """x has branch's dtype, or float32 beside 16 bits."""
    check_beside(branch, branch.shape, x)
    check_beside(x, x.shape, branch, narrow=True)


def _modulate_forward(
    x: torch.Tensor,
    gate: torch.Tensor | None,
    branch: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    centered: bool,
) -> tuple[Any, torch.Tensor, Any, torch.Tensor]:
    """z, y, mean and rstd."""
    if branch is not None:
        _check_branch(x, branch)
    if not eps >= 0:
        raise ValueError("eps is negative or NaN")
    its = _modulations(x, gate, scale, shift, x.dtype if branch is None else branch.dtype)
    z = None if branch is None else empty_like(x)
    y = empty_like(x)
    mean, rstd = statistics(x, x.shape[-1:], centered)
    added = None if branch is None else rows_of(branch)
    run(x, _forward_launch(rows_of(x), added, its, z, y, mean, rstd, eps))
    return z, y, mean, rstd


def _modulate_backward(
    grad_z: torch.Tensor | None,
    grad_y: torch.Tensor | None,
    z: torch.Tensor | None,
    gate: torch.Tensor | None,
    branch: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    mean: torch.Tensor | None,
    rstd: torch.Tensor | None,
    need: tuple[bool, bool, bool, bool, bool],
) -> tuple[torch.Tensor, ...]:
    """The gradients of x, gate, branch, scale and shift."""
    like = z if grad_z is None else grad_z
    assert like is not None
    check_like(like, *(t for t in (grad_z, grad_y, z) if t is not None))
    if branch is not None:
        _check_branch(like, branch)
    its = _modulations(like, gate, scale, shift, like.dtype if branch is None else branch.dtype)
    check_beside(like, like.shape[:-1], mean, rstd, dtype=torch.float32)
    grad_x = empty_like(like) if need[0] else None
    grad_branch = empty_like(branch) if branch is not None and need[2] else None
    gradients = [
        gradient_of(t, needed)
        for t, needed in ((gate, need[1]), (scale, need[3]), (shift, need[4]))
    ]
    rows, width = like.shape[:-1].numel(), like.shape[-1]
    if grad_y is None and scale is not None:  # only z was used, not y
        for gradient in gradients[1:]:
            if gradient is not None:
                gradient.zero_()
        z, mean, rstd, scale = None, None, None, None
        its = its._replace(scale=None)
    given = [None if t is None else as_rows(t, rows, width) for t in (grad_z, grad_y, z, branch)]
    if rstd is not None:
        rstd = rstd.contiguous()
        mean = None if mean is None else mean.contiguous()
    written = [gradients[0], None, None] if grad_y is None else gradients
    results = (grad_x, grad_branch, written)
    launches = _backward_launches(given[0], given[1], given[2], given[3], its, mean, rstd, *results)
    run(like, *launches)
    made = (grad_x, gradients[0], grad_branch, gradients[1], gradients[2])
    return tuple(or_empty(gradient, like) for gradient in made)


# --- Called by the registry, with the signatures of the ops' schemas ---


@replayed
def adaptive_layer_norm(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, y, mean, rstd = _modulate_forward(x, None, None, scale, shift, eps, centered=True)
    return y, mean, rstd


@replayed
def adaptive_layer_norm_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    need_scale: bool,
    need_shift: bool,
) -> tuple[torch.Tensor, ...]:
    need = (True, False, False, need_scale, need_shift)
    saved = (None, grad_y, x, None, None, scale, shift, mean, rstd)
    grad_x, _, _, grad_scale, grad_shift = _modulate_backward(*saved, need)
    return grad_x, grad_scale, grad_shift


@replayed
def adaptive_rms_norm(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    given = (x, None, None, scale, shift, epsilon_of(eps))
    _, y, _, rstd = _modulate_forward(*given, centered=False)
    return y, rstd


@replayed
def adaptive_rms_norm_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float | None,
    rstd: torch.Tensor,
    need_scale: bool,
    need_shift: bool,
) -> tuple[torch.Tensor, ...]:
    need = (True, False, False, need_scale, need_shift)
    saved = (None, grad_y, x, None, None, scale, shift, None, rstd)
    grad_x, _, _, grad_scale, grad_shift = _modulate_backward(*saved, need)
    return grad_x, grad_scale, grad_shift


@replayed
def gated_residual(x: torch.Tensor, gate: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
    _check_branch(x, branch)
    its = _modulations(x, gate, None, None, branch.dtype)
    z = empty_like(x)
    run(x, _forward_launch(rows_of(x), rows_of(branch), its, z, None, None, None, 0.0))
    return z


@replayed
def gated_residual_backward(
    grad_y: torch.Tensor,
    gate: torch.Tensor,
    branch: torch.Tensor,
    need_gate: bool,
    need_branch: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    need = (False, need_gate, need_branch, False, False)
    given = (grad_y, None, None, gate, branch, None, None, None, None)
    _, grad_gate, grad_branch, _, _ = _modulate_backward(*given, need)
    return grad_gate, grad_branch


@replayed
def gated_residual_layer_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    branch: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    return _modulate_forward(x, gate, branch, scale, shift, eps, centered=True)


@replayed
def gated_residual_layer_norm_backward(
    grad_z: torch.Tensor | None,
    grad_y: torch.Tensor | None,
    z: torch.Tensor,
    gate: torch.Tensor,
    branch: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    need_x: bool,
    need_gate: bool,
    need_branch: bool,
    need_scale: bool,
    need_shift: bool,
) -> tuple[torch.Tensor, ...]:
    need = (need_x, need_gate, need_branch, need_scale, need_shift)
    saved = (grad_z, grad_y, z, gate, branch, scale, shift, mean, rstd)
    return _modulate_backward(*saved, need)


@replayed
def gated_residual_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    branch: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float | None,
) -> tuple[torch.Tensor, ...]:
    given = (x, gate, branch, scale, shift, epsilon_of(eps))
    z, y, _, rstd = _modulate_forward(*given, centered=False)
    return z, y, rstd


@replayed
def gated_residual_rms_norm_backward(
    grad_z: torch.Tensor | None,
    grad_y: torch.Tensor | None,
    z: torch.Tensor,
    gate: torch.Tensor,
    branch: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float | None,
    rstd: torch.Tensor,
    need_x: bool,
    need_gate: bool,
    need_branch: bool,
    need_scale: bool,
    need_shift: bool,
) -> tuple[torch.Tensor, ...]:
    need = (need_x, need_gate, need_branch, need_scale, need_shift)
    saved = (grad_z, grad_y, z, gate, branch, scale, shift, None, rstd)
    return _modulate_backward(*saved, need)


def aot_cases() -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for (centered, dtype, stream), gated, width in itertools.product(
        ((True, bf16, bf16), (True, bf16, fp32), (True, fp32, fp32), (False, bf16, bf16)),
        (False, True),
        (64, 3072, 4096, 8192, 16384, 131073),
    ):
        if stream != dtype and not gated:
            continue
        branch = torch.empty(32, width, dtype=dtype, device="meta")
        x = branch.to(stream)
        rstd = x.new_empty(32, dtype=torch.float32)
        mean = rstd if centered else None
        parts = [x.new_empty(2, 6 * width)[:, at * width : (at + 1) * width] for at in range(3)]
        its = Modulations(parts[0] if gated else None, parts[1], parts[2], 16)
        added, z = (branch, x) if gated else (None, None)
        name = f"{'gated_residual' if gated else 'adaptive'}_{'layer' if centered else 'rms'}_norm"
        name = f"{name} {dtype} {stream} {width}".replace("torch.", "")
        yield name, _forward_launch(x, added, its, z, x, mean, rstd, 1e-5)
        gradients = [None if part is None else part.contiguous() for part in its[:3]]
        grads = (z, x, x, added, its, mean, rstd, x, added, gradients)
        for step in _backward_launches(*grads):
            yield name, step
        if gated:
            name = f"gated_residual {dtype} {stream} {width}".replace("torch.", "")
            its = its._replace(scale=None, shift=None)
            yield name, _forward_launch(x, added, its, z, None, None, None, 0.0)
            alone = (x, None, None, added, its, None, None, None, added, [gradients[0], None, None])
            for step in _backward_launches(*alone):
                yield name, step
