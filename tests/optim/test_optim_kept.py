"""A step that reuses the batches of the last one equals a step that gathers them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchweld
from torchweld import optim

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


def _load(model: Any, optimizer: Any) -> None:
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
    "loaded states": _load,
    "a replaced parameter": _replace_a_parameter,
    "moved memory": _move_memory,
    "a scaler": _set_of_optimizer(grad_scale=torch.tensor(8.0), found_inf=torch.tensor(0.0)),
    "clipping": _set_of_optimizer(max_grad_norm=0.5),
    "a frozen parameter": lambda model, optimizer: model[0].weight.requires_grad_(False),
}
KINDS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda groups: optim.AdamW(groups, lr=0.1),
    "AdamW8bit": lambda groups: optim.AdamW8bit(groups, lr=0.1),
    "SGD": lambda groups: optim.SGD(groups, lr=0.1),
    "LAMB": lambda groups: optim.LAMB(groups, lr=0.1),
    "Lion": lambda groups: optim.Lion(groups, lr=0.1),
    "Adafactor": lambda groups: optim.Adafactor(groups, lr=0.1),
    "Muon": lambda groups: optim.Muon(groups, lr=0.1),
}


def _train(kind: str, event: Event, keeps: bool) -> list[torch.Tensor]:
    model: Any = _make_model()
    groups = _groups(model)
    if kind == "Muon":
        groups = [
            {"params": [layer.weight], "weight_decay": i % 2 / 10} for i, layer in enumerate(model)
        ]
    optimizer = KINDS[kind](groups)
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
@pytest.mark.parametrize("kind", KINDS)
def test_after_an_event_in_the_middle(kind: str, event: str) -> None:
    mine, expected = (_train(kind, EVENTS[event], keeps) for keeps in (True, False))
    for a, b in zip(mine, expected, strict=True):
        assert torch.equal(a, b)


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


def test_a_schedule_of_settings_stops_the_keeping() -> None:
    """A comparison that never holds is not prepared at each step."""
    model = _make_model()
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    for step in range(40):
        optimizer.param_groups[0]["betas"] = (0.9 - step / 100, 0.999)
        _set_gradients(model, step)
        optimizer.step()
    assert optimizer._kept is None


def test_a_copy_and_a_pickle_have_batches_of_their_own() -> None:
    model = _make_model()
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    _set_gradients(model, 0)
    optimizer.step()
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert twin._kept is None
    for each, own in ((model, optimizer), (twin_model, twin)):
        _set_gradients(each, 1)
        own.step()
    for a, b in zip(model.parameters(), twin_model.parameters(), strict=True):
        assert torch.equal(a, b)
