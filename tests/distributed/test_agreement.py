"""All ranks exchange tensors of one dtype and shape, whatever each computes for itself."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from processes import on, processes
from torchweld.distributed import (
    grad_norm,
    layer_cuts,
    parallelize,
    pipeline,
    ring_attention,
)
from torchweld.errors import ArgumentError, CollectiveError
from torchweld.sparse import BlockLayout
from transformer import Settings, Transformer, compute_loss, make_batch

S = Settings(vocabulary=16, length=8, width=16, heads=2, layers=2)


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


# Of the loss, which is computed in float32 from the bfloat16 model's logits.
DTYPES = (torch.float64, torch.bfloat16, torch.float16)
STRATEGIES = [(name, torch.float64) for name in ("ddp", "zero1", "zero2", "zero3", "tp", "tp+sp")]
STRATEGIES += [("pp", dtype) for dtype in DTYPES]


@on(2)
def test_a_step_of_any_dtype(rank: int) -> None:
    """A step under each strategy exchanges equal kinds of tensors, and returns a float32 loss."""
    example = (torch.zeros((1, S.length), dtype=torch.int64),)
    for strategy, of_loss in STRATEGIES:
        torch.manual_seed(0)

        def loss_fn(y: torch.Tensor, target: torch.Tensor, dtype: Any = of_loss) -> torch.Tensor:
            return compute_loss(y.float(), target).to(dtype)

        given = {"loss_fn": loss_fn, "microbatches": 2, "max_norm": 1.0, "quiet": True}
        model = Transformer(S).bfloat16()
        training = parallelize(model, strategy, device="cpu", example=example, **given)
        with _Agreeing() as mode:
            loss, _ = training.step([make_batch(S, 1, at) for at in training.own], 0)
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
def test_norms_of_missing_gradients(rank: int) -> None:
    """A rank whose part of a model got no gradient adds up the same sums."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6.0).view(3, 2)
    parts = [nn.Parameter(distribute_tensor(whole, mesh, [place])) for place in PLACES]
    parts[0].grad = parts[0].detach()
    if rank == 0:
        parts[1].grad = parts[1].detach()
    with _Agreeing() as mode:
        norm = grad_norm(parts)
    assert mode.compared == 2  # which gradients are parts, and the squares
    wanted = whole.square().sum() + whole[:, 0].square().sum()
    torch.testing.assert_close(norm, wanted.sqrt())


PLACES = (Replicate(), Shard(1))


@on(2)
def test_norms_of_parts_that_a_rank_lacks(rank: int) -> None:
    """After `no_sync`, gradients are parts; a rank may have none, or a whole one."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6.0).view(3, 2)
    for other in (None, Replicate()):
        parameter = nn.Parameter(distribute_tensor(whole, mesh, [Replicate()]))
        place = Partial() if rank else other
        if place is not None:
            parameter.grad = DTensor.from_local(whole + rank, mesh, [place], run_check=False)
        with _Agreeing() as mode:
            norm = grad_norm([parameter])
        assert mode.compared == 2
        wanted = whole + 1 if other is None else 2 * whole + 1
        torch.testing.assert_close(norm, wanted.norm())


# --- Rings ----------------------------------------------------------------------------------------


@on(2)
def test_a_mask_of_a_slice(rank: int) -> None:
    """All processes refuse it; else one would wait for another that has raised an error."""
    x, layout = torch.randn(1, 1, 16, 8), BlockLayout.dense(32, block=16)
    mask = torch.zeros(1, 16, dtype=torch.bool)
    with pytest.raises(ArgumentError, match=r"key_padding_mask is .*; accepted: .*32"):
        ring_attention(x, x, x, layout, key_padding_mask=mask)


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
