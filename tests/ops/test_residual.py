"""The ops of the residual stream: float32 streams, unused results, saved tensors, modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchweld
from conftest import Target
from oracle import incoming, saved_bytes
from torchweld import functional, nn, numerics, random
from torchweld.bench.cases import CASES
from torchweld.dispatch.call import call
from torchweld.registry import OPS, materialize

NORMS = ("dropout_add_layer_norm", "dropout_add_rms_norm")


pytestmark = pytest.mark.usefixtures("kernels")


def _drawn(name: str, dtype: torch.dtype = torch.float32, dropping: bool = True) -> list[Any]:
    """A sample of 64 x 256."""
    op = OPS[name]
    arguments = next(s for s in CASES[op.name].benchmarks if op.draws(s) == dropping)
    return materialize(arguments, dtype, requires_grad=True)


def _leaves(inputs: list[Any]) -> list[torch.Tensor]:
    return [v for v in inputs if isinstance(v, torch.Tensor) and v.requires_grad]


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["bias_dropout_add", *NORMS])
def test_a_16_bit_stream_beside_float32(name: str, dtype: torch.dtype, backend: str) -> None:
    """The sum is float32, as in torch, and the stream's gradient has the stream's dtype."""
    x, stream, weight = torch.randn(64, 256), torch.randn(64, 256, dtype=dtype), torch.randn(256)
    stream.requires_grad_()

    def both(residual: torch.Tensor) -> list[torch.Tensor]:
        function, options = getattr(functional, name), {"p": 0.1, "seed": 3}
        if name == "bias_dropout_add":
            results = [function(x, None, residual, **options)]
        else:
            results = [*function(x, residual, weight, **options, return_residual=True)]
        loss = torch.stack([r.square().sum() for r in results]).sum()
        return [*results, *torch.autograd.grad(loss, stream)]

    with torchweld.use_backend(backend):
        for found, expected in zip(both(stream), both(stream.float()), strict=True):
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
        assert both(stream)[0].dtype == torch.float32


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("used", [0, 1], ids=["z", "y"])
def test_either_result_alone(name: str, used: int) -> None:
    """The gradient of an unused result counts as zero, also when compiled."""
    torch._dynamo.reset()
    op, inputs = OPS[name], _drawn(name)

    def gradients(function: Any) -> tuple[torch.Tensor, ...]:
        result = function(*inputs)[used]
        return torch.autograd.grad(
            result, _leaves(inputs), incoming(result), materialize_grads=True
        )

    expected = gradients(op.reference)
    compiled = torch.compile(lambda *given: call(op, *given), fullgraph=True, backend="aot_eager")
    for function in (lambda *given: call(op, *given), compiled):
        torch.testing.assert_close(gradients(function), expected, **numerics.CHAINED)


@pytest.mark.targets(*NORMS)
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_an_unused_y_adds_no_nan(target: Target, dtype: torch.dtype, p: float) -> None:
    """A gradient of only the stream passes by the norm, whatever the row holds."""
    x, stream, weight = (torch.randn(s).to(dtype) for s in ((5, 48), (5, 48), (48,)))
    x[1, 3], x[2, 7], weight[4] = torch.inf, torch.nan, torch.inf
    tensors = [t.to(target.device).requires_grad_() for t in (x, stream, weight)]
    function = getattr(functional, target.op.name)
    _, z = function(*tensors, p=p, seed=3, return_residual=True)
    grad = incoming(z)
    grad_x, grad_stream, grad_weight = torch.autograd.grad(z, tensors, grad, materialize_grads=True)
    assert torch.equal(grad_stream, grad)
    kept = random.make_mask(x.shape, p, 3).to(target.device) if p else torch.ones_like(x)
    torch.testing.assert_close(grad_x, (grad.float() * kept / (1 - p)).to(dtype))
    assert not grad_weight.any()


@pytest.mark.parametrize("spread", [0.0, 0.01])
@pytest.mark.parametrize("eps", [1e-5, 1e-8])
@pytest.mark.targets(*NORMS)
def test_rows_without_spread(target: Target, dtype: torch.dtype, eps: float, spread: float) -> None:
    """Gradients are the norm's at the stored z: for a constant row, a constant.

    Statistics of a z that is not rounded would make x_hat, which is 0 or of size 1, as large as
    rounding errors divided by sqrt(eps).
    """
    if dtype.itemsize != 2:
        pytest.skip("only 16 bits round z")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 1, generator=generator) + spread * torch.randn(64, 768, generator=generator)
    stream = 30 * torch.randn(64, 1, generator=generator).expand(64, 768)
    grad = torch.randn(64, 768, generator=generator).mul(1e-3).to(dtype).to(target.device)
    weight = torch.ones(768).to(dtype).to(target.device)
    tensors = [t.to(dtype).to(target.device).requires_grad_() for t in (x, stream)]
    function = getattr(functional, target.op.name)
    y, z = function(*tensors, weight, eps=eps, return_residual=True)
    found = torch.autograd.grad(y, tensors[1], grad)[0]

    stored = z.detach().double().requires_grad_()
    norm = torch.layer_norm if "layer" in target.op.name else torch.rms_norm
    rest = (weight.double(), None, eps) if "layer" in target.op.name else (weight.double(), eps)
    expected = torch.autograd.grad(norm(stored, (768,), *rest), stored, grad.double())[0]
    # Rounded once, in float16 perhaps to a subnormal. In float32 the mean is off by a few units of
    # z, which rstd multiplies.
    info = torch.finfo(dtype)
    once = info.eps / 2 * torch.maximum(expected.abs(), torch.tensor(info.smallest_normal))
    centered = stored - stored.mean(-1, keepdim=True) * ("layer" in target.op.name)
    rstd = (centered.square().mean(-1, keepdim=True) + eps).rsqrt()
    relative = 2**-24 * (4 * stored.abs().amax(-1, keepdim=True) * rstd + 32)
    largest = expected.abs().amax(-1, keepdim=True)
    assert torch.all((found - expected).abs() <= 1.01 * once + relative * largest)


def test_shared_gradients_are_not_copied() -> None:
    """Without dropout x's gradient is the stream's, in the same memory."""
    x, bias, residual = _leaves(_drawn("bias_dropout_add", dropping=False))
    grad = torch.randn_like(x)
    y: Any = functional.bias_dropout_add(x, bias, residual)
    found = torch.autograd.grad(y, [x, residual], grad)
    assert [g.data_ptr() for g in found] == [grad.data_ptr()] * 2
    x, residual, weight, bias = _leaves(_drawn("dropout_add_layer_norm", dropping=False))
    y = functional.dropout_add_layer_norm(x, residual, weight, bias)
    found = torch.autograd.grad(y, [x, residual], grad)
    assert found[0].data_ptr() == found[1].data_ptr()


@pytest.mark.parametrize("name", NORMS)
def test_nothing_to_add_and_nothing_to_drop_is_the_norm(name: str) -> None:
    """The results are bitwise equal, and x itself is the stream."""
    x, _, *parameters = _leaves(_drawn(name))
    norm = getattr(functional, name.removeprefix("dropout_add_"))
    y, z = getattr(functional, name)(x, None, *parameters, eps=1e-3, return_residual=True)
    assert torch.equal(y, norm(x, [256], *parameters, eps=1e-3))
    assert z is x


def test_saved_bytes() -> None:
    """Saves the seed and the bias, and for norms z, statistics and parameters; no mask or x."""
    x, bias, residual = _leaves(_drawn("bias_dropout_add", torch.bfloat16))
    seed, parameter, statistic = 8, 2 * 256, 4 * 64
    add = functional.bias_dropout_add
    assert saved_bytes(lambda: add(x, bias, residual, p=0.1)) == parameter + seed
    assert saved_bytes(lambda: add(x, bias, residual)) == parameter
    norm = functional.dropout_add_layer_norm
    x, residual, weight, bias = _leaves(_drawn("dropout_add_layer_norm", torch.bfloat16))
    kept = 2 * x.numel() + 2 * parameter + 2 * statistic
    assert saved_bytes(lambda: norm(x, residual, weight, bias, p=0.1)) == kept + seed
    assert saved_bytes(lambda: norm(x, residual, weight, bias)) == kept
    rms = functional.dropout_add_rms_norm
    kept = 2 * x.numel() + parameter + statistic
    assert saved_bytes(lambda: rms(x, residual, weight, p=0.1)) == kept + seed


# --- Modules --------------------------------------------------------------------------------------

PAIRS = [
    (nn.DropoutAddLayerNorm, torch.nn.LayerNorm),
    (nn.DropoutAddRMSNorm, torch.nn.RMSNorm),
]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("shape", [64, (8, 64)])
def test_norms_are_torchs_after_dropout_and_addition(ours: Any, theirs: Any, shape: Any) -> None:
    """State dicts load either way; pre-norm and post-norm, in training and in eval."""
    module, norm = ours(shape, p=0.4, eps=1e-3, return_residual=True), theirs(shape, eps=1e-3)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    module.load_state_dict(norm.state_dict())
    norm.load_state_dict(module.state_dict())
    x, residual = torch.randn(2, 30, 8, 64)
    torch.manual_seed(7)
    y, z = module(x, residual)
    torch.manual_seed(7)
    trailing = len(norm.normalized_shape)
    kept = random.make_mask(x.shape, 0.4, random.seed(), trailing=trailing)
    torch.testing.assert_close(z, x * kept * random.find_scale(0.4) + residual)
    torch.testing.assert_close(y, norm(z), **numerics.SUMMED)
    module.eval()
    y, z = module(x, residual)
    assert torch.equal(z, x + residual)
    torch.testing.assert_close(y, norm(z), **numerics.SUMMED)
    module.return_residual = False
    assert torch.equal(module(x, residual), y)


def test_bias_dropout_add_module() -> None:
    module = nn.BiasDropoutAdd(0.4)
    x, residual, bias = torch.randn(30, 64), torch.randn(30, 64), torch.randn(64)
    torch.manual_seed(7)
    y = module(x, bias, residual)
    torch.manual_seed(7)
    kept = random.make_mask(x.shape, 0.4, random.seed())
    torch.testing.assert_close(y, (x + bias) * kept * random.find_scale(0.4) + residual)
    assert torch.equal(module.eval()(x, None, residual), x + residual)
    assert repr(module) == "BiasDropoutAdd(p=0.4)"


@pytest.mark.parametrize("rows", [8, 2**15], ids=["small", "large"])
@pytest.mark.parametrize("backend", [None, "cpu", "eager"])
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("name", ["bias_dropout_add", *NORMS])
def test_nothing_is_rounded_before_a_float32_residual(
    name: str, p: float, backend: str | None, rows: int
) -> None:
    """The added term has float32's error, at every size and on every path."""
    torch.manual_seed(0)
    x, bias = torch.randn(rows, 48).bfloat16(), torch.randn(48).bfloat16()
    residual, scale = torch.randn(rows, 48) / 8, 1 / (1 - p)
    kept = (
        torchweld.random.make_mask(x.shape, p, 7) if p else torch.ones(rows, 48, dtype=torch.bool)
    )
    with torchweld.use_backend(backend):
        if name == "bias_dropout_add":
            z = functional.bias_dropout_add(x, bias, residual, p=p, seed=7)
        else:
            bias = torch.zeros(())
            _, z = getattr(functional, name)(x, residual, None, p=p, seed=7, return_residual=True)
    added = (x.double() + bias.double()) * kept * scale
    terms = residual.double().abs() + (x.double().abs() + bias.double().abs()) * kept * scale
    assert z.dtype == torch.float32
    assert torch.all((z - (residual.double() + added)).abs() <= 4 * 2**-24 * terms)
