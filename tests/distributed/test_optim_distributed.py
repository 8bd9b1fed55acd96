"""Optimizers on sharded parameters, with real processes: the bits of one device."""

# Parameters and results are DTensors, which torch's annotations do not say.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import torchweld
from conftest import PLACES, running_at
from optimizers import U
from processes import on, processes
from sharded_optimizers import (
    CODECS,
    FACTORED,
    assert_near,
    assert_same,
    drawn,
    dtype_of,
    placer,
    reductions,
    run,
    whole_of,
)
from torchweld import optim


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


@on(2, None)
def test_fsdp2(rank: int) -> None:
    """Trained under fully_shard and saved by torch's state dict functions: as one process."""

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
    whole: Any = get_optimizer_state_dict(*sharded, options=options)
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


@on(2, None)
def test_zero(rank: int) -> None:
    """ZeroRedundancyOptimizer, with part of the states on each process: the same bits."""
    expected, _ = run({"state_dtype": "8bit"}, lambda t: t, range(1, 3))
    params = [torch.nn.Parameter(v) for v in drawn(0, torch.float32)]
    optimizer = ZeroRedundancyOptimizer(params, optim.AdamW, lr=1e-2, state_dtype="8bit")
    for seed in range(1, 3):
        for p, g in zip(params, drawn(seed, torch.float32), strict=True):
            p.grad = g * 0.1
        optimizer.step()
    assert 0 < len(optimizer.optim.state) < len(params)
    assert all(torch.equal(p, e) for p, e in zip(params, expected, strict=True))


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


@pytest.mark.skipif(PLACES["emulator"][2] is not None, reason=str(PLACES["emulator"][2]))
@on(4, None)
def test_processes_in_the_emulator_equal_one(rank: int) -> None:
    """The CUDA kernels, if shards cut rows."""
    mesh = init_device_mesh("cpu", (2, 2))
    cases: list[tuple[Any, dict[str, Any]]] = [(optim.AdamW, CODECS[1]), (optim.AdamW, CODECS[3])]
    cases.append((optim.LARS, {"state_dtype": "8bit", "momentum": 0.9}))
    for kind, settings in cases:
        expected = run(settings, lambda t: t, range(1, 3), kind=kind)
        for dims in (1, 0), (1, 1):
            with pytest.MonkeyPatch.context() as patch, running_at("emulator", patch):
                found = run(settings, placer(mesh, *dims), range(1, 3), kind=kind)
            assert_same(found, expected)


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


# Stages of a run, each resuming from the previous checkpoint: the number of processes, and the
# dimensions in which tensors are sharded.
STAGES = ((1,), (2,), (2, 2), (1,))
RESHARDED = [(settings, ((1,), (2,), (0, 1), (0,))) for settings in CODECS]
RESHARDED.append((CODECS[1], ((0,), (0,), (1, 2), (1,))))


def _stage(rank: int, stage: int, directory: Path) -> None:

    mesh = init_device_mesh("cpu", STAGES[stage])
    for name, (settings, dims) in enumerate(RESHARDED):
        dtype, place = dtype_of(settings), placer(mesh, *dims[stage])
        values = [place(v) for v in drawn(0, dtype)]
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
            for p, g in zip(model, drawn(seed, dtype), strict=True):
                p.grad = place(g * 0.1)
            optimizer.step()
        saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(saved, checkpoint_id=directory / f"{name}-{stage}")
        if stage == len(STAGES) - 1:
            expected = run(settings, lambda t: t, range(1, 2 * len(STAGES) + 1))
            assert_same((list(model), optimizer), expected)


def test_checkpoints_are_resharded_bit_for_bit(tmp_path: Path) -> None:
    """On disk, from 1 process to 2, 4 and back: the run equals one device's, uninterrupted."""
    for stage, sizes in enumerate(STAGES):
        with processes(math.prod(sizes)) as started:
            started.run(None, _stage, stage, tmp_path)
