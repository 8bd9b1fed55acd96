"""Arguments and settings of optimizers: signatures, errors that name what is wrong, and C++."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch

import torchweld
from optimizers import BY_RULE, U, draw, draw_grads, run, run_bits, same, snapshot
from torchweld import optim
from torchweld.ops.optimizer import passes
from torchweld.ops.optimizer.orthogonal import QUINTIC
from torchweld.ops.optimizer.rule import RULES, Rule
from torchweld.optim import lr_scheduler

CLASSES: dict[str, type[Any]] = {
    name: value
    for name in optim.__all__
    if isinstance(value := getattr(optim, name), type)
    and issubclass(value, torch.optim.Optimizer)
    and name != "Offload"
}
# Options that every class takes, and those that some classes lack.
STORED = {"lr", "maximize", "foreach", "max_grad_norm", "master_weights", "stochastic_rounding"}
CAUTIOUS = {"Adam", "AdamW", "Lion", "Muon", "Adam8bit", "AdamW8bit", "Lion8bit"}
NO_EMA = {"Adafactor", "TransformersAdafactor", "ScheduleFreeAdamW", "OneBitAdam", "OneBitLAMB"}
LACK: dict[str, set[str]] = {
    "state_dtype": {name for name in CLASSES if name.endswith("8bit")},
    "capturable": {"SGD", "Adafactor"},
    "ema_decay": NO_EMA,
    "cautious": CLASSES.keys() - CAUTIOUS,
    "cautious_decay": CLASSES.keys() - CAUTIOUS,
}


def _list_positional(parameters: Any) -> list[str]:
    return [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize("name", CLASSES)
def test_a_signature_shows_each_option_that_is_taken(name: str) -> None:
    """With torch's own arguments and defaults; an option at its default changes nothing."""
    kind = CLASSES[name]
    shown = dict(inspect.signature(kind).parameters)
    assert shown.keys() >= STORED
    assert {option for option in LACK if option not in shown} == {
        option for option, names in LACK.items() if name in names
    }
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in shown.values())
    assert all(p.annotation is not p.empty for p in shown.values())
    of_torch = inspect.signature(getattr(torch.optim, name, kind)).parameters
    assert [*shown][: len(positional := _list_positional(of_torch))] == positional
    assert positional == _list_positional(shown) or name.endswith("8bit")
    assert all(shown[n].default == p.default for n, p in of_torch.items())
    params = [torch.nn.Parameter(torch.ones(4, 4))]
    needed: dict[str, Any] = {"freeze_step": 2} if "freeze_step" in shown else {}
    plain = kind(params, **needed)
    named = {n: p.default for n, p in shown.items() if p.default is not inspect.Parameter.empty}
    asked = kind(params, **{**named, **needed})
    assert asked.defaults == plain.defaults
    assert asked._codec == plain._codec
    assert asked.param_groups == plain.param_groups
    with pytest.raises(TypeError, match="'max_grad_nrm'; did you mean 'max_grad_norm'"):
        kind(params, max_grad_nrm=1.0, **needed)


# --- Errors -----------------------------------------------------------------------------------

P = [torch.zeros(4, 4)]
FIXED = {"lr": 1e-3, "relative_step": False}


def _schedule(p: Any, **settings: Any) -> Any:
    numbers = {"batch_size": 1024, "base_batch_size": 256} | settings
    return lr_scheduler.LinearScaling(optim.LARS(p), **numbers)


def _group(p: Any, **settings: Any) -> Any:
    return optim.AdamW([{"params": p, **settings}])


def _add_rule(p: Any, rule: str) -> Any:
    optim.Muon(p).add_param_group({"params": draw(shapes=[(8,)]), "rule": rule})


