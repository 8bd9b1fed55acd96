"""Optimizers on sharded parameters, with real processes: the bits of one device, and sums."""

# Parameters and results are DTensors, which torch's annotations do not say.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import torchweld
from comparing import assert_whole
from conftest import PLACES, running_at
from optimizers import U, threads
from processes import on
from sharded_optimizers import (
    CODECS,
    FACTORED,
    SHAPES,
    assert_near,
    assert_same,
    drawn,
    dtype_of,
    placer,
    reductions,
    run,
    whole_of,
)
from torchweld import numerics, optim
from torchweld.optim.adafactor import ADAFACTOR


@on(2, None)
def test_shards(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for settings in CODECS:
        expected = run(settings, lambda t: t, range(1, 3))
        cuts = settings.get("state_dtype") == "8bit"
        for dim in (0, None, 1, 2):
            place = placer(mesh, dim)
            with reductions() as made:
                found = run(settings, place, range(1, 3))
            assert made == [torch.distributed.ReduceOp.MAX] * (2 if cuts and dim else 0)
            assert_same(found, expected)
            assert all(
                isinstance(value, DTensor)
                for p in found[0]
                for name, value in found[1].state[p].items()
                if name != "step"
            )
            # One resumes from what another saved.
            begun = run(settings, place, range(1, 2))
            saved = ([whole_of(p.detach()) for p in begun[0]], begun[1].state_dict())
            assert_same(run(settings, place, range(2, 3), saved), expected)

    # A state sharded in another way is rejected as a whole.
    rows, columns = (run({"state_dtype": "8bit"}, placer(mesh, d), range(1, 2)) for d in (0, 1))
    before = columns[1].state_dict()
    for name in ("exp_avg_codes", "exp_avg_absmax"):
        wrong = copy.deepcopy(before)
        wrong["state"][4][name] = rows[1].state_dict()["state"][4][name]
        with pytest.raises(torchweld.ArgumentError, match=f"{name}.*Shard"):
            columns[1].load_state_dict(wrong)
        assert all(columns[1].state[p] == before["state"][i] for i, p in enumerate(columns[0]))

    wide = torch.nn.Parameter(distribute_tensor(torch.zeros(64, 128), mesh, [Shard(1)]))
    other = torch.nn.Parameter(torch.zeros(64, 128))

    def refuses(match: str, error: Any = torchweld.ArgumentError, **settings: Any) -> None:
        other.grad = torch.ones_like(other)
        optimizer = optim.AdamW([other, wide], **settings)
        with pytest.raises(error, match=match):
            optimizer.step()
        assert not other.any()
        assert not wide.to_local().any()

    wide.grad = torch.ones(64, 128)
    refuses("a gradient")
    wide.grad = torch.ones_like(wide)
    with torchweld.use_backend("cuda"):
        refuses("cuda", torchweld.BackendError, state_dtype="8bit")
    whole = {"shape": wide.shape, "stride": wide.stride()}
    for part, along, match in (
        (torch.zeros(64, 63), Shard(1), "rows of 64 elements"),
        (torch.zeros(64, 128), Partial(), "sharded or replicated"),
    ):
        wide = torch.nn.Parameter(DTensor.from_local(part, mesh, [along], **whole))
        wide.grad = wide.detach().clone()
        refuses(match, state_dtype="8bit")


@on(2, None)
def test_codecs(rank: int) -> None:
    """A float32 state becomes codes and back, also under a scaler, as on one device."""
    place = placer(init_device_mesh("cpu", (2,)), 1)
    results = []
    for at in (lambda t: t, place):
        params, optimizer = run({}, at, range(1, 2))
        for state_dtype in ("8bit", torch.float32):
            saved = ([p.detach() for p in params], optimizer.state_dict())
            params, optimizer = run({"state_dtype": state_dtype}, lambda t: t, range(0), saved)
            for seed in (3, 4):
                for p, g in zip(params, drawn(seed, torch.float32), strict=True):
                    p.grad = at(g * 0.8)
                optimizer.grad_scale = torch.tensor(8.0)
                optimizer.found_inf = torch.tensor(float(seed == 4))
                optimizer.step()
        results.append((params, optimizer))
    whole, sharded = results
    assert_same(sharded, whole)
    for backend in ("cpu", "eager"):
        with torchweld.use_backend(backend):
            settings = {"state_dtype": "8bit", "momentum": 0.9}
            assert_same(
                *(run(settings, at, range(1, 3), kind=optim.LARS) for at in (place, lambda t: t))
            )


@on(4, None)
def test_grid(rank: int) -> None:
    """On a mesh of 2 x 2: rows and columns at once, columns twice, in FSDP2's order too."""
    mesh = init_device_mesh("cpu", (2, 2))
    for settings in CODECS[1], *CODECS[-2:]:
        expected = run(settings, lambda t: t, range(1, 3))
        for dims in (0, 1), (1, 0), (1, 1), (2, 1), (None, 1):
            assert_same(run(settings, placer(mesh, *dims), range(1, 3)), expected)
        for dim in 0, 1:

            def place(t: torch.Tensor, dim: int = dim) -> torch.Tensor:
                along = min(dim, t.ndim - 1)
                even = t.shape[along] % 4 == 0  # torch does not place others this way
                first = _StridedShard(along, split_factor=2) if even else Shard(along)
                return distribute_tensor(t, mesh, [first, Shard(along)])

            assert_same(run(settings, place, range(1, 3)), expected)

    # Without the second, every other quarter: no part that lies side by side.
    gaps = distribute_tensor(
        torch.zeros(8, 4).bfloat16(), mesh, [_StridedShard(0, split_factor=2), Replicate()]
    )
    p = torch.nn.Parameter(gaps)
    p.grad = torch.ones_like(p)
    with pytest.raises(torchweld.ArgumentError, match="without gaps"):
        optim.AdamW([p], stochastic_rounding=True).step()
    assert not p.to_local().any()


@on(4, None)
def test_fsdp2_and_tp(rank: int) -> None:
    """Trained under fully_shard over parallelize_module, with clipping: as on one device.

    The single device gets the gradients and the clipping factor, and its own norm is compared. Then
    elementwise rules have the same bits, and rules with norms differ by roundings.
    """
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    limit, steps = 0.05, 2
    cases: list[tuple[Any, dict[str, Any]]] = [(optim.AdamW, settings) for settings in CODECS]
    cases += [(optim.LAMB, {"weight_decay": 0.1}), *FACTORED]
    for kind, settings in cases:
        dtype = dtype_of(settings)
        torch.manual_seed(0)
        # The second matrix is sharded within its rows of 600: each device has 300 columns.
        model = torch.nn.Sequential(torch.nn.Linear(96, 600), torch.nn.Linear(600, 64)).to(dtype)
        parallelize_module(model, grid["tp"], plan)
        for layer in model:
            fully_shard(layer, mesh=grid["dp"])
        fully_shard(model, mesh=grid["dp"])
        wholes = [whole_of(p.detach()).clone().requires_grad_() for p in model.parameters()]
        starts = [p.detach().clone() for p in wholes]
        sharded = kind(model.parameters(), 1e-2, **settings, max_grad_norm=limit)
        plain = kind(wholes, 1e-2, **settings)
        for step in range(steps):
            # The same on the devices along tp.
            seed = 2 * step + grid.get_local_rank("dp")
            x = torch.randn(8, 96, generator=torch.Generator().manual_seed(seed)).to(dtype)
            sharded.zero_grad()
            model(x).square().mean().backward()
            for p, e in zip(model.parameters(), wholes, strict=True):
                e.grad = whole_of(p.grad)
            norm = torch.cat([e.grad.double().flatten() for e in wholes]).norm()
            sharded.step()
            assert sharded.grad_norm > limit
            assert (sharded.grad_norm - norm).abs() <= 2 * U * norm
            factor = (limit / (sharded.grad_norm + 1e-6)).clamp(max=1.0)
            plain._gradient_factor = lambda factor=factor: factor
            plain._is_undisturbed = lambda: False  # it has a factor that it does not know of
            plain.step()
        found = (list(model.parameters()), sharded)
        if kind is optim.AdamW:
            assert_same(found, (wholes, plain))
        elif kind is not optim.LAMB:
            assert_near(found, (wholes, plain))
        else:
            for p, e, start in zip(found[0], wholes, starts, strict=True):
                moved = (e - start).abs().max()
                assert moved > 0
                bound = steps * U * (2 * e.abs() + 4 * moved)
                assert ((whole_of(p.detach()) - e).abs() <= bound).all()


# --- Sums over whole tensors, and clipping --------------------------------------------------------


@on(2, None)
def test_adaptive(rank: int) -> None:
    """Norms are taken over whole tensors, but summed in another order."""
    mesh = init_device_mesh("cpu", (2,))
    for kind in (optim.LAMB, optim.LARS, optim.LAMB8bit):
        expected, _ = run({}, lambda t: t, range(1, 3), kind=kind)
        placements = itertools.cycle((Shard(-1), Replicate(), Shard(0)))
        at = dict(zip(SHAPES, placements, strict=False))
        place = lambda t, at=at: distribute_tensor(t, mesh, [at[tuple(t.shape)]])  # noqa: E731
        found, _ = run({}, place, range(1, 3), kind=kind)
        assert_whole(found, expected, **numerics.ROUNDED)


# The dimensions of a matrix that each average runs over; elementwise averages have none.
AVERAGED = {"row_var": -1, "exp_avg_sq_row": -1, "col_var": -2, "exp_avg_sq_col": -2}
AVERAGED |= {"variance": 0, "exp_avg_sq": 0}


def _assert_averages_same(found: tuple[list[torch.Tensor], Any], expected: Any) -> None:
    """Bit for bit, if no average runs over a sharded dimension."""
    for p, e in zip(found[0], expected[0], strict=True):
        sharded = {getattr(at, "dim", None) for at in p.placements}  # type: ignore[attr-defined]
        for name, value in expected[1].state[e].items():
            if name in AVERAGED and (not AVERAGED[name] or p.ndim + AVERAGED[name] not in sharded):
                assert torch.equal(whole_of(found[1].state[p][name]), value), name


@contextlib.contextmanager
def _kernels_alone() -> Iterator[None]:
    """A context in which eager torch must not serve Adafactor's steps."""

    def reference(*_: Any) -> None:
        raise AssertionError("eager served")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ADAFACTOR, "_reference", reference)
        yield


