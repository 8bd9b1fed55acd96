"""Modules are drop-ins for torch.nn's."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

import torchweld
from fusable import run
from torchweld import numerics

PAIRS = [(torchweld.nn.LayerNorm, torch.nn.LayerNorm), (torchweld.nn.RMSNorm, torch.nn.RMSNorm)]
WITH_RESIDUAL = [
    (torchweld.nn.DropoutAddLayerNorm, torch.nn.LayerNorm),
    (torchweld.nn.DropoutAddRMSNorm, torch.nn.RMSNorm),
]


pytestmark = pytest.mark.usefixtures("kernels")


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("shape", [64, (8, 64)])
def test_same_constructor_state_and_results(ours: Any, theirs: Any, shape: Any) -> None:
    """State dicts load both ways; results and gradients are equal."""
    torch.manual_seed(0)
    mine, other = ours(shape, eps=1e-3), theirs(shape, eps=1e-3)
    assert isinstance(mine, theirs)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    mine.load_state_dict(other.state_dict())
    other.load_state_dict(mine.state_dict())
    x = torch.randn(300, 8, 64)
    torch.testing.assert_close(mine(x), other(x))
    torch.testing.assert_close(run(mine, x), run(other, x), **numerics.CHAINED)


@pytest.mark.parametrize(("ours", "theirs"), [*PAIRS, *WITH_RESIDUAL])
def test_options(ours: Any, theirs: Any) -> None:
    """No affine parameters, no bias, dtype and device."""
    assert list(ours(8).state_dict()) == list(theirs(8).state_dict())
    bare = ours((4, 8), elementwise_affine=False)
    assert not list(bare.parameters())
    assert next(ours(8, dtype=torch.bfloat16, device="meta").parameters()).is_meta
    if theirs is torch.nn.LayerNorm:
        assert list(ours(8, bias=False).state_dict()) == ["weight"]
    if issubclass(ours, theirs):
        assert repr(ours(8)) == repr(theirs(8))
    else:  # ours takes two arguments, theirs one
        assert "p=0.1" in repr(ours(8, p=0.1))
        x = torch.randn(30, 4, 8)
        plain = theirs((4, 8), elementwise_affine=False)
        torch.testing.assert_close(bare(x, x), plain(x + x))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_assigning_the_class_converts_a_module(ours: type, theirs: type) -> None:
    """As module surgery does, also after fully_shard."""
    module = theirs(64)
    expected = module(torch.ones(600, 64).cumsum(1))
    module.__class__ = ours
    torch.testing.assert_close(module(torch.ones(600, 64).cumsum(1)), expected)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_subclass_calls_ours(ours: Any, theirs: Any) -> None:
    class Scaled(ours):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    x = torch.randn(600, 64)
    assert torch.equal(Scaled(64)(x), 2 * ours(64)(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norms_default_eps_is_torchs(dtype: torch.dtype) -> None:
    """eps matters for values whose square is about as large."""
    x = (torch.randn(512, 64) * 3e-4).to(dtype)
    with torchweld.use_backend("cpu"):
        ours = torchweld.functional.rms_norm(x, [64])
    theirs = torch.nn.functional.rms_norm(x, [64])
    assert theirs.square().mean() < 0.9  # eps does matter
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["DropoutAddLayerNorm", "DropoutAddRMSNorm"])
def test_no_eps_becomes_a_dropout(name: str) -> None:
    """torch.nn.LayerNorm(8, 1e-5) has an eps there, and so have ours."""
    norm = getattr(torchweld.nn, name)(8, 1e-3)
    assert (norm.eps, norm.p) == (1e-3, 0)
    with pytest.raises(TypeError, match="positional"):  # p is taken only by keyword
        getattr(torchweld.nn, name)(8, 1e-3, True, True, None, None, 0.1)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_numbers_have_activations(backend: str) -> None:
    """As torch's functions take tensors of no dimensions."""
    z = torch.tensor(0.7, requires_grad=True)
    with torchweld.use_backend(backend):
        ours, gated = torchweld.nn.SiLU()(z), torchweld.functional.gated_act(z, 2 * z)
    theirs = torch.nn.functional.silu(z)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gated, theirs * 2 * z)
    for mine, other in ((ours, theirs), (gated, theirs * 2 * z)):
        found, expected = (torch.autograd.grad(y, z, retain_graph=True) for y in (mine, other))
        torch.testing.assert_close(found, expected)


# Where a saved model looks for its classes: pickles name a class by its file.
SAVED = {
    "activation": "GELU QuickGELU ReLU ReLUSquared SiLU Sigmoid Tanh",
    "attention": "BlockSparseAttention BlockSparseMultiheadAttention",
    "batch_norm": "LinearBatchNormAct",
    "dropout": "BiasDropoutAdd DropoutAddLayerNorm DropoutAddRMSNorm SoftmaxDropout",
    "experts": "ExpertsMLP",
    "linear": "GatedMLP LinearAct LinearGELU MLP",
    "loss": "CrossEntropyLoss LinearCrossEntropy",
    "norm": "AdaptiveLayerNorm AdaptiveRMSNorm LayerNorm RMSNorm",
    "rotary": "RotaryEmbedding",
}


def test_a_saved_model_finds_its_classes() -> None:
    """A module's file may move, but `torch.load` must find its class at the old place too."""
    names = {(file, name) for file, names in SAVED.items() for name in names.split()}
    for file, name in names:
        assert getattr(import_module(f"torchweld.nn.{file}"), name) is getattr(torchweld.nn, name)
    assert {name for _, name in names} == {*torchweld.nn.__all__}, "SAVED must have it"