# What is made, its settings, the argument that the error names, and what the error says.
Refused = tuple[Any, dict[str, Any], str, str]
# As arguments and in a group.
ANYWHERE: list[Refused] = [
    (optim.AdamW, {"state_dtype": "4bit"}, "state_dtype", "8bit"),
    (optim.AdamW, {"state_dtype": torch.int8}, "state_dtype", "bfloat16"),
    (optim.AdamW, {"state_dtype": 8}, "state_dtype", "8bit"),
    (optim.AdamW, {"master_weights": "all"}, "master_weights", "remainder"),
    (optim.AdamW, {"stochastic_rounding": 1}, "stochastic_rounding", "True or"),
    (
        *(optim.Lion, {"stochastic_rounding": True, "master_weights": True}),
        *("stochastic_rounding", "one of the two"),
    ),
    (optim.AdamW, {"min_quantized_size": -1}, "min_quantized_size", ">= 0"),
    (optim.Adam, {"cautious_decay": True}, "cautious_decay", "decoupled"),
    (optim.AdEMAMix, {"betas": (0.9, 0.999)}, "betas", "three"),
    (optim.AdEMAMix, {"alpha": -1.0}, "alpha", ">= 0"),
    (optim.AdEMAMix, {"alpha_warmup": 1.5}, "alpha_warmup", "1.5"),
    (optim.AdEMAMix, {"beta3_warmup": 5, "betas": (0.0, 0.9, 0.99)}, "beta3_warmup", "beta"),
    (optim.ScheduleFreeAdamW, {"betas": (0.0, 0.99)}, "betas", "0.0"),
    (optim.ScheduleFreeAdamW, {"capturable": True}, "capturable", "False"),
    (optim.ScheduleFreeAdamW, {"warmup_steps": -1}, "warmup_steps", "-1"),
    (optim.Muon, {"algorithm": "newton"}, "algorithm", "standard"),
    (optim.Muon, {"ns_dtype": torch.int8}, "ns_dtype", "int8"),
    (optim.Muon, {"ns_coefficients": (1.0, 2.0)}, "ns_coefficients", "1.0"),
    (optim.Muon, {"ns_coefficients": [QUINTIC] * 3}, "ns_coefficients", "5 steps"),
    (
        *(optim.Muon, {"ns_coefficients": (3, -4, 2), "algorithm": "polar_express"}),
        *("ns_coefficients", "polar_express"),
    ),
    (optim.Muon, {"heads": 5}, "heads", "divisor of 4"),
    (optim.Muon, {"heads": (2, 1)}, "heads", "2"),
    (optim.Muon, {"split_sizes": (5, 5)}, "split_sizes", "4"),
    (optim.Muon, {"split_dim": 2}, "split_dim", "2"),
    (optim.Muon, {"state_dtype": torch.float16}, "state_dtype", "float16"),
    (optim.AdamW, {"lr": -1.0}, "lr", ">= 0"),
    (optim.Adam, {"lr": torch.tensor(torch.nan)}, "lr", "finite"),
    (optim.Adafactor, {"beta2_decay": 1.0}, "beta2_decay", "<= 0"),
]
AS_ARGUMENTS: list[Refused] = [
    (optim.AdamW, {"differentiable": True}, "differentiable", "torch.optim"),
    (optim.AdamW, {"max_grad_norm": 0.0}, "max_grad_norm", "> 0"),
    (optim.AdamW, {"ema_decay": -0.1}, "ema_decay", "-0.1"),
    (optim.AdamW, {"ema_decay": 1.0}, "ema_decay", "1.0"),
    (optim.Lion, {"lr": -1.0}, "lr", ">= 0"),
    (optim.Lion, {"lr": torch.ones(2)}, "lr", "one number"),
    (optim.Lion, {"betas": (0.9, 1.0)}, "betas", r"\[0, 1\)"),
    (optim.Lion, {"differentiable": True}, "differentiable", "False"),
    (optim.LAMB, {"trust_clip": (2.0, 1.0)}, "trust_clip", "least"),
    (optim.LAMB, {"betas": True}, "betas", "a tuple of numbers"),
    (optim.LAMB, {"eps": -1}, "eps", ">= 0"),
    (optim.LAMB8bit, {"max_unorm": 2.0}, "max_unorm", "1.0"),
    (optim.LARS, {"eps": -1.0}, "eps", ">= 0"),
    (optim.LARS, {"trust_coefficient": -1.0}, "trust_coefficient", ">= 0"),
    (optim.Adafactor, {"state_dtype": "8bit"}, "state_dtype", "8bit"),
    (optim.TransformersAdafactor, {"lr": 1e-3}, "lr", "relative_step"),
    (optim.TransformersAdafactor, FIXED | {"warmup_init": True}, "warmup_init", "relative_step"),
    (optim.TransformersAdafactor, {"eps": (-1.0, 1e-3)}, "eps", ">= 0"),
    (optim.Muon, {"differentiable": True}, "differentiable", "False"),
    *(
        (kind, {"freeze_step": 2} | {name: value}, name, str(value))
        for kind in (optim.OneBitAdam, optim.OneBitLAMB)
        for name, value in (
            *(("freeze_step", 0), ("state_dtype", "8bit"), ("max_grad_norm", 1.0)),
            ("error_dtype", torch.float16),
        )
    ),
    # The optimizer's, which no group has.
    (_group, {"max_grad_norm": 1.0}, "max_grad_norm", "the optimizer's"),
    (_group, {"ema_decay": 0.9}, "ema_decay", "optimizer"),
    (_add_rule, {"rule": "sgd"}, "rule", "adamw"),
    (lambda p: optim.Offload(optim.AdamW(p, ema_decay=0.9)), {}, "params_or_optimizer", "AdamW"),
    (lambda p: optim.Offload(optim.ScheduleFreeAdamW(p)), {}, "params_or_optimizer", "ScheduleF"),
    (_schedule, {"batch_size": 0}, "batch_size", "0"),
    (_schedule, {"base_batch_size": -1}, "base_batch_size", "-1"),
    (_schedule, {"warmup_steps": -1}, "warmup_steps", "-1"),
    (_schedule, {"warmup_start": 1.5}, "warmup_start", "1.5"),
    (_schedule, {"power": -1.0}, "power", "-1.0"),
    (_schedule, {"warmup_steps": 5, "total_steps": 5}, "total_steps", "5"),
]
IN_GROUPS: list[Refused] = [
    (optim.Lion, {"cautious": 1}, "cautious", "cautious"),
    (optim.SGD, {"cautious": True}, "cautious", "Muon"),
    (optim.LAMB, {"cautious_decay": True}, "cautious_decay", "Muon"),
]
# torch's own errors.
BY_TORCH: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (optim.AdamW, {"momentum": 0.9}, TypeError, "momentum"),
    (lambda p: optim.AdamW(p).add_param_group(p), {}, TypeError, "must be a dict"),
    (lambda p: optim.Muon([q[0] for q in p]), {}, ValueError, "only supports 2D"),
]


