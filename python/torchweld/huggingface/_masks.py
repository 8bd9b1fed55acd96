"""The masks that models of transformers hand to `attention`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_overlay,
)

from torchweld.errors import ArgumentError

NAME = "torchweld_sparse"
PADDING = 0  # no document has this number
_ALL_OF = and_masks(causal_mask_function).__code__
_PACKED = packed_sequence_mask_function(torch.zeros(1, 1)).__code__
_PLAIN = [causal_mask_function.__code__, sliding_window_overlay(1).__code__]
_REMAPPED = None
# Not in older releases:
if remap := getattr(masking_utils, "remap_positions_for_packed_sequence", None):
    _REMAPPED = remap(causal_mask_function, torch.zeros(1, 1)).__code__
if bidirectional := getattr(masking_utils, "bidirectional_mask_function", None):
    _PLAIN.append(bidirectional.__code__)
if window := getattr(masking_utils, "sliding_window_bidirectional_overlay", None):
    _PLAIN.append(window(1).__code__)


def mask(
    kv_length: int,
    attention_mask: Any = None,
    mask_function: Callable[..., Any] = causal_mask_function,
    **kwargs: Any,
) -> Any:
    """The mask of the keys in a pass over whole sequences, and sdpa's mask in other passes.

    It is [batch, 1, 1, keys], since attentions index and combine their mask with four dimensions.
    Packed sequences get the numbers of their documents instead, int64 of the same shape.
    """
    # Older releases pass positions in place of the queries' length.
    q_length = kwargs["q_length"] if "q_length" in kwargs else len(kwargs["cache_position"])
    if q_length != kv_length:
        kwargs |= {"attention_mask": attention_mask, "mask_function": mask_function}
        return sdpa_mask(kv_length=kv_length, **kwargs)
    others = [part for part in _split(mask_function) if not _is_plain(part)]
    packed = [part for part in others if getattr(part, "__code__", None) is _PACKED]
    if len(others) > 1 or packed != others:
        actual = "one of prefixes, images or chunks"
        accepted = (
            "causal and bidirectional masks, sliding windows and packed sequences; put others "
            "into the layout by BlockLayout.from_mask_fn"
        )
        raise ArgumentError(NAME, "mask_function", actual, accepted)
    keys = None if attention_mask is None else attention_mask[:, None, None, -kv_length:].bool()
    if not packed:
        return keys
    documents = inspect.getclosurevars(packed[0]).nonlocals["packed_sequence_mask"].long()
    batch = len(documents) if keys is None else len(keys)
    documents = (documents - documents.min() + 1 + PADDING)[:, None, None].expand(batch, -1, -1, -1)
    return documents if keys is None else documents.where(keys, PADDING)


def _split(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Split an intersection into its mask functions.

    A remapped function counts positions within documents, which changes neither a causal mask nor
    a window.
    """
    code = getattr(function, "__code__", None)
    if code is None or code not in (_ALL_OF, _REMAPPED):
        return [function]
    inner = inspect.getclosurevars(function).nonlocals
    if code is _ALL_OF:
        return [each for part in inner["mask_functions"] for each in _split(part)]
    return _split(inner["mask_function"])


def _is_plain(function: Callable[..., Any]) -> bool:
    """Whether a mask function says no more than `is_causal`, or is the model's sliding window.

    A layout replaces the window. transformers makes a new function for each call, with the same
    code object.
    """
    return getattr(function, "__code__", None) in _PLAIN
