"""Launches of attention's warp-specialised kernels for sm_90, for calls without extras.

These are calls of 16 bits with a layout and without biases, dropout, softcaps, slopes and padding,
with heads of 64, 128 or 256, blocks of 64 or 128, and strides that TMA has. They may have sinks,
and partial blocks: windows, documents and any other mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..gluon_names import TensorDescriptor, gl
from ..launch import Launch, launch, processors
from ..tiled import Tile
from .specialised_dkv import attention_dkv_specialised
from .specialised_dq import attention_dq_specialised
from .specialised_forward import attention_forward_specialised
from .tiles import BOTH, FORWARD, QUERIES

# An H200 is faster with them at these heads and blocks: there, they serve by rule.
FASTER = {(128, 128), (64, 64)}
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_CACHED = 24 << 20  # bytes of keys and values that stay in L2
_LONG = 512  # keys of a line that are worth two blocks at a time


def serves(call: Any) -> bool:
    """Whether these kernels serve a call."""
    options, width = call.options, call.q.shape[3]
    return (
        call.generation == 90
        and call.q.dtype in _TYPES
        and width in (64, 128, 256)
        and call.v.shape[3] == width
        and options["BLOCK"] in (64, 128)
        and not options["SOFTCAP"]
        and call.rows.table is not None
        and all(x is None for x in call.beside[1:])
        and (call.beside[0] is None or call.beside[0].numel() < 2**31)
        and call.scale > 0
        and call.q.numel() > 0
        and call.k.numel() > 0
        and all(map(_is_strided, (call.q, call.k, call.v)))
    )


def _is_strided(x: torch.Tensor) -> bool:
    strides = [stride for n, stride in zip(x.shape[:3], x.stride(), strict=False) if n > 1]
    return all(stride > 0 and stride % 8 == 0 for stride in strides)


def _descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """A tensor of heads in tiles of so many tokens, zeros past the last one."""
    width, block = x.shape[3], [1, 1, rows, x.shape[3]]
    strides = [width if n == 1 else s for n, s in zip(x.shape[:3], x.stride(), strict=False)]
    layout = gl.NVMMASharedLayout.get_default_for(block, _TYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), [*strides, 1], block, layout)


def runs_on(device: torch.device) -> bool:
    return device.type == "cuda"


def add_tiles(
    call: Any, kernel: str, tiles: Sequence[Tile], grad_y: torch.Tensor | None
) -> tuple[Tile, ...]:
    """A call's tiles and the warp-specialised ones. The first one serves by rule."""
    if not runs_on(call.q.device) or not (grad_y is None or _is_strided(grad_y)):
        return tuple(tiles)
    offered = specialised_tiles(call, kernel)
    is_faster = (call.options["WIDTH"], call.options["BLOCK"]) in FASTER
    return (*offered, *tiles) if is_faster else (*tiles, *offered)


