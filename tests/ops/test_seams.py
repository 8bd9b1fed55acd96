"""What composites add to the contract, on the CPU; tests/contract has the rest of it."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fusable
import seams
import torchweld
from oracle import Pool, exact, run
from selection import WHOLE
from torchweld import functional
from torchweld.bench.cases import CASES
from torchweld.bench.measure.memory import LiveBytes
from torchweld.dispatch.call import call
from torchweld.ops import activation as activations
from torchweld.ops.gemm import epilogue, gemm
from torchweld.registry import OPS, Composite, activation, materialize, weight
from torchweld.registry.processor import has_units

SEAMS = [op for op in OPS.values() if isinstance(op, Composite)]
LINEAR = OPS["linear_act"]
every_seam = pytest.mark.parametrize("seam", SEAMS, ids=str)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use kernels for small inputs too."""
    monkeypatch.setattr(gemm, "_SMALLEST", 0)
    monkeypatch.setattr(gemm, "_PRODUCTS_OF_AN_ELEMENT", 0)
    with torchweld.use_backend("cpu"):
        yield


# --- torch's own machinery ----------------------------------------------------------------------


@every_seam
# Inductor compiles the graph that aot_eager runs.
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"] if WHOLE else ["inductor"])
def test_compile_equals_eager(seam: Composite, compiler: str) -> None:
    seams.assert_compiled_equals_eager(seam, compiler)


@every_seam
def test_no_recompilation(seam: Composite) -> None:
    seams.assert_compiled_once(seam)


def test_recomputation_compiles() -> None:
    torch._dynamo.reset()
    x, weight, bias = seams.inputs_of(LINEAR, requires_grad=True)[:3]
    compiled = torch.compile(functional.linear_gelu, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x, weight, bias, recompute=True).sum(), (x, weight, bias))
    expected = torch.autograd.grad(functional.linear_gelu(x, weight, bias).sum(), (x, weight, bias))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_explain() -> None:
    x, weight, bias = seams.inputs_of(LINEAR, 16384)[:3]
    with torchweld.use_backend(None):
        for rows in (x, x[:1]):
            assert torchweld.explain(functional.linear_act, rows, weight, bias).chosen == "cpu"
        small = torchweld.explain(functional.layer_norm, x[:1], x.shape[1:])
        assert "too small" in small.reasons["cpu"]


# --- Plans --------------------------------------------------------------------------------------


