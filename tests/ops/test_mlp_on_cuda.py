"""mlp's backward with the activation's backward in a cuBLASLt GEMM: numbers, graph, and choice.

tests/ops/test_cublaslt.py has linear_act's forward, and both together against the oracle.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import torchweld
from conftest import GPU
from oracle import assert_right, run
from seams import (
    CUBLASLT,
    TANH,
    Counting,
    assert_kept,
    assert_split,
    force_epilogues,
    running_cublaslt,
    saved,
    splits_backwards,
)
from torchweld import functional
from torchweld.bench.memory import LiveBytes
from torchweld.dispatch.call import call
from torchweld.dispatch.engine import asking
from torchweld.ops.gemm import act_linear, epilogue, fused_choice
from torchweld.ops.gemm.mlp import arguments
from torchweld.registry import OPS, activation, materialize, weight
from trying import try_on_cpu

pytestmark = pytest.mark.kernels

MLP = OPS["mlp"]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


# Named like the targets of tests/conftest.py, which evidence counts.
@pytest.fixture(params=[pytest.param(p, id=f"mlp-{p}") for p in CUBLASLT])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of the tensors, with the backend selected by name."""
    yield from running_cublaslt(request.param, monkeypatch)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call runs both kernels, even if they are slower."""
    force_epilogues(monkeypatch, forward=True, backward=True)


def _kernel(
    grad: torch.Tensor, w: torch.Tensor, z: torch.Tensor, need_bias: bool = True, algorithm: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.torchweld.act_linear_backward.cuda(grad, w, z, *TANH, algorithm, need_bias)


def _right(
    grad: torch.Tensor, w: torch.Tensor, z: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_z = torch.ops.aten.gelu_backward(grad @ w, z, approximate="tanh")
    return grad_z, grad_z.sum_to_size(z.shape[-1:])


def _drawn(
    leading: tuple[int, ...], out: int, hidden: int, device: str, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """A gradient, a weight, and a pre-activation."""
    specs = (activation(*leading, out), weight(out, hidden), activation(*leading, hidden))
    return materialize(specs, dtype, device)


def _inputs(device: str, bias: bool = True, rows: int = 24, **kwargs: Any) -> list[Any]:
    x, w1, b1, w2, b2, *rest = arguments((rows,), 16, 32, 40, *TANH)
    kwargs = {"dtype": torch.float32, **kwargs}
    return materialize(
        [x, w1, b1 if bias else None, w2, b2 if bias else None, *rest], device=device, **kwargs
    )


def _leaves(inputs: list[Any]) -> list[torch.Tensor]:
    return [t for t in inputs if isinstance(t, torch.Tensor)]


# --- The kernel -----------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("need_bias", [True, False])
def test_both_results(device: str, dtype: torch.dtype, need_bias: bool) -> None:
    """Both gradients. The pre-activation's gradient is the same without the bias's."""
    given = _drawn((3, 5), 48, 40, device, dtype)
    found = _kernel(*given, need_bias=need_bias)
    right = _right(*[t.double() for t in given])
    assert [t.dtype for t in found] == [dtype, dtype]
    eps = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(found[0].double(), right[0], rtol=2 * eps, atol=8 * eps)
    if need_bias:
        torch.testing.assert_close(found[1].double(), right[1], rtol=2 * eps, atol=32 * eps)
    else:
        assert found[1].numel() == 0


def test_layouts(device: str) -> None:
    """Strides, offsets, expanded rows; the surrounding memory is neither read nor changed."""
    given = _drawn((24,), 16, 32, device)
    expected = _kernel(*given)

    def within(t: torch.Tensor, offset: int, step: int) -> torch.Tensor:
        sizes = [size * step + 2 * offset for size in t.shape]
        whole = torch.full(sizes, torch.nan, device=device)
        place = whole[tuple(slice(offset, offset + size * step, step) for size in t.shape)]
        place.copy_(t)
        return place

    for at, (offset, step) in itertools.product(range(3), ((4, 1), (1, 1), (3, 2))):
        other = [within(t, offset, step) if at == i else t for i, t in enumerate(given)]
        before = other[at]._base.clone()
        for found, right in zip(_kernel(*other), expected, strict=True):
            torch.testing.assert_close(found, right)
        assert torch.equal(before.view(torch.int32), other[at]._base.view(torch.int32))
    for at in range(3):  # column-major, and at an address that cuBLASLt does not accept
        shifted = torch.empty(given[at].numel() + 1, device=device)[1:].view_as(given[at])
        for like in (given[at].t().contiguous().t(), shifted.copy_(given[at])):
            results = _kernel(*[like if at == i else t for i, t in enumerate(given)])
            torch.testing.assert_close(results, expected)
    for at, need_bias in itertools.product(range(3), (True, False)):
        # At the smallest alignment that it accepts, after a larger one.
        _kernel(*given, need_bias=need_bias)
        beside = torch.empty(given[at].numel() + 4, device=device)[4:].view_as(given[at])
        other = [beside.copy_(t) if at == i else t for i, t in enumerate(given)]
        torch.testing.assert_close(_kernel(*other, need_bias=need_bias)[0], expected[0])
    one = given[0][:1].expand(24, 16)
    torch.testing.assert_close(_kernel(one, *given[1:]), _kernel(one.contiguous(), *given[1:]))


@pytest.mark.parametrize(
    ("rows", "out", "hidden"),
    [
        *((5, 7, 16), (5, 16, 7), (0, 16, 8), (3, 0, 8), (3, 8, 0), (1, 1, 1)),
        (4, 104, 8),  # the emulator has no algorithm for this
    ],
)
def test_unsupported_calls_run_torchs_gemm(device: str, rows: int, out: int, hidden: int) -> None:
    given = _drawn((rows,), out, hidden, device)
    right = _right(*given)
    torch.testing.assert_close(_kernel(*given), right)
    torch.testing.assert_close(_kernel(*given, need_bias=False)[0], right[0])


@DTYPES
def test_supported_calls_run_cublaslt(device: str, dtype: torch.dtype) -> None:
    """The numbers would be right either way, so check which ops ran."""

    def is_torchs(out: int) -> bool:
        given = _drawn((64,), out, 128, device, dtype)
        on_cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=on_cpu, acc_events=True) as profile:
            for need_bias in (True, False):
                _kernel(*given, need_bias=need_bias)
        return any(event.name == "aten::gelu_backward" for event in profile.events())

    assert is_torchs(65)
    assert not is_torchs(64)


def test_float32_as_tf32(device: str) -> None:
    """Only if requested."""
    given = _drawn((64,), 256, 64, device)
    right = _right(*[t.double() for t in given])[0]
    plain, rounded = (
        (_kernel(*given, algorithm=algorithm)[0] - right).abs().max().item() for algorithm in (0, 1)
    )
    assert plain < 1e-4 < rounded < 2e-2


def test_arguments_that_do_not_fit_are_refused(device: str) -> None:
    grad, w, z = _drawn((4,), 8, 16, device)
    for wrong in (
        *((grad[:, 1:], w, z), (grad, w[:, 1:], z), (grad, w[0], z), (grad[1:], w, z)),
        *((grad, w.half(), z), (grad.half(), w, z), (grad, w, z[:, 1:])),
    ):
        with pytest.raises(RuntimeError, match="fit"):
            _kernel(*wrong)
    with pytest.raises(RuntimeError, match="algorithm"):
        _kernel(grad, w, z, algorithm=2)
    with pytest.raises(RuntimeError, match="gelu with approximate=tanh"):
        torch.ops.torchweld.act_linear_backward.cuda(grad, w, z, "gelu", "none", 0, True)


def test_the_op(device: str) -> None:
    """Its fake is right, with and without the bias's gradient."""
    given = _drawn((3, 4), 8, 16, device)
    for need_bias in (True, False):
        torch.library.opcheck(
            torch.ops.torchweld.act_linear_backward.cuda, (*given, *TANH, 0, need_bias)
        )


