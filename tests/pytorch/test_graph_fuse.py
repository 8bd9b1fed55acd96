"""fuse() where training programs meet it: each cell next to the unfused model."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchweld
from torchweld import numerics
from torchweld.fusion.graph import answers, backend
from torchweld.fusion.graph.regions import Region
from torchweld.fusion.logits import Logits
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
    assert torchweld.fuse(model) is model
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == names
    classes = [type(part) for part in model.modules()]
    assert torchweld.fuse(model) is model
    assert [type(part) for part in model.modules()] == classes
    assert model._get_name() == type(model).__name__ == "Words"
    torchweld.unfuse(model)
    assert not any(isinstance(part, Region) for part in model.modules())
    assert type(model) is Words


def test_copies_and_pickles_stay_fused() -> None:
    """torch drops a module's compiled call from its copies."""
    model = torchweld.fuse(make_words())
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
    torchweld.fuse(model)
    kinds = {type(layer) for layer in model.layers}
    assert len(kinds) == 1
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    for layer in model.layers:
        x = layer(x)
    (slot,) = kinds.pop().weld_captures.slots.values()
    assert slot.graphs == 1
    assert slot.welds == 2


def test_a_filter_and_a_changed_filter() -> None:
    """What a filter leaves out is not welded, also when the model is fused again by another one.

    Before the first call `explain_fusion` of a fused model forgot its filter.
    """
    model = make_words()
    torchweld.fuse(model, lambda module, name: name != "layers.1.norm")
    rows = [r for r in torchweld.explain_fusion(model, make_ids()) if r.where == "layers.1.norm"]
    assert rows
    assert all("the filter leaves it out" in row.reason for row in rows)
    step(model, make_ids())
    assert list_ops(model).count("dropout_add_rms_norm") == 2
    torchweld.fuse(model, lambda module, name: not isinstance(module, Norm))
    want = step(torchweld.unfuse(copy.deepcopy(model)), make_ids())
    compare(step(model, make_ids()), want)
    assert not any("norm" in op for op in list_ops(model))
    torchweld.fuse(model)
    step(model, make_ids())
    assert list_ops(model).count("dropout_add_rms_norm") == 3


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
        fused = torchweld.fuse(copy.deepcopy(model))
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
    torchweld.fuse(model)
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
    torch.testing.assert_close(slope, expected, **numerics.SUMMED_SMALL)


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


class Shifted(Words):
    """With a row added to the logits, as in BART, and a shift by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("row", torch.linspace(-1, 1, WORDS)[None])

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)) + self.row
        shifted = logits[:, :-1].reshape(-1, WORDS)
        return torch.nn.functional.cross_entropy(shifted, ids[:, 1:].reshape(-1)), logits


def test_a_row_that_needs_a_gradient() -> None:
    """Lazy logits have no gradient for it."""
    torch.manual_seed(0)
    model = Shifted()
    model.row.requires_grad_()
    got, want = fuse_two(model)
    grads = []
    for each in (got, want):
        loss, logits = each(make_ids())
        grads.append(torch.autograd.grad(loss + logits.square().mean(), each.row)[0])
    torch.testing.assert_close(*grads, **numerics.SUMMED_SMALL)


@pytest.mark.parametrize("kind", [Words, Shifted])
def test_logits_are_lazy(kind: Any) -> None:
    torch.manual_seed(0)
    got, want = fuse_two(kind())
    loss, logits = got(make_ids())
    assert isinstance(logits, Logits)
    expected = want(make_ids())[1]
    assert logits.shape == expected.shape
    torch.testing.assert_close(logits + 0, expected, **numerics.SUMMED)
    (loss + logits.square().mean()).backward()
    other = want(make_ids())
    (other[0] + other[1].square().mean()).backward()
    for a, b in zip(got.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **numerics.SUMMED_SMALL)


def test_evaluation_and_inference() -> None:
    got, want = fuse_two(make_words())
    got.eval(), want.eval()
    for mode in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        with mode():
            a, b = got(make_ids()), want(make_ids())
        torch.testing.assert_close(a[1] + 0, b[1], **numerics.SUMMED)
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


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several models capture and run in threads, one captures at a time: settings and tables of
    Dynamo are the process's."""
    together, most = [0], [0]
    serve = answers.Answers.serve

    @contextlib.contextmanager
    def count(self: Any) -> Iterator[None]:
        together[0] += 1
        most[0] = max(most[0], together[0])
        time.sleep(0.05)
        with serve(self):
            yield
        together[0] -= 1

    monkeypatch.setattr(answers.Answers, "serve", count)
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
    assert most == [1]


