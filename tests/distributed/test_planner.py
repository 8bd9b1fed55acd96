"""The planner finds what enumeration without dynamic programming finds, from sizes and models."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from torchweld import functional, nn, optim
from torchweld.commands import cli
from torchweld.distributed import Links, Parallel, Profile, memory_estimate, plan_for
from torchweld.distributed.pipelines.stages import divide
from torchweld.distributed.pipelines.timeline import estimate_bubble
from torchweld.distributed.planner.costs import PROFILES, Choice, Cost, Model, simulate
from torchweld.distributed.planner.search import find_choice, load_profile
from torchweld.distributed.planner.space import SearchSpace
from torchweld.distributed.planner.work import describe_transformer, measure_work
from torchweld.distributed.train.memory import count_activations
from torchweld.errors import ArgumentError
from transformer import Settings, Transformer

SMALL = Profile("small", 1e12, 1e11, 1.0e9, "made up")
AXES: dict[str, Any] = {
    "mode": ("1d",),
    "schedule": ("1f1b", "gpipe"),
    "data": ("ddp", "zero2", "zero3"),
    "checkpoint": ("none", "full"),
    "offload": ("none",),
}
# Devices, sequences of a step, layers, and bytes of a device.
PROBLEMS = [
    *((4, 8, 4, memory) for memory in (1e9, 3e8, 2e8, 1.5e8)),
    *((8, 16, 6, memory) for memory in (1e9, 1.2e8)),
    (6, 12, 5, 2.5e8),
    *((2, 8, 3, memory) for memory in (5e8, 3e8)),
]


def _make(devices: int, batch: int, layers: int, memory: float, **axes: Any) -> SearchSpace:
    work = describe_transformer(layers, 512, 8, 4096, 256)
    # An expensive layer, so that stages differ.
    dear = replace(work.units[2], flops=2.5 * work.units[2].flops)
    work = replace(work, units=(*work.units[:2], dear, *work.units[3:]))
    links = Links(node=4, inside=2e10, between=2e9)
    model = Model(work, replace(SMALL, memory=memory), links, batch)
    return SearchSpace(model, devices, AXES | axes)


def _try_all_cuts(problem: SearchSpace, c: Choice) -> float:
    """The seconds of the best division of all that fit."""
    n, model = len(problem.model.work.units), problem.model
    found = math.inf
    for ends in itertools.combinations(range(1, n), c.pipeline - 1):
        cuts = [range(a, b) for a, b in itertools.pairwise((0, *ends, n))]
        cost = model.estimate(c, cuts)
        if cost.total <= model.profile.memory:
            passes = [f + b for f, b in cost.passes]
            found = min(found, max(passes)) if c.pipeline > 1 else cost.seconds
    return found


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_best_of_all_is_found(problem: Any) -> None:
    """Every choice with every division into stages; the slowest stage decides on a division."""
    made = _make(*problem)
    seconds = []
    for choice in made.list_choices():
        cost, slowest = made.find_cost(choice), _try_all_cuts(made, choice)
        if cost is None:
            assert math.isinf(slowest), choice
            continue
        here = max(f + b for f, b in cost.passes) if choice.pipeline > 1 else cost.seconds
        assert here == pytest.approx(slowest), choice
        assert cost.total <= made.model.profile.memory
        seconds.append(cost.seconds)
    best = find_choice(_make(*problem))
    assert made.find_seconds(best) == min(seconds)
    found = find_choice(_make(*problem), "mcmc")
    assert made.find_seconds(found) <= 1.02 * min(seconds)
    # A sampler of whole choices finds one that fits, and no better one.
    found = find_choice(_make(*problem), "reinforce")
    assert min(seconds) <= made.find_seconds(found) < math.inf


def test_a_schedule_has_the_microbatches_that_parallelize_asks_for() -> None:
    choices = list(_make(8, 8, 6, 1e9, schedule=("1f1b", "zbv")).list_choices())
    pipelines = [c for c in choices if c.pipeline > 1]
    few = [c for c in pipelines if 8 // c.rows // c.replicas < c.pipeline]
    assert {c.schedule for c in pipelines} == {"1f1b", "zbv"}
    assert {c.schedule for c in few} == {"zbv"}


def test_a_division_is_the_best_that_fits() -> None:
    times = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]

    def fits(begin: int, end: int, stage: int) -> bool:
        return end - begin <= 2 + stage

    found = divide(times, 3, fits=fits)
    assert found is not None
    assert [i for cut in found for i in cut] == [*range(7)]
    assert [sum(times[i] for i in cut) for cut in found] == [4.0, 10.0, 11.0]
    assert divide(times, 2, fits=fits) is None


def test_a_model_on_meta_is_measured() -> None:
    """Flops by formula; parameters exactly; saved bytes as a real pass saves them."""
    s = Settings(length=64, width=64, layers=2, dropout=0.1)
    with torch.device("meta"):
        model = Transformer(s)
    example = (torch.zeros((2, 64), dtype=torch.int64),)
    work = measure_work(model, example, lambda _: True)
    assert work.parameters == sum(p.numel() for p in model.parameters())
    tokens = 2 * s.length
    products = 2 * tokens * (2 * 12 * s.width**2 + s.width * s.vocabulary)
    attention = 2 * 2 * 2 * 2 * s.length**2 * s.width
    assert products <= sum(u.flops for u in work.units) <= products + attention
    real = count_activations(Transformer(s), example)
    logits = 4 * tokens * s.vocabulary  # the result, which a caller holds
    assert sum(u.saved for u in work.units) == pytest.approx(real - logits, rel=0.03)


class _Mixture(torch.nn.Module):
    """Layers of routed experts on embeddings."""

    def __init__(self, experts: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(64, 64)
        self.routers = torch.nn.ParameterList(torch.randn(experts, 64) for _ in range(layers))
        self.layers = torch.nn.ModuleList(nn.ExpertsMLP(experts, 64, 32) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for router, layer in zip(self.routers, self.layers, strict=True):
            routes = functional.route(x @ router.t(), 2)
            x = x + layer(x, routes.indices, routes.weights)
        return x


@pytest.mark.parametrize("experts", [2, 8])
def test_the_work_of_experts(experts: int) -> None:
    """Each token's products with two experts, whatever their number, and all parameters."""
    example = (torch.zeros((1, 16), dtype=torch.int64),)
    layer = measure_work(_Mixture(experts), example, lambda _: True).units[2]
    assert layer.parameters == experts * 3 * 64 * 32
    router = 2 * 16 * 64 * experts  # of the next layer
    assert layer.flops == 2 * 16 * 2 * 3 * 64 * 32 + router
    assert layer.kept == 16 * 2 * (2 * 32 * 4 + 8) + 16 * experts * 4  # z, order and logits


