"""Checks of the arguments of losses, and the rows that losses make of them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchweld import checks, state
from torchweld.dispatch.dtensor import (
    is_dtensor,
)
from torchweld.dispatch.library import LIBRARY
from torchweld.errors import ArgumentError
from torchweld.ops.loss import rows
from torchweld.ops.loss.rows import LossTransform

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDICES = (torch.int64, torch.int32, torch.uint8)
REDUCTIONS = ("mean", "sum", "none")
# Whether a target out of range raises an error on a GPU too: the check waits for the GPU.
_CHECKS_ON_GPU = os.environ.get("TORCHWELD_CHECK_TARGETS", "0") not in ("", "0")


def check_tensor(
    function: str, name: str, value: Any, dtypes: tuple[torch.dtype, ...] = FLOATS, beside: str = ""
) -> None:
    """Check for a dense tensor of one of these dtypes, whole on this device."""
    checks.dense(function, name, value, dtypes, beside)
    _refuse_dtensor(function, name, value)


def check_companion(
    function: str,
    name: str,
    value: Any,
    like: torch.Tensor,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    beside: str = "",
    **shape: Any,
) -> None:
    """Check for such a tensor on the device of the input; `shape` is that of checks.companion."""
    _refuse_dtensor(function, name, value)
    checks.companion(function, name, value, dtypes, like, "input", beside=beside, **shape)


def _refuse_dtensor(function: str, name: str, value: Any) -> None:
    if is_dtensor(value):
        accepted = "a plain tensor: gather it with full_tensor()"
        raise ArgumentError(function, name, "a DTensor", accepted)


def check_number(
    function: str,
    name: str,
    value: Any,
    accepted: str = "a number > 0",
    fits: Callable[[float], bool] = lambda x: 0 < x < math.inf,
) -> None:
    """Check for a number that fits, by default a positive finite one."""
    is_number = isinstance(value, checks.NUMBER) and not isinstance(value, bool)
    if not (is_number and fits(value)):
        raise ArgumentError(function, name, repr(value), accepted)


def check_choice(function: str, name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    """Check for one of several values."""
    if not any(value is one or (isinstance(one, str) and value == one) for one in accepted):
        raise ArgumentError(function, name, repr(value), " or ".join(map(repr, accepted)))


def check_indices(function: str, name: str, value: Any, device: torch.device) -> None:
    """Check for indices of classes on this device."""
    check_tensor(function, name, value, INDICES)
    if value.device != device:
        raise ArgumentError(function, name, f"on {value.device}", f"the device of input, {device}")


def is_checked(target: torch.Tensor) -> bool:
    """Whether a target that is not a class raises an error; else its row becomes NaN."""
    return target.device.type == "cpu" or _CHECKS_ON_GPU


def _mark_ignored(
    target: torch.Tensor, classes: int, ignore_index: int, function: str
) -> torch.Tensor:
    target = target.to(torch.int64)
    ignored = target == ignore_index
    if is_checked(target):
        bad = ((target < 0) | (target >= classes)) & ~ignored
        if bool(bad.any()):
            first = bad.nonzero()[0].tolist()
            place = ", ".join(map(str, first))
            raise ArgumentError(
                function,
                f"target[{place}]" if first else "target",
                target[tuple(first)].item(),
                f"0 to {classes - 1}, or ignore_index, {ignore_index}",
            )
    else:  # kernels make a row NaN for a target that is neither -1 nor a class
        target = torch.where(target < 0, classes, target.clamp(max=classes))
    return torch.where(ignored, -1, target)


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
    if state.can_read(target):
        return _mark_ignored(target, classes, ignore_index, function)
    marked = torch.ops.torchweld.mark_ignored.default(target, classes, ignore_index, function)
    return marked  # type: ignore[no-any-return]


class Settings(NamedTuple):
    """What calls of one kind have in common: checked arguments that are not tensors."""

    function: str
    leading: tuple[int, ...]  # the sizes of the rows
    classes: int
    ignored: Any  # the target of ignored rows
    several: int | None  # targets of a row; None: probabilities
    scale: float
    softcap: float  # 0: none
    logits_dtype: torch.dtype
    kind: torch.dtype  # of the sums
    reduction: str = "none"
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def check_settings(
    function: str,
    like: torch.Tensor,
    logits_dtype: torch.dtype,
    leading: tuple[int, ...],
    classes: int,
    *,
    ignored: Any,
    several: int | None,
    weight: torch.Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    temperature: float | torch.Tensor | None = None,
) -> Settings:
    """Check what rows with these leading sizes become before a loss is made of them."""
    if several is not None and type(ignored) is not int:
        raise ArgumentError(function, "ignore_index", repr(ignored), "an integer")
    scale = 1.0 if logit_scale is None else logit_scale
    accepted = "a finite number other than 0"
    check_number(function, "logit_scale", scale, accepted, lambda x: 0 < abs(x) < math.inf)
    if softcap is not None:
        check_number(function, "softcap", softcap)
    share = 1.0
    if isinstance(temperature, torch.Tensor):
        check_companion(function, "temperature", temperature, like)
        if temperature.shape != leading:
            accepted = f"a number, or a tensor of the rows' shape, {list(leading)}"
            actual = f"of shape {list(temperature.shape)}"
            raise ArgumentError(function, "temperature", actual, accepted)
        _refuse_gradient(function, "temperature", temperature)
    elif temperature is not None:
        check_number(function, "temperature", temperature)
        share = float(temperature)
    if weight is not None:
        how: dict[str, Any] = {"shape": (classes,), "meaning": "one weight a class"}
        check_companion(function, "weight", weight, like, **how)
        _refuse_gradient(function, "weight", weight)
    # A number is folded into scale and cap: cap * tanh(scale * z / cap) / T.
    factors = (scale / share, 0.0 if softcap is None else softcap / share)
    kind = rows.accumulate_type(logits_dtype)
    return Settings(function, leading, classes, ignored, several, *factors, logits_dtype, kind)


def check_terms(
    settings: Settings,
    like: torch.Tensor,
    token_weights: torch.Tensor | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
) -> Settings:
    """Check what a loss is made of, and add it to the settings."""
    function = settings.function
    check_choice(function, "reduction", reduction, REDUCTIONS)
    check_number(function, "label_smoothing", label_smoothing, "0 to 1", lambda x: 0 <= x <= 1)
    check_number(function, "z_loss", z_loss, "a finite number", lambda x: abs(x) < math.inf)
    if token_weights is not None:
        how: dict[str, Any] = {"shape": settings.leading, "meaning": "one weight a row"}
        check_companion(function, "token_weights", token_weights, like, **how)
    return Settings(*settings[:-3], reduction, float(label_smoothing), float(z_loss))


def check_target(
    function: str,
    target: Any,
    like: torch.Tensor,
    leading: tuple[int, ...],
    shape: tuple[int, ...],
) -> int | None:
    """Check for a class of each row, or for probabilities of this shape; returns `several`."""
    if isinstance(target, torch.Tensor) and target.is_floating_point():
        how: dict[str, Any] = {"shape": shape, "meaning": "one probability a class"}
        check_companion(function, "target", target, like, **how)
        return None
    check_indices(function, "target", target, like.device)
    checks.shaped(function, "target", target, leading, "one class a row")
    return 1


def check_picked(
    function: str,
    target: Any,
    like: torch.Tensor,
    leading: tuple[int, ...],
    _: tuple[int, ...] = (),
) -> int:
    """Check for one or K classes of each row; returns how many."""
    check_indices(function, "target", target, like.device)
    if target.shape != leading and (target.ndim == 0 or target.shape[:-1] != leading):
        accepted = f"the rows' shape, {list(leading)}, or that and K"
        raise ArgumentError(function, "target", f"of shape {list(target.shape)}", accepted)
    return target.shape[-1] if target.shape != leading else 1


def read_rows(
    settings: Settings, target: torch.Tensor, weight: torch.Tensor | None, temperature: Any
) -> tuple[torch.Tensor, LossTransform]:
    """The targets as rows, and how u follows from the logits."""
    q = inverse = sum_of_weights = None
    count, kind, classes = math.prod(settings.leading), settings.kind, settings.classes
    if settings.several is None:
        q = target.reshape(count, target.shape[-1])
        q = q if q.dtype in (settings.logits_dtype, kind) else q.to(kind)
        target = q.new_empty((count, 0), dtype=torch.int64)
    else:
        marked = mark_ignored(settings.function, target, classes, settings.ignored)
        target = marked.reshape(count, settings.several)
    if isinstance(temperature, torch.Tensor):
        inverse = temperature.detach().reshape(-1).to(kind).reciprocal()
    if weight is not None:
        weight = weight.detach().to(kind)
        sum_of_weights = weight.sum()
    scaling = (settings.scale, settings.softcap)
    return target, LossTransform(sum_of_weights, weight, q, inverse, *scaling, classes, kind)


def _refuse_gradient(function: str, name: str, value: torch.Tensor) -> None:
    if value.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(function, name, "a tensor that requires grad", "one without")
