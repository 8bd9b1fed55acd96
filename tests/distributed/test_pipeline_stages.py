"""Pipelines of every schedule equal one process; their seams, versions of weights, and bubbles."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import stage as torch_stage
from torch.func import functional_call

import declared
import torchweld
from comparing import assert_grads, grads_of, step_stages
from optimizers import threads
from processes import on
from refusing import refuses
from seams import Counting, splits_backwards
from sleeper import Sleeper
from stack_seams import keep
from torchweld import numerics, optim
from torchweld.distributed import LayerSeeds, grad_norm
from torchweld.distributed.pipelines import stages
from torchweld.distributed.pipelines.stashing.stage import count_versions
from torchweld.distributed.pipelines.timeline import Action, Timeline, estimate_bubble, record
from torchweld.distributed.train.parallel import STASHING
from torchweld.errors import ArgumentError, CollectiveError
from torchweld.fusion.weld import Weld
from transformer import PreNorm, Settings, Transformer, compute_loss, make_batch
from words import list_ops

WIDTH, HEADS, LENGTH, WORDS, ROWS, MICROBATCHES, LAYERS = 32, 2, 32, 50, 2, 4, 4
SCHEDULES = get_args(stages.Name)
_SPLIT = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")
EACH_SCHEDULE = pytest.mark.parametrize(
    "schedule",
    [pytest.param(s, marks=splits_backwards) if s in _SPLIT else s for s in SCHEDULES],
)


def _make_layer(number: int) -> nn.Module:
    """A block of our modules, with dropout in each; the MLPs of some are gated."""
    settings = Settings(length=LENGTH, width=WIDTH, heads=HEADS, dropout=0.2, sparse=True)
    block: Any = PreNorm(settings)
    block.mlp = (torchweld.nn.MLP, torchweld.nn.GatedMLP)[number % 2](WIDTH, 48)
    return nn.Sequential(block, torchweld.nn.RMSNorm(WIDTH))


def _blocks() -> tuple[list[nn.Module], LayerSeeds]:
    torch.manual_seed(0)
    layers = map(_make_layer, range(LAYERS))
    blocks = [nn.Embedding(WORDS, WIDTH), *layers, nn.Linear(WIDTH, WORDS)]
    return blocks, LayerSeeds((str(i), block) for i, block in enumerate(blocks))


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _backwards(counted: Counting) -> Counter[str]:
    """The calls of our backward kernels."""
    names = [n for n in counted.calls if "_backward" in n and hasattr(torch.ops.torchweld, n)]
    return Counter({name: counted.calls[name] for name in names})


def _one_process(
    tokens: torch.Tensor, last_first: bool
) -> tuple[list[torch.Tensor], nn.Sequential, Counter[str]]:
    blocks, seeds = _blocks()
    whole = nn.Sequential(*blocks)
    seeds.begin(0)
    with Counting() as counted:
        losses = [_loss(whole(some), some) for some in tokens.chunk(MICROBATCHES)]
        for loss in reversed(losses) if last_first else losses:
            (loss / MICROBATCHES).backward()
    return losses, whole, _backwards(counted)


@EACH_SCHEDULE
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
    with Counting() as counted:
        step_stages(pipe, tokens, losses=losses)
    assert losses == (expected if pipe.is_last else [])
    assert len([*pipe.parts.parameters()]) > 10
    for part in pipe.parts:
        assert_grads(part, grads_of(whole), **numerics.SAME)
    # A backward called twice, for inputs and for weights, computes once.
    total: list[Any] = [None, None]
    torch.distributed.all_gather_object(total, _backwards(counted))
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
    wanted = grads_of(whole)
    pipe = stages.pipeline(blocks(), "1f1b", MICROBATCHES, loss_of, (x[:1],))
    assert any(isinstance(module, Weld) for module in pipe.parts.modules())
    step_stages(pipe, x)
    for part in pipe.parts:
        assert_grads(part, wanted, **numerics.SAME)
    assert "dropout_add_layer_norm" in list_ops(pipe.parts)


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
    refuses("per_rank", stages.assign_stages, "dualpipev", 0, 2, per_rank=3)
    refuses("layers", stages.layer_cuts, _Layers(0.0), "layers", 2, (torch.ones(2, 4),))


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


# --- Shared parameters, views, and batches of a wrong size ----------------------------------------


_TIED = ("0.weight", "5.weight")


def _tied_blocks() -> list[nn.Module]:
    """An embedding whose weight is the head's, and blocks that end in views."""
    torch.manual_seed(0)
    blocks: list[Any] = [nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)]
    blocks += [torchweld.nn.MLP(WIDTH, 16), nn.Linear(WIDTH, WIDTH)]
    blocks += [torchweld.nn.GatedMLP(WIDTH, 16), nn.Linear(WIDTH, WORDS, bias=False)]
    blocks[-1].weight = blocks[0].weight
    return [block.double() for block in blocks]


def _tokens(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (ROWS * MICROBATCHES, LENGTH), generator=generator)


