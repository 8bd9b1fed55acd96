"""fuse() where a forward writes to a tensor in place."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchweld
from torchweld import numerics
from torchweld.fusion.graph import regions
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Record, Ref
from words import list_ops

pytestmark = pytest.mark.usefixtures("own_graphs")

WIDTH = 16


class Part(nn.Module):
    """A norm of a linear layer's result, and a way to call them."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.call = call
        self.table = nn.Buffer(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, x)


def _write_result(part: Any, x: torch.Tensor) -> torch.Tensor:
    y = part.norm(part.linear(x))
    y *= part.table
    return y


def _write_result_by_index(part: Any, x: torch.Tensor) -> torch.Tensor:
    y = part.norm(part.linear(x))
    y[:, 0] = 2.0
    return y + part.table


def _write_input_before(part: Any, x: torch.Tensor) -> torch.Tensor:
    z = part.linear(x)
    z.mul_(2.0)
    return part.norm(z)


def _write_input_by_a_view(part: Any, x: torch.Tensor) -> torch.Tensor:
    z = part.linear(x)
    z[:, :2].mul_(3.0)
    return part.norm(z)


# Of these the norm is welded.
WELDED = [_write_result, _write_result_by_index, _write_input_before, _write_input_by_a_view]


def _write_between(part: Any, x: torch.Tensor) -> torch.Tensor:
    """By hand: the mean is that of the tensor before the write."""
    z = part.linear(x).detach().clone()
    mean = z.mean(-1, keepdim=True)
    square = (z - mean).pow(2).mean(-1, keepdim=True)
    z.mul_(2.0)
    return part.norm.weight * ((z - mean) / torch.sqrt(square + 1e-5)) + part.norm.bias


def _run(part: Any, rows: int) -> list[torch.Tensor]:
    x = torch.randn(rows, 3, WIDTH, generator=torch.Generator().manual_seed(rows))
    part.zero_grad()
    y = part(x.requires_grad_())
    y.pow(3).sum().backward()
    return [y.detach(), *(p.grad.clone() for p in (x, *part.parameters()) if p.grad is not None)]


@pytest.mark.parametrize("call", [*WELDED, _write_between])
def test_a_write(call: Callable[..., torch.Tensor]) -> None:
    """A value is that of its time. FlauBERT multiplies results of norms in place, and lost them."""
    torch.manual_seed(0)
    want = Part(call)
    got = torchweld.fuse(copy.deepcopy(want))
    for rows in (4, 5, 7):
        for a, b in zip(_run(got, rows), _run(want, rows), strict=True):
            largest = b.abs().max()
            torch.testing.assert_close(a / largest, b / largest, **numerics.SUMMED)
    assert ("layer_norm" in list_ops(got)) == (call in WELDED)


def test_torchs_rms_norm() -> None:
    """On the CPU it adds eps in place to a mean that it made, so that none was known."""
    torch.manual_seed(0)
    want = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH, 1e-3, False))
    got = torchweld.fuse(copy.deepcopy(want))
    for a, b in zip(_run(got, 4), _run(want, 4), strict=True):
        largest = b.abs().max()
        torch.testing.assert_close(a / largest, b / largest, **numerics.SUMMED)
    assert list_ops(got) == ["rms_norm", "rms_norm"]


class Noisy(nn.Module):
    """A sum with noise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


def _add_noise(x: Any) -> Any:
    return x + torch.rand_like(x)


def _find_noise(record: Record, at: int) -> Iterator[Proposal]:
    step = record.steps[at]
    if step.func is torch.ops.aten.add.Tensor and isinstance(step.args[0], Ref):
        yield Proposal("noise", [step.args[0].at], [step.outs[0]], _add_noise, torch.zeros_like)


def test_a_pattern_of_a_users_that_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its definition is what the model runs, but another function would draw other numbers."""
    monkeypatch.setattr(regions, "FINDERS", [_find_noise])
    model, x = torchweld.fuse(Noisy()), torch.ones(3)
    assert model(x).min() > 0
    (row,) = torchweld.explain_fusion(model)
    assert "draws random numbers" in row.reason


