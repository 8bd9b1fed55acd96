"""linear_act as one cuBLASLt GEMM: its numbers, its graph, and when it is chosen.

On a GPU the real cuBLASLt runs, otherwise the emulator's, which follows the descriptors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, linear

import torchweld
from conftest import EMULATED, GPU, PLACES, running_at
from oracle import assert_bounded, exact, run
from seams import CUBLASLT, TANH, force_epilogues, running_cublaslt
from torchweld import functional
from torchweld.dispatch.call import call
from torchweld.dispatch.engine import asking
from torchweld.ops.gemm import epilogue, fused_choice
from torchweld.ops.gemm.common import arguments
from torchweld.registry import OPS, Op, TensorSpec, activation, materialize, weight
from trying import try_on_cpu

pytestmark = pytest.mark.kernels

LINEAR, MLP = OPS["linear_act"], OPS["mlp"]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


@pytest.fixture(params=CUBLASLT)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of the tensors, with the backend selected by name."""
    yield from running_cublaslt(request.param, monkeypatch)


# Named like the targets of tests/conftest.py, which evidence counts.
@pytest.fixture(
    params=[pytest.param((op, p), id=f"{op}-{p}") for op in (LINEAR, MLP) for p in CUBLASLT]
)
def placed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Op, str]]:
    """An op, and the device of its tensors."""
    op, place = request.param
    for device in running_cublaslt(place, monkeypatch):
        yield op, device


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call runs the kernels, even if they are slower."""
    force_epilogues(monkeypatch, forward=True, backward=True)


def _kernel(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, save_z: bool = True, tile: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.torchweld.linear_act.cuda(x, w, bias, *TANH, tile, save_z)


def _unfused(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    z = linear(x, w, bias)
    return gelu(z, approximate="tanh"), z


# --- Numbers --------------------------------------------------------------------------------------


# Leading sizes, in_features, features after the activation, and for mlp out_features. They are the
# smallest that cuBLASLt accepts in each direction, one that it does not, and enough elements for
# the pools of errors.
_SHAPES: tuple[tuple[tuple[int, ...], int, int, int], ...] = (
    *(((), 8, 8, 8), ((2, 3), 16, 24, 40), ((2, 1, 3, 1), 24, 16, 5), ((160,), 72, 152, 64)),
    *(((2,), 8, 10008, 16), ((16,), 8, 64, 10008)),
)


def _samples(op: Op) -> list[tuple[Any, ...]]:
    first = [(*arguments(*shape), out) for *shape, out in _SHAPES]
    if op is MLP:
        return [
            (x, w, bias, weight(out, w.shape[0]), activation(out), *TANH, False)
            for x, w, bias, out in first
        ]
    return [(x, w, b, *TANH) for x, w, bias, _ in first for b in (bias, None)]


@DTYPES
def test_errors_are_bounded(placed: tuple[Op, str], fused: None, dtype: torch.dtype) -> None:
    """Contract 1 for the kernel, even if it is slower."""
    op, device = placed
    drawn = [materialize(s, dtype, device, seed=seed) for seed, s in enumerate(_samples(op))]
    assert_bounded(op, drawn)


@DTYPES
@pytest.mark.parametrize("with_bias", [True, False])
def test_both_results(device: str, dtype: torch.dtype, with_bias: bool) -> None:
    """y and z; y is the same if z is not requested."""
    x, w, bias = materialize(arguments((3, 5), 48, 40), dtype, device)
    bias = bias if with_bias else None
    y, z = _kernel(x, w, bias)
    wide = [t if t is None else t.double() for t in (x, w, bias)]
    for found, exact_one in zip((y, z), _unfused(*wide), strict=True):
        eps = max(torch.finfo(dtype).eps, 1e-6)
        torch.testing.assert_close(found.double(), exact_one, rtol=2 * eps, atol=8 * eps)
    alone, nothing = _kernel(x, w, bias, save_z=False)
    assert torch.equal(alone, y)
    assert nothing.numel() == 0


@pytest.mark.skipif(PLACES["emulator"][2] is not None, reason=str(PLACES["emulator"][2]))
def test_algorithms_are_raced_at_the_second_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never while a graph is captured; the fastest serves from then on, with the same numbers."""
    library = ctypes.CDLL(str(EMULATED))
    counts = (ctypes.c_int * 8).in_dll(library, "emulator_products")
    captures = ctypes.c_int.in_dll(library, "emulator_captures")

    def ran(x: torch.Tensor, w: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        before = list(counts)
        y, _ = _kernel(x, w, None)
        return [now - then for now, then in zip(counts, before, strict=True)][:5], y

    with running_at("emulator", monkeypatch):
        x, w, _ = materialize(arguments((11,), 16, 56), torch.float32, "cpu")
        first, y = ran(x, w)
        assert first == [1, 0, 0, 0, 0]
        monkeypatch.setattr(captures, "value", 1)
        assert ran(x, w)[0] == first
        monkeypatch.setattr(captures, "value", 0)
        raced, again = ran(x, w)
        assert raced == [4, 5, 4, 4, 0]
        assert torch.equal(again, y)
        later, last = ran(x, w)
        assert later == [0, 1, 0, 0, 0]
        assert torch.equal(last, y)
        other, _ = ran(x[:7], w)  # a size of its own
        assert other == first


def test_layouts(device: str) -> None:
    """Strides, offsets, expanded rows; the surrounding memory is neither read nor changed."""
    x, w, bias = materialize(arguments((24,), 16, 32), torch.float32, device)
    expected = _kernel(x, w, bias)

    def within(t: torch.Tensor, offset: int, step: int) -> torch.Tensor:
        sizes = [size * step + 2 * offset for size in t.shape]
        place = [slice(offset, offset + size * step, step) for size in t.shape]
        whole = torch.full(sizes, torch.nan, device=device)
        whole[tuple(place)] = t
        return whole[tuple(place)]

    for given in (
        (within(x, 4, 1), within(w, 8, 1), within(bias, 4, 1)),
        (within(x, 1, 2), within(w, 3, 2), bias),
        (x.t().contiguous().t(), w.t().contiguous().t(), bias),
        (x, w, within(bias, 1, 1)),  # at an address that cuBLASLt does not accept
        (x, w, within(bias, 4, 1)),  # at the smallest alignment that it accepts
        (within(x.flatten(), 1, 1).view(24, 16), w, bias),
    ):
        before = [t._base.clone() if t._base is not None else t.clone() for t in given]
        for found, right in zip(_kernel(*given), expected, strict=True):
            torch.testing.assert_close(found, right)
        after = [t._base if t._base is not None else t for t in given]
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))
    one = _kernel(x[:1].expand(24, 16), w, bias)[0]
    assert torch.equal(one, one[:1].expand(24, 32))


