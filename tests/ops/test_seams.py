"""The contract of GEMMs with ops of ours between them; errors and derivatives are with the ops'."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode

import torchweld
from oracle import TORCH, Pool, exact, run
from torchweld import functional
from torchweld.bench.memory import LiveBytes
from torchweld.dispatch.call import call
from torchweld.ops.activation import common as activations
from torchweld.ops.gemm import epilogue, gemm
from torchweld.registry import OPS, Composite, Op, activation, materialize, weight

SEAMS = [op for op in OPS.values() if isinstance(op, Composite)]
LINEAR = OPS["linear_act"]
splits_backwards = pytest.mark.skipif(
    TORCH < (2, 13), reason="torch 2.11 does not split the backward of an autograd.Function"
)
every_seam = pytest.mark.parametrize("seam", SEAMS, ids=str)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels, also for what is too small to gain."""
    monkeypatch.setattr(gemm, "_SMALLEST", 0)
    monkeypatch.setattr(gemm, "_PRODUCTS_OF_AN_ELEMENT", 0)
    with torchweld.use_backend("cpu"):
        yield


def _inputs(seam: Composite, rows: int = 24, **kwargs: Any) -> list[Any]:
    """Of the widths of the op's second sample, which are odd."""
    x, *rest = seam.samples[1]
    kwargs = {"dtype": torch.float32, **kwargs}
    return materialize([type(x)((rows, x.shape[-1]), x.kind), *rest], **kwargs)


# --- torch's own machinery ----------------------------------------------------------------------


@every_seam
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile_equals_eager(seam: Composite, compiler: str) -> None:
    """One graph. Inductor may give a GEMM to another library."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: call(seam, *given), fullgraph=True, backend=compiler)
    inputs = _inputs(seam)
    eager = run(seam, inputs)
    for name, value in run(seam, inputs, compiled).items():
        if compiler == "aot_eager":
            assert torch.equal(value, eager[name]), name
        torch.testing.assert_close(value, eager[name])


@every_seam
def test_no_recompilation(seam: Composite) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *given: call(seam, *given), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for position, rows in enumerate((4, 6, 9)):
        with torch._dynamo.config.patch(error_on_recompile=position > 0):
            compiled(*_inputs(seam, rows, requires_grad=True)).sum().backward()


def test_recomputation_compiles() -> None:
    torch._dynamo.reset()
    x, weight, bias = _inputs(LINEAR, requires_grad=True)[:3]
    compiled = torch.compile(functional.linear_gelu, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x, weight, bias, recompute=True).sum(), (x, weight, bias))
    expected = torch.autograd.grad(functional.linear_gelu(x, weight, bias).sum(), (x, weight, bias))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@every_seam
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(seam: Composite, dtype: torch.dtype) -> None:
    """Eager's dtypes, and no larger an error."""
    sample = next(s for s in seam.samples if s[0].shape[:1] == (256,))
    inputs = materialize(sample, torch.float32)
    oracle = exact(seam, inputs)
    with torch.autocast("cpu", dtype):
        ours, eager = run(seam, inputs), run(seam, inputs, seam.reference)
    for name, value in eager.items():
        assert ours[name].dtype == value.dtype
        error, theirs = ((v.double() - oracle[name]).square().mean() for v in (ours[name], value))
        assert error <= 1.1**2 * theirs, name


@every_seam
def test_functorch_gets_the_reference_and_a_named_backend_refuses(seam: Composite) -> None:
    inputs = _inputs(seam)
    x = torch.randn(3, *inputs[0].shape)
    tangent = torch.randn_like(x[0])

    def batched(function: Callable[..., Any]) -> torch.Tensor:
        return torch.func.vmap(lambda x: function(x, *inputs[1:]))(x)

    def forward_mode(function: Callable[..., Any]) -> torch.Tensor:
        return torch.func.jvp(lambda x: function(x, *inputs[1:]), (x[0],), (tangent,))[1]

    for transform in (batched, forward_mode):
        with pytest.raises(torchweld.BackendError, match=r"torch\.func"):
            transform(lambda *given: call(seam, *given))
        with torchweld.use_backend(None):
            found = transform(lambda *given: call(seam, *given))
        assert torch.equal(found, transform(seam.reference))
        assert found.any()


def test_explain() -> None:
    x, weight, bias = _inputs(LINEAR, 16384)[:3]
    with torchweld.use_backend(None):
        assert torchweld.explain(functional.linear_act, x, weight, bias).chosen == "cpu"
        small = torchweld.explain(functional.linear_act, x[:1], weight, bias)
        assert "too small" in small.reasons["cpu"]


# --- Layouts ------------------------------------------------------------------------------------