class _Seeing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@every_seam
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("cast", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_plans_have_the_bits_of_calls_that_a_mode_sees(
    seam: Composite, dtype: torch.dtype, cast: torch.dtype | None, trains: bool
) -> None:
    """Under a mode each step asks what to do; without one all is decided. A planned layer divided
    its bias in float32 under autocast, and lost its rounding: tests of warm calls compared plans
    with plans."""
    found = []
    for mode in (contextlib.nullcontext(), _Seeing()):
        torch.manual_seed(0)
        given = materialize(seam.sized((40,), (64,)), dtype, "cpu", requires_grad=trains)
        autocast = torch.autocast("cpu", cast, enabled=cast is not None)
        with mode, autocast, torch.set_grad_enabled(trains):
            y = call(seam, *given)
            leaves = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
            made = torch.autograd.grad(y.float().sin().sum(), leaves) if trains else ()
        found.append((y, *made))
    for one, other in zip(*found, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


# --- Layouts ------------------------------------------------------------------------------------


def test_inference_overwrites_only_the_gemms_result() -> None:
    """The same bits as in training, and the inputs do not change."""
    for bias_wanted in (True, False):
        x, weight, bias = seams.inputs_of(LINEAR)[:3]
        before = [x.clone(), weight.clone()]
        given = (x, weight, bias if bias_wanted else None)
        trained = functional.linear_gelu(*[t if t is None else t.requires_grad_() for t in given])
        with torch.no_grad(), seams.Counting() as counted:
            assert torch.equal(functional.linear_gelu(*given), trained)
        assert counted.calls["bias_act_"] == 1
        assert torch.equal(x, before[0])
        assert torch.equal(weight, before[1])


def test_the_op_in_place() -> None:
    """Its schema marks the tensors that it writes."""
    z, bias = torch.randn(6, 31), torch.randn(31)
    torch.library.opcheck(torch.ops.torchweld.bias_act_.cpu, (z.clone(), bias, "silu", "none"))
    with pytest.raises(RuntimeError, match="not contiguous"):
        torch.ops.torchweld.bias_act_.cpu(z.t(), None, "silu", "none")
    backward, kind = torch.ops.torchweld.bias_act_backward_.cpu, ("silu", "none", True)
    torch.library.opcheck(backward, (torch.randn(6, 31), z, bias, *kind))
    with pytest.raises(RuntimeError, match="not contiguous"):
        backward(z.t(), z.t(), None, *kind)


# --- Saved tensors and kernels run ----------------------------------------------------------------


def test_what_is_saved() -> None:
    seams.assert_saves_no_more()


@pytest.mark.parametrize("seam", [s for s in SEAMS if s.name != "batch_norm_act"], ids=str)
def test_recomputing_changes_no_bit(seam: Composite) -> None:
    seams.assert_recomputed_is_equal(seam)


@seams.splits_backwards
@every_seam
def test_a_split_backward_runs_nothing_twice(seam: Composite) -> None:
    seams.assert_split(seam, seams.inputs_of(seam, requires_grad=True))


@seams.splits_backwards
@pytest.mark.parametrize("bias", [True, False])
def test_a_split_backward_with_recomputation(bias: bool) -> None:
    """The node of an activation and the linear layer after it."""
    x, w1, b1, w2, b2, *kind, _ = seams.inputs_of(OPS["mlp"], requires_grad=True)
    given = [x, w1, b1 if bias else None, w2, b2 if bias else None, *kind, True]
    seams.assert_split(OPS["mlp"], given)


def test_a_kept_graph_gives_every_gradient_again() -> None:
    seams.assert_graphs_can_be_kept()


# --- Peak memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "recompute", "ours", "eagers"),
    [("mlp", False, 3, 3), ("mlp", True, 2, 3), ("gated_mlp", False, 5, 6)],
)
def test_peak_memory(
    name: str, recompute: bool, ours: int, eagers: int, dtype: torch.dtype
) -> None:
    """Forward and backward hold fewer tensors of the hidden layer's size than eager torch's."""
    rows, width, hidden = 512, 16, 256
    first, last = weight(hidden, width), weight(width, hidden)
    specs = {
        "mlp": (first, activation(hidden), last, activation(width)),
        "gated_mlp": (first, first, last),
    }[name]
    leaves = materialize((activation(rows, width), *specs), dtype, requires_grad=True)
    seen = {}
    for backend in ("eager", "cpu"):
        with torchweld.use_backend(backend), LiveBytes() as live:
            y = getattr(functional, name)(*leaves, recompute=recompute)
            torch.autograd.grad(y, leaves, torch.ones_like(y))
        seen[backend] = live.peak / (rows * hidden * dtype.itemsize)
    print(f"{name}: {seen}")
    assert ours <= seen["cpu"] < ours + 0.5
    assert eagers <= seen["eager"] < eagers + 0.5


# --- Exactness in 16 bits -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [("gelu", "none"), ("gelu", "tanh"), ("silu", "none")], ids=str)
def test_bfloat16_is_closer_to_the_truth_than_eager(kind: tuple[str, str]) -> None:
    """In mean error: the rest of the bias is added before rounding."""
    errors: defaultdict[tuple[str, bool], float] = defaultdict(float)
    for _ in range(4):
        x, weight = torch.randn(1024, 256).bfloat16(), (torch.randn(384, 256) / 16).bfloat16()
        inputs = [x, weight, torch.randn(384).bfloat16(), *kind]
        oracle = exact(LINEAR, inputs)
        both = {True: run(LINEAR, inputs), False: run(LINEAR, inputs, LINEAR.reference)}
        for (ours, found), name in itertools.product(both.items(), oracle):
            errors[name, ours] += (found[name].double() - oracle[name]).abs().mean().item()
    for name in oracle:
        print(
            f"{name} {kind}: {errors[name, True] / errors[name, False]:.4f} of eager's mean error"
        )
        assert errors[name, True] < errors[name, False], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_bias_may_be_infinite(dtype: torch.dtype) -> None:
    """The part of the bias in the GEMM and the rest added after it act like the whole bias."""
    bias = torch.tensor([torch.inf, -torch.inf, torch.nan, 0, 1], dtype=dtype)
    x, weight = torch.randn(5, 8, dtype=dtype), torch.randn(5, 8, dtype=dtype)
    for named, approximate in activations.KINDS:
        kind = {"activation": named, "approximate": approximate}
        y = functional.linear_act(x, weight, bias.clone().requires_grad_(), **kind)
        whole = functional.bias_act(torch.nn.functional.linear(x, weight), bias, **kind)
        assert torch.equal(y.isnan(), whole.isnan())
        assert torch.equal(y.isinf(), whole.isinf())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inference_rounds_only_the_result(dtype: torch.dtype) -> None:
    """oneDNN applies the activation before it rounds, in any layout, and keeps NaN."""
    if not has_units(dtype):
        pytest.skip(f"oneDNN has no GEMM of {dtype} on this CPU")
    ours, rounding = Pool(), Pool()
    layouts = (lambda t: t, lambda t: t.t().contiguous().t(), lambda t: torch.cat([t, t])[1::2])
    for arguments in CASES[LINEAR.name].samples:
        x, weight, *rest = materialize(arguments, dtype)
        if x.ndim < 2 or not x.numel() or not weight.numel() or rest[1] not in epilogue._ONEDNN:
            continue
        if not epilogue._onednn_keeps_nan(dtype, *rest[1:]):
            continue  # a pass follows: one more rounding
        for layout in layouts:
            given = [layout(x) if x.ndim == 2 else x, weight, *rest]
            with torch.no_grad(), seams.Counting() as counted:
                y = call(LINEAR, *given)
            assert not counted.calls["bias_act_"]
            oracle = exact(LINEAR, given)["y"]
            ours.add(y - oracle, oracle)
            rounding.add(oracle.to(dtype) - oracle, oracle)
    print(f"{ours.rms / rounding.rms:.3f} of what rounding costs")
    assert ours.rms <= 1.1 * rounding.rms
    x = torch.full((2, 8), torch.nan, dtype=dtype)
    for kind in activations.KINDS:
        assert call(LINEAR, x, torch.ones(3, 8, dtype=dtype), None, *kind).isnan().all()


# --- Modules --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_linear_gelu_is_linear_and_gelu(bias: bool, approximate: str) -> None:
    """State dicts load both ways; results and gradients are equal; it is not a torch.nn.Linear."""
    torch.manual_seed(0)
    mine = torchweld.nn.LinearGELU(67, 31, bias, approximate=approximate)
    torch.manual_seed(0)
    linear = torch.nn.Linear(67, 31, bias)
    other = torch.nn.Sequential(linear, torch.nn.GELU(approximate))
    assert not isinstance(mine, torch.nn.Linear)
    assert all(
        torch.equal(a, b) for a, b in zip(mine.parameters(), other.parameters(), strict=True)
    )
    linear.load_state_dict(mine.state_dict())
    mine.load_state_dict(linear.state_dict())
    x = torch.randn(5, 1, 67, requires_grad=True)
    torch.testing.assert_close(fusable.run(mine, x), fusable.run(other, x))


def _blocks() -> dict[str, tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]]:
    torch.manual_seed(0)
    mlp: Any = torchweld.nn.MLP(31, 67, activation="silu")
    gated = torchweld.nn.GatedMLP(31, 67)
    silu = torch.nn.functional.silu
    return {
        "fc1": (mlp, lambda x: mlp.fc2(silu(x @ mlp.fc1.weight.t() + mlp.fc1.bias))),
        "gate_proj": (
            gated,
            lambda x: gated.down_proj(silu(gated.gate_proj(x)) * gated.up_proj(x)),
        ),
    }


@pytest.mark.parametrize("first", ["fc1", "gate_proj"])
@pytest.mark.parametrize("recompute", [False, True])
def test_blocks(first: str, recompute: bool) -> None:
    block: Any
    block, plain = _blocks()[first]
    block.recompute = recompute
    assert next(iter(block.state_dict())) == f"{first}.weight"
    x = torch.randn(9, 31)
    parameters = list(block.parameters())
    found = torch.autograd.grad(block(x).square().sum(), parameters)
    expected = torch.autograd.grad(plain(x).square().sum(), parameters)
    torch.testing.assert_close(found, expected)
