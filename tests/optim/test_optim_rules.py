"""Rules: settings that C++ and Python agree on, and passes with exchanges between them."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import torchweld
from optimizers import BY_RULE, U, draw, draw_grads, run, same, snapshot
from torchweld import optim
from torchweld.ops.optimizer import passes
from torchweld.ops.optimizer.passes import Exchange, Part, Pass
from torchweld.ops.optimizer.rule import RULES, Rule

CORE = Path(__file__).resolve().parents[2] / "csrc" / "core"
IN_PYTHON = {"double": float, "bool": bool}


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_the_struct_of_settings_is_the_schema(rule: Rule) -> None:
    """Field by field, in every op of the rule: the stable ABI checks neither names nor types."""
    text = re.sub(r"//[^\n]*", "", next(CORE.rglob(f"{rule.name}.h")).read_text())
    found = re.search(rf"struct {rule.settings.__name__} {{(.*?)}};", text, re.DOTALL)
    assert found
    fields = [
        (field.strip(), IN_PYTHON[kind])
        for kind, names in re.findall(r"(\w+) ([^;]+);", found[1])
        for field in names.split(",")
    ]
    assert fields == list(get_type_hints(rule.settings).items())
    ops = [name for name in torch._C._dispatch_get_all_op_names() if _is_of(rule, name)]
    assert f"torchweld::{rule.name}.cpu" in ops
    for name in ops:
        schema = torch._C._get_schema(*name.split("."))
        found_last = [(a.name, str(a.type)) for a in schema.arguments[-len(fields) :]]
        assert found_last == [(field, kind.__name__) for field, kind in fields], name


def _is_of(rule: Rule, op: str) -> bool:
    return re.fullmatch(rf"torchweld::{rule.name}(_\w+)?\.\w+", op) is not None


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_every_setting_arrives_where_it_belongs(rule: Rule, backend: str) -> None:
    """Change each in turn: the kernel's step changes as the reference's does.

    Sums in another order make ratios that differ by a rounding, and steps of a few roundings more.
    """

    def stepped(name: str | None = None) -> list[torch.Tensor]:
        params, optimizer = run(BY_RULE[rule.name], 2, shapes=[(8, 40)])
        draw_grads(params, 2)
        (task,) = optimizer._tasks()  # type: ignore[attr-defined]
        if name is not None:
            before = getattr(task.settings, name)
            after = not before if isinstance(before, bool) else before * 0.5 + 0.125
            task.settings = task.settings._replace(**{name: after})
        with torch.no_grad():
            passes.run(rule.passes, [task], lambda *_: None)
        return snapshot(params, optimizer)

    base = stepped()
    for name in get_type_hints(rule.settings):
        found = stepped(name)
        with torchweld.use_backend("eager"):
            expected = stepped(name)
        assert not same(found, base), name
        for a, b in zip(found, expected, strict=True):
            assert ((a - b).abs() <= 8 * U * b.abs().max()).all(), name


def test_passes_go_one_after_another_with_exchanges_between() -> None:
    """Each runs over all batches that it concerns; any function can make the exchanges."""
    log: list[Any] = []

    def act(name: str, task: Any) -> list[Part]:
        log.append((name, task))
        return [passes.over_all(torch.full((2,), float(task)), torch.zeros(3, 4))]

    def exchange(kind: Exchange, parts: Any) -> None:
        parts = list(parts)
        log.append((kind, [part.here.tolist() for part in parts]))
        assert all(tuple(part.dims) == (0, 1) for part in parts)

    listed = [
        Pass(functools.partial(act, "sums"), Exchange.SUM),
        Pass(functools.partial(act, "local")),
        Pass(functools.partial(act, "blocks"), Exchange.LARGEST, lambda task: task == 2),  # type: ignore[arg-type,return-value]
        Pass(functools.partial(act, "none"), Exchange.SUM, lambda task: False),
    ]
    passes.run(listed, [1, 2], exchange)  # type: ignore[list-item]
    assert log == [
        ("sums", 1),
        ("sums", 2),
        (Exchange.SUM, [[1.0, 1.0], [2.0, 2.0]]),
        ("local", 1),
        ("local", 2),
        ("blocks", 2),
        (Exchange.LARGEST, [[2.0, 2.0]]),
        (Exchange.SUM, []),
    ]


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_missing_entries_are_added_and_others_kept(name: str, backend: str) -> None:
    """One parameter lacks the entry, and has one that no step needs."""
    params, optimizer = run(optim.AdamW, 2, shapes=[(8, 40)] * 3)
    expected = draw(shapes=[(8, 40)] * 3)
    reference = optim.AdamW(expected)
    for p, e in zip(params, expected, strict=True):
        reference.state[e] = {key: v.clone() for key, v in optimizer.state[p].items()}
        e.data.copy_(p.detach())
    reference.state[expected[1]][name].zero_()
    del optimizer.state[params[1]][name]
    optimizer.state[params[1]]["note"] = torch.ones(3)
    for some, one in ((params, optimizer), (expected, reference)):
        draw_grads(some, 5)
        one.step()
    for p, e in zip(params, expected, strict=True):
        assert torch.equal(p, e)
        for key, value in reference.state[e].items():
            assert torch.equal(optimizer.state[p][key], value)
    assert optimizer.state[params[1]]["note"].tolist() == [1.0] * 3
