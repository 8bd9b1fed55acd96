"""fuse() changes classes in place, if results stay the same; unfuse() restores them."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchweld
from fusable import (  # noqa: F401
    MODELS,
    WIDTH,
    FeedForward,
    Gated,
    PlainRMSNorm,
    rms,
    run,
    small_inputs,
)
from torchweld import numerics
from torchweld.fusion import PATTERNS, Change, Proposal, Weld, plan, probe
from torchweld.fusion.graph import regions
from torchweld.fusion.probe import values
from ways import by_graph, is_by_graph, way  # noqa: F401

UNIT = 2.0**-23


def _made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def _welds(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Weld)]


@functools.cache
def _fused(name: str) -> nn.Module:
    """The model after fuse(), which tests only run and copy."""
    model = _made(name)
    assert torchweld.fuse(model) is model
    assert _welds(model)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_are_the_same(name: str) -> None:
    """No further from float64 than twice the original, plus some units of rounding."""
    model, x = _made(name), torch.randn(32, 16, WIDTH, requires_grad=True)
    expected = run(model, x)
    truth = run(model.double(), x.detach().double().requires_grad_())
    # Some gradients are zero except for rounding: they are held to the others' rounding.
    scale = max(rms(value) for value in truth[1:])
    for a, b, exact in zip(expected, run(_fused(name), x), truth, strict=True):
        scale = rms(exact) if exact is truth[0] else scale
        assert rms(b - exact) <= 2 * rms(a - exact) + 4 * UNIT * scale


# Models of which a test by graph says enough; test_fuse_parts.py has the numbers of all.
_BY_GRAPH = ("rms_norm", "parallel", "rotary", "packed", "output", "batch_norm", "multihead")
_EITHER_WAY = pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "trial") for name in MODELS), *((name, "graph") for name in _BY_GRAPH)],
    indirect=["way"],
)


@_EITHER_WAY
@pytest.mark.usefixtures("way")
def test_everything_else_stays_and_unfuse_restores(name: str) -> None:
    """Objects, keys, hooks, flags and the random state; a second fuse() finds nothing to do."""
    model = _made(name).eval()
    next(iter(model.parameters()), torch.nn.Parameter()).requires_grad_(False)
    called: list[nn.Module] = []
    model.register_forward_hook(lambda module, *_: called.append(module))
    classes = {module: type(module) for module in model.modules()}
    attributes = {module: dict(vars(module)) for module in model.modules()}
    tensors = dict(model.state_dict(keep_vars=True))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    gpus = torch.cuda._lazy_seed_tracker.get_calls()  # seeds of GPUs that are not in use yet
    torchweld.fuse(model)
    once = {module: type(module) for module in model.modules()}
    assert torchweld.fuse(model) is model
    assert {module: type(module) for module in model.modules()} == once != classes
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.cuda._lazy_seed_tracker.get_calls() == gpus
    assert not called
    for module, kept in attributes.items():
        assert vars(module).keys() == kept.keys()
        assert all(vars(module)[key] is value for key, value in kept.items())
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(tensors)
    assert all(after[key] is value for key, value in tensors.items())
    model(torch.randn(2, 3, WIDTH))
    assert called == [model]
    assert torchweld.unfuse(model) is model
    assert {module: type(module) for module in model.modules()} == classes


@_EITHER_WAY
@pytest.mark.usefixtures("way")
def test_copies_and_pickles(name: str) -> None:
    model = torchweld.fuse(_made(name)) if is_by_graph() else _fused(name)
    x = torch.randn(4, 8, WIDTH, requires_grad=True)
    expected = run(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert _welds(other) == _welds(model)
        assert all(map(torch.equal, run(other, x), expected))
        assert not _welds(torchweld.unfuse(other))


def test_the_filter() -> None:
    """It gets a module and its name, as in torchao; False excludes it, and explain says so."""
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH))
    asked: list[tuple[nn.Module, str]] = []

    def second(module: nn.Module, name: str) -> bool:
        asked.append((module, name))
        return name == "1"

    rows = {row.where: row for row in torchweld.explain_fusion(model, second)}
    assert rows["0"].reason
    assert not rows["1"].reason
    torchweld.fuse(model, second)
    assert _welds(model) == ["1"]
    assert (model[0], "0") in asked


def test_a_configuration_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for many modules. fuse() tries none of torch's own, explain_fusion() tries all."""
    tried: list[Any] = []
    real = plan._try_proposal
    monkeypatch.setattr(plan, "_try_proposal", lambda *given: tried.append(given) or real(*given))
    layers = [nn.Sequential(nn.LayerNorm(WIDTH), FeedForward(nn.GELU())) for _ in range(5)]
    model = torchweld.fuse(nn.Sequential(*layers, nn.LayerNorm(WIDTH, eps=1e-3)))
    assert len(_welds(model)) == 16
    assert len(tried) == 1
    tried.clear()
    assert len(torchweld.explain_fusion(torchweld.unfuse(model))) == 11
    assert len(tried) == 3
    tried.clear()
    torchweld.fuse(model, verify=False)
    assert len(_welds(model)) == 16
    assert not tried