def _assert_refused(make: Any, argument: str, says: str, params: Any, **settings: Any) -> None:
    with pytest.raises(torchweld.ArgumentError, match=says) as caught:
        make(params, **settings)
    assert caught.value.argument == argument


def _name(value: Any) -> str:
    """The part of a test's name; a function's own text has its address."""
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(
    ("make", "settings", "argument", "says"), ANYWHERE + AS_ARGUMENTS, ids=_name
)
def test_arguments_are_named(make: Any, settings: Any, argument: str, says: str) -> None:
    _assert_refused(make, argument, says, P, **settings)


@pytest.mark.parametrize(("make", "settings", "argument", "says"), ANYWHERE + IN_GROUPS, ids=_name)
def test_settings_of_groups_are_named(make: Any, settings: Any, argument: str, says: str) -> None:
    _assert_refused(make, argument, says, [{"params": P, **settings}])


@pytest.mark.parametrize(("make", "settings", "error", "says"), BY_TORCH, ids=_name)
def test_torchs_own_errors(make: Any, settings: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        make(P, **settings)


EIGHT_BIT = {
    optim.Adam8bit: optim.Adam,
    optim.AdamW8bit: optim.AdamW,
    optim.LAMB8bit: optim.LAMB,
    optim.Lion8bit: optim.Lion,
}


@pytest.mark.parametrize("alias", EIGHT_BIT)
def test_bitsandbytes_names(alias: Any) -> None:
    """Its arguments, and an error for unsupported ones."""
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1}
    a = run_bits(lambda p: alias(p, **settings, min_8bit_size=8192, is_paged=False, args=None))
    if alias is optim.LAMB8bit:
        settings["eps"] = 1e-8  # there; LAMB's own is 1e-6
    b = run_bits(
        lambda p: EIGHT_BIT[alias](p, **settings, state_dtype="8bit", min_quantized_size=8192)
    )
    assert same(a, b)
    for refused in ({"is_paged": True}, {"percentile_clipping": 5}, {"block_wise": False}):
        with pytest.raises(torchweld.ArgumentError) as caught:
            alias(P, **refused)
        assert caught.value.argument in refused


