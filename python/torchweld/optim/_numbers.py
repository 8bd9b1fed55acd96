"""The numbers of optimizers: what settings may be, by their names, and what GradScaler sets."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchweld import checks, state
from torchweld.errors import ArgumentError

_RATE = ("a finite number >= 0", lambda value: value >= 0)
_ANY = ("a finite number", lambda value: True)
_SHARE = ("a number in [0, 1)", lambda value: 0 <= value < 1)
_SHARES = ("a tuple of numbers in [0, 1)", _SHARE[1])
_ACCEPTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("lr", "momentum", "weight_decay", "trust_coefficient", "alpha"), _RATE),
    **dict.fromkeys(("dampening", "r", "weight_lr_power", "decay_rate"), _ANY),
    **dict.fromkeys(("beta1", "coeff_beta", "ema_decay"), _SHARE),
    "betas": _SHARES,
    "eps": ("finite numbers >= 0", _RATE[1]),
    "factor_threshold": _RATE,
    "clip_threshold": ("a finite number > 0", lambda value: value > 0),
    "beta2_decay": ("a finite number <= 0", lambda value: value <= 0),
    "d": ("a finite number >= 1", lambda value: value >= 1),
}
_PAIRS = ("trust_clip", "factor_clip")


def check_numbers(function: str, settings: Mapping[str, Any], told: str = "") -> None:
    """Check the settings that are numbers; None stands for an option that is not used.

    `told` ends the error's text: what torch says of the same number.
    """
    for name, (accepted, fits) in _ACCEPTED.items():
        value, accepted = settings.get(name), accepted + told
        several = isinstance(value, (tuple, list)) and name in ("betas", "eps")
        if name == "betas" and value is not None and not several:
            raise ArgumentError(function, name, repr(value), accepted)
        for each in value if several else (value,):  # type: ignore[union-attr]
            number = _read(function, name, each, told)
            if number is not None and not (_is_finite(number) and fits(number)):
                raise ArgumentError(function, name, repr(value), accepted)
    for name in _PAIRS:
        if (clip := settings.get(name)) is not None:
            fits_pair = isinstance(clip, (tuple, list)) and len(clip) == 2
            fits_pair = fits_pair and all(isinstance(value, checks.NUMBER) for value in clip)
            fits_pair = fits_pair and 0 <= clip[0] <= clip[1] and math.isfinite(clip[0])
            checks.fits(function, name, clip, fits_pair, "two numbers, 0 <= least <= largest")


@contextlib.contextmanager
def checking_numbers(function: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Check after torch has; an error of torch's about a number becomes ours, with its text."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        if not isinstance(error, ArgumentError):
            check_numbers(function, settings, f" ({error})")
        raise
    check_numbers(function, settings)


def _read(function: str, name: str, value: Any, told: str) -> Any:
    """The number of a tensor; None where Python may not read it."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() != 1:
        raise ArgumentError(function, name, f"of {list(value.shape)}", f"one number{told}")
    return value.item() if state.can_read(value) else None


def _is_finite(value: Any) -> bool:
    return isinstance(value, checks.NUMBER) and math.isfinite(value)


def read_scaler_number(optimizer: torch.optim.Optimizer, name: str) -> torch.Tensor | None:
    """Read a number that GradScaler has set on an optimizer: grad_scale or found_inf.

    If no parameter has a gradient, GradScaler sets the number 0 instead of a tensor.
    """
    value = getattr(optimizer, name, None)
    if value is None or (isinstance(value, torch.Tensor) and value.ndim == 0):
        return value
    if not isinstance(value, torch.Tensor):
        return torch.tensor(float(value), dtype=torch.float32, device="cpu")
    if value.numel() != 1:
        raise ArgumentError(type(optimizer).__name__, name, f"of {list(value.shape)}", "one number")
    return value.reshape(())
