"""Pipelines with every schedule and dropout: losses and gradients equal one process's."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchweld
from processes import on
from seams import splits_backwards
from sleeper import Sleeper
from torchweld.distributed import LayerSeeds
from torchweld.distributed.pipelines import stages
from torchweld.errors import ArgumentError
from torchweld.fusion import Weld
from torchweld.sparse import BlockLayout

WIDTH, HEADS, LENGTH, WORDS, ROWS, MICROBATCHES, LAYERS = 32, 2, 32, 50, 2, 4, 4
SCHEDULES = get_args(stages.Name)
_SPLIT = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")


class _Layer(nn.Module):
    """A block of our modules, with a residual around each and dropout in each."""

    def __init__(self, number: int) -> None:
        super().__init__()
        layout = BlockLayout.longformer(LENGTH, block=16, attention="unidirectional")
        self.norm1, self.qkv = torchweld.nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.attention = torchweld.nn.BlockSparseAttention(layout, 0.2, causal=True)
        self.norm2 = torchweld.nn.DropoutAddLayerNorm(WIDTH, p=0.2, return_residual=True)
        self.mlp = (torchweld.nn.MLP, torchweld.nn.GatedMLP)[number % 2](WIDTH, 48)
        self.add, self.norm3 = torchweld.nn.BiasDropoutAdd(0.2), torchweld.nn.RMSNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        mixed = self.attention(*heads.unbind(2)).transpose(1, 2).flatten(2)
        y, x = self.norm2(mixed, x)
        return self.norm3(self.add(self.mlp(y), None, x))


def _blocks() -> tuple[list[nn.Module], LayerSeeds]:
    torch.manual_seed(0)
    layers = [_Layer(i) for i in range(LAYERS)]
    blocks = [nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS)]
    return blocks, LayerSeeds((str(i), block) for i, block in enumerate(blocks))


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _Backwards(TorchDispatchMode):
    """Counts calls of our backward kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_backward" in str(func) and func.namespace == "torchweld":
            self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _one_process(
    tokens: torch.Tensor, last_first: bool
) -> tuple[list[torch.Tensor], nn.Sequential, Counter[str]]:
    blocks, seeds = _blocks()
    whole = nn.Sequential(*blocks)
    seeds.begin(0)
    with _Backwards() as counted:
        losses = [_loss(whole(some), some) for some in tokens.chunk(MICROBATCHES)]
        for loss in reversed(losses) if last_first else losses:
            (loss / MICROBATCHES).backward()
    return losses, whole, counted.calls


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(s, marks=splits_backwards) if s in _SPLIT else s for s in SCHEDULES],
)
@on(2)
def test_a_schedule_equals_one_process(rank: int, schedule: stages.Name) -> None:
    """Bit by bit: sums over microbatches are made in the schedule's order."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(WORDS, (MICROBATCHES * ROWS, LENGTH), generator=generator)
    expected, whole, calls = _one_process(tokens, last_first=schedule == "loopedbfs")
    blocks, seeds = _blocks()
    costs = [1.0] * len(blocks)
    pipe = stages.pipeline(blocks, schedule, MICROBATCHES, _loss, (tokens[:ROWS],), costs=costs)
    seeds.begin(0)
    losses: list[torch.Tensor] = []
    with _Backwards() as counted:
        inputs = (tokens,) if pipe.is_first else ()
        pipe.schedule.step(*inputs, target=tokens if pipe.is_last else None, losses=losses)
    assert losses == (expected if pipe.is_last else [])
    grads = dict(whole.named_parameters())
    mine = [pair for part in pipe.parts for pair in part.named_parameters()]
    assert len(mine) > 10
    for name, parameter in mine:
        assert torch.equal(parameter.grad, grads[name].grad), name
    # A backward called twice, for inputs and for weights, computes once.
    total: list[Any] = [None, None]
    torch.distributed.all_gather_object(total, counted.calls)
    assert total[0] + total[1] == calls


@on(2)
def test_a_fused_model_is_divided(rank: int) -> None:
    """Costs are measured; the stages have the layers that fuse() made from torch's."""

    def blocks() -> list[nn.Module]:
        torch.manual_seed(0)
        layer = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 64, "batch_first": True}
        layers = [nn.TransformerEncoderLayer(**layer, dropout=0.0) for _ in range(4)]
        return [*torchweld.fuse(nn.Sequential(*layers))]

    x = torch.randn(MICROBATCHES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))

    def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (y - target).square().mean()

    whole = nn.Sequential(*blocks())
    assert any(isinstance(module, Weld) for module in whole.modules())
    for some in x.split(1):
        (loss_of(whole(some), some) / MICROBATCHES).backward()
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    pipe = stages.pipeline(blocks(), "1f1b", MICROBATCHES, loss_of, (x[:1],))
    assert any(isinstance(module, Weld) for module in pipe.parts.modules())
    pipe.schedule.step(*((x,) if pipe.is_first else ()), target=x if pipe.is_last else None)
    for part in pipe.parts:
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter.grad, wanted[name]), name


