"""Calls that repeat a plan: the bits of the call itself, and no plan where one could be wrong."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _python_dispatch

import planning
import selection
from oracle import Results, run
from planning import DEVICE, REPLAYED, assert_equal, kernels, lay_beside, make_norm, make_plan
from torchweld import functional, numerics
from torchweld.bench.cases import CASES
from torchweld.dispatch.autograd import as_tuple, complete_steps
from torchweld.dispatch.library import IN_TRITON
from torchweld.dispatch.warm import plans as warm_plans
from torchweld.ops.experts import route
from torchweld.ops.loss import rows
from torchweld.registry import OPS, Op, TensorSpec, materialize
from torchweld.triton_kernels import launch

triton = pytest.importorskip("triton")
plans = planning.plans


def _run_with_plans(op: Op, inputs: Sequence[Any], ready: Any = None) -> Results:
    """As by a short way, which has found the kernel."""
    kernel = op.kernels["triton"]
    ready = ready or complete_steps(op, kernel.steps, inputs)
    return run(
        op,
        [*inputs],
        lambda *inputs: kernel.ready_function.apply(ready, *[inputs[at] for at in op.tensors_at]),
    )


def _forward(op: Op, inputs: Sequence[Any]) -> Any:
    return op.kernels["triton"].steps.forward(*inputs)


def _assert_same(a: Results, b: Results) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.stride() == b[name].stride(), name
        torch.testing.assert_close(value, b[name], **numerics.SAME, equal_nan=True)


def _list_small_samples(op: Op, count: int) -> list[Any]:
    """The smallest samples that the kernel serves: the interpreter takes long for others."""
    served = [
        sample
        for sample in CASES[op.name].samples
        if op.why_not("triton", materialize(sample, torch.float32, DEVICE)) is None
    ]

    def size(sample: Any) -> int:
        return sum(math.prod(spec.shape) for spec in sample if isinstance(spec, TensorSpec))

    return sorted(served, key=size)[:count]


# Attention's plans: tests/ops/test_specialised.py, with few of its many samples.
@kernels
@pytest.mark.parametrize("name", sorted(REPLAYED - {"block_sparse_attention"}))
def test_samples_have_the_bits_of_their_calls(name: str, plans: list[Any]) -> None:
    op, replayed = OPS[name], 0
    samples = _list_small_samples(op, 16 if selection.WHOLE else 8)
    for sample in samples:
        first, other = (materialize(sample, torch.float32, DEVICE, seed=at) for at in (0, 1))
        steps = complete_steps(op, op.kernels["triton"].steps, first)
        hanging = warm_plans.Repeated(steps)
        for ready in (steps, hanging):
            _run_with_plans(op, first, ready)  # it is recorded
        expected, before = run(op, other), len(plans)
        for ready in (steps, hanging):
            _assert_same(_run_with_plans(op, other, ready), expected)
        replayed += len(plans) >= before + 2
    assert replayed > len(samples) // 2


def _change(at: int, change: Callable[[Any], Any]) -> list[Any]:
    inputs = make_norm()
    inputs[at] = change(inputs[at])
    return inputs


@kernels
@pytest.mark.parametrize("freed", [0, 2, 3])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_freed_storage(name: str, freed: int, plans: list[Any]) -> None:
    """The first launch and a plan refuse it, also of a view with an offset, and no other calls.

    A launch read the address, which on a GPU ends the context. Tests freed what the CPU reads.
    """
    op = OPS[name]
    if name == "rms_norm":
        freed = min(freed, 2)

    def make() -> list[Any]:
        x, shape, weight, bias, eps = make_norm()
        x, weight, bias = (torch.cat([t, t])[len(t) :] for t in (x, weight, bias))
        return [x, shape, weight, bias, eps] if op.name == "layer_norm" else [x, shape, weight, eps]

    for count in range(3):
        inputs = make()
        inputs[freed].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="data is not allocated"):
            _forward(op, inputs)
        before = len(plans)
        _forward(op, make())
        assert len(plans) > before or count == 0
    empty = make_norm(0)
    _forward(op, empty if name == "layer_norm" else [*empty[:3], 1e-5])


OTHERS: dict[str, Callable[[], list[Any]]] = {
    "another epsilon": lambda: _change(4, lambda _: 0.5),
    "no bias": lambda: _change(3, lambda _: None),
    "more rows": lambda: make_norm(rows=8),
    "another shape": lambda: make_norm(rows=12, width=16),
    "as many elements": lambda: _change(0, lambda x: x.view(2, 3, 32)),
    "strides": lambda: _change(0, lambda x: torch.cat([x, x], 1)[:, :32]),
    "a misaligned input": lambda: _change(0, lay_beside),
    "a misaligned weight": lambda: _change(2, lay_beside),
    "another dtype of weights": lambda: make_norm(dtype=torch.float16)[:1] + make_norm()[1:],
}


@kernels
@pytest.mark.parametrize("name", OTHERS)
def test_a_call_that_differs_has_its_own_plan_or_none(name: str, plans: list[Any]) -> None:
    op = OPS["layer_norm"]
    _run_with_plans(op, make_norm())
    for number in range(3):
        inputs = OTHERS[name]()
        _assert_same(_run_with_plans(op, inputs), run(op, inputs))
        assert number or not plans, "the plan of the call before served"


@kernels
def test_a_warm_step_under_autocast_runs_plans_only(
    plans: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls whose tensors autocast changes repeat plans, and so does the pass after a GEMM."""
    kind = torch.device(DEVICE).type
    monkeypatch.setitem(OPS["layer_norm"].autocast, kind, torch.float32)  # as on a GPU
    weight, bias = (torch.randn(64, device=DEVICE, requires_grad=True) for _ in range(2))
    square = torch.randn(64, 64, device=DEVICE, requires_grad=True)
    leaves = [weight, bias, square]
    for _ in range(4):
        plans.clear()
        x = torch.randn(6, 64, device=DEVICE).bfloat16()
        with torch.autocast(kind, torch.bfloat16):
            z = functional.layer_norm(x, (64,), weight, bias)
            y = functional.linear_act(z, square, bias, activation="silu")
        grads = torch.autograd.grad(y.float().sum(), leaves)
    assert z.dtype is torch.float32
    assert len(plans) == 4
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    other = torch.nn.functional.layer_norm(x.double(), (64,), *wide[:2])
    wanted = torch.nn.functional.linear(other, wide[2], wide[1])
    wanted = torch.nn.functional.silu(wanted)
    torch.testing.assert_close(z.double(), other, rtol=2.0**-20, atol=2.0**-20)
    # Roundings to 16 bits: both factors, the product, the activation; their gradients.
    for one, exact in zip(grads, torch.autograd.grad(wanted.sum(), wide), strict=True):
        assert (one - exact).norm() <= 8 * 2.0**-9 * exact.norm()


