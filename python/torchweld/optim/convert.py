"""Conversion of states from and to bitsandbytes' 8-bit optimizers, to continue a run.

    optimizer.load_state_dict(convert.from_bitsandbytes(saved, optimizer))
    theirs.load_state_dict(convert.to_bitsandbytes(optimizer))

bitsandbytes' blocks are 256 consecutive elements of a tensor; here blocks lie within rows. If rows
are multiples of 256 elements, the blocks are the same and no value is rounded. Otherwise values are
quantised again, with a warning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.ops.quantize_8bit import (
    BLOCK,
    MAPS,
    dequantize_8bit,
    keep_positive,
    quantize_8bit,
    scales_shape,
)
from torchweld.optim._base import FusedOptimizer
from torchweld.optim._codecs import ABSMAX, CODES, Moment, State
from torchweld.optim._shards import is_dtensor

# The key under which bitsandbytes hides entries from FSDP.
_WRAPPED = "__bnb_optimizer_quant_state__"
_SETTINGS = ("lr", "betas", "eps", "weight_decay")


def from_bitsandbytes(state_dict: State, optimizer: FusedOptimizer) -> State:
    """Convert a bitsandbytes optimizer's state for `optimizer`, which has the same rule.

    Codes become what `optimizer` stores: codes or floating-point numbers. Raises ArgumentError if
    the state does not fit the optimizer's parameters.
    """
    states, again = {}, 0
    for p, key, moments in _list_states(optimizer, state_dict):
        theirs = dict(state_dict["state"][key])
        theirs |= theirs.pop(_WRAPPED, {})
        step = torch.tensor(float(theirs["step"]), dtype=torch.float32, device="cpu")
        state: State = {"step": step}
        for number, (name, moment) in enumerate(moments.items(), 1):
            again += _read(state, name, moment, p, theirs, number)
        states[key] = state
    return _finish(states, state_dict, again)


def to_bitsandbytes(optimizer: FusedOptimizer) -> State:
    """Convert this optimizer's state for a bitsandbytes optimizer with the same rule.

    Moments that are not codes stay unchanged, as bitsandbytes' 32-bit states. It has no masters:
    parameters continue from their rounded values.
    """
    saved = optimizer.state_dict()
    states, again = {}, 0
    for p, key, moments in _list_states(optimizer, saved):
        if len(moments) > 2 or is_dtensor(p):
            actual = "sharded" if is_dtensor(p) else f"with the moments {', '.join(moments)}"
            accepted = "a whole tensor with at most two moments"
            raise ArgumentError("to_bitsandbytes", "a parameter", actual, accepted)
        state: State = {"step": int(saved["state"][key]["step"])}
        for number, (name, moment) in enumerate(moments.items(), 1):
            again += _write(state, number, moment, p, saved["state"][key], name)
        states[key] = state
    return _finish(states, saved, again)


def _list_states(
    optimizer: FusedOptimizer, saved: State
) -> Iterator[tuple[torch.Tensor, Any, Mapping[str, Moment]]]:
    """Each parameter with a saved state, the state's key, and the parameter's moments."""
    for group, of_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for p, key in zip(group["params"], of_group["params"], strict=True):
            if key in saved["state"]:
                yield p, key, optimizer._moments(group, p)


def _same_blocks(p: torch.Tensor) -> bool:
    rows, _ = scales_shape(p.shape)
    return rows == 1 or (p.numel() // rows) % BLOCK == 0


def _read(
    state: State, name: str, moment: Moment, p: torch.Tensor, theirs: State, number: int
) -> bool:
    """Write a moment into `state`; return whether it was quantised again."""
    codes = theirs.get(f"state{number}")
    if not isinstance(codes, torch.Tensor) or codes.shape != p.shape:
        actual = "nothing" if codes is None else f"of shape {list(codes.shape)}"
        raise ArgumentError("from_bitsandbytes", f"state{number}", actual, f"{list(p.shape)}")
    if codes.dtype != torch.uint8:
        state[name] = codes
        return False
    absmax, values = theirs[f"absmax{number}"], theirs[f"qmap{number}"].float()
    if absmax.numel() != math.ceil(p.numel() / BLOCK):
        actual, accepted = f"{absmax.numel()} numbers", f"one for {BLOCK} elements"
        raise ArgumentError("from_bitsandbytes", f"absmax{number}", actual, accepted)
    if _same_blocks(p) and torch.equal(values.cpu(), MAPS[moment.signed]):
        state[name + CODES], state[name + ABSMAX] = codes, absmax.view(scales_shape(p.shape))
        return False
    scales = absmax.repeat_interleave(BLOCK)[: p.numel()].view(p.shape)
    state[name] = values[codes.long()] * scales
    return True


def _write(
    state: State, number: int, moment: Moment, p: torch.Tensor, kept: State, name: str
) -> bool:
    """Write a moment into `state`; return whether it was quantised again."""
    if name in kept:
        state[f"state{number}"] = kept[name].float()
        return False
    codes, absmax = kept[name + CODES], kept[name + ABSMAX]
    same = _same_blocks(p)
    if not same:
        values = dequantize_8bit(codes, absmax, signed=moment.signed)
        flat, absmax = quantize_8bit(values.reshape(1, -1), signed=moment.signed)
        if not moment.signed:
            flat = keep_positive(flat, values.reshape(1, -1))
        codes = flat.view(p.shape)
    state[f"state{number}"], state[f"absmax{number}"] = codes, absmax.flatten()
    state[f"qmap{number}"] = MAPS[moment.signed].to(codes.device)
    return not same


def _finish(states: State, saved: State, again: int) -> State:
    """The converted state, with a warning about moments that were quantised again."""
    if again:
        warnings.warn(
            f"{again} moments were rounded to 8 bits again: the rows of their parameters are not"
            f" multiples of {BLOCK} elements, so blocks differ from bitsandbytes'",
            stacklevel=3,
        )
    kept = ("params", *_SETTINGS)
    groups = [{k: group[k] for k in kept if k in group} for group in saved["param_groups"]]
    return {"state": states, "param_groups": groups}