class Writing(nn.Module):
    """Doubles its input in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2).sigmoid() + x


def _double(x: Any) -> Any:
    return x.mul_(2).sigmoid()


def _find_double(record: Record, at: int) -> Iterator[Proposal]:
    step = record.steps[at]
    if step.func is torch.ops.aten.sigmoid.default and isinstance(step.args[0], Ref):
        first = record.steps[record.made_by[step.args[0].at]].args[0].at
        yield Proposal("double", [first], [step.outs[0]], _double, lambda x: (x * 2).sigmoid())


def test_a_pattern_of_a_users_that_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op that would stand there writes nothing, and the model goes on with what is written."""
    monkeypatch.setattr(regions, "FINDERS", [_find_double])
    model, x = torchweld.fuse(Writing()), torch.ones(3)
    torch.testing.assert_close(model(x), Writing()(torch.ones(3)), **numerics.ROUNDED)
    assert x.tolist() == [2.0] * 3
    (row,) = torchweld.explain_fusion(model)
    assert "writes in place" in row.reason


class Less(nn.Module):
    """A difference."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x - y).sigmoid()


def _find_less(record: Record, at: int) -> Iterator[Proposal]:
    step = record.steps[at]
    if step.func is torch.ops.aten.sub.Tensor:
        inputs = [each.at for each in step.args][::-1]
        yield Proposal("less", inputs, [step.outs[0]], torch.sub, torch.sub)


def test_a_pattern_of_a_users_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two arguments only those of sums and products change places."""
    monkeypatch.setattr(regions, "FINDERS", [_find_less])
    model, given = torchweld.fuse(Less()), (torch.ones(3), torch.zeros(3))
    torch.testing.assert_close(model(*given), Less()(*given), **numerics.SAME)
    (row,) = torchweld.explain_fusion(model)
    assert not row.welded


class Largest(nn.Module):
    """One of two results of an operation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.aminmax(dim=-1).max * 2


def _find_smallest(record: Record, at: int) -> Iterator[Proposal]:
    step = record.steps[at]
    if step.func is torch.ops.aten.aminmax.default:
        (x, *_), (_, largest) = step.args, step.outs

        def find(x: Any) -> Any:
            return x.aminmax(dim=-1).min

        yield Proposal("smallest", [x.at], [largest], find, find)


def test_a_pattern_of_a_users_of_another_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation with two results gives the one that was asked for."""
    monkeypatch.setattr(regions, "FINDERS", [_find_smallest])
    model, x = torchweld.fuse(Largest()), torch.arange(6.0).view(2, 3)
    assert model(x).tolist() == [4, 10]
    (row,) = torchweld.explain_fusion(model)
    assert not row.welded


def _find_wrong(record: Record, at: int) -> Iterator[Proposal]:
    step = record.steps[at]
    if step.func is torch.ops.aten.sub.Tensor:
        x, y = (each.at for each in step.args)
        yield Proposal("wrong", [x, y], [step.outs[0]], lambda x, y: x.transpose(0, 5), torch.sub)


def test_a_proposal_that_fails_is_not_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch logs an error of each operation that fails on fake tensors: refusals looked like it."""
    monkeypatch.setattr(regions, "FINDERS", [_find_wrong])
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    model, given = torchweld.fuse(Less()), (torch.ones(3), torch.zeros(3))
    logged: list[logging.LogRecord] = []
    watch = logging.Handler(logging.ERROR)
    watch.emit = logged.append  # type: ignore[assignment, method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(watch)
    try:
        torch.testing.assert_close(model(*given), Less()(*given), **numerics.SAME)
    finally:
        logger.removeHandler(watch)
    assert not logged
    (row,) = torchweld.explain_fusion(model)
    assert "Dimension out of range" in row.reason


class Between(nn.Module):
    """Writes to a gate after it was read, and before the product."""

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate = gate + 1
        opened = nn.functional.silu(gate)
        gate.zero_()
        return opened * up + gate


def test_a_write_between_the_steps_of_an_op() -> None:
    """The op would run where its last step stood, and read what was written since."""
    got, given = torchweld.fuse(Between()), (torch.randn(3, 8), torch.randn(3, 8))
    with torch.no_grad():
        torch.testing.assert_close(got(*given), Between()(*given), **numerics.SAME)
    (row,) = torchweld.explain_fusion(got)
    assert "writes to one of its tensors in place" in row.reason
