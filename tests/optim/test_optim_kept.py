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
Event = Callable[[Any, Any], None]


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


def _change_a_rate(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[2]["lr"] = 0.3


def _change_all_rates(model: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.07


def _make_a_rate_a_tensor(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)


def _change_a_setting(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[1]["weight_decay"] = 0.4


def _maximize(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["maximize"] = True


def _add_a_moment(model: Any, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        if "amsgrad" in group:
            group["amsgrad"] = True
        elif "momentum" in group:
            group["momentum"] = 0.5


def _lose_a_gradient(model: Any, optimizer: Any) -> None:
    model[1].weight.grad = None


def _write_a_state(model: Any, optimizer: Any) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value + 1


def _drop_a_state(model: Any, optimizer: Any) -> None:
    optimizer.state[model[0].weight] = {}


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


def _transpose_memory(model: Any, optimizer: Any) -> None:
    model[1].weight.grad = torch.randn(96, 96, generator=torch.Generator().manual_seed(5)).t()


def _negate_a_gradient(model: Any, optimizer: Any) -> None:
    model[1].weight.grad = torch._neg_view(model[1].weight.grad)


def _clip(model: Any, optimizer: Any) -> None:
    optimizer.max_grad_norm = 0.5


def _scale(model: Any, optimizer: Any) -> None:
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)


def _freeze(model: Any, optimizer: Any) -> None:
    model[0].weight.requires_grad_(False)


EVENTS: list[Event] = [
    *(_change_a_rate, _change_all_rates, _make_a_rate_a_tensor, _change_a_setting, _maximize),
    *(_add_a_moment, _lose_a_gradient, _write_a_state, _drop_a_state, _load),
    *(_replace_a_parameter, _move_memory, _transpose_memory, _scale, _freeze),
    *(_negate_a_gradient, _clip),
]
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


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__[1:])
@pytest.mark.parametrize("kind", KINDS)
def test_after_an_event_in_the_middle(kind: str, event: Event) -> None:
    mine, expected = _train(kind, event, True), _train(kind, event, False)
    assert len(mine) == len(expected)
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
