"""Optimizers on sharded parameters, with real processes: the bits that one device would have."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

import torchweld
from conftest import PLACES, running_at
from optimizers import U
from processes import processes
from torchweld import optim
from torchweld.ops.adafactor import ADAFACTOR

# A row of 300 is two blocks, which shards of rows cut; 65 rows do not divide by two; a single row,
# column or matrix is left to one process, three of anything to three.
SHAPES = ((65, 300), (64, 64), (300,), (1, 5000), (4, 40, 30), (4100, 1), (20, 3, 100), (1, 5, 6))
CODECS: tuple[dict[str, Any], ...] = (
    {},
    {"state_dtype": "8bit"},
    {"state_dtype": torch.bfloat16, "amsgrad": True},
    {"state_dtype": "8bit", "master_weights": "remainder"},
    {"master_weights": True},
    {"stochastic_rounding": True},
    {"stochastic_rounding": True, "state_dtype": "8bit"},
)


def _values(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def _dtype(settings: dict[str, Any]) -> torch.dtype:
    narrow = settings.keys() & {"master_weights", "stochastic_rounding"}
    return torch.bfloat16 if narrow else torch.float32


def _run(
    settings: dict[str, Any],
    place: Callable[[torch.Tensor], torch.Tensor],
    steps: range,
    saved: Any = None,
    kind: Any = optim.AdamW,
) -> tuple[list[torch.Tensor], Any]:
    """A run, or its second half from what was saved: parameters and optimizer."""
    dtype = _dtype(settings)
    params = [torch.nn.Parameter(place(v)) for v in (saved[0] if saved else _values(0, dtype))]
    optimizer = kind(params, 1e-2, **settings)
    if saved:
        optimizer.load_state_dict(saved[1])
    for seed in steps:
        for p, g in zip(params, _values(seed, dtype), strict=True):
            p.grad = place(g * 0.1)
        optimizer.step()
    return params, optimizer


def _whole(t: Any) -> Any:
    if not hasattr(t, "full_tensor"):
        return t
    if t.dtype != torch.int16:
        return t.full_tensor()
    # Which neither gloo nor NCCL can gather.
    from torch.distributed.tensor import DTensor

    layout = {"shape": t.shape, "stride": t.stride()}
    bits = DTensor.from_local(
        t.to_local().view(torch.float16), t.device_mesh, t.placements, **layout
    )
    return bits.full_tensor().view(torch.int16)


def _assert_same(found: tuple[list[torch.Tensor], Any], expected: Any) -> None:
    """Parameters and all that is kept of them, bit for bit."""
    for p, e in zip(found[0], expected[0], strict=True):
        assert torch.equal(_whole(p.detach()), e)
        for name, value in expected[1].state[e].items():
            whole = _whole(found[1].state[p][name])
            assert whole.dtype == value.dtype
            assert torch.equal(whole, value), name


def _placer(mesh: Any, *dims: int | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Sharded in these dimensions, or the last one where there are fewer; None is replicated."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def place(t: torch.Tensor) -> torch.Tensor:
        placements = [Replicate() if d is None else Shard(min(d, t.ndim - 1)) for d in dims]
        return distribute_tensor(t, mesh, placements)

    return place


@contextlib.contextmanager
def _reductions() -> Iterator[list[Any]]:
    """The operations of those that are made inside."""
    made: list[Any] = []
    all_reduce = torch.distributed.all_reduce

    def record(t: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM, **given: Any) -> Any:
        made.append(op)
        return all_reduce(t, op, **given)

    torch.distributed.all_reduce = record
    try:
        yield made
    finally:
        torch.distributed.all_reduce = all_reduce


def _shards(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    for settings in CODECS:
        expected = _run(settings, lambda t: t, range(1, 5))
        cuts = settings.get("state_dtype") == "8bit"
        for dim in (0, None, 1, 2):
            place = _placer(mesh, dim)
            with _reductions() as made:
                found = _run(settings, place, range(1, 5))
            assert made == [torch.distributed.ReduceOp.MAX] * (4 if cuts and dim else 0)
            _assert_same(found, expected)
            assert all(
                isinstance(value, DTensor)
                for p in found[0]
                for name, value in found[1].state[p].items()
                if name != "step"
            )
            # What one saved, another goes on from.
            half = _run(settings, place, range(1, 3))
            saved = ([_whole(p.detach()) for p in half[0]], half[1].state_dict())
            _assert_same(_run(settings, place, range(3, 5), saved), expected)

    # A state that is sharded in another way is refused as a whole.
    rows, columns = (_run({"state_dtype": "8bit"}, _placer(mesh, d), range(1, 2)) for d in (0, 1))
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


def _codecs(rank: int) -> None:
    """A float32 state becomes codes and goes back, under a scaler too, as on one device."""
    from torch.distributed.device_mesh import init_device_mesh

    place = _placer(init_device_mesh("cpu", (2,)), 1)
    results = []
    for at in (lambda t: t, place):
        params, optimizer = _run({}, at, range(1, 3))
        for state_dtype in ("8bit", torch.float32):
            saved = ([p.detach() for p in params], optimizer.state_dict())
            params, optimizer = _run({"state_dtype": state_dtype}, lambda t: t, range(0), saved)
            for seed in (3, 4):
                for p, g in zip(params, _values(seed, torch.float32), strict=True):
                    p.grad = at(g * 0.8)
                optimizer.grad_scale = torch.tensor(8.0)
                optimizer.found_inf = torch.tensor(float(seed == 4))
                optimizer.step()
        results.append((params, optimizer))
    whole, sharded = results
    _assert_same(sharded, whole)
    for backend in ("cpu", "eager"):
        with torchweld.use_backend(backend):
            settings = {"state_dtype": "8bit", "momentum": 0.9}
            _assert_same(
                *(_run(settings, at, range(1, 4), kind=optim.LARS) for at in (place, lambda t: t))
            )


def _adaptive(rank: int) -> None:
    """Norms are those of whole tensors, summed in another order."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    for kind in (optim.LAMB, optim.LARS, optim.LAMB8bit):
        expected, _ = _run({}, lambda t: t, range(1, 5), kind=kind)
        placements = itertools.cycle((Shard(-1), Replicate(), Shard(0)))
        wholes = _values(0, torch.float32)
        params = [
            torch.nn.Parameter(distribute_tensor(value, mesh, [at]))
            for value, at in zip(wholes, placements, strict=False)
        ]
        optimizer = kind(params, 1e-2)
        for seed in range(1, 5):
            for p, g in zip(params, _values(seed, torch.float32), strict=True):
                p.grad = distribute_tensor(g * 0.1, mesh, p.placements)
            optimizer.step()
        for p, e in zip(params, expected, strict=True):
            torch.testing.assert_close(p.full_tensor(), e, rtol=1e-6, atol=1e-7)