def test_bitsandbytes_lamb() -> None:
    """Its defaults: eps is 1e-8, and a step no longer than max_unorm = 1 times the tensor."""
    optimizer = optim.LAMB8bit(P, max_unorm=1.0)
    assert optimizer.param_groups[0]["eps"] == 1e-8
    p = draw(shapes=[(64, 128)])[0]
    before = p.detach().clone()
    draw_grads([p], 0, scale=100.0)
    optim.LAMB8bit([p], lr=1.0, max_unorm=1.0).step()
    assert (p.detach() - before).norm() <= (1 + 1e-5) * before.norm()


def test_a_step_that_cannot_be_taken_writes_nothing(backend: str) -> None:
    """Sparse gradients, and parameters whose shape changed."""
    params, optimizer = run(lambda p: optim.AdamW(p, state_dtype="8bit"))
    before = snapshot(params, optimizer)
    draw_grads(params, 0)
    params[1].grad = params[1].grad.to_sparse()
    with pytest.raises(torchweld.ArgumentError, match="sparse"):
        optimizer.step()
    assert same(snapshot(params, optimizer), before)
    params[1].grad = None
    params[4].data = torch.ones(3)
    params[4].grad = torch.ones(3)
    with pytest.raises(torchweld.ArgumentError, match=r"\[3\]"):
        optimizer.step()
    params[4].data = before[4]
    assert same(snapshot(params, optimizer), before)


# --- Kernels' own checks ----------------------------------------------------------------------


def _call(op: Any, settings: tuple[Any, ...], **changed: Any) -> None:
    """A step of a parameter of [4, 300] by this op, which may refuse it before it writes."""
    x = torch.zeros(4, 300)
    given: dict[str, Any] = {
        **{"params": [x], "grads": [torch.ones_like(x)], "masters": []},
        "moments": [x.to(torch.uint8) for _ in range(2)],
        "absmaxes": [torch.zeros(4, 2) for _ in range(2)],
        **{"new_absmaxes": [], "steps": [torch.tensor(0.0)], "edges": []},
        **{"rounding_offsets": [], "companions": [], "lr": torch.tensor(1.0)},
        **dict.fromkeys(("ratios", "grad_scale", "clip", "found_inf", "sums", "each")),
        "wholes": [],
    }
    try:
        op(*(given | changed).values(), *settings)
    finally:
        assert changed.get("params") or not x.any()