# --- Cuts -----------------------------------------------------------------------------------------

costs_ = st.lists(st.floats(0, 100, width=16), min_size=1, max_size=9)


@given(costs=costs_, data=st.data())
def test_cuts_are_the_best_of_all(costs: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(costs)))
    cuts = stages.balance(costs, count)
    assert [i for cut in cuts for i in cut] == [*range(len(costs))]
    assert all(cuts)
    assert len(cuts) == count

    def worst(bounds: Any) -> float:
        ends = itertools.pairwise((0, *bounds, len(costs)))
        return max(sum(costs[a:b]) for a, b in ends)

    best = min(map(worst, itertools.combinations(range(1, len(costs)), count - 1)))
    assert worst([cut.stop for cut in cuts[:-1]]) == pytest.approx(best)


class _Slow(nn.Module):
    """A block that can sleep, and that uses dropout."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.sleeper, self.drop = Sleeper(seconds), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.drop(self.sleeper(x)) * scale


class _Layers(nn.Module):
    def __init__(self, *seconds: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Slow(each) for each in seconds])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=2.0)
        return x


def test_measured_costs_find_the_dear_block() -> None:
    """With 90 ms of sleep; measuring has no side effects, in a list of blocks or inside a model."""
    model, x = _Layers(0.0, 0.03, 0.0), torch.randn(2, 4)
    state = torch.get_rng_state()
    costs, _ = stages._measure_chain([*model.layers], (x,), 4)
    assert stages.balance(costs, 3) == (range(1), range(1, 2), range(2, 3))
    assert costs[1] == pytest.approx(0.09, rel=0.5)
    cuts = stages.layer_cuts(_Layers(0.0, 0.0, 0.03), "layers", 2, (x,))
    assert cuts == (range(2), range(2, 3))
    cuts = stages.layer_cuts(model, "layers", 2, (x,), costs=lambda layer: layer.sleeper.seconds)
    assert cuts == (range(1), range(1, 3))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_placement_is_a_partition(schedule: stages.Name) -> None:
    placed = [stages.assign_stages(schedule, rank, 4) for rank in range(4)]
    each = len(placed[0])
    assert sorted(itertools.chain(*placed)) == [*range(4 * each)]
    if schedule in ("zbvzerobubble", "dualpipev"):
        assert placed[0] == (0, 7)


def test_errors() -> None:
    with pytest.raises(ArgumentError, match="schedule"):
        stages.assign_stages("zb", 0, 2)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="per_rank"):
        stages.assign_stages("dualpipev", 0, 2, per_rank=3)
    with pytest.raises(ArgumentError, match="layers"):
        stages.layer_cuts(_Layers(0.0), "layers", 2, (torch.ones(2, 4),))


@on(2)
def test_given_cuts(rank: int) -> None:
    """Given cuts, of a plan for instance, are not balanced by costs."""
    blocks, seeds = _blocks()
    seeds.begin(0, 0)
    x = torch.zeros((ROWS, LENGTH), dtype=torch.int64)
    cuts = range(1), range(1, len(blocks))
    made = stages.pipeline(blocks, "1f1b", MICROBATCHES, _loss, (x,), cuts=cuts)
    assert made.cuts == cuts
    assert [*made.parts[0]] == [str(i) for i in cuts[rank]]
    for wrong in ([range(2), range(1, 6)], [range(6)], [range(0), range(6)], [range(5), range(6)]):
        with pytest.raises(ArgumentError, match="2 ranges, one after another, of 6 blocks"):
            stages.pipeline(blocks, "1f1b", MICROBATCHES, _loss, (x,), cuts=wrong)
