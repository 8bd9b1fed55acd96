"""The benchmark of optimizer steps, and the choice of their kernels on a GPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from torchweld import optim
from torchweld.bench import command, evidence, jobs, limits, machine, steps
from torchweld.bench.jobs import Job
from torchweld.bench.runner import Plan, Result
from torchweld.bench.timing import wall_time
from torchweld.commands import cli
from torchweld.dispatch import choice
from torchweld.dispatch.engine.question import Answer
from torchweld.dispatch.engine.store import Entry
from torchweld.functional import quantize_8bit
from torchweld.ops.optimizer.rule import RULES
from torchweld.ops.quantize_8bit import _QUANTIZE
from torchweld.registry import EAGER
from trying import CONDITIONS, try_on_cpu

PLAN = Plan([], ["cpu"], [], seconds=0, rounds=(1, 1))
ADAM = steps.KINDS[0]
SHAPE = (3, 8, 600)


def _measured(kind: steps.Kind, plan: Plan = PLAN) -> dict[str, Result]:
    (found,) = steps.measure(steps.few(kind, "cpu", SHAPE), plan, wall_time)
    return {result.contender: result for result in found}


@pytest.mark.parametrize("kind", steps.KINDS, ids=lambda kind: f"{kind.rule} {kind.variant}")
def test_a_step_is_timed_beside_torchs(kind: steps.Kind) -> None:
    found = _measured(kind)
    assert list(found) == ["eager", "cpu"]
    assert all(result.status == "timed" and result.ms for result in found.values())
    assert found["cpu"].automatic
    elements = torch.Size(SHAPE).numel()
    blocks = 3 * 8 * 3
    expected = (kind.reads + kind.writes) * elements + sum(kind.of_block) * blocks
    assert found["cpu"].bytes == expected
    assert found["cpu"].label == " ".join(filter(None, ["3x8x600", kind.variant]))


def test_a_wrong_step_is_refused() -> None:
    wrong = dataclasses.replace(ADAM, ours=lambda params: optim.AdamW(params, lr=2e-3))
    found = _measured(wrong)
    assert found["eager"].status == "timed"
    assert found["cpu"].status == "refused"
    assert str(found["cpu"].reason).startswith("ValueError: wrong result: off by 1.0e-03")


def test_a_peer_that_fails_ends_nothing() -> None:
    peers = {"broken": steps.Peer("json", lambda module: module.no_such_optimizer)}
    plan = dataclasses.replace(PLAN, rivals=["broken"])
    found = _measured(dataclasses.replace(ADAM, peers=peers), plan)
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


def test_the_command_measures_a_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "settle", lambda **_: None)
    monkeypatch.setattr(command, "clock_for", lambda device: wall_time)
    monkeypatch.setattr(limits, "copy_gbps", lambda clock, device: 10.0)
    cases = [steps.few(ADAM, "cpu", SHAPE)]
    monkeypatch.setattr(steps, "cases", lambda rules, *_: cases if rules == ["adam"] else [])
    saved = tmp_path / "results.json"
    options = ["--quick", "--device", "cpu", "--json", str(saved)]
    assert cli.main(["bench", "adam", *options]) == 0
    assert "step" in capsys.readouterr().out
    assert {r["op"] for r in json.loads(saved.read_text())["results"]} == {"adam"}


# --- Choice -----------------------------------------------------------------------------------


def test_a_rules_choice_is_what_its_steps_agree_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before its first step it is eager, and after codecs that differ too."""
    trials = try_on_cpu(monkeypatch, tmp_path)
    rule, param = RULES["adam"], torch.nn.Parameter(torch.randn(64, 64))
    assert rule.choose_for(param) == EAGER
    steps.take_step(steps.few(ADAM, "cpu", SHAPE))
    assert rule.choose_for(param) == "cpu"
    wrong = Answer(EAGER, {"cpu": "wrong"}, {})
    trials.engine._store.add(Entry(CONDITIONS, {"op": "adam", "step": ["8 bits"]}, 0, wrong))
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


@pytest.mark.parametrize(("lr", "status"), [(1e-3, "timed"), (2e-3, "refused")])
def test_a_jobs_step_is_judged(lr: float, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = dataclasses.replace(ADAM, ours=lambda params: optim.AdamW(params, lr=lr))
    monkeypatch.setattr(steps, "KINDS", [kind])
    monkeypatch.setattr(Job, "cases", lambda job: [steps.few(kind, "cpu", SHAPE)])
    job = Job("adam", Plan(("full",), ("cpu",), (), 0.1), device="cpu")
    results = [r for _, found in jobs.measure_here(job) for r in found]
    assert {r.status for r in results if r.contender == "cpu"} == {status}
