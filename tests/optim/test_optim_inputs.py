"""Inputs that torch's optimizers take, and steps that reuse the batches of the last one."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import fresh
import torchweld
from optimizers import KINDS, draw, draw_grads, maker, same, snapshot
from refusing import refuses
from torchweld import numerics, optim
from torchweld.optim import _rounding_offsets, _sharded_blocks
from torchweld.optim._shards import cache_tensors

BF16 = torch.bfloat16


def _stepped(make: Any, params: list[torch.Tensor], grads: Any, steps: int = 3) -> Any:
    optimizer = make(params)
    for _ in range(steps):
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return optimizer


# --- torch's defaults -------------------------------------------------------------------------


# Every number of dimensions, and rows of one block and of two.
_SMALL = ((7,), (5, 300), (1,), (), (0, 5), (4, 3, 5))


@contextmanager
def _default(default: Any) -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        if isinstance(default, torch.dtype):
            torch.set_default_dtype(default)
            yield
        else:
            with torch.device(default):
                yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=str)
def test_defaults_change_no_step(kind: Any, settings: dict[str, Any], backend: str) -> None:
    """Neither a default dtype nor a default device affects a step's internal tensors."""
    state_dtype = torch.float32 if "Adafactor" in kind.__name__ else "8bit"
    make = maker(kind, settings | {"maximize": True, "max_grad_norm": 1.0}, state_dtype)
    start = [p.detach() for p in draw(shapes=_SMALL)]
    grads = [torch.randn_like(p) for p in start]
    plain = [p.clone().requires_grad_() for p in start]
    expected = snapshot(plain, _stepped(make, plain, grads))
    for default in (BF16, torch.float64, "meta"):
        params = [p.clone().requires_grad_() for p in start]
        with _default(default):
            optimizer = _stepped(make, params, grads)
        assert same(snapshot(params, optimizer), expected), default
        with _default(default):
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        assert all(type(v) is torch.Tensor for s in optimizer.state.values() for v in s.values())


def test_imported_under_other_defaults() -> None:
    """Tensors made at import, such as the maps of 8-bit blocks, are on the CPU."""
    program = """
import torch
torch.set_default_dtype(torch.bfloat16)
torch.set_default_device("meta")
import torchweld
from torchweld.ops.quantize_8bit import MAPS, THRESHOLDS
for table in [*MAPS.values(), *THRESHOLDS.values()]:
    assert table.dtype == torch.float32 and table.device.type == "cpu"
p = torch.ones(64, 256, dtype=torch.float32, device="cpu", requires_grad=True)
p.grad = torch.ones_like(p)
for backend in ("cpu", "eager"):
    with torchweld.use_backend(backend):
        torchweld.optim.AdamW8bit([p], lr=0.1, weight_decay=0).step()
print(p.sum().item() / p.numel())
"""
    ran = fresh.run(program)
    assert ran.returncode == 0, ran.stderr
    assert abs(float(ran.stdout) - 0.8) < 1e-6


# --- Groups and states ------------------------------------------------------------------------


def test_a_group_listed_twice() -> None:
    (p,) = draw(shapes=[(5,)])
    for kind in (optim.SGD, torch.optim.SGD):
        optimizer = kind([p], lr=0.1, momentum=0.9)
        optimizer.param_groups.append(optimizer.param_groups[0])
        draw_grads([p], 0)
        optimizer.step()
        assert [list(s) for s in optimizer.state_dict()["state"].values()] == [["momentum_buffer"]]


