"""Linear layers and attention that fuse() takes in 16 bits, on CPUs without units for them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import torchweld
from torchweld import numerics
from torchweld.fusion.weld import Weld
from torchweld.ops.gemm import product
from torchweld.registry import processor

WIDTH, HEADS = 64, 4
X = torch.randn(2, 20, WIDTH, generator=torch.Generator().manual_seed(0))
OURS = {torch.ops.torchweld.product.cpu}


class Attention(nn.Module):
    """As many models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


def _make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(), nn.Linear(WIDTH, 8))


@pytest.fixture(autouse=True)
def without_units(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take every CPU for one without 16-bit units."""
    monkeypatch.setattr(processor, "_find", lambda dtype: False)
    monkeypatch.setattr(product, "_SMALLEST", 0)
    return iter(())


def _run(model: nn.Module, x: torch.Tensor, dtype: torch.dtype | None = None) -> list[Any]:
    x = x.detach().requires_grad_()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        y = model(x)
    return [y, *torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()])]


def _list_products(function: Any) -> set[str]:
    """Torch's products of 16 bits in a call."""
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profile:
        function()
    return {event.name for event in profile.events()}


def _list_ops(model: nn.Module, x: torch.Tensor) -> list[str]:
    return [row.becomes for row in torchweld.explain_fusion(model, x) if row.becomes]


def test_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """In other dtypes, elsewhere and on other processors they stay torch's."""
    model, x = _make().bfloat16(), X.bfloat16()
    assert sorted(_list_ops(model, x)) == [*["linear"] * 4, "scaled_dot_product_attention"]
    assert not _list_ops(_make().double(), X.double())
    assert not _list_ops(_make().bfloat16().to("meta"), x.to("meta"))
    monkeypatch.setattr(processor, "_find", lambda dtype: True)
    assert not _list_ops(model, x)


@pytest.mark.usefixtures("own_graphs")
def test_float32_stays_torchs() -> None:
    """Bit for bit, with torch's kernels only."""
    plain = _make()
    fused = torchweld.fuse(copy.deepcopy(plain))
    for ours, torchs in zip(_run(fused, X), _run(plain, X), strict=True):
        assert torch.equal(ours, torchs)
    assert "torchweld::product" not in _list_products(lambda: _run(fused, X))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("casts", [True, False], ids=["autocast", "whole"])
@pytest.mark.usefixtures("own_graphs")
def test_16_bits(dtype: torch.dtype, casts: bool) -> None:
    """No product is torch's, results have torch's dtypes, and errors are at most torch's.

    Once only layers with an activation were welded: all others were torch's plain loops.
    """
    plain = _make() if casts else _make().to(dtype)
    fused = torchweld.fuse(copy.deepcopy(plain))
    x, cast = (X, dtype) if casts else (X.to(dtype), None)
    exact = _run(copy.deepcopy(plain).double(), x.double())
    ours, torchs = _run(fused, x, cast), _run(plain, x, cast)
    errors = torch.zeros(2, dtype=torch.float64)
    for one, other, truth in zip(ours, torchs, exact, strict=True):
        assert one.dtype is other.dtype
        errors += torch.stack([(t - truth).norm() / truth.norm() for t in (one, other)])
    assert errors[0] <= 1.1 * errors[1]
    names = _list_products(lambda: _run(fused, x, cast))
    assert "torchweld::product" in names
    assert not names & {"aten::mm", "aten::addmm", "aten::bmm"}


_HEADS: dict[str, dict[str, Any]] = {
    "with weights": {},
    "alone": {"need_weights": False},
    "with a mask": {"need_weights": False, "attn_mask": torch.ones(20, 20).tril() == 0},
    "padded": {"need_weights": False, "key_padding_mask": torch.arange(40).view(2, 20) > 36},
}


@pytest.mark.parametrize("how", _HEADS)
@pytest.mark.usefixtures("own_graphs")
def test_heads_in_16_bits(how: str) -> None:
    """torch's function is one node of a graph, whose products were torch's plain loops."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).bfloat16()
    fused, x = torchweld.fuse(copy.deepcopy(plain)), X.bfloat16()
    exact = copy.deepcopy(plain).double()

    def run(model: Any, given: torch.Tensor) -> list[Any]:
        given = given.detach().requires_grad_()
        y = model(given, given, given, **_HEADS[how])[0]
        return [
            y.detach(),
            *torch.autograd.grad(y.float().square().sum(), [given, *model.parameters()]),
        ]

    truth = run(exact, x.double())
    ours, torchs = (
        sum(float((a - b).norm() / b.norm()) for a, b in zip(run(model, x), truth, strict=True))
        for model in (fused, plain)
    )
    assert ours <= 1.2 * torchs
    names = _list_products(lambda: run(fused, x))
    assert "torchweld::product" in names
    assert not names & {"aten::mm", "aten::addmm", "aten::bmm"}


@pytest.mark.parametrize(("trains", "casts"), [(True, True), (True, False), (False, False)])
@pytest.mark.usefixtures("own_graphs")
def test_an_encoder_layer(trains: bool, casts: bool) -> None:
    """In evaluation without gradients torch's layer is one operation, in float32 under autocast."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 96, batch_first=True, activation="gelu")
    dtype = torch.float32 if casts else torch.bfloat16
    fused, x = torchweld.fuse(layer.to(dtype).train(trains)), X.to(dtype)

    def step() -> None:
        on = torch.autocast("cpu", torch.bfloat16, enabled=casts)
        with on, torch.set_grad_enabled(trains):
            y = fused(x)
        if trains:
            y.float().square().sum().backward()

    step()  # captures
    names = _list_products(step)
    assert "torchweld::product" in names
    assert not names & {"aten::mm", "aten::addmm", "aten::bmm"}


_MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padded": {"src_key_padding_mask": torch.arange(40).view(2, 20) > 36},
    "causal": {"src_mask": torch.ones(20, 20).tril() == 0},
    "both": {
        "src_mask": torch.ones(20, 20).tril() == 0,
        "src_key_padding_mask": torch.arange(40).view(2, 20) > 36,
    },
}


