"""Saved states: in files, in torch's classes and distributed checkpoints, with other codecs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
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

import optimizers
from optimizers import KINDS, SHAPES, ScheduleFreeAdamW, draw, draw_grads, run, same, snapshot
from torchweld import numerics, optim
from torchweld.errors import ArgumentError
from torchweld.functional import dequantize_8bit, quantize_8bit
from torchweld.ops.optimizer.reference import read_param

# torch warns that one process has nothing to coordinate.
pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
FLAT = pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
FEW = ((7,), (33, 70), (16, 256))


def _step_both(first: Any, second: Any, *seeds: int) -> None:
    """Steps of two runs, each of parameters and their optimizer, with the same gradients."""
    for seed in seeds:
        for params, optimizer in (first, second):
            draw_grads(params, seed)
            optimizer.step()


def _load_a_copy(optimizer: Any, params: list[torch.Tensor], saved: Any) -> Any:
    """Copies of the parameters, and the optimizer of them that `optimizer` makes and loads."""
    others = [p.detach().clone().requires_grad_() for p in params]
    loaded = optimizer(others)
    loaded.load_state_dict(copy.deepcopy(saved))
    return others, loaded


def _saved(params: list[torch.Tensor], optimizer: Any) -> list[torch.Tensor]:
    """The parameters, and their states as a checkpoint has them: SGD's are without a count."""
    states = optimizer.state_dict()["state"].values()
    return [*(p.detach() for p in params), *(v for state in states for v in state.values())]


# --- A run's own states -----------------------------------------------------------------------

FLOAT32: tuple[Any, ...] = (torch.float32, torch.float32, False)
SAVED = [
    *((optim.AdamW, {}, *codec) for codec in optimizers.CODECS),
    *((*kind, *FLOAT32) for kind in KINDS),
    *((*kind, torch.float32, "8bit", False) for kind in KINDS if kind[0] is optim.LAMB),
    (optim.Muon, {}, *FLOAT32),
]


@pytest.mark.parametrize(("kind", "settings", "dtype", "state_dtype", "masters"), SAVED, ids=str)
def test_a_saved_run_goes_on(
    kind: Any, settings: Any, dtype: torch.dtype, state_dtype: Any, masters: Any, tmp_path: Path
) -> None:
    """Through a file: nothing is cast, and the next steps have the bits they would have had."""
    make = optimizers.maker(kind, settings, state_dtype, masters)
    shapes = [s for s in SHAPES if len(s) > 1] if kind is optim.Muon else SHAPES
    a, first = run(make, dtype=dtype, shapes=shapes)
    torch.save([first.state_dict(), a], tmp_path / "saved.pt")
    state, b = torch.load(tmp_path / "saved.pt", weights_only=True)
    second = make(b)
    second.load_state_dict(state)
    _step_both((a, first), (b, second), 20, 21)
    assert same(_saved(a, first), _saved(b, second))


def test_copies_and_pickles() -> None:
    params, optimizer = run(lambda p: optim.AdamW(p, state_dtype="8bit", max_grad_norm=1.0))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        theirs = other.param_groups[0]["params"]
        assert same(snapshot(params, optimizer), snapshot(theirs, other))
        draw_grads(theirs, 3)
        more = draw(shapes=[(64, 64)])
        draw_grads(more, 3)
        other.add_param_group({"params": more})
        other.step()
        assert other.grad_norm is not None
        assert "exp_avg_codes" in other.state[more[0]]


