"""Shared by rules in eager torch: reading parameters and moments, and writing a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchweld.ops.optimizer.batch import Task, Tensors
from torchweld.ops.optimizer.rounding import round_at
from torchweld.ops.quantize_8bit import dequantize_reference, keep_positive, quantize_reference

Read = tuple[torch.Tensor, torch.Tensor, Tensors]


def read(task: Task, i: int, signed: Sequence[bool]) -> Read:
    """Parameter i, its gradient and its moments, in the dtype of the arithmetic."""
    batch, factor = task.batch, task.grad_factor
    p, count = batch.params[i], len(batch.params)
    wide = torch.float64 if p.dtype == torch.float64 else torch.float32
    master = batch.masters[i] if batch.masters else None
    scales = batch.absmaxes[i::count]
    edges = batch.edges[i] if batch.edges else None
    moments = [
        m.to(wide) if not scales else dequantize_reference(m, scales[k], signed[k], wide, edges)
        for k, m in enumerate(batch.moments[i::count])
    ]
    g = batch.grads[i].to(wide)
    if factor is not None:
        g = g * factor.to(p.device, wide)
    return read_param(p, master).to(wide), g, moments


def write(
    task: Task,
    i: int,
    before: torch.Tensor,
    after: torch.Tensor,
    moments: Tensors,
    signed: Sequence[bool],
    has_companion: bool = False,
) -> None:
    """Write a step of parameter i: its values before and after it, and its new moments.

    If it has a companion of a rule, that is the last of the moments.
    """
    batch, count = task.batch, len(task.batch.params)
    skip = None if task.found_inf is None else task.found_inf != 0

    def put(target: torch.Tensor, value: torch.Tensor) -> None:
        value = value.to(target.dtype)
        target.copy_(value if skip is None else torch.where(skip, target, value))

    stored, scales = batch.moments[i::count], batch.absmaxes[i::count]
    companion = batch.companions[i] if batch.companions else None
    if has_companion:
        assert companion is not None
        *moments, second = moments
        put(companion, torch.where(sound(moments), second, companion) if scales else second)
    if scales:
        after = torch.where(sound(moments), after, before)
        moments = sound_only(moments)
    number = batch.step_number(i)
    put(batch.steps[i], batch.steps[i] + 1)
    for k, value in enumerate(moments):
        if not scales:
            put(stored[k], value)
            continue
        edges, new = (
            (batch.edges[i], batch.new_absmaxes[i::count][k]) if batch.edges else (None,) * 2
        )
        codes, absmax = quantize_reference(value, signed[k], edges, new)
        put(stored[k], codes if signed[k] else keep_positive(codes, value))
        if new is None:
            put(scales[k], absmax)
    master = batch.masters[i] if batch.masters else None
    if batch.rounding_offsets:
        put(batch.params[i], round_at(after, batch.rounding_offsets[i], number))
    else:
        rounded, rest = split_param(after, batch.params[i].dtype, master)
        put(batch.params[i], rounded)
        if master is not None and rest is not None:
            put(master, rest)
    if companion is not None and not has_companion:
        assert task.average_rate is not None
        rate = task.average_rate.to(companion.device, companion.dtype)
        now = read_param(batch.params[i], master).to(companion.dtype)
        put(companion, companion + (now - companion) * rate)


def number_of(t: torch.Tensor, i: int) -> torch.Tensor:
    """Parameter i's number, from a tensor with one per parameter or one for all."""
    return t.reshape(()) if t.numel() == 1 else t[i]


def sound(moments: Tensors) -> torch.Tensor:
    """A mask of the elements with finite moments; blocks cannot store others."""
    return torch.stack([m.isfinite() for m in moments]).all(0)


def sound_only(moments: Tensors) -> Tensors:
    """Reset moments that are not finite."""
    kept = sound(moments)
    return [torch.where(kept, m, 0.0) for m in moments]


def read_param(p: torch.Tensor, master: torch.Tensor | None) -> torch.Tensor:
    """The parameter in the dtype of the arithmetic."""
    if master is None:
        return p
    if master.is_floating_point():
        return master
    of_remainder = 16 if master.dtype == torch.int16 else 8
    bits = (p.view(torch.int16).int() << of_remainder) + master.int()
    return (bits << (16 - of_remainder)).view(torch.float32)


def split_param(
    value: torch.Tensor, dtype: torch.dtype, master: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A computed parameter as it is stored: rounded to dtype, and its master or remainder."""
    if master is None or master.is_floating_point():
        return value.to(dtype), value
    bits = torch.where(value.isnan(), torch.nan, value).view(torch.int32)
    if master.dtype == torch.int8:
        bits = (
            bits + 0x7F + ((bits >> 8) & 1)
        )  # to the nearest float of 24 bits, or to the even one
        low = (bits << 16) >> 24  # with its sign
        high = ((bits >> 8) - low) >> 8
        return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int8)
    low = (bits << 16) >> 16  # with its sign
    high = (bits - low) >> 16
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)
