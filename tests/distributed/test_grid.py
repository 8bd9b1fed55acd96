"""2D, 2.5D and 3D tensor parallelism equal one process, and send what the formulas say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import declared
import selection
import torchweld
from comparing import whole_of
from processes import on, processes
from torchweld.distributed import CountCollectives, parallelize
from torchweld.distributed.tensor.grids.grid import GridParallel, MeshGrid
from torchweld.errors import ArgumentError
from transformer import Settings, Transformer, compute_loss

S = Settings(vocabulary=64, length=16, width=32, heads=4, layers=2, dropout=0.2)
ROWS, MICROBATCHES, STEPS = 4, 2, 10 if selection.WHOLE else 2
GRIDS: dict[str, dict[str, Any]] = {
    "2d": {"mode": "2d", "size": 4},
    "2.5d": {"mode": "2.5d", "size": 8, "depth": 2},
    "3d": {"mode": "3d", "size": 8},
}


def _make(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    def loss_fn(y: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(y.flatten(0, 1), targets.flatten())

    config = {"optimizer": {"name": "adamw", "eps": 1e-4}, **config}
    return declared.start(S, config, ROWS, MICROBATCHES, dtype, loss_fn=loss_fn)


def _run(training: Any, steps: int) -> list[float]:
    return [declared.take_step(training, S, step, ROWS)[0] for step in range(steps)]


def _read(training: Any) -> dict[str, torch.Tensor]:
    return {n: whole_of(p.detach()) for n, p in training.model.named_parameters()}


def _alone(rank: int, path: str) -> None:
    """The parameters of one process in float32 and float64, and a checkpoint after two steps."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        training = _make({}, dtype)
        found[dtype] = _run(training, STEPS), _read(training)
    torch.save(found, path)
    training.save(f"{path}-saved", STEPS)


def _on_a_grid(rank: int, config: Any, path: str) -> None:
    training = _make({"tensor": config})
    losses = _run(training, STEPS)
    found = torch.load(path)
    (_, parameters), (exact, wanted) = found[torch.float32], found[torch.float64]
    mine = _read(training)
    assert mine.keys() == parameters.keys()
    off = torch.cat([(mine[n] - parameters[n]).flatten() for n in mine]).double()
    unit = torch.cat([(parameters[n] - wanted[n]).flatten() for n in mine])
    ratio = (off.square().mean() / unit.square().mean()).sqrt()
    assert ratio <= 2, f"parameters differ by {ratio:.2f} times their rounding"
    assert losses == pytest.approx(exact, rel=1e-5)


def _load(rank: int, config: Any, saved: str, path: str) -> None:
    """Load a checkpoint into another declaration, and save it again."""
    training = _make(config)
    assert training.load(saved) == STEPS
    training.save(f"{path}-saved", STEPS)
    states, named = training.optimizer.state, dict(training.model.named_parameters())
    found = [_read(training), {n: whole_of(states[p]["exp_avg"]) for n, p in named.items()}]
    if rank == 0:
        torch.save(found, path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("grid") / "alone.pt")
    with processes(1) as one:
        one.run("cpu", _alone, path)
    return path


# Layers of 2.5d on eight processes are tried below.
WHOLE = {**GRIDS, "2.5d": {"mode": "2.5d", "size": 2, "depth": 2}}


@pytest.mark.parametrize("mode", WHOLE)
def test_equals_one_process(mode: str, alone: str) -> None:
    """Some steps with dropout, within the rounding of sums in float32."""
    with processes(WHOLE[mode]["size"]) as some:
        some.run("cpu", _on_a_grid, WHOLE[mode], alone)


def test_checkpoints_go_to_other_strategies_and_back(alone: str, tmp_path: Path) -> None:
    """From one process to a grid, to FSDP2, to 1D and to one process, bitwise."""
    saved = alone
    route = [(1, {}), (4, {"tensor": GRIDS["2d"]}), (2, {"data": "zero3"}), (2, {"tensor": 2})]
    route += [(8, {"tensor": GRIDS["3d"]}), (1, {})]
    found = []
    for number, (count, config) in enumerate(route):
        path = str(tmp_path / f"{number}.pt")
        with processes(count) as some:
            some.run("cpu", _load, config, f"{saved}-saved", path)
        saved = path
        found.append(torch.load(path))
    for other in found[1:]:
        for wanted, values in zip(found[0], other, strict=True):
            assert all(torch.equal(values[name], wanted[name]) for name in wanted)
    assert found[0][1]["head.weight"].any()


