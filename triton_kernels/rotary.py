"""rotary_embedding in Triton; csrc/core/rotary.h has the formulas.

Queries and keys are one launch: the first programs take rows of queries, the others rows of keys.
A program's rows are heads of few tokens, so that they share their angles, which come from L1 after
the first head. A program has the whole row, as two tiles with the firsts and the seconds
of pairs, and one with the columns that are not rotated; every element is read once.

Forward, and backward without a norm, 2 units: x is read, y written. A tile has 2048 elements, 16 a
    thread; with a norm 4096, so that both rows of a thread share angles. The floor at bf16, batch
    8, 4096 tokens, 32 + 8 heads of 128 is 0.67 GB: 0.16 ms at the 4.3 TB/s of a copy on an H200.
    Angles of 32 bits add 4 bytes a column and token, 1/20 of it.
Backward with a norm, 3 units: grad_y and x are read, grad_x is written. A program walks a chunk of
    rows and keeps the sums for the gradient of its weight in registers; chunks.py adds them.

On an H200 it takes 0.17 ms, 92% of a copy; with the norms 78% in both directions. A position that
the table does not have is not read: the angles are NaN.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from . import rotary_specialised
from .chunks import add_chunks_launches, chunks_of, partials_of
from .launch import Launch, launch, replayed, run
from .rotary_rows import differentiate_chunk, rotate_tile
from .tensors import check_beside, check_like, contiguous, gradient_of, or_empty
from .tiled import Tile, TiledLaunch, run_tiled

_PLACES = ("batch", "token", "head")
# Sizes, and strides of single numbers, whose alignment makes no load wider.
_SIZES = [
    *("tokens", "heads", "places", "k_heads", "k_places", "table_rows"),
    *(f"{name}_{place}_stride" for name in ("rstd", "k_rstd") for place in _PLACES),
    *("position_batch_stride", "position_token_stride"),
]


@triton.jit(do_not_specialize=[*_SIZES, "tiles"])
def _rotate(
    x_ptr,
    y_ptr,
    weight_ptr,
    rstd_ptr,
    heads,
    places,
    x_batch_stride,
    x_token_stride,
    x_head_stride,
    y_batch_stride,
    y_token_stride,
    y_head_stride,
    rstd_batch_stride,
    rstd_token_stride,
    rstd_head_stride,
    k_ptr,
    k_y_ptr,
    k_weight_ptr,
    k_rstd_ptr,
    k_heads,
    k_places,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    k_y_batch_stride,
    k_y_token_stride,
    k_y_head_stride,
    k_rstd_batch_stride,
    k_rstd_token_stride,
    k_rstd_head_stride,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    table_rows,
    cos_batch_stride,
    cos_token_stride,
    cos_stride,
    sin_batch_stride,
    sin_token_stride,
    sin_stride,
    position_batch_stride,
    position_token_stride,
    tokens,
    pairs,
    distance,
    width,
    tiles,
    eps,
    INTERLEAVED: tl.constexpr,
    FULL: tl.constexpr,
    NORM: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROUNDED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """The forward pass; TRANSPOSED and without NORM also the backward pass."""
    # fmt: off
    x = (
        x_ptr, y_ptr, weight_ptr, rstd_ptr, heads, places,
        x_batch_stride, x_token_stride, x_head_stride,
        y_batch_stride, y_token_stride, y_head_stride,
        rstd_batch_stride, rstd_token_stride, rstd_head_stride,
    )
    k = (
        k_ptr, k_y_ptr, k_weight_ptr, k_rstd_ptr, k_heads, k_places,
        k_batch_stride, k_token_stride, k_head_stride,
        k_y_batch_stride, k_y_token_stride, k_y_head_stride,
        k_rstd_batch_stride, k_rstd_token_stride, k_rstd_head_stride,
    )
    angles = (
        cos_ptr, sin_ptr, positions_ptr, table_rows,
        cos_batch_stride, cos_token_stride, cos_stride,
        sin_batch_stride, sin_token_stride, sin_stride,
        position_batch_stride, position_token_stride,
    )
    # fmt: on
    layout = (pairs, distance, width)
    tile = tl.program_id(0)
    if tile < tiles:
        rotate_tile(
            *(x, tile, tokens, layout, angles, eps, NORM, PLUS_ONE, ROUNDED, TRANSPOSED),
            *(INTERLEAVED, FULL, HEADS, ROWS, PAIRS, REST),
        )
    elif k_ptr is not None:
        rotate_tile(
            *(k, tile - tiles, tokens, layout, angles, eps, NORM, PLUS_ONE, ROUNDED, TRANSPOSED),
            *(INTERLEAVED, FULL, K_HEADS, ROWS, PAIRS, REST),
        )


@triton.jit(do_not_specialize=[*_SIZES, "chunks", "k_chunks"])
def _differentiate(
    grad_ptr,
    x_ptr,
    result_ptr,
    weight_ptr,
    rstd_ptr,
    partials_ptr,
    heads,
    places,
    grad_batch_stride,
    grad_token_stride,
    grad_head_stride,
    x_batch_stride,
    x_token_stride,
    x_head_stride,
    result_batch_stride,
    result_token_stride,
    result_head_stride,
    rstd_batch_stride,
    rstd_token_stride,
    rstd_head_stride,
    k_grad_ptr,
    k_ptr,
    k_result_ptr,
    k_weight_ptr,
    k_rstd_ptr,
    k_partials_ptr,
    k_heads,
    k_places,
    k_grad_batch_stride,
    k_grad_token_stride,
    k_grad_head_stride,
    k_batch_stride,
    k_token_stride,
    k_head_stride,
    k_result_batch_stride,
    k_result_token_stride,
    k_result_head_stride,
    k_rstd_batch_stride,
    k_rstd_token_stride,
    k_rstd_head_stride,
    cos_ptr,
    sin_ptr,
    positions_ptr,
    table_rows,
    cos_batch_stride,
    cos_token_stride,
    cos_stride,
    sin_batch_stride,
    sin_token_stride,
    sin_stride,
    position_batch_stride,
    position_token_stride,
    tokens,
    pairs,
    distance,
    width,
    chunks,
    k_chunks,
    INTERLEAVED: tl.constexpr,
    FULL: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
):
    """The backward pass with a norm."""
    # fmt: off
    x = (
        grad_ptr, x_ptr, result_ptr, weight_ptr, rstd_ptr, partials_ptr, heads, places,
        grad_batch_stride, grad_token_stride, grad_head_stride,
        x_batch_stride, x_token_stride, x_head_stride,
        result_batch_stride, result_token_stride, result_head_stride,
        rstd_batch_stride, rstd_token_stride, rstd_head_stride,
    )
    k = (
        k_grad_ptr, k_ptr, k_result_ptr, k_weight_ptr, k_rstd_ptr, k_partials_ptr,
        k_heads, k_places, k_grad_batch_stride, k_grad_token_stride, k_grad_head_stride,
        k_batch_stride, k_token_stride, k_head_stride,
        k_result_batch_stride, k_result_token_stride, k_result_head_stride,
        k_rstd_batch_stride, k_rstd_token_stride, k_rstd_head_stride,
    )
    angles = (
        cos_ptr, sin_ptr, positions_ptr, table_rows,
        cos_batch_stride, cos_token_stride, cos_stride,
        sin_batch_stride, sin_token_stride, sin_stride,
        position_batch_stride, position_token_stride,
    )
    # fmt: on
    layout = (pairs, distance, width)
    chunk = tl.program_id(0)
    if chunk < chunks:
        differentiate_chunk(
            *(x, chunk, chunks, tokens, layout, angles),
            *(PLUS_ONE, INTERLEAVED, FULL, HEADS, ROWS, PAIRS, REST),
        )
    elif k_ptr is not None:
        differentiate_chunk(
            *(k, chunk - chunks, k_chunks, tokens, layout, angles),
            *(PLUS_ONE, INTERLEAVED, FULL, K_HEADS, ROWS, PAIRS, REST),
        )


_LEADING = 3  # the dimensions before a row


def _leading(sizes: Sequence[int]) -> list[int]:
    return [1] * (_LEADING - len(sizes)) + list(sizes)


class _Call(NamedTuple):
    """What all rows of a call share. `order` has the dimensions of batch, token and head."""

    order: tuple[int, int, int]
    tokens: int
    angles: tuple[Any, ...]  # the kernels' arguments from cos_ptr on
    layout: tuple[int, int, int]  # pairs, distance, width
    options: dict[str, Any]
    tile: dict[str, int]

    def strides(self, tensor: torch.Tensor | None, trailing: int = 1) -> list[int]:
        """Strides of batch, token and head; `trailing` dimensions belong to a row."""
        if tensor is None:
            return [0] * _LEADING
        count = tensor.ndim - trailing
        sizes = zip(tensor.shape[:count], tensor.stride(), strict=False)
        every = [0] * (_LEADING - count) + [0 if n == 1 else stride for n, stride in sizes]
        return [every[at] for at in self.order]

    def heads(self, tensor: torch.Tensor | None) -> tuple[int, int]:
        """The heads of a token, and the tokens of all batches."""
        if tensor is None:
            return 1, 0
        batch, token, head = (_leading(tensor.shape[:-1])[at] for at in self.order)
        return head, batch * token

    def heads_of_tile(self, tensor: torch.Tensor | None) -> int:
        """The heads of a token that a tile has: a power of two that divides them."""
        return math.gcd(self.heads(tensor)[0] or 1, self.tile["ROWS"])

    def tiles(self, tensor: torch.Tensor | None) -> int:
        (heads, tokens), own = self.heads(tensor), self.heads_of_tile(tensor)
        return triton.cdiv(tokens, self.tile["ROWS"] // own) * (heads // own)


def _call(
    x: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    rotary_dim: int,
    interleaved: bool,
    proportional: bool,
) -> _Call:
    width, pairs = x.shape[-1], rotary_dim // 2
    check_like(cos, sin)
    check_beside(x, cos.shape, cos)
    if rotary_dim % 2 or not 0 <= rotary_dim <= width or cos.shape[-1] not in (pairs, 2 * pairs):
        raise ValueError("cos does not fit the columns that are rotated")
    lead = _leading(cos.shape[:-1] if positions is None else positions.shape)
    sizes = _leading(x.shape[:-1])
    if any(n not in (1, whole) for n, whole in zip(lead, sizes, strict=True)):
        raise ValueError("angles do not broadcast to x")
    keys = sizes if key is None else _leading(key.shape[:-1])
    order = _order(lead, sizes, keys)
    if key is not None and (key.dtype != x.dtype or key.shape[-1] != width):
        raise ValueError("k does not fit x")
    call = _Call(
        order,
        sizes[order[1]],
        (),
        (pairs, width // 2 if proportional else pairs, width),
        {"INTERLEAVED": interleaved, "FULL": cos.shape[-1] != pairs},
        _tile(pairs, width - rotary_dim),
    )
    strides: list[int] = []
    for table in (cos, sin):
        own = [0, table.stride(0)] if positions is not None else call.strides(table)[:2]
        strides += [*own, table.stride(-1)]
    at = [0, 0] if positions is None else call.strides(positions, 0)[:2]
    rows = 0 if positions is None else cos.shape[0]
    return call._replace(angles=(cos, sin, positions, rows, *strides, *at))


def _order(lead: list[int], sizes: list[int], keys: list[int]) -> tuple[int, int, int]:
    """Batch, token and head: rows along the last share their angles, and keys may have others."""
    other = [at for at in range(_LEADING) if sizes[at] != keys[at]]
    shared = [at for at in range(_LEADING) if lead[at] == 1]
    head = other[0] if other else max(reversed(shared), key=lambda at: sizes[at] > 1, default=-1)
    if len(other) > 1 or head not in shared:
        raise ValueError("no dimension, or another than k's heads, shares angles")
    batch, token = (at for at in range(_LEADING) if at != head)
    return batch, token, head


def _tile(pairs: int, rest: int) -> dict[str, int]:
    """A tile of about 2048 elements, in whole rows."""
    pair_block = triton.next_power_of_2(max(pairs, 1))
    rest_block = triton.next_power_of_2(rest) if rest else 0
    rows = max(1, 1024 // triton.next_power_of_2(max(pair_block, rest_block // 2)))
    sizes = {"ROWS": min(rows, 64), "PAIRS": pair_block, "REST": rest_block, "num_warps": 4}
    return sizes | {"maxnreg": 255}  # without a limit ptxas spills a few bytes at 128


def _four_fit(tile: dict[str, int]) -> bool:
    """Whether four programs with a norm fit a multiprocessor's registers without a spill."""
    return tile["PAIRS"] <= 64 and not tile["REST"]


