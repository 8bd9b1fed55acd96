"""PipeDream and PipeDream-2BW equal one process that keeps all versions of the weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call

import declared
from processes import on
from torchweld import optim
from torchweld.distributed import LayerSeeds
from torchweld.distributed.pipelines.stashing import RULES, count_versions
from torchweld.errors import ArgumentError
from transformer import Settings, Transformer, compute_loss, make_batch

S = Settings(vocabulary=32, length=16, width=16, heads=2, layers=4, dropout=0.2)
STAGES, MICROBATCHES, STEPS, BATCH = 4, 8, 2, 4
_ADAM: dict[str, Any] = {"lr": 1e-2}


def _choose_version(rule: str, stage: int, step: int, number: int) -> int:
    """The version of the published update, for a microbatch of a step."""
    if rule == "2bw":
        return max(0, (step * MICROBATCHES + number) // BATCH - 1)
    delay = STAGES - 1 - (stage if rule == "pipedream" else 0)
    return step * MICROBATCHES + max(0, number - delay)


def _simulate(rule: str) -> tuple[list[dict[str, torch.Tensor]], list[list[int]]]:
    """Train in one process; return each stage's parameters and the versions that it used."""
    parts = []
    for number in range(STAGES):
        torch.manual_seed(0)
        parts.append(Transformer(S).stage(number, STAGES))
    seeds = [LayerSeeds(((f"blocks.{n}", b) for n, b in p.blocks.items()), 0) for p in parts]
    optimizers = [optim.AdamW(part.parameters(), **_ADAM) for part in parts]
    versions = [[_copy(part)] for part in parts]
    used: list[list[int]] = [[] for _ in parts]
    every = BATCH if rule == "2bw" else 1
    for step in range(STEPS):
        for some in seeds:
            some.begin(step)
        for number in range(MICROBATCHES):
            x, targets = make_batch(S, 2, 10 * step + number)
            entered, left = [], []
            for at, part in enumerate(parts):
                used[at].append(_choose_version(rule, at, step, number))
                x = functional_call(part, versions[at][used[at][-1]], (x,))
                left.append(x)
                x = x.detach().requires_grad_()
                entered.append(x)
            compute_loss(left[-1], targets).backward()
            for at in reversed(range(STAGES - 1)):
                left[at].backward(entered[at].grad)
            for at, part in enumerate(parts):
                leaves = versions[at][used[at][-1]]
                for name, p in part.named_parameters():
                    grad, leaves[name].grad = leaves[name].grad, None
                    assert grad is not None
                    p.grad = grad if p.grad is None else p.grad + grad
                if (number + 1) % every == 0:
                    for p in part.parameters():
                        assert p.grad is not None
                        p.grad /= every
                    optimizers[at].step()
                    optimizers[at].zero_grad()
                    versions[at].append(_copy(part))
    return [{n: p.detach() for n, p in part.named_parameters()} for part in parts], used


def _copy(part: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone().requires_grad_() for name, p in part.named_parameters()}


def _make(rule: str, **given: Any) -> Any:
    config = {
        "pipeline": {"size": STAGES, "schedule": rule, "accumulate": BATCH},
        "optimizer": {"name": "adamw", **_ADAM},
    }
    return declared.start(S, config, 2, MICROBATCHES, **given)


@pytest.fixture
def simulated(rule: str, tmp_path: Path) -> Path:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.save(_simulate(rule), tmp_path / "simulated.pt")
    torch.set_num_threads(threads)
    return tmp_path / "simulated.pt"


@pytest.mark.parametrize("rule", RULES)
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
        assert torch.equal(p, wanted[rank][name]), name
    assert stashed.most == count_versions(rule, rank, STAGES, MICROBATCHES)
    plain = sum(p.nbytes for p in training.model.parameters())
    assert training.memory.parameters == (1 + stashed.most) * plain
    with pytest.raises(ArgumentError, match=r"max_norm is 1.0; accepted: None with"):
        _make(rule, max_norm=1.0)
