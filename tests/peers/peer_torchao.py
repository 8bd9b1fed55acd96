"""torchao converts only the layers that it may, and models still compute the right results."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torchao.float8 import convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

import torchweld

WIDTH, HIDDEN = 64, 128


def _model() -> tuple[torch.nn.Sequential, torch.nn.Sequential]:
    """A layer with its activation and a block of two layers; torch's modules with equal weights."""
    torch.manual_seed(0)
    block = torchweld.nn.MLP(WIDTH, HIDDEN, approximate="tanh")
    ours = torch.nn.Sequential(torchweld.nn.LinearGELU(WIDTH, WIDTH), block)
    linear = torch.nn.Linear
    plain = torch.nn.Sequential(
        *(linear(WIDTH, WIDTH), torch.nn.GELU()),
        *(linear(WIDTH, HIDDEN), torch.nn.GELU("tanh"), linear(HIDDEN, WIDTH)),
    )
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        a.data = b.data.clone()
    return ours, plain


def _is_ours(module: torch.nn.Module, name: str) -> bool:
    return isinstance(module, torchweld.nn.LinearAct)


def _is_plain(module: torch.nn.Module, name: str) -> bool:
    return isinstance(module, torch.nn.Linear)


@pytest.mark.parametrize(
    "config",
    [Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Float8WeightOnlyConfig],
    ids=lambda config: config.__name__,
)
@pytest.mark.parametrize("asked", [False, True], ids=["by default", "asked for"])
def test_quantized(config: Callable[[], object], asked: bool) -> None:
    """By default only torch.nn.Linear is converted; on request also our modules' weights."""
    ours, plain = _model()
    x = torch.randn(2048, WIDTH)
    with torch.no_grad():
        exact = plain(x)
        quantize_(ours, config())
        first = ours[0].weight
        assert type(first) is torch.nn.Parameter
        assert type(ours[1].fc2.weight) is not torch.nn.Parameter
        if asked:
            quantize_(ours, config(), filter_fn=_is_ours)
            quantize_(plain, config(), filter_fn=_is_plain)
            assert type(ours[0].weight) is not torch.nn.Parameter
        else:
            quantize_(plain[4], config())
        expected = plain(x)
        lost = (expected - exact).abs().max()
        for backend in ("eager", "cpu"):
            with torchweld.use_backend(backend):
                off = (ours(x) - expected).abs().amax(dim=1)
            # The last bit of an activation may round to the next of 255 integers. That happens in
            # few rows, and is followed by others there, but loses no more than rounding itself.
            assert (off > 0.01 * lost).float().mean() < 0.02
            assert off.max() < lost


def _quantize(model: torch.nn.Module) -> None:
    quantize_(model, Int8WeightOnlyConfig())


@pytest.mark.parametrize("convert", [_quantize, convert_to_float8_training])
def test_a_fused_model_is_converted_as_a_plain_one(
    convert: Callable[[torch.nn.Module], object],
) -> None:
    """Its linear layers are torch.nn.Linear; what takes their place computes no activation."""
    x = torch.randn(64, WIDTH)
    plain = _model()[1]
    fused = torchweld.fuse(copy.deepcopy(plain))
    with torch.no_grad():
        exact = plain(x)
        for model in (plain, fused):
            convert(model)
        assert type(fused[0].weight) is type(plain[0].weight)
        expected = plain(x)
        lost = (expected - exact).abs().max()
        assert lost > 0
        assert (fused(x) - expected).abs().max() < 0.1 * lost


def test_float8_training_leaves_a_layer_with_its_activation_alone() -> None:
    """Also if it is asked to convert it."""
    for wanted in (None, _is_ours):
        ours, plain = _model()
        convert_to_float8_training(ours, module_filter_fn=wanted)
        assert type(ours[0]) is torchweld.nn.LinearGELU
        assert type(ours[1].fc1) is torchweld.nn.LinearAct
        assert isinstance(ours[1].fc2, Float8Linear) == (wanted is None)
        x = torch.randn(2048, WIDTH)
        torch.testing.assert_close(ours[0](x), plain[:2](x))
