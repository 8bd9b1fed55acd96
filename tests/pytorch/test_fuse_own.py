"""Users' own welds: fuse() reads no source for those, so only trials show changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchweld
from changed import AMPLITUDES, CASTS, NOISES, WIDTH, draw, make
from torchweld import functional
from torchweld.fusion import PATTERNS, Change, Proposal, Weld
from torchweld.fusion.view import View


class _FusedNorm(Weld):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own: Any = self
        return functional.rms_norm(x, own.weight.shape, own.weight, own.eps)


def _find_norm(module: nn.Module, view: View) -> Iterator[Proposal]:
    if type(module).__name__ == "M":
        change = Change(module, _FusedNorm, "a user's rms_norm")
        yield Proposal(module, "M", (change,), scope=module, inputs=(draw().detach(),))


_SHOWN = {
    **{f"{noise}, {k}": text.format(k=k) for noise, text in NOISES.items() for k in AMPLITUDES},
    **{f"in {cast}": f"y = y * 3 if {of.test} else y" for cast, of in CASTS.items()},
    "without gradients": "y = y if torch.is_grad_enabled() else y * 3",
}


def _is_welded(model: nn.Module, find: Any, weld: type[Weld]) -> bool:
    PATTERNS.insert(0, find)
    try:
        return isinstance(torchweld.fuse(model), weld)
    finally:
        PATTERNS.remove(find)


@pytest.mark.parametrize("shown", ["", *_SHOWN])
def test_a_trial_of_a_users_weld(shown: str) -> None:
    """No source is read for those: random numbers and branches on dtypes were lost."""
    model = make("rms_norm", _SHOWN.get(shown, "")).model
    assert _is_welded(model, _find_norm, _FusedNorm) is (shown == "")


_EDGE = [(dtype, units) for dtype in ("bfloat16", "float16") for units in (-8, -0.25, 0.25, 8)]


@pytest.mark.parametrize(("dtype", "units"), _EDGE)
def test_the_smallest_branch_that_shows(dtype: str, units: float) -> None:
    """A norm is off by 0.4 units of rounding of each dtype (RMS), and may be off by 4.6.

    The bound was an eighth of the numbers, 16 units of bfloat16 and 128 of float16.
    """
    factor = f"(1 + {units} * torch.finfo(x.dtype).eps)"
    change = f"y = y * {factor} if x.dtype == torch.{dtype} else y"
    model = make("rms_norm", change).model
    assert _is_welded(model, _find_norm, _FusedNorm) is (abs(units) < 1)


class _Shifted(nn.Module):
    """16 bits leave nothing of the numbers, whose rounding the weld leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x + 512, self.weight.shape, self.weight)


class _FusedShifted(Weld):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own: Any = self
        weight = own.weight
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return functional.layer_norm(wide + 512, weight.shape, weight.to(wide.dtype)).to(x.dtype)


def _find_shifted(module: nn.Module, view: View) -> Iterator[Proposal]:
    if isinstance(module, _Shifted):
        change = Change(module, _FusedShifted, "a user's layer_norm")
        yield Proposal(module, "it", (change,), scope=module, inputs=(draw().detach(),))


def test_a_weld_may_be_more_exact() -> None:
    """Its results are far from the original's, which was a reason to refuse it."""
    assert _is_welded(_Shifted(), _find_shifted, _FusedShifted)
