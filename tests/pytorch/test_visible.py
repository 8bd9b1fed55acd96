"""Triton's launches in compiled graphs: what Inductor starts, and what stays one node."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fresh
import visible as helper
from conftest import running_at
from torchweld import functional
from torchweld.dispatch import visible
from torchweld.registry import OPS, Composite

pytest.importorskip("triton", reason="Triton is not installed")

TRITON = [n for n, op in OPS.items() if "triton" in op.sources and not isinstance(op, Composite)]


@functools.cache
def _compile() -> dict[str, Any]:
    told: dict[str, Any] = json.loads(
        fresh.run_file(helper.__file__, *TRITON, TRITON_INTERPRET="0")
    )
    return told


@pytest.mark.parametrize("name", TRITON)
def test_inductor_starts_the_same_kernels(name: str) -> None:
    """Each with the launch's arguments and machine code, and nothing goes through the dispatcher.

    Inductor passes floats in 64 bits: rows were then computed in them, and a kernel of batch norm
    did not compile. It collects functions of a kernel by their names, and would take one for
    another of the same name.
    """
    for called in (name, f"{name}_backward"):
        told = _compile()[called]
        assert told["differ"] == []
        reads_mask = called == "softmax_dropout" and not visible._VIEWS_BOOLS
        if not OPS[name].visible or reads_mask:
            assert told["kernels"] == []
            continue
        code = told["code"]
        assert all(f"{kernel}_" in code for kernel in told["kernels"])
        assert "torch.ops.torchweld" not in code
        assert not told["copies"]


def test_one_cuda_graph_holds_them() -> None:
    """Mode "reduce-overhead" divides code where a CUDA graph must end: at no op and no seed."""
    code = _compile()["block"]["code"]
    (first, _, rest), runner = code.partition("def partition_0("), code.partition("class Runner")[2]
    assert "partitions=[partition_0,]" in runner
    assert "_1.run(" in rest
    assert rest.count("torch.ops.torchweld.seed.default(") == 2
    assert ".run(" not in first + runner


# --- Numbers --------------------------------------------------------------------------------------


LIBRARY = torch.library.Library("torchweld_visible", "DEF")
LIBRARY.define("launch(int at, Tensor(a!)[] tensors) -> ()")
_launches: list[tuple[Any, dict[str, Any]]] = []


def _launch(at: int, tensors: Sequence[torch.Tensor]) -> None:
    from torchweld.triton_kernels.launch import start

    launched, options = _launches[at]
    rest = iter(tensors)
    given = [next(rest) if isinstance(x, torch.Tensor) else x for x in launched.args]
    start(launched._replace(args=given), options)


LIBRARY.impl("launch", _launch, "CPU")
LIBRARY.impl("launch", lambda *_: None, "Meta")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches of the interpreter are nodes of a stand-in, which may write to all its tensors."""

    def add_node(launched: Any, options: dict[str, Any]) -> None:
        _launches.append((launched, options))
        given = [x for x in launched.args if isinstance(x, torch.Tensor)]
        torch.ops.torchweld_visible.launch(len(_launches) - 1, given)

    monkeypatch.setattr(visible, "_is_on_gpu", lambda x: True)
    monkeypatch.setattr(visible, "_why_opaque", lambda *_: None)
    monkeypatch.setattr(visible, "_add_node", add_node)
    torch.compiler.reset()
    with running_at("interpreter", monkeypatch):
        yield
    torch.compiler.reset()


def _make(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


def _add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, p: float) -> Any:
    y, z = functional.dropout_add_rms_norm(
        x * 2, residual, weight, return_residual=True, p=p, seed=7
    )
    return torch.relu(y), z + 1


def _layer_norm(x: torch.Tensor, _: torch.Tensor, weight: torch.Tensor, p: float) -> Any:
    return functional.layer_norm(x + 1, (24,), weight, weight + 1) * 2


