"""Ops on trial: the CPU's kernels stand for a GPU's, and times for its clock."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import torchweld
from torchweld.dispatch import choice, proof, trial, verdicts
from torchweld.dispatch.call import call
from torchweld.dispatch.trial import OpTrial
from torchweld.dispatch.verdicts import Verdicts
from torchweld.registry import EAGER, OPS, Composite, Op, materialize

LAYER_NORM = OPS["layer_norm"]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, float]:
    """CPU tensors are tried as a GPU's are; the milliseconds that a clock would find."""
    found = {"cpu": 1.0, EAGER: 2.0}
    kept = Verdicts(tmp_path / "verdicts.json", "a GPU")
    monkeypatch.setattr(choice, "on_trial", lambda x: not torch.compiler.is_compiling())
    monkeypatch.setattr(trial, "verdicts", lambda index: kept)
    monkeypatch.setattr(trial, "_served", {})
    monkeypatch.setattr(verdicts, "mode", "time")
    monkeypatch.setattr(OpTrial, "may_run", lambda _: True)
    monkeypatch.setattr(OpTrial, "preferred", lambda *_: None)

    def clock(trial: OpTrial, backends: Sequence[str]) -> dict[str, float]:
        return {name: found[name] for name in (*backends, EAGER)}

    monkeypatch.setattr(OpTrial, "times", clock)
    return found


@pytest.mark.targets(composites=True)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_right_kernels_pass(
    op: Op, kind: torch.dtype, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a part of the rows, and without a trace in torch's random numbers or the inputs."""
    monkeypatch.setattr(proof, "ROWS", 24)
    inputs = materialize(op.sized((7, 11), (64,)), kind, requires_grad=train)
    before = torch.get_rng_state()
    on_trial = OpTrial(op, inputs)
    assert on_trial.direction == ("full" if train else "fwd")
    assert on_trial.fault("cpu") is None
    some = on_trial._some()
    assert some[0].shape[:-1].numel() <= 24 or isinstance(op, Composite)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(v.grad is None for v in inputs if isinstance(v, torch.Tensor))


@pytest.mark.usefixtures("times")
def test_a_planted_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning; the call has eager's result, and `explain` says why."""
    x = torch.randn(1024, 2048)
    kernel = LAYER_NORM.kernels["cpu"]
    forward = kernel.forward

    def wrong(*inputs: Any) -> Any:
        y, *rest = forward(*inputs)
        return y * 1.01, *rest

    monkeypatch.setattr(kernel, "forward", wrong)
    given = (x, [2048], None, None, 1e-5)
    with pytest.warns(RuntimeWarning, match="cpu for layer_norm fwd, width 2048"):
        assert torch.equal(call(LAYER_NORM, *given), LAYER_NORM.reference(*given))
    for _ in range(2):  # a second warning would be an error
        assert torch.equal(call(LAYER_NORM, *given), LAYER_NORM.reference(*given))
    reasons = torchweld.explain("layer_norm", x, [2048]).reasons
    assert "at its first use here: wrong result: y is off by" in reasons["cpu"]


@pytest.mark.parametrize(("ms", "chosen"), [(1.0, "cpu"), (3.0, EAGER)])
def test_a_planted_slow_kernel_is_not_chosen(
    ms: float, chosen: str, times: dict[str, float]
) -> None:
    times["cpu"] = ms
    given = (torch.randn(1024, 2048), [2048], None, None, 1e-5)
    assert choice.choose(LAYER_NORM, given) == chosen
    times["cpu"] = 4.0 - ms  # found once
    assert choice.choose(LAYER_NORM, given) == chosen
    # Another class: a gradient is wanted.
    wanted = (given[0].clone().requires_grad_(), *given[1:])
    assert choice.choose(LAYER_NORM, wanted) == ("cpu" if chosen == EAGER else EAGER)


@pytest.mark.usefixtures("times")
def test_a_kernel_that_raises_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*inputs: Any) -> Any:
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(LAYER_NORM.kernels["cpu"], "forward", failing)
    given = (torch.randn(1024, 2048), [2048], None, None, 1e-5)
    with pytest.warns(RuntimeWarning, match="no kernel image"):
        assert torch.equal(call(LAYER_NORM, *given), LAYER_NORM.reference(*given))


@pytest.mark.usefixtures("times")
def test_a_transform_leaves_no_verdict() -> None:
    """Inside torch.func no kernel can serve; outside they can, and are tried."""
    x = torch.randn(8, 128, 2048)
    norm = torchweld.functional.layer_norm
    torch.func.vmap(lambda x: norm(x, [2048]))(x)
    assert choice.choose(LAYER_NORM, (x, [2048], None, None, 1e-5)) == "cpu"
    torch.func.vmap(lambda x: norm(x, [2048]))(x)


@pytest.mark.usefixtures("times")
@pytest.mark.parametrize("slow", [False, True])
def test_a_compiled_graph_takes_what_is_proven(
    slow: bool, times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At trace time, on numbers of its own; or from what served such calls before."""
    monkeypatch.setattr(choice, "tried_before_compiling", lambda x: torch.compiler.is_compiling())
    times["cpu"] = 3.0 if slow else 1.0
    ran = []
    kernel = LAYER_NORM.kernels["cpu"]
    forward = kernel.forward
    monkeypatch.setattr(kernel, "forward", lambda *given: (ran.append(1), forward(*given))[1])
    traced = []

    @torch.compile(fullgraph=True, backend="eager")
    def chosen(x: torch.Tensor) -> torch.Tensor:
        name = choice.choose(LAYER_NORM, (x, [2048], None, None, 1e-5))
        traced.append(name)
        return x + 1

    before = torch.get_rng_state()
    chosen(torch.randn(64, 2048))
    del before
    assert set(traced) == {EAGER if slow else "cpu"}
    assert ran
    tried = len(ran)
    torch.compiler.reset()
    chosen(torch.randn(32, 2048))
    assert len(ran) == tried, "it is tried once"


@pytest.mark.usefixtures("times")
def test_warming_up_leaves_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (torch.randn(1024, 2048), [2048], None, None, 1e-5)
    torchweld.warmup(lambda: call(LAYER_NORM, *given))
    monkeypatch.setattr(OpTrial, "may_run", lambda _: False)  # a warning would be an error
    assert choice.choose(LAYER_NORM, given) == "cpu"