@pytest.mark.parametrize(
    "sizes",
    [
        *((5, 7, 16), (5, 16, 7), (0, 16, 8), (3, 0, 8), (3, 8, 0), (1, 1, 1)),
        (4, 104, 8),  # the emulator has no algorithm for it
    ],
    ids=str,
)
def test_unsupported_calls_run_torchs_gemm(device: str, sizes: tuple[int, ...]) -> None:
    rows, width, features = sizes
    x, w, bias = materialize(arguments((rows,), width, features), torch.float32, device)
    for given in (bias, None):
        for found, right in zip(_kernel(x, w, given), _unfused(x, w, given), strict=True):
            torch.testing.assert_close(found, right)


def _is_torchs(
    device: str, width: int, features: int, dtype: torch.dtype = torch.float32, rows: int = 64
) -> bool:
    """Whether one of the forms ran torch's GEMM."""
    x, w, bias = materialize(arguments((rows,), width, features), dtype, device)
    on_cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=on_cpu, acc_events=True) as profile:
        for given, save_z in ((bias, True), (bias, False), (None, True), (None, False)):
            _kernel(x, w, given, save_z)
    return any(event.name == "aten::gelu" for event in profile.events())


@DTYPES
def test_supported_calls_run_cublaslt(device: str, dtype: torch.dtype) -> None:
    """The numbers would be right either way, so check which ops ran."""
    assert _is_torchs(device, 128, 65, dtype)
    assert not _is_torchs(device, 128, 64, dtype)


