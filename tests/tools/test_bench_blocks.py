"""The benchmark's blocks and models, before and after fuse()."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import torchweld
from torchweld.bench import blocks, demo, jobs, limits, machine
from torchweld.bench.blocks import BLOCKS, BlockCase
from torchweld.bench.runner import Plan, Result
from torchweld.bench.timing import wall_time
from torchweld.commands import cli
from torchweld.dispatch.engine.judge import Judge

BATCH, TOKENS, WIDTH = SHAPE = (4, 64, 128)
PLAN = Plan(("fwd", "bwd", "full"), ["cpu"], [], seconds=0, rounds=(1, 1))


def _measured(name: str, dtype: torch.dtype = torch.float32) -> dict[tuple[str, str], Result]:
    shape = (2, demo.LENGTH, WIDTH) if BLOCKS[name].whole else SHAPE
    case = BlockCase(BLOCKS[name], shape, dtype, "cpu")
    found = [result for results in jobs.measure_case(case, PLAN, wall_time) for result in results]
    return {(result.direction, result.contender): result for result in found}


_found = functools.cache(_measured)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "gpt"])
def test_a_block_is_timed_before_and_after_fuse(name: str, dtype: torch.dtype) -> None:
    found = _found(name, dtype)
    assert list(found) == [(d, c) for d in PLAN.directions for c in ("eager", "fused")]
    assert all(result.status == "timed" and result.ms for result in found.values())
    assert all(result.peak_bytes for result in found.values())
    assert found["full", "fused"].automatic
    assert not found["full", "eager"].automatic
    assert found["full", "eager"].label == "4x64x128" + (
        " autocast" if dtype == torch.bfloat16 else ""
    )


def test_operations_are_those_of_its_products() -> None:
    """Four products of width x width and two of width x 4 width; scores and values."""
    found = _found("pre_norm_block", torch.float32)
    tokens = BATCH * TOKENS
    forward = 2 * tokens * 12 * WIDTH**2 + 2 * 2 * tokens * TOKENS * WIDTH
    assert found["fwd", "eager"].flops == forward
    assert found["full", "eager"].flops == forward + found["bwd", "eager"].flops
    # A backward has two products for each; attention's computes the scores again.
    products = 4 * tokens * 12 * WIDTH**2
    assert found["bwd", "eager"].flops - products in (
        5 * 2 * tokens * TOKENS * WIDTH,
        4 * 2 * tokens * TOKENS * WIDTH,
    )


def test_a_models_steps_are_timed_with_its_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "LENGTH", TOKENS)
    monkeypatch.setattr(demo, "LAYERS", 2)
    found = _measured("gpt")
    steps = {contender: r for (direction, contender), r in found.items() if direction == "step"}
    assert list(steps) == ["eager", "fused", "fused, 8-bit"]
    assert all(result.ms and result.speed_up for result in steps.values())
    assert {direction for direction, _ in found} == {*PLAN.directions, "step"}


def test_a_wrong_block_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of 1% in a norm's weight is enough."""

    def fuse(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            model.norm1.weight.mul_(1.01)  # type: ignore[union-attr, operator]
        return model

    monkeypatch.setattr(torchweld, "fuse", fuse)
    found = _measured("post_norm_block")
    assert found["full", "eager"].status == "timed"
    assert found["full", "fused"].status == "refused"
    assert "wrong result" in str(found["full", "fused"].reason)


@pytest.mark.parametrize("count", [1, 2, 15])
def test_a_few_numbers_may_be_as_inexact_as_others(count: int) -> None:
    """A loss is one number, the sum of many: that eager rounds it as the exact one is luck."""
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        exact = torch.rand(count, generator=generator, dtype=torch.float64) * 12 + 0.1
        unit = exact.max() * 2**-23
        judge = Judge({"loss": exact}, {"loss": exact.float()})
        assert judge.find_fault({"loss": (exact + 2 * unit).float()}) is None
        assert "wrong result" in str(judge.find_fault({"loss": (exact + 40 * unit).float()}))


def test_the_command_measures_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "settle", lambda **_: None)
    monkeypatch.setattr(limits, "copy_gbps", lambda clock, device: 10.0)
    monkeypatch.setattr(blocks, "SHAPES", {"cpu": SHAPE})
    path = tmp_path / "found.json"
    command = ["bench", "gated_block", "--quick", "--device", "cpu", "--json", str(path)]
    assert cli.main(command) == 0
    assert "gated_block" in capsys.readouterr().out
    saved = json.loads(path.read_text())
    assert {r["contender"] for r in saved["results"]} == {"eager", "fused"}
    assert saved["sources"]["gated_block"]  # tells whether the kernels changed since
