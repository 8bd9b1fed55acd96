"""fuse() changes classes in place, and no result; unfuse() restores them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import torchweld
from fusable import (  # noqa: F401
    MODELS,
    WIDTH,
    FeedForward,
    rms,
    run,
    small_inputs,
)
from torchweld import numerics
from torchweld.fusion.graph import regions
from torchweld.fusion.weld import Weld

UNIT = 2.0**-23


def _made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def _welds(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Weld)]


@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_are_the_same(name: str) -> None:
    """No further from float64 than twice the original, plus some units of rounding."""
    model, x = _made(name), torch.randn(32, 16, WIDTH, requires_grad=True)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0  # a weld drops others than torch
    fused = torchweld.fuse(copy.deepcopy(model))
    expected = run(model, x)
    truth = run(model.double(), x.detach().double().requires_grad_())
    # Some gradients are zero except for rounding: they are held to the others' rounding.
    scale = max(rms(value) for value in truth[1:])
    for a, b, exact in zip(expected, run(fused, x), truth, strict=True):
        scale = rms(exact) if exact is truth[0] else scale
        assert rms(b - exact) <= 2 * rms(a - exact) + 4 * UNIT * scale


_SOME = ("rms_norm", "parallel", "rotary", "packed", "output", "batch_norm", "multihead")


@pytest.mark.parametrize("name", _SOME)
@pytest.mark.usefixtures("own_graphs")
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


@pytest.mark.parametrize("name", _SOME)
@pytest.mark.usefixtures("own_graphs")
def test_copies_and_pickles(name: str) -> None:
    model = torchweld.fuse(_made(name))
    x = torch.randn(4, 8, WIDTH, requires_grad=True)
    expected = run(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert _welds(other) == _welds(model)
        assert all(map(torch.equal, run(other, x), expected))
        assert not _welds(torchweld.unfuse(other))


@pytest.mark.usefixtures("own_graphs")
def test_explain_is_data_and_a_table() -> None:
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
    assert "no fused kernel" in str(torchweld.explain_fusion(nn.Linear(2, 2), torch.ones(2)))
    with pytest.raises(torchweld.ArgumentError, match="arguments of a call"):
        torchweld.explain_fusion(nn.Linear(2, 2), lambda module, name: True)  # a filter


@pytest.mark.parametrize("at", range(3))
@pytest.mark.usefixtures("own_graphs")
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
@pytest.mark.usefixtures("own_graphs")
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