@pytest.mark.parametrize("first", [True, False], ids=["norms first", "norms last"])
@pytest.mark.parametrize("mask", _MASKS)
@pytest.mark.usefixtures("own_graphs")
def test_an_encoder_layer_in_evaluation(mask: str, first: bool) -> None:
    """Errors are at most torch's."""
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(WIDTH, HEADS, 96, batch_first=True, norm_first=first)
    plain = plain.bfloat16().eval()
    fused, x = torchweld.fuse(copy.deepcopy(plain)), X.bfloat16()
    with torch.no_grad():
        exact = copy.deepcopy(plain).double()(x.double(), **_MASKS[mask])
        ours, torchs = ((model(x, **_MASKS[mask]) - exact).norm() for model in (fused, plain))
    assert ours <= 1.1 * torchs
    assert [row.becomes for row in torchweld.explain_fusion(fused)] == ["encoder_layer"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("own_graphs")
def test_parameters_that_others_replace(bias: bool) -> None:
    """The layer reads them where torch keeps them, unless they are elsewhere."""
    plain = nn.Linear(WIDTH, 8, bias)
    fused = torchweld.fuse(copy.deepcopy(plain))
    other = {name: p.detach() + 1 for name, p in plain.named_parameters()}
    call = torch.func.functional_call
    assert torch.equal(call(fused, other, (X,)), call(plain, other, (X,)))
    for change in (
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh()),
        lambda layer: nn.utils.parametrizations.weight_norm(layer, "weight"),
        lambda layer: setattr(layer, "bias", None),
    ):
        mine, its = copy.deepcopy(fused), copy.deepcopy(plain)
        change(mine), change(its)
        for ours, torchs in zip(_run(mine, X), _run(its, X), strict=True):
            assert torch.equal(ours, torchs)
    replica = fused._replicate_for_data_parallel()  # its parameters are plain attributes
    replica.weight, replica.bias = fused.weight * 2, fused.bias
    assert torch.equal(replica(X), nn.functional.linear(X, plain.weight * 2, plain.bias))


