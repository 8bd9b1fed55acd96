"""Edge cases of arguments: NumPy's numbers, constructors, errors that concern two arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import torchweld
from oracle import run
from torchweld import functional, nn
from torchweld.bench.cases import CASES
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.registry import Op, materialize

X, W = torch.ones(4, 8), torch.ones(8)
META, META_W = X.to("meta"), torch.ones(4, 7, device="meta")
BACKENDS = pytest.mark.parametrize("backend", [None, "cpu", "eager"])
softmax: Callable[..., Any] = functional.softmax_dropout
add: Callable[..., Any] = functional.bias_dropout_add


# --- NumPy's numbers ------------------------------------------------------------------------------


@BACKENDS
def test_numpys_numbers_are_numbers(backend: str | None) -> None:
    """They work like Python's, as probabilities, factors, seeds, epsilons and sizes."""
    x = torch.randn(6, 8)
    half, seed, eight = numpy.float32(0.5), numpy.int64(3), numpy.int32(8)
    shard = torchweld.random.Shard((numpy.int64(6), 8), (numpy.int64(0), 0))
    plain = torchweld.random.Shard((6, 8), (0, 0))
    cases: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = [
        (
            lambda **how: softmax(x, **how),
            {"p": half, "scale": numpy.float64(0.5), "seed": seed, "shard": shard},
            {"p": 0.5, "scale": 0.5, "seed": 3, "shard": plain},
        ),
        (
            lambda **how: add(x, None, x, **how),
            {"p": numpy.float16(0.5), "seed": numpy.uint64(3)},
            {"p": 0.5, "seed": 3},
        ),
        (
            lambda **how: functional.layer_norm(x, **how),
            {"normalized_shape": [eight], "eps": half},
            {"normalized_shape": [8], "eps": 0.5},
        ),
        (
            lambda **how: functional.batch_norm_act(x, W.clone(), W.clone(), training=True, **how),
            {"momentum": half, "eps": half},
            {"momentum": 0.5, "eps": 0.5},
        ),
        (
            lambda **how: nn.DropoutAddLayerNorm(**how).eval()(x, x),
            {"normalized_shape": eight, "p": half, "eps": half},
            {"normalized_shape": 8, "p": 0.5, "eps": 0.5},
        ),
    ]
    with torchweld.use_backend(backend):
        for function, given, python in cases:
            assert torch.equal(function(**given), function(**python))


@pytest.mark.parametrize("value", [numpy.bool_(True), numpy.complex64(1), numpy.zeros(1), True])
def test_no_other_seeds(value: Any) -> None:
    with pytest.raises(torchweld.ArgumentError, match="seed"):
        softmax(X, p=0.5, seed=value)


# --- A scale that float32 cannot hold -------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("scale", [1e39, -1e300, torch.inf, torch.nan])
def test_a_scale_that_float32_cannot_hold_is_named(scale: float, backend: str | None) -> None:
    with (
        torchweld.use_backend(backend),
        pytest.raises(torchweld.ArgumentError, match=r"scale is .* that float32 holds"),
    ):
        softmax(X.bfloat16(), scale=scale)
    with pytest.raises(torchweld.ArgumentError, match=r"scale|torch\.float64"):
        nn.SoftmaxDropout(scale=scale)(X)


@BACKENDS
def test_float64_holds_more(backend: str | None) -> None:
    x = torch.randn(4, 8, dtype=torch.float64) * 1e-39
    with torchweld.use_backend(backend):
        torch.testing.assert_close(softmax(x, scale=1e39), torch.softmax(x * 1e39, -1))


# --- Constructors ---------------------------------------------------------------------------------

CONSTRUCTORS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "softmax's p": (lambda: nn.SoftmaxDropout(p=2), "SoftmaxDropout", "p"),
    "softmax's scale": (lambda: nn.SoftmaxDropout(scale=1e400), "SoftmaxDropout", "scale"),
    "add's p": (lambda: nn.BiasDropoutAdd(p=-0.1), "BiasDropoutAdd", "p"),
    "norm's p": (lambda: nn.DropoutAddLayerNorm(8, p=torch.nan), "DropoutAddLayerNorm", "p"),
    "norm's eps": (lambda: nn.DropoutAddRMSNorm(8, eps=-1.0), "DropoutAddRMSNorm", "eps"),
    "linear": (lambda: nn.LinearAct(8, 8, activation="swish"), "LinearAct", "activation"),
    "gelu": (lambda: nn.LinearGELU(8, 8, approximate="erf"), "LinearGELU", "approximate"),
    "mlp": (lambda: nn.MLP(8, 8, activation="swish"), "LinearAct", "activation"),
    "gated mlp": (lambda: nn.GatedMLP(8, 8, activation="swish"), "GatedMLP", "activation"),
    "relu's form": (
        lambda: nn.GatedMLP(8, 8, activation="relu", approximate="tanh"),
        "GatedMLP",
        "approximate",
    ),
    "batch norm": (
        lambda: nn.LinearBatchNormAct(8, 8, activation="swish"),
        "LinearBatchNormAct",
        "activation",
    ),
    "batch norm's eps": (
        lambda: nn.LinearBatchNormAct(8, 8, eps=-1.0),
        "LinearBatchNormAct",
        "eps",
    ),
    "ReLU": (lambda: nn.ReLU(inplace=True), "ReLU", "inplace"),
    "SiLU": (lambda: nn.SiLU(True), "SiLU", "inplace"),
    "GELU": (lambda: nn.GELU("erf"), "GELU", "approximate"),
}