DAMAGE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a moment is missing": (lambda s: s.pop("exp_avg_codes"), "without exp_avg"),
    "absmax is missing": (lambda s: s.pop("exp_avg_absmax"), "exp_avg_absmax"),
    "another shape": (lambda s: s.update(exp_avg_codes=torch.zeros(3)), "exp_avg_codes"),
    "another dtype": (
        lambda s: s.update(exp_avg_absmax=s["exp_avg_absmax"].double()),
        "exp_avg_absmax",
    ),
    "no tensor": (lambda s: s.update(exp_avg_sq_codes="codes"), "exp_avg_sq_codes"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_state_that_does_not_fit_changes_nothing(damage: str) -> None:
    params, optimizer = run(lambda p: optim.AdamW(p, state_dtype="8bit"))
    before = snapshot(params, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    function, named = DAMAGE[damage]
    function(saved["state"][1])
    with pytest.raises(ArgumentError, match=named):
        optimizer.load_state_dict(saved)
    assert same(snapshot(params, optimizer), before)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"].append(saved["param_groups"][0])
    with pytest.raises(ValueError, match="number of parameter groups"):
        optimizer.load_state_dict(saved)
    assert same(snapshot(params, optimizer), before)


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


# --- torch's states ---------------------------------------------------------------------------


def test_torchs_averages_of_16_bits_become_float32() -> None:
    """Adafactor's, and back, bit for bit; test_optim_conformance.py has float32's states."""
    shapes = [s for s in SHAPES if 0 not in s]  # torch's Adafactor divides by their number
    (a, ours), (b, theirs) = (
        run(lambda p, m=m: m.Adafactor(p), 6, torch.bfloat16, shapes) for m in (optim, torch.optim)
    )
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for p, q in zip(a, b, strict=True):
        assert all(torch.equal(ours.state[p][k], v.float()) for k, v in theirs.state[q].items())
        p.data.copy_(q.data)
    given = copy.deepcopy(ours.state_dict())
    theirs.load_state_dict(given)
    for loaded, state in zip(theirs.state.values(), given["state"].values(), strict=True):
        assert all(torch.equal(loaded[k], v.to(loaded[k].dtype)) for k, v in state.items())
    before = [p.detach().clone() for p in a]
    _step_both((a, ours), (b, theirs), 50)
    u = 2.0**-8
    for p, q, old in zip(a, b, before, strict=True):
        assert ((p - q).abs() <= 2 * u * q.abs() + 20 * u * (q - old).abs().max()).all()


def test_states_of_muon_are_torchs_both_ways() -> None:
    shapes = ((16, 16), (12, 40), (40, 12), (1, 9), (9, 1))
    params, mine = run(lambda p: optim.Muon(p, lr=0.02), 3, shapes=shapes)
    _, peer = _load_a_copy(lambda p: torch.optim.Muon(p, lr=0.02), params, mine.state_dict())
    assert peer.state_dict()["state"].keys() == mine.state_dict()["state"].keys()
    others, again = _load_a_copy(lambda p: optim.Muon(p, lr=0.02), params, peer.state_dict())
    fresh = [group.keys() for group in optim.Muon(others).state_dict()["param_groups"]]
    assert fresh == [group.keys() for group in peer.state_dict()["param_groups"]]
    _step_both((params, mine), (others, again), 9)
    assert same(_saved(params, mine), _saved(others, again))
    # They are there before the first step.
    optimizer = optim.Muon(draw(shapes=FEW[1:]), state_dtype="8bit", min_quantized_size=0)
    keys = [list(state) for state in optimizer.state_dict()["state"].values()]
    assert keys == [["momentum_buffer_codes", "momentum_buffer_absmax"]] * 2


def test_full_states_of_muon() -> None:
    """They have no dtype, which torch refuses in them."""
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, how = torch.nn.Linear(80, 12, bias=False), {"ns_dtype": torch.float32}
    saved, loaded = (optim.Muon(model.parameters(), lr, **how) for lr in (0.02, 0.1))
    _train(model, saved, 1)
    set_optimizer_state_dict(model, loaded, get_optimizer_state_dict(model, saved, options=full))
    assert loaded.param_groups[0] == saved.param_groups[0]
    assert loaded.param_groups[0]["ns_dtype"] is torch.float32
    assert same(snapshot([*model.parameters()], saved), snapshot([*model.parameters()], loaded))


def test_the_authors_states_of_schedule_free_load() -> None:
    """Their names, and groups that count steps; a state of theirs has no count of its own."""
    params, optimizer = run(ScheduleFreeAdamW, 4, shapes=FEW)
    state = optimizer.state_dict()
    assert state["state"][0].keys() == {"step", "z", "exp_avg_sq"}
    assert state["param_groups"][0].keys() == {
        *("lr", "betas", "eps", "weight_decay", "warmup_steps", "r", "weight_lr_power", "params"),
        *("k", "train_mode", "weight_sum", "lr_max", "scheduled_lr"),
    }
    theirs = copy.deepcopy(state)
    for entries in theirs["state"].values():
        del entries["step"]
    others, again = _load_a_copy(ScheduleFreeAdamW, params, theirs)
    _step_both((params, optimizer), (others, again), 7)
    assert same(snapshot(params, optimizer), snapshot(others, again))
    keys = optim.AdEMAMix(params).param_groups[0].keys()
    assert {"lr", "betas", "alpha", "beta3_warmup", "alpha_warmup", "eps"} <= keys


# --- States that are kept in another way ------------------------------------------------------


def test_states_are_converted_to_how_this_optimizer_keeps_them() -> None:
    """From float32 to codes and back, masters to remainders and back."""
    a, wide = run(lambda p: optim.AdamW(p, master_weights=True), dtype=torch.bfloat16)
    p = a[1]
    with_codes = optim.AdamW(a, state_dtype="8bit", master_weights="remainder")
    with_codes.load_state_dict(wide.state_dict())
    state = with_codes.state[p]
    codes, absmax = quantize_8bit(wide.state[p]["exp_avg"])
    assert torch.equal(state["exp_avg_codes"], codes)
    assert torch.equal(state["exp_avg_absmax"], absmax)
    tie = (wide.state[p]["master"].view(torch.int32) & 0xFFFF) == 0x8000
    completed = read_param(p.detach(), state["remainder"])
    assert torch.equal(completed[~tie], wide.state[p]["master"][~tie])
    back = optim.AdamW(a, master_weights=True)
    back.load_state_dict(with_codes.state_dict())
    assert torch.equal(back.state[p]["exp_avg"], dequantize_8bit(codes, absmax))
    assert torch.equal(back.state[p]["master"], completed)


@pytest.mark.parametrize("masters", [True, "remainder", "remainder8", False])
@pytest.mark.parametrize("into", [True, "remainder", "remainder8"])
def test_checkpoints_of_other_masters(masters: Any, into: Any) -> None:
    given: Any = lambda p: optim.AdamW(p, 1e-3, master_weights=masters), 3, torch.bfloat16, FEW
    params, optimizer = run(*given)
    others, again = _load_a_copy(
        lambda p: optim.AdamW(p, 1e-3, master_weights=into), params, optimizer.state_dict()
    )

    def complete(p: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        (entry,) = state.keys() & {"master", "remainder", "remainder8"}
        return read_param(p.detach(), state[entry])

    # A tie's neighbour is one unit of its completion away.
    unit = {True: 0.0, "remainder": 2.0**-22, "remainder8": 2.0**-15}[into]
    for p, q in zip(params, others, strict=True):
        full = complete(p, optimizer.state[p]) if masters else p.detach().float()
        assert ((complete(q, again.state[q]) - full).abs() <= unit * full.abs()).all()


def test_an_average_begins_at_a_checkpoint_without_it() -> None:
    """And one that is saved is left out where none is asked for."""
    params, optimizer = run(lambda p: optim.AdamW(p, ema_decay=0.9), 3, shapes=FEW)
    state = copy.deepcopy(optimizer.state_dict())
    others, plain = _load_a_copy(optim.AdamW, params, state)
    _step_both((params, optimizer), (others, plain), 9)
    assert same(params, others)
    for entries in state["state"].values():
        del entries["ema"]
    late, begun = _load_a_copy(lambda p: optim.AdamW(p, ema_decay=0.9), params, state)
    assert all(torch.equal(begun.state[p]["ema"], p) for p in late)


# --- torch's distributed checkpoints ----------------------------------------------------------


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
    torch.testing.assert_close(
        [*model.parameters()], [*other.parameters()], **numerics.SUMMED_SMALL
    )


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


CODECS: list[dict[str, Any]] = [
    {},
    {"master_weights": True},
    {"master_weights": "remainder"},
    {"master_weights": "remainder8"},
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


FREEZE = 4


@pytest.mark.parametrize("kind", [optim.OneBitAdam, optim.OneBitLAMB])
@pytest.mark.parametrize("loader", ["fresh", "in the warm-up", "after it"])
@pytest.mark.parametrize("saved_after", [FREEZE - 2, FREEZE, FREEZE + 3])
def test_flat_states_of_one_bit_are_whole_or_refused(
    kind: Any, loader: str, saved_after: int
) -> None:
    """They are whole or refused: the flat form has only the loading optimizer's entries."""
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    model, other = _model(), _model()
    saved, loaded = (kind(m.parameters(), lr=1e-3, freeze_step=FREEZE) for m in (model, other))
    _train(model, saved, saved_after)
    state = copy.deepcopy(get_optimizer_state_dict(model, saved, options=flat))
    before = {"fresh": 0, "in the warm-up": 1, "after it": FREEZE + 1}[loader]
    _train(other, loaded, before)
    get_optimizer_state_dict(other, loaded, options=flat)  # as before torch's dcp.load
    other.load_state_dict(model.state_dict())
    # The warm-up's entries are there until the first step after it.
    if (saved_after > FREEZE) != (before > FREEZE):
        with pytest.raises(ArgumentError, match="state_dict is without"):
            set_optimizer_state_dict(other, loaded, state, options=flat)
        return
    set_optimizer_state_dict(other, loaded, state, options=flat)
    for m, optimizer in ((model, saved), (other, loaded)):
        _train(m, optimizer, FREEZE + 2)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