@every_seam
def test_transposed(seam: Composite) -> None:
    """x and the weights, one by one, with columns that are not one element apart."""
    inputs = _inputs(seam)
    plain = run(seam, inputs)
    for at, matrix in enumerate(inputs):
        if isinstance(matrix, torch.Tensor) and matrix.ndim == 2:
            given = [*inputs[:at], matrix.t().contiguous().t(), *inputs[at + 1 :]]
            for name, value in run(seam, given).items():
                torch.testing.assert_close(value, plain[name])


def test_inference_works_in_place_on_the_gemms_result_alone() -> None:
    """The same bits as in training; what came in is as it was."""
    for bias_wanted in (True, False):
        x, weight, bias = _inputs(LINEAR)[:3]
        before = [x.clone(), weight.clone()]
        given = (x, weight, bias if bias_wanted else None)
        trained = functional.linear_gelu(*[t if t is None else t.requires_grad_() for t in given])
        with torch.no_grad(), _Counting() as counted:
            assert torch.equal(functional.linear_gelu(*given), trained)
        assert counted.calls["bias_act_"] == 1
        assert torch.equal(x, before[0])
        assert torch.equal(weight, before[1])


def test_the_op_in_place() -> None:
    """Its schema says what it writes to."""
    z, bias = torch.randn(6, 31), torch.randn(31)
    torch.library.opcheck(torch.ops.torchweld.bias_act_.cpu, (z.clone(), bias, "silu", "none"))
    with pytest.raises(RuntimeError, match="not contiguous"):
        torch.ops.torchweld.bias_act_.cpu(z.t(), None, "silu", "none")
    backward, kind = torch.ops.torchweld.bias_act_backward_.cpu, ("silu", "none", True)
    torch.library.opcheck(backward, (torch.randn(6, 31), z, bias, *kind))
    with pytest.raises(RuntimeError, match="not contiguous"):
        backward(z.t(), z.t(), None, *kind)


# --- What is saved, and what is run ---------------------------------------------------------------