# --- What a layer sends and keeps -----------------------------------------------------------------

TOKENS, IN, OUT = 4, 16, 32


@pytest.mark.parametrize(("mode", "count"), [(mode, GRIDS[mode]["size"]) for mode in GRIDS])
@on("count")
def test_a_layer_sends_and_keeps_what_the_formulas_say(rank: int, mode: str, count: int) -> None:
    size, depth = count, GRIDS[mode].get("depth", 1)
    grid, q = MeshGrid.make(mode, "cpu", size, depth), 2
    torch.manual_seed(0)
    layer: Any = torch.nn.Linear(IN, OUT, bias=False, dtype=torch.float64)
    x = torch.randn(4, TOKENS, IN, dtype=torch.float64, requires_grad=True)
    wanted = layer(x)
    wanted.sin().sum().backward()
    weight = layer.weight.grad
    layer.weight.grad = None
    GridParallel(grid)._apply(layer, grid.mesh)
    whole = grid.wrap(x.detach(), (torch.distributed.tensor.Replicate(),) * grid.mesh.ndim)
    here = whole.redistribute(placements=grid.stream).detach().requires_grad_()
    kept: list[torch.Tensor] = []
    with (
        CountCollectives() as forward,
        torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t),
    ):
        y = layer(here)
    torch.testing.assert_close(y.full_tensor(), wanted)
    with CountCollectives() as backward:
        y.sin().sum().backward()
    torch.testing.assert_close(layer.weight.grad.full_tensor(), weight)
    torch.testing.assert_close(here.grad.full_tensor(), x.grad)
    parts = size if mode == "3d" else q * q
    of_w, of_x, of_y = OUT * IN * 8, x.nbytes // size, y.nbytes // size
    assert layer.weight.to_local().nbytes == of_w // parts
    of_w //= parts
    if mode == "3d":
        both = {"all-gather": q * (of_x + of_w)}
        assert forward.bytes == both | {"reduce-scatter": q * of_y}
        assert forward.calls == {"all-gather": 2, "reduce-scatter": 1}
        assert backward.bytes == {
            "all-gather": q * of_y,
            "reduce-scatter": q * (of_x + of_w),
        }
        assert backward.calls == {"all-gather": 1, "reduce-scatter": 2}
        assert sum(t.nbytes for t in kept) == q * (of_x + of_w)
    else:
        sent = q * (of_x + of_w)
        summed = {"all-reduce": of_w} if depth > 1 else {}
        assert forward.bytes == {"broadcast": sent}
        assert backward.bytes == {"broadcast": sent, "reduce": sent} | summed
        assert forward.calls == {"broadcast": 2 * q}
        assert backward.calls == {"broadcast": 2 * q, "reduce": 2 * q} | dict.fromkeys(summed, 1)
        assert sum(t.nbytes for t in kept) == of_x + of_w


# --- Refusals -------------------------------------------------------------------------------------


@on(4)
def test_models_that_do_not_divide_are_named(rank: int) -> None:
    given: dict[str, Any] = {"device": "cpu", "loss_fn": compute_loss, "quiet": True}
    for change, rows, message in (
        ({"heads": 1}, 4, "with 1 heads in .*; the nearest are 2"),
        ({}, 3, "rows is 3; .* the nearest are 2 or 4"),
    ):
        model = Transformer(Settings(**{"length": 16, "width": 32, "layers": 1, **change}))
        example = (torch.zeros((rows, 16), dtype=torch.int64),)
        with pytest.raises(ArgumentError, match=message):
            parallelize(model, {"tensor": GRIDS["2d"]}, example=example, **given)
    other = torch.nn.Sequential(torchweld.nn.MLP(8, 16), torch.nn.Conv1d(2, 2, 1))
    with pytest.raises(ArgumentError, match="with a Conv1d, 1"):
        parallelize(other, {"tensor": GRIDS["2d"]}, example=(torch.zeros(4, 2, 8),), **given)