# cublasStatus_t, and numbers that it does not have yet.
STATUSES = {
    "success": 0,
    "not initialized": 1,
    "alloc failed": 3,
    "invalid value": 7,
    "arch mismatch": 8,
    "mapping error": 11,
    "execution failed": 13,
    "internal error": 14,
    "not supported": 15,
    "license error": 16,
    "unknown": 31,
}
planted = pytest.mark.skipif(GPU, reason="only the emulator's cuBLASLt fails on request")


@planted
@pytest.mark.parametrize("status", STATUSES)
def test_a_shape_without_a_plan_runs_torchs_gemm(device: str, status: str) -> None:
    """For good, unless memory was exhausted: that shape works the next time."""
    width = 4104 + 8 * STATUSES[status]
    assert _is_torchs(device, width, 16, rows=8) == (status != "success")
    assert _is_torchs(device, width, 16, rows=8) == (status not in ("success", "alloc failed"))


@planted
@pytest.mark.parametrize("status", STATUSES)
def test_a_product_that_fails_runs_torchs_gemm(device: str, status: str) -> None:
    width = 5128 + 8 * STATUSES[status]
    found = [_is_torchs(device, width, 16, rows=8) for _ in range(2)]
    assert found == [status != "success"] * 2
    if status != "success":
        x, w, bias = materialize(arguments((4,), width, 8), torch.float32, device)
        for ours, right in zip(_kernel(x, w, bias), _unfused(x, w, bias), strict=True):
            torch.testing.assert_close(ours, right)


def test_float32_as_tf32(device: str) -> None:
    """Only if requested."""
    x, w, bias = materialize(arguments((64,), 256, 64), torch.float32, device)
    right = _unfused(*[t.double() for t in (x, w, bias)])[0]
    plain, rounded = (
        (_kernel(x, w, bias, tile=tile)[0] - right).abs().max().item() for tile in (0, 1)
    )
    assert plain < 1e-4 < rounded < 2e-2


def test_arguments_that_do_not_fit_are_refused(device: str) -> None:
    x, w, bias = materialize(arguments((4,), 8, 16), torch.float32, device)
    for wrong in (
        *((x[:, 1:], w, bias), (x, w.half(), bias), (x, w[0], bias)),
        *((x, w, bias[1:]), (x, w, bias.half())),
    ):
        with pytest.raises(RuntimeError, match="fit"):
            _kernel(*wrong)
    with pytest.raises(RuntimeError, match="algorithm"):
        _kernel(x, w, bias, tile=2)
    with pytest.raises(RuntimeError, match="gelu with approximate=tanh"):
        torch.ops.torchweld.linear_act.cuda(x, w, bias, "relu", "none", 0, True)


def test_the_op(device: str) -> None:
    """Its fake is right, with and without z."""
    x, w, bias = materialize(arguments((3, 4), 8, 16), torch.float32, device)
    for save_z in (True, False):
        given = (x, w, bias, *TANH, 0, save_z)
        torch.library.opcheck(torch.ops.torchweld.linear_act.cuda, given)


# --- The graph ------------------------------------------------------------------------------------


