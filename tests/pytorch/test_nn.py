"""Modules are drop-ins for torch.nn's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch

import torchweld

PAIRS = [(torchweld.nn.LayerNorm, torch.nn.LayerNorm), (torchweld.nn.RMSNorm, torch.nn.RMSNorm)]


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """The kernels serve small inputs too."""
    with torchweld.use_backend("cpu"):
        yield


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("shape", [64, (8, 64)])
def test_same_constructor_state_and_results(ours: type, theirs: type, shape: object) -> None:
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
    for module in (mine, other):
        module(x).square().sum().backward()
    for a, b in zip(mine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_options(ours: type, theirs: type) -> None:
    """No affine parameters, no bias, dtype and device."""
    assert not list(ours(8, elementwise_affine=False).parameters())
    assert repr(ours(8)) == repr(theirs(8))
    assert next(ours(8, dtype=torch.bfloat16, device="meta").parameters()).is_meta
    if theirs is torch.nn.LayerNorm:
        assert list(ours(8, bias=False).state_dict()) == ["weight"]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_assigning_the_class_converts_a_module(ours: type, theirs: type) -> None:
    """As module surgery does, also after fully_shard."""
    module = theirs(64)
    expected = module(torch.ones(600, 64).cumsum(1))
    module.__class__ = ours
    torch.testing.assert_close(module(torch.ones(600, 64).cumsum(1)), expected)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_copies_pickles_and_subclasses(ours: type, theirs: type) -> None:
    module = pickle.loads(pickle.dumps(copy.deepcopy(ours(64))))
    x = torch.randn(600, 64)
    assert torch.equal(module(x), ours(64)(x))

    class Scaled(ours):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    assert torch.equal(Scaled(64)(x), 2 * module(x))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_export(ours: type, theirs: type) -> None:
    """torch.export carries the op."""
    program = torch.export.export(ours(64), (torch.randn(600, 64),))
    x = torch.randn(600, 64)
    torch.testing.assert_close(program.module()(x), theirs(64)(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norms_default_eps_is_torchs(dtype: torch.dtype) -> None:
    """eps matters for values whose square is about as large."""
    x = (torch.randn(512, 64) * 3e-4).to(dtype)
    with torchweld.use_backend("cpu"):
        ours = torchweld.functional.rms_norm(x, [64])
    theirs = torch.nn.functional.rms_norm(x, [64])
    assert theirs.square().mean() < 0.9  # eps does matter
    torch.testing.assert_close(ours, theirs)