FACTORED: tuple[tuple[Any, dict[str, Any]], ...] = (
    (optim.Adafactor, {"weight_decay": 0.1}),
    (optim.Adafactor, {"master_weights": True}),
    (optim.TransformersAdafactor, {"relative_step": False, "beta1": 0.9, "weight_decay": 0.1}),
)


def _assert_near(found: tuple[list[torch.Tensor], Any], expected: Any) -> None:
    """Of Adafactor: sums in float64 are made in another order, whose results round to float32.

    A step is lr times the root mean square of the parameter, at most, times what an element's
    direction is of the mean one: less than 10 here. It takes some ten roundings.
    """
    for p, e in zip(found[0], expected[0], strict=True):
        state, given = found[1].state[p], expected[1].state[e]
        assert list(state) == list(given)
        steps, size = given["step"], 10 * 1e-2 * e.float().square().mean().sqrt()
        values = [(state[name], given[name]) for name in given if name != "master"]
        for value, whole in values:
            bound = 4 * steps * U * whole.abs() + (whole.dim() > 0) * steps * U * size
            assert ((_whole(value) - whole).abs() <= bound).all()
        p, e = (s.get("master", t) for s, t in ((state, p), (given, e)))
        assert ((_whole(p.detach()) - e).abs() <= 10 * steps * U * (e.abs() + size)).all()


# Which of a matrix's dimensions averages are over; one of each element is over none.
AVERAGED = {"row_var": -1, "exp_avg_sq_row": -1, "col_var": -2, "exp_avg_sq_col": -2}
AVERAGED |= {"variance": 0, "exp_avg_sq": 0}


def _assert_averages_same(found: tuple[list[torch.Tensor], Any], expected: Any) -> None:
    """Bit for bit, where none is over a dimension that is sharded."""
    for p, e in zip(found[0], expected[0], strict=True):
        sharded = {getattr(at, "dim", None) for at in p.placements}  # type: ignore[attr-defined]
        for name, value in expected[1].state[e].items():
            if name in AVERAGED and (not AVERAGED[name] or p.ndim + AVERAGED[name] not in sharded):
                assert torch.equal(_whole(found[1].state[p][name]), value), name


