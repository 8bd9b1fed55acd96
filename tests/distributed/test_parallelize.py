"""parallelize(): combinations equal one process, and what cannot be is refused by its message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import declared
import torchweld
from comparing import has_neighbours
from processes import on, processes
from torchweld.distributed import parallelize
from torchweld.errors import ArgumentError
from transformer import Settings

S = Settings(vocabulary=64, length=32, width=32, heads=4, layers=4, dropout=0.2)
MICROBATCHES, ROWS, STEPS = 4, 2, 2


def _write(rank: int, config: Any, path: str) -> None:
    training = declared.start(S, config, ROWS, MICROBATCHES)
    norms = [declared.take_step(training, S, step, ROWS)[1] for step in range(STEPS)]
    training.save(f"{path}-saved", STEPS)
    if rank == 0:
        torch.save(norms, path)


def _resume(rank: int, config: Any, path: str) -> None:
    training = declared.start(S, config, ROWS, MICROBATCHES)
    declared.take_step(training, S, 5, ROWS)
    assert training.load(f"{path}-saved") == STEPS
    norm = declared.take_step(training, S, STEPS, ROWS)[1]
    if rank == 0:
        torch.save([norm], path)


def _run(count: int, scenario: Callable[..., None], config: Any, path: Path) -> list[float]:
    with processes(count) as some:
        some.run(None, scenario, config, str(path))
    return torch.load(path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The norms of one process's gradients, with its first step after a checkpoint."""
    path = tmp_path_factory.mktemp("alone") / "norms"
    return {"steps": _run(1, _write, {}, path), "next": _run(1, _resume, {}, path)}


# test_stack.py has other declarations, test_train.py and test_saves.py other checkpoints.
CASES: list[Any] = [
    (2, {"data": {"kind": "zero2", "shard": 1}, "offload": "optimizer"}),
    pytest.param(2, {"pipeline": {"size": 2, "schedule": "zbv"}}, marks=has_neighbours),
    (4, {"pipeline": 2, "tensor": {"size": 2, "sequence": True}}),
    (4, {"data": {"kind": "zero3", "shard": 2}}),
]


@pytest.mark.parametrize(("count", "config"), CASES, ids=str)
def test_a_declaration_trains_as_one_process(
    count: int, config: Any, alone: dict[str, list[float]], tmp_path: Path
) -> None:
    """Two steps, and a third one after a checkpoint is loaded into another run."""
    path = tmp_path / "norms"
    assert _run(count, _write, config, path) == pytest.approx(alone["steps"], rel=1e-5)
    assert _run(count, _resume, config, path) == pytest.approx(alone["next"], rel=1e-5)


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
    with pytest.raises(ArgumentError, match="batch is 1 microbatches; accepted: 2"):
        training.step(pairs[:1], 0)


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
        with pytest.raises(ArgumentError, match=r"gradient of second.weight, second.bias in"):
            training.step(batch, 0)
        assert all(map(torch.equal, before, training.model.parameters()))
        # The other process waits for the exchange.
        numbers = torch.zeros(sum(p.numel() for p in before))
        torch.distributed.all_reduce(numbers, group=training.mesh.get_group("data"))
    else:
        training.step(batch, 0)
