"""Warm look-ups: a call like a recent one is found, and one that differs in anything is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from test_overhead import ratio_of_times
from torch.autograd import forward_ad

import fresh
from torchweld.dispatch import op_question
from torchweld.dispatch.engine import recent
from torchweld.dispatch.engine.recent import Recent
from torchweld.registry import OPS, materialize

NORM, DROP = OPS["layer_norm"], OPS["dropout_add_layer_norm"]


def _arguments(rows: int = 32, width: int = 64, dtype: torch.dtype = torch.float32) -> list[Any]:
    x = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    weight, bias = (torch.nn.Parameter(torch.ones(width, dtype=dtype)) for _ in range(2))
    return [x, [width], weight, bias, 1e-5]


@pytest.fixture
def kept() -> Recent[str]:
    found = Recent[str]()
    found.keep(NORM, _arguments(), "cuda")
    return found


def test_a_call_with_other_values_is_found(kept: Recent[str]) -> None:
    assert kept.find(NORM, _arguments()) == "cuda"
    kept.keep(NORM, _arguments(rows=8), "triton")  # another shape displaces nothing
    assert kept.find(NORM, _arguments()) == "cuda"
    assert kept.find(NORM, _arguments(rows=8)) == "triton"


def _other(at: int, change: Callable[[Any], Any]) -> Callable[[], list[Any]]:
    def arguments() -> list[Any]:
        given = _arguments()
        given[at] = change(given[at])
        return given

    return arguments


def _beside(t: torch.Tensor) -> torch.Tensor:
    """The same values one element past an aligned place."""
    flat = torch.empty(t.numel() + 1, dtype=t.dtype)
    return flat[1:].view(t.shape).copy_(t.detach()).requires_grad_()


def _strided(t: torch.Tensor) -> torch.Tensor:
    wide = torch.empty(*t.shape[:-1], 2 * t.shape[-1])
    return wide[..., ::2].copy_(t.detach()).requires_grad_()


DIFFERENT: dict[str, Callable[[], list[Any]]] = {
    "rows": lambda: _arguments(rows=33),
    "width": lambda: _arguments(width=128),
    "the weight's size": _other(2, lambda t: torch.nn.Parameter(torch.ones(32))),
    "the input's dtype": _other(0, lambda t: t.detach().bfloat16().requires_grad_()),
    "the weight's dtype": _other(2, lambda t: torch.nn.Parameter(t.detach().bfloat16())),
    "a frozen input": _other(0, lambda t: t.detach()),
    "a frozen weight": _other(2, lambda t: torch.nn.Parameter(t.detach(), requires_grad=False)),
    "no weight": _other(2, lambda t: None),
    "no bias": _other(3, lambda t: None),
    "another device": _other(0, lambda t: t.detach().to("meta").requires_grad_()),
    "a tensor, not a parameter": _other(2, lambda t: t.detach().requires_grad_()),
    "an input beside": _other(0, _beside),
    "a weight beside": _other(2, _beside),
    "strides": _other(0, _strided),
    "the weight's strides": _other(3, _strided),
    "a value": _other(4, lambda eps: 1e-6),
    "a list": _other(1, lambda shape: [32, 2]),
    "dimensions": _other(0, lambda t: t.detach().view(4, 8, 64).requires_grad_()),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_call_that_differs_is_not_found(what: str, kept: Recent[str]) -> None:
    assert kept.find(NORM, DIFFERENT[what]()) is None
    assert kept.find(DROP, _arguments()) is None, "another op"


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "forward-mode AD": forward_ad.dual_level,
}


@pytest.mark.parametrize("state", STATES)
def test_a_call_in_another_state_is_not_found(state: str, kept: Recent[str]) -> None:
    """A call that was kept in that state is not found outside it either."""
    given = _arguments()
    with STATES[state]():
        assert kept.find(NORM, given) is None
        if state == "forward-mode AD":
            return  # where eager serves, and nothing is kept
        kept.keep(NORM, given, "triton")
        assert kept.find(NORM, given) == "triton"
    assert kept.find(NORM, given) == "cuda"


def test_autocast_to_another_dtype_is_not_found() -> None:
    kept, given = Recent[str](), _arguments()
    with torch.autocast("cpu", torch.bfloat16):
        kept.keep(NORM, given, "cuda")
        assert kept.find(NORM, given) == "cuda"
        at_bf16 = op_question.class_of(NORM, given)
    with torch.autocast("cpu", torch.float16):
        assert kept.find(NORM, given) is None
        assert op_question.class_of(NORM, given) != at_bf16


def test_a_transformed_or_traced_call_is_not_found(kept: Recent[str]) -> None:
    found: list[str | None] = []
    _, *rest = _arguments()

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append(kept.find(NORM, [x, *rest]))
        return x * 2

    look(_arguments()[0])
    torch.func.vmap(look)(torch.randn(2, 32, 64, requires_grad=True))
    torch.func.grad(lambda x: look(x).sum())(_arguments()[0])
    torch.func.jvp(look, (_arguments()[0],), (torch.randn(32, 64),))
    torch.jit.trace(look, _arguments()[0], check_trace=False)
    assert found == ["cuda", *[None] * (len(found) - 1)]
    assert len(found) == 5


def test_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "_SIZES", 3)
    kept = Recent[str]()
    for rows in (1, 2, 3, 4):
        kept.keep(NORM, _arguments(rows), "cuda")
    found = [kept.find(NORM, _arguments(rows)) for rows in (1, 2, 3, 4)]
    assert found == [None, None, None, "cuda"]
    for eps in range(6):
        kept.keep(NORM, [*_arguments(4)[:-1], float(eps)], "triton")
    of_eps = [kept.find(NORM, [*_arguments(4)[:-1], float(eps)]) for eps in range(6)]
    assert of_eps == [None, None, *["triton"] * 4]


def test_where_a_single_element_lies_decides_nothing() -> None:
    """For example, a seed may lie anywhere."""
    kept, seeds = Recent[str](), torch.zeros(4, dtype=torch.int64)
    x = torch.randn(32, 64)
    kept.keep(DROP, [x, seeds[:1]], "triton")
    assert kept.find(DROP, [x, seeds[1:2]]) == "triton"
    assert kept.find(DROP, [x, seeds[:1].int()]) is None
    assert kept.find(DROP, [_beside(x).detach(), seeds[:1]]) is None


def test_objects_and_unaligned_tensors_are_not_kept() -> None:
    """Nor is a tensor in two places, which no guard matches."""
    kept, (x, *_) = Recent[str](), _arguments()
    for given in ([x, object()], DIFFERENT["an input beside"](), [x, x]):
        kept.keep(NORM, given, "cuda")
        assert kept.find(NORM, given) is None
        assert not kept._calls


BUDGET = 0.5


def _of_class(name: str) -> float:
    op, kept = OPS[name], Recent[str]()
    given = materialize(op.sized((64,), (1024,)), torch.float32, requires_grad=True)
    kept.keep(op, given, "cuda")
    assert kept.find(op, given) == "cuda"
    return ratio_of_times(
        lambda: kept.find(op, given), lambda: op_question.class_of(op, given), BUDGET, calls=200
    )


def test_a_warm_look_up_is_short() -> None:
    """Half of what it takes to read a call's class. In a fresh process, see test_overhead.py."""
    for name, ratio in json.loads(fresh.run_file(__file__)).items():
        print(f"{name}: {ratio:.2f}x the time of its class")
        assert ratio < BUDGET


if __name__ == "__main__":
    print(
        json.dumps({n: _of_class(n) for n in ("rms_norm", "layer_norm", "dropout_add_layer_norm")})
    )
