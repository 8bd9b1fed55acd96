"""parallelize(): what is declared, what is refused, and what all ranks exchange alike."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import torchweld
from processes import on, processes
from refusing import refuses
from torchweld.distributed import Parallel, check_fit, grad_norm, layer_cuts, parallelize, pipeline
from torchweld.errors import ArgumentError, CollectiveError
from transformer import Settings, Transformer, compute_loss, make_batch

S = Settings(vocabulary=64, length=32, width=32, heads=4, layers=4)


def test_what_is_declared() -> None:
    declared: Any = {"pipeline": 2, "tensor": {"mode": "1d", "size": 2}, "data": "zero2"}
    assert Parallel.from_config(declared, 8) == Parallel(2, 2, 2, "zero2")
    declared = {"ring": 2, "tensor": {"size": 2}, "data": "zero3"}
    assert Parallel.from_config(declared, 8) == Parallel(1, 2, 2, "zero3", ring=2)
    assert Parallel.from_config("tp+sp", 4) == Parallel(1, 4, 1, sequence=True)


GRID = {"mode": "2d", "size": 4}
STASHED = {"size": 2, "schedule": "2bw"}


@pytest.mark.parametrize(
    ("config", "world", "message"),
    [
        ({"tensor": {"size": 2, "sequence": "no"}}, 4, "sequence is 'no'"),
        ({"tensor": {"size": 2, "sequence": 1}}, 4, "sequence is 1"),
        ({"tensor": {"mode": ["1d"]}}, 4, "mode is"),
        ({"tensor": {"mode": "4d", "size": 2}}, 4, "mode is '4d'"),
        ({"tensor": True}, 4, "tensor is True"),
        ({"pipeline": True}, 4, "pipeline is True"),
        ({"pipeline": -1}, 4, "pipeline is -1"),
        ({"ring": 1.5}, 4, "ring is 1.5"),
        ({"ring": 2, "pipeline": 2}, 4, "ring is 2"),
        ({"ring": 2}, 4, "data is 'ddp'"),
        ({"tensor": {"size": 2}}, 4, "data is 'ddp'"),
        ({"tensor": {"size": 3}}, 4, "config is 1 x 1 x 3"),
        ({"data": {}}, 4, "data is {}"),
        ({"data": None}, 4, "data is None"),
        ({"data": "zero4"}, 4, "data is 'zero4'"),
        ({"data": {"size": 2}}, 2, "data is with size"),
        ({"data": {"kind": "ddp", "shard": 2}}, 2, "shard is 2 with ddp; accepted: with zero2"),
        ({"data": {"kind": "zero3", "shard": 3}}, 2, "shard is 3 with zero3; .* divisor of 2"),
        (None, 4, "config is with None"),
        (["ddp"], 4, "config is with"),
        ("megatron", 4, "config is 'megatron'"),
        ("no [parallel] table", 4, "config is 'no"),
        ("nowhere.toml", 2, "config is .*nowhere.toml.*; accepted: a file to read"),
        ({"pipelines": 2}, 4, "config is with pipelines"),
        ({"data": {1: 2}}, 4, "data is with 1"),
        ({"pipeline": {"size": 2, "schedule": "1f2b"}}, 2, "schedule is '1f2b'"),
        ({"pipeline": {"stages": 2}}, 2, "pipeline is with stages"),
        ({"checkpoint": "some"}, 2, "checkpoint is 'some'; accepted: one of none, full, selec"),
        (
            {"pipeline": {"size": 2, "schedule": "zbv"}, "checkpoint": "selective"},
            2,
            "checkpoint is 'selective'; accepted: 'none' or 'full' with zbv",
        ),
        ({"offload": True}, 2, "offload is True"),
        ({"optimizer": {"lr": 1e-3}}, 2, "optimizer is .*; accepted: a name, or a table"),
        ({"optimizer": "rprop"}, 2, "optimizer is 'rprop'; accepted: one of adam"),
        ({"optimizer": "muon", "data": "zero1"}, 2, "'muon'; accepted: another with zero1"),
        ({"optimizer": "one_bit_adam", "data": "zero2"}, 2, "adam exchanges whole gradients"),
        ({"optimizer": "one_bit_adam"}, 2, "with no arguments; .*: missing .* 'freeze_step'"),
        (
            {"optimizer": {"name": "one_bit_adam", "freeze_step": 9}, "offload": "auto"},
            2,
            "offload is 'auto'; accepted: 'none' with one_bit_adam",
        ),
        ({"optimizer": {"name": "adamw", "rl": 1}}, 2, "'adamw' with .*: .* argument 'rl'"),
        ({"tensor": {"mode": "2d", "size": 6}}, 6, "tensor is 6 in 2d; .* such as 4 or 9"),
        ({"tensor": {"mode": "3d", "size": 4}}, 4, "tensor is 4 in 3d; .* such as 1 or 8"),
        ({"tensor": {"mode": "2.5d", "size": 6, "depth": 2}}, 6, "2.5d; .* such as 2 or 8"),
        ({"tensor": {**GRID, "depth": 2}}, 4, "depth is 2"),
        ({"tensor": {"size": 4, "depth": 2}}, 4, "depth is 2"),
        ({"tensor": GRID, "data": "zero2"}, 8, "tensor in 2d is with 2 other"),
        ({"tensor": {**GRID, "sequence": True}}, 4, "tensor in 2d is with"),
        ({"tensor": GRID, "optimizer": "lamb"}, 4, "optimizer is 'lamb'"),
        ({"pipeline": STASHED, "tensor": 2}, 4, "tensor is 2; accepted: 1 with 2bw"),
        ({"pipeline": STASHED, "data": "zero2"}, 2, "data is 'zero2'; accepted: 'ddp' with 2bw"),
        ({"pipeline": STASHED, "checkpoint": "full"}, 2, "checkpoint is 'full'; accepted: 'none'"),
        ({"pipeline": STASHED, "offload": "auto"}, 2, "offload is 'auto'; accepted: 'none' with"),
    ],
)
def test_declarations_that_cannot_be_are_named(config: Any, world: int, message: str) -> None:
    refuses(message, Parallel.from_config, config, world)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match=r"config is .*binary.toml: .*; accepted: TOML"):
        Parallel.from_config(tmp_path / "binary.toml", 2)


# --- Sizes of models and batches ------------------------------------------------------------------


def _model() -> Any:
    with torch.device("meta"):
        return Transformer(S)


@pytest.mark.parametrize(
    ("config", "world", "sizes", "message"),
    [
        ({"tensor": 3}, 3, {}, "4 heads in .*; the nearest are 3 or 6"),
        ({"tensor": 8}, 8, {}, "4 heads in .*; the nearest are 8$"),
        ({"pipeline": 5}, 5, {}, "layers is 4; accepted: at least one for each of 5 stages"),
        ({"pipeline": {"size": 3, "schedule": "zbv"}}, 3, {}, "layers is 4; .* 6 stages"),
        ({"ring": 3}, 3, {"length": 32}, "length is 32; .*; the nearest are 30 or 33"),
        (
            {"ring": 2, "tensor": {"size": 2, "sequence": True}},
            4,
            {"length": 30},
            "length is 30; .* 4 processes that share the sequence; the nearest are 28 or 32",
        ),
        ({}, 4, {"microbatches": 6}, "microbatches is 6; .* 4 replicas; the nearest are 4 or 8"),
        (
            {"pipeline": 2, "data": "zero2"},
            4,
            {"microbatches": 2},
            "microbatches is 2, which is 1 for each of 2 replicas; accepted: at least 2 for each",
        ),
        (
            {"pipeline": {"size": 4, "schedule": "2bw"}},
            4,
            {"microbatches": 3},
            "accumulate is 3 microbatches; .* 4 stages",
        ),
        (
            {"pipeline": {"size": 4, "schedule": "2bw", "accumulate": 4}},
            4,
            {"microbatches": 6},
            "microbatches is 6; .*; the nearest are 4 or 8",
        ),
    ],
)
def test_what_does_not_divide_is_named(config: Any, world: int, sizes: Any, message: str) -> None:
    refuses(message, check_fit, _model(), Parallel.from_config(config, world), **sizes)


@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
def test_some_schedules_take_fewer_microbatches_than_processes(schedule: str) -> None:
    config = {"pipeline": {"size": 2, "schedule": schedule}}
    check_fit(_model(), Parallel.from_config(config, 2), microbatches=1)
    with pytest.raises(ArgumentError, match="at least 2 for each"):
        check_fit(_model(), Parallel.from_config({"pipeline": 2}, 2), microbatches=1)


def test_models_that_do_not_fit_are_named() -> None:
    """Hidden features that do not divide, and parameters that two modules share."""
    model = _model()
    for block in model.blocks.values():
        block.mlp = torchweld.nn.MLP(32, 50)
    with pytest.raises(ArgumentError, match=r"50 features in .*; the nearest are 48 or 52"):
        check_fit(model, Parallel.from_config({"tensor": 4}, 4))
    model = _model()
    model.head.weight = model.token.weight
    with pytest.raises(ArgumentError, match=r"head\.weight is another parameter too"):
        check_fit(model, Parallel.from_config({"pipeline": 2}, 2))


# --- Models ---------------------------------------------------------------------------------------


@on(2)
def test_a_sequence_is_cut(rank: int) -> None:
    """An nn.Sequential is cut into stages whose parameters keep their names."""
    torch.manual_seed(0)
    model = nn.Sequential(*(torchweld.nn.MLP(8, 16) for _ in range(4)))
    names = {name: p.clone() for name, p in model.named_parameters()}
    x, loss_fn = torch.randn(2, 2, 3, 8), nn.functional.mse_loss
    pairs = [(rows, rows.flip(0)) for rows in x]
    whole = torch.stack([loss_fn(model(rows), targets) for rows, targets in pairs]).mean()
    given = {"device": "cpu", "example": (x[0],), "loss_fn": loss_fn, "microbatches": 2}
    training = parallelize(model, "pp", quiet=True, **given)
    mine = dict(training.model.named_parameters())
    assert len(mine) == len(names) // 2
    assert all(torch.equal(p, names[name]) for name, p in mine.items())
    loss, _ = training.step(pairs, 0)
    torch.testing.assert_close(loss, whole.detach())
    refuses("batch is 1 microbatches; accepted: 2", training.step, pairs[:1], 0)


class _Chooses(nn.Module):
    """A model whose second layer serves positive inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(y) if x[0, 0] > 0 else y  # type: ignore[no-any-return]


