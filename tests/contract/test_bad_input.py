"""Contract 4: errors name the argument, what came and what is accepted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchweld
from torchweld import functional

X, W, B = torch.ones(4, 8), torch.ones(8), torch.ones(8)
SEED = torch.tensor([7])
Shard = torchweld.random.Shard

softmax: Callable[..., Any] = functional.softmax_dropout
add: Callable[..., Any] = functional.bias_dropout_add
add_norm: Callable[..., Any] = functional.dropout_add_layer_norm
given: Callable[..., Any] = functional.normalize_act
norm: Callable[..., Any] = functional.batch_norm_act
linear_norm: Callable[..., Any] = functional.linear_batch_norm_act

BAD: dict[str, tuple[Callable[[], Any], str, str]] = {
    "width": (lambda: functional.layer_norm(X, [7]), "normalized_shape", r"\[4, 8\]"),
    "no width": (lambda: functional.layer_norm(X, []), "normalized_shape", "last dimensions"),
    "rank": (lambda: functional.layer_norm(X, [2, 4, 8]), "normalized_shape", "last dimensions"),
    "not a shape": (lambda: functional.layer_norm(X, "ab"), "normalized_shape", "sequence of ints"),
    "weight's size": (lambda: functional.layer_norm(X, [8], torch.ones(7)), "weight", r"\[8\]"),
    "bias's size": (lambda: functional.layer_norm(X, [8], W, torch.ones(1)), "bias", r"\[8\]"),
    "weight's dtype": (lambda: functional.layer_norm(X, [8], W.double()), "weight", "float32"),
    "16-bit mix": (
        lambda: functional.layer_norm(X.bfloat16(), [8], W.half(), B.half()),
        "weight",
        "bfloat16 or float32",
    ),
    "bias unlike weight": (
        lambda: functional.layer_norm(X.bfloat16(), [8], W, B.bfloat16()),
        "bias",
        "the same",
    ),
    "device": (
        lambda: functional.layer_norm(X, [8], W.to("meta")),
        "weight",
        "device of input, cpu",
    ),
    "negative eps": (lambda: functional.layer_norm(X, [8], W, B, -1e-5), "eps", ">= 0"),
    "NaN eps": (lambda: functional.layer_norm(X, [8], W, B, torch.nan), "eps", ">= 0"),
    "eps of another type": (lambda: functional.layer_norm(X, [8], W, B, "1"), "eps", ">= 0"),
    "integers": (lambda: functional.layer_norm(X.int(), [8]), "input", "float32 or bfloat16"),
    "complex": (
        lambda: functional.layer_norm(X.to(torch.cfloat), [8]),
        "input",
        "float32 or bfloat16",
    ),
    "sparse": (
        lambda: functional.layer_norm(X.to_sparse(), [8]),
        "input",
        "a dense or jagged tensor",
    ),
    "no tensor": (lambda: functional.layer_norm([[1.0]], [1]), "input", "a tensor"),  # type: ignore
    "rms width": (lambda: functional.rms_norm(X, [7]), "normalized_shape", r"\[4, 8\]"),
    "rms weight": (lambda: functional.rms_norm(X, [8], torch.ones(9)), "weight", r"\[8\]"),
    "rms eps": (lambda: functional.rms_norm(X, [8], W, -1.0), "eps", ">= 0"),
    "rms NaN eps": (lambda: functional.rms_norm(X, [8], W, torch.nan), "eps", ">= 0"),
    "bias's length": (lambda: functional.bias_act(X, B[:1]), "bias", r"last size of input, \[8\]"),
    "bias's type": (lambda: functional.bias_act(X, B.double()), "bias", "float32"),
    "no dimensions": (lambda: functional.bias_act(X[0, 0], B[:1]), "input", r"\[\*, width\]"),
    "activation": (
        lambda: functional.bias_act(X, B, activation="elu"),
        "activation",
        "gelu or relu or silu or quick_gelu",
    ),
    "approximate": (lambda: functional.bias_act(X, B, approximate="erf"), "approximate", "tanh"),
    "silu has no tanh": (
        lambda: functional.gated_act(X, X, approximate="tanh"),
        "approximate",
        "none",
    ),
    "up's shape": (lambda: functional.gated_act(X, X[:1]), "up", r"shape of gate, \[4, 8\]"),
    "up's dtype": (lambda: functional.gated_act(X, X.half()), "up", "float32"),
    "weight's features": (lambda: functional.linear_act(X, torch.ones(3, 7)), "weight", ", 8]"),
    "weight's rank": (lambda: functional.linear_act(X, W), "weight", "out_features, 8"),
    "weight's precision": (
        lambda: functional.linear_act(X, torch.ones(3, 8).half()),
        "weight",
        "float32",
    ),
    "linear's bias": (lambda: functional.linear_act(X, X, B), "bias", r"\[4\]"),
    "linear's mix": (lambda: functional.linear_act(X, X, B[:4].half()), "bias", "float32"),
    "linear's activation": (
        lambda: functional.linear_act(X, X, activation="x"),
        "activation",
        "or",
    ),
    "second weight": (
        lambda: functional.mlp(X, X, None, X, None),
        "down_weight",
        "out_features, 4",
    ),
    "first bias": (lambda: functional.mlp(X, X, B, X.t(), None), "up_bias", r"\[4\]"),
    "up's weight": (lambda: functional.gated_mlp(X, X, X[:3], X.t()), "up_weight", r"\[4, 8\]"),
    "down's weight": (lambda: functional.gated_mlp(X, X, X, X), "down_weight", "features, 4"),
    "no scores": (lambda: softmax([[1.0]], p=0.5), "input", "a tensor"),
    "scores of nothing": (lambda: softmax(torch.ones(())), "input", "at least one"),
    "integer scores": (lambda: softmax(X.int()), "input", "float32 or bfloat16"),
    "mask's size": (lambda: softmax(X, W[:7] > 0), "mask", r"broadcasts to input, \[4, 8\]"),
    "mask's rank": (lambda: softmax(X, X[None] > 0), "mask", "broadcasts to input"),
    "mask's dtype": (lambda: softmax(X, W.half()), "mask", "bool or float32"),
    "mask's device": (lambda: softmax(X, W.to("meta")), "mask", "device of input"),
    "no mask": (lambda: softmax(X, [1.0]), "mask", "a tensor"),
    "p": (lambda: softmax(X, p=1.5), "p", "from 0 to 1"),
    "NaN p": (lambda: softmax(X, p=torch.nan), "p", "from 0 to 1"),
    "p of another type": (lambda: softmax(X, p="1"), "p", "from 0 to 1"),
    "scale of another type": (lambda: softmax(X, scale="1"), "scale", "a number"),
    "negative seed": (lambda: softmax(X, p=0.5, seed=-1), "seed", "an int from 0"),
    "seed of another type": (lambda: softmax(X, p=0.5, seed=0.5), "seed", "an int from 0"),
    "two seeds": (lambda: softmax(X, p=0.5, seed=torch.tensor([1, 2])), "seed", "one int64"),
    "shard's rank": (lambda: softmax(X, p=0.5, shard=Shard([8], [0])), "shard", "2 of each"),
    "shard outside": (lambda: softmax(X, p=0.5, shard=Shard([8, 8], [5, 0])), "shard", "fits into"),
    "shard of columns": (
        lambda: softmax(X, p=0.5, shard=Shard([4, 16], [0, 8])),
        "shard",
        "whole rows: 8 columns",
    ),
    "causal shard": (lambda: softmax(X, causal=True, shard=Shard([3, 8], [0, 0])), "shard", "fits"),
    "residual's shape": (lambda: add(X, W, X[:1]), "residual", r"input's shape, \[4, 8\]"),
    "residual's dtype": (lambda: add(X, W, X.double()), "residual", "float32"),
    "residual's device": (lambda: add(X, W, X.to("meta")), "residual", "device of input"),
    "no residual": (lambda: add(X, W, None), "residual", "a tensor"),
    "added bias's size": (lambda: add(X, W[:1], X), "bias", r"last dimension, \[8\]"),
    "added bias's rank": (lambda: add(X, X, X), "bias", r"last dimension, \[8\]"),
    "added bias's dtype": (lambda: add(X, W.half(), X), "bias", "float32"),
    "adding to nothing": (lambda: add(W[0], None, W[0]), "input", "at least one"),
    "adding integers": (lambda: add(X.int(), None, X.int()), "input", "float32 or bfloat16"),
    "adding p": (lambda: add(X, W, X, p=-0.1), "p", "from 0 to 1"),
    "adding shard": (
        lambda: add(X, W, X, p=0.5, shard=Shard([4, 8], [0, 1])),
        "shard",
        "fits into",
    ),
    "norm's x": (lambda: add_norm([[1.0]], None, W), "input", "a tensor"),
    "norm's residual": (lambda: add_norm(X, X[0], W), "residual", r"input's shape, \[4, 8\]"),
    "norm's stream": (lambda: add_norm(X, X.double(), W), "residual", "float32"),
    "norm's weight": (lambda: add_norm(X, X, W[:7]), "weight", r"whose shape is \[4, 8\]"),
    "norm's weight's dtype": (lambda: add_norm(X, X, W.double()), "weight", "float32"),
    "norm's bias": (lambda: add_norm(X, X, W, B[:1]), "bias", r"normalized_shape, \[8\]"),
    "norm's sizes": (
        lambda: add_norm(X, X, None, normalized_shape=[7]),
        "normalized_shape",
        r"\[4, 8\]",
    ),
    "norm's eps": (lambda: add_norm(X, X, W, eps=-1.0), "eps", ">= 0"),
    "norm's seed": (lambda: add_norm(X, X, W, p=0.5, seed=-1), "seed", "an int from 0"),
    "norm's shard": (
        lambda: add_norm(X, X, W, p=0.5, shard=Shard([4, 16], [0, 8])),
        "shard",
        r"whole rows: ending in \[8\]",
    ),
    "rms norm's eps": (
        lambda: functional.dropout_add_rms_norm(X, X, W, eps=torch.nan),
        "eps",
        ">= 0",
    ),
    "given mean": (lambda: given(X, None, W), "mean", "a tensor"),
    "given mean's size": (lambda: given(X, W[:7], W), "mean", r"last size of input, \[8\]"),
    "given var's dtype": (lambda: given(X, W, W.half()), "var", "float32"),
    "given weight's size": (lambda: given(X, W, W, W[:1]), "weight", r"last size of input, \[8\]"),
    "given bias unlike weight": (
        lambda: given(X.bfloat16(), W, W, W, B.bfloat16()),
        "bias",
        "that of weight",
    ),
    "given eps": (lambda: given(X, W, W, eps=-1.0), "eps", ">= 0"),
    "given activation": (lambda: given(X, W, W, activation="elu"), "activation", "gelu or relu"),
    "normalised integers": (lambda: given(X.int(), W, W), "input", "float32 or bfloat16"),
    "evaluated without statistics": (lambda: norm(X, None, None), "running_mean", "both"),
    "half of the statistics": (lambda: norm(X, W, None, training=True), "running_var", "both"),
    "statistics' size": (
        lambda: norm(X, W[:1], W, training=True),
        "running_mean",
        r"last size of input, \[8\]",
    ),
    "statistics' dtype": (
        lambda: norm(X, W.double(), W.double(), training=True),
        "running_mean",
        "float32",
    ),
    "one row": (lambda: norm(X[:1], W, W, training=True), "input", "more than 1 value per channel"),
    "no row": (lambda: norm(X[0, 0], W, W, training=True), "input", r"\[\*, width\]"),
    "momentum": (lambda: norm(X, W, W, training=True, momentum="1"), "momentum", "a number"),
    "process group": (
        lambda: norm(X, W, W, training=True, process_group="world"),
        "process_group",
        "ProcessGroup",
    ),
    "normalised weight": (lambda: linear_norm(X, W, None, W, W), "weight", "out_features, 8"),
    "normalised bias": (lambda: linear_norm(X, X, B, W, W), "bias", r"\[4\]"),
    "features' statistics": (
        lambda: linear_norm(X, X, None, W, W, training=True),
        "running_mean",
        r"rows of weight, \[4\]",
    ),
    "features' weight": (
        lambda: linear_norm(X, X, None, W[:4], W[:4], W),
        "bn_weight",
        r"rows of weight, \[4\]",
    ),
    "one row of features": (
        lambda: linear_norm(X[:1], X, None, W[:4], W[:4], training=True),
        "input",
        "more than 1 value per channel",
    ),
    "rms sparse": (
        lambda: functional.rms_norm(X.to_sparse(), [8]),
        "input",
        "a dense or jagged tensor",
    ),
}


@pytest.mark.parametrize("backend", [None, "cpu", "eager"])
@pytest.mark.parametrize("case", BAD)
def test_arguments_are_named(case: str, backend: str | None) -> None:
    """The automatic choice, the kernel and eager raise the same typed error."""
    function, argument, accepted = BAD[case]
    with torchweld.use_backend(backend), pytest.raises(torchweld.ArgumentError) as caught:
        function()
    assert caught.value.argument == argument
    assert caught.match(accepted)


def test_a_quantized_tensor_is_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch > 2.11 warns about quantisation itself
        x = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    with pytest.raises(torchweld.ArgumentError, match="input is a quantized tensor"):
        functional.layer_norm(x, [8])


def test_errors_are_what_torchs_callers_catch() -> None:
    """The error is a ValueError, and a RuntimeError, which torch raises here."""
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind):
            functional.layer_norm(X, [7])


def test_kernels_refuse_by_themselves() -> None:
    """The bindings raise without Python's checks, so bad input never reaches a kernel."""
    ops = torch.ops.torchweld
    statistics, softmax_grads = torch.ones(4), ops.softmax_dropout_backward.cpu
    given_grads = ops.normalize_act_backward.cpu
    f32, add_grads = torch.float32, ops.bias_dropout_add_backward.cpu

    def norm_grads(
        z: torch.Tensor,
        rstd: torch.Tensor,
        grad: torch.Tensor,
        dtype: torch.dtype = f32,
        backend: str = "cpu",
    ) -> Any:
        needs = (True, True, True)
        return getattr(ops.dropout_add_rms_norm_backward, backend)(
            grad, None, z, [8], W, 0.0, 1e-5, None, [], [], rstd, dtype, *needs
        )

    bad = [
        lambda: ops.layer_norm.cpu(X, [7], None, None, 1e-5),
        lambda: ops.layer_norm.cpu(X, [], None, None, 1e-5),
        lambda: ops.layer_norm.cpu(X, [8], torch.ones(7), None, 1e-5),
        lambda: ops.layer_norm.cpu(X, [8], W.double(), None, 1e-5),
        lambda: ops.layer_norm.cpu(X, [8], None, None, -1.0),
        lambda: ops.layer_norm.cpu(X.int(), [8], None, None, 1e-5),
        lambda: ops.bias_act.cpu(X, W[:7], "gelu", "none"),
        lambda: ops.bias_act.cpu(X, W, "gelu", "sinh"),
        lambda: ops.bias_act.cpu(X, W, "relu", "tanh"),
        lambda: ops.bias_act.cpu(X[0, 0], None, "gelu", "none"),
        lambda: ops.bias_act_backward.cpu(X[:3], X, W, "gelu", "none", True),
        lambda: ops.gated_act.cpu(X, X[:, :7], "silu", "none"),
        lambda: ops.gated_act_backward.cpu(X, X, X.half(), "silu", "none"),
        lambda: ops.bias_act.triton(X, W[:7], "gelu", "none"),
        lambda: ops.bias_act_backward.triton(X[:3], X, W, "gelu", "none", True),
        lambda: ops.gated_act.triton(X, X[:, :7], "silu", "none"),
        lambda: ops.gated_act_backward.triton(X, X, X.half(), "silu", "none"),
        lambda: ops.normalize_act.cpu(X, W[:7], W, None, None, 1e-5, "gelu", "none"),
        lambda: ops.normalize_act.cpu(X, W, W, W[:7], None, 1e-5, "gelu", "none"),
        lambda: ops.normalize_act.cpu(X, W, W.half(), None, None, 1e-5, "gelu", "none"),
        lambda: ops.normalize_act.cpu(X, W, W, None, None, -1.0, "gelu", "none"),
        lambda: ops.normalize_act.triton(X, W[:7], W, None, None, 1e-5, "gelu", "none"),
        lambda: given_grads(X[:3], X, W, W, W, W, 1e-5, "gelu", "none", True, True, True),
        lambda: ops.batch_norm_act_grad_x.cpu(X, X, W, W, W, W, W[:7], W, 1e-5, "gelu", "none"),
        lambda: ops.batch_norm_act_grad_x.triton(X, X, W, W, W, W, W[:7], W, 1e-5, "gelu", "none"),
        lambda: ops.column_statistics.cpu(X[0, 0]),
        lambda: ops.column_statistics.cpu(X.int()),
        lambda: ops.rms_norm.cpu(X, [4, 8, 1], None, 1e-5),
        lambda: ops.rms_norm_backward.cpu(X, X, [8], W, 1e-5, torch.ones(3), True),
        lambda: ops.rms_norm_backward.cpu(X.double(), X, [8], W, 1e-5, statistics, True),
        lambda: ops.rms_norm_backward.cpu(torch.ones(4, 7), X, [8], W, 1e-5, statistics, True),
        lambda: ops.layer_norm_backward.cpu(
            X, X, [8], W, B, 1e-5, torch.ones(5), statistics, True, True
        ),
        lambda: ops.softmax_dropout.cpu(X, W[:7], 1.0, False, 0.0, None, [], []),
        lambda: ops.softmax_dropout.cpu(X, W.half(), 1.0, False, 0.0, None, [], []),
        lambda: ops.softmax_dropout.cpu(X, None, 1.0, False, 0.5, None, [], []),
        lambda: ops.softmax_dropout.cpu(X, None, 1.0, False, 1.5, SEED, [], []),
        lambda: ops.softmax_dropout.cpu(X, None, 1.0, False, 0.5, SEED.int(), [], []),
        lambda: ops.softmax_dropout.cpu(X, None, 1.0, False, 0.5, SEED, [4, 8], []),
        lambda: ops.softmax_dropout.cpu(X, None, 1.0, False, 0.5, SEED, [4, 9], [0, 0]),
        lambda: ops.softmax_dropout.cpu(X, None, 1.0, True, 0.0, None, [3, 8], [0, 0]),
        lambda: softmax_grads(X, None, None, None, None, 1.0, False, 0.0, None, [], []),
        lambda: softmax_grads(X, X[:3], None, None, None, 1.0, False, 0.0, None, [], []),
        lambda: softmax_grads(X, None, X, None, None, 1.0, False, 0.5, SEED, [], []),
        lambda: softmax_grads(X, None, X, W, None, 1.0, False, 0.5, SEED, [], []),
        lambda: ops.bias_dropout_add.cpu(X, W[:1], X, 0.0, None, [], []),
        lambda: ops.bias_dropout_add.cpu(X, W, X[:1], 0.0, None, [], []),
        lambda: ops.bias_dropout_add.cpu(X, W, X.half(), 0.0, None, [], []),
        lambda: ops.bias_dropout_add.cpu(X[0, 0], None, X[0, 0], 0.0, None, [], []),
        lambda: ops.bias_dropout_add.cpu(X, W, X, 0.5, None, [], []),
        lambda: add_grads(X, W[:7], 0.0, None, [], [], f32, True, True),
        lambda: add_grads(X.half(), W, 0.0, None, [], [], f32, True, True),
        lambda: add_grads(X, W, 0.0, None, [], [], torch.int32, True, True),
        lambda: ops.dropout_add_rms_norm.cpu(X, X[0], [8], W, 0.0, 1e-5, None, [], [], False),
        lambda: ops.dropout_add_rms_norm.cpu(X, X.half(), [8], W, 0.0, 1e-5, None, [], [], False),
        lambda: ops.dropout_add_rms_norm.cpu(X, X, [8], W, 0.5, 1e-5, SEED, [4, 9], [0, 0], False),
        lambda: ops.dropout_add_rms_norm.cpu(X, X, [7], W, 0.0, 1e-5, None, [], [], False),
        lambda: ops.dropout_add_rms_norm.cpu(X, X, [8], W, 0.0, -1.0, None, [], [], False),
        lambda: norm_grads(X, statistics, X[:3]),
        lambda: norm_grads(X, statistics[:3], X),
        lambda: norm_grads(X.half(), statistics, X.half()),
        lambda: ops.layer_norm.triton(X, [7], None, None, 1e-5),
        lambda: ops.layer_norm.triton(X, [8], torch.ones(7), None, 1e-5),
        lambda: ops.layer_norm.triton(X.half(), [8], W, B.half(), 1e-5),
        lambda: ops.layer_norm.triton(X, [8], None, None, -1.0),
        lambda: ops.rms_norm_backward.triton(X, X, [8], W, 1e-5, torch.ones(3), True),
        lambda: ops.rms_norm_backward.triton(X[:3], X, [8], W, 1e-5, statistics, True),
        lambda: ops.softmax_dropout.triton(X, None, 1.0, False, 0.5, SEED.int(), [], []),
        lambda: ops.bias_dropout_add.triton(X, W, X.half(), 0.0, None, [], []),
        lambda: ops.bias_dropout_add.triton(X, W, X, 0.5, None, [], []),
        lambda: ops.bias_dropout_add.triton(X, W, X, 0.5, SEED.int(), [], []),
        lambda: ops.bias_dropout_add.triton(X, W, X, 0.5, SEED, [4, 9], [0, 2]),
        lambda: ops.dropout_add_rms_norm.triton(X, X[0], [8], W, 0.0, 1e-5, None, [], [], False),
        lambda: ops.dropout_add_rms_norm.triton(
            X, X, [8], W, 0.5, 1e-5, SEED, [4, 9], [0, 0], False
        ),
        lambda: ops.dropout_add_rms_norm.triton(X, X, [], None, 0.0, 1e-5, None, [], [], False),
        lambda: norm_grads(X, statistics, X[:3], backend="triton"),
        lambda: norm_grads(X, statistics[:3], X, backend="triton"),
        lambda: norm_grads(X.half(), statistics, X.half(), backend="triton"),
    ]
    for function in bad:
        with pytest.raises((RuntimeError, ValueError)):
            function()


