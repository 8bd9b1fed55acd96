"""Batch normalisation in a step: running statistics, modules, and edge cases."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import selection
import torchweld
from conftest import PLACES
from oracle import assert_same_bits_on_any_threads, exact, incoming, run
from torchweld import numerics
from torchweld.bench.cases import CASES
from torchweld.dispatch.call import call
from torchweld.nn import LinearBatchNormAct
from torchweld.ops.batch_norm import batch_norm_act
from torchweld.registry import BACKENDS, OPS, materialize

WHOLE, LAYER = OPS["batch_norm_act"], OPS["linear_batch_norm_act"]
EITHER = ("cpu", "eager")


pytestmark = pytest.mark.usefixtures("kernels")


def _step(*shape: int, dtype: torch.dtype = torch.float32, **kwargs: Any) -> list[Any]:
    """batch_norm_act's arguments in training."""
    full = next(s for s in CASES[WHOLE.name].samples if s[0].shape == (33, 64))
    width = shape[-1]
    sized = [type(v)(shape if v.kind == "activation" else (width,), v.kind) for v in full[:5]]
    return materialize([*sized, *full[5:]], dtype, **kwargs)


def _eager(x: torch.Tensor, mean: Any, var: Any, weight: Any, bias: Any, *rest: Any) -> Any:
    """The op in plain torch, with a gelu."""
    z = torch.nn.functional.batch_norm(x, mean, var, weight, bias, *rest[:3])
    return torch.nn.functional.gelu(z)


# --- Statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [2, 16, 17, 64, 65, 1024, 1025, 4097])
@pytest.mark.parametrize("width", [1, 31, 67])
def test_statistics_are_right_far_from_zero(rows: int, width: int) -> None:
    """Columns are a thousand standard deviations from zero, and the first row has an outlier.

    The variance is as exact as the rounded values allow: differences of numbers of the mean's size
    may be off by sqrt(rows) roundings of mean * deviation.
    """
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=generator) + 1000
    x[0] -= 3000
    mean, var = torch.ops.torchweld.column_statistics.cpu(x)
    expected_var, expected_mean = torch.var_mean(x.double(), 0, correction=0)
    deviation = expected_var.sqrt()
    assert torch.all((mean - expected_mean).abs() <= 4 * 2**-24 * (1000 + deviation))
    assert torch.all((var - expected_var).abs() <= 64 * 2**-24 * expected_var)


def test_a_constant_column_has_no_variance() -> None:
    mean, var = torch.ops.torchweld.column_statistics.cpu(torch.full((1000, 5), 1.1))
    assert torch.allclose(mean, torch.tensor(1.1), rtol=2**-23)
    assert torch.all(var <= (2**-22) ** 2)


F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


# Dtypes: the input's, and the statistics' and parameters', which have 32 bits under autocast.
@pytest.mark.parametrize(
    ("x_dtype", "dtype"), [(F32, F32), (BF16, BF16), (F16, F16), (F64, F64), (BF16, F32)]
)
@pytest.mark.parametrize("momentum", [0.1, 0.0, 1.0])
@pytest.mark.parametrize("backend", EITHER)
def test_running_statistics_are_torchs(
    x_dtype: torch.dtype, dtype: torch.dtype, momentum: float, backend: str
) -> None:
    """They equal torch's after each of three steps, and evaluation does not change them."""
    inputs = _step(50, 31, dtype=x_dtype, param_dtype=dtype)
    theirs = [t.clone() if isinstance(t, torch.Tensor) else t for t in inputs]
    inputs[6] = theirs[6] = momentum
    versions = [t._version for t in inputs[1:3]]
    for step in range(3):
        inputs[0] = theirs[0] = inputs[0] * 1.5
        with torchweld.use_backend(backend):
            assert call(WHOLE, *inputs).dtype == x_dtype
        _eager(*theirs)
        for mine, other in zip(inputs[1:3], theirs[1:3], strict=True):
            assert mine.dtype == other.dtype == dtype
            torch.testing.assert_close(mine, other)
        if backend == "cpu":  # torch's own kernel does not update them
            moved = zip(inputs[1:3], versions, strict=True)
            assert all(t._version > version + step for t, version in moved)
    before = [t.clone() for t in inputs[1:3]]
    inputs[5] = False
    with torchweld.use_backend(backend):
        call(WHOLE, *inputs)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs[1:3], strict=True))


