"""gated_mlp by Hopper's kernel for both of its first products, in an imitation of its GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import imitated_gluon
import seams
import torchweld
from conftest import PLACES, running_at
from oracle import assert_bounded
from torchweld import functional, numerics
from torchweld.dispatch import bare
from torchweld.dispatch.warm import cache, plans
from torchweld.ops.gemm import epilogue, fused_choice, gated_epilogue
from torchweld.registry import OPS
from trying import Trials, try_on_cpu

pytestmark = pytest.mark.skipif(
    PLACES["interpreter"][2] is not None, reason=str(PLACES["interpreter"][2])
)
GATED: Any = OPS["gated_mlp"]
ROLES = "linear_act_specialised"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The Triton kernels that ran; for a warp-specialised one any call is large enough."""
    from torchweld.triton_kernels import launch, linear_act, linear_act_specialised

    found: list[str] = []
    plain = launch.start

    def start(launched: Any, options: dict[str, Any]) -> Any:
        found.append(launched.kernel.fn.__name__)
        imitated = "gl" in launched.kernel.fn.__globals__
        return (imitated_gluon.start if imitated else plain)(launched, options)

    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(linear_act, "runs_specialised", lambda device: True)
    for module in (linear_act, linear_act_specialised):
        monkeypatch.setattr(module, "processors", lambda device: 1)
    monkeypatch.setattr(epilogue, "_SMALLEST", 0)
    for module, op in ((epilogue, "linear_act"), (gated_epilogue, "gated_linear")):
        overload = getattr(torch.ops.torchweld, op).triton
        monkeypatch.setattr(module, "_kernel", bare.planned(overload))  # without a plan yet
    with running_at("interpreter", monkeypatch):
        yield found


