"""Losses of few logits on a CPU: torch's ops are as exact, and take a part of the time.

Each function returns None where the whole path serves: it also names arguments that torch refuses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from torchweld import checks
from torchweld.dispatch import choice
from torchweld.dispatch.alike import PLAIN, is_ordinary
from torchweld.registry import why_not_now

# torch is faster with fewer logits: thresholds for given logits and for a linear layer's logits.
_GIVEN, _LINEAR = 2**14, 2**18
_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError)
_FLOATS = (torch.float32, torch.float64)


def asks_no_more(z_loss: Any, options: Sequence[Any], *flags: Any) -> bool:
    """Whether these options of ours have their defaults."""
    plain = not isinstance(z_loss, bool) and isinstance(z_loss, checks.NUMBER) and z_loss == 0
    given = [option for option in options if option is not None]
    return plain and not given and not [flag for flag in flags if flag is not False]


def cross_entropy(
    input: Any, target: Any, weight: Any, ignore_index: Any, reduction: Any, label_smoothing: Any
) -> torch.Tensor | None:
    """torch's loss of given logits."""
    if not (_are_plain(input, weight) and input.numel() < _GIVEN):
        return None
    return _find_loss(input, target, weight, ignore_index, reduction, label_smoothing)


def linear_cross_entropy(
    input: Any, linear_weight: Any, bias: Any, target: Any, weight: Any, *how: Any
) -> torch.Tensor | None:
    """torch's loss of a linear layer's logits."""
    if not (_are_plain(input, linear_weight, bias, weight) and _has_few(input, linear_weight)):
        return None
    leading = input.shape[:-1]
    if not isinstance(target, torch.Tensor) or target.shape != leading:
        return None
    try:
        logits = functional.linear(input, linear_weight, bias)
    except _REFUSALS:
        return None
    loss = _find_loss(logits.view(-1, logits.shape[-1]), target.reshape(-1), weight, *how)
    return loss if loss is None or loss.ndim == 0 else loss.view(leading)


def linear_logprobs(
    input: Any, linear_weight: Any, bias: Any, target: Any, ignore_index: Any
) -> torch.Tensor | None:
    """The log-probabilities of classes [*], or [*, K]."""
    if not (_are_plain(input, linear_weight, bias) and _has_few(input, linear_weight)):
        return None
    if not _are_classes(target, ignore_index):
        return None
    one = target.shape == input.shape[:-1]
    if not one and target.shape[:-1] != input.shape[:-1]:
        return None
    try:
        logprobs = functional.linear(input, linear_weight, bias).log_softmax(-1)
        return logprobs.gather(-1, target[..., None] if one else target).view(target.shape)
    except _REFUSALS:
        return None


def _are_plain(*tensors: Any) -> bool:
    """Whether torch's ops may serve these tensors: on a CPU, of one dtype that torch sums in."""
    if choice.forced is not None or torch.compiler.is_compiling() or not is_ordinary():
        return False
    if why_not_now() is not None or checks.autocasts("cpu"):
        return False
    x = tensors[0]
    for t in tensors:
        if t is None:
            continue
        if type(t) not in PLAIN or not t.is_cpu or t.dtype is not x.dtype:
            return False
        if t.layout is not torch.strided or t.is_nested:
            return False
    return x.dtype in _FLOATS and x.ndim > 0


def _has_few(input: torch.Tensor, weight: torch.Tensor) -> bool:
    return weight.ndim == 2 and math.prod(input.shape[:-1]) * weight.shape[0] < _LINEAR


def _are_classes(target: Any, ignore_index: Any) -> bool:
    """Whether all rows have a class: the gradient of one that is ignored is 0 even for NaN."""
    return (
        type(target) is torch.Tensor
        and target.dtype is torch.int64
        and type(ignore_index) is int
        and not bool((target == ignore_index).any())
    )


def _find_loss(
    logits: torch.Tensor,
    target: Any,
    weight: torch.Tensor | None,
    ignore_index: Any,
    reduction: Any,
    label_smoothing: Any,
) -> torch.Tensor | None:
    if not _are_classes(target, ignore_index) or isinstance(label_smoothing, bool):
        return None
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        return None
    how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    try:
        return functional.cross_entropy(logits, target, weight, reduction=reduction, **how)
    except _REFUSALS:
        return None
