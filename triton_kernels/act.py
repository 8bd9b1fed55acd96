"""bias_act and gated_act in Triton; csrc/core/act.h has the formulas.

They are written in Triton, not CUDA: Triton suits element-wise passes, and the epilogue of a Triton
GEMM shares these functions.

A unit below is rows x width elements, once over DRAM.

bias_act, 2 units: a program has one tile of 2048 elements, two 16-byte loads a thread at bf16. With
    16 programs on a multiprocessor 64 KiB are in flight, where an H200 needs about 30 KiB for 4.8
    TB/s at 800 ns. The bias comes from L1 and L2.
bias_act_backward, 3 units: a program walks a chunk of rows in one tile of columns and keeps their
    sums for grad_bias in registers, which it writes once. At bf16 8192 x 16384 on 132 processors
    that is 66 chunks of 124 rows: 4.3 MB of partial sums for 805 MB. They are added in a fixed
    order: no atomics, the same bits every run. The next rows arrive in shared memory meanwhile.
gated_act, 3 units, and its backward pass, 5, use tiles like bias_act's. gate and up may be the
    halves of one GEMM's result; they are read in place.

An element takes about 20 float32 operations (erf): 8192 x 16384 are 2.7 GFLOP, 0.1 ms at half an
H200's rate, against 0.11 ms for its 537 MB. The tanh form is cheaper.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from .approximate import exp, reciprocal
from .chunks import add_chunks_launches, chunk_range, chunks_of, partials_of, store_partial
from .launch import Launch, launch, replayed, run
from .tensors import (
    check_beside,
    check_like,
    contiguous,
    empty_like,
    gradient_of,
    load,
    or_empty,
    rows_of,
    store,
)

# The branches of `activate` and `activation_gradient`: an activation, followed by its approximate
# unless that is "none".
KINDS = (
    "gelu",
    "gelu_tanh",
    "relu",
    "silu",
    "quick_gelu",
    "relu2",
    "sigmoid",
    "tanh",
    "identity",
)


@triton.jit
def _logistic(x):
    """1 / (1 + 2^-x): factors of the argument and of the exponent are one number."""
    return reciprocal(1 + tl.exp2(-x))


@triton.jit
def _gaussian(z):
    return tl.exp2(z * z * -0.7213475204444817)


@triton.jit
def _normal_integral(z, gaussian):
    """The normal distribution's integral; csrc/core/act.h has the polynomial."""
    t = reciprocal(1 + 0.34 * tl.abs(z))
    tail = 0.286127454 + t * (-0.21284831 + t * 0.0476667729)
    tail = 0.126394262 + t * (0.167822206 + t * (-0.0516554776 + t * tail))
    tail = gaussian * (-2.58259507e-05 + t * (0.136518964 + t * tail))
    return tl.where(z < 0, tail, 1 - tail)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        return z * _normal_integral(z, _gaussian(z))
    elif ACTIVATION == "gelu_tanh":
        return z * _logistic(z * (2.302208198144325 + 0.1029432395800235 * z * z))
    elif ACTIVATION == "quick_gelu":
        return z * _logistic(2.4554669595930156 * z)
    elif ACTIVATION == "relu":
        return tl.where(z < 0, 0.0, z)
    elif ACTIVATION == "relu2":
        return tl.where(z < 0, 0.0, z * z)
    elif ACTIVATION == "silu":
        return z * _logistic(1.4426950408889634 * z)
    elif ACTIVATION == "sigmoid":
        return _logistic(1.4426950408889634 * z)
    elif ACTIVATION == "tanh":
        return _tanh(z)
    else:
        tl.static_assert(ACTIVATION == "identity")
        return z


@triton.jit
def activation_gradient(z, grad, ACTIVATION: tl.constexpr):
    """The gradient of z, from grad, the gradient of its activation."""
    if ACTIVATION == "gelu":
        g = _gaussian(z)
        return grad * (_normal_integral(z, g) + z * g * 0.3989422804014327)
    elif ACTIVATION == "gelu_tanh":
        s = _logistic(z * (2.302208198144325 + 0.1029432395800235 * z * z))
        inner = 1.5957691216057308 + 0.21406444881780075 * z * z
        return grad * (s + z * (s * (1 - s)) * inner)
    elif ACTIVATION == "quick_gelu":
        s = _logistic(2.4554669595930156 * z)
        return grad * (s + z * (1.702 * (s * (1 - s))))
    elif ACTIVATION == "relu":
        return tl.where(z <= 0, 0.0, grad)
    elif ACTIVATION == "relu2":
        return tl.where(z <= 0, 0.0, grad * (2 * z))
    elif ACTIVATION == "silu":
        s = _logistic(1.4426950408889634 * z)
        return grad * (s + z * (s * (1 - s)))
    elif ACTIVATION == "sigmoid":
        return grad * _logistic_slope(z)
    elif ACTIVATION == "tanh":
        return grad * (4 * _logistic_slope(2 * z))
    else:
        tl.static_assert(ACTIVATION == "identity")
        return grad


