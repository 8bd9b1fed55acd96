"""Triton's launches in compiled graphs: what Inductor starts, and what stays one node."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

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
        if not OPS[name].visible:
            assert told["kernels"] == []
            continue
        code = told["code"]
        assert all(f"{kernel}_" in code for kernel in told["kernels"])
        assert "torch.ops.torchweld" not in code
        assert not told["copies"]


# --- Numbers --------------------------------------------------------------------------------------


LIBRARY = torch.library.Library("torchweld_visible", "DEF")
LIBRARY.define("launch(int at, Tensor(a!)[] tensors, SymInt[] sizes) -> ()")
_launches: list[tuple[Any, dict[str, Any]]] = []


def _launch(at: int, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
    from torchweld.triton_kernels.launch import start

    launched, options = _launches[at]
    rest = {torch.Tensor: iter(tensors), torch.SymInt: iter(sizes)}

    def fill(value: Any) -> Any:
        return next((next(rest[kind]) for kind in rest if isinstance(value, kind)), value)

    *given, grid = map(fill, (*launched.args, launched.grid))
    start(launched._replace(args=given, grid=grid), options)


LIBRARY.impl("launch", _launch, "CPU")
LIBRARY.impl("launch", lambda *_: None, "Meta")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches of the interpreter are nodes of a stand-in, which may write to all its tensors."""

    def add_node(launched: Any, options: dict[str, Any]) -> None:
        _launches.append((launched, options))
        given = (*launched.args, launched.grid)
        kinds = (torch.Tensor, torch.SymInt)
        tensors, sizes = ([x for x in given if isinstance(x, kind)] for kind in kinds)
        torch.ops.torchweld_visible.launch(len(_launches) - 1, tensors, sizes)

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


def test_lengths_are_symbolic(on_cpu: None) -> None:
    """Graphs serve other numbers of rows, since launches and allocations follow them.

    Only the number of chunks divides them: one, some, and as many as fill the GPU.
    """
    counted = CompileCounterWithBackend("aot_eager")
    compiled: Any = torch.compile(_layer_norm, dynamic=True, fullgraph=True, backend=counted)
    weight, counts = _make(24), []
    for rows in (5, 9, 16):
        x = _make(3, rows, 24)
        torch.testing.assert_close(compiled(x, x, weight, 0.0), _layer_norm(x, x, weight, 0.0))
        counts.append(counted.frame_count)
    assert len({*counts}) == 1


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


@pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning")  # torch's own
def test_the_cpu_and_exports_keep_the_op(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, visible.__name__)
    x, weight = torch.randn(4, 16), torch.randn(16)
    with torch.no_grad():
        assert "torchweld.rms_norm.triton" in _list_ops(_norm, x, weight)
        assert "not all of its tensors are on a GPU" in caplog.text
        monkeypatch.setattr(visible, "_is_on_gpu", lambda x: True)

        class Norm(torch.nn.Module):
            def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                return _norm(x, weight)

        exported = torch.export.export(Norm(), (x, weight)).run_decompositions()
    assert "torchweld.rms_norm.triton" in str(exported)
    assert "the graph is exported" in caplog.text


def test_what_depends_on_a_setting_stays(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torchweld.triton_kernels import launch, norm

    caplog.set_level(logging.INFO, visible.__name__)
    run = norm.run

    def forbid(*given: Any) -> None:
        launch.forbid_replay()
        run(*given)

    monkeypatch.setattr(norm, "run", forbid)
    with torch.no_grad():
        assert "torchweld.rms_norm.triton" in _list_ops(_norm, torch.randn(4, 16), torch.randn(16))
    assert "a setting of torch's" in caplog.text