@pytest.mark.parametrize("backend", EITHER)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 0, 4)])
def test_nothing_leaves_the_running_statistics(shape: tuple[int, ...], backend: str) -> None:
    inputs = _step(*shape)
    before = [t.clone() for t in inputs[1:3]]
    with torchweld.use_backend(backend):
        found = run(WHOLE, inputs)
    assert found["y"].shape == shape
    assert not found["grad_weight"].any()
    assert all(torch.equal(a, b) for a, b in zip(before, inputs[1:3], strict=True))


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_special_values_spoil_only_their_column(special: float) -> None:
    inputs = _step(70, 37)
    inputs[0][3, 5] = special
    found, expected = run(WHOLE, inputs), exact(WHOLE, inputs)
    for name, value in expected.items():
        assert torch.equal(found[name].isnan(), value.isnan()), name
    assert found["y"][:, 5].isnan().all()


# --- Work is split by the shape -------------------------------------------------------------------


@pytest.mark.parametrize("seam", [WHOLE, LAYER], ids=str)
def test_bitwise_the_same(seam: Any) -> None:
    """At any thread count. The bits of the GEMM are torch's."""
    sample = next(s for s in CASES[seam.name].samples if s[0].shape[0] == 256)
    inputs = materialize(sample, torch.float32)
    if seam is LAYER:
        inputs[0], inputs[1] = inputs[0].round(), inputs[1].round()  # sums are exact in any order
    gemms = ("grad_input", "grad_weight", "grad_bias") if seam is LAYER else ()
    assert_same_bits_on_any_threads(
        lambda: [value for name, value in run(seam, inputs).items() if name not in gemms]
    )


# --- The linear layer's bias, and relu ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
def test_a_bias_before_training_is_cancelled(dtype: torch.dtype, affine: bool) -> None:
    """The result does not change, the bias's gradient is zero, the running mean includes it."""
    inputs = materialize(CASES[LAYER.name].samples[3], dtype)
    if not affine:
        inputs[5:7] = None, None
    bias = torch.randn(127, dtype=dtype)
    results = []
    for given in (None, bias):
        inputs[3:5] = torch.zeros(127), torch.ones(127)
        inputs[2] = given
        results.append((run(LAYER, inputs), *inputs[3:5]))
    (without, mean, var), (found, mean_with, var_with) = results
    assert not found.pop("grad_bias").any()
    assert found.keys() == without.keys()
    assert all(torch.equal(value, found[name]) for name, value in without.items())
    torch.testing.assert_close(mean_with, mean + 0.1 * bias.float())
    assert torch.equal(var, var_with)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_relu_is_as_exact_as_eagers(training: bool, dtype: torch.dtype) -> None:
    """If rounding moves z across the kink, a gradient is entirely wrong.

    In float16 about 0.2 * 2^-12 of a million elements are affected: 50, so the root mean square
    error varies by a tenth. bn_weight's gradient is left out: it depends on a few columns with a
    distant kink, and so on chance.
    """
    x, *rest = CASES[LAYER.name].samples[3]
    inputs = materialize([type(x)((8192, 67)), *rest], dtype, param_dtype=torch.float32)
    inputs[2] = torch.randn(127, dtype=dtype)
    inputs[7], inputs[-2:] = training, ("relu", "none")
    oracle, ours = exact(LAYER, inputs), run(LAYER, inputs)
    eager = run(LAYER, inputs, LAYER.reference)
    for name in ("y", "grad_input", "grad_weight"):
        errors = [(r[name].double() - oracle[name]).square().mean().sqrt() for r in (ours, eager)]
        print(f"{name}: {errors[0]:.3g}, eager {errors[1]:.3g}")
        assert errors[0] <= 1.3 * errors[1], name


def test_evaluation_overwrites_only_the_gemms_result() -> None:
    """The inputs do not change, and the results equal those with gradients."""
    inputs = materialize(CASES[LAYER.name].samples[3], torch.float32)
    inputs[2], inputs[7] = torch.randn(127), False
    before = [t.clone() for t in inputs if isinstance(t, torch.Tensor)]
    expected = run(LAYER, inputs)["y"]
    with torch.no_grad():
        torch.testing.assert_close(call(LAYER, *inputs), expected)
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