@pytest.mark.parametrize("case", CONSTRUCTORS)
def test_constructors_refuse_the_arguments_that_calls_refuse(case: str) -> None:
    make, function, argument = CONSTRUCTORS[case]
    with pytest.raises(torchweld.ArgumentError) as caught:
        make()
    assert (caught.value.function, caught.value.argument) == (function, argument)


# --- Names ----------------------------------------------------------------------------------------


def test_nodes_have_the_ops_name(op: Op) -> None:
    """In grad_fn, in the profiler, and in the output of anomaly detection."""
    inputs = materialize(CASES[op.name].samples[0], torch.float32)
    seen: set[str] = set()

    def function(*given: Any) -> Any:
        found = call(op, *given)
        seen.update(result.grad_fn.name() for result in as_tuple(found))
        return found

    with torchweld.use_backend("cpu"), torch.profiler.profile(acc_events=True) as profile:
        run(op, inputs, function)
    assert seen == {f"{op.name}_cpuBackward"}
    assert any(f"{op.name}_cpuBackward" in event.key for event in profile.key_averages())


# --- The rest -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_signed_is_true_or_false(dtype: torch.dtype) -> None:
    wrong: Any = None
    with pytest.raises(torchweld.ArgumentError, match="signed is None; accepted: True or False"):
        functional.quantize_8bit(X.to(dtype), signed=wrong)
    codes, absmax = functional.quantize_8bit(X)
    with pytest.raises(torchweld.ArgumentError, match="signed is None"):
        functional.dequantize_8bit(codes, absmax, signed=wrong, dtype=dtype)


META_CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "linear_act": (lambda: functional.linear_act(META, META_W), "weight"),
    "linear_gelu": (lambda: functional.linear_gelu(META, META_W), "weight"),
    "linear_act's bias": (lambda: functional.linear_act(META, META, META[0]), "bias"),
    "mlp": (lambda: functional.mlp(META, META_W, None, META_W, None), "up_weight"),
    "mlp's second": (lambda: functional.mlp(META, META, None, META, None), "down_weight"),
    "gated_mlp": (lambda: functional.gated_mlp(META, META_W, META_W, META), "gate_weight"),
    "linear_batch_norm_act": (
        lambda: functional.linear_batch_norm_act(META, META_W, None, None, None, training=True),
        "weight",
    ),
}


@pytest.mark.parametrize("case", META_CASES)
def test_meta_tensors_are_refused_by_name(case: str) -> None:
    """The error is ours, not torch's error that autocast lacks the device."""
    function, argument = META_CASES[case]
    with pytest.raises(torchweld.ArgumentError) as caught:
        function()
    assert caught.value.argument == argument


BOTH: dict[str, tuple[Callable[[], Any], tuple[str, str]]] = {
    "a weight's dtype": (lambda: functional.layer_norm(X, [8], W.double()), ("weight", "input")),
    "a width": (lambda: functional.layer_norm(X, [7]), ("normalized_shape", "input")),
    "a bias's dtype": (lambda: functional.bias_act(X, W.half()), ("bias", "input")),
    "a bias's size": (lambda: functional.bias_act(X, W[:7]), ("bias", "input")),
    "a device": (lambda: functional.bias_act(X, W.to("meta")), ("bias", "input")),
    "up's dtype": (lambda: functional.gated_act(X, X.half()), ("up", "gate")),
    "up's shape": (lambda: functional.gated_act(X, X[:1]), ("up", "gate")),
    "a residual's dtype": (lambda: add(X, None, X.double()), ("residual", "input")),
    "a residual's shape": (lambda: add(X, None, X[:1]), ("residual", "input")),
    "a stream's dtype": (
        lambda: functional.dropout_add_rms_norm(X, X.double(), W),
        ("residual", "input"),
    ),
    "a mask's dtype": (lambda: softmax(X, W.half()), ("mask", "input")),
    "a mask's shape": (lambda: softmax(X, W[:7] > 0), ("mask", "input")),
    "a linear's width": (lambda: functional.linear_act(X, X[:, :7]), ("weight", "input")),
    "a linear's dtype": (lambda: functional.linear_act(X, X.half()), ("weight", "input")),
    "a linear's bias": (lambda: functional.linear_act(X, X, W), ("bias", "weight")),
    "its dtype": (lambda: functional.linear_act(X, X, W[:4].half()), ("bias", "weight")),
    "a second width": (lambda: functional.mlp(X, X, None, X, None), ("down_weight", "up_weight")),
    "a third": (lambda: functional.gated_mlp(X, X, X, X), ("down_weight", "gate_weight")),
    "a mean": (lambda: functional.normalize_act(X, W[:7], W), ("mean", "input")),
    "a variance": (lambda: functional.normalize_act(X, W, W.double()), ("var", "input")),
    "statistics": (
        lambda: functional.linear_batch_norm_act(X, X, None, W, W, training=True),
        ("running_mean", "weight"),
    ),
    "scales": (
        lambda: functional.dequantize_8bit(torch.zeros(4, 8, dtype=torch.uint8), torch.ones(3, 1)),
        ("absmax", "codes"),
    ),
}


@BACKENDS
@pytest.mark.parametrize("case", BOTH)
def test_both_of_two_arguments_that_differ_are_named(case: str, backend: str | None) -> None:
    """Either may be the wrong one."""
    function, names = BOTH[case]
    with torchweld.use_backend(backend), pytest.raises(torchweld.ArgumentError) as caught:
        function()
    assert caught.value.argument == names[0]
    assert re.search(rf"\b{names[1]}\b", str(caught.value).split("accepted: ")[1])