@pytest.mark.parametrize("count", [2, 4])
@on("count", None)
def test_factored(rank: int, count: int) -> None:
    """Averages and norms are taken over whole tensors, and stored as shards of whole averages."""
    with _kernels_alone():
        _factored_on(True, None)
        _factored_on(True, 0.5)
    if count == 2:
        with torchweld.use_backend("eager"):
            _factored_on(False, 0.5)


def _factored_on(kernel: bool, limit: float | None) -> None:
    world = torch.distributed.get_world_size()
    grid = init_device_mesh("cpu", (2, world // 2) if world > 2 else (world,))
    placed: Any = [(0,), (None,), (1,), (2,)] if world == 2 else [(0, 1), (1, 1)]
    for kind, settings in FACTORED:
        settings = settings | {"max_grad_norm": limit}
        expected = run(settings, lambda t: t, range(1, 3), kind=kind)
        for dims in placed:
            place = placer(grid, *dims)
            with reductions() as made:
                found = run(settings, place, range(1, 3), kind=kind)
            # A step's sums, the kinds of them, matrices and vectors; and the norm's of two layouts.
            assert len(made) <= 2 * (3 * 4 + (limit is not None) * 2 * len(dims))
            assert_near(found, expected)
            if kernel and limit is None:
                _assert_averages_same(found, expected)
            for p in found[0]:
                for name, value in found[1].state[p].items():
                    assert isinstance(value, DTensor) == (name != "step")
            begun = run(settings, place, range(1, 2), kind=kind)
            saved = ([whole_of(p.detach()) for p in begun[0]], begun[1].state_dict())
            with threads(3 if kernel else 1):
                again = run(settings, place, range(2, 3), saved, kind=kind)
            for p, q in zip(found[0], again[0], strict=True):
                assert torch.equal(p.to_local(), q.to_local())


@on(2, None)
def test_rounded_sums(rank: int) -> None:
    """Rules with sums over whole tensors round as on one device, unless a sum rounds otherwise.

    Another order of a sum moves a parameter by a few roundings of float32. One of bfloat16's is
    2^16 of these, so a step rounds a few elements in 2^16 to the other side.
    """
    mesh = init_device_mesh("cpu", (2,))
    for kind in (optim.LAMB, optim.LARS, optim.Adafactor):
        settings = {"stochastic_rounding": True}
        expected, _ = run(settings, lambda t: t, range(1, 3), kind=kind)
        unrounded, _ = run({"master_weights": True}, lambda t: t, range(1, 3), kind=kind)
        for dim in (0, 1):
            found, _ = run(settings, placer(mesh, dim), range(1, 3), kind=kind)
            others = [
                (whole_of(p.detach()) != e).sum() for p, e in zip(found, expected, strict=True)
            ]
            assert sum(others) <= 1e-3 * sum(e.numel() for e in expected), kind
        # In small parameters few or no elements are rounded to the other side.
        for e, u in zip(expected, unrounded, strict=True):
            assert e.numel() < 100 or (e != u).any()


@on(2, None)
def test_clipping(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    settings = {"max_grad_norm": 0.5}
    params, whole = run(settings, lambda t: t, range(1, 3))
    found, sharded = run(settings, lambda t: distribute_tensor(t, mesh, [Shard(0)]), range(1, 3))
    torch.testing.assert_close(sharded.grad_norm, whole.grad_norm, rtol=1e-6, atol=0)
    assert_whole(found, params, rtol=1e-5, atol=1e-7)

    def place(t: torch.Tensor) -> torch.Tensor:
        """Replicas count once, and so do plain tensors among DTensors."""
        at = SHAPES.index(tuple(t.shape))
        placement = Shard(0) if at % 2 else Replicate()
        return t if at == len(SHAPES) - 1 else distribute_tensor(t, mesh, [placement])

    _, optimizer = run(settings, place, range(2, 3))
    torch.testing.assert_close(optimizer.grad_norm, whole.grad_norm, rtol=1e-6, atol=0)


@pytest.mark.skipif(PLACES["emulator"][2] is not None, reason=str(PLACES["emulator"][2]))
@on(4, None)
def test_processes_in_the_emulator_equal_one(rank: int) -> None:
    """The CUDA kernels, if shards cut rows; and Adafactor's."""
    mesh = init_device_mesh("cpu", (2, 2))
    cases: list[tuple[Any, dict[str, Any]]] = [(optim.AdamW, CODECS[1]), (optim.AdamW, CODECS[3])]
    cases.append((optim.LARS, {"state_dtype": "8bit", "momentum": 0.9}))
    for kind, settings in (*cases, *FACTORED):
        expected = run(settings, lambda t: t, range(1, 3), kind=kind)
        for dims in (1, 0) if (kind, settings) in cases else (0, 1), (1, 1):
            patches = pytest.MonkeyPatch.context()
            with _kernels_alone(), patches as patch, running_at("emulator", patch):
                found = run(settings, placer(mesh, *dims), range(1, 3), kind=kind)
            if (kind, settings) in cases:
                assert_same(found, expected)
            else:
                assert_near(found, expected)
                _assert_averages_same(found, expected)