def test_a_foreign_entry_of_the_state() -> None:
    (p,) = (t.detach().bfloat16().requires_grad_() for t in draw(shapes=[(5,)]))
    optimizer = optim.AdamW([p], master_weights=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.state["note"] = 3
    with torch.no_grad():
        p.fill_(2)
    optimizer.refresh_masters()
    assert (optimizer.state[p]["master"] == 2).all()
    optimizer.step()
    assert optimizer.state["note"] == 3


# --- Parameters -------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=str)
def test_a_subclass_that_wraps_tensors(kind: Any, settings: dict[str, Any], backend: str) -> None:
    """Each wrapped tensor steps as it would by itself, for rules without norms."""
    grads = [torch.randn(4, 9, generator=torch.Generator().manual_seed(i)) for i in (2, 3)]
    alone = [torch.ones(4, 9), torch.full((4, 9), 2.0)]
    p: Any = torch.nn.Parameter(TwoTensor(*[t.clone() for t in alone]))
    optimizer = maker(kind, settings)([p])
    for _ in range(3):
        p.grad = TwoTensor(*[g.clone() for g in grads])
        optimizer.step()
    parts = [t.requires_grad_() for t in alone]
    for part, g in zip(parts, grads, strict=True):
        _stepped(maker(kind, settings), [part], [g])
    torch.testing.assert_close([*(p.a, p.b)], [*parts], **numerics.ROUNDED)
    assert optimizer.state[p]["step"] == 3
    if optimizer.state[p].keys() & {"exp_avg", "momentum_buffer"}:
        refuses("TwoTensor", maker(kind, settings, "8bit")([p]).step)


def test_parameters_given_twice() -> None:
    """In one group torch warns, and a step is taken once; in two it is an error."""
    a, b = draw(shapes=[(40, 8), (3,)])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = optim.AdamW([("a", a), ("b", b), ("again", a)])
    assert optimizer.param_groups[0]["params"] == [a, b]
    assert optimizer.param_groups[0]["param_names"] == ["a", "b"]
    draw_grads([a, b], 0)
    optimizer.step()
    assert optimizer.state[a]["step"] == 1
    with pytest.raises(ValueError, match="more than one parameter group"):
        optim.AdamW([{"params": [a]}, {"params": [a]}])


OVERLAPPING: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "the same": lambda t: [t.view(-1), t.view(-1)],
    "in part": lambda t: [t.view(-1)[:40], t.view(-1)[39:60]],
    "of other types": lambda t: [t, t.view(torch.int32).view(BF16)],
    "across": lambda t: [t[:, 3], t[2:4]],
}
APART: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "side by side": lambda t: [t.view(-1)[:40], t.view(-1)[40:]],
    "columns": lambda t: [t[:, :3], t[:, 3:5], t[:, 5:]],
    "every other": lambda t: [t.view(-1)[::2], t.view(-1)[1::2]],
    "none of it": lambda t: [t[:0], t],
    "on no device": lambda t: [t, t.to("meta"), t.to("meta")],
}


@pytest.mark.parametrize("case", OVERLAPPING)
def test_parameters_that_share_memory(case: str) -> None:
    """Two threads would write to it: rejected, however it is shared and passed."""
    params = [t.detach().requires_grad_() for t in OVERLAPPING[case](torch.zeros(8, 16))]
    refuses("shares memory", optim.SGD, params, lr=0.1)
    optimizer = optim.SGD(params[:1], lr=0.1)
    refuses("shares memory", optimizer.add_param_group, {"params": params[1:]})


@pytest.mark.parametrize("case", APART)
def test_parameters_that_lie_between_each_other(case: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = [t.detach().requires_grad_() for t in APART[case](torch.zeros(8, 16))]
        optim.SGD(params, lr=0.1)


def test_masters_follow_what_is_set_from_outside_once_they_are_refreshed() -> None:
    for masters in (True, "remainder"):
        p = draw(BF16, [(40, 8)])[0]
        make = maker(optim.AdamW, {}, masters=masters)
        optimizer = _stepped(make, [p], [torch.ones(40, 8, dtype=BF16)])
        with torch.no_grad():
            p.fill_(5.0)
        optimizer.refresh_masters()
        p.grad = torch.zeros_like(p)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        assert (p == 5.0).all()


# --- Groups and numbers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "lr", [torch.tensor(1), torch.tensor(0.5).bfloat16(), torch.tensor([0.25]), 0.125], ids=str
)
def test_learning_rates_of_any_dtype(lr: Any, backend: str) -> None:
    for kind in (optim.SGD, optim.AdamW, optim.Lion, optim.LAMB, optim.LARS):
        p = torch.ones(5, requires_grad=True)
        expected = torch.ones(5, requires_grad=True)
        for q, rate in ((p, lr), (expected, float(lr))):
            q.grad = torch.full((5,), 0.5)
            kind([q], lr=rate).step()
        torch.testing.assert_close(p, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=str)