def _inputs(op: Op, rows: int, device: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    _, *rest = _samples(op)[1 if op is MLP else 2]
    return materialize([TensorSpec((rows, 16)), *rest], dtype, device)


def test_compiled(placed: tuple[Op, str], fused: None) -> None:
    """One graph for any number of rows equals eager."""
    op, device = placed
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *given: call(op, *given), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for position, rows in enumerate((25, 17, 9)):
        inputs = _inputs(op, rows, device)
        with torch._dynamo.config.patch(error_on_recompile=position > 0):
            found = run(op, inputs, compiled)
        for name, value in run(op, inputs).items():
            torch.testing.assert_close(found[name], value)


def test_autocast(placed: tuple[Op, str], fused: None) -> None:
    """Eager's dtypes, and errors no larger than eager's."""
    op, device = placed
    inputs = _inputs(op, 256, device)
    oracle = exact(op, inputs)
    with torch.autocast(device, torch.bfloat16):
        ours, eager = run(op, inputs), run(op, inputs, op.reference)
    for name, value in eager.items():
        assert ours[name].dtype == value.dtype
        error, theirs = ((v.double() - oracle[name]).square().mean() for v in (ours[name], value))
        assert error <= 1.1**2 * theirs, name


def test_second_derivatives(device: str, fused: None) -> None:
    """They equal the reference's."""
    x, w, bias = materialize(arguments((3,), 8, 16), torch.float32, device, requires_grad=True)

    def second(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaves = (x, w, bias)
        first = torch.autograd.grad(function(x, w, bias).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    def ours(*given: torch.Tensor) -> torch.Tensor:
        return functional.linear_gelu(*given, approximate="tanh")

    for a, b in zip(second(ours), second(lambda *t: _unfused(*t)[0]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


# --- Choice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ({}, "no such epilogue"),
        ({"activation": "silu"}, "no such epilogue"),
        ({"activation": "relu"}, "makes 0 of NaN"),
    ],
)
def test_other_activations_are_refused(device: str, kind: dict[str, str], reason: str) -> None:
    x, w, bias = materialize(arguments((4,), 8, 16), torch.float32, device)
    with pytest.raises(torchweld.BackendError, match=reason):
        functional.linear_act(x, w, bias, **kind)
    with torchweld.use_backend(None):
        assert reason in torchweld.explain("linear_act", x, w, bias, **kind).reasons["cuda"]


def test_the_faster_is_chosen(device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The trial chooses one kernel or two; two run if cuBLASLt does not support the call."""
    if GPU:
        pytest.skip("a GPU has its own clock")
    times = [2.0, 1.0]

    def clock(contenders: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
        unfused, one = (run() for run in contenders.values())
        torch.testing.assert_close(one["y"], unfused, rtol=1e-2, atol=2e-3)
        return dict(zip(contenders, times, strict=True))

    try_on_cpu(monkeypatch, tmp_path)
    monkeypatch.setattr(asking, "take_times", clock)
    monkeypatch.setattr(epilogue, "_SMALLEST", 0)
    x, w, bias = materialize(arguments((24,), 16, 32), torch.float16, device)

    def explained(*given: torch.Tensor, op: str = "linear_act") -> str:
        functional.linear_gelu(*given[:3], approximate="tanh")
        return torchweld.explain(op, *given, approximate="tanh").detail

    assert "one kernel for all, measured at 2.00x" in explained(x, w, bias)
    assert "one kernel for all, measured at 2.00x" in explained(x, w, bias, w.t(), None, op="mlp")
    times = [1.0, 1.0]
    assert "one kernel for all was measured at 1.00x" in explained(x, w, None)
    assert "multiples of 8" in explained(x, w[1:], bias[1:])
    assert "multiples of 16 bytes" in explained(x.flatten()[4:-12].view(-1, 16), w, bias)


def test_float32_is_multiplied_as_torch_may(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for precision, dtype, chosen in (
        ("ieee", torch.float32, epilogue._PLAIN),
        ("tf32", torch.float32, epilogue._TF32),
        ("tf32", torch.bfloat16, epilogue._PLAIN),
    ):
        monkeypatch.setattr(fused_choice.kernels(), "precision", lambda found=precision: found)
        assert epilogue.cublaslts_algorithm(dtype) == chosen