Streams = Sequence[tuple[Any, ...]]


def _rotate_launch(
    call: _Call,
    streams: Streams,
    eps: float | None,
    plus_one: bool,
    rounded: str,
    transposed: bool,
) -> Launch:
    """`streams`, for x and k: the input, the result, the weight and rstd, or None."""
    plain = streams[0][0].element_size() == 2 and not call.options["INTERLEAVED"]
    if eps is not None and plain and _four_fit(call.tile):
        # Twice as many rows: both of a thread share its angles. Else registers would be spilled.
        rows = {"ROWS": min(2 * call.tile["ROWS"], 64), "maxnreg": 128}
        call = call._replace(tile=call.tile | rows)
    every: list[Any] = []
    for source, result, weight, rstd in streams:
        every += [source, result, weight, rstd, *call.heads(source), *call.strides(source)]
        every += [*call.strides(result), *call.strides(rstd, 0)]
    tiles = [call.tiles(stream[0]) for stream in streams]
    return launch(
        _rotate,
        sum(tiles),
        *(*every, *call.angles, call.tokens, *call.layout, tiles[0], eps or 0.0),
        **call.options,
        HEADS=call.heads_of_tile(streams[0][0]),
        K_HEADS=call.heads_of_tile(streams[1][0]),
        NORM=eps is not None,
        PLUS_ONE=plus_one,
        ROUNDED=_ROUNDED.index(rounded),
        TRANSPOSED=transposed,
        **call.tile,
    )._replace(spreads=True)