def test_groups_step_as_one_and_as_each_by_itself(
    kind: Any, settings: dict[str, Any], backend: str
) -> None:
    """Groups with other learning rates and settings: the bits of separate optimizers."""
    shapes = [(33, 70), (5,), (33, 70), (8, 8), (5,), (33, 70)]
    varied: list[dict[str, Any]] = [
        {"lr": 1e-2},
        {"lr": 3e-3, "name": "a user's own"},
        {"lr": torch.tensor(2e-2, dtype=torch.float64)},
        {"lr": 1e-3, "weight_decay": 0.3},
        {"lr": 1e-2, "maximize": True, "betas": [0.8, 0.9]},
        {"lr": 5e-3, "master_weights": True, "state_dtype": torch.float32},
    ]
    if kind is optim.AdEMAMix:
        varied[4]["betas"] = [0.8, 0.9, 0.99]
    grads = [torch.randn(s, generator=torch.Generator().manual_seed(1)) for s in shapes]
    for dtype in (torch.float32, BF16):
        params, alone = draw(dtype, shapes), draw(dtype, shapes)
        make, cast = maker(kind, settings), [g.to(dtype) for g in grads]
        groups = [{"params": [p]} | more for p, more in zip(params, varied, strict=True)]
        _stepped(lambda _, make=make, groups=groups: make(groups), params, cast)
        for p, g, more in zip(alone, cast, varied, strict=True):
            _stepped(lambda _, p=p, more=more, make=make: make([{"params": [p]} | more]), [p], [g])
        assert same(params, alone)


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW, optim.Lion, optim.AdEMAMix])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("first", ["of another dtype", "without a gradient", "stepped too"])
def test_a_batch_has_the_settings_of_its_own_groups(first: str, dtype: Any, kind: Any) -> None:
    """Groups share a pass, but the first of them may have no parameter in it."""
    before, p = draw(BF16 if first == "of another dtype" else dtype, [(9,)]), draw(dtype, [(9,)])
    alone, grads = draw(dtype, [(9,)]), draw(dtype, [(9,)])
    before[0].grad = None if first == "without a gradient" else torch.ones_like(before[0])
    groups = [{"params": before}, {"params": p, "weight_decay": 0.5}]
    _stepped(lambda _: kind(groups, lr=0.1, weight_decay=0.0), p, grads)
    _stepped(lambda _: kind(alone, lr=0.1, weight_decay=0.5), alone, grads)
    # Other settings differ by a tenth; float64 steps in a group of one are torch's.
    torch.testing.assert_close(p, alone, rtol=0, atol=1e-12)


