"""Checks of the arguments of losses, and the rows that losses make of them."""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch.dtensor import is_dtensor
from torchweld.dispatch.library import LIBRARY
from torchweld.errors import ArgumentError
from torchweld.ops.loss import rows
from torchweld.ops.loss.rows import How

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDICES = (torch.int64, torch.int32, torch.uint8)
# Whether a target out of range raises an error on a GPU too: the check waits for the GPU.
_CHECKS_ON_GPU = os.environ.get("TORCHWELD_CHECK_TARGETS", "0") not in ("", "0")


def check_tensor(
    function: str, name: str, value: Any, dtypes: tuple[torch.dtype, ...] = FLOATS, beside: str = ""
) -> None:
    """Check for a dense tensor of one of these dtypes, whole on this device."""
    checks.dense(function, name, value, dtypes, beside)
    if is_dtensor(value):
        accepted = "a plain tensor: gather it with full_tensor()"
        raise ArgumentError(function, name, "a DTensor", accepted)


def check_number(function: str, name: str, value: Any, accepted: str, fits: bool) -> None:
    """Raise ArgumentError unless the value is a finite number that fits."""
    if isinstance(value, bool) or not isinstance(value, checks.NUMBER) or not fits:
        raise ArgumentError(function, name, repr(value), accepted)


def check_positive(function: str, name: str, value: Any) -> None:
    """Check for a positive finite number."""
    fits = isinstance(value, checks.NUMBER) and 0 < value < math.inf
    check_number(function, name, value, "a number > 0", fits)


def check_choice(function: str, name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    """Check for one of several values."""
    if not any(value is one or (isinstance(one, str) and value == one) for one in accepted):
        raise ArgumentError(function, name, repr(value), " or ".join(map(repr, accepted)))


def check_indices(function: str, name: str, value: Any, device: torch.device) -> None:
    """Check for indices of classes on this device."""
    check_tensor(function, name, value, INDICES)
    if value.device != device:
        raise ArgumentError(function, name, f"on {value.device}", f"the device of input, {device}")


def _mark_ignored(
    target: torch.Tensor, classes: int, ignore_index: int, function: str
) -> torch.Tensor:
    target = target.to(torch.int64)
    ignored = target == ignore_index
    bad = ((target < 0) | (target >= classes)) & ~ignored
    if (target.device.type == "cpu" or _CHECKS_ON_GPU) and bool(bad.any()):
        first = bad.nonzero()[0].tolist()
        place = ", ".join(map(str, first))
        raise ArgumentError(
            function,
            f"target[{place}]" if first else "target",
            target[tuple(first)].item(),
            f"0 to {classes - 1}, or ignore_index, {ignore_index}",
        )
    # Kernels make a row NaN for a target that is neither -1 nor a class.
    return torch.where(ignored, -1, torch.where(bad, classes, target))


LIBRARY.define(
    "mark_ignored(Tensor target, SymInt classes, int ignore_index, str function) -> Tensor"
)
LIBRARY.impl("mark_ignored", _mark_ignored, "CompositeExplicitAutograd")
torch.library.register_fake(
    "torchweld::mark_ignored",
    lambda target, *_: torch.empty_like(
        target, dtype=torch.int64, memory_format=torch.contiguous_format
    ),
    lib=LIBRARY,
)


def _mark_batch(info: Any, at: tuple[Any, ...], target: torch.Tensor, *others: Any) -> Any:
    """vmap's rule: an error names the place in the whole batch."""
    marked = torch.ops.torchweld.mark_ignored.default(target.movedim(at[0], 0), *others)
    return marked, 0


torch.library.register_vmap("torchweld::mark_ignored", _mark_batch, lib=LIBRARY)


def mark_ignored(
    function: str, target: torch.Tensor, classes: int, ignore_index: int
) -> torch.Tensor:
    """Replace ignored targets by -1. An error names the first target that is not a class.

    On a GPU a target that is not a class makes its row NaN instead, without waiting for the GPU.
    """
    if checks.can_read(target):
        return _mark_ignored(target, classes, ignore_index, function)
    marked = torch.ops.torchweld.mark_ignored.default(target, classes, ignore_index, function)
    return marked  # type: ignore[no-any-return]


def make_how(
    function: str,
    like: torch.Tensor,
    classes: int,
    leading: tuple[int, ...],
    *,
    weight: torch.Tensor | None = None,
    probabilities: torch.Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    temperature: float | torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> How:
    """Make the How of rows with these leading sizes; check its arguments."""
    of_logits = dtype or like.dtype
    kind = rows.accumulate_type(of_logits)
    scale = 1.0 if logit_scale is None else logit_scale
    fits = isinstance(scale, checks.NUMBER) and math.isfinite(scale) and scale != 0
    check_number(function, "logit_scale", scale, "a finite number other than 0", fits)
    if softcap is not None:
        check_positive(function, "softcap", softcap)
    inverse = None
    share = 1.0
    if isinstance(temperature, torch.Tensor):
        check_tensor(function, "temperature", temperature)
        checks.like(function, "temperature", temperature, like, "input")
        if temperature.shape != leading:
            accepted = f"a number, or a tensor of the rows' shape, {list(leading)}"
            actual = f"of shape {list(temperature.shape)}"
            raise ArgumentError(function, "temperature", actual, accepted)
        _refuse_gradient(function, "temperature", temperature)
        inverse = temperature.detach().reshape(-1).to(kind).reciprocal()
    elif temperature is not None:
        check_positive(function, "temperature", temperature)
        share = float(temperature)
    sum_of_weights = None
    if weight is not None:
        check_tensor(function, "weight", weight)
        checks.like(function, "weight", weight, like, "input")
        checks.shaped(function, "weight", weight, (classes,), "one weight a class")
        _refuse_gradient(function, "weight", weight)
        weight = weight.detach().to(kind)
        sum_of_weights = weight.sum()
    if probabilities is not None and probabilities.dtype not in (of_logits, kind):
        probabilities = probabilities.to(kind)
    # A number is folded into scale and cap: cap * tanh(scale * z / cap) / T.
    cap = 0.0 if softcap is None else softcap / share
    return How(weight, probabilities, inverse, sum_of_weights, scale / share, cap, classes, kind)


def _refuse_gradient(function: str, name: str, value: torch.Tensor) -> None:
    if value.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(function, name, "a tensor that requires grad", "one without")