_ROUNDED = ("none", "result", "both")


def _tiled(
    call: _Call, streams: Streams, eps: float | None, plus_one: bool, rounded: str
) -> TiledLaunch:
    """This kernel's launch with a norm, and that of warps with roles."""

    def start(tile: Tile) -> Launch:
        if tile.specialised:
            at = _ROUNDED.index(rounded)
            return rotary_specialised.specialised_launch(call, streams, eps or 0.0, plus_one, at)
        return _rotate_launch(call, streams, eps, plus_one, rounded, False)

    flags = {"plus_one": plus_one, "rounded": rounded}
    results = [t for stream in streams for t in (stream[1], stream[3])]
    return _offer("rotary", rotary_specialised.TILE, call, streams, 2, flags, start, results)


def _tiled_backward(call: _Call, streams: Streams, plus_one: bool) -> TiledLaunch:
    """The launch of gradients, and that of warps with roles. The chunks' sums follow each."""
    partials = functools.cache(functools.partial(_allocate_partials, call, streams))

    def start(tile: Tile) -> Launch:
        chunks, sums = partials(tile.specialised)
        if tile.specialised:
            return rotary_specialised.specialised_backward_launch(call, streams, sums, plus_one)
        return _differentiate_launch(call, streams, chunks, sums, plus_one)

    def add(tile: Tile) -> Iterator[Launch]:
        chunks, sums = partials(tile.specialised)
        gradients = [stream[-1] for stream in streams]
        return add_chunks_launches(gradients, sums, chunks[0], call.layout[-1])

    flags = {"plus_one": plus_one, "sums": [stream[-1] is not None for stream in streams]}
    tile = rotary_specialised.BACKWARD_TILE
    results = [t for stream in streams for t in (stream[2], stream[-1])]
    tiled = _offer("rotary's gradient", tile, call, streams, 3, flags, start, results)
    return tiled._replace(after=add)


