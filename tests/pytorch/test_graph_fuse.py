"""fuse(by="graph") where training programs meet it: each cell next to the unfused model."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import torchweld
from torchweld.errors import ArgumentError
from torchweld.fusion.graph import backend, regions
from torchweld.fusion.graph.regions import Region

WIDTH, WORDS = 32, 50


class Norm(nn.Module):
    """Llama's norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.arange(WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Layer(nn.Module):
    """A gated MLP and its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = Norm(), nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48)
        self.down, self.p, self.scale = nn.Linear(48, WIDTH), 0.0, 1.0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = self.norm(x)
        y = self.down(functional.silu(self.gate(y)) * self.up(y))
        return x + functional.dropout(y, self.p, self.training) * scale


class Words(nn.Module):
    """A language model written by hand, whose parts are called as functions."""

    checkpointing: Any = None

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            if self.checkpointing is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, WORDS), ids.roll(-1, 1).view(-1)), logits


def make_ids(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(rows))


def make_words(**more: Any) -> Any:
    torch.manual_seed(0)
    return Words(**more)


def step(model: Any, ids: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """The loss and all gradients of a training step."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(ids)[0]
    (loss * scale).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **{name: _whole(grad) for name, grad in grads.items()}}


def _whole(grad: Any) -> torch.Tensor:
    return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()


def compare(got: dict[str, Any], want: dict[str, Any], bound: float = 2e-5) -> None:
    assert got.keys() == want.keys()
    for name, b in want.items():
        a = got[name]
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        assert (a - b).norm() <= bound * b.norm() + 1e-7, name


def list_ops(model: Any) -> list[str]:
    """The welds that the captures of a model made."""
    kinds = {type(part) for part in model.modules() if isinstance(part, Region)}
    slots = [slot for kind in kinds for slot in kind.weld_captures.slots.values() if not slot.off]
    return [placed.op for slot in slots for placed in slot.placed if not placed.reason]


@pytest.fixture(autouse=True)
def _forget() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def fuse_two(model: Any, prepare: Callable[[Any], Any] = lambda model: model) -> tuple[Any, Any]:
    """A fused copy and the model, both prepared in the same way after `fuse`."""
    fused = torchweld.fuse(copy.deepcopy(model), by="graph")
    return prepare(fused), prepare(model)


# --- The model stays what it is -------------------------------------------------------------------


def test_a_model_is_captured_as_a_whole() -> None:
    got, want = fuse_two(make_words())
    compare(step(got, make_ids()), step(want, make_ids()))
    ops = list_ops(got)
    assert ops.count("linear_cross_entropy") == 1
    assert ops.count("gated_act") == 3
    assert ops.count("dropout_add_rms_norm") + ops.count("rms_norm") == 4
    assert ops.count("dropout_add_rms_norm") == 3


def test_modules_and_parameters_stay_the_same_objects() -> None:
    model = make_words()
    modules, parameters = list(model.modules()), list(model.parameters())
    names = list(model.state_dict())
    assert torchweld.fuse(model, by="graph") is model
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == names
    classes = [type(part) for part in model.modules()]
    assert torchweld.fuse(model, by="graph") is model
    assert [type(part) for part in model.modules()] == classes
    torchweld.unfuse(model)
    assert not any(isinstance(part, Region) for part in model.modules())
    assert type(model) is Words


def test_copies_and_pickles_stay_fused() -> None:
    """torch drops a module's compiled call from its copies."""
    model = torchweld.fuse(make_words(), by="graph")
    want = step(model, make_ids())
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    copies = {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "save": torch.load(saved, weights_only=False),
    }
    for name, other in copies.items():
        compare(step(other, make_ids()), want)
        assert list_ops(other), name
        torchweld.unfuse(other)
        assert type(other) is Words


def test_layers_of_a_model_share_one_graph() -> None:
    model = make_words(layers=6)
    torchweld.fuse(model, by="graph")
    kinds = {type(layer) for layer in model.layers}
    assert len(kinds) == 1
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    for layer in model.layers:
        x = layer(x)
    (slot,) = kinds.pop().weld_captures.slots.values()
    assert slot.graphs == 1
    assert slot.welds == 2