@pytest.mark.parametrize(
    "build", [lambda: Transformer(Settings(length=64, width=64, layers=3)), _Mixture]
)
@pytest.mark.parametrize("data", ["ddp", "zero2", "zero3"])
def test_memory_agrees_with_memory_estimate(data: Any, build: Any) -> None:
    """Where both are asked: data parallelism with accumulated gradients."""
    model = build()
    example = (torch.zeros((1, 64), dtype=torch.int64),)
    work = measure_work(model, example, lambda _: True)
    costs = Model(work, SMALL, Links(), 8)
    c = Choice(1, "1d", False, 1, "1f1b", 4, data, 1, "none", "adamw", "none")
    found = costs.count_memory(work.units, c, 0)
    optimizer = optim.AdamW(model.parameters())
    wanted = memory_estimate(model, optimizer, data, 4, example=example, accumulates=True)
    for kind in ("parameters", "gradients", "states", "activations"):
        assert found[kind] == pytest.approx(getattr(wanted, kind), rel=0.1), kind
    assert found["gathered"] <= 1.1 * wanted.gathered


@pytest.mark.parametrize("data", ["ddp", "zero3"])
def test_exchanges_that_do_not_overlap_add_up(data: str) -> None:
    work = describe_transformer(4, 512, 8, 4096, 256)
    c = Choice(1, "1d", False, 1, "1f1b", 4, data, 1, "none", "adamw", "none")
    slow = Links(inside=1e9, latency_inside=1e-4, overlaps=False)
    free = Links(inside=math.inf, latency_inside=0.0, overlaps=False)
    cuts = [range(len(work.units))]
    found, wanted = (
        Model(work, SMALL, links, 16).estimate(c, cuts).seconds for links in (slow, free)
    )
    sizes = [4.0 * unit.parameters for unit in work.units]
    wanted += slow.exchange(sum(sizes), 4, 3) * (2 if data == "ddp" else 1)
    if data == "zero3":  # each of four microbatches gathers each unit twice
        wanted += 4 * 2 * sum(slow.exchange(size, 4, 3) for size in sizes)
    assert found == pytest.approx(wanted)


def test_a_simulated_step_has_the_formulas_bubble() -> None:
    cost = Cost(0.0, {}, (), ((1.0, 2.0),) * 4)
    for schedule in ("1f1b", "gpipe"):
        timeline = simulate(cost, 8, schedule)
        assert timeline.span == (0.0, 3.0 * (8 + 4 - 1))
        assert timeline.bubble() == pytest.approx(estimate_bubble(4, 8))
    # 1F1B has at most one microbatch for each later stage in flight.
    first = [a.kind for a in simulate(cost, 8).actions if a.rank == 0]
    flying = itertools.accumulate(1 if kind == "forward" else -1 for kind in first)
    assert max(flying) == 4


def test_a_plan_for_gpt3_on_1024_devices() -> None:
    """It fits, parallelize() accepts it, and it is between the peak rate and a third of it."""
    work = describe_transformer(96, 12288, 96, 51200, 2048)
    assert work.parameters == pytest.approx(175e9, rel=0.01)
    fewer: dict[str, Any] = {"mode": ("1d",), "checkpoint": ("none",), "offload": ("none",)}
    fewer |= {"tensor": (4, 8), "pipeline": (4, 8, 16), "rows": (1, 2)}
    plan = plan_for(work, 1536, 1024, "a100", **fewer)
    Parallel.from_config(plan.config, 1024)
    assert sum(plan.memory.values()) <= PROFILES["a100"].memory
    least = 3 * 1536 * sum(u.flops for u in work.units) / 1024 / PROFILES["a100"].flops
    assert least < plan.seconds < 1.5 * least
    assert "not measured" in plan.source


