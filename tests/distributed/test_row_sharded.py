"""RowSharded as an Optimizer, and parameters of size zero under each of ZeRO's recipes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_zero import WIDTH, _batch, _divide, _half, _model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from comparing import whole_of
from processes import on
from torchweld import optim
from torchweld.distributed import checkpoint
from torchweld.distributed.data import zero
from torchweld.errors import ArgumentError

SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=9),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [2],
    ),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "LinearScaling": lambda o: optim.lr_scheduler.LinearScaling(o, 64, 32, warmup_steps=2),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@on(2)
def test_rows_under_a_scheduler(rank: int, name: str, tmp_path: Path) -> None:
    """A scheduler refused RowSharded, which was no Optimizer: tests only called step().

    The rates, the steps and what is resumed are those under DDP, bit for bit.
    """

    def start(strategy: str) -> tuple[Any, ...]:
        model = _model({})
        trained, optimizer = _divide(strategy, model, optim.AdamW, lr=1e-2)
        assert isinstance(optimizer, torch.optim.Optimizer)
        return model, trained, optimizer, SCHEDULERS[name](optimizer)

    def run(started: tuple[Any, ...], steps: range) -> list[float]:
        model, trained, optimizer, scheduler = started
        rates = []
        for step in steps:
            trained(_batch(model, step)[_half(rank)]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*((1.0,) if name == "ReduceLROnPlateau" else ()))
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    plain, rows = start("ddp"), start("zero1_rows")
    assert run(plain, range(3)) == run(rows, range(3))
    checkpoint.save(tmp_path, rows[1], rows[2], 3)
    again = start("zero1_rows")
    checkpoint.load(tmp_path, again[1], again[2])
    again[3].load_state_dict(rows[3].state_dict())
    wanted = run(plain, range(3, 5))
    for each in (rows, again):
        assert run(each, range(3, 5)) == wanted
        assert all(map(torch.equal, plain[0].parameters(), each[0].parameters()))


@on(2)
def test_rows_are_an_optimizer(rank: int) -> None:
    """Groups, states, defaults and hooks are the inner optimizer's; a closure is called."""
    model = _model({})
    given = [*model.parameters()]
    rows: Any = zero.RowSharded(given[:2], optim.AdamW, init_device_mesh("cpu", (2,)))
    rows.add_param_group({"params": given[2:], "lr": 1e-2})
    inner, called = rows.optimizer, []
    assert rows.param_groups is inner.param_groups
    assert [group["lr"] for group in rows.param_groups] == [1e-3, 1e-2]
    assert (rows.defaults, rows.state) == (inner.defaults, inner.state)
    hook = rows.register_step_post_hook(lambda *_: called.append("hook"))

    def closure() -> torch.Tensor:
        rows.zero_grad(set_to_none=False)
        loss = model(torch.ones(2, WIDTH)).square().mean()
        loss.backward()
        return loss

    before = [p.detach().clone() for p in given]
    assert rows.step(closure) > 0
    hook.remove()
    assert called == ["hook"]
    assert not any(map(torch.equal, given, before))
    saved = copy.deepcopy(rows.state_dict())
    rows.step()
    rows.load_state_dict(saved)
    assert all(state["step"] == 1 for state in rows.state.values())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for call in (lambda: scaler.step(rows), lambda: rows.step(scaler)):
        with pytest.raises(ArgumentError, match=r"scaler is not named; accepted: step\(scaler=sc"):
            call()
    with pytest.raises(ArgumentError, match="self is copied or pickled"):
        copy.deepcopy(rows)
    rows.zero_grad()
    rows.step(scaler=None)


class _WithEmpty(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.layers[0].register_parameter("none", nn.Parameter(torch.zeros(shape)))
        self.empty = nn.Parameter(torch.zeros(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + self.empty.sum() + self.layers[0].none.sum()


def _draw(number: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
@pytest.mark.parametrize("strategy", ["ddp", "zero1_rows", "zero2", "zero3"])
@on(2)
def test_a_parameter_of_size_zero(
    rank: int, strategy: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """FSDP2 raised "_chunk_cat expects non-empty tensor": every model here had elements."""

    def start() -> tuple[Any, Any, Any]:
        torch.manual_seed(0)
        model = _WithEmpty(shape)
        return model, *_divide(strategy, model, optim.AdamW, lr=1e-2, max_grad_norm=0.1)

    def step(trained: Any, optimizer: Any, number: int) -> None:
        x = _draw(number)
        trained(x[4 * rank : 4 * rank + 4]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    one = _WithEmpty(shape)
    model, trained, optimizer = start()
    one.load_state_dict({name: whole_of(p.detach()) for name, p in model.named_parameters()})
    single = optim.AdamW(one.parameters(), lr=1e-2, max_grad_norm=0.1)
    for number in range(2):
        step(trained, optimizer, number)
        one(_draw(number)).square().mean().backward()
        single.step()
        single.zero_grad()
    checkpoint.save(tmp_path, trained, optimizer, 2)
    found = [whole_of(p.detach()).clone() for p in model.parameters()]
    torch.testing.assert_close(found, [p.detach() for p in one.parameters()], rtol=0, atol=1e-5)
    model, trained, optimizer = start()
    assert checkpoint.load(tmp_path, trained, optimizer) == 2
    for p, wanted in zip(model.parameters(), found, strict=True):
        assert torch.equal(whole_of(p.detach()), wanted)
    step(trained, optimizer, 2)