@pytest.mark.parametrize("data", ["ddp", "zero1"])
@on(2, None)
def test_a_parameter_that_a_process_did_not_use(rank: int, data: str) -> None:
    """The first step says so, before replicas differ."""
    training = parallelize(
        _Chooses(),
        data,
        device="cpu",
        example=(torch.zeros(2, 4),),
        loss_fn=nn.functional.mse_loss,
        microbatches=2,
        quiet=True,
    )
    before = [p.detach().clone() for p in training.model.parameters()]
    training.optimizer.step = lambda: None
    batch = [(torch.full((2, 4), 1.0 - 2 * rank), torch.ones(2, 4))]
    if rank == 1:
        refuses(r"gradient of second.weight, second.bias in", training.step, batch, 0)
        assert all(map(torch.equal, before, training.model.parameters()))
        # The other process waits for the exchange.
        numbers = torch.zeros(sum(p.numel() for p in before))
        torch.distributed.all_reduce(numbers, group=training.mesh.get_group("data"))
    else:
        training.step(batch, 0)


# --- Tensors of one dtype and shape on all ranks --------------------------------------------------


SMALL = Settings(vocabulary=16, length=8, width=16, heads=2, layers=2)


# Messages, whose sizes are a rank's own.
_MESSAGES = ("send", "recv", "alltoall", "all_to_all")