@pytest.fixture
def trials(started: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trials:
    return try_on_cpu(monkeypatch, tmp_path)


def _arguments(rows: int, inner: int, hidden: int, *kind: str) -> list[Any]:
    generator = torch.Generator().manual_seed(rows)
    sizes = ((rows, inner), (hidden, inner), (hidden, inner), (inner, hidden))
    drawn = [torch.randn(size, generator=generator) * size[-1] ** -0.5 for size in sizes]
    drawn[0] *= inner**0.5
    return [*[t.half().requires_grad_() for t in drawn], *kind]


@pytest.mark.parametrize("kind", [("silu", "none"), ("gelu", "tanh")], ids="-".join)
def test_errors_are_bounded(kind: tuple[str, str], started: list[str], trials: Trials) -> None:
    """Contract 1: several tiles in both directions, and ragged ones; forward and backward."""
    assert_bounded(GATED, [_arguments(*sizes, *kind) for sizes in ((130, 72, 200), (24, 136, 264))])
    assert started.count(ROLES) == 2 * 3  # a check runs it twice
    assert [answer.backend for answer in trials.answers()] == ["3", "3"]


@pytest.mark.parametrize(
    "holds", [seams.assert_transposed_is_equal, seams.assert_recomputed_is_equal]
)
def test_assertions_about_composites(holds: Any, started: list[str], trials: Trials) -> None:
    holds(GATED)


@seams.splits_backwards
def test_a_split_backward_runs_nothing_twice(started: list[str], trials: Trials) -> None:
    seams.assert_split(GATED, _arguments(24, 64, 72, "silu", "none"))
    assert ROLES in started


def test_second_derivatives(started: list[str], trials: Trials) -> None:
    inputs = _arguments(16, 64, 64, "silu", "none")

    def second(function: Any, inputs: list[Any]) -> torch.Tensor:
        y = function(*inputs[:4]).double()
        first = torch.autograd.grad(y.square().mean(), inputs[:4], create_graph=True)
        sums = sum(g.double().square().sum() for g in first)
        return torch.cat([g.flatten() for g in torch.autograd.grad(sums, inputs[:4])])

    wide = [x.detach().double().requires_grad_() for x in inputs[:4]]
    found = second(functional.gated_mlp, inputs)
    exact = second(lambda *x: GATED.reference(*x, "silu", "none"), wide)
    assert ROLES in started
    assert (found - exact).norm() / exact.norm() < 2.0**-7


def test_alike_calls_repeat_a_plan(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of gated_linear and linear_act describe the tensors of each call."""
    ops = torch.ops.torchweld
    ran: list[Any] = []
    run = plans.Plan.run
    monkeypatch.setattr(plans.Plan, "run", lambda plan, x: ran.append(plan) or run(plan, x))
    for seed in range(3):
        x, gate, up, _ = (t.detach() * (1 + seed / 4) for t in _arguments(24, 64, 72))
        for function, overload, inputs in (
            (gated_epilogue._kernel, ops.gated_linear, (x, gate, up, "silu", "none", True)),
            (epilogue._kernel, ops.linear_act, (x, gate, None, "gelu", "none", 3, True)),
        ):
            found = function(*inputs)
            torch.testing.assert_close(found, overload.triton(*inputs), **numerics.SAME)
    assert len(ran) == 4
    assert all(plan.steps[0].described for plan in ran)
    assert set(started) == {ROLES}


def test_a_check_has_the_autocast_and_gradients_of_the_call(
    started: list[str], trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under autocast a call with float32 tensors checks the 16-bit kernel and all that it saves."""
    kernel = epilogue._kernel
    for rows, is_wrong in ((24, False), (80, True)):
        x, weight, _, _ = (t.detach().float().requires_grad_() for t in _arguments(rows, 64, 72))

        def run(*given: Any, is_wrong: bool = is_wrong) -> Any:
            y, z = kernel(*given)
            return y, z + is_wrong

        monkeypatch.setattr(epilogue, "_kernel", run)
        expects = pytest.warns(RuntimeWarning, match="z is off by") if is_wrong else nullcontext()
        with torch.autocast("cpu", torch.float16), expects:
            functional.linear_act(x, weight, None)
        assert [answer.backend for answer in trials.answers()][-1] == (
            fused_choice.UNFUSED if is_wrong else "3"
        )


def test_explanation(started: list[str], trials: Trials) -> None:
    inputs = _arguments(24, 64, 72)
    assert "not timed yet" in str(torchweld.explain("gated_mlp", *inputs))
    functional.gated_mlp(*inputs)
    assert "one kernel for all, which an H200's times" in str(
        torchweld.explain("gated_mlp", *inputs)
    )


def test_what_other_kernels_serve(
    started: list[str], trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32, rows that TMA does not have, a GPU that the tiles do not fill, small calls."""
    from torchweld.triton_kernels import linear_act

    def runs(*inputs: Any) -> bool:
        started.clear()
        cache.forget()
        functional.gated_mlp(*inputs)
        return ROLES in started

    inputs = _arguments(24, 64, 72)
    assert runs(*inputs)
    assert not runs(*[x.float() for x in inputs])
    assert not runs(*_arguments(24, 64, 68))
    assert not runs(*_arguments(24, 60, 72))
    assert not runs(inputs[0], inputs[1], inputs[2].t().contiguous().t(), inputs[3])
    monkeypatch.setattr(linear_act, "processors", lambda device: 2)
    assert not runs(*_arguments(23, 64, 72))
    monkeypatch.setattr(linear_act, "processors", lambda device: 1)
    monkeypatch.setattr(epilogue, "_SMALLEST", 2**28)
    assert not runs(*inputs)
    assert "too small" in str(torchweld.explain("gated_mlp", *inputs))


def test_a_wrong_kernel_is_refused(
    started: list[str], trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(x: Any, gate_weight: Any, up_weight: Any, *_: Any) -> Any:
        y = torch.nn.functional.silu(x @ gate_weight.t()) * (x @ up_weight.t())
        y[0, 0] += 0.1
        return y, y, y

    monkeypatch.setattr(gated_epilogue, "_kernel", wrong)
    inputs = [x.detach() for x in _arguments(24, 64, 72)]
    with pytest.warns(RuntimeWarning, match="wrong result: y is off by"):
        found = functional.gated_mlp(*inputs)
    torch.testing.assert_close(found, GATED.reference(*inputs, "silu", "none"), rtol=0, atol=2e-3)


def test_the_op(started: list[str]) -> None:
    """Its fake is right, with both products and without; other factors are refused."""
    kernel = torch.ops.torchweld.gated_linear.triton
    x, gate, up, _ = (t.detach() for t in _arguments(24, 64, 72))
    for save in (True, False):
        torch.library.opcheck(kernel, (x, gate, up, "silu", "none", save))
    with pytest.raises(ValueError, match="do not fit"):
        kernel(x.float(), gate, up, "silu", "none", True)
