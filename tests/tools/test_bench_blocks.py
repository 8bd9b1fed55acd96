"""The benchmark's blocks, models and optimizer steps, and the choice of steps' kernels on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import json
from inspect import isfunction
from pathlib import Path

import pytest
import torch
from torch import nn

import torchweld
from torchweld import functional, optim
from torchweld.bench import command
from torchweld.bench.measure import evidence, jobs, limits, machine, steps
from torchweld.bench.measure.jobs import Job
from torchweld.bench.measure.runner import Plan, Result
from torchweld.bench.measure.timing import wall_time
from torchweld.bench.models import blocks, demo
from torchweld.bench.models.blocks import BLOCKS, BlockCase
from torchweld.commands import cli
from torchweld.dispatch import choice
from torchweld.dispatch.proof import Judge
from torchweld.dispatch.store import Answer, Entry
from torchweld.functional import quantize_8bit
from torchweld.ops.optimizer.rule import RULES
from torchweld.ops.quantize_8bit import _QUANTIZE
from torchweld.registry import EAGER, OPS
from trying import CONDITIONS, try_on_cpu

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


# --- Steps ----------------------------------------------------------------------------------------

STEP = Plan([], ["cpu"], [], seconds=0, rounds=(1, 1))
ADAM = steps.KINDS[0]
MATRICES = (3, 8, 600)


def _measured_step(kind: steps.StepKind, plan: Plan = STEP) -> dict[str, Result]:
    (found,) = steps.measure(steps.few(kind, "cpu", MATRICES), plan, wall_time)
    return {result.contender: result for result in found}


@pytest.mark.parametrize("kind", steps.KINDS, ids=lambda kind: f"{kind.rule} {kind.variant}")
def test_a_step_is_timed_beside_torchs(kind: steps.StepKind) -> None:
    found = _measured_step(kind)
    assert list(found) == ["eager", "cpu"]
    assert all(result.status == "timed" and result.ms for result in found.values())
    assert found["cpu"].automatic
    elements = torch.Size(MATRICES).numel()
    blocks = 3 * 8 * 3
    expected = (kind.reads + kind.writes) * elements + sum(kind.of_block) * blocks
    assert found["cpu"].bytes == expected
    assert found["cpu"].label == " ".join(filter(None, ["3x8x600", kind.variant]))


def test_a_wrong_step_is_refused() -> None:
    wrong = dataclasses.replace(ADAM, ours=lambda params: optim.AdamW(params, lr=2e-3))
    found = _measured_step(wrong)
    assert found["eager"].status == "timed"
    assert found["cpu"].status == "refused"
    assert str(found["cpu"].reason).startswith("ValueError: wrong result: off by 1.0e-03")


def test_a_peer_that_fails_ends_nothing() -> None:
    peers = {"broken": steps.StepPeer("json", lambda module: module.no_such_optimizer)}
    plan = dataclasses.replace(STEP, rivals=["broken"])
    found = _measured_step(dataclasses.replace(ADAM, peers=peers), plan)
    assert found["cpu"].status == "timed"
    assert "no_such_optimizer" in str(found["broken"].reason)


def test_cases_have_as_many_elements() -> None:
    few, mixed = steps.cases(["lion"], "cpu", quick=False)
    assert few.elements == 2**24
    assert 0.999 < mixed.elements / few.elements <= 1
    assert len(mixed.shapes) == 600
    assert str(mixed) == "lion 600 tensors"
    adapters = steps.cases(["adam"], "cpu", quick=False)[-1]
    assert str(adapters) == "adam LoRA 8-bit states"
    assert adapters.elements == few.elements
    (grouped,) = [
        case for case in steps.cases(["adam"], "cpu", quick=False) if case.name == "1000 groups"
    ]
    optimizer = grouped.kind.ours([torch.zeros(s, requires_grad=True) for s in grouped.shapes])
    assert len({group["lr"] for group in optimizer.param_groups}) == 1000
    # A row of 8 is a block, whose two absmax are read and written.
    narrow = steps.StepCase(adapters.kind, "cpu", "", (), [(4096, 8)])
    assert narrow.traffic().total == 4096 * (8 * 16 + 16)


@pytest.mark.parametrize(
    ("name", "label", "contenders"),
    [("gated_block", "gated_block", {"eager", "fused"}), ("adam", "step", {"eager", "cpu"})],
)
def test_the_command_measures_a_block_and_a_rule(
    name: str,
    label: str,
    contenders: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(machine, "settle", lambda **_: None)
    monkeypatch.setattr(command, "clock_for", lambda device: wall_time)
    monkeypatch.setattr(limits, "copy_gbps", lambda clock, device: 10.0)
    monkeypatch.setattr(blocks, "SHAPES", {"cpu": SHAPE})
    few, cases = [steps.few(ADAM, "cpu", MATRICES)], steps.cases
    monkeypatch.setattr(steps, "cases", lambda *how: few if how[0] == ["adam"] else cases(*how))
    path = tmp_path / "found.json"
    assert cli.main(["bench", name, "--quick", "--device", "cpu", "--json", str(path)]) == 0
    assert label in capsys.readouterr().out
    saved = json.loads(path.read_text())
    assert {(r["op"], r["contender"]) for r in saved["results"]} == {(name, c) for c in contenders}
    assert saved["sources"][name]  # tells whether the kernels changed since


# --- Choice -----------------------------------------------------------------------------------


def test_a_rules_choice_is_what_its_steps_agree_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before its first step it is eager, and after codecs that differ too."""
    trials = try_on_cpu(monkeypatch, tmp_path)
    rule, param = RULES["adam"], torch.nn.Parameter(torch.randn(64, 64))
    assert rule.choose_for(param) == EAGER
    steps.take_step(steps.few(ADAM, "cpu", MATRICES))
    assert rule.choose_for(param) == "cpu"
    wrong = Answer(EAGER, {"cpu": "wrong"}, {})
    trials.checker._store.add(Entry(CONDITIONS, {"op": "adam", "step": ["8 bits"]}, 0, wrong))
    assert rule.choose_for(param) == EAGER


