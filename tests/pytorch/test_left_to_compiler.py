"""What torch.compile gets: the reference of ops that Inductor fuses itself, else a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import torchweld
from torchweld import functional
from torchweld.fusion.graph import patterns
from torchweld.fusion.graph.patterns import loss
from torchweld.ops.residual import ADD_LAYER_NORM, ADD_RMS_NORM
from words import Words, make_ids, step

_X, _W = torch.randn(4, 6, 16), torch.randn(16)
_Q = torch.randn(2, 4, 6, 16)
_LEFT: dict[str, Callable[[], Any]] = {
    "layer_norm": lambda: functional.layer_norm(_X, (16,), _W, _W),
    "rms_norm": lambda: functional.rms_norm(_X, (16,), _W),
    "bias_act": lambda: functional.bias_act(_X, _W),
    "gated_act": lambda: functional.gated_act(_X, _X),
    "rotary_embedding": lambda: functional.rotary_embedding(_Q, _Q[0, 0], _Q[0, 0], rotary_dim=16),
    "bias_dropout_add": lambda: functional.bias_dropout_add(_X, _W, _X),
    "dropout_add_rms_norm": lambda: functional.dropout_add_rms_norm(_X, _X, _W),
    "linear_act": lambda: functional.linear_act(_X, _X[0], None),
}
_KEPT: dict[str, Callable[[], Any]] = {
    "linear_cross_entropy": lambda: functional.linear_cross_entropy(
        _X[0], torch.randn(30, 16), torch.arange(6)
    ),
    "softmax_dropout": lambda: functional.softmax_dropout(_Q),
    "bias_dropout_add": lambda: functional.bias_dropout_add(_X, _W, _X, p=0.5),
    "dropout_add_layer_norm": lambda: functional.dropout_add_layer_norm(_X, _X, _W, _W, p=0.5),
    "dropout_add_rms_norm": lambda: functional.dropout_add_rms_norm(_X, _X, _W, p=0.5),
}


def _list_ops(function: Callable[..., Any], *args: Any) -> list[str]:
    """The ops of torchweld in the graph that a compiler gets, and functions with passes of ours."""
    found: list[str] = []

    def tell(module: torch.fx.GraphModule, inputs: Any) -> Any:
        for part in module.modules():
            nodes = part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ()
            found.extend(str(n.target) for n in nodes if "torchweld" in str(n.target))
        return module.forward

    torch.compiler.reset()
    torch.compile(function, backend=tell, fullgraph=True)(*args)
    return found


@pytest.mark.parametrize("name", _LEFT)
def test_an_op_that_is_left(name: str) -> None:
    """A block of norm, linear, gelu, linear, dropout and add took 636 us compiled with our ops in
    it, 467 us without: Inductor saw calls that it could not fuse. Tests compared numbers only.
    """
    assert _list_ops(_LEFT[name]) == []
    with torchweld.use_backend("cpu"):
        assert _list_ops(_LEFT[name])


@pytest.mark.parametrize("name", _KEPT)
def test_an_op_that_stays(name: str) -> None:
    assert {*_list_ops(_KEPT[name])} - {"torchweld.seed.default", "torchweld.seed"}


def test_a_region_keeps_its_kernels() -> None:
    """Dynamo captures its graph too, but nothing compiles it."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torchweld.nn.RMSNorm(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.layer_norm(self.norm(x), (16,), _W, _W)

    torch.compiler.reset()
    model = torchweld.fuse(Normed())
    with torch.no_grad():
        model(_X)
        with torch.profiler.profile(acc_events=True) as profile:
            model(_X)
    seen = {event.key for event in profile.key_averages()}
    assert "aten::_fused_rms_norm" not in seen
    assert "aten::rms_norm" not in seen


def test_a_sum_and_its_norm_stay_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor starts their kernel itself there; elsewhere the op would be one call of its own."""
    monkeypatch.setattr(patterns, "is_left_to_compiler", lambda x: True)
    for device in ("cpu", "cuda"):
        with FakeTensorMode():
            x, seed = torch.empty(4, 16, device=device), torch.empty(1, device=device)
        for op, learnt in ((ADD_LAYER_NORM.op, 2), (ADD_RMS_NORM.op, 1)):
            rest = (x, x, [16], *[None] * learnt, 0.5, 1e-5)
            assert op.left_to_compiler(*rest, None, None, None, False) == (device == "cpu")
            assert not op.left_to_compiler(*rest, seed, None, None, False)
        found = patterns.list_for_inductor(x)
        assert (patterns.find_add_rms_norm in found) == (device == "cuda")


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(16), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.norm(self.drop(x) + x)
        return self.drop(total) + x


@pytest.mark.parametrize("trains", [False, True])
def test_the_backend_keeps_what_drops(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of 512 x 256 with dropout, residual and norm: 1.41 ms with the kernel,
    5.13 by Inductor only, 3.59 by Inductor with torchweld's stream, as compiled models had it.
    """
    from torch._inductor import compile_fx

    graphs: list[Any] = []
    monkeypatch.setattr(compile_fx, "compile_fx", lambda m, *_, **__: graphs.append(m) or m.forward)
    torch.compiler.reset()
    torch.compile(_Dropping().train(trains), backend="torchweld")(_X)
    names = [getattr(node.target, "__module__", "") for node in graphs[0].graph.nodes]
    assert sum(str(name).startswith("torchweld") for name in names) == (2 if trains else 0)


@pytest.mark.parametrize("least", [0, 1 << 40])
def test_the_backend_keeps_a_large_loss(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Inductor only the loss is welded, from some MiB of logits on."""
    from torch._inductor import compile_fx

    monkeypatch.setattr(loss, "LEAST_COMPILED", least)
    graphs: list[Any] = []
    monkeypatch.setattr(compile_fx, "compile_fx", lambda m, *_, **__: graphs.append(m) or m.forward)
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = Words()
    model = torch.compile(plain, backend="torchweld")
    want, got = step(plain, make_ids()), step(model, make_ids())
    for name, value in want.items():
        torch.testing.assert_close(got[f"_orig_mod.{name}" if name != "loss" else name], value)
    (module,) = graphs
    names = [getattr(node.target, "__module__", "") for node in module.graph.nodes]
    ours = [name for name in names if str(name).startswith("torchweld")]
    assert len(ours) == (1 if least == 0 else 0)
