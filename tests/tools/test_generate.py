"""Code that is written at run time can be read."""

from __future__ import annotations

import traceback

import pytest
import torch

import torchweld
from torchweld import functional


@pytest.mark.parametrize("needs_gradient", [False, True])
def test_explain_shows_the_code_that_serves_a_call(needs_gradient: bool) -> None:
    x = torch.randn(3, 40, requires_grad=needs_gradient)
    y = torch.randn(3, 40, dtype=torch.float64)
    functional.rms_norm(x, (40,))
    shown = torchweld.explain(functional.rms_norm, x, (40,), code=True)
    for words in ("def rms_norm(input", "check(a0)", "def run(a0, a1, a2, a3)"):
        assert words in shown.code
    assert ("def backward(_ctx, grad_y)" in shown.code) is needs_gradient
    assert shown.code in str(shown)
    assert torchweld.explain(functional.rms_norm, x, (40,)).code == ""
    unlike = torchweld.explain(functional.rms_norm, y, (40,), code=True)
    assert "def rms_norm(input" in unlike.code
    assert "def run(" not in unlike.code
    assert "No call like this one has run" in unlike.code


def test_a_traceback_shows_generated_lines() -> None:
    def fail(*_: object) -> None:
        raise ValueError("planted")

    node = torchweld.registry.OPS["rms_norm"].kernels["cpu"].ready_function
    with pytest.raises(AttributeError) as info:
        node.forward(fail, fail, fail, fail)
    assert "_ready.rest" in "".join(traceback.format_exception(info.value))