def _offer(
    name: str,
    specialised: Tile,
    call: _Call,
    streams: Streams,
    weight_at: int,
    flags: dict[str, Any],
    start: Callable[[Tile], Launch],
    results: Sequence[torch.Tensor | None],
) -> TiledLaunch:
    """The launch with the rule's tile, and one by warps with roles if it may serve."""
    tiles = [Tile(call.tile["ROWS"], call.layout[-1], call.tile["num_warps"], 1)]
    if rotary_specialised.may_serve(call, [t for s in streams for t in s[:weight_at]]):
        tiles.append(specialised)
    flags = {
        **call.options,
        **flags,
        "positions": call.angles[2] is not None,
        "weights": [stream[weight_at] is not None for stream in streams],
        "heads": [call.heads(stream[0])[0] for stream in streams],
    }
    x = streams[0][0]
    size = x.numel().bit_length()
    return TiledLaunch(
        (name, x.dtype, str(flags), size),
        lambda: {
            "kernel": f"{name} with a norm",
            "dtype": str(x.dtype).removeprefix("torch."),
            **flags,
            "tiles": list(map(str, tiles)),
        },
        size,
        tiles,
        start,
        [t for t in results if t is not None],
    )


def _allocate_partials(
    call: _Call, streams: Streams, specialised: bool
) -> tuple[list[int], list[torch.Tensor | None]]:
    """The programs for x and for k, and a place for the sums of each; without sums, its tiles."""
    sources, gradients = [stream[0] for stream in streams], [stream[-1] for stream in streams]
    tiles = [call.tiles(source) for source in sources]
    if specialised:
        tiles = [rotary_specialised.count_programs(call, sources)] * 2
    elif any(gradient is not None for gradient in gradients):
        tiles = [chunks_of(max(tiles), 1, sources[0].device, 4)] * 2
        if sources[1] is None:
            tiles[1] = 0
    return tiles, partials_of(gradients, tiles[0], call.layout[-1])


