"""A head whose words devices share: logits, gradients, and the loss that fuse() puts there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

import torchweld
from comparing import whole_of
from processes import on
from torchweld import numerics
from torchweld.distributed import CountCollectives
from torchweld.distributed.tensor.head import HeadParallel
from torchweld.errors import ArgumentError
from torchweld.fusion.logits import Deferred
from words import list_ops

WIDTH = 16


def _make_layer(words: int, bias: bool, **kind: Any) -> tuple[nn.Linear, torch.Tensor]:
    torch.manual_seed(words)
    return nn.Linear(WIDTH, words, bias, **kind), torch.randn(2, 6, WIDTH, **kind)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("words", [1, 2, 7, 12])
@on(2)
def test_all_logits(rank: int, words: int, bias: bool) -> None:
    """Of any number of words, also of fewer than devices; gradients of x are sums over devices."""
    plain, x = _make_layer(words, bias, dtype=torch.float64)
    head = copy.deepcopy(plain)
    parallelize_module(head, init_device_mesh("cpu", (2,)), HeadParallel())
    results = []
    for layer in (head, plain):
        given = x.clone().requires_grad_()
        y = layer(given)
        y.square().sum().backward()
        results.append([y.detach(), given.grad, *(whole_of(p.grad) for p in layer.parameters())])
    torch.testing.assert_close(*results, **numerics.FLOAT64)
    assert results[0][0].stride() == results[1][0].stride()


@on(2)
def test_no_rows(rank: int) -> None:
    plain, _ = _make_layer(7, True)
    head = copy.deepcopy(plain)
    parallelize_module(head, init_device_mesh("cpu", (2,)), HeadParallel())
    assert head(torch.zeros(2, 0, WIDTH)).shape == (2, 0, 7)


@on(2)
def test_second_derivatives_are_refused(rank: int) -> None:
    """A DTensor's were lost without a word: from_local() returns gradients without a graph."""
    head, x = _make_layer(7, True)
    parallelize_module(head, init_device_mesh("cpu", (2,)), HeadParallel())
    given = x.requires_grad_()
    with pytest.raises(ArgumentError, match="create_graph is True; accepted: False"):
        torch.autograd.grad(head(given).sum(), given, create_graph=True)


@on(4)
def test_rows_along_a_ring(rank: int) -> None:
    """The ring's devices have other rows, and their gradients of the weight add up."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "tensor"))
    plain, x = _make_layer(7, True, dtype=torch.float64)
    head, style = copy.deepcopy(plain), HeadParallel()
    style.ring = True
    parallelize_module(head, mesh, style)
    rows = slice(mesh.get_local_rank("ring") * 3, mesh.get_local_rank("ring") * 3 + 3)
    own, whole = x[:, rows].clone().requires_grad_(), x.clone().requires_grad_()
    for layer, given in ((head, own), (plain, whole)):
        layer(given).square().sum().backward()
    torch.testing.assert_close(own.grad, whole.grad[:, rows], **numerics.FLOAT64)
    for got, want in zip(head.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole_of(got.grad), want.grad, **numerics.FLOAT64)


@on(2)
def test_autocast_casts_as_in_a_linear_layer(rank: int) -> None:
    plain, x = _make_layer(7, True)
    head = copy.deepcopy(plain)
    parallelize_module(head, init_device_mesh("cpu", (2,)), HeadParallel())
    with torch.autocast("cpu", torch.bfloat16):
        got, want = head(x), plain(x)
    torch.testing.assert_close(got, want, **numerics.BFLOAT16)


@on(2)
def test_compiled_whole(rank: int) -> None:
    torch.compiler.reset()
    plain, x = _make_layer(7, True)
    head = copy.deepcopy(plain)
    parallelize_module(head, init_device_mesh("cpu", (2,)), HeadParallel())
    results = []
    for layer in (torch.compile(head, fullgraph=True, backend="aot_eager"), head):
        given = x.clone().requires_grad_()
        layer(given).square().sum().backward()
        results.append(given.grad)
    torch.testing.assert_close(*results, **numerics.SUMMED)


class _Other(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


@on(2)
def test_layers_with_a_forward_of_their_own_are_refused(rank: int) -> None:
    with pytest.raises(ArgumentError, match="torch's own forward"):
        parallelize_module(_Other(4, 4), init_device_mesh("cpu", (2,)), HeadParallel())


class Model(nn.Module):
    """The end of a language model: a norm, the head and the loss."""

    def __init__(self, words: int, bias: bool, scale: float, upcast: bool) -> None:
        super().__init__()
        torch.manual_seed(words)
        self.norm, self.lm_head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, words, bias)
        self.scale, self.upcast = scale, upcast

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.lm_head(self.norm(x)) * self.scale
        logits = logits.float() if self.upcast else logits
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten()), logits


FORMS = {
    "plain": (12, False, 1.0, False),
    "uneven": (7, True, 1.0, False),
    "scaled": (7, True, 0.5, False),
    "in float32": (7, False, 1.0, True),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("form", FORMS)
@on(2)
def test_the_loss_of_a_fused_model_sends_no_logits(rank: int, form: str, autocast: bool) -> None:
    """With one op a graph shows the head. Of DTensors it showed none, and devices sent logits."""
    torch.compiler.reset()
    exact = Model(*FORMS[form])
    models = [copy.deepcopy(exact), copy.deepcopy(exact)]
    torchweld.fuse(models[0])
    mesh = init_device_mesh("cpu", (2,))
    for model in models:
        parallelize_module(model, mesh, {"lm_head": HeadParallel()})
    x, target = torch.randn(2, 6, WIDTH), torch.randint(0, FORMS[form][0], (2, 6))
    target[0, :2] = -100
    results, sent = [], []
    for model in (*models, exact.double()):
        dtype = next(model.parameters()).dtype
        given = x.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, autocast and model is not exact):
            model(given[:, :4], target[:, :4])  # lengths vary from the second one on
            model(given[:, :5], target[:, :5])
            with CountCollectives() as count:
                loss, logits = model(given, target)
        assert isinstance(logits, Deferred) == (model is models[0])
        model.zero_grad()
        (grad,) = torch.autograd.grad(loss, given, retain_graph=True)
        loss.backward()
        results.append([loss.detach(), grad, *(whole_of(p.grad) for p in model.parameters())])
        sent.append(dict(count.calls))
    assert sent == [{"all-reduce": 2}, {"all-gather": 1}, {}]
    assert "linear_cross_entropy" in list_ops(models[0])
    for got, plain, want in zip(*results, strict=True):
        assert got.dtype is plain.dtype
        assert numerics.Bound(want, plain).find_fault(got) is None


@on(2)
def test_evaluation_has_logits(rank: int) -> None:
    torch.compiler.reset()
    model = torchweld.fuse(Model(*FORMS["uneven"]))
    want = copy.deepcopy(model)
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"lm_head": HeadParallel()})
    x, target = torch.randn(2, 6, WIDTH), torch.randint(0, 7, (2, 6))
    with torch.no_grad():
        for got, each in zip(model(x, target), want(x, target), strict=True):
            torch.testing.assert_close(got, each, **numerics.SUMMED)
    with pytest.raises((RuntimeError, AttributeError), match="left out the logits"):
        model(x, target)[1].sum()
