"""Losses of few logits on a CPU: torch's ops are as exact, and take a part of the time.

Where one of them refuses a call, `whole` serves it: it names the argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from torchweld import checks
from torchweld.dispatch import choice
from torchweld.dispatch.alike import PLAIN, is_ordinary
from torchweld.ops.loss.arguments import Settings
from torchweld.registry import why_not_now

_REFUSALS = (RuntimeError, IndexError)
_FLOATS = (torch.float32, torch.float64)
# What torch's cross_entropy calls, and its numbers of reductions.
_loss: Any = torch._C._nn.cross_entropy_loss
_REDUCTIONS = ("none", "mean", "sum")
# Up to so many targets are searched faster in a list.
_LISTED = 64
Run = Callable[..., Any]


def may_serve(few: int, settings: Settings, *tensors: Any) -> bool:
    """Whether torch's ops may serve: few logits on a CPU, of one dtype that torch sums in."""
    if choice.forced is not None or torch.compiler.is_compiling() or not is_ordinary():
        return False
    if why_not_now() is not None or checks.autocasts("cpu") or settings.several is None:
        return False
    given = [t for t in tensors if t is not None]
    if any(type(t) not in PLAIN or not t.is_cpu for t in given):
        return False
    dtypes = {t.dtype for t in given} - {torch.int64}
    is_few = 0 < math.prod(settings.leading) * settings.classes < few
    return is_few and len(dtypes) == 1 and dtypes <= {*_FLOATS}


def cross_entropy(settings: Settings, trains: bool, whole: Run) -> Run:
    """torch's loss of given logits.

    Not with ignored rows, if a gradient is needed: torch's is NaN where such a row is.
    """
    ignored, smoothing = settings.ignored, settings.label_smoothing
    reduction = _REDUCTIONS.index(settings.reduction)
    is_short = len(settings.leading) == 1 and settings.leading[0] <= _LISTED

    def run(
        input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, *others: None
    ) -> Any:
        if not (trains and ignored in (target.tolist() if is_short else target)):
            try:
                return _loss(input, target, weight, reduction, ignored, smoothing)
            except _REFUSALS:
                pass
        return whole(input, target, weight, *others)

    return run


def linear_cross_entropy(settings: Settings, trains: bool, whole: Run) -> Run:
    """torch's loss of a linear layer's logits."""
    find = cross_entropy(settings, trains, lambda *_: None)
    is_flat = len(settings.leading) == 1

    def run(*given: Any) -> Any:
        *layer, target, weight, _, _ = given
        logits, picked = linear(*layer), target
        if not is_flat:
            logits, picked = logits.view(-1, settings.classes), target.reshape(-1)
        made = find(logits, picked, weight)
        if made is None:
            return whole(*given)
        return made.view(settings.leading) if made.ndim else made

    return run


def linear_logprobs(settings: Settings, whole: Run) -> Run:
    """The log-probabilities of classes [*], or [*, K]."""

    def run(*given: Any) -> Any:
        *layer, target, _ = given
        try:
            logprobs = linear(*layer).log_softmax(-1)
            if target.ndim == logprobs.ndim:
                return logprobs.gather(-1, target)
            return logprobs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
        except _REFUSALS:  # of a target that is ignored
            return whole(*given)

    return run if settings.ignored < 0 else whole
