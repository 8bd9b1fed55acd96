"""Attention's launches for the ahead-of-time tests: every argument once, and all that is timed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ..launch import Launch
from ..memory import memory_of
from .block_sparse_attention import (
    Call,
    bias_launch,
    delta_launch,
    forward_tiled,
    list_tiled_gradients,
    make_call,
)
from .checks import distances
from .specialised import dkv_launch, dq_launch, forward_launch, specialised_tiles
from .tiles import BOTH, FORWARD, QUERIES, generation_of


def _call(
    width: int,
    dtype: torch.dtype,
    block: int | None,
    *,
    causal: bool = False,
    every: bool = False,
    window: bool = False,
    p: float = 0.0,
    deep: int | None = None,
    bias: str = "",
) -> Call:
    """Make a call on meta tensors; with `every`, it has all optional arguments but a bias.

    A `window` has three blocks a line, some of them partial, and sinks. `bias` is "pairs", "line"
    or "plane".
    """

    def make(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    length = 4096
    table: torch.Tensor | None = None
    entries: torch.Tensor | None = None
    masks: torch.Tensor | None = None
    if block is not None:
        table = make(1, 8, length // block, 4, kind=torch.int32)
        entries = make(8 * (3 if window else 512) * length // block, 2, kind=torch.int32)
        masks = make(4 if every or window else 0, block * max(block // 32, 1), kind=torch.int32)
    q, k = make(2, 8, length, width), make(2, 4, length, width)
    row = {"line": length, "plane": 64}.get(bias, 0)
    numbers = None
    if bias:
        shape = (8, 1, distances(length, length, row)) if row else (1, 8, length, length)
        numbers = make(*shape, kind=torch.float32 if row else dtype)
    return make_call(
        *(q, k, k if deep is None else make(2, 4, length, deep)),
        *(make(8, 1, 1) if every or window else None, numbers),
        *(table, entries, table, entries, masks),
        make(2, 1, 1, length, kind=torch.bool) if every else None,
        make(8, 1, 1, kind=torch.float32) if every else None,
        row,
        block or 64,
        group=2,
        scale=width**-0.5,
        causal=causal,
        softcap=5.0 if every else 0.0,
        p=p,
        seed=make(1, kind=torch.int64) if p else None,
        whole=None,
        offset=None,
    )


def aot_cases(capability: int) -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile, for a GPU."""
    for name, call in _calls():
        if name.startswith("128 float16") and capability != 90:
            continue  # for the warp-specialised kernels
        call = call._replace(
            generation=generation_of(divmod(capability, 10), memory_of(capability))
        )
        lse = call.q.new_empty(call.q.shape[:-1], dtype=torch.float32)
        y = call.q.new_empty((*call.q.shape[:3], call.v.shape[3]))
        tiled_launches, after = list_tiled_gradients(call, y, lse, lse, (call.q, call.k, call.v))
        yield name, delta_launch(call, lse, lse, y, y, lse, lse)
        for tiled in (forward_tiled(call, y, lse), *tiled_launches):
            for launched in tiled.launches():
                yield name, launched
        for launched in after:
            yield name, launched
        bias = call.beside[3]
        if bias is not None:
            yield name, bias_launch(call, bias, y, lse, lse)[0]
        if capability == 90:
            for launched in _specialised_launches(call, y, lse):
                yield name, launched


def _specialised_launches(call: Call, y: torch.Tensor, lse: torch.Tensor) -> Iterator[Launch]:
    call = call._replace(columns=call.columns._replace(strides=(0, 0)))  # all heads share a layout
    makes = {
        FORWARD: partial(forward_launch, call, y, lse),
        QUERIES: partial(dq_launch, call, call.q, y, lse, lse),
        BOTH: partial(dkv_launch, call, call.k, call.v, y, lse, lse),
    }
    for kernel, make in makes.items():
        for tile in specialised_tiles(call, kernel):
            yield make(tile)


def _calls() -> Iterator[tuple[str, Call]]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    # What is timed: lists, causal, with and without dropout.
    timed: list[tuple[int, torch.dtype, int | None, dict[str, Any]]] = [
        (width, bf16, block, {"causal": True} | ({"p": 0.1} if p else {}))
        for width in (64, 128, 256)
        for block in (64, 128)
        for p in (False, True)
    ]
    cases: tuple[tuple[int, torch.dtype, int | None, dict[str, Any]], ...] = (
        *timed,
        (128, bf16, None, {"causal": True}),
        (64, fp16, 64, {"every": True, "p": 0.1}),
        (64, fp32, 64, {}),
        (128, bf16, 64, {"deep": 64, "causal": True}),
        (128, fp16, 128, {}),
        *((width, bf16, block, {"window": True}) for width, block in ((64, 64), (128, 128))),
        (256, bf16, 128, {"window": True, "causal": True}),
        (64, bf16, 64, {"bias": "line"}),
        (64, bf16, 64, {"bias": "pairs"}),
        (32, bf16, 64, {"bias": "plane"}),
    )
    for width, dtype, block, options in cases:
        words = [str(value) if key in ("bias", "deep") else key for key, value in options.items()]
        name = f"{width} {dtype} {block} {' '.join(words)}".replace("torch.", "")
        yield name, _call(width, dtype, block, **options)