@kernels
def test_tensors_that_were_one_may_differ(plans: list[Any]) -> None:
    """A plan from a call with one memory in two places would read it twice for ever."""
    op = OPS["bias_dropout_add"]
    x, y = torch.randn(4, 32, device=DEVICE), torch.randn(4, 32, device=DEVICE)
    names = op.forward_signature.arguments
    values = dict.fromkeys(names) | {"p": 0.0}
    for residual in (x.view_as(x), x.view_as(x), y, x.view_as(x), y):
        inputs = list((values | {names[0]: x, "residual": residual}).values())
        made = _forward(op, inputs)
        torch.testing.assert_close(made, x + residual, **numerics.SAME)


@kernels
def test_one_tensor_twice_has_a_plan(plans: list[Any]) -> None:
    """Such a call took the whole path each time: 137 us in place of 5, without a GPU."""
    fused = functional.gated_residual_layer_norm
    x, gate = torch.randn(4, 32, device=DEVICE), torch.randn(1, 32, device=DEVICE)
    ran = []
    for number in range(8):
        x, shift = x + 1, gate * 2 if number in (3, 6) else gate
        given = (x, gate, x, gate, shift)
        with torch.no_grad():
            y = fused(*given)
            ran.append(len(plans))
            wanted = fused(*(t.clone() for t in given))
        plans.clear()
        torch.testing.assert_close(y, wanted, **numerics.SAME)
    assert ran[2] == ran[4] == ran[5] == ran[7] == 1


