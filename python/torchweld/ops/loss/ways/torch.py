"""Losses of few logits on a CPU: torch's ops are as exact, and take a part of the time.

Where one of them refuses a call, `whole` serves it: it names the argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from torchweld import checks, state
from torchweld.dispatch import choice
from torchweld.ops.gemm import gemm
from torchweld.ops.loss.arguments import FLOATS, Settings

_REFUSALS = (RuntimeError, IndexError)
# What torch's cross_entropy calls, and its numbers of reductions.
_loss: Any = torch._C._nn.cross_entropy_loss
_REDUCTIONS = ("none", "mean", "sum")
# Up to so many targets are searched faster in a list.
_LISTED = 64
Run = Callable[..., Any]


def find_span(settings: Settings, x: torch.Tensor, *limits: int) -> dict[str, Any]:
    """The numbers of x's elements, all of its rows', on one side of each limit of logits."""
    span: dict[str, Any] = {}
    if state.is_watched():  # a graph's sizes may be unknown
        return span
    rows = math.prod(settings.leading)
    for few in limits:  # the lowest first
        limit = -(-few // max(settings.classes, 1)) * (x.numel() // max(rows, 1))
        if rows * settings.classes < few:
            return span | {"below": limit}
        span = {"least": limit}
    return span


def may_serve(few: int, settings: Settings, *tensors: Any) -> bool:
    """Whether torch's ops may serve: few logits on a CPU, and all tensors of one dtype."""
    if choice.forced is not None or settings.several is None:
        return False
    if state.is_watched() or checks.autocasts("cpu"):
        return False
    given = [t for t in tensors if t is not None]
    if any(type(t) not in state.PLAIN or not t.is_cpu for t in given):
        return False
    dtypes = {t.dtype for t in given} - {torch.int64}  # of 16 bits are cast to float32
    is_few = 0 < math.prod(settings.leading) * settings.classes < few
    return is_few and len(dtypes) == 1 and dtypes <= {*FLOATS}


def cross_entropy(settings: Settings, trains: bool, whole: Run) -> Run:
    """torch's loss of given logits; `whole` serves what it refuses.

    Not with ignored rows, if a gradient is needed: torch's is NaN where such a row is.
    """
    numbers = (_REDUCTIONS.index(settings.reduction), settings.ignored, settings.label_smoothing)
    is_narrow = settings.logits_dtype.itemsize == 2  # torch would round the rows' losses
    return partial(_compute, trains, is_narrow, numbers, whole)


def _compute(
    trains: bool,
    is_narrow: bool,
    numbers: tuple[int, int, float],
    whole: Run,
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    *others: None,
) -> Any:
    try:
        is_short = target.ndim == 1 and target.numel() <= _LISTED
        if not (trains and numbers[1] in (target.tolist() if is_short else target)):
            if not is_narrow:
                return _loss(input, target, weight, *numbers)
            wide = None if weight is None else weight.float()
            return _loss(input.float(), target, wide, *numbers).to(input.dtype)
    except _REFUSALS:
        pass
    return whole(input, target, weight, *others)


def linear_cross_entropy(settings: Settings, trains: bool, layer: Sequence[Any], whole: Run) -> Run:
    """torch's loss of a linear layer's logits."""
    find, is_flat = cross_entropy(settings, trains, _refuse), len(settings.leading) == 1
    return partial(_compute_layer, gemm.find_linear(*layer), find, is_flat, settings.classes, whole)


def _refuse(*_: Any) -> None:
    """The result of a call that torch's op refused."""


def _compute_layer(
    linear: Run, find: Run, is_flat: bool, classes: int, whole: Run, *given: Any
) -> Any:
    *layer, target, weight, _, _ = given
    logits, picked = linear(*layer), target
    if not is_flat:
        logits, picked = logits.view(-1, classes), target.reshape(-1)
    made = find(logits, picked, weight)
    if made is None:
        return whole(*given)
    return made.view(target.shape) if made.ndim else made


def linear_logprobs(settings: Settings, layer: Sequence[Any], whole: Run) -> Run:
    """The log-probabilities of classes [*], or [*, K]."""
    return logprobs(settings, whole, gemm.find_linear(*layer))


def logprobs(settings: Settings, whole: Run, linear: Run = lambda logits: logits) -> Run:
    """The same of given logits, or of those of a linear layer."""
    return partial(_find_logprobs, linear, whole) if settings.ignored < 0 else whole


def _find_logprobs(linear: Run, whole: Run, *given: Any) -> Any:
    *layer, target, _ = given
    try:
        logits = linear(*layer)
        logprobs = (logits.float() if logits.itemsize == 2 else logits).log_softmax(-1)
        if target.ndim == logprobs.ndim:
            return logprobs.gather(-1, target)
        return logprobs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    except _REFUSALS:  # of a target that is ignored
        return whole(*given)