def test_a_backend_that_cannot_serve_says_why() -> None:
    with torchweld.use_backend("cuda"), pytest.raises(torchweld.BackendError, match="cuda backend"):
        functional.layer_norm(X, [8])
    with pytest.raises(torchweld.ArgumentError, match="eager or cpu or cuda or triton"):
        torchweld.use_backend("opencl").__enter__()


def test_explain_names_the_choice_and_the_reasons() -> None:
    small = torchweld.explain(functional.layer_norm, X, [8])
    assert small.chosen == "eager"
    assert "too small to gain" in small.reasons["cpu"]
    large = torchweld.explain("rms_norm", torch.ones(512, 512), [512], eps=1e-6)
    assert large.chosen == "cpu"
    assert set(large.reasons) == {"eager", "cuda", "triton"}
    assert "rms_norm runs on cpu" in str(large)
    with torchweld.use_backend("eager"):
        assert torchweld.explain("rms_norm", torch.ones(512, 512), [512]).chosen == "eager"
    with pytest.raises(torchweld.ArgumentError, match="layer_norm, linear_act, linear_batch_norm"):
        torchweld.explain("norm", X)


@pytest.mark.parametrize(
    ("given", "suggested"), [("Gelu", "gelu"), ("sillu", "silu"), ("zzz", None), ("", None)]
)
def test_a_misspelt_name_is_answered(given: str, suggested: str | None) -> None:
    with pytest.raises(torchweld.ArgumentError) as caught:
        torchweld.functional.bias_act(torch.ones(4), activation=given)
    said = f"; did you mean {suggested!r}?"
    assert str(caught.value).endswith(said if suggested else "identity")