@pytest.mark.usefixtures("own_graphs")
def test_use_backend() -> None:
    """Eager by name is torch's."""
    plain, x = nn.Linear(WIDTH, 8).bfloat16(), X.bfloat16()
    fused = torchweld.fuse(copy.deepcopy(plain))
    with torchweld.use_backend("eager"):
        assert torch.equal(fused(x), plain(x))


@pytest.mark.usefixtures("own_graphs")
def test_compiled() -> None:
    fused = torchweld.fuse(_make().bfloat16())
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    x = X.bfloat16()
    for one, other in zip(_run(compiled, x), _run(fused, x), strict=True):
        torch.testing.assert_close(one, other, **numerics.BFLOAT16)


@pytest.mark.usefixtures("own_graphs")
def test_copies_and_checkpoints() -> None:
    fused = torchweld.fuse(_make().bfloat16())
    x = X.bfloat16()
    assert fused.state_dict().keys() == _make().state_dict().keys()
    loaded = pickle.loads(pickle.dumps(fused))
    assert torch.equal(loaded(x), fused(x))
    assert isinstance(loaded, Weld)
    torchweld.unfuse(fused)
    assert type(fused[0]) is nn.Linear
    assert type(fused[1]) is Attention


@pytest.mark.usefixtures("own_graphs")
def test_export() -> None:
    """A program has torch's ops, whose numbers are ours up to rounding; any batch fits it."""
    fused, x = torchweld.fuse(_make().bfloat16()), X.bfloat16()
    for trains in (False, True):
        with torch.set_grad_enabled(trains):
            sizes = [{0: torch.export.Dim.DYNAMIC}]
            program = torch.export.export(fused, (x,), dynamic_shapes=sizes)
        names = {str(node.target) for node in program.graph.nodes}
        assert {"aten.linear.default", "aten.scaled_dot_product_attention.default"} <= names
        more = torch.cat([x, x.flip(0), x])
        torch.testing.assert_close(program.module()(more), fused(more), **numerics.BFLOAT16)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.usefixtures("own_graphs")
def test_activation_checkpoints(reentrant: bool) -> None:
    """What is computed again has the same bits, and is by float32 GEMMs too."""
    fused = torchweld.fuse(_make())

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return fused(x)

    found = []

    def step(keeps: bool) -> None:
        x = X.clone().requires_grad_()
        y = run(x) if keeps else checkpoint(run, x, use_reentrant=reentrant)
        fused.zero_grad()
        y.float().square().sum().backward()
        found.append([y, x.grad, *(p.grad for p in fused.parameters())])

    step(True)
    step(False)  # captures
    del found[1:]
    assert not _list_products(lambda: step(False)) & {"aten::mm", "aten::addmm", "aten::bmm"}
    assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("own_graphs")
def test_compiled_attention_is_torchs() -> None:
    """docs/fuse.md says so: Dynamo follows no mode, and linear layers are a custom op."""
    if torch.__version__ < "2.13":
        pytest.skip("AOTAutograd of torch 2.10 does not say that it compiles: layers stay torch's")
    fused = torchweld.fuse(_make().bfloat16())
    ops: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        ops.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    x = X.bfloat16()
    compiled = torch.compile(fused, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    torch.testing.assert_close(compiled(x), fused(x), **numerics.BFLOAT16)
    assert ops.count("torchweld.product.cpu") == 4
    assert any("scaled_dot_product" in name for name in ops)
    assert not {"aten.mm.default", "aten.addmm.default"} & {*ops}
