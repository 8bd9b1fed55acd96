"""Captures that break, what explain_fusion tells of them, and the backend of torch.compile."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import torchweld
from torchweld import numerics
from torchweld.errors import ArgumentError
from torchweld.fusion.graph import backend, regions, trace
from words import (
    WIDTH,
    WORDS,
    Layer,
    Norm,
    Words,
    compare,
    fuse_two,
    list_ops,
    make_ids,
    make_words,
    step,
)

pytestmark = pytest.mark.usefixtures("own_graphs")


# --- Captures that break --------------------------------------------------------------------------


class Breaking(Words):
    """A model whose forward Dynamo cannot follow, around layers that it can."""

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if float(self.head.weight.detach().sum()) > 1e9:
            raise ValueError
        return super().forward(ids)


class BreakingLayer(Layer):
    """A layer that breaks in itself; its norm is captured."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if x.detach().sum().item() > 1e9:
            raise ValueError
        return super().forward(x, scale)


def test_a_forward_that_breaks_is_captured_in_pieces() -> None:
    torch.manual_seed(0)
    got, want = fuse_two(Breaking())
    compare(step(got, make_ids()), step(want, make_ids()))
    ops = list_ops(got)
    assert ops.count("linear_cross_entropy") == 1
    assert ops.count("gated_act") >= 1
    (slot,) = type(got).weld_captures.slots.values()
    assert "test_graph_captures.py" in slot.reason


def test_a_layer_that_breaks_is_divided() -> None:
    model = make_words()
    model.layers = nn.ModuleList(BreakingLayer() for _ in range(3))
    got, want = fuse_two(model)
    for _ in range(3):
        compare(step(got, make_ids()), step(want, make_ids()))
    assert "rms_norm" in list_ops(got)


def test_an_error_of_the_model_is_raised_as_it_is() -> None:
    model = torchweld.fuse(make_words())
    with pytest.raises(IndexError):
        model(torch.full((2, 3), WORDS))
    ids = make_ids()
    compare(step(model, ids), step(make_words(), ids))


def test_more_kinds_of_calls_than_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a number of graphs further kinds of calls run as they are; known ones keep theirs."""
    monkeypatch.setattr(regions, "LIMIT", 3)
    torch.manual_seed(0)
    got, want = fuse_two(Layer())
    x = torch.randn(2, 4, WIDTH)
    results = []
    with pytest.warns(UserWarning, match="has 3 graphs, for as many kinds of calls"):
        results += [got(x, scale) for scale in (1.0, 2.0, 3.0, 4.0, 5.0)]
    for scale, result in enumerate(results, 1):
        torch.testing.assert_close(result, want(x, float(scale)), **numerics.SUMMED)
    (slot,) = type(got).weld_captures.slots.values()
    assert slot.graphs == 3
    torch.testing.assert_close(got(x, 2.0), want(x, 2.0), **numerics.SUMMED)


# --- Explanations ---------------------------------------------------------------------------------


class Scaled(Layer):
    """A norm that is scaled in its middle, and a gate that is read twice."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) * 0.5 + 1e-6) * self.norm.weight
        gate = functional.silu(self.gate(y))
        return x + self.down(gate * self.up(y) + gate)


def test_an_explanation_is_the_same_before_and_after() -> None:
    model, ids = make_words(), make_ids()
    before = torchweld.explain_fusion(model, ids)
    torchweld.fuse(model)
    after = torchweld.explain_fusion(model, ids)
    assert [row.becomes for row in before] == [row.becomes for row in after]
    assert all(row.becomes and not row.welded for row in before)
    assert all(row.welded for row in after)
    assert {(row.where, row.becomes) for row in after} >= {
        ("", "linear_cross_entropy"),
        ("layers.1.norm", "dropout_add_rms_norm"),
    }
    step(model, ids)
    (slot,) = type(model).weld_captures.slots.values()
    assert sorted(placed.op for placed in slot.placed) == sorted(row.becomes for row in after)