def test_a_filter_and_a_changed_filter() -> None:
    """What a filter leaves out is not welded, also when the model is fused again by another one."""
    model = make_words()
    torchweld.fuse(model, lambda module, name: name != "layers.1.norm", by="graph")
    step(model, make_ids())
    assert list_ops(model).count("dropout_add_rms_norm") == 2
    torchweld.fuse(model, lambda module, name: not isinstance(module, Norm), by="graph")
    want = step(torchweld.unfuse(copy.deepcopy(model)), make_ids())
    compare(step(model, make_ids()), want)
    assert not any("norm" in op for op in list_ops(model))
    torchweld.fuse(model, by="graph")
    step(model, make_ids())
    assert list_ops(model).count("dropout_add_rms_norm") == 3


def test_an_unknown_way() -> None:
    with pytest.raises(ArgumentError, match="by is 'guess'; accepted: 'trial' or 'graph'"):
        torchweld.fuse(make_words(), by="guess")


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
    assert "test_graph_fuse.py" in slot.reason


def test_a_layer_that_breaks_is_divided() -> None:
    model = make_words()
    model.layers = nn.ModuleList(BreakingLayer() for _ in range(3))
    got, want = fuse_two(model)
    for _ in range(3):
        compare(step(got, make_ids()), step(want, make_ids()))
    assert "rms_norm" in list_ops(got)


def test_an_error_of_the_model_is_raised_as_it_is() -> None:
    model = torchweld.fuse(make_words(), by="graph")
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
        torch.testing.assert_close(result, want(x, float(scale)), rtol=1e-5, atol=1e-5)
    (slot,) = type(got).weld_captures.slots.values()
    assert slot.graphs == 3
    torch.testing.assert_close(got(x, 2.0), want(x, 2.0), rtol=1e-5, atol=1e-5)


# --- Explanations ---------------------------------------------------------------------------------