def test_second_derivatives_and_transforms() -> None:
    got, want = fuse_two(Layer().double())
    want.load_state_dict(got.state_dict())
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    second = []
    for model in (got, want):
        (g,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        second.append(torch.autograd.grad(g.square().sum(), x)[0])
    torch.testing.assert_close(*second, **numerics.CHAINED)  # the norm's float32
    parameters = {name: p.detach() for name, p in want.named_parameters()}
    results = []
    for model in (got, want):

        def loss(given: Any, model: Any = model) -> torch.Tensor:
            return torch.func.functional_call(model, given, (x.detach(),)).square().sum()

        results.append(torch.func.grad(loss)(parameters))
    compare(*results, bound=1e-4)


def test_symbolic_traces_exports_and_compiles() -> None:
    got, want = fuse_two(Layer())
    x = torch.randn(2, 3, WIDTH)
    expected = want(x)
    torch.testing.assert_close(got(x), expected, **numerics.SUMMED)
    exported = torch.export.export(copy.deepcopy(got).eval(), (x,))
    torch.testing.assert_close(exported.module()(x), expected, **numerics.SUMMED)
    for name in ("eager", "aot_eager", backend.torchweld):
        compiled = torch.compile(got, backend=name)
        torch.testing.assert_close(compiled(x), expected, **numerics.SUMMED)


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Words()
    torchweld.fuse(model)
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


class Casting(torch.nn.Module):
    """A forward that turns autocast on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.nn.functional.gelu(self.up(x))
        return y.float()


def test_autocast_inside_of_a_forward() -> None:
    """A definition is recorded under the state of where it stands, not of the call."""
    want = Casting()
    got, x = torchweld.fuse(copy.deepcopy(want)), torch.randn(4, WIDTH)
    torch.testing.assert_close(got(x), want(x), **numerics.BFLOAT16)
    assert list_ops(got) == ["linear_act"]


class Head(torch.nn.Module):
    """A last layer and its loss: without gradients nothing is welded."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor, target: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(x) * scale, target)


def test_a_call_without_gradients_decides_nothing_for_later_ones() -> None:
    """Graphs of other modes are judged by themselves: one without welds does not end the search."""
    model, x, target = torchweld.fuse(Head()), torch.randn(8, WIDTH), torch.arange(8)
    with torch.no_grad():
        model(x, target)
    assert list_ops(model) == []
    model(x, target)
    assert list_ops(model) == ["linear_cross_entropy"]


def test_each_factor_has_a_graph() -> None:
    """A factor is a part of what is proven; as a symbol it would be part of nothing."""
    want = Head()
    got, x, target = torchweld.fuse(copy.deepcopy(want)), torch.randn(8, WIDTH), torch.arange(8)
    for scale in (0.5, 0.25, 2.0):
        both = got(x, target, scale), want(x, target, scale)
        torch.testing.assert_close(*both, **numerics.SUMMED)
    assert list_ops(got) == ["linear_cross_entropy"] * 3


class Dropping(torch.nn.Module):
    """A residual behind a dropout: in evaluation there is a sum only."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.dropout(y, 0.5, self.training)


def test_an_evaluation_decides_nothing_for_training() -> None:
    model, x = torchweld.fuse(Dropping()), torch.randn(8, WIDTH, requires_grad=True)
    model.eval()(x, x)
    assert list_ops(model) == []
    model.train()(x, x)
    assert list_ops(model) == ["bias_dropout_add"]