def test_compiled_code_takes_what_bare_ops_agree_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In one graph: compiled code with quantisation asks so."""
    try_on_cpu(monkeypatch, tmp_path)
    monkeypatch.setattr(choice, "is_on_gpu", lambda x: True)
    x = torch.randn(3, 700)
    compiled = torch.compile(lambda x: quantize_8bit(x)[0], fullgraph=True, backend="aot_eager")
    ran = []
    kernel = _QUANTIZE.overload("cpu")
    monkeypatch.setitem(_QUANTIZE._steps, "cpu", lambda *g: (ran.append(1), kernel(*g))[1])
    expected = compiled(x)
    assert not ran
    assert torch.equal(quantize_8bit(x)[0], expected)
    torch.compiler.reset()
    ran.clear()
    assert torch.equal(compiled(x), expected)
    assert ran


def test_every_rule_is_measured_and_listed() -> None:
    assert {kind.rule for kind in steps.KINDS} == set(RULES)
    root = Path(__file__).parents[2]
    listed = {line[:2] for line in evidence.list_states(root, {})}
    sources = {
        (rule.name, b): files for rule in RULES.values() for b, files in rule.sources.items()
    }
    assert sources.keys() <= listed
    assert all((root / path).exists() for files in sources.values() for path in files)


# A part of a step, or of another row; the table of host times has them.
NO_ROW = {
    *("quantize_8bit", "dequantize_8bit", "quantize_one_bit", "dequantize_one_bit"),
    *("average_one_bit", "route", "linear_gelu", "rotary_embedding_packed_"),
}


def test_every_public_function_is_measured() -> None:
    """The losses and the rotation of queries and keys had no row, since they are no ops."""
    public = {name for name in functional.__all__ if isfunction(getattr(functional, name))}
    assert public - {*OPS, *BLOCKS} == NO_ROW


@pytest.mark.parametrize(("lr", "status"), [(1e-3, "timed"), (2e-3, "refused")])
def test_a_jobs_step_is_judged(lr: float, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = dataclasses.replace(ADAM, ours=lambda params: optim.AdamW(params, lr=lr))
    monkeypatch.setattr(steps, "KINDS", [kind])
    monkeypatch.setattr(Job, "cases", lambda job: [steps.few(kind, "cpu", MATRICES)])
    job = Job("adam", Plan(("full",), ("cpu",), (), 0.1), device="cpu")
    results = [r for _, found in jobs.measure_here(job) for r in found]
    assert {r.status for r in results if r.contender == "cpu"} == {status}