class Scaled(Layer):
    """A norm that is scaled in its middle, and a gate that is read twice."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) * 0.5 + 1e-6) * self.norm.weight
        gate = functional.silu(self.gate(y))
        return x + self.down(gate * self.up(y) + gate)


def test_an_explanation_is_the_same_before_and_after() -> None:
    model, ids = make_words(), make_ids()
    before = torchweld.explain_fusion(model, ids, by="graph")
    torchweld.fuse(model, by="graph")
    after = torchweld.explain_fusion(model, ids, by="graph")
    assert [row.becomes for row in before] == [row.becomes for row in after]
    assert all(row.becomes and not row.welded for row in before)
    assert all(row.welded for row in after)
    assert {(row.where, row.becomes) for row in after} >= {
        ("", "linear_cross_entropy"),
        ("layers.1.norm", "dropout_add_rms_norm"),
    }
    step(model, ids)
    slot = type(model).weld_captures.slots[True, True, False]
    assert [placed.op for placed in slot.placed] == [row.becomes for row in after]


def test_an_explanation_names_the_operation_that_differs() -> None:
    report = torchweld.explain_fusion(Scaled(), torch.randn(2, 3, WIDTH), by="graph")
    reasons = [row.reason for row in report if row.reason]
    assert any("no rms_norm: mul by 0.5 stands where mean" in reason for reason in reasons)
    assert any("no gated_act: another operation reads an inner value" in r for r in reasons)
    assert all("test_graph_fuse.py:" in reason for reason in reasons)


def test_an_explanation_says_where_a_capture_breaks() -> None:
    model = make_words()
    model.layers = nn.ModuleList((Layer(), BreakingLayer()))
    state = torch.get_rng_state()
    report = torchweld.explain_fusion(model, make_ids(), by="graph")
    assert torch.equal(torch.get_rng_state(), state)
    reasons = {row.where: row.reason for row in report if row.reason}
    assert "captured in parts" in reasons[""]
    assert "test_graph_fuse.py:" in reasons["layers.1"]
    assert {row.becomes for row in report if row.where.startswith("layers.0")} >= {"gated_act"}


def test_an_explanation_without_an_example() -> None:
    with pytest.raises(ArgumentError, match="example is empty; accepted: the arguments of a call"):
        torchweld.explain_fusion(make_words(), by="graph")


# --- Training programs ----------------------------------------------------------------------------


def test_lengths_and_rows() -> None:
    got, want = fuse_two(make_words())
    for rows, length in ((2, 12), (2, 9), (3, 20), (1, 4), (5, 1), (2, 12)):
        compare(step(got, make_ids(rows, length)), step(want, make_ids(rows, length)))
    (slot,) = type(got).weld_captures.slots.values()
    assert slot.graphs <= 5


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    """A captured checkpoint runs again in the backward pass, with its dropouts."""

    def prepare(model: Any) -> Any:
        model.checkpointing = reentrant
        return model

    got, want = fuse_two(make_words(), prepare)
    compare(step(got, make_ids()), step(want, make_ids()))
    assert "gated_act" in list_ops(got)


def test_a_captured_checkpoint_saves_no_inner_tensors() -> None:
    """Dynamo's checkpoints are for compilers: run eagerly they would keep everything, or not the
    random state.
    """
    model = make_words()
    saved: dict[bool, int] = {}
    for checkpointing in (None, False):
        model.checkpointing = checkpointing
        fused = torchweld.fuse(copy.deepcopy(model), by="graph")
        for layer in fused.layers:
            layer.p = 0.5
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, sizes=sizes: sizes.append(x.numel()) or x, lambda x: x
        ):
            loss = fused(make_ids())[0]
        saved[checkpointing is None] = sum(sizes)
        loss.backward()
    assert saved[False] < 0.8 * saved[True]


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_dropout_of_a_checkpoint_is_drawn_again(checkpointing: bool | None) -> None:
    """Gradients of a step with dropout are the derivative of its loss."""
    model = make_words().double()
    model.checkpointing = checkpointing
    for layer in model.layers:
        layer.p = 0.5
    torchweld.fuse(model, by="graph")
    ids = make_ids()
    grads = step(model, ids)
    weight = model.layers[1].up.weight
    direction = torch.randn_like(weight)
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            weight.add_(direction, alpha=sign * 1e-6)
        losses.append(step(model, ids)["loss"])
        with torch.no_grad():
            weight.sub_(direction, alpha=sign * 1e-6)
    slope = (losses[0] - losses[1]) / 2e-6
    expected = (grads["layers.1.up.weight"] * direction).sum()
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """The error of a step in float64 is at most eager's."""
    got, want = fuse_two(make_words())
    exact = step(copy.deepcopy(want).double(), make_ids())
    results = []
    for model in (got, want):
        with torch.autocast("cpu", dtype):
            results.append(step(model, make_ids()))
    for name, b in exact.items():
        errors = [float((each[name].double() - b).norm()) for each in results]
        assert errors[0] <= 1.5 * errors[1] + 1e-3 * float(b.norm()), (name, errors)
    assert {"gated_act", "linear_cross_entropy"} <= set(list_ops(got))


def test_a_scaler_of_gradients() -> None:
    got, want = fuse_two(make_words())
    grads = []
    for model in (got, want):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(make_ids())[0]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    compare(*grads, bound=5e-2)