def test_layers_of_a_decoder_reuse_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen equal layers take as many trial runs as two."""
    called: list[Any] = []
    real = probe.call
    monkeypatch.setattr(probe, "call", lambda *given: called.append(given) or real(*given))

    def runs(layers: int, function: Callable[[nn.Module], Any]) -> int:
        model: Any = nn.Sequential(
            *(nn.Sequential(PlainRMSNorm(), Gated(nn.SiLU())) for _ in range(layers))
        )
        for at, layer in enumerate(model):
            layer.layer_idx = layer[1].layer_idx = at
        called.clear()
        function(model)
        return len(called)

    for function in (torchweld.fuse, torchweld.explain_fusion):
        assert runs(16, function) == runs(2, function) > 0


@pytest.mark.parametrize("large", [0, 2**22])
def test_what_computes_something_else_is_left_alone(
    large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted recogniser proposes a wrong weld: results, then only gradients are wrong.

    With `large` at zero only the first run in a dtype has gradients of the parameters.
    """
    monkeypatch.setattr(probe, "_LARGE", large)

    class Doubled(Weld):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * self.welded_from.forward(self, x)

    class Detached(Weld):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.welded_from.forward(self, x.detach())

    class Frozen(Weld):
        weight: nn.Parameter
        bias: nn.Parameter

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight.detach(), self.bias)

    for wrong in (Doubled, Detached, Frozen):

        def find(module: nn.Module, view: Any, wrong: type[Weld] = wrong) -> Iterator[Proposal]:
            if isinstance(module, nn.Linear):
                inputs = (values((4, WIDTH), torch.device("cpu")),)
                changes = (Change(module, wrong, "wrong"),)
                yield Proposal(module, "Linear", changes, module, inputs=inputs)

        monkeypatch.setattr(plan, "PATTERNS", [find])
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
        (row,) = torchweld.explain_fusion(model)
        assert "computes something else" in row.reason
        assert not _welds(torchweld.fuse(model))
        assert _welds(torchweld.fuse(model, verify=False)) == ["0"]