def _differentiate_launch(
    call: _Call,
    streams: Streams,
    chunks: Sequence[int],
    partials: Sequence[torch.Tensor | None],
    plus_one: bool,
) -> Launch:
    """`streams`, for x and k: gradient, input, result, weight, rstd, weight's gradient."""
    # Five programs a multiprocessor, or four: float32 would be spilled.
    registers = 96 if streams[0][0].element_size() == 2 else 128
    every: list[Any] = []
    for (grad, x, result, weight, rstd, _), partial in zip(streams, partials, strict=True):
        every += [grad, x, result, weight, rstd, partial, *call.heads(grad), *call.strides(grad)]
        every += [*call.strides(x), *call.strides(result), *call.strides(rstd, 0)]
    return launch(
        _differentiate,
        sum(chunks),
        *(*every, *call.angles, call.tokens, *call.layout, *chunks),
        **call.options,
        HEADS=call.heads_of_tile(streams[0][0]),
        K_HEADS=call.heads_of_tile(streams[1][0]),
        PLUS_ONE=plus_one,
        **call.tile | {"maxnreg": registers if _four_fit(call.tile) else 255},
    )._replace(spreads=True)


def _with_adjacent_columns(t: torch.Tensor | None) -> torch.Tensor | None:
    return t if t is None or t.shape[-1] <= 1 or t.stride(-1) == 1 else t.contiguous()


def _empty_result(like: torch.Tensor | None) -> torch.Tensor | None:
    """A result with the layout of a tensor, or contiguous if its columns would be apart."""
    if like is None:
        return None
    result = torch.empty_like(like)
    adjacent = result.shape[-1] <= 1 or result.stride(-1) == 1
    return result if adjacent else torch.empty_like(like, memory_format=torch.contiguous_format)


# --- Called by the registry, with the signatures of the op's schemas ---