@contextlib.contextmanager
def _kernels_alone() -> Iterator[None]:
    """Within it eager torch serves no step of Adafactor's."""

    def reference(*_: Any) -> None:
        raise AssertionError("eager served")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ADAFACTOR, "_reference", reference)
        yield


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _factored(rank: int) -> None:
    """Averages and norms are those of whole tensors, and kept as parts of whole averages."""
    with _kernels_alone():
        _factored_on(True, None)
        _factored_on(True, 0.5)
    with torchweld.use_backend("eager"):
        _factored_on(False, 0.5)


def _factored_on(kernel: bool, limit: float | None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    world = torch.distributed.get_world_size()
    grid = init_device_mesh("cpu", (2, world // 2) if world > 2 else (world,))
    placed: Any = [(0,), (None,), (1,), (2,)] if world == 2 else [(0, 1), (1, 1)]
    for kind, settings in FACTORED:
        settings = settings | {"max_grad_norm": limit}
        expected = _run(settings, lambda t: t, range(1, 5), kind=kind)
        for dims in placed:
            place = _placer(grid, *dims)
            with _reductions() as made:
                found = _run(settings, place, range(1, 5), kind=kind)
            # A step's sums, the kinds of them, matrices and vectors; and the norm's of two layouts.
            assert len(made) <= 4 * (3 * 4 + (limit is not None) * 2 * len(dims))
            _assert_near(found, expected)
            if kernel and limit is None:
                _assert_averages_same(found, expected)
            for p in found[0]:
                for name, value in found[1].state[p].items():
                    assert isinstance(value, DTensor) == (name != "step")
            half = _run(settings, place, range(1, 3), kind=kind)
            saved = ([_whole(p.detach()) for p in half[0]], half[1].state_dict())
            with _threads(3 if kernel else 1):
                again = _run(settings, place, range(3, 5), saved, kind=kind)
            for p, q in zip(found[0], again[0], strict=True):
                assert torch.equal(p.to_local(), q.to_local())


def _rounded_sums(rank: int) -> None:
    """Of rules with sums over whole tensors: roundings are one device's but where a sum's is not.

    A sum that is made in another order moves a parameter by a few of float32's roundings, of which
    there are 2^16 in one of bfloat16's: as many elements are rounded to the other side in a step.
    """
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    for kind in (optim.LAMB, optim.LARS, optim.Adafactor):
        settings = {"stochastic_rounding": True}
        expected, _ = _run(settings, lambda t: t, range(1, 5), kind=kind)
        unrounded, _ = _run({"master_weights": True}, lambda t: t, range(1, 5), kind=kind)
        for dim in (0, 1):
            found, _ = _run(settings, _placer(mesh, dim), range(1, 5), kind=kind)
            others = [(_whole(p.detach()) != e).sum() for p, e in zip(found, expected, strict=True)]
            assert sum(others) <= 1e-3 * sum(e.numel() for e in expected), kind
        # Few elements of a small one are rounded to the other side, or none.
        for e, u in zip(expected, unrounded, strict=True):
            assert e.numel() < 100 or (e != u).any()


def _clipping(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    settings = {"max_grad_norm": 0.5}
    params, whole = _run(settings, lambda t: t, range(1, 3))
    found, sharded = _run(settings, lambda t: distribute_tensor(t, mesh, [Shard(0)]), range(1, 3))
    torch.testing.assert_close(sharded.grad_norm, whole.grad_norm, rtol=1e-6, atol=0)
    for p, e in zip(found, params, strict=True):
        torch.testing.assert_close(p.full_tensor(), e, rtol=1e-5, atol=1e-7)
    # Replicas count once, and plain tensors beside DTensors too.
    values = _values(0, torch.float32)
    mixed = [
        torch.nn.Parameter(distribute_tensor(v, mesh, [Shard(0) if i % 2 else Replicate()]))
        for i, v in enumerate(values[:-1])
    ]
    mixed.append(torch.nn.Parameter(values[-1]))
    optimizer = optim.AdamW(mixed, max_grad_norm=0.5)
    for p, g in zip(mixed, _values(2, torch.float32), strict=True):
        p.grad = g * 0.1 if p is mixed[-1] else distribute_tensor(g * 0.1, mesh, p.placements)
    optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, whole.grad_norm, rtol=1e-6, atol=0)


def _fsdp2(rank: int) -> None:
    """Trained under fully_shard, saved by torch's state dict functions, as one process would."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            x = torch.randn(8, 128, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    def make(sharded: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 64))
        if sharded:
            fully_shard(model)
        return model, optim.AdamW(model.parameters(), 1e-3, state_dtype="8bit")

    plain, sharded = make(False), make(True)
    train(*plain, range(3))
    train(*sharded, range(3))
    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    whole = get_optimizer_state_dict(*sharded, options=options)
    if rank == 0:
        kept = whole["state"]["0.weight"]
        assert kept["exp_avg_codes"].shape == (256, 128)
        assert kept["exp_avg_absmax"].shape == (256, 1)
    again = make(True)
    again[0].load_state_dict(sharded[0].state_dict())
    own = copy.deepcopy(get_optimizer_state_dict(*sharded))
    set_optimizer_state_dict(*again, own)
    train(*sharded, range(3, 5))
    train(*again, range(3, 5))
    train(*plain, range(3, 5))
    for a, b, c in zip(*(m.parameters() for m, _ in (sharded, again, plain)), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
        # Their gradients are averaged over two processes: the same numbers to rounding.
        torch.testing.assert_close(a.full_tensor(), c, rtol=1e-3, atol=1e-4)


def _zero(rank: int) -> None:
    """ZeroRedundancyOptimizer, each process with the state of its share: the same bits."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    expected, _ = _run({"state_dtype": "8bit"}, lambda t: t, range(1, 5))
    params = [torch.nn.Parameter(v) for v in _values(0, torch.float32)]
    optimizer = ZeroRedundancyOptimizer(params, optim.AdamW, lr=1e-2, state_dtype="8bit")
    for seed in range(1, 5):
        for p, g in zip(params, _values(seed, torch.float32), strict=True):
            p.grad = g * 0.1
        optimizer.step()
    assert 0 < len(optimizer.optim.state) < len(params)
    assert all(torch.equal(p, e) for p, e in zip(params, expected, strict=True))


def _grid(rank: int) -> None:
    """On a mesh of 2 x 2: rows and columns at once, columns twice, in FSDP2's order too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2))
    for settings in CODECS[1], *CODECS[-2:]:
        expected = _run(settings, lambda t: t, range(1, 4))
        for dims in (0, 1), (1, 0), (1, 1), (2, 1), (None, 1):
            _assert_same(_run(settings, _placer(mesh, *dims), range(1, 4)), expected)
        for dim in 0, 1:

            def place(t: torch.Tensor, dim: int = dim) -> torch.Tensor:
                along = min(dim, t.ndim - 1)
                even = t.shape[along] % 4 == 0  # the others torch does not place so
                first = _StridedShard(along, split_factor=2) if even else Shard(along)
                return distribute_tensor(t, mesh, [first, Shard(along)])

            _assert_same(_run(settings, place, range(1, 4)), expected)

    # Without the second, every other quarter: no part that lies side by side.
    gaps = distribute_tensor(
        torch.zeros(8, 4).bfloat16(), mesh, [_StridedShard(0, split_factor=2), Replicate()]
    )
    p = torch.nn.Parameter(gaps)
    p.grad = torch.ones_like(p)
    with pytest.raises(torchweld.ArgumentError, match="without gaps"):
        optim.AdamW([p], stochastic_rounding=True).step()
    assert not p.to_local().any()


def _emulated(rank: int) -> None:
    """The CUDA kernels, where shards cut rows, and where sums are over whole tensors."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2))
    cases: list[tuple[Any, dict[str, Any]]] = [(optim.AdamW, CODECS[1]), (optim.AdamW, CODECS[3])]
    cases.append((optim.LARS, {"state_dtype": "8bit", "momentum": 0.9}))
    for kind, settings in cases:
        expected = _run(settings, lambda t: t, range(1, 4), kind=kind)
        for dims in (1, 0), (1, 1), (2, None):
            with pytest.MonkeyPatch.context() as patch, running_at("emulator", patch):
                found = _run(settings, _placer(mesh, *dims), range(1, 4), kind=kind)
            _assert_same(found, expected)
    for kind, settings in FACTORED:
        expected = _run(settings, lambda t: t, range(1, 4), kind=kind)
        for dims in (0, 1), (1, 1):
            place = _placer(mesh, *dims)
            with (
                _kernels_alone(),
                pytest.MonkeyPatch.context() as patch,
                running_at("emulator", patch),
            ):
                found = _run(settings, place, range(1, 4), kind=kind)
            _assert_near(found, expected)
            _assert_averages_same(found, expected)


def _fsdp2_and_tp(rank: int) -> None:
    """Trained under fully_shard over parallelize_module, with clipping: what one device makes.

    It is given the gradients, and the factor that they are clipped by, whose norm is compared with
    its own. Then rules of elements have the same bits, and those of norms their roundings.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    limit, steps = 0.05, 3
    cases: list[tuple[Any, dict[str, Any]]] = [(optim.AdamW, settings) for settings in CODECS]
    cases += [(optim.LAMB, {"weight_decay": 0.1}), *FACTORED]
    for kind, settings in cases:
        dtype = _dtype(settings)
        torch.manual_seed(0)
        # The second matrix is sharded within rows of 600, of which devices have 300.
        model = torch.nn.Sequential(torch.nn.Linear(96, 600), torch.nn.Linear(600, 64)).to(dtype)
        parallelize_module(model, grid["tp"], plan)
        for layer in model:
            fully_shard(layer, mesh=grid["dp"])
        fully_shard(model, mesh=grid["dp"])
        wholes = [_whole(p.detach()).clone().requires_grad_() for p in model.parameters()]
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
                e.grad = _whole(p.grad)
            norm = torch.cat([e.grad.double().flatten() for e in wholes]).norm()
            sharded.step()
            assert sharded.grad_norm > limit
            assert (sharded.grad_norm - norm).abs() <= 2 * U * norm
            factor = (limit / (sharded.grad_norm + 1e-6)).clamp(max=1.0)
            plain._gradient_factor = lambda factor=factor: factor
            plain.step()
        found = (list(model.parameters()), sharded)
        if kind is optim.AdamW:
            _assert_same(found, (wholes, plain))
        elif kind is not optim.LAMB:
            _assert_near(found, (wholes, plain))
        else:
            for p, e, start in zip(found[0], wholes, starts, strict=True):
                moved = (e - start).abs().max()
                assert moved > 0
                bound = steps * U * (2 * e.abs() + 4 * moved)
                assert ((_whole(p.detach()) - e).abs() <= bound).all()


# Stages of a run: each on so many processes, from the last one's checkpoint; and the dimensions
# that tensors are sharded in.
STAGES = ((1,), (2,), (2, 2), (1,))
RESHARDED = [(settings, ((1,), (2,), (0, 1), (0,))) for settings in CODECS]
RESHARDED.append((CODECS[1], ((0,), (0,), (1, 2), (1,))))


def _stage(rank: int, stage: int, directory: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", STAGES[stage])
    for name, (settings, dims) in enumerate(RESHARDED):
        dtype, place = _dtype(settings), _placer(mesh, *dims[stage])
        values = [place(v) for v in _values(0, dtype)]
        model = torch.nn.ParameterList([torch.nn.Parameter(v) for v in values])
        optimizer = optim.AdamW(model.parameters(), 1e-2, **settings)
        if stage:
            saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(saved, checkpoint_id=directory / f"{name}-{stage - 1}")
            set_state_dict(
                model,
                optimizer,
                model_state_dict=saved["model"],
                optim_state_dict=saved["optimizer"],
            )
        for seed in (2 * stage + 1, 2 * stage + 2):
            for p, g in zip(model, _values(seed, dtype), strict=True):
                p.grad = place(g * 0.1)
            optimizer.step()
        saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(saved, checkpoint_id=directory / f"{name}-{stage}")
        if stage == len(STAGES) - 1:
            expected = _run(settings, lambda t: t, range(1, 2 * len(STAGES) + 1))
            _assert_same((list(model), optimizer), expected)


# With the number of processes.
SCENARIOS: list[tuple[int, Callable[[int], None]]] = [
    *(
        (2, s)
        for s in (_shards, _codecs, _adaptive, _factored, _rounded_sums, _clipping, _fsdp2, _zero)
    ),
    *((4, s) for s in (_grid, _factored, _fsdp2_and_tp)),
]


@pytest.mark.parametrize(("world", "scenario"), SCENARIOS)
def test_processes_equal_one(world: int, scenario: Callable[[int], None]) -> None:
    with processes(world) as started:
        started.run(None, scenario)


@pytest.mark.skipif(PLACES["emulator"][2] is not None, reason=str(PLACES["emulator"][2]))
def test_processes_in_the_emulator_equal_one() -> None:
    with processes(4) as started:
        started.run(None, _emulated)


def test_checkpoints_are_resharded_bit_for_bit(tmp_path: Path) -> None:
    """On disk, from 1 process to 2, 4 and back: the run is that of one device without a break."""
    for stage, sizes in enumerate(STAGES):
        with processes(math.prod(sizes)) as started:
            started.run(None, _stage, stage, tmp_path)