class _Agreeing(TorchDispatchMode):
    """Compares each collective's kind, dtypes and sizes among its ranks, before it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.compared = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        is_message = func._opname.startswith(_MESSAGES)
        if func.namespace in ("c10d", "_c10d_functional") and not is_message:
            self._compare(func, args)
        return func(*args, **(kwargs or {}))

    def _compare(self, func: Any, args: Any) -> None:
        group = _find_group(args)
        if group is None:  # it waits for another one
            return
        tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        mine = func._opname, [(str(t.dtype), t.numel()) for t in tensors]
        of_all: list[Any] = [None] * dist.get_world_size(group)
        with _disable_current_modes():
            dist.all_gather_object(of_all, mine, group=group)
        assert all(each == mine for each in of_all), of_all
        self.compared += 1


def _find_group(args: Any) -> Any:
    names = {group.group_name for group in dist.distributed_c10d._world.pg_map}
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
        if isinstance(arg, str) and arg in names:
            return dist.distributed_c10d._resolve_process_group(arg)
    return None


# Dtypes that loss functions return; they compute in float32, from a bfloat16 model's logits.
DTYPES = (torch.float64, torch.bfloat16, torch.float16)
STRATEGIES = [(name, torch.float64) for name in ("ddp", "zero1", "zero2", "zero3", "tp", "tp+sp")]
STRATEGIES += [("pp", dtype) for dtype in DTYPES]


@on(2)
def test_a_step_of_any_dtype(rank: int) -> None:
    """A step under each strategy exchanges equal kinds of tensors, and returns a float32 loss."""
    example = (torch.zeros((1, SMALL.length), dtype=torch.int64),)
    for strategy, of_loss in STRATEGIES:
        torch.manual_seed(0)

        def loss_fn(y: torch.Tensor, target: torch.Tensor, dtype: Any = of_loss) -> torch.Tensor:
            return compute_loss(y.float(), target).to(dtype)

        given = {"loss_fn": loss_fn, "microbatches": 2, "max_norm": 1.0, "quiet": True}
        model = Transformer(SMALL).bfloat16()
        training = parallelize(model, strategy, device="cpu", example=example, **given)
        with _Agreeing() as mode:
            loss, _ = training.step([make_batch(SMALL, 1, at) for at in training.own], 0)
        assert loss.dtype == torch.float32, strategy
        assert mode.compared > 0, strategy


# --- Pipelines ------------------------------------------------------------------------------------


def _make(blocks: Any = None, **given: Any) -> Any:
    torch.manual_seed(0)
    blocks = blocks or [nn.Linear(4, 4) for _ in range(2)]
    given = {"loss_fn": nn.functional.mse_loss, "example": (torch.zeros(1, 4),)} | given
    return pipeline(blocks, "gpipe", 2, **given)


@on(2)
def test_other_inputs(rank: int) -> None:
    """The next stage would receive what it does not expect: gloo aborts, or a rank waits."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    x = torch.randn(1, 3, 4)
    given: Any = {"example": (x,), "loss_fn": nn.functional.mse_loss, "microbatches": 2}
    training = parallelize(model, "pp", device="cpu", quiet=True, **given)
    for other in (x.double(), x[:, :2], x.repeat(2, 1, 1)):
        with pytest.raises(ArgumentError, match=r"batch is .*; accepted: \[2, 3, 4\] and torch.fl"):
            training.step([(other, other)] * 2, 0)
    training.step([(x, x)] * 2, 0)