@triton.jit
def _logistic_slope(z):
    # Uses the exponential of a negative number: s * (1 - s) cancels if s is near one.
    e = exp(-tl.abs(z))
    s = reciprocal(1 + e)
    return e * s * s


@triton.jit
def _tanh(z):
    # csrc/core/act.h has the polynomial. Near zero the quotient cancels.
    size = tl.abs(z)
    e = exp(-2 * size)
    far = (1 - e) * reciprocal(1 + e)
    square = z * z
    series = -0.05338711064 + square * 0.01798874441
    series = -0.3333331108 + square * (0.1333047649 + square * series)
    return tl.where(size >= 0.5, tl.where(z < 0, -far, far), z + z * square * series)


@triton.jit
def _tile(index, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    # Rows and columns of a tile, counted along the rows first, and which of its elements are
    # inside.
    column_tiles = tl.cdiv(width, BLOCK)
    row = (index // column_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = index % column_tiles * BLOCK + tl.arange(0, BLOCK)
    return row[:, None], column[None, :], (row < rows)[:, None] & (column < width)[None, :]


@triton.jit
def _load_bias(ptr, column, width):
    if ptr is None:
        return tl.zeros(column.shape, tl.float32)
    else:
        return tl.load(ptr + column, mask=column < width, other=0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _bias_act(
    x_ptr,
    bias_ptr,
    y_ptr,
    rows,
    width,
    x_stride,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, inside = _tile(tl.program_id(0), rows, width, ROWS, BLOCK)
    z = load(x_ptr, row, column, x_stride, inside) + _load_bias(bias_ptr, column, width)
    store(y_ptr, row, column, width, activate(z, ACTIVATION), inside)


@triton.jit(do_not_specialize=["rows", "chunks"])
def _bias_act_backward(
    grad_y_ptr,
    x_ptr,
    bias_ptr,
    grad_x_ptr,
    partials_ptr,
    rows,
    width,
    grad_y_stride,
    x_stride,
    chunks,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    column_tiles = tl.cdiv(width, BLOCK)
    chunk = tl.program_id(0) // column_tiles
    column_tile = tl.program_id(0) % column_tiles
    column = column_tile * BLOCK + tl.arange(0, BLOCK)
    bias = _load_bias(bias_ptr, column, width)[None, :]
    partial = tl.zeros([ROWS, BLOCK], tl.float32)
    first, last = chunk_range(chunk, rows, chunks, ROWS)
    for row_tile in tl.range(first, last, num_stages=STAGES):
        row = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (column < width)[None, :]
        grad_y = load(grad_y_ptr, row, column[None, :], grad_y_stride, inside)
        z = load(x_ptr, row, column[None, :], x_stride, inside) + bias
        # Outside the tensor grad_y is 0 and z is the bias, whose gradient may still be NaN.
        grad_x = tl.where(inside, activation_gradient(z, grad_y, ACTIVATION), 0)
        store(grad_x_ptr, row, column[None, :], width, grad_x, inside)
        partial += grad_x
    store_partial(partials_ptr, chunk, column, width, column < width, partial)


@triton.jit(do_not_specialize=["rows"])
def _gated_act(
    gate_ptr,
    up_ptr,
    y_ptr,
    rows,
    width,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, inside = _tile(tl.program_id(0), rows, width, ROWS, BLOCK)
    gate = load(gate_ptr, row, column, gate_stride, inside)
    up = load(up_ptr, row, column, up_stride, inside)
    store(y_ptr, row, column, width, activate(gate, ACTIVATION) * up, inside)


@triton.jit(do_not_specialize=["rows"])
def _gated_act_backward(
    grad_y_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    rows,
    width,
    grad_y_stride,
    gate_stride,
    up_stride,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, inside = _tile(tl.program_id(0), rows, width, ROWS, BLOCK)
    grad_y = load(grad_y_ptr, row, column, grad_y_stride, inside)
    gate = load(gate_ptr, row, column, gate_stride, inside)
    up = load(up_ptr, row, column, up_stride, inside)
    grad_gate = activation_gradient(gate, grad_y * up, ACTIVATION)
    store(grad_gate_ptr, row, column, width, grad_gate, inside)
    store(grad_up_ptr, row, column, width, grad_y * activate(gate, ACTIVATION), inside)


@functools.cache
def _tile_of(width: int) -> dict[str, int]:
    """A tile of 2048 elements: enough columns for wide accesses, and rows if columns are few."""
    block = min(512, triton.next_power_of_2(max(width, 1)))
    return {"ROWS": 2048 // block, "BLOCK": block, "num_warps": 4}


def _tiles(rows: int, width: int) -> int:
    tile = _tile_of(width)
    return triton.cdiv(rows, tile["ROWS"]) * triton.cdiv(width, tile["BLOCK"])


def _kind(activation: str, approximate: str) -> str:
    """The kernels' name for an activation."""
    kind = activation if approximate == "none" else f"{activation}_{approximate}"
    if kind not in KINDS:
        raise ValueError(f"there is no activation {activation} with approximate {approximate}")
    return kind


def _bias_act_launch(
    x: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, kind: str
) -> Launch:
    return launch(
        _bias_act,
        _tiles(*x.shape),
        *(x, bias, y, *x.shape, x.stride(0)),
        ACTIVATION=kind,
        **_tile_of(x.shape[1]),
    )


def _bias_act_backward_launches(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    grad_x: torch.Tensor,
    grad_bias: torch.Tensor | None,
    kind: str,
) -> Iterator[Launch]:
    rows, width = x.shape
    tile = _tile_of(width)
    row_tiles, column_tiles = triton.cdiv(rows, tile["ROWS"]), triton.cdiv(width, tile["BLOCK"])
    chunks = chunks_of(row_tiles, column_tiles, x.device)
    gradients = (None, grad_bias)
    partials = partials_of(gradients, chunks, width)
    yield launch(
        _bias_act_backward,
        chunks * column_tiles,
        *(grad_y, x, bias, grad_x, partials[1], rows, width, grad_y.stride(0), x.stride(0), chunks),
        ACTIVATION=kind,
        STAGES=3,
        # Six programs a processor, where none spills.
        maxnreg=80 if width % 16 == 0 and x.element_size() == 2 else 128,
        **tile,
    )._replace(spreads=True)
    yield from add_chunks_launches(gradients, partials, chunks, width)


def _gated_act_launch(gate: torch.Tensor, up: torch.Tensor, y: torch.Tensor, kind: str) -> Launch:
    return launch(
        _gated_act,
        _tiles(*gate.shape),
        *(gate, up, y, *gate.shape, gate.stride(0), up.stride(0)),
        ACTIVATION=kind,
        **_tile_of(gate.shape[1]),
    )


def _gated_act_backward_launch(
    grad_y: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    grad_gate: torch.Tensor,
    grad_up: torch.Tensor,
    kind: str,
) -> Launch:
    return launch(
        _gated_act_backward,
        _tiles(*gate.shape),
        *(grad_y, gate, up, grad_gate, grad_up, *gate.shape),
        *(grad_y.stride(0), gate.stride(0), up.stride(0)),
        ACTIVATION=kind,
        **_tile_of(gate.shape[1]),
    )


# --- Called by the registry, with the signatures of the ops' schemas ---


@replayed
def bias_act(
    x: torch.Tensor, bias: torch.Tensor | None, activation: str, approximate: str
) -> torch.Tensor:
    check_beside(x, x.shape[-1:], bias)
    y = empty_like(x)
    run(x, _bias_act_launch(rows_of(x), contiguous(bias), y, _kind(activation, approximate)))
    return y


@replayed
def bias_act_backward(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = bias if need_bias else None
    return _bias_act_gradients(grad_y, x, bias, wanted, _kind(activation, approximate))


@replayed
def act_backward(
    grad_y: torch.Tensor,
    z: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _bias_act_gradients(grad_y, z, None, bias, _kind(activation, approximate))


def _bias_act_gradients(
    grad_y: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    wanted: torch.Tensor | None,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and of the bias, if `wanted`; `bias` is None if x includes it."""
    check_beside(x, x.shape[-1:], bias, wanted)
    check_like(x, grad_y)
    grad_x, grad_bias = empty_like(x), gradient_of(wanted, True)
    matrices = (rows_of(grad_y), rows_of(x))
    run(x, *_bias_act_backward_launches(*matrices, contiguous(bias), grad_x, grad_bias, kind))
    return grad_x, or_empty(grad_bias, x)


@replayed
def gated_act(
    gate: torch.Tensor, up: torch.Tensor, activation: str, approximate: str
) -> torch.Tensor:
    check_like(gate, up)
    y = empty_like(gate)
    kind = _kind(activation, approximate)
    run(gate, _gated_act_launch(rows_of(gate), rows_of(up), y, kind))
    return y


@replayed
def gated_act_backward(
    grad_y: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: str, approximate: str
) -> tuple[torch.Tensor, torch.Tensor]:
    check_like(gate, up, grad_y)
    grad_gate, grad_up = empty_like(gate), empty_like(up)
    matrices = (rows_of(grad_y), rows_of(gate), rows_of(up))
    kind = _kind(activation, approximate)
    run(gate, _gated_act_backward_launch(*matrices, grad_gate, grad_up, kind))
    return grad_gate, grad_up


def aot_cases() -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""
    dtypes = (torch.bfloat16, torch.float32)
    for dtype, kind, width in itertools.product(dtypes, KINDS, (4096, 131073)):
        if kind != "gelu" and (dtype == torch.float32 or width != 4096):
            continue  # the functions do not depend on dtype and width
        x = torch.empty(4096, width, dtype=dtype, device="meta")
        name = f"{kind} {str(dtype).removeprefix('torch.')} {width}"
        yield name, _bias_act_launch(x, x[0], x, kind)
        for step in _bias_act_backward_launches(x, x, x[0], x, x[0], kind):
            yield name, step
        for step in _bias_act_backward_launches(x, x, None, x, x[0], kind):
            yield f"{name}, the bias in x", step
        yield name, _gated_act_launch(x, x, x, kind)
        yield name, _gated_act_backward_launch(x, x, x, x, x, kind)
