"""linear_act as one GEMM in Triton: its numbers, its graph, and when it is chosen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import seams
import torchweld
from conftest import GPU, PLACES, running_at
from oracle import assert_bounded, exact, incoming
from torchweld import functional, numerics
from torchweld.bench.cases import CASES
from torchweld.commands import tune
from torchweld.dispatch import proof
from torchweld.dispatch.proof import Checker
from torchweld.dispatch.store import Store
from torchweld.ops import activation as activations
from torchweld.ops.gemm import epilogue, fused_choice
from torchweld.ops.gemm.common import arguments
from torchweld.registry import OPS, Composite, materialize
from trying import Trials, time_by, try_on_cpu

LINEAR, MLP = OPS["linear_act"], OPS["mlp"]
BLOCKS = [op for op in (LINEAR, MLP) if isinstance(op, Composite)]
WHERE = [place for place in ("interpreter", "gpu-triton") if PLACES[place][2] is None]
# The index of the tile that supports any shape in a kernel's table.
LAST = -1


# Named like the targets of tests/conftest.py, which evidence counts.
@pytest.fixture(params=[pytest.param(p, id=f"linear_act-{p}") for p in WHERE])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The device of Triton's tensors here, with Triton selected by name."""
    with running_at(request.param, monkeypatch):
        yield PLACES[request.param][1]