class _Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such row")


@on(2)
def test_what_one_rank_computes_fails(rank: int) -> None:
    """What one rank computes for all may fail: the others hear of it."""
    error: Any = (ValueError, CollectiveError)
    blocks = [_Fails(), nn.Linear(4, 4)]
    with pytest.raises(error, match="no such row") as raised:
        _make(blocks)
    assert isinstance(raised.value, error[rank])
    model = nn.ModuleDict({"layers": nn.ModuleList(blocks)})
    model.forward = blocks[0].forward  # type: ignore[method-assign]
    with pytest.raises(error, match="no such row"):
        layer_cuts(model, "layers", 2, (torch.zeros(1, 4),))
    given: Any = {"example": (torch.zeros(1, 3, 4),), "loss_fn": None, "microbatches": 2}
    with pytest.raises(error, match="no such row") as raised:
        parallelize(nn.Sequential(*blocks[::-1]), "pp", device="cpu", quiet=True, **given)
    assert isinstance(raised.value, error[1 - rank])


@on(2)
def test_other_copies(rank: int) -> None:
    """A wrapper casts one stage of two that share a weight."""
    blocks = [nn.Linear(4, 4) for _ in range(2)]
    blocks[1].weight = blocks[0].weight

    def cast(part: nn.Module) -> nn.Module:
        return part.double() if rank else part

    with pytest.raises(ArgumentError, match=r"0.weight and 1.weight are torch.float32 .* and torc"):
        _make(blocks, costs=[1.0, 1.0], wrap=cast)