@kernels
@pytest.mark.parametrize("first", [False, True])
def test_a_negative_view_has_no_plan(first: bool, plans: list[Any]) -> None:
    """Its memory holds other numbers, which the dispatcher would negate; also as a gradient."""
    op = OPS["layer_norm"]
    for number in range(6):
        x, size, *parameters = make_norm()
        is_lazy = (number % 2 == 0) is first
        inputs = [torch._neg_view(x) if is_lazy else -x, size, *parameters]
        y, *statistics = _forward(op, inputs)
        wanted = run(op, [-x, size, *parameters])["y"]
        torch.testing.assert_close(y, wanted, **numerics.SAME)
        grad = torch.randn_like(y)
        given = [
            torch._neg_view(grad) if is_lazy else -grad,
            -x,
            *inputs[1:],
            *statistics,
            True,
            True,
        ]
        found = op.kernels["triton"].steps.backward(*given)
        given[0] = -grad
        expected = op.kernels["triton"].backward(*given)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, **numerics.SAME)
    assert len(plans) == 4


@kernels
def test_parts_of_a_tensor_have_a_plan(plans: list[Any]) -> None:
    """As the queries, keys and values of a projection, whose plan serves other calls, too."""
    both = torch.randn(4, 64, device=DEVICE)
    op = OPS["bias_dropout_add"]
    names = op.forward_signature.arguments
    values = dict.fromkeys(names) | {"p": 0.0}
    for at in range(4):
        x, residual = (both + at).split(32, 1)
        if at == 2:
            residual = (both * at)[:, 32:]
        inputs = list((values | {names[0]: x, "residual": residual}).values())
        torch.testing.assert_close(_forward(op, inputs), x + residual, **numerics.SAME)
    assert len(plans) == 3


@kernels
def test_seeds_are_read_anew(plans: list[Any]) -> None:
    x = torch.ones(16, 64, device=DEVICE)
    op = OPS["bias_dropout_add"]
    names = op.forward_signature.arguments
    values = dict.fromkeys(names) | {names[0]: x, "residual": torch.zeros_like(x), "p": 0.5}
    drawn = []
    for number in (3, 3, 1, 2, 1):
        seed = torch.full((1,), number, device=DEVICE)
        drawn.append(_forward(op, list((values | {"seed": seed}).values())))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[2], drawn[4])
    assert not torch.equal(drawn[2], drawn[3])
    assert len(plans) == 4


@kernels
def test_inference_mode_has_results_of_its_own(plans: list[Any]) -> None:
    """A plan of either mode makes the tensors that the mode makes."""
    inputs = make_norm()
    wanted = run(OPS["layer_norm"], inputs)["y"]
    for at in range(8):
        with torch.inference_mode(at % 2 == 1):
            made, *_ = _forward(OPS["layer_norm"], inputs)
            torch.testing.assert_close(made, wanted, **numerics.SAME)
        assert made.is_inference() == (at % 2 == 1)
    assert len(plans) == 6


@kernels
def test_a_part_is_not_taken_for_a_tensor_that_begins_there() -> None:
    a = torch.randn(64)
    first, second = a.split(32)
    assert warm_plans._find([a, second], a[:32]) is None
    assert warm_plans._find([a, second], second.view(4, 8)) == 1
    assert warm_plans._find([first, second], a[32:]) == 1
    assert warm_plans._find([second, first], first) == 1


# What a plan cannot repeat, as functions of two tensors.
UNFIT: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "it computes": lambda a, b: a + b,
    "it copies": lambda a, b: a.clone(),
    "it fills": lambda a, b: torch.zeros_like(a),
    "it reads a number": lambda a, b: torch.empty(int(b[0]), device=a.device),
    "it returns an argument": lambda a, b: a,
    "it returns a tensor twice": lambda a, b: (made := torch.empty_like(a), made),
    "it returns a part": lambda a, b: torch.empty_like(a)[:2],
    "it says so": lambda a, b: (launch.forbid_replay(), torch.empty_like(a))[1],
}