def test_the_ops_schemas() -> None:
    """The schemas mark the tensors that are written, and fakes agree."""
    x, mean, var, weight, bias = _step(24, 31)[:5]
    ops, kind = torch.ops.torchweld, (1e-5, "silu", "none")
    torch.library.opcheck(ops.normalize_act_.cpu, (x.clone(), mean, var, weight, bias, *kind))
    torch.library.opcheck(ops.column_statistics.cpu, (x,))
    grad_x = (incoming(x), x, mean, var, weight, None, mean.clone(), var.clone(), *kind)
    torch.library.opcheck(ops.batch_norm_act_grad_x.cpu, grad_x)
    with pytest.raises(RuntimeError, match="not contiguous"):
        ops.normalize_act_.cpu(x.t(), mean[:24], var[:24], None, None, *kind)


@pytest.mark.skipif(
    PLACES["interpreter"][2] is not None, reason="Triton is missing, or a GPU runs it"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (33, 64), (257, 31), (5, 1030)], ids=str)
def test_triton_in_the_interpreter(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training step, with errors within a factor of the CPU kernels' largest error."""
    monkeypatch.setattr(BACKENDS["triton"], "devices", {"cpu"})
    inputs = _step(*shape, dtype=dtype, param_dtype=torch.float32)
    inputs[0] = inputs[0] + 3
    oracle, cpu = exact(WHOLE, inputs), run(WHOLE, inputs)
    with torchweld.use_backend("triton"):
        found = run(WHOLE, inputs)
        mean, var = torch.ops.torchweld.column_statistics.triton(inputs[0])
    for name, value in oracle.items():
        mine, theirs = ((r[name].double() - value).abs().max() for r in (found, cpu))
        assert mine <= 4 * theirs + 4 * 2**-24 * value.abs().max(), name
    expected_var, expected_mean = torch.var_mean(inputs[0].double(), 0, correction=0)
    assert torch.all((mean - expected_mean).abs() <= 8 * 2**-24 * (4 + expected_mean.abs()))
    assert torch.all((var - expected_var).abs() <= 64 * 2**-24 * expected_var)


# --- Modules --------------------------------------------------------------------------------------


def _pair(**kwargs: Any) -> tuple[LinearBatchNormAct, torch.nn.Sequential]:
    """The same layer as our module and as torch's modules."""
    torch.manual_seed(0)
    mine = LinearBatchNormAct(67, 31, **kwargs)
    with torch.no_grad():
        for parameter in mine.norm.parameters():
            parameter.normal_()
    other = torch.nn.Sequential(*copy.deepcopy([mine.linear, mine.norm]), torch.nn.GELU())
    return mine, other


def _buffers(module: torch.nn.Module) -> list[torch.Tensor]:
    return [b.clone() for b in module.buffers()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": None},
        {"momentum": 0.4, "eps": 0.1, "bias": False},
        {"affine": False},
        {"track_running_stats": False},
        {"recompute": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", EITHER)
def test_the_module_is_linear_batch_norm_and_gelu(options: dict[str, Any], backend: str) -> None:
    """Results, gradients and buffers over four batches; the third is evaluated."""
    mine, other = _pair(**options)
    with torchweld.use_backend(backend):
        for batch, training in enumerate((True, True, False, True)):
            x = torch.randn(40, 67) + batch
            found, expected = mine.train(training)(x), other.train(training)(x)
            torch.testing.assert_close(found, expected, **numerics.CHAINED_SMALL)
            for module, y in ((mine, found), (other, expected)):
                module.zero_grad()
                y.square().sum().backward()
            for a, b in zip(mine.parameters(), other.parameters(), strict=True):
                # torch's gradient of a cancelled bias is the rounding error of its terms
                torch.testing.assert_close(a.grad, b.grad, **numerics.CANCELLED)
            for its, wanted in zip(_buffers(mine), _buffers(other), strict=True):
                assert its.dtype == wanted.dtype
                torch.testing.assert_close(its, wanted)


def test_leading_dimensions_are_the_batch() -> None:
    mine, other = _pair()
    x = torch.randn(4, 5, 67)
    torch.testing.assert_close(mine(x), other(x.view(20, 67)).view(4, 5, 31))


def test_state_dicts_and_conversions() -> None:
    """Keys match the two modules', and conversion keeps their tensors."""
    mine, other = _pair()
    names = [key.replace("linear.", "0.").replace("norm.", "1.") for key in mine.state_dict()]
    assert names == list(other.state_dict())
    mine.linear.load_state_dict(other[0].state_dict())
    twin = LinearBatchNormAct.from_modules(other[0], other[1].eval(), activation="relu")
    assert twin.linear.weight is other[0].weight
    assert not twin.training
    x = torch.randn(9, 67)
    torch.testing.assert_close(twin(x), torch.relu(other[1](other[0](x))))


def test_a_frozen_norm_in_a_trained_layer() -> None:
    """The norm's own mode counts, as in torch: it uses given statistics but still has gradients."""
    mine, other = _pair()
    for module in (mine, other):
        module.train()
    mine.norm.eval()
    other[1].eval()
    x = torch.randn(40, 67)
    found, expected = (
        torch.autograd.grad(m(x).square().sum(), list(m.parameters())) for m in (mine, other)
    )
    torch.testing.assert_close(found, expected, **numerics.CHAINED)
    assert not mine.norm.num_batches_tracked


def test_adapted_modules_are_called() -> None:
    """A subclass that computes something else is not treated as a linear layer."""
    mine, _ = _pair()

    class Doubled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    expected = mine.norm
    x = torch.randn(4, 10, 67)
    z = 2 * torch.nn.functional.linear(x, mine.linear.weight, mine.linear.bias)
    wanted = torch.nn.functional.gelu(copy.deepcopy(expected)(z.view(40, 31)).view(4, 10, 31))
    mine.linear.__class__ = Doubled
    torch.testing.assert_close(mine(x), wanted)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backend", [*EITHER, None])
def test_a_checkpoint_updates_once(reentrant: bool, backend: str | None) -> None:
    """Recomputation does not count a batch twice, as it does in torch's own modules."""
    mine, _ = _pair()
    plain_mine = copy.deepcopy(mine)
    x = torch.randn(40, 67, requires_grad=True)
    with torchweld.use_backend(backend):
        checkpoint(mine, x, use_reentrant=reentrant).square().sum().backward()
        plain_mine(x).square().sum().backward()
    for a, b in zip(mine.parameters(), plain_mine.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    torch.testing.assert_close(_buffers(mine), _buffers(plain_mine), **numerics.SAME)


@pytest.mark.parametrize(
    ("compiler", "recompute", "momentum"),
    selection.combine(("aot_eager", "inductor"), (False, True), (0.1, None)),
)
def test_the_module_compiles(momentum: float | None, recompute: bool, compiler: str) -> None:
    """One graph, buffers updated in it, no compilation for a later step."""
    torch._dynamo.reset()
    mine, _ = _pair(momentum=momentum, recompute=recompute)
    twin = copy.deepcopy(mine)
    compiled = torch.compile(mine, fullgraph=True, backend=compiler)
    for step in range(3):
        x = torch.randn(40, 67)
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            found = compiled(x)
        torch.testing.assert_close(found, twin(x))
        found.square().sum().backward()
        torch.testing.assert_close(_buffers(mine), _buffers(twin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [2, 40, 2000])
def test_few_elements_take_torchs_op(rows: int, dtype: torch.dtype) -> None:
    """Its steps took five times torch's one op, and running statistics most of that.

    Calls of few elements are torch's, and have its bits, the first one and later ones.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*size, generator=generator).to(dtype) for size in ((rows, 64), (64,), (64,))
    )
    for trains in (False, True):
        found, wanted = ([torch.zeros(64).to(dtype), torch.ones(64).to(dtype)] for _ in range(2))
        leaf = x.clone().requires_grad_(trains)
        for _ in range(4):
            with torchweld.use_backend(None):
                y = torchweld.functional.batch_norm_act(leaf, *found, weight, bias, True)
            z = torch.nn.functional.batch_norm(x, wanted[0], wanted[1], weight, bias, True)
        near = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
        torch.testing.assert_close([y, *found], [torch.nn.functional.gelu(z), *wanted], **near)
        if x.numel() < batch_norm_act._FEW[dtype.itemsize == 2]:
            assert torch.equal(found[0], wanted[0])
            assert torch.equal(y, torch.nn.functional.gelu(z))