def test_kernels_refuse_by_themselves() -> None:
    """Called past Python's checks: before anything is written."""
    adam, absmaxes = torch.ops.torchweld.adam.cpu, torch.ops.torchweld.adam_absmaxes.cpu

    def call(of: Any = adam, **changed: Any) -> None:
        _call(of, (0.9, 0.999, 1e-8, 0.0, True, False, False), **changed)

    def cut(*edges: int, pieces: int = 2, dtype: torch.dtype = torch.int64) -> dict[str, Any]:
        both = ([torch.zeros(4, pieces) for _ in range(2)] for _ in range(2))
        scales = dict(zip(("absmaxes", "new_absmaxes"), both, strict=True))
        return {"edges": [torch.tensor(edges, dtype=dtype)]} | scales

    def rounded(**changed: Any) -> dict[str, Any]:
        half = {"params": [x.bfloat16()], "grads": [torch.ones_like(x).bfloat16()]}
        return half | {"rounding_offsets": [torch.tensor([0, 0, 300, 1])]} | changed

    x = torch.zeros(4, 300)
    call(lr=torch.tensor(0.0))
    call(**rounded())
    call(lr=torch.tensor(0.0), **cut(0, 100, 300))
    call(absmaxes, **cut(0, 100, 300))
    wrong: list[dict[str, Any]] = [
        {"grads": []},
        {"grads": [torch.ones(4, 299)]},
        {"grads": [torch.ones(4, 300).half()]},
        {"moments": [x, x]},
        {"companions": [x.double()]},
        {"companions": [x[:3]]},
        {"companions": [x, x]},
        {"each": torch.ones(1, 6, dtype=torch.float64)},
        {"each": torch.ones(2, 7, dtype=torch.float64)},
        {"each": torch.ones(1, 7)},
        {"masters": [x.to(torch.int8)]},
        {"moments": [x.double()] * 2, "absmaxes": []},
        {"moments": [x.to(torch.uint8)], "absmaxes": [torch.zeros(4, 2)]},
        {"absmaxes": [torch.zeros(4, 3)] * 2},
        {"absmaxes": []},
        {"masters": [x]},
        {"masters": [x.short()]},
        {"params": [x.double()], "grads": [x.double()]},
        {"steps": []},
        {"steps": [torch.tensor(0)]},
        {"lr": torch.ones(2)},
        {"of": absmaxes},
        {"ratios": torch.ones(2, dtype=torch.float64)},
        {"ratios": torch.ones(1)},
        cut(0, 100, 299),
        cut(1, 100, 300),
        cut(0, 300, 300),
        cut(0, 300, pieces=1),
        cut(0, 100, 300, pieces=3),
        cut(0, 100, 300, dtype=torch.int32),
        cut(0, 100, 300) | {"absmaxes": [torch.zeros(2, 4, 2)] * 2},
        cut(0, 100, 300) | {"new_absmaxes": [torch.zeros(2, 4, 2)] * 2},
        cut(0, 100, 300) | {"new_absmaxes": []},
        cut(0, 100, 300) | {"edges": [torch.tensor([0, 100, 300])] * 2},
        {"moments": [x, x], "absmaxes": [], "edges": [torch.tensor([0, 256, 300])]},
        {"rounding_offsets": [torch.tensor([0, 0, 300, 1])]},  # of float32
        rounded(masters=[x]),
        rounded(rounding_offsets=[torch.tensor([0, 0, 300])]),
        rounded(rounding_offsets=[torch.tensor([0, 0, 300, 1])] * 2),
        rounded(rounding_offsets=[torch.tensor([0.0, 0.0, 300.0, 1.0])]),
    ]
    for changed in wrong:
        with pytest.raises(RuntimeError):
            call(**changed)
    with pytest.raises(RuntimeError):
        torch.ops.torchweld.sum_of_squares.cpu([])


def test_adafactors_kernels_refuse_by_themselves() -> None:
    """Averages that do not fit, called past Python's checks."""
    step, squares = torch.ops.torchweld.adafactor.cpu, torch.ops.torchweld.adafactor_squares.cpu

    def call(of: Any = step, sizes: tuple[int, ...] = (4, 300), **changed: Any) -> None:
        settings = (-0.8, 0.0, 1e-7, 1e-3, 1.0, 0.0, 0.0, True, False, True, False)
        moments = [torch.zeros(size) for size in sizes]
        _call(of, settings, **{"moments": moments, "absmaxes": []} | changed)

    call(lr=torch.tensor(0.0))
    sums, wholes = torch.zeros(307, dtype=torch.float64), [8, 300, 2400]
    call(squares, sums=sums, wholes=wholes)
    assert sums.tolist() == [300.0] * 4 + [4.0] * 300 + [0.0] * 3
    params = [torch.zeros(4, 300), torch.zeros(4)]
    lists = {"params": params, "grads": [torch.ones_like(p) for p in params]}
    for wrong in (
        {"of": squares, "sums": sums[1:], "wholes": wholes},
        {"of": squares, "sums": sums.float(), "wholes": wholes},
        {"of": squares, "sums": sums, "wholes": wholes[1:]},
        {"of": squares, "sums": None, "wholes": wholes},
        {"sizes": (4,)},
        {"sizes": (300, 4)},
        {"moments": [torch.zeros(4).double(), torch.zeros(300)]},
        {**lists, "steps": [torch.tensor(0.0) for _ in params], "sizes": (4, 4, 4, 4)},
    ):
        with pytest.raises(RuntimeError):
            call(**wrong)  # type: ignore[arg-type]


# --- Settings that C++ and Python agree on --------------------------------------------------------


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