def test_a_step_is_linear_in_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for groups that differ in numbers; each group is visited once."""
    calls: list[int] = []
    op = type(optim.AdamW([torch.zeros(1)])._rule)
    step = op.step
    monkeypatch.setattr(
        op, "step", lambda self, batch, *a, **k: (calls.append(1), step(self, batch, *a, **k))
    )
    params = [torch.zeros(3, requires_grad=True) for _ in range(50)]
    draw_grads(params, 0)
    numbers: Any = [
        {"lr": 1e-3 * (i + 1), "weight_decay": i / 100, "betas": (0.9, 0.9 + i / 1000)}
        for i in range(50)
    ]
    groups = zip(params, numbers, strict=True)
    optimizer = optim.AdamW([{"params": [p], **of_group} for p, of_group in groups])
    optimizer.step()
    assert len(calls) == 1
    # The first step of Adam's is lr long.
    lengths = torch.stack([p.detach().abs().mean() for p in params])
    torch.testing.assert_close(lengths, 1e-3 * torch.arange(1, 51), rtol=1e-3, atol=0)


@pytest.mark.parametrize("mode", [FakeTensorMode, torch.inference_mode])
def test_tensors_kept_between_steps_are_not_of_a_mode(mode: Any) -> None:
    """A first step under the mode, one without it, and one under it again."""

    def step() -> torch.Tensor:
        # No other test has this shape.
        p = torch.nn.Parameter(torch.ones(37, 11 + (mode is FakeTensorMode), dtype=torch.bfloat16))
        p.grad = torch.ones_like(p)
        optim.AdamW([p], stochastic_rounding=True).step()
        return p

    with mode():
        step()
    assert not step().detach().isnan().any()
    with mode():
        step()


@pytest.mark.parametrize("function", [_rounding_offsets._make_offset, _sharded_blocks._split_rows])
def test_both_caches_of_tensors_know_of_modes(function: Any) -> None:
    """Under a mode they bypass the cache."""
    assert function.__code__ is cache_tensors(maxsize=1)(len).__code__


# --- Without data -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["meta", "fake"])
@pytest.mark.parametrize(
    "rule", range(len(KINDS)), ids=[f"{i} {cls.__name__}" for i, (cls, _) in enumerate(KINDS)]
)
def test_states_are_those_of_the_cpu(rule: int, where: str, dtype: torch.dtype) -> None:
    """Two steps of matrices; saved states have the sizes and dtypes of real ones."""
    cls, settings = KINDS[rule]

    def states(device: str) -> list[Any]:
        shapes = ((64, 80), (80, 64))
        params = [torch.ones(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]
        optimizer = cls(params, **settings)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        return [
            (key, list(t.shape), t.dtype) if isinstance(t, torch.Tensor) else (key, type(t))
            for state in optimizer.state_dict()["state"].values()
            for key, t in state.items()
        ]

    expected = states("cpu")
    with FakeTensorMode() if where == "fake" else nullcontext():
        assert states("meta" if where == "meta" else "cpu") == expected


# --- Numbers and empty tensors ----------------------------------------------------------------


@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=str)
def test_numbers_in_groups_with_rates_of_their_own(kind: Any, settings: dict[str, Any]) -> None:
    """A 0-dim parameter steps as a vector of one element does, by the reference too."""
    found = []
    for shape in ((), (1,)):
        params = [torch.full(shape, 0.5, dtype=dtype) for dtype in (torch.float64, torch.float32)]
        params = [torch.nn.Parameter(p) for p in params]
        make = maker(kind, settings)
        groups: Any = [{"params": p, "lr": lr} for p, lr in zip(params, (1e-2, 3e-2), strict=True)]
        optimizer = make(groups)
        for name in ("cpu", "eager"):
            for p in params:
                p.grad = torch.ones_like(p)
            with torchweld.use_backend(name, "eager"):
                optimizer.step()
        found.append([p.detach().reshape(()) for p in params])
    assert same(*found)
    assert all(p != 0.5 for p in found[0])


@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=str)
def test_an_empty_tensor_first(kind: Any, settings: dict[str, Any], backend: str) -> None:
    """As the shard that a process without rows has."""
    make, (p,), grads = maker(kind, settings), draw(shapes=((5, 300),)), [torch.ones(5, 300)]
    alone = p.detach().clone().requires_grad_()
    _stepped(make, [alone], grads)
    empty = torch.zeros(0, 4, requires_grad=True)
    _stepped(make, [empty, p], [torch.zeros(0, 4), *grads])
    assert same([p], [alone])


# --- Batches that are kept ------------------------------------------------------------------------


Model = nn.Module
Event = Callable[[Any, Any], Any]


def _make_model() -> Model:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 96), nn.Linear(96, 96), nn.Linear(96, 4))


def _groups(model: Any) -> list[dict[str, Any]]:
    """Two groups of different settings and one with the settings of the first."""
    return [
        {"params": [model[0].weight, model[1].weight], "weight_decay": 0.1},
        {"params": [model[0].bias, model[1].bias], "weight_decay": 0.0},
        {"params": [model[2].weight, model[2].bias], "weight_decay": 0.1},
    ]


def _set_gradients(model: Model, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draw).to(p.dtype)


def _set_in_all(**settings: Any) -> Event:
    """Set what a group has of these settings, in each group."""
    return lambda model, optimizer: [
        group.update({k: v for k, v in settings.items() if k in group})
        for group in optimizer.param_groups
    ]


def _set_in(at: int, **settings: Any) -> Event:
    return lambda model, optimizer: optimizer.param_groups[at].update(settings)


def _set_of_optimizer(**values: Any) -> Event:
    return lambda model, optimizer: [setattr(optimizer, k, v) for k, v in values.items()]


def _set_gradient(make: Callable[[torch.Tensor], torch.Tensor | None]) -> Event:
    return lambda model, optimizer: setattr(model[1].weight, "grad", make(model[1].weight.grad))


def _write_states(model: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value + 1


def _load_doubled(model: Any, optimizer: Any) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for value in state.values():
            value.mul_(2)
    optimizer.load_state_dict(saved)


def _replace_a_parameter(model: Any, optimizer: Any) -> None:
    old = model[1].weight
    model[1].weight = nn.Parameter(torch.ones(96, 96))
    model[1].weight.grad = old.grad
    for group in optimizer.param_groups:
        group["params"] = [model[1].weight if p is old else p for p in group["params"]]


def _move_memory(model: Any, optimizer: Any) -> None:
    for p in model.parameters():
        p.data = p.data.clone() * 2


EVENTS: dict[str, Event] = {
    "a rate": _set_in(2, lr=0.3),
    "all rates": _set_in_all(lr=0.07),
    "a tensor as a rate": _set_in(0, lr=torch.tensor(0.5)),
    "a setting": _set_in(1, weight_decay=0.4),
    "maximize": _set_in(0, maximize=True),
    "one more moment": _set_in_all(amsgrad=True, momentum=0.5),
    "no gradient": _set_gradient(lambda g: None),
    "a transposed gradient": _set_gradient(lambda g: g.t().contiguous().t()),
    "a negated gradient": _set_gradient(torch._neg_view),
    "written states": _write_states,
    "a dropped state": lambda model, optimizer: optimizer.state.update({model[0].weight: {}}),
    "loaded states": _load_doubled,
    "a replaced parameter": _replace_a_parameter,
    "moved memory": _move_memory,
    "a scaler": _set_of_optimizer(grad_scale=torch.tensor(8.0), found_inf=torch.tensor(0.0)),
    "clipping": _set_of_optimizer(max_grad_norm=0.5),
    "a frozen parameter": lambda model, optimizer: model[0].weight.requires_grad_(False),
}
KEPT = ("AdamW", "AdamW8bit", "SGD", "LAMB", "Lion", "Adafactor", "Muon")


def _train(kind: str, event: Event, keeps: bool, **options: Any) -> list[torch.Tensor]:
    model: Any = _make_model()
    groups = _groups(model)
    if kind == "Muon":
        groups = [
            {"params": [layer.weight], "weight_decay": i % 2 / 10} for i, layer in enumerate(model)
        ]
    optimizer = getattr(optim, kind)(groups, lr=0.1, **options)
    for step in range(6):
        if not keeps:
            optimizer._kept = None
        _set_gradients(model, step)
        if step == 3:
            event(model, optimizer)
        optimizer.step()
    states = (v for p in model.parameters() for v in optimizer.state.get(p, {}).values())
    return [*model.parameters(), *states]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("kind", KEPT)
def test_after_an_event_in_the_middle(kind: str, event: str) -> None:
    mine, expected = (_train(kind, EVENTS[event], keeps) for keeps in (True, False))
    torch.testing.assert_close([*mine], [*expected], **numerics.SAME)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("options", [{}, {"maximize": True}], ids=str)
def test_a_clipped_step_after_an_event_in_the_middle(options: Any, event: str) -> None:
    """Kept steps find their gradients' factor by one kernel, whole steps by a sum over devices."""
    of_event, options = EVENTS[event], {"max_grad_norm": 0.1, **options}
    mine, expected = (_train("AdamW", of_event, keeps, **options) for keeps in (True, False))
    torch.testing.assert_close([*mine], [*expected], **numerics.SAME)


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_a_scaled_step_is_kept(found: float) -> None:
    """With a scale, and gradients that may be infinite, a kept step is a whole one."""
    models = _make_model(), _make_model()
    optimizers = [optim.AdamW(model.parameters(), lr=0.1, max_grad_norm=0.5) for model in models]
    for step in range(4):
        for model, optimizer, keeps in zip(models, optimizers, (True, False), strict=True):
            if not keeps:
                optimizer._kept = None
            _set_gradients(model, step)
            optimizer.grad_scale = torch.tensor(8.0)  # type: ignore[attr-defined]
            optimizer.found_inf = torch.tensor(found if step == 2 else 0.0)  # type: ignore[attr-defined]
            optimizer.step()
    assert optimizers[0]._kept.ready  # type: ignore[union-attr]
    for mine, own in zip(*(model.parameters() for model in models), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close([mine, mine.grad], [own, own.grad], **numerics.SAME)


def test_batches_are_kept() -> None:
    """Else the comparisons above compare nothing."""
    model = _make_model()
    optimizer = optim.AdamW(_groups(model), lr=0.1)
    kept: list[Any] = []
    for step in range(4):
        _set_gradients(model, step)
        optimizer.step()
        kept.append(optimizer._kept)
    assert len(kept[0].ready) == 1  # groups on the CPU share a batch
    assert all(each is kept[0] for each in kept)
    # A comparison that never holds, as with a schedule of settings, is not prepared at each step.
    for step in range(40):
        optimizer.param_groups[0]["betas"] = (0.9 - step / 100, 0.999)
        _set_gradients(model, step)
        optimizer.step()
    assert optimizer._kept is None


def test_a_forced_backend_is_not_passed_by() -> None:
    model = _make_model()
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    _set_gradients(model, 0)
    optimizer.step()
    optimizer._kept.ready = [lambda: pytest.fail("the kernel ran")]  # type: ignore[union-attr]
    with torchweld.use_backend("eager"):
        optimizer.step()


def test_gradients_are_not_kept() -> None:
    model = _make_model()
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        _set_gradients(model, step)
        optimizer.step()
        grads = [weakref.ref(p.grad) for p in model.parameters()]
        optimizer.zero_grad()
        gc.collect()
        assert not any(grad() is not None for grad in grads)