def test_a_model_is_planned(tmp_path: Path) -> None:
    """Heads that do not divide leave out a size; a smaller device takes another plan."""
    with torch.device("meta"):
        model = Transformer(Settings(length=64, width=96, heads=3, layers=4))
    example = (torch.zeros((1, 64), dtype=torch.int64),)
    given: dict[str, Any] = {"example": example, "checkpoint": ("none",)}
    plan = plan_for(model, 16, 4, SMALL, **given)
    assert plan.choice.tensor == 1
    sharded = plan_for(model, 16, 4, SMALL, memory=0.6 * sum(plan.memory.values()), **given)
    assert sharded.config != plan.config
    assert sum(sharded.memory.values()) < sum(plan.memory.values())
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(asdict(SMALL)))
    assert load_profile(path) == SMALL


WORK = describe_transformer(2, 256, 4, 1024, 64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replace(SMALL, flops=-1e12), "flops is -1"),
        (lambda: replace(SMALL, bandwidth=0.0), "bandwidth is 0"),
        (lambda: replace(SMALL, memory=math.nan), "memory is nan"),
        (lambda: Links(node=0), "node is 0"),
        (lambda: Links(inside=-1e9), "inside is -1"),
        (lambda: Links(between=0.0), "between is 0"),
        (lambda: Links(latency_inside=-1e-6), "latency_inside is -1"),
        (lambda: describe_transformer(0, 256, 4, 1024, 64), "layers is 0"),
        (lambda: describe_transformer(2, 256, 0, 1024, 64), "heads is 0"),
        (lambda: describe_transformer(2, 250, 4, 1024, 64), "width is 250; .* multiple of 4 heads"),
        (lambda: describe_transformer(2, 256, 4, 1024, -64), "length is -64"),
        (lambda: plan_for(WORK, 0, 2, SMALL), "batch is 0"),
        (lambda: plan_for(WORK, 8, -2, SMALL), "devices is"),
        (lambda: plan_for(WORK, 8, 2, "tpu"), "profile is 'tpu'; accepted: a Profile, or one of h"),
        (lambda: plan_for(WORK, 8, 2, SMALL, searcher="luck"), "searcher is 'luck'; .* enumerate"),
        (lambda: plan_for(WORK, 8, 2, SMALL, replicas=(2,)), "axes is with replicas"),
        (
            lambda: plan_for(WORK, 8, 2, SMALL, optimizer=("lamb",)),
            "optimizer is .*: some of adamw",
        ),
        (lambda: plan_for(WORK, 8, 2, SMALL, memory=1e6), "no choice fits; accepted: more devices"),
    ],
)
def test_what_cannot_be_planned_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


PROFILE = ["--profile", "{}/profile.json"]


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (PROFILE, "{", "profile.json: Expecting"),
        (PROFILE, "[1, 2]", "profile.json: .* is a list"),
        (PROFILE, json.dumps({"name": "small"}), "profile.json: .* missing .* 'flops'"),
        (PROFILE, json.dumps(asdict(SMALL) | {"cores": 4}), "profile.json: .*'cores'"),
        (PROFILE, json.dumps(asdict(SMALL) | {"flops": "fast"}), "flops is 'fast'"),
        (PROFILE, json.dumps(asdict(SMALL) | {"flops": -1e12}), "flops is -1"),
        (PROFILE, None, "No such file"),
        (["--plot", "{}/missing/step.png"], None, "No such file"),
        (["--plot", "{}/step.unknown"], None, "'unknown' is not supported"),
        (["--heads", "0"], None, "heads is 0"),
        (["--heads", "3"], None, "width is 256"),
        (["--memory", "-1"], None, "memory is -1"),
    ],
)
def test_the_command_ends_with_a_sentence(
    arguments: list[str],
    text: str | None,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    if text is not None:
        (tmp_path / "profile.json").write_text(text)
    sizes = ["--layers", "2", "--width", "256", "--heads", "4", "--batch", "8", "--devices", "2"]
    assert cli.main(["plan", *sizes, *(a.replace("{}", str(tmp_path)) for a in arguments)]) == 2
    assert re.search(message, capsys.readouterr().out)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--layers", "4", "--width", "256", "--heads", "4", "--batch", "16"]
    picture = tmp_path / "step.png"
    assert cli.main(["plan", *sizes, "--devices", "4", "--plot", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "s a step, by rates stated by the vendor" in shown
    assert picture.stat().st_size > 1000
    assert cli.main(["plan", *sizes, "--devices", "4", "--no-overlap"]) == 0
    slower = capsys.readouterr().out
    quick, slow = (re.search(r"([\d.e-]+) s a step", text) for text in (shown, slower))
    assert quick
    assert slow
    assert float(quick[1]) < float(slow[1])
    assert cli.main(["plan", *sizes, "--memory", "0.001"]) == 2
    assert "no choice fits" in capsys.readouterr().out
