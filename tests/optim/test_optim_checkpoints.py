"""torch's distributed checkpoints: from torch's optimizers to ours and back, also repeatedly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from torchweld import optim
from torchweld.errors import ArgumentError

# torch warns that one process has nothing to coordinate.
pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
FLAT = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(80, 64), torch.nn.Linear(64, 3))


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(5, 80, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()


def _save(model: torch.nn.Module, optimizer: Any, folder: Path, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"model": model.state_dict(), "optim": state}, checkpoint_id=folder, no_dist=True)


def _load(model: torch.nn.Module, optimizer: Any, folder: Path, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    loaded = {"model": model.state_dict(), "optim": state}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(loaded["model"])
    set_optimizer_state_dict(model, optimizer, loaded["optim"], options=options)


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"lr": 1e-3}),
    ("Adam", {"lr": 1e-3, "amsgrad": True}),
    ("SGD", {"lr": 1e-3}),
    ("SGD", {"lr": 1e-3, "momentum": 0.9}),
    ("SGD", {"lr": 1e-3, "momentum": 0.9, "dampening": 0.5}),
    ("Adafactor", {"lr": 1e-3}),
]


@FLAT
@pytest.mark.parametrize("from_torch", [True, False])
@pytest.mark.parametrize(("name", "settings"), SETTINGS, ids=str)
def test_both_ways(
    name: str, settings: dict[str, Any], from_torch: bool, flat: bool, tmp_path: Path
) -> None:
    """Our own arguments are in no checkpoint: a loaded run continues like the saved one."""
    theirs, ours = getattr(torch.optim, name), getattr(optim, name)

    def of_us(params: Any) -> Any:
        groups = [{"params": [p], "lr": 1e-3 * (i + 1)} for i, p in enumerate(params)]
        return ours(groups, **settings, max_grad_norm=1e9, min_quantized_size=10**9)

    def of_torch(params: Any) -> Any:
        return theirs([{"params": [p]} for p in params], **settings)

    first, second = (of_torch, of_us) if from_torch else (of_us, of_torch)
    model, other = _model(), _model()
    saved, loaded = first(model.parameters()), second(other.parameters())
    _train(model, saved, 3)
    _save(model, saved, tmp_path, flat)
    _load(other, loaded, tmp_path, flat)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in saved.state[p].items():
            assert key == "step" or torch.equal(loaded.state[q][key], value)
    assert [g["lr"] for g in loaded.param_groups] == [g["lr"] for g in saved.param_groups]
    _train(model, saved, 2)
    _train(other, loaded, 2)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@FLAT
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Lion, optim.LAMB, optim.Adafactor])
def test_saved_fresh_and_loaded_again(kind: Any, flat: bool, tmp_path: Path) -> None:
    """A run's first checkpoint, before any step, is loaded twice in one process."""
    codec: dict[str, Any] = {} if kind is optim.Adafactor else {"state_dtype": "8bit"}

    def make(model: torch.nn.Module) -> Any:
        matrices = [{"params": [p for p in model.parameters() if p.ndim > 1]} | codec]
        vectors = [{"params": [p for p in model.parameters() if p.ndim == 1], "lr": 1e-4}]
        return kind(matrices + vectors, lr=1e-3, max_grad_norm=1.0)

    model, other = _model(), _model()
    optimizer = make(model)
    before = [p.detach().clone() for p in model.parameters()]
    _save(model, optimizer, tmp_path, flat)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    loaded = make(other)
    for _ in range(2):
        _load(other, loaded, tmp_path, flat)
        _train(other, loaded, 1)
    _save(other, loaded, tmp_path / "later", flat)
    _load(model, optimizer, tmp_path / "later", flat)
    assert optimizer.max_grad_norm == 1.0
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
        for key, value in loaded.state[q].items():
            assert torch.equal(optimizer.state[p][key], value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float16, torch.float64, None])
def test_steps_of_any_dtype(dtype: torch.dtype | None) -> None:
    """An older torch counted in integers, others in the parameter's dtype."""
    model = _model()
    optimizer = optim.AdamW(model.parameters())
    _train(model, optimizer, 2)
    state = optimizer.state_dict()
    for of_param in state["state"].values():
        step = of_param["step"]
        of_param["step"] = int(step) if dtype is None else step.to(dtype)
    optimizer.load_state_dict(state)
    _train(model, optimizer, 1)
    assert all(of_param["step"] == 3 for of_param in optimizer.state.values())


CODECS: list[dict[str, Any]] = [
    {},
    {"master_weights": True},
    {"master_weights": "remainder"},
    {"state_dtype": "8bit", "min_quantized_size": 0},
    {"state_dtype": "8bit"},
    {"state_dtype": torch.bfloat16},
]


def _loses_entries(saving: dict[str, Any], loading: dict[str, Any]) -> bool:
    """Whether the loading optimizer's states have entries that the saved ones lack."""
    masters = [settings.get("master_weights") for settings in (saving, loading)]
    sizes = [
        settings.get("min_quantized_size", 4096) if "8bit" in settings.values() else None
        for settings in (saving, loading)
    ]
    return sizes[0] != sizes[1] or (masters[1] is not None and masters[0] != masters[1])


@pytest.mark.parametrize("loading", CODECS, ids=str)
@pytest.mark.parametrize("saving", CODECS, ids=str)
def test_a_flat_state_loads_as_the_nested_one_does_or_not_at_all(
    saving: dict[str, Any], loading: dict[str, Any]
) -> None:
    """The flat form has only the entries of the loading optimizer's states: masters, codes."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, one, other = (_model().bfloat16() for _ in range(3))
    saved = optim.AdamW(model.parameters(), lr=1e-2, **saving)
    for step in range(3):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        saved.step()
    for each in (one, other):
        each.load_state_dict(model.state_dict())
    by_flat, by_nested = (optim.AdamW(m.parameters(), lr=1e-2, **loading) for m in (one, other))
    by_nested.load_state_dict(copy.deepcopy(saved.state_dict()))
    state = copy.deepcopy(get_optimizer_state_dict(model, saved, options=flat))
    if _loses_entries(saving, loading):
        with pytest.raises(ArgumentError, match="state_dict is without"):
            set_optimizer_state_dict(one, by_flat, state, options=flat)
        return
    set_optimizer_state_dict(one, by_flat, state, options=flat)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert by_flat.state[p].keys() == by_nested.state[q].keys()
        for key, value in by_nested.state[q].items():
            assert torch.equal(by_flat.state[p][key], value), key