def test_logits_are_lazy() -> None:
    got, want = fuse_two(make_words())
    loss, logits = got(make_ids())
    expected = want(make_ids())[1]
    assert logits.shape == expected.shape
    torch.testing.assert_close(logits + 0, expected, rtol=1e-5, atol=1e-5)
    (loss + logits.square().mean()).backward()
    other = want(make_ids())
    (other[0] + other[1].square().mean()).backward()
    for a, b in zip(got.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_evaluation_and_inference() -> None:
    got, want = fuse_two(make_words())
    got.eval(), want.eval()
    for mode in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        with mode():
            a, b = got(make_ids()), want(make_ids())
        torch.testing.assert_close(a[1] + 0, b[1], rtol=1e-5, atol=1e-5)
    compare(step(got.train(), make_ids()), step(want.train(), make_ids()))


def test_frozen_parts() -> None:
    def prepare(model: Any) -> Any:
        model.embed.requires_grad_(False)
        model.layers[0].requires_grad_(False)
        model.layers[1].norm.requires_grad_(False)
        return model

    got, want = fuse_two(make_words(), prepare)
    compare(step(got, make_ids()), step(want, make_ids()))


def test_hooks_on_gradients_and_on_saved_tensors() -> None:
    def prepare(model: Any) -> Any:
        model.layers[0].register_full_backward_hook(lambda m, i, o: (i[0] * 2,))
        model.layers[1].up.weight.register_hook(lambda g: g * 3)
        model.seen = []
        model.layers[2].register_forward_hook(lambda m, i, o: model.seen.append(o.shape))
        return model

    got, want = fuse_two(make_words(), prepare)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        compare(step(got, make_ids()), step(want, make_ids()))
    assert got.seen == want.seen


def test_saved_tensors_that_hooks_replace() -> None:
    """A weld's node unpacks what a hook packed, as torch's nodes do."""
    got, want = fuse_two(make_words())

    def pack(x: torch.Tensor) -> Any:
        return x.detach().numpy().copy() if x.dtype == torch.float32 else x

    def unpack(x: Any) -> torch.Tensor:
        return x if isinstance(x, torch.Tensor) else torch.from_numpy(x)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        compare(step(got, make_ids()), step(want, make_ids()))


def test_threads() -> None:
    """Several models capture and run in threads."""
    pairs = [fuse_two(make_words(layers=layers)) for layers in (1, 2, 3)]
    want = [step(plain, make_ids()) for _, plain in pairs]
    results: dict[int, Any] = {}

    def run(at: int) -> None:
        for _ in range(3):
            model = pairs[at][0]
            model.zero_grad()
            loss = model(make_ids())[0]
            loss.backward()
            grads = {name: p.grad.clone() for name, p in model.named_parameters()}
            results[at] = {"loss": loss.detach(), **grads}

    threads = [threading.Thread(target=run, args=(at,)) for at in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at in range(3):
        compare(results[at], want[at])


def test_second_derivatives_and_transforms() -> None:
    got, want = fuse_two(Layer().double())
    want.load_state_dict(got.state_dict())
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    second = []
    for model in (got, want):
        (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        second.append(torch.autograd.grad(g.square().sum(), x)[0])
    torch.testing.assert_close(*second)
    parameters = {name: p.detach() for name, p in want.named_parameters()}
    results = []
    for model in (got, want):

        def loss(given: Any, model: Any = model) -> torch.Tensor:
            return torch.func.functional_call(model, given, (x.detach(),)).square().sum()

        results.append(torch.func.grad(loss)(parameters))
    compare(*results)


def test_symbolic_traces_exports_and_compiles() -> None:
    got, want = fuse_two(Layer())
    x = torch.randn(2, 3, WIDTH)
    expected = want(x)
    torch.testing.assert_close(got(x), expected, rtol=1e-5, atol=1e-5)
    exported = torch.export.export(copy.deepcopy(got).eval(), (x,))
    torch.testing.assert_close(exported.module()(x), expected, rtol=1e-5, atol=1e-5)
    for name in ("eager", "aot_eager", backend.torchweld):
        compiled = torch.compile(got, backend=name)
        torch.testing.assert_close(compiled(x), expected, rtol=1e-5, atol=1e-5)


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Words()
    torchweld.fuse(model, by="graph")
    loss, _ = model(make_ids().to("meta"))
    assert loss.is_meta
    model.to_empty(device="cpu").load_state_dict(make_words().state_dict())
    compare(step(model, make_ids()), step(make_words(), make_ids()))


def test_dispatch_modes_see_the_model_as_it_is() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    got, want = fuse_two(make_words())
    step(got, make_ids())
    counts = []
    for model in (got, want):
        with FlopCounterMode(display=False) as counter:
            model(make_ids())
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


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
        "torch.testing.assert_close(run(x), norm(x), rtol=1e-5, atol=1e-5)\n"
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