@pytest.fixture(params=[place for place in WHERE if place == "interpreter"])
def interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's interpreter runs, on CPU tensors."""
    with running_at(request.param, monkeypatch):
        yield


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Every call runs the kernel, even if it is slower, with the last tile or a given one."""

    def by(tile: int) -> None:
        monkeypatch.setattr(epilogue, "choose_tile_for", lambda *_: tile)

    by(LAST)
    return by


# --- Numbers --------------------------------------------------------------------------------------

# No elements in each direction, one element, sizes that no tile divides, and enough elements for
# the pools of errors.
_SHAPES: tuple[tuple[tuple[int, ...], int, int], ...] = (
    *(((), 1, 1), ((2, 3), 31, 13), ((2, 1, 3, 1), 17, 19), ((160,), 67, 151)),
    *(((2,), 5, 10001), ((0,), 8, 5), ((3,), 0, 4), ((3,), 4, 0)),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_errors_are_bounded(device: str, fused: Callable[[int], None], dtype: torch.dtype) -> None:
    """Contract 1 for the kernel, even if it is slower."""
    fused(-2)
    if dtype == torch.bfloat16 and not GPU:
        pytest.skip("the interpreter truncates to bfloat16")
    samples = [(*arguments(*shape), "gelu", "none") for shape in _SHAPES]
    x, weight, bias = arguments((33,), 35, 70)
    samples += [(x, weight, b, *kind) for b in (bias, None) for kind in activations.KINDS[1:]]
    drawn = [materialize(s, dtype, device, seed=seed) for seed, s in enumerate(samples)]
    assert_bounded(LINEAR, drawn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_tile(device: str, fused: Callable[[int], None], dtype: torch.dtype) -> None:
    """Slightly more than one tile in both directions, for each tile; later tiles get more rows than
    a band.

    Columns are multiples of 16 bytes, as descriptors need them.
    """
    from torchweld.triton_kernels import linear_act

    for tile, (rows, columns, *_) in enumerate(linear_act.tiles(dtype)):
        fused(tile)
        rows = rows if tile == 0 else 8 * rows
        sizes = arguments((rows + 9,), 72, columns + 8)
        inputs = materialize((*sizes, "gelu", "none"), dtype, device)
        oracle = exact(LINEAR, inputs)["y"]
        terms = CASES[LINEAR.name].terms(*inputs, grad_y=incoming(oracle))["y"]
        with torch.no_grad():
            found = functional.linear_act(*inputs[:3])
        assert torch.all((found - oracle).abs() <= 8 * torch.finfo(dtype).eps * terms)


@pytest.mark.parametrize("matrix", [0, 1])
def test_strides(device: str, matrix: int) -> None:
    """Strided columns, rows at an offset, and one row expanded to many."""
    x, weight, bias = materialize(arguments((70,), 33, 41), torch.float32, device)
    kernel = torch.ops.torchweld.linear_act.triton
    expected = kernel(x, weight, bias, "gelu", "none", LAST, True)
    given = [x, weight]
    plain = given[matrix]
    wide = torch.full((plain.shape[0] + 1, 2 * plain.shape[1]), torch.nan, device=device)
    wide[1:, ::2] = plain
    for like in (plain.t().contiguous().t(), wide[1:, ::2]):
        given[matrix] = like
        found = kernel(*given, bias, "gelu", "none", LAST, True)
        torch.testing.assert_close(found, expected)
    one = x[:1].expand(70, 33)
    found = kernel(one, weight, bias, "gelu", "none", LAST, False)[0]
    rows = found[:1].expand(70, 41)
    if device == "cuda":
        assert torch.equal(found, rows)
    else:  # the interpreter uses numpy's products, whose rows may differ in the last bits
        torch.testing.assert_close(found, rows)


def test_arguments_that_do_not_fit_are_refused(device: str) -> None:
    x, weight, bias = materialize(arguments((4,), 8, 6), torch.float32, device)
    kernel = torch.ops.torchweld.linear_act.triton
    for wrong in (
        (x[:, 1:], weight, bias),
        (x, weight.half(), bias),
        (x, weight, bias[1:]),
        (x, weight, bias.half()),
    ):
        with pytest.raises(ValueError, match="fit"):
            kernel(*wrong, "gelu", "none", LAST, True)


def test_the_op(interpreted: None) -> None:
    """Its fake is right, with and without z."""
    x, weight, bias = materialize(arguments((3, 4), 8, 6), torch.float32)
    for save_z in (True, False):
        given = (x, weight, bias, "gelu", "none", LAST, save_z)
        torch.library.opcheck(torch.ops.torchweld.linear_act.triton, given)


# --- The graph ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seam", BLOCKS, ids=str)
@pytest.mark.parametrize(
    "holds",
    [
        seams.assert_compiled_equals_eager,
        seams.assert_compiled_once,
        seams.assert_autocast_as_eager,
        seams.assert_transposed_is_equal,
        seams.assert_recomputed_is_equal,
    ],
    ids=["compile", "dynamic", "autocast", "transposed", "recomputing"],
)
def test_assertions_about_composites(
    interpreted: None, fused: Any, seam: Composite, holds: Callable[[Composite], None]
) -> None:
    holds(seam)


@seams.splits_backwards
@pytest.mark.parametrize("seam", BLOCKS, ids=str)
def test_a_split_backward_runs_nothing_twice(
    interpreted: None, fused: Any, seam: Composite
) -> None:
    seams.assert_split(seam, seams.inputs_of(seam, requires_grad=True))


def test_what_is_saved(interpreted: None, fused: Any) -> None:
    seams.assert_saves_no_more()


def test_a_kept_graph_gives_every_gradient_again(interpreted: None, fused: Any) -> None:
    seams.assert_graphs_can_be_kept()


@pytest.mark.parametrize("kind", activations.KINDS, ids="-".join)
def test_second_derivatives(interpreted: None, fused: Any, kind: tuple[str, str]) -> None:
    """They equal the reference's."""
    inputs = materialize((*arguments((3,), 5, 7), *kind), torch.float32, requires_grad=True)
    leaves = inputs[:3]

    def second(function: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        first = torch.autograd.grad(function(*inputs).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    def ours(x: Any, weight: Any, bias: Any, activation: str, approximate: str) -> torch.Tensor:
        kind = {"activation": activation, "approximate": approximate}
        return functional.linear_act(x, weight, bias, **kind)

    torch.testing.assert_close(second(ours), second(LINEAR.reference), **numerics.CHAINED)


# --- Choice ---------------------------------------------------------------------------------------


@pytest.fixture
def trials(interpreted: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trials:
    """A fake clock, a separate cache, and no lower limit on shapes."""
    trials = try_on_cpu(monkeypatch, tmp_path)
    time_by(monkeypatch, trials.run_and_time)
    monkeypatch.setattr(epilogue, "_SMALLEST", 0)
    monkeypatch.setattr(epilogue, "_kernel", torch.ops.torchweld.linear_act.triton)  # no plans
    return trials


@pytest.fixture
def launched(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[..., Any]], bool]:
    """Whether a function launches the kernel."""
    module, launches = fused_choice.kernels(), []
    kernel = module.linear_act
    monkeypatch.setattr(module, "linear_act", lambda *a: launches.append(a) or kernel(*a))

    def launched(function: Callable[..., Any], *given: Any) -> bool:
        launches.clear()
        function(*given)
        return bool(launches)

    return launched


def test_the_faster_is_chosen_once(trials: Trials, launched: Callable[..., bool]) -> None:
    x, weight, bias = materialize(arguments((24,), 8, 7), torch.float16)

    def gelu(x: torch.Tensor) -> torch.Tensor:
        return functional.linear_act(x, weight, bias)

    def relu(x: torch.Tensor) -> torch.Tensor:
        return functional.linear_act(x, weight, bias, activation="relu")

    trials.ms = {"unfused": 2.0, "0": 1.0}
    assert "not timed yet" in str(torchweld.explain("linear_act", x, weight, bias))
    gelu(x)
    assert launched(gelu, x)
    assert launched(gelu, x[:17])  # 17 and 24 have the same number of bits
    assert len(trials.timed) == 1
    explained = str(torchweld.explain("linear_act", x, weight, bias))
    assert "triton: one kernel for all, measured at 2.00x the speed of torch's GEMM" in explained
    block = torchweld.explain("mlp", x, weight, bias, weight.t(), None)
    assert "measured at 2.00x" in block.detail
    (entry,) = proof.checker_for(x.device).entries()
    assert entry.kind["op"] == "linear_act in one kernel"
    assert (entry.answer.backend, entry.answer.ms["unfused"], entry.answer.ms["0"]) == ("0", 2, 1)

    trials.ms = {"unfused": 1.0, "0": 0.99}
    relu(x)
    assert not launched(relu, x)
    assert len(trials.timed) == 2
    explained = torchweld.explain("linear_act", x, weight, bias, activation="relu").detail
    assert "one kernel for all was measured at 1.01x its speed" in explained


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_code_takes_the_kept_choice(
    trials: Trials, launched: Callable[..., bool], dynamic: bool | None
) -> None:
    """The choice is part of the graph, for any number of rows."""
    x, weight, bias = materialize(arguments((24,), 8, 7), torch.float32)

    def compiled() -> bool:
        torch._dynamo.reset()
        function = torch.compile(
            functional.linear_act, fullgraph=True, backend="aot_eager", dynamic=dynamic
        )
        found = launched(function, x, weight, bias)
        for rows in (20, 19):
            with torch._dynamo.config.patch(error_on_recompile=bool(dynamic) or rows == 19):
                assert launched(function, x[:rows], weight, bias) == found
        return found

    trials.ms = dict.fromkeys("0123", 1.0)  # the tiles of float32 are others
    assert not compiled()
    functional.linear_act(x, weight, bias)
    assert compiled()
    trials.ms = {"unfused": 1.0}
    functional.linear_act(x[:3], weight, bias)
    assert not compiled()
    assert len(trials.timed) == 2


def test_unsupported_calls_are_unfused(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    trials.ms = {"unfused": 2.0, "0": 1.0}
    x, weight, bias = materialize(arguments((24,), 8, 7), torch.float32)
    masked = x.as_subclass(type("Tensor", (torch.Tensor,), {}))
    monkeypatch.setattr(proof, "can_check", lambda device: False)
    for given in ((masked, weight, bias), (x, weight, bias)):
        functional.linear_act(*given)
    assert not trials.timed
    monkeypatch.undo()
    assert "too small" in epilogue.explain("triton", x, weight, bias, "gelu", "none")
    with pytest.raises(torchweld.ArgumentError, match="bias"):
        functional.linear_act(x, weight, bias[1:])


def _wrong(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))
    y[0, 0] += 0.1
    return y, y.new_empty(0)


def _raising(*given: Any) -> Any:
    raise RuntimeError("PTXAS error: Internal Triton PTX codegen error\nptxas fatal : ...")


def _too_large(*given: Any) -> Any:
    raise pytest.importorskip("triton").OutOfResources(2, 1, "shared memory")


@pytest.mark.parametrize(
    ("kernel", "told"),
    [(_wrong, "wrong result: y is off by"), (_raising, "PTXAS error"), (_too_large, None)],
)
def test_kernels_that_are_wrong_or_fail_are_refused(
    kernel: Any, told: str | None, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried once, with one warning, and the call returns the unfused form's result."""
    x, weight, bias = materialize(arguments((24,), 8, 7), torch.float32)
    expected = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))
    tried: list[Any] = []
    monkeypatch.setattr(epilogue, "_kernel", lambda *g: tried.append(g) or kernel(*g))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            torch.testing.assert_close(functional.linear_act(x, weight, bias), expected)
    assert (len(tried), len(trials.timed)) == (1, 0)
    assert len(caught) == (told is not None)
    assert told is None or told in str(caught[0].message)
    explained = torchweld.explain("linear_act", x, weight, bias).detail
    assert "one kernel for all was wrong, or failed, on this GPU" in explained


@pytest.mark.skipif(not GPU, reason="no GPU")
def test_timing_on_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The chosen form is right, and nothing is timed while a graph is captured."""
    engine = Checker(Store(tmp_path / "answers.json"), {"device": "this GPU"})
    monkeypatch.setattr(proof, "checker_for", lambda device: engine)
    monkeypatch.setattr(proof, "_served", {})
    given = materialize(arguments((2048,), 256, 1024), torch.float16, "cuda")
    graph = torch.cuda.CUDAGraph()
    tanh = {"approximate": "tanh"}
    with torchweld.use_backend("triton"):
        monkeypatch.setattr(proof, "mode", "kept")
        expected = functional.linear_act(*given, **tanh)  # compile before the capture
        monkeypatch.setattr(proof, "mode", "check")
        monkeypatch.setattr(proof, "choose_fastest", tune.choose_fastest)
        with torch.cuda.graph(graph):
            captured = functional.linear_act(*given, **tanh)
        assert "not timed yet" in torchweld.explain("linear_act", *given, **tanh).detail
        graph.replay()
        found = functional.linear_act(*given, **tanh)
        explained = torchweld.explain("linear_act", *given, **tanh).detail
    print(explained)
    assert "measured at" in explained
    torch.testing.assert_close(captured, expected)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
