"""fuse() on mixtures of experts, and on forwards that look like one and are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchweld
from torchweld import numerics
from words import list_ops

pytestmark = pytest.mark.usefixtures("own_graphs")

WIDTH, HIDDEN, EXPERTS, TOP = 16, 8, 4, 2


class Mixture(nn.Module):
    """A router and its experts by grouped products, as transformers writes them.

    Methods are what mutants replace.
    """

    batched = biases = False

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.gate_up = nn.Parameter(0.3 * torch.randn(EXPERTS, 2 * HIDDEN, WIDTH))
        self.down = nn.Parameter(0.3 * torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.gate_up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN))
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.total = nn.Buffer(torch.ones(()))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, indices = self.router(x).softmax(-1).topk(TOP)
        weights /= weights.sum(-1, keepdim=True)
        return weights, indices

    def act(self, z: torch.Tensor) -> torch.Tensor:
        gate, up = z.chunk(2, -1)
        return functional.silu(gate) * up

    def tokens(self, order: torch.Tensor) -> torch.Tensor:
        return order // TOP

    def count(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)

    def end(self, counts: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(counts, 0, dtype=torch.int32)

    def scale(self, weights: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return weights[order]

    def places(self, order: torch.Tensor) -> torch.Tensor:
        places = torch.empty_like(order)
        places[order] = torch.arange(order.size(0), device=order.device)
        return places

    def finish(self, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return rows.view(x.shape[0], TOP, WIDTH).sum(dim=1).to(x.dtype)

    def add(self, z: torch.Tensor, bias: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return z.add_(bias[ids]) if self.biases else z

    def grouped(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sorted_ids, order = torch.sort(ids)
        ends = self.end(self.count(sorted_ids))
        z = functional.grouped_mm(x[self.tokens(order)], self.gate_up.transpose(-2, -1), offs=ends)
        z = self.act(self.add(z, self.gate_up_bias, sorted_ids))
        z = functional.grouped_mm(z, self.down.transpose(-2, -1), offs=ends)
        z = self.add(z, self.down_bias, sorted_ids)
        return (z * self.scale(weights, order).unsqueeze(-1))[self.places(order)]

    def by_rows(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        z = torch.bmm(self.gate_up[ids], x.repeat_interleave(TOP, dim=0).unsqueeze(-1)).squeeze(-1)
        z = self.act(self.add(z, self.gate_up_bias, ids))
        z = torch.bmm(self.down[ids], z.unsqueeze(-1)).squeeze(-1)
        return self.add(z, self.down_bias, ids) * weights.unsqueeze(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(0, -2)
        weights, indices = self.route(x)
        run = self.by_rows if self.batched else self.grouped
        return self.finish(run(x, indices.reshape(-1), weights.reshape(-1)), x)


def _with(**methods: Any) -> Callable[[], Mixture]:
    return type("Mutant", (Mixture,), methods)


def _clamp(z: torch.Tensor, low: float = -0.5, offset: float = 0.0) -> torch.Tensor:
    gate, up = z[..., ::2], z[..., 1::2]
    gate, up = gate.clamp(max=0.5), up.clamp(min=low, max=0.5)
    return (up + offset if offset else up) * (gate * torch.sigmoid(gate * 1.702))


EXACT: dict[str, Callable[[], Mixture]] = {
    "grouped": Mixture,
    "grouped, with biases": _with(biases=True),
    "by rows": _with(batched=True),
    "by rows, with biases": _with(batched=True, biases=True),
    "limits": _with(act=lambda self, z: _clamp(z)),
    "limits and an offset": _with(act=lambda self, z: _clamp(z, offset=1.0)),
}


def _write_again(self: Any, order: torch.Tensor) -> torch.Tensor:
    places = Mixture.places(self, order)
    places[:2] = places[:2].flip(0)
    return places


def _write_before(self: Any, order: torch.Tensor) -> torch.Tensor:
    places = torch.zeros_like(order)
    seen = places.clone()
    places[order] = torch.arange(order.size(0))
    return seen


def _write_to_an_alias(self: Any, order: torch.Tensor) -> torch.Tensor:
    places = torch.empty_like(order)
    other = places.view(-1)
    places[order] = torch.arange(order.size(0))
    other[:3] = 0
    return places


def _write_to_the_input(self: Any, z: torch.Tensor) -> torch.Tensor:
    self.total.add_(1.0)
    return Mixture.act(self, z) * self.total


def _keep(self: Any, z: torch.Tensor) -> torch.Tensor:
    self.seen = Mixture.act(self, z)
    return self.seen


def _finish_with_kept(self: Any, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return Mixture.finish(self, rows, x) + self.seen.sum()


MUTANTS: dict[str, Callable[[], Mixture]] = {
    "a factor in the activation": _with(act=lambda self, z: Mixture.act(self, z) * 0.5),
    "halves exchanged": _with(act=lambda self, z: Mixture.act(self, z.roll(HIDDEN, -1))),
    "another lower limit": _with(act=lambda self, z: _clamp(z, low=-0.25)),
    "noise": _with(act=lambda self, z: Mixture.act(self, z) + torch.randn_like(z[:, :HIDDEN])),
    "tokens in another order": _with(tokens=lambda self, order: order % (len(order) // TOP)),
    "an expert less": _with(
        count=lambda self, ids: torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS)
    ),
    "ends of other experts": _with(end=lambda self, counts: Mixture.end(self, counts.flip(0))),
    "weights in another order": _with(scale=lambda self, weights, order: weights),
    "places written again": _with(places=_write_again),
    "places read before they are written": _with(places=_write_before),
    "places written by an alias": _with(places=_write_to_an_alias),
    "a buffer written within": _with(act=_write_to_the_input),
    "the order in place of places": _with(places=lambda self, order: order),
    "a mean": _with(
        finish=lambda self, rows, x: rows.view(x.shape[0], TOP, WIDTH).mean(dim=1),
    ),
    "a sum over tokens": _with(
        finish=lambda self, rows, x: rows.view(TOP, x.shape[0], WIDTH).sum(dim=0),
    ),
    "a reader of inner values": _with(act=_keep, finish=_finish_with_kept),
    "biases of the next expert": _with(
        biases=True,
        add=lambda self, z, bias, ids: z.add_(bias[(ids + 1) % EXPERTS]),
    ),
    "a bias added twice": _with(
        biases=True, add=lambda self, z, bias, ids: z.add_(bias[ids]).add_(bias[ids])
    ),
    "by rows, with a factor": _with(batched=True, act=lambda self, z: Mixture.act(self, z) * 2),
}


def _step(model: Any, rows: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    x = torch.randn(2, rows, WIDTH, generator=torch.Generator().manual_seed(rows), dtype=dtype)
    x.requires_grad_()
    y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in (x, *model.parameters()) if p.grad is not None)]


def _compare(make: Callable[[], Mixture]) -> Any:
    torch.manual_seed(0)
    want = make()
    got = torchweld.fuse(copy.deepcopy(want))
    for rows in (6, 9, 13, 6):
        for a, b in zip(_step(got, rows), _step(want, rows), strict=True):
            largest = b.abs().max().clamp(min=1)
            torch.testing.assert_close(a / largest, b / largest, **numerics.SUMMED)
    return got


@pytest.mark.parametrize("name", EXACT)
def test_experts_are_one_op(name: str) -> None:
    assert set(list_ops(_compare(EXACT[name]))) == {"experts_mlp"}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_forward_that_is_not_experts(name: str) -> None:
    assert "experts_mlp" not in list_ops(_compare(MUTANTS[name]))


def _by_ranges(self: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
    """A product for each expert's range of rows: sizes that are data."""
    sorted_ids, order = torch.sort(ids)
    counts = torch.histc(sorted_ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).long()
    ends = torch.cat((counts.new_zeros(1), counts.cumsum(0)))

    def multiply(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        out = rows.new_zeros(rows.size(0), matrices.size(1))
        for expert in range(EXPERTS):
            start, end = ends[expert], ends[expert + 1]
            out[start:end] = torch.matmul(rows[start:end], matrices[expert].mT)
        return out

    z = multiply(self.act(multiply(x[self.tokens(order)], self.gate_up)), self.down)
    return (z * weights[order].unsqueeze(-1))[self.places(order)]


def test_sizes_that_are_data_keep_no_weld_away() -> None:
    """A size of such a view was asked whether it is zero, and the whole graph was not read."""
    assert set(list_ops(_compare(_with(grouped=_by_ranges)))) == {"gated_act"}