class Clamped(Layer):
    """A gate with a clamp between its factors."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(functional.silu(self.gate(y)).clamp(max=7.0) * self.up(y)) * scale


def test_an_explanation_names_a_clamp_in_a_gate() -> None:
    """Three readers of the code asked for this line, and the explanation had none."""
    report = torchweld.explain_fusion(Clamped(), torch.randn(2, 3, WIDTH))
    (reason,) = [row.reason for row in report if "gated_act" in row.reason]
    assert reason.startswith("no gated_act: clamp by 7.0 stands where ")


def test_an_explanation_names_the_operation_that_differs() -> None:
    report = torchweld.explain_fusion(Scaled(), torch.randn(2, 3, WIDTH))
    reasons = [row.reason for row in report if row.reason]
    assert any("no rms_norm: mul by 0.5 stands where mean" in reason for reason in reasons)
    assert any("no gated_act: another operation reads an inner value" in r for r in reasons)
    assert all("test_graph_captures.py:" in reason for reason in reasons)


def test_an_explanation_says_where_a_capture_breaks() -> None:
    model = make_words()
    model.layers = nn.ModuleList((Layer(), BreakingLayer()))
    state = torch.get_rng_state()
    report = torchweld.explain_fusion(model, make_ids())
    assert torch.equal(torch.get_rng_state(), state)
    reasons = {row.where: row.reason for row in report if row.reason}
    assert "captured in parts" in reasons[""]
    assert "test_graph_captures.py:" in reasons["layers.1"]
    # Its parts were not told of, which capture by themselves.
    assert ("layers.1.norm", "rms_norm") in {(row.where, row.becomes) for row in report}
    assert {row.becomes for row in report if row.where.startswith("layers.0")} >= {"gated_act"}


def test_an_explanation_without_an_example() -> None:
    with pytest.raises(ArgumentError, match="example is empty; accepted: the arguments of a call"):
        torchweld.explain_fusion(make_words())


# --- The backend of torch.compile -----------------------------------------------------------------


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_the_backend(compiler: str) -> None:
    model = make_words(layers=2)
    compiled = torch.compile(
        copy.deepcopy(model), backend=backend.torchweld, options={"compiler": compiler}
    )
    results = []
    for each in (compiled, model):
        each.zero_grad()
        loss, logits = each(make_ids())
        loss.backward()
        grads = {n.removeprefix("_orig_mod."): p.grad for n, p in each.named_parameters()}
        results.append({"loss": loss.detach(), "logits": (logits + 0).detach(), **grads})
    compare(*results)


def test_the_backend_is_found_by_its_name(tmp_path: Path) -> None:
    """torch finds it in the metadata of the installed package, before anybody imports torchweld."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    start = text.index("[project.entry-points.torch_dynamo_backends]")
    section = text[start : text.index("[", start + 1)]
    line = section.splitlines()[1].replace('"', "")
    info = tmp_path / "torchweld_backend-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torchweld-backend\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[torch_dynamo_backends]\n{line}\n")
    program = (
        "import sys, torch\n"
        "assert 'torchweld' in torch.compiler.list_backends()\n"
        "assert 'torchweld' not in sys.modules\n"
        "norm = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())\n"
        "run = torch.compile(norm, backend='torchweld', options={'compiler': 'eager'})\n"
        "x = torch.randn(2, 8)\n"
        f"torch.testing.assert_close(run(x), norm(x), **{numerics.SUMMED})\n"
        "assert 'torchweld' in sys.modules\n"
    )
    source = Path(torchweld.__file__).parents[1]
    path = os.pathsep.join((str(tmp_path), str(source)))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_compiler_that_the_backend_lacks() -> None:
    compiled = torch.compile(Layer(), backend=backend.torchweld, options={"compiler": "llvm"})
    with pytest.raises(Exception, match=r"options\['compiler'\] is 'llvm'"):
        compiled(torch.randn(2, 3, WIDTH))


# --- Other backends of torch.compile --------------------------------------------------------------


