"""What docs/support.md says about torch's tools: a test for each row."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchweld
from torchweld import functional, nn, numerics

ROOT = Path(__file__).parents[2]
X, STREAM = torch.randn(8192, 64), torch.randn(8192, 64)

MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(64),
    "RMSNorm": lambda: nn.RMSNorm(64),
    "GELU": lambda: nn.GELU(),
    "LinearGELU": lambda: nn.LinearGELU(64, 64),
    "MLP": lambda: nn.MLP(64, 64),
    "GatedMLP": lambda: nn.GatedMLP(64, 64),
    "LinearBatchNormAct": lambda: nn.LinearBatchNormAct(64, 64),
    "SoftmaxDropout": lambda: nn.SoftmaxDropout(0.1),
    "BiasDropoutAdd": lambda: nn.BiasDropoutAdd(0.1),
    "DropoutAddLayerNorm": lambda: nn.DropoutAddLayerNorm(64, p=0.1),
    "DropoutAddRMSNorm": lambda: nn.DropoutAddRMSNorm(64, p=0.1),
}
every_module = pytest.mark.parametrize("name", MODULES)
# jit's own deprecation, and its tracer's warnings about sizes taken as constants.
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")


def _made(name: str, *, training: bool = False) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """A module and its inputs, large enough for a kernel."""
    torch.manual_seed(0)
    given: dict[str, tuple[torch.Tensor, ...]] = {
        "BiasDropoutAdd": (X, X[0], STREAM),
        "DropoutAddLayerNorm": (X, STREAM),
        "DropoutAddRMSNorm": (X, STREAM),
    }
    return MODULES[name]().train(training), given.get(name, (X,))


def _ours(graph: torch.fx.Graph) -> list[str]:
    """Our ops in a graph."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name for name in names if name.startswith("torchweld")]


def test_the_table_names_tests_that_there_are() -> None:
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", (ROOT / "docs/support.md").read_text())
    for file, test in named:
        (path,) = (ROOT / "tests").rglob(file)
        assert f"def {test}" in path.read_text(), test
    mine = {test for file, test in named if file == Path(__file__).name}
    tested = {name for name in globals() if name.startswith("test_")}
    assert tested - mine == {test_the_table_names_tests_that_there_are.__name__}


@every_module
def test_fx(name: str) -> None:
    """Nodes are the public functions; the graph can be copied and pickled, as the module can.

    torch.fx keeps annotations in its graph, and pickles no annotation that is a string.
    """
    module, given = _made(name)
    traced = torch.fx.symbolic_trace(module)
    for some in (traced, module):
        for copied in (copy.deepcopy(some), pickle.loads(pickle.dumps(some))):
            assert torch.equal(copied(*given), module(*given))
    functions = {getattr(functional, n) for n in functional.__all__}
    assert any(node.target in functions for node in traced.graph.nodes)
    assert torch.equal(traced(*given), module(*given))
    with torchweld.use_backend("eager"):
        torch.testing.assert_close(traced(*given), module(*given))
    proxy: Any = torch.fx.Proxy(torch.fx.Graph().placeholder("x"))
    with pytest.raises(torchweld.ArgumentError, match=r"torchweld\.functional\.NAME"):
        functional.layer_norm(proxy, [64])


@quiet
@every_module
@pytest.mark.parametrize("gradients", [False, True])
def test_jit_trace(name: str, gradients: bool) -> None:
    """jit checks it; it is saved and loaded, and has none of our ops."""
    module, given = _made(name)
    with torch.set_grad_enabled(gradients):
        leaves = tuple(t.clone().requires_grad_(gradients) for t in given)
        traced = torch.jit.trace(module, leaves)
        assert "torchweld::" not in str(traced.inlined_graph)
        file = io.BytesIO()
        torch.jit.save(traced, file)
        file.seek(0)
        found, expected = torch.jit.load(file)(*leaves), module(*leaves)
        torch.testing.assert_close(found, expected, **numerics.CHAINED)
    if gradients:
        wanted = [torch.autograd.grad(y.square().sum(), leaves) for y in (found, expected)]
        torch.testing.assert_close(*wanted, **numerics.CHAINED)


