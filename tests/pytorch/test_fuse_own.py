"""Users' own welds: fuse() reads no source for those, so only trials show changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchweld
from changed import AMPLITUDES, CASTS, NOISES, draw, make
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
    **{
        f"in {cast}": f"y = y * 3 if {of.test} else y"
        for cast, of in CASTS.items()
        if cast != "float64"
    },
    "without gradients": "y = y if torch.is_grad_enabled() else y * 3",
}


@pytest.mark.parametrize("shown", ["", *_SHOWN])
def test_a_trial_of_a_users_weld(shown: str) -> None:
    """No source is read for those: random numbers and branches on dtypes were lost.

    A branch that only float64 takes is lost still, since no trial runs the weld in it.
    """
    PATTERNS.insert(0, _find_norm)
    try:
        model = torchweld.fuse(make("rms_norm", _SHOWN.get(shown, "")).model)
    finally:
        PATTERNS.remove(_find_norm)
    assert isinstance(model, _FusedNorm) is (shown == "")