class Around(nn.Module):
    """A fused model, and a norm that is not."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.norm = inner, Norm()

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.inner(x))


def _list_compiled(model: nn.Module, *args: Any) -> list[str]:
    """The functions of the graphs that a compiled call runs, next to the call without."""
    found: list[str] = []

    def keep(module: torch.fx.GraphModule, inputs: Any) -> Any:
        found.extend(str(getattr(each.target, "__qualname__", "")) for each in module.graph.nodes)
        return module.forward

    torch.compiler.reset()
    result = torch.compile(model, backend=keep, fullgraph=True)(*args)
    expected = torchweld.unfuse(model)(*args)
    torch.testing.assert_close(*(tree_leaves(y)[0] for y in (result, expected)), **numerics.CHAINED)
    return found


@pytest.mark.parametrize("around", [False, True])
def test_a_compiled_model_keeps_its_welds(around: bool) -> None:
    """Each other backend got the graph as it was: the welds of fuse(model) were lost in it."""
    model = torchweld.fuse(Layer())
    with torchweld.use_backend("cpu", "eager"):  # else what a compiler fuses itself is left to it
        found = _list_compiled(Around(model) if around else model, torch.randn(2, 5, WIDTH))
    ops = [name for name in found if name.startswith("_run")]
    assert ops == ["_run_norm", "_run"]
    assert ("rsqrt" in str(found)) == around


def test_a_compiled_model_keeps_what_a_filter_left_out() -> None:
    model = make_words()
    torchweld.fuse(model, lambda module, name: name not in ("layers.1.norm", "norm"))
    with torchweld.use_backend("cpu", "eager"):
        found = _list_compiled(model, make_ids())
    assert [name for name in found if "norm" in name] == ["_run_norm", "_run_add_norm"]


def test_a_compiled_model_leaves_to_a_compiler_what_it_fuses() -> None:
    model = torchweld.fuse(make_words())
    for layer in model.layers:
        layer.p = 0.5
    found = _list_compiled(model.eval(), make_ids())
    assert not [name for name in found if name.startswith("_run")]


def test_a_model_is_compiled_after_another_one_was_captured_in_pieces() -> None:
    """Then Dynamo left out the forward of each fused model, which all have one code."""
    pieces, _ = fuse_two(Breaking())
    step(pieces, make_ids())
    model = torchweld.fuse(Layer())
    found: list[Any] = []
    compiled = torch.compile(model, backend=lambda module, _: found.append(1) or module.forward)
    compiled(torch.randn(2, 5, WIDTH))
    assert found


class Cast(Words):
    """Hands its logits through calls that do nothing, as OPT does."""

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).contiguous().float()
        target = ids.roll(-1, 1).view(-1)
        return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), target), logits


def test_logits_are_not_computed_beside_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that does nothing and reads another such call stayed, and so did the last layer.

    OPT's step took 1.07 of eager's. Results were right and the weld was counted, so that no test
    saw it.
    """
    graphs: list[torch.fx.Graph] = []
    run = regions.run_eagerly

    def keep(module: torch.fx.GraphModule, made: Any) -> Any:
        graphs.append(module.graph)
        return run(module, made)

    monkeypatch.setattr(regions, "run_eagerly", keep)
    model = torchweld.fuse(Cast())
    model(make_ids())
    (graph,) = graphs
    (head,) = [node for node in graph.nodes if "head" in node.name and node.op == "placeholder"]
    assert len(head.users) == 1


class Attends(nn.Module):
    """Attention with a dropout, between two products."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return self.out(y.transpose(1, 2).flatten(2))


def test_a_graph_is_run_once_on_fake_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded whole seemed to return older memory, which a second run had to judge.

    BERT with 24 layers took 7.3 s for its first call in place of 4.5.
    """
    runs: list[Any] = []
    run = trace.Trace.of
    monkeypatch.setattr(trace.Trace, "of", lambda module: runs.append(module) or run(module))
    model = torchweld.fuse(Attends())
    with torchweld.use_backend("cpu", "eager"):
        model(torch.randn(2, 6, WIDTH))
    assert [row.becomes for row in torchweld.explain_fusion(model)] == ["block_sparse_attention"]
    assert len(runs) == 1


def _take_away_the_table(patches: pytest.MonkeyPatch) -> None:
    patches.delattr(torch._dynamo.trace_rules, "_allowed_callable_ids")


def _take_away_an_argument(patches: pytest.MonkeyPatch) -> None:
    patches.setattr(torch._dynamo, "optimize", lambda backend: backend)


@pytest.mark.parametrize("change", [_take_away_the_table, _take_away_an_argument])
def test_another_dynamo(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of torch with other private names: the model runs as it is, and says why."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU()), torch.ones(2, 8)
    expected = model(x)
    torchweld.fuse(model)
    change(monkeypatch)
    for _ in range(2):
        assert torch.equal(model(x), expected)
    (row,) = torchweld.explain_fusion(model)
    assert "captured in parts" in row.reason


def test_a_dynamo_without_a_file() -> None:
    """fuse() warns, and leaves the model as it is."""
    code = (
        "import sys, torch, torchweld; sys.modules['torch._dynamo.variables.lazy'] = None;"
        "print(type(torchweld.fuse(torch.nn.Sequential())) is torch.nn.Sequential)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"
    assert "has another Dynamo than the tested releases" in ran.stderr


def test_a_model_that_is_gone_leaves_nothing() -> None:
    """Its class was kept, and with it the graphs: 20 MB for each small model of transformers."""

    def train() -> list[Any]:
        model = torchweld.fuse(make_words())
        step(model, make_ids())
        (slot,) = type(model).weld_captures.slots.values()
        kept = copy.deepcopy(model)
        step(kept, make_ids())  # by the same graphs
        assert [*type(kept).weld_captures.slots.values()] == [slot]
        return [weakref.ref(each) for each in (model, type(model), slot)]

    gone = train()
    # Python 3.12.1's getattr_static, which Dynamo calls, keeps the classes that it saw last.
    if cached := getattr(inspect, "_shadowed_dict_from_mro_tuple", None):
        cached.cache_clear()
    gc.collect()
    assert [each() for each in gone] == [None] * 3