# --- Norms ----------------------------------------------------------------------------------------


@on(2)
def test_norms_of_partial_and_missing_gradients(rank: int) -> None:
    """Parts are added before they are squared; a rank may have no gradient, or a whole one."""
    mesh, places = init_device_mesh("cpu", (2,)), (Replicate(), Shard(1))
    whole = torch.arange(6.0).view(3, 2)

    def compare(parameters: list[Any], wanted: torch.Tensor) -> None:
        with _Agreeing() as mode:
            norm = grad_norm(parameters)
        assert mode.compared == 2  # which gradients are parts, and the squares
        torch.testing.assert_close(norm, wanted)

    parts = [nn.Parameter(distribute_tensor(whole, mesh, [place])) for place in places]
    parts[0].grad = parts[0].detach()
    if rank == 0:
        parts[1].grad = parts[1].detach()
    compare(parts, (whole.square().sum() + whole[:, 0].square().sum()).sqrt())
    for other in (None, Replicate()):
        parameter = nn.Parameter(distribute_tensor(whole, mesh, [Replicate()]))
        place = Partial() if rank else other
        if place is not None:
            parameter.grad = DTensor.from_local(whole + rank, mesh, [place], run_check=False)
        compare([parameter], (whole + 1 if other is None else 2 * whole + 1).norm())
    mean = nn.Parameter(distribute_tensor(whole, mesh, [Replicate()]))
    mean.grad = DTensor.from_local(whole + rank, mesh, [Partial("avg")], run_check=False)
    parts[1].grad = parts[1].detach()
    wanted = (2 * whole.square().sum() + (whole + 0.5).square().sum()).sqrt()
    torch.testing.assert_close(grad_norm([*parts, mean]), wanted)


# --- The processes of these tests -----------------------------------------------------------------


def _ends(rank: int, how: str) -> None:
    """One process fails, ends, or waits; the others wait for it."""
    if rank == 1:
        if how == "fails":
            raise ValueError("no such row")
        if how == "ends":
            os._exit(1)
        time.sleep(60)
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("fails", "(?s)rank 1: Traceback.*ValueError: no such row"),
        ("ends", "rank 1: its process has ended|gloo"),  # as rank 1 or another one answers first
        ("waits", r"(?s)rank 0: .*in _ends.*rank 1: .*line \d+ in _ends"),
    ],
)
def test_a_scenario_that_does_not_end_well(
    how: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its test says where, and later ones have new processes."""
    with processes(3) as three:
        three.run(None, _barrier)
    monkeypatch.setattr("processes.SECONDS", 3)
    begin = time.monotonic()
    with pytest.raises((AssertionError, TimeoutError), match=message), processes(3) as three:
        three.run(None, _ends, how)
    assert time.monotonic() - begin < 30


def _barrier(rank: int) -> None:
    dist.barrier()