# --- The graph ------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("forward", "backward"), [*itertools.product([True, False], repeat=2)])
def test_every_form_is_right(
    device: str,
    monkeypatch: pytest.MonkeyPatch,
    forward: bool,
    backward: bool,
    bias: bool,
    dtype: torch.dtype,
) -> None:
    """The activation in the GEMM or in a pass, in each direction."""
    force_epilogues(monkeypatch, forward=forward, backward=backward)
    inputs = _inputs(device, bias, dtype=dtype)
    with Counting() as counted:
        assert_right(MLP, inputs)
    assert counted.calls["linear_act"] == forward
    assert counted.calls["act_linear_backward"] == backward


def test_infinite_biases_stay_infinite(device: str, fused: None) -> None:
    """As in eager, in the result and in every gradient."""
    x, w1, b1, w2, b2, *kind = _inputs(device)
    b1[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    ours, eager = (
        run(MLP, [x, w1, b1, w2, b2, *kind], function) for function in (None, MLP.reference)
    )
    for name, value in eager.items():
        assert torch.equal(ours[name].isnan(), value.isnan()), name


@pytest.mark.parametrize("bias", [True, False])
def test_only_wanted_gradients_are_computed(device: str, fused: None, bias: bool) -> None:
    """A gradient does not depend on which others are required, and no kernel runs without need."""
    inputs = _inputs(device, bias)
    leaves = _leaves(inputs)
    grads = {}
    for wanted in itertools.product([True, False], repeat=len(leaves)):
        for leaf, want in zip(leaves, wanted, strict=True):
            leaf.requires_grad_(want)
        y = call(MLP, *inputs)
        some = [leaf for leaf in leaves if leaf.requires_grad]
        assert y.requires_grad == bool(some)
        if not some:
            continue
        with Counting() as counted:
            found = torch.autograd.grad(y, some, torch.ones_like(y))
        grads[wanted] = dict(zip([id(leaf) for leaf in some], found, strict=True))
        for name, value in grads[wanted].items():
            of_all = next(iter(grads.values()))[name]
            torch.testing.assert_close(value, of_all, rtol=1e-4, atol=1e-4)
        past_the_activation = any(leaf is not inputs[3] and leaf is not inputs[4] for leaf in some)
        assert counted.calls["act_linear_backward"] == past_the_activation


@splits_backwards
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("forward", [True, False])
def test_a_split_backward_runs_nothing_twice(
    device: str, monkeypatch: pytest.MonkeyPatch, forward: bool, bias: bool
) -> None:
    """Gradients of activations first and of parameters later, as in zero-bubble schedules."""
    force_epilogues(monkeypatch, forward=forward, backward=True)
    assert_split(MLP, _inputs(device, bias, requires_grad=True))


def test_a_kept_graph_gives_every_gradient_again(device: str, fused: None) -> None:
    inputs = _inputs(device, requires_grad=True)
    assert_kept(call(MLP, *inputs), [inputs[0], inputs[1], inputs[2]])
    assert_kept(call(MLP, *inputs), [inputs[3], inputs[4], inputs[2]])


@pytest.mark.parametrize("forward", [True, False])
def test_second_derivatives(device: str, monkeypatch: pytest.MonkeyPatch, forward: bool) -> None:
    """They equal the reference's."""
    force_epilogues(monkeypatch, forward=forward, backward=True)
    inputs = _inputs(device, rows=3, requires_grad=True)
    leaves = _leaves(inputs)

    def second(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        first = torch.autograd.grad(function(*inputs).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    for a, b in zip(second(lambda *t: call(MLP, *t)), second(MLP.reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-2 * b.abs().max().item())


@pytest.mark.parametrize("forward", [True, False])
def test_compiled(device: str, monkeypatch: pytest.MonkeyPatch, forward: bool) -> None:
    """One graph for any number of rows equals eager with the same kernel."""
    force_epilogues(monkeypatch, forward=forward, backward=True)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *given: call(MLP, *given), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for position, (rows, bias) in enumerate(((24, True), (17, True), (9, True), (9, False))):
        inputs = _inputs(device, bias, rows=rows, requires_grad=True)
        with torch._dynamo.config.patch(error_on_recompile=position in (1, 2)):
            y = compiled(*inputs)
        with Counting() as counted:
            found = torch.autograd.grad(y, _leaves(inputs), torch.ones_like(y))
        assert counted.calls["act_linear_backward"] == 1
        y = call(MLP, *inputs)
        expected = torch.autograd.grad(y, _leaves(inputs), torch.ones_like(y))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_memory(device: str, fused: None) -> None:
    """It saves and holds no more than unfused; with `recompute` it saves only the inputs."""
    if GPU:
        pytest.skip("the memory of torch's GEMMs is not counted there")
    rows, hidden = 512, 256
    leaves = materialize(
        arguments((rows,), 16, hidden, 16, *TANH)[:5],
        torch.float32,
        device,
        requires_grad=True,
    )

    def block(recompute: bool) -> torch.Tensor:
        return functional.mlp(*leaves, approximate="tanh", recompute=recompute)

    assert saved(lambda: block(False), leaves) == [[rows, hidden]] * 2
    assert saved(lambda: block(True), leaves) == []
    with LiveBytes() as live:
        y = block(False)
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert 3 <= live.peak / (rows * hidden * 4) < 3.5
    found = [torch.autograd.grad(block(r).square().sum(), leaves) for r in (False, True)]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


# --- Choice ---------------------------------------------------------------------------------------


@pytest.fixture
def clock(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list[float]]:
    """Fake GPU times, unfused and fused; the contenders still run."""
    if GPU:
        pytest.skip("a GPU has its own clock")
    times = {"forward": [2.0, 1.0], "backward": [2.0, 1.0]}

    def medians(contenders: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        first, second = contenders.values()
        with Counting() as counted:
            unfused = first()
        assert not {"linear_act", "act_linear_backward"} & set(counted.calls)
        is_backward = isinstance(unfused, dict)
        found = second()
        for name, value in (unfused if is_backward else {"y": unfused}).items():
            torch.testing.assert_close(found[name], value, rtol=1e-2, atol=4e-3)
        taken = times["backward" if is_backward else "forward"]
        return dict(zip(contenders, taken, strict=True))

    try_on_cpu(monkeypatch, tmp_path)
    monkeypatch.setattr(asking, "take_times", medians)
    monkeypatch.setattr(epilogue, "_SMALLEST", 0)
    return times


def _ran(inputs: list[Any], function: Callable[..., torch.Tensor] | None = None) -> tuple[int, int]:
    """The number of fused kernels that a call runs in each direction, after the trial."""
    function = function or (lambda *given: call(MLP, *given))
    function(*inputs)
    on_cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=on_cpu, acc_events=True) as profile:
        function(*inputs).sum().backward()
    names = [event.name for event in profile.events()]
    kernels = ("linear_act", "act_linear_backward")
    forward, backward = [names.count(f"torchweld::{kernel}") for kernel in kernels]
    return forward, backward


def _explained(inputs: list[Any]) -> str:
    return torchweld.explain("mlp", *inputs[:5], approximate="tanh").detail


@pytest.mark.parametrize("forward", [2.0, 1.0])
@pytest.mark.parametrize("backward", [2.0, 1.0])
def test_the_faster_is_chosen(
    device: str, clock: dict[str, list[float]], forward: float, backward: float
) -> None:
    """Each direction chooses separately, and compiled code takes the same choice."""
    clock["forward"][0], clock["backward"][0] = forward, backward
    inputs = _inputs(device, dtype=torch.float16, requires_grad=True)
    assert _explained(inputs).count("not timed yet") == 2
    assert _ran(inputs) == (forward > 1, backward > 1)
    first, second = _explained(inputs).split("; in the backward pass ")
    assert ("one kernel for all, measured at 2.00x" in first) == (forward > 1)
    assert ("one kernel for all, measured at 2.00x" in second) == (backward > 1)
    assert ("was measured at 1.00x" in second) == (backward == 1)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: call(MLP, *given), fullgraph=True, backend="aot_eager")
    assert _ran(inputs, compiled) == (forward > 1, backward > 1)


def test_properties_with_separate_timings(device: str, clock: dict[str, list[float]]) -> None:
    """The need for the bias's gradient, the weight's layout, the features, and the dtype."""
    inputs = _inputs(device, dtype=torch.float16, requires_grad=True)
    assert _ran(inputs) == (1, 1)
    clock["backward"][0] = 1.0
    frozen = [t.detach() if at == 2 else t for at, t in enumerate(inputs)]
    transposed = [t.t().contiguous().t() if at == 3 else t for at, t in enumerate(inputs)]
    narrower = [*inputs[:3], inputs[3][:32], inputs[4][:32], *inputs[5:]]
    x, w1, b1, w2, *rest = inputs
    hidden = [x, w1[:24], b1[:24], w2[:, :24], *rest]
    wide = [t.float() if isinstance(t, torch.Tensor) else t for t in inputs]
    for other in (frozen, transposed, narrower, hidden, wide):
        assert _ran(other) == (1, 0)
    assert _ran(inputs) == (1, 1)


def test_unsupported_calls_are_not_chosen(device: str, clock: dict[str, list[float]]) -> None:
    inputs = _inputs(device, dtype=torch.float16, requires_grad=True)
    x, w1, b1, w2, b2, *kind = inputs
    shifted = torch.empty(w2.numel() + 1, dtype=w2.dtype, device=device)[1:].view_as(w2)
    own = type("Own", (torch.Tensor,), {})
    for given, reason in (
        ([x, w1, b1, w2[1:], b2[1:]], "multiples of 8"),
        ([x, w1, b1, shifted.copy_(w2).requires_grad_(), b2], "multiples of 16 bytes"),
        ([x, w1, b1, w2.float(), b2.float()], "different dtypes"),
        ([x, w1.as_subclass(own), b1, w2, b2], "of a subclass"),
        ([x, w1, b1, w2.as_subclass(own), b2], "of a subclass"),
    ):
        assert reason in act_linear.explain(*given)
    assert _ran([x, w1, b1, w2[1:], b2[1:], *kind]) == (1, 0)
    with torch.no_grad():
        assert call(MLP, *inputs).grad_fn is None
    assert "in the backward pass" not in _explained([t.detach() for t in inputs[:5]])


def test_float32_is_multiplied_as_torch_may(
    device: str, clock: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (*_inputs(device, requires_grad=True)[:5], *TANH)
    monkeypatch.setattr(fused_choice, "choose_tile", lambda x, kind, tiles, contest: tiles()[0])
    for precision, algorithm in (("ieee", epilogue._PLAIN), ("tf32", epilogue._TF32)):
        monkeypatch.setattr(fused_choice.kernels(), "precision", lambda found=precision: found)
        assert act_linear.choose_algorithm(*given) == algorithm