def _part(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A microbatch's part of the mean. torch's scale_grads would scale earlier batches again."""
    return _loss(y, target) / MICROBATCHES


@EACH_SCHEDULE
@on(2)
def test_a_shared_parameter_and_views(rank: int, schedule: stages.Name) -> None:
    """Two batches are accumulated for each of two steps; the copies stay the same."""
    bubble = "zero bubble" if schedule in _SPLIT else "the other schedules"
    whole = nn.Sequential(*_tied_blocks())
    pipe = stages.pipeline(
        _tied_blocks(),
        schedule,
        MICROBATCHES,
        _part,
        (_tokens(0)[:ROWS],),
        costs=[1.0] * 6,
        scale_grads=False,
    )
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (whole, pipe.parts)]
    for step in range(2):
        for seed in (2 * step, 2 * step + 1):
            tokens = _tokens(seed)
            _loss(whole(tokens), tokens).backward()
            step_stages(pipe, tokens)
        wanted = dict(whole.named_parameters(remove_duplicate=False))
        for part in pipe.parts:
            found = [*part.named_parameters(remove_duplicate=False)]
            for name, p in found:
                torch.testing.assert_close(
                    p.grad, wanted[name].grad, msg=lambda m, n=name: f"{n}: {m}"
                )
            for row, is_tied in (
                ("a tied embedding and head, PP of all schedules", True),
                (f"stages that end in linear layers, PP of {bubble}", False),
            ):
                keep(row, [(p.grad, wanted[n].grad) for n, p in found if (n in _TIED) == is_tied])
        norm = torch.stack([p.grad.norm() for p in whole.parameters()]).norm()
        mine = grad_norm(pipe.parts.parameters(), torch.distributed.group.WORLD)
        torch.testing.assert_close(mine, norm.float())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for part in pipe.parts:
            for name, p in part.named_parameters(remove_duplicate=False):
                torch.testing.assert_close(p, wanted[name])


@splits_backwards
@on(2)
def test_gradients_are_added_in_the_same_order_on_all_devices(rank: int) -> None:
    """torch iterates over a set: its order differs between devices, whose sums may collide."""
    taken: list[list[int]] = []
    original = torch_stage.stage_backward_weight

    def record(weights: Iterator[nn.Parameter], groups: list[Any], *args: Any, **kw: Any) -> Any:
        listed = [*weights]
        numbers = {get_gradient_edge(p).node: i for i, p in enumerate(listed)}
        taken.extend([numbers[node] for node in group["params"]] for group in groups)
        return original(iter(listed), groups, *args, **kw)

    with mock.patch.object(torch_stage, "stage_backward_weight", record):
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4)]
        x = torch.randn(8, LENGTH, WIDTH)
        pipe = stages.pipeline(
            blocks, "zbvzerobubble", 8, nn.functional.mse_loss, (x[:1],), costs=[1.0] * 4
        )
        step_stages(pipe, x)
    assert len(taken) >= 16
    assert all(numbers in ([0, 1], [2, 3]) for numbers in taken), taken


@on(2)
def test_a_batch_that_does_not_divide(rank: int) -> None:
    """Every rank raises an error before anything is sent, and can go on."""
    pipe = stages.pipeline(
        _tied_blocks(), "1f1b", MICROBATCHES, _loss, (_tokens(0)[:ROWS],), costs=[1.0] * 6
    )
    for rows in (7, 4):
        with pytest.raises((ArgumentError, CollectiveError), match="microbatches"):
            step_stages(pipe, _tokens(0)[:rows])
    step_stages(pipe, _tokens(0))


# --- PipeDream and PipeDream-2BW ------------------------------------------------------------------


S = Settings(vocabulary=32, length=16, width=16, heads=2, layers=4, dropout=0.2)
STAGES, IN_STEP, STEPS, BATCH = 4, 8, 2, 4
_ADAM: dict[str, Any] = {"lr": 1e-2}


def _choose_version(rule: str, stage: int, step: int, number: int) -> int:
    """The version of the published update, for a microbatch of a step."""
    if rule == "2bw":
        return max(0, (step * IN_STEP + number) // BATCH - 1)
    delay = STAGES - 1 - (stage if rule == "pipedream" else 0)
    return step * IN_STEP + max(0, number - delay)


def _simulate(rule: str) -> tuple[dict[str, torch.Tensor], list[list[int]]]:
    """Train in one process; return the parameters, and the versions that each stage used."""
    torch.manual_seed(0)
    whole = Transformer(S)
    parts = [copy.deepcopy(whole).stage(number, STAGES) for number in range(STAGES)]
    stage_of = {name: at for at, part in enumerate(parts) for name, _ in part.named_parameters()}
    seeds = LayerSeeds(((f"blocks.{n}", b) for n, b in whole.blocks.items()), 0)
    optimizer = optim.AdamW(whole.parameters(), **_ADAM)
    versions, used = [_copy(whole)], [list[int]() for _ in parts]
    every = BATCH if rule == "2bw" else 1
    for step, number in itertools.product(range(STEPS), range(IN_STEP)):
        if number == 0:
            seeds.begin(step)
        x, targets = make_batch(S, 2, 10 * step + number)
        for at, of_stage in enumerate(used):
            of_stage.append(_choose_version(rule, at, step, number))
        leaves = {name: versions[used[at][-1]][name] for name, at in stage_of.items()}
        compute_loss(functional_call(whole, leaves, (x,)), targets).backward()
        for name, p in whole.named_parameters():
            grad, leaves[name].grad = leaves[name].grad, None
            assert grad is not None
            p.grad = grad if p.grad is None else p.grad + grad
        if (number + 1) % every == 0:
            for p in whole.parameters():
                assert p.grad is not None
                p.grad /= every
            optimizer.step()
            optimizer.zero_grad()
            versions.append(_copy(whole))
    return {name: p.detach() for name, p in whole.named_parameters()}, used


def _copy(part: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone().requires_grad_() for name, p in part.named_parameters()}


def _make(rule: str, **given: Any) -> Any:
    config = {
        "pipeline": {"size": STAGES, "schedule": rule, "accumulate": BATCH},
        "optimizer": {"name": "adamw", **_ADAM},
    }
    return declared.start(S, config, 2, IN_STEP, **given)


@pytest.fixture
def simulated(rule: str, tmp_path: Path) -> Path:
    with threads(1):
        torch.save(_simulate(rule), tmp_path / "simulated.pt")
    return tmp_path / "simulated.pt"


@pytest.mark.parametrize("rule", STASHING)
@on(STAGES, None)
def test_equals_the_published_update(rank: int, rule: str, simulated: Path) -> None:
    """Bitwise, with dropout, over two steps of eight microbatches in four stages."""
    training = _make(rule)
    stashed = training._schedule._stage
    for step in range(STEPS):
        loss, norm = declared.take_step(training, S, step, 2)
        assert loss > 0
        assert math.isnan(norm)
    wanted, used = torch.load(simulated)
    assert training.versions == used[rank]
    for name, p in training.model.named_parameters():
        assert torch.equal(p, wanted[name]), name
    assert stashed.most == count_versions(rule, rank, STAGES, IN_STEP)
    plain = sum(p.nbytes for p in training.model.parameters())
    assert training.memory.parameters == (1 + stashed.most) * plain
    refuses(r"max_norm is 1.0; accepted: None with", _make, rule, max_norm=1.0)


# --- The bubble -----------------------------------------------------------------------------------


UNIT, REPEATS = 0.02, 12


def test_what_is_spent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Idle time is unavoidable; the rest of the waiting is overhead."""
    # Two ranks, one microbatch; the second forward is half a second late, the backward not.
    timeline = Timeline(
        [
            Action(0, 0, 0, "forward", 10.0, 11.0),
            Action(1, 1, 0, "forward", 11.5, 12.5),
            Action(1, 1, 0, "full", 12.5, 14.5),
            Action(0, 0, 0, "full", 14.5, 16.5),
        ]
    )
    spent = timeline.sum_times()
    assert spent[0] == (3.0, 3.5, 0.0)
    assert spent[1] == (3.0, 3.0, 0.5)
    assert timeline.bubble() == pytest.approx(6.5 / 13)
    assert timeline.overhead() == pytest.approx(0.5 / 13)
    timeline.show()
    out = capsys.readouterr().out
    assert "idle 50.0%, by (p-1)/(m+p-1) 50.0%" in out
    pytest.importorskip("matplotlib")
    timeline.draw(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("schedule", "units", "low", "high"),
    [
        ("gpipe", 30, 0.8, 1.2),
        ("1f1b", 30, 0.8, 1.2),
        pytest.param("zbvzerobubble", 27, 0.0, 0.6, marks=splits_backwards),  # it has less
    ],
)
@on(2)
def test_the_bubble_is_the_formulas(
    rank: int, schedule: stages.Name, units: int, low: float, high: float
) -> None:
    """Stages sleep for a known time, so that the schedule is measured and not the machine."""
    expected, ideal = estimate_bubble(2, MICROBATCHES), units * UNIT
    batch = torch.ones(2 * MICROBATCHES, 4)
    pipe = stages.pipeline(
        [Sleeper(UNIT) for _ in range(4)],
        schedule,
        MICROBATCHES,
        lambda y, _: y.square().sum(),
        (batch[:2],),
        costs=[1.0] * 4,
    )
    found: list[Timeline] = []
    # Repeat until other processes hardly disturb a step; the first one makes buffers.
    while len(found) < 2 or (len(found) < REPEATS and min(map(_length, found)) > 1.05 * ideal):
        with record(pipe.schedule) as timeline:
            step_stages(pipe, batch)
        found.append(timeline)
    count = len(pipe.cuts) * MICROBATCHES
    for timeline in found:
        begin, end = timeline.span
        for spent in timeline.sum_times().values():
            assert sum(spent) == pytest.approx(end - begin)
        assert sum(action.kind == "forward" for action in timeline.actions) == count
    assert low * expected <= min(found, key=_length).bubble() <= high * expected


def _length(timeline: Timeline) -> float:
    begin, end = timeline.span
    return end - begin