@replayed
def rotary_embedding(
    x: torch.Tensor,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    rotary_dim: int,
    interleaved: bool,
    proportional: bool,
    eps: float | None,
    plus_one: bool,
    rounded: str,
    heads: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    if heads is not None:
        raise ValueError("no kernel has a norm across heads")
    call = _call(x, key, cos, sin, positions, rotary_dim, interleaved, proportional)
    check_beside(x, x.shape[-1:], weight, key_weight)
    streams = []
    for source, w in ((x, weight), (key, key_weight)):
        rstd = None
        if source is not None and eps is not None:
            rstd = source.new_empty(source.shape[:-1], dtype=torch.float32)
        result = _empty_result(source)
        streams.append((_with_adjacent_columns(source), result, contiguous(w), rstd))
    how = (eps, plus_one, rounded)
    if eps is None:
        run(x, _rotate_launch(call, streams, *how, False))
    else:
        run_tiled(x, _tiled(call, streams, *how))
    (_, y, _, rstd), (_, key_y, _, key_rstd) = streams
    return tuple(or_empty(result, x) for result in (y, key_y, rstd, key_rstd))  # type: ignore[return-value]


@replayed
def rotary_embedding_backward(
    grad_y: torch.Tensor,
    grad_key_y: torch.Tensor,
    x: torch.Tensor | None,
    key: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    rotary_dim: int,
    interleaved: bool,
    proportional: bool,
    eps: float | None,
    plus_one: bool,
    rounded: str,
    heads: int | None,
    rstd: torch.Tensor | None,
    key_rstd: torch.Tensor | None,
    need_weight: bool,
    need_key_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    has_key = grad_key_y.ndim == grad_y.ndim and (grad_y.ndim > 1 or grad_key_y.numel() > 0)
    grads = (grad_y, grad_key_y if has_key else None)
    call = _call(*grads, cos, sin, positions, rotary_dim, interleaved, proportional)
    check_beside(grad_y, grad_y.shape[-1:], weight, key_weight)
    if eps is None:
        turned = [(_with_adjacent_columns(g), _empty_result(g), None, None) for g in grads]
        run(grad_y, _rotate_launch(call, turned, None, False, "none", True))
        nothing = grad_y.new_empty(0), grad_y.new_empty(0)
        return or_empty(turned[0][1], grad_y), or_empty(turned[1][1], grad_y), *nothing
    streams: list[tuple[Any, ...]] = []
    for grad, saved, w, statistics, need in (
        (grads[0], x, weight, rstd, need_weight),
        (grads[1], key, key_weight, key_rstd, need_key_weight),
    ):
        if grad is None:
            streams.append((None,) * 6)
            continue
        assert saved is not None
        assert statistics is not None
        check_like(saved, grad)
        tensors = _with_adjacent_columns(grad), _with_adjacent_columns(saved), _empty_result(saved)
        streams.append((*tensors, contiguous(w), statistics.contiguous(), gradient_of(w, need)))
    run_tiled(grad_y, _tiled_backward(call, streams, plus_one))
    results = [or_empty(stream[at], grad_y) for at in (2, 5) for stream in streams]
    return tuple(results)  # type: ignore[return-value]


def aot_cases(capability: int) -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""
    for dtype, (width, rotated), interleaved in itertools.product(
        (torch.bfloat16, torch.float32), ((128, 128), (256, 64), (1024, 1024)), (False, True)
    ):
        if dtype == torch.float32 and width != 128:
            continue  # Skip it: bfloat16 covers its shapes.
        q = torch.empty(2, 64, 32, width, dtype=dtype, device="meta").transpose(1, 2)
        k = q[:, :8]
        table = q.new_empty(4096, rotated, dtype=torch.float32)
        positions = q.new_empty(2, 1, 64, dtype=torch.int64)
        call = _call(q, k, table, table, positions, rotated, interleaved, False)
        rstd = q.new_empty(q.shape[:-1], dtype=torch.float32)
        weight = q.new_empty(width)
        kind = "interleaved" if interleaved else "halves"
        name = f"rotary {str(dtype).removeprefix('torch.')} {rotated} of {width}, {kind}"
        plain = [(q, q, None, None), (k, k, None, None)]
        yield name, _rotate_launch(call, plain, None, False, "none", False)
        yield from _norm_cases(name, capability, call, q, k, rstd, weight)
        if width == 128 and dtype == torch.bfloat16 and not interleaved:
            q, table, rstd = q[:, :16], table[:64], rstd[:, :16]
            call = _call(q, k, table, table, None, rotated, interleaved, False)
            name = f"{name}, 16 heads without positions"
            yield from _norm_cases(name, capability, call, q, k, rstd, weight)


def _norm_cases(
    name: str,
    capability: int,
    call: _Call,
    q: torch.Tensor,
    k: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor,
) -> Iterator[tuple[str, Launch]]:
    normed = [(q, q, weight, rstd), (k, k, weight, rstd[:, :8])]
    gradients = [(q, q, q, weight, rstd, weight), (k, k, k, weight, rstd[:, :8], weight)]
    for tiled in (
        _tiled(call, normed, 1e-6, True, "both"),
        _tiled_backward(call, gradients, True),
    ):
        for step in tiled.launches():
            if capability == 90 or step.least_capability < 90:
                by_roles = step.least_capability == 90
                yield f"{name}, norm{', warp-specialised' * by_roles}", step