@pytest.mark.parametrize("at", range(3))
def test_all_changes_are_made_or_none(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure planted in a recogniser, and one in each change."""
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH))
    classes = [type(module) for module in model]
    real, done = Change.apply, []

    def failing(self: Change) -> None:
        if self.module in list(model):
            done.append(self)
            if len(done) == at + 1:
                raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(Change, "apply", failing)
    with pytest.raises(KeyboardInterrupt):
        torchweld.fuse(model)
    assert len(done) == at + 1
    assert [type(module) for module in model] == classes

    def broken(module: nn.Module, view: Any) -> Iterator[Any]:
        if module is model[at]:
            raise ZeroDivisionError
        yield from ()

    monkeypatch.setattr(plan, "PATTERNS", [broken, *PATTERNS])
    with pytest.raises(ZeroDivisionError):
        torchweld.fuse(model)
    assert [type(module) for module in model] == classes


def test_explain_is_data_and_a_table() -> None:
    model = nn.Sequential(*[FeedForward(nn.GELU()) for _ in range(3)], nn.LayerNorm(WIDTH))
    report = torchweld.explain_fusion(model)
    assert [row.where for row in report] == ["0.fc1", "1.fc1", "2.fc1", "3"]
    assert all(row.gain is not None and row.gain > 0 and not row.welded for row in report)
    assert "*.fc1 (3x)" in str(report)
    assert not _welds(model)
    torchweld.fuse(model)
    after = torchweld.explain_fusion(model)
    assert [(row.where, row.becomes) for row in after] == [(r.where, r.becomes) for r in report]
    assert all(row.welded for row in after)
    assert "no fused kernel" in str(torchweld.explain_fusion(nn.Linear(2, 2)))


@pytest.mark.usefixtures("by_graph")
def test_rows_by_graph() -> None:
    """Before a call by an example; after one without, and for a fused model as before `fuse`."""
    model = nn.Sequential(*[FeedForward(nn.GELU()) for _ in range(3)], nn.LayerNorm(WIDTH))
    x = torch.randn(4, WIDTH)
    report = torchweld.explain_fusion(model, x)
    welds = {row.where: row.becomes for row in report}
    assert welds == {
        **{f"{n}.act": "linear_act" for n in range(3)},
        **{"0": "bias_dropout_add", "1": "bias_dropout_add", "3": "dropout_add_layer_norm"},
    }
    assert "*.act (3x)" in str(report)
    with pytest.raises(torchweld.ArgumentError, match="arguments of a call"):
        torchweld.explain_fusion(torchweld.fuse(model))
    fused = torchweld.explain_fusion(model, x)
    model(x)
    after = torchweld.explain_fusion(model)
    for each in (fused, after):
        assert {row.where: row.becomes for row in each} == welds
        assert all(row.welded for row in each)
    model.eval()(x)
    assert {row.becomes for row in torchweld.explain_fusion(model)} == {*welds.values()}
    assert not torchweld.explain_fusion(nn.Linear(2, 2), torch.ones(2))
    with pytest.raises(torchweld.ArgumentError, match="arguments of a call"):
        torchweld.explain_fusion(nn.Linear(2, 2), lambda module, name: True)  # a filter


@pytest.mark.parametrize("at", range(3))
@pytest.mark.usefixtures("by_graph")
def test_all_regions_are_made_or_none(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure between two changes of classes left a model half fused."""
    model = nn.Sequential(FeedForward(nn.GELU()), FeedForward(nn.GELU()))
    classes = [type(module) for module in model.modules()]
    real, done = regions._make_region, []

    def failing(*given: Any) -> bool:
        done.append(given)
        if len(done) == at + 1:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(regions, "_make_region", failing)
    with pytest.raises(KeyboardInterrupt):
        torchweld.fuse(model)
    assert [type(module) for module in model.modules()] == classes


def test_bad_arguments() -> None:
    with pytest.raises(torchweld.ArgumentError, match="model is a str"):
        torchweld.fuse("model")  # type: ignore[type-var]
    with pytest.raises(torchweld.ArgumentError, match="filter_fn"):
        torchweld.fuse(nn.Linear(2, 2), filter_fn=3)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's, of the parts' inputs
@pytest.mark.parametrize(
    ("first", "how"),
    [("compile", "function"), ("fuse", "function"), ("compile", "method of the parts")],
)
@pytest.mark.usefixtures("way")
def test_compiled_before_or_after(first: str, how: str) -> None:
    """The graphs have the kernels, and no longer after unfuse()."""
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def compiled(model: nn.Module) -> nn.Module:
        if how == "function":
            made: Any = torch.compile(model, backend=backend, fullgraph=True)
            return made
        for module in model.children():
            module.compile(backend=backend, fullgraph=True)
        return model

    parts = ["feed_forward", "norm_by_name", "gated_silu"]
    parts += ["encoder_pre_norm"] if how == "function" else []  # torch skips it as a part
    model: nn.Module = nn.Sequential(*map(_made, parts)).eval()
    x = torch.randn(4, 16, WIDTH)
    expected = model(x)
    if first == "compile":
        model = compiled(model)
        torch.testing.assert_close(model(x), expected)
        assert targets
        targets.clear()
        torchweld.fuse(model)
    else:
        model = compiled(torchweld.fuse(model))
    torch.testing.assert_close(model(x), expected, **numerics.CHAINED_SMALL)
    assert targets
    assert not any("gelu" in target or "silu" in target for target in targets)
    targets.clear()
    torchweld.unfuse(model)
    torch.testing.assert_close(model(x), expected, **numerics.CHAINED_SMALL)
    assert any("gelu" in target for target in targets)
    assert any("silu" in target for target in targets)