class _Counting(TorchDispatchMode):
    """Counts calls by the op's name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def _saved(function: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> list[list[int]]:
    """Shapes of what is saved for the backward beside the leaves and vectors, which are small."""
    known = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    found: dict[int, list[int]] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        # Checkpoints of older torches than 2.13 leave an empty tensor in a place of their own.
        if t.ndim > 1 and t.numel() and t.untyped_storage().data_ptr() not in known:
            found[t.untyped_storage().data_ptr()] = list(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = function()
    assert result.requires_grad
    return sorted(found.values())


def test_what_is_saved() -> None:
    """x and the pre-activation; of a gated block gate, up and their product; or x alone."""
    leaves = _inputs(LINEAR, requires_grad=True)[:3]
    hidden = [24, 7]
    assert _saved(lambda: functional.linear_gelu(*leaves), leaves) == [hidden]
    assert _saved(lambda: functional.linear_gelu(*leaves, recompute=True), leaves) == []
    leaves = _inputs(OPS["mlp"], requires_grad=True)[:5]
    assert _saved(lambda: functional.mlp(*leaves), leaves) == [hidden, hidden]
    assert _saved(lambda: functional.mlp(*leaves, recompute=True), leaves) == []
    leaves = _inputs(OPS["gated_mlp"], requires_grad=True)[:4]
    assert _saved(lambda: functional.gated_mlp(*leaves), leaves) == [hidden, hidden, hidden]
    with torchweld.use_backend("eager"):
        assert len(_saved(lambda: functional.gated_mlp(*leaves), leaves)) == 4
    assert _saved(lambda: functional.gated_mlp(*leaves, recompute=True), leaves) == []


@pytest.mark.parametrize("seam", [s for s in SEAMS if s.name != "batch_norm_act"], ids=str)
def test_recomputing_changes_no_bit(seam: Composite) -> None:
    inputs = _inputs(seam, requires_grad=True)
    leaves = [v for v in inputs if isinstance(v, torch.Tensor)]
    named = dict(zip(seam.forward_signature.arguments, inputs, strict=True))
    function = getattr(functional, seam.name)
    plain, again = (function(**named | {"recompute": r}) for r in (False, True))
    assert torch.equal(plain, again)
    expected, found = (torch.autograd.grad(y.square().sum(), leaves) for y in (plain, again))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


_OURS = (
    *("bias_act", "bias_act_backward", "bias_act_backward_", "gated_act_backward"),
    *("normalize_act", "normalize_act_backward", "batch_norm_act_grad_x", "act_linear_backward"),
)


@splits_backwards
@every_seam
def test_a_split_backward_runs_nothing_twice(seam: Composite) -> None:
    """Gradients of what flows first, those of the parameters later, as zero-bubble schedules do."""
    _assert_split(seam, _inputs(seam, requires_grad=True))


@splits_backwards
@pytest.mark.parametrize("bias", [True, False])
def test_a_split_backward_of_what_recomputes(bias: bool) -> None:
    """Of the node that has an activation and the linear layer behind it."""
    x, w1, b1, w2, b2, *kind, _ = _inputs(OPS["mlp"], requires_grad=True)
    _assert_split(OPS["mlp"], [x, w1, b1 if bias else None, w2, b2 if bias else None, *kind, True])


def _assert_split(seam: Op, inputs: list[Any]) -> None:
    leaves = [v for v in inputs if isinstance(v, torch.Tensor)]
    with _Counting() as whole:
        expected = torch.autograd.grad(call(seam, *inputs).square().sum(), leaves)
    with _Counting() as split:
        loss = call(seam, *inputs).square().sum()
        (grad_x,), groups = stage_backward_input([loss], None, [inputs[0]], iter(leaves[1:]))
        gemms = split.calls["mm"] + split.calls["addmm"]
        stage_backward_weight(iter(leaves[1:]), groups)
    if gemms:
        assert gemms < whole.calls["mm"] + whole.calls["addmm"]
    for name in ("mm", "addmm", *_OURS):
        assert split.calls[name] == whole.calls[name], name
    for found, wanted in zip([grad_x, *[w.grad for w in leaves[1:]]], expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_kept_graph_gives_every_gradient_again() -> None:
    """Also from a gradient of which an earlier run kept what it did not use."""
    x, weight, bias = _inputs(LINEAR, requires_grad=True)[:3]
    _assert_kept(functional.linear_gelu(x, weight, bias), [x, weight, bias])
    leaves = _inputs(OPS["mlp"], requires_grad=True)[:5]
    _assert_kept(call(OPS["mlp"], *leaves, "gelu", "none", True), leaves[::2])


def _assert_kept(y: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    for wanted in ((0,), (2,), (0, 2), (1,), (0, 1, 2), (2,)):
        some = [leaves[i] for i in wanted]
        found = torch.autograd.grad(y, some, grad, retain_graph=True)
        assert all(torch.equal(f, expected[i]) for f, i in zip(found, wanted, strict=True))
    (other,) = torch.autograd.grad(y, leaves[2], 2 * grad)
    assert torch.equal(other, 2 * expected[2])


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
    """By the mean of the error: what the GEMM leaves of the bias is added before rounding."""
    errors: Counter[tuple[str, bool]] = Counter()
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
    """A part of it in the GEMM and the rest behind it come to what the whole does."""
    bias = torch.tensor([torch.inf, -torch.inf, torch.nan, 0, 1], dtype=dtype)
    x, weight = torch.randn(5, 8, dtype=dtype), torch.randn(5, 8, dtype=dtype)
    for named, approximate in activations.KINDS:
        kind = {"activation": named, "approximate": approximate}
        y = functional.linear_act(x, weight, bias.clone().requires_grad_(), **kind)
        whole = functional.bias_act(torch.nn.functional.linear(x, weight), bias, **kind)
        assert torch.equal(y.isnan(), whole.isnan())
        assert torch.equal(y.isinf(), whole.isinf())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_inference_rounds_the_result_alone(dtype: torch.dtype) -> None:
    """oneDNN activates before it rounds, in any layout; and a NaN stays one."""
    if not gemm._onednn_has(dtype):
        pytest.skip(f"oneDNN has no GEMM of {dtype} on this CPU")
    ours, rounding = Pool(), Pool()
    layouts = (lambda t: t, lambda t: t.t().contiguous().t(), lambda t: torch.cat([t, t])[1::2])
    for arguments in LINEAR.samples:
        x, weight, *rest = materialize(arguments, dtype)
        if x.ndim < 2 or not x.numel() or not weight.numel() or rest[1] not in epilogue._ONEDNN:
            continue
        for layout in layouts:
            given = [layout(x) if x.ndim == 2 else x, weight, *rest]
            with torch.no_grad(), _Counting() as counted:
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
    """State dicts load either way; results and gradients are equal. It is no torch.nn.Linear."""
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
    torch.testing.assert_close(mine(x), other(x))
    for module in (mine, other):
        module(x).square().sum().backward()
    for a, b in zip(mine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def _blocks() -> dict[str, tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]]:
    torch.manual_seed(0)
    mlp = torchweld.nn.MLP(31, 67, activation="silu")
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
    block, plain = _blocks()[first]
    block.recompute = recompute
    assert next(iter(block.state_dict())) == f"{first}.weight"
    x = torch.randn(9, 31)
    parameters = list(block.parameters())
    found = torch.autograd.grad(block(x).square().sum(), parameters)
    expected = torch.autograd.grad(plain(x).square().sum(), parameters)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(block)))
    assert torch.equal(twin(x), block(x))
    if not recompute:
        program = torch.export.export(block, (x,))
        torch.testing.assert_close(program.module()(x), plain(x))
