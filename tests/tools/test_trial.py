"""The trial at first use: CPU kernels stand for a GPU's, and made-up times for its clock."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torchweld
from torchweld.dispatch import bare_trial, choice, proof, trial, verdicts
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.bare import BareOp
from torchweld.dispatch.call import call, too_small
from torchweld.dispatch.recent import Recent
from torchweld.dispatch.trial import OpTrial
from torchweld.dispatch.verdicts import Verdicts
from torchweld.ops import quantize_1bit, quantize_8bit
from torchweld.ops.optimizer import sum_of_squares
from torchweld.registry import EAGER, OPS, Composite, Op, materialize

LAYER_NORM = OPS["layer_norm"]


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, float]:
    """Try CPU tensors as a GPU's; the test sets the milliseconds that a clock would find."""
    found = {"cpu": 1.0, EAGER: 2.0}
    kept = Verdicts(tmp_path / "verdicts.json", "a GPU")
    monkeypatch.setattr(choice, "on_gpu", lambda x: not torch.compiler.is_compiling())
    monkeypatch.setattr(trial, "verdicts", lambda index: kept)
    monkeypatch.setattr(trial, "_served", {})
    monkeypatch.setattr(trial, "_recent", Recent())
    monkeypatch.setattr(verdicts, "mode", "time")
    monkeypatch.setattr(bare_trial, "_served", {})
    monkeypatch.setattr(trial.OnGpu, "may_run", lambda _: True)
    monkeypatch.setattr(trial.OnGpu, "preferred", lambda *_: None)

    def clock(trial: OpTrial, backends: Sequence[str]) -> dict[str, float]:
        return {name: found[name] for name in (*backends, EAGER)}

    monkeypatch.setattr(OpTrial, "times", clock)
    return found


def test_sizes_that_are_small_for_the_cpu_are_tried_on_a_gpu() -> None:
    with FakeTensorMode():
        for op in OPS.values():
            at_hand, on_gpu = (torch.empty(8, 8, device=device) for device in ("cpu", "cuda"))
            rest = [None] * len(op.forward_signature.arguments[1:])
            assert too_small(op, [at_hand, *rest]) is (op.small > 64)
            assert not too_small(op, [on_gpu, *rest])