@pytest.mark.parametrize("what", UNFIT)
def test_other_functions_are_called_each_time(what: str, plans: list[Any]) -> None:
    calls = 0

    def function(a: torch.Tensor, b: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        return UNFIT[what](a, b)

    a, b = torch.randn(4, 4), torch.ones(1, dtype=torch.int64)
    planned = make_plan(function)
    for _ in range(4):
        planned(a, b)
    assert calls == 4
    assert not plans


def test_allocations_alone_are_repeated(plans: list[Any]) -> None:
    def function(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.new_empty(3, 4).t(), torch.empty_like(a, dtype=torch.int32)

    a = torch.randn(4, 4)
    planned = make_plan(function)
    made = [planned(a) for _ in range(4)]
    assert len(plans) == 3
    assert [[(x.shape, x.stride(), x.dtype) for x in pair] for pair in made[1:]] == [
        [(x.shape, x.stride(), x.dtype) for x in made[0]]
    ] * 3
    assert len({x.data_ptr() for pair in made for x in pair}) == 8


def test_errors_leave_no_plan(plans: list[Any]) -> None:
    def function(a: torch.Tensor, fails: bool) -> torch.Tensor:
        if fails:
            raise ValueError("no")
        return torch.empty_like(a)

    a = torch.randn(4)
    planned = make_plan(function)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            planned(a, True)
    for _ in range(3):
        planned(a, False)
    assert len(plans) == 2


def test_few_plans_are_kept(plans: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a size, the first few; of sizes, the last few."""
    monkeypatch.setattr(warm_plans, "_SIZES", 2)
    planned = make_plan(lambda x, number: torch.empty_like(x))
    for number in [*range(10)] * 2:
        planned(torch.randn(3), number)
    assert len(plans) == warm_plans._ALIKE
    for size in (4, 5, 6):
        planned(torch.randn(size), 0)
    assert len(planned._plans) <= 2


def test_modes_and_fakes_see_the_overload(plans: list[Any]) -> None:
    ran: list[str] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def overload(x: torch.Tensor) -> torch.Tensor:
        ran.append("overload")
        return function(x)

    planned = warm_plans.Planned(lambda: launch.replayed(function), overload)
    x = torch.randn(3)
    for _ in range(2):
        planned(x)
    assert (len(plans), ran) == (1, [])
    with FakeTensorMode(allow_non_fake_inputs=True):
        planned(x)
    assert (len(plans), ran) == (1, ["overload"])


def test_threads_record_in_turn(plans: list[Any]) -> None:
    """Modes of two threads that did not end in the order of their begin left torch's flag set.

    torch then takes every call for one under a mode. No test recorded in two threads at once.
    """
    inside, ended = [threading.Event(), threading.Event()], threading.Event()

    def function(x: torch.Tensor, at: int) -> torch.Tensor:
        inside[at].set()
        assert (ended if at else inside[1]).wait(60)
        return torch.empty_like(x)

    planned = make_plan(function)

    def call_second() -> None:
        assert inside[0].wait(60)
        planned(torch.randn(3), 1)

    second = threading.Thread(target=call_second)
    second.start()
    planned(torch.randn(3), 0)
    ended.set()
    second.join()
    assert not _python_dispatch.is_in_torch_dispatch_mode()
    planned(torch.randn(3), 0)
    assert len(plans) == 1
    planned(torch.randn(3), 1)  # it is recorded now
    planned(torch.randn(3), 1)
    assert len(plans) == 2


@pytest.mark.parametrize("is_planned", [False, True])
def test_batched_gradients_see_the_overload(plans: list[Any], is_planned: bool) -> None:
    """They have no address, which a plan's launches need; torch serves them one by one."""
    copied = launch.replayed(lambda x: torch.empty_like(x))
    planned = warm_plans.Planned(lambda: copied, lambda x: 2 * x)
    x, each = torch.randn(3, requires_grad=True), torch.eye(3)
    if is_planned:
        for _ in range(2):
            planned(torch.randn(3))

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return planned(grad)

    y = Twice.apply(x)
    before = len(plans)
    (found,) = torch.autograd.grad(y, x, each, is_grads_batched=True)
    assert torch.equal(found, 2 * each)
    assert len(plans) == before


def test_a_plan_gives_addresses(plans: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel gets the addresses of this call's tensors, and of tensors that the call makes."""
    given: list[Any] = []

    class Kernel:
        arg_names = ("x", "y", "n", "flag")

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        launch.run(x, launch.launch(Kernel(), 5, x, y, 7, flag=True))
        return y

    hook = triton.knobs.runtime.launch_enter_hook
    monkeypatch.setattr(launch, "start", lambda *_: "compiled")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", str, raising=False)
    for takes_tuple in (False, True):

        def repeat(*how: Any, takes_tuple: bool = takes_tuple) -> launch.Start:
            return launch.Start(lambda *a: given.append(a), how, ("after",), takes_tuple)

        monkeypatch.setattr(launch, "repeat", repeat)
        planned = make_plan(function)
        for _ in range(3):
            x = torch.randn(4, 4)
            y = planned(x)
            arguments = (x.data_ptr(), y.data_ptr(), 7, True)
            last = (arguments,) if takes_tuple else arguments
            assert given == ([("compiled", 5, "-1", "after", *last)] if plans else [])
            given.clear()
        assert len(plans) == 2
        with monkeypatch.context() as profiled:  # launches are Triton's own
            profiled.setattr(hook, "calls", [print])
            planned(x)
        assert given == []
        plans.clear()


def _loss_calls(seed: int) -> dict[str, list[Any]]:
    """Arguments of the losses' row ops; the first one is overwritten by most."""
    generator = torch.Generator().manual_seed(seed)
    logits, grads = (torch.randn(6, width, generator=generator) for width in (40, 5))
    target = torch.randint(0, 40, (6, 1), generator=generator)
    tensors = [value.to(DEVICE) for value in (logits, target, grads, grads[:, :1].contiguous())]
    logits, target, *of_rows = tensors
    how = [None, None, None, 1.0, 0.0]
    statistics = torch.stack([logits.amax(1), *logits.new_ones(5, 6)], 1)
    return {
        "loss_rows": [logits, target, *how, False, True, True],
        "loss_rows_backward": [logits, target, statistics, *of_rows, *how],
        "loss_rows_backward_": [logits, target, statistics, *of_rows, *how],
        "loss_rows_both_": [logits, target, *of_rows, *how, True, True],
        "scale_": [logits, target[0, 0].float()],
    }


LOSSES = rows.FORWARD, rows.BACKWARD, rows.BACKWARD_IN_PLACE, rows.BOTH_IN_PLACE, rows.SCALE


@kernels
@pytest.mark.parametrize("name", _loss_calls(0))
def test_losses_repeat_their_rows_kernels(name: str, plans: list[Any]) -> None:
    op = next(op for op in LOSSES if op.name == name)
    step: Any = warm_plans.Planned(IN_TRITON[op.overload("triton")], op.overload("triton"))
    for seed in range(3):
        inputs, again = _loss_calls(seed)[name], _loss_calls(seed)[name]
        found, wanted = step(*inputs), op.overload("triton")(*again)
        assert (found is None) == (wanted is None) == (name in ("scale_", "loss_rows_backward_"))
        pairs = [] if found is None else [*zip(as_tuple(found), as_tuple(wanted), strict=True)]
        for one, other in [(inputs[0], again[0]), *pairs]:
            torch.testing.assert_close(one, other, **numerics.SAME)
    assert len(plans) == 2


@kernels
def test_a_router_repeats_its_three_launches(plans: list[Any]) -> None:
    """Both directions, with everything that is optional; it took its whole path in every call."""
    how = [2, "softmax", 1, 1, 1, True, 1.5]
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        logits, bias = (torch.randn(*shape, generator=generator) for shape in ((9, 8), (8,)))
        mask = torch.rand(9, generator=generator) > 0.3
        given = [tensor.to(DEVICE) for tensor in (logits, bias, mask)]
        indices, weights, *losses, counts = found = route._FORWARD.step("triton")(*given, *how)
        assert_equal(found, route._FORWARD.overload("triton")(*given, *how))
        grads = [torch.ones_like(result) for result in (weights, *losses)]
        back = [*grads, *given, indices, counts, *how]
        found = route._BACKWARD.step("triton")(*back)
        assert_equal([found], [route._BACKWARD.overload("triton")(*back)])
    assert [len(plan.steps) for plan in plans] == [3, 1] * 2