@quiet
def test_jit_script_refuses() -> None:
    with pytest.raises((RuntimeError, torch.jit.frontend.NotSupportedError)):
        torch.jit.script(nn.LayerNorm(64))


@every_module
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_export(name: str, training: bool, gradients: bool) -> None:
    """With the kernels and their derivatives in it; both use the same dropout."""
    module, given = _made(name, training=training)
    with torchweld.use_backend("cpu"), torch.set_grad_enabled(gradients):
        program = torch.export.export(module, given)
    by_eager = name == "LinearBatchNormAct" and training and gradients
    assert bool(_ours(program.graph)) != by_eager
    found, leaves = [], [t.clone().requires_grad_(gradients) for t in given]
    for some in (program.module(), copy.deepcopy(module)):
        torch.manual_seed(1)
        with torchweld.use_backend("cpu"):
            y = some(*leaves)
        wanted = [*leaves, *some.parameters()] if gradients else []
        grads = torch.autograd.grad(y.square().mean(), wanted) if gradients else ()
        found.append((y, *grads))
    assert len(found[0]) == len(found[1])
    for a, b in zip(*found, strict=True):
        if by_eager or not gradients:
            torch.testing.assert_close(a, b, **numerics.CHAINED)
        else:
            assert torch.equal(a, b)


@every_module
def test_onnx(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph that torch.onnx.export captures has none of our ops.

    The translation needs onnxscript, which the suite does not use.
    """
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    module, given = _made(name)
    program = torch.export.export(module, given)
    assert not _ours(program.graph)
    torch.testing.assert_close(program.module()(*given), module(*given), **numerics.CHAINED)


class _Block(torch.nn.Module):
    """With the ops whose lists may be empty."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.SoftmaxDropout(0.1)
        self.add_norm = nn.DropoutAddLayerNorm(64, p=0.1)
        self.add = nn.BiasDropoutAdd(0.1)

    def forward(self, x: torch.Tensor, stream: torch.Tensor) -> Any:
        return self.add(self.add_norm(self.softmax(x), stream), None, stream)


# torch's own, of pytrees.
@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")
def test_aotinductor(tmp_path: Path) -> None:
    block = _Block().eval()
    with torch.no_grad():
        program = torch.export.export(block, (X, STREAM))
        assert len(_ours(program.graph)) == 3
        file = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "block.pt2")
        )
        torch.testing.assert_close(
            torch._inductor.aoti_load_package(file)(X, STREAM), block(X, STREAM)
        )


def test_vmap_randomness() -> None:
    """It behaves as with torch.nn.functional.dropout."""
    x = torch.ones(3, 5, 64)
    functions: list[Callable[..., Any]] = [
        lambda x: torch.nn.functional.dropout(x, 0.5),
        lambda x: functional.softmax_dropout(x, p=0.5),
        lambda x: functional.bias_dropout_add(x, None, x, p=0.5),
        lambda x: functional.dropout_add_layer_norm(x, x, None, p=0.5),
        lambda x: functional.dropout_add_rms_norm(x, x, None, p=0.5),
    ]
    for function in functions:
        with pytest.raises(RuntimeError, match="randomness error mode"):
            torch.func.vmap(function)(x)
        same = torch.func.vmap(function, randomness="same")(x)
        assert torch.equal(same[0], same[1])
        different = torch.func.vmap(function, randomness="different")(x)
        assert not torch.equal(different[0], different[1])
    seeds = torch.tensor([1, 2, 3])
    mapped = torch.func.vmap(lambda x, seed: functional.softmax_dropout(x, p=0.5, seed=seed))
    for found, one, seed in zip(mapped(x, seeds), x, seeds, strict=True):
        assert torch.equal(found, functional.softmax_dropout(one, p=0.5, seed=seed))