@pytest.mark.targets(composites=True)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
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
    """No kernel can serve inside torch.func; outside, kernels can and are tried."""
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
    monkeypatch.setattr(choice, "on_gpu", lambda x: True)
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
@pytest.mark.parametrize(("kept_as", "chosen"), [(torch.float32, EAGER), (torch.bfloat16, "cpu")])
def test_a_compiled_graph_takes_what_served_its_dtype(
    kept_as: torch.dtype, chosen: str, times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At another size, too; a verdict on another dtype says nothing, and the op is tried."""
    times["cpu"] = 3.0
    given = (torch.randn(1024, 512, dtype=kept_as), [512], None, None, 1e-5)
    assert choice.choose(LAYER_NORM, given) == EAGER
    times["cpu"] = 1.0
    assert trial.while_compiling("layer_norm", 0, torch.float32, "fwd") == chosen


@pytest.mark.usefixtures("times")
def test_dtypes_are_tried_apart(times: dict[str, float]) -> None:
    """A verdict on bfloat16 says nothing of float16, which has a trial and a verdict of its own."""
    given = {
        dtype: (torch.randn(1024, 2048, dtype=dtype), [2048], None, None, 1e-5)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    }
    for dtype, (ms, chosen) in zip(given, ((3.0, EAGER), (1.0, "cpu"), (3.0, EAGER)), strict=True):
        times["cpu"] = ms
        assert choice.choose(LAYER_NORM, given[dtype]) == chosen
    kept = trial.verdicts(0).all_kept()
    assert len(kept) == len({trial.class_of(LAYER_NORM, each) for each in given.values()}) == 3
    for dtype, each in given.items():
        assert str(dtype).removeprefix("torch.") in (key := OpTrial(LAYER_NORM, each).key)
        assert kept[key].by == "time"


def test_a_linear_layers_class_has_its_features() -> None:
    """Both GEMMs of layers that widen the same rows differently take a time of their own."""
    x, op = torch.randn(8, 64), OPS["linear_act"]

    def of(features: int, rows: int = 8) -> tuple[tuple[Any, ...], str]:
        given = (x[:rows], torch.randn(features, 64), None, "gelu", "tanh")
        return trial.class_of(op, given), OpTrial(op, given).key

    for at in (0, 1):
        assert of(256)[at] != of(1024)[at]
        assert of(256)[at] == of(256)[at]
        assert of(256)[at] != of(256, 2)[at]


@pytest.mark.usefixtures("times")
def test_a_warm_call_does_not_ask_for_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (torch.randn(1024, 2048), [2048], None, None, 1e-5)
    assert choice.choose(LAYER_NORM, given) == "cpu"
    monkeypatch.setattr(trial, "class_of", lambda *_: pytest.fail("it asks"))
    assert choice.choose(LAYER_NORM, (torch.randn(1024, 2048), *given[1:])) == "cpu"


@pytest.mark.usefixtures("times")
def test_warming_up_leaves_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (torch.randn(1024, 2048), [2048], None, None, 1e-5)
    torchweld.warmup(lambda: call(LAYER_NORM, *given))
    monkeypatch.setattr(OpTrial, "may_run", lambda _: False)  # a warning would be an error
    assert choice.choose(LAYER_NORM, given) == "cpu"


# --- Bare ops -------------------------------------------------------------------------------------


def _bare_calls() -> dict[str, tuple[BareOp, tuple[Any, ...]]]:
    """A call of each bare op that is tried at its first use, on rows with odd ends."""
    x = torch.randn(3, 700)
    codes, absmax = quantize_8bit.quantize_reference(x, True)
    error, size, block = torch.randn_like(x), x.numel(), 64
    new_error = torch.empty_like(x)
    bits, scale = quantize_1bit.quantize_reference(x, error, new_error, block)
    both = torch.stack([bits, bits]), torch.stack([scale, 2 * scale])
    return {
        "quantize_8bit": (quantize_8bit._QUANTIZE, (x, True)),
        "dequantize_8bit": (quantize_8bit._DEQUANTIZE, (codes, absmax, True, torch.bfloat16)),
        "quantize_1bit": (quantize_1bit._QUANTIZE, (x, error, error, block)),  # in place
        "dequantize_mean": (quantize_1bit._MEAN, (*both, None, torch.empty(size), size, block)),
        "dequantize_1bit": (
            quantize_1bit._DEQUANTIZE,
            (bits, scale, [3, 700], block, torch.float32),
        ),
        "sum_of_squares": (sum_of_squares._OP, ([x.bfloat16(), error.bfloat16()],)),
    }


def _copies(inputs: Sequence[Any]) -> list[Any]:
    """Copies of the arguments; arguments that are one tensor stay one."""
    return copy.deepcopy(list(inputs))


@pytest.mark.parametrize("name", _bare_calls())
@pytest.mark.parametrize("wrong", ["nothing", "results", "writes", "all"])
def test_bare_ops_are_tried_once(
    name: str, wrong: str, times: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong kernel is refused with one warning. Arguments are written to once, by who serves."""
    op, inputs = _bare_calls()[name]
    kernel, written = op.overload("cpu"), "(a!)" in str(op.overload("cpu")._schema)
    if wrong == "writes" and not written:
        pytest.skip("it writes to no argument")
    runs = []

    def planted(*given: Any) -> Any:
        runs.append(given)
        found = as_tuple(kernel(*given))
        if wrong == "writes":
            names = [argument.name for argument in kernel._schema.arguments]
            given[names.index("new_error")].add_(0.01)
        if wrong == "results":
            found = (found[0] ^ 1 if found[0].dtype == torch.uint8 else found[0] * 1.01, *found[1:])
        if wrong == "all":
            raise RuntimeError("no kernel image")
        return found if len(found) > 1 else found[0]

    monkeypatch.setitem(op._overloads, "cpu", planted)
    expected_inputs, mine = _copies(inputs), _copies(inputs)
    expected = as_tuple(op.reference(*expected_inputs))
    expects = pytest.warns(RuntimeWarning, match=f"cpu for {name}")
    with expects if wrong != "nothing" else contextlib.nullcontext():
        found = as_tuple(op.run(*mine))
    assert len(runs) == (2 if wrong == "nothing" else 1)
    numbers = [*found, *mine], [*expected, *expected_inputs]
    for one, other in zip(*numbers, strict=True):
        if not isinstance(one, torch.dtype):
            torch.testing.assert_close(one, other)
    again = _copies(inputs)
    op.run(*again)  # a second warning would be an error
    assert len(runs) == (3 if wrong == "nothing" else 1)