@pytest.mark.interpreted
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("function", [_add_norm, _layer_norm])
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_numbers(on_cpu: None, function: Callable[..., Any], p: float, compiler: str) -> None:
    """Results and gradients are those of the op as one node, through AOTAutograd's partition."""
    torch.manual_seed(0)
    leaves = _make(3, 5, 24), _make(3, 5, 24), _make(24)

    def run(function: Callable[..., Any]) -> list[torch.Tensor | None]:
        made = function(*leaves, p)
        made = made if isinstance(made, tuple) else (made,)
        grads = torch.autograd.grad(sum(y.square().sum() for y in made), leaves, allow_unused=True)
        return [*made, *grads]

    before = len(_launches)
    found = run(torch.compile(function, fullgraph=True, backend=compiler))
    assert len(_launches) > before
    for mine, plain in zip(found, run(function), strict=True):
        torch.testing.assert_close(mine, plain)


@pytest.mark.interpreted
@pytest.mark.parametrize("saves", [False, True])
def test_a_checkpoint_asks_about_the_op(
    on_cpu: None, saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy of selective checkpointing sees the op, and its launches are saved or repeated."""
    from torchweld.triton_kernels import launch

    started: list[str] = []
    start = launch.start

    def count(launched: Any, options: dict[str, Any]) -> None:
        started.append(launched.kernel.fn.__name__)
        start(launched, options)

    def decide(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
        is_saved = saves and op is torch.ops.torchweld.rms_norm.triton
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x * 2, (24,), weight).sin() * x

    def run(x: torch.Tensor, weight: torch.Tensor) -> Any:
        context = functools.partial(create_selective_checkpoint_contexts, decide)
        return checkpoint(block, x, weight, use_reentrant=False, context_fn=context)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    x, weight = _make(3, 5, 24), _make(24)
    compiled(x, weight)
    monkeypatch.setattr(launch, "start", count)
    found, expected = (
        torch.autograd.grad(function(x, weight).sum(), (x, weight))
        for function in (compiled, block)
    )
    torch.testing.assert_close(found, expected)
    assert started.count("_forward") == (2 if saves else 3)  # the block's one is the last


# --- What stays one node --------------------------------------------------------------------------


def _list_ops(function: Callable[..., Any], *args: Any) -> list[str]:
    """The functions of the graph that AOTAutograd makes."""
    from torch._functorch.aot_autograd import aot_function

    found: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    aot_function(function, keep)(*args)
    return found


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.ops.torchweld.rms_norm.triton(x, [16], weight, 1e-6)[0]
    return y


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What is logged of launches."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    visible._LOG.addHandler(handler)
    visible._LOG.setLevel(logging.INFO)
    yield lines
    visible._LOG.removeHandler(handler)
    visible._LOG.setLevel(logging.NOTSET)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")  # torch's own
def test_the_cpu_and_exports_keep_the_op(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> None:
    x, weight = torch.randn(4, 16), torch.randn(16)
    with torch.no_grad():
        assert "torchweld.rms_norm.triton" in _list_ops(_norm, x, weight)
        assert "not all of its tensors are on a GPU" in " ".join(log)
        monkeypatch.setattr(visible, "_is_on_gpu", lambda x: True)

        class Norm(torch.nn.Module):
            def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                return _norm(x, weight)

        exported = torch.export.export(Norm(), (x, weight)).run_decompositions()
    assert "torchweld.rms_norm.triton" in str(exported)
    assert "the graph is exported" in " ".join(log)


def test_symbolic_sizes_keep_the_op(on_cpu: None, log: list[str]) -> None:
    """One graph serves all lengths, as before: a launch's grid and tile would divide them."""
    compiled: Any = torch.compile(_layer_norm, dynamic=True, fullgraph=True, backend="aot_eager")
    weight, before = _make(24), len(_launches)
    for rows in (5, 9, 200):
        x = _make(3, rows, 24)
        with torch._dynamo.config.patch(error_on_recompile=rows > 5):
            found = compiled(x, x, weight, 0.0)
        torch.testing.assert_close(found, _layer_norm(x, x, weight, 0.0))
    assert len(_launches) == before
    assert "its sizes are symbolic" in " ".join(log)


def test_what_depends_on_a_setting_stays(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, log: list[str]
) -> None:
    from torchweld.triton_kernels import launch, norm

    run = norm.run

    def forbid(*given: Any) -> None:
        launch.forbid_replay()
        run(*given)

    monkeypatch.setattr(norm, "run", forbid)
    with torch.no_grad():
        assert "torchweld.rms_norm.triton" in _list_ops(_norm, torch.randn(4, 16), torch.randn(16))
    assert "a setting of torch's" in " ".join(log)