def specialised_tiles(call: Any, kernel: str) -> tuple[Tile, ...]:
    """The tiles for a call and a kernel, if warp-specialised kernels serve it."""
    if not serves(call):
        return ()
    block, width = call.options["BLOCK"], call.options["WIDTH"]
    stages = 2 if width == 128 and block == 64 else 3
    tile = Tile(block, 64, block // 16 + 4, stages, specialised=True)
    per_head = call.columns.strides[1] > 0 and call.group > 1
    if kernel == FORWARD:
        # Two blocks of 64 keys lie as one of 128 in shared memory if heads are no wider than 64.
        # Half of the last pair is lost, so not for a window of three blocks.
        taken, stages = 64 if width == 256 else block, 2
        if width == 64:
            is_short = block == 64 and call.rows.tokens < _LONG
            taken, stages = (64, 4) if is_short else (128, 2 + block // 128)
        tile = tile._replace(taken=taken, stages=stages)
    elif width == 256 or kernel not in (QUERIES, BOTH) or (kernel == BOTH and per_head):
        return ()  # of heads of 256, sums of keys and of values would not fit the registers
    # Where a few lines are long, programs of one line share the work more evenly.
    return (tile._replace(persistent=True), tile)


def _residents(call: Any, tile: Tile) -> int:
    """The programs of a multiprocessor: two consumers, or wide heads, take all of its registers."""
    return 1 if tile.own > 64 or call.options["WIDTH"] > 128 else 2


def _options(call: Any, tile: Tile, consumers: int) -> dict[str, Any]:
    """Options of every kernel. `consumers`: registers of each of their threads if there are two."""
    return {
        "CAUSAL": call.options["CAUSAL"],
        "BLOCK": tile.own,
        "D": call.options["WIDTH"],
        "STAGES": tile.stages,
        "REGISTERS": consumers,
        "num_warps": 4,
        "maxnreg": 168 if _residents(call, tile) == 1 else 128,
    }


def _grid(call: Any, tile: Tile, count: int) -> int:
    if not tile.persistent:
        return count
    return min(count, _residents(call, tile) * processors(call.q.device))


def forward_launch(call: Any, y: torch.Tensor, lse: torch.Tensor, tile: Tile) -> Launch:
    q, k, v, lists = call.q, call.k, call.v, call.rows
    planes = q.shape[0] * q.shape[1]
    y, own = y.view(q.shape), min(tile.own, tile.taken)
    count = planes * lists.lines
    return launch(
        attention_forward_specialised,
        _grid(call, tile, count),
        *(_descriptor(x, rows) for x, rows in zip((q, k, v), (64, own, own), strict=True)),
        *(_descriptor(y, 64), lse, call.sinks),
        *(lists.table, lists.entries, call.beside[0], lists.lines, *lists.strides),
        *(count, planes, _together(k, planes), q.shape[1], call.group, call.first_head),
        *(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], call.scoring[0]),
        **_options(call, tile, 224),
        N=tile.taken,
        Q_STAGES=1 if q.shape[3] == 256 else 2,
    )._replace(least_capability=90)


def dq_launch(
    call: Any,
    grad_q: torch.Tensor,
    grad_y: torch.Tensor,
    base: torch.Tensor,
    delta: torch.Tensor,
    tile: Tile,
) -> Launch:
    q, k, v, lists = call.q, call.k, call.v, call.rows
    planes = q.shape[0] * q.shape[1]
    count = planes * lists.lines
    return launch(
        attention_dq_specialised,
        _grid(call, tile, count),
        *(_descriptor(q, 64), _descriptor(grad_y, 64)),
        *(_descriptor(k, tile.taken), _descriptor(v, tile.taken)),
        *(_descriptor(grad_q.view(q.shape), 64), base, delta),
        *(lists.table, lists.entries, call.beside[0], lists.lines, *lists.strides),
        *(count, planes, _together(k, planes), q.shape[1], call.group, call.first_head),
        *(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], call.scale, call.scoring[0]),
        **_options(call, tile, 224),
        N=tile.taken,
    )._replace(least_capability=90)


def dkv_launch(
    call: Any,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
    grad_y: torch.Tensor,
    base: torch.Tensor,
    delta: torch.Tensor,
    tile: Tile,
) -> Launch:
    q, k, v, lists = call.q, call.k, call.v, call.columns
    planes = k.shape[0] * k.shape[1]
    count = planes * lists.lines
    producer = 24 if q.shape[3] == 128 else 40  # registers; wide heads leave no more
    return launch(
        attention_dkv_specialised,
        _grid(call, tile, count),
        *(_descriptor(k, 64), _descriptor(v, 64)),
        *(_descriptor(q, tile.taken), _descriptor(grad_y, tile.taken)),
        *(_descriptor(grad_k.view(k.shape), 64), _descriptor(grad_v.view(v.shape), 64)),
        *(base, delta),
        *(lists.table, lists.entries, call.beside[0], lists.lines, *lists.strides),
        *(count, planes, _together(q, planes), q.shape[1], k.shape[1], call.group, call.first_head),
        *(q.shape[2], k.shape[2], k.shape[2] - q.shape[2], call.scale, call.scoring[0]),
        **_options(call, tile, 252 - producer // 2),
        M=tile.taken,
        PRODUCER=producer,
    )._replace(least_capability=90)


def _together(streamed: torch.Tensor, planes: int) -> int:
    """How many planes are walked together, so that what they read stays in L2."""
    bytes_of_all = 2 * streamed.numel() * streamed.element_size()
    return min(max(_CACHED * planes // bytes_of_all, 1), planes)
