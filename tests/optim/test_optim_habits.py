"""Optimizers: torch.optim's habits, checkpoints and errors."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchweld
from optimizers import (
    CODECS,
    Optimizer,
    ScheduleFreeAdamW,
    U,
    assert_a_saved_run_goes_on,
    draw,
    draw_grads,
    run,
    same,
    snapshot,
)
from torchweld import optim
from torchweld.functional import dequantize_8bit, quantize_8bit
from torchweld.ops.optimizer.reference import read_param

# --- torch.optim's habits ---------------------------------------------------------------------


def test_arguments_of_torchs_constructors() -> None:
    """Arguments that select an implementation are accepted and have no effect."""
    plain = snapshot(*run(lambda p: optim.AdamW(p)))
    for extra in ({"foreach": True}, {"fused": True}, {"foreach": False}, {"capturable": True}):
        assert same(snapshot(*run(lambda p, e=extra: optim.AdamW(p, **e))), plain)
    assert isinstance(optim.AdamW(draw()), torch.optim.AdamW)
    assert isinstance(optim.Adam(draw()), torch.optim.Adam)
    a = snapshot(*run(lambda p: optim.Adam(p, 1e-3, decoupled_weight_decay=True)))
    assert same(a, snapshot(*run(lambda p: optim.AdamW(p, 1e-3, weight_decay=0))))


def test_groups_closures_hooks_and_schedulers() -> None:
    a, b = draw(), draw()
    for_group = {"lr": 1e-3, "weight_decay": 0.0}

    def make(module: Any, params: list[torch.Tensor]) -> Optimizer:
        groups = [{"params": params[:2]}, dict(params=params[2:5], **for_group), {"params": []}]
        optimizer = module.AdamW(groups, lr=1e-2)
        optimizer.add_param_group({"params": params[5:], "betas": (0.5, 0.9)})
        return optimizer

    pairs = [(a, make(optim, a)), (b, make(torch.optim, b))]
    called = []
    pairs[0][1].register_step_pre_hook(lambda *_: called.append("before"))
    pairs[0][1].register_step_post_hook(lambda *_: called.append("after"))
    for params, optimizer in pairs:
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

        def closure(params: Any = params, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum((p.square().sum() for p in params), torch.zeros(()))
            loss.backward()
            params[1].grad = None  # a frozen one
            return loss

        losses = []
        for _ in range(3):
            losses.append(optimizer.step(closure))
            scheduler.step()
        assert losses[0] > losses[-1]
    assert called == ["before", "after"] * 3
    assert not pairs[0][1].state.get(a[1])
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_a_stale_saved_tensor_is_noticed(backend: str) -> None:
    """A step increments the versions of the tensors it writes."""
    p = draw(shapes=[(64, 64)])[0]
    optimizer = optim.AdamW([p], state_dtype="8bit")
    loss = p.square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    versions = [v._version for v in optimizer.state[p].values()]
    optimizer.step()
    assert all(v._version > w for v, w in zip(optimizer.state[p].values(), versions, strict=True))


# --- Checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_states_go_from_and_to_torch(name: str, amsgrad: bool) -> None:
    """Both ways bit for bit, and the run continues."""
    a, ours = run(lambda p: getattr(optim, name)(p, amsgrad=amsgrad))
    b, theirs = run(lambda p: getattr(torch.optim, name)(p, amsgrad=amsgrad))
    saved = {k: v.clone() for k, v in ours.state[a[1]].items()}
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert all(torch.equal(theirs.state[b[1]][k], v) for k, v in saved.items())
    fresh = getattr(optim, name)(a, amsgrad=amsgrad)
    fresh.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert all(torch.equal(fresh.state[a[1]][k], v) for k, v in saved.items())
    with torch.no_grad():
        for p, q in zip(a, b, strict=True):
            q.copy_(p)
    draw_grads(a, 50)
    draw_grads(b, 50)
    fresh.step()
    theirs.step()
    for p, q in zip(a, b, strict=True):
        assert ((p - q).abs() <= 2 * U * q.abs() + 20 * U * 1e-3).all()


@pytest.mark.parametrize(("dtype", "state_dtype", "masters"), CODECS)
def test_a_saved_run_goes_on(
    dtype: torch.dtype, state_dtype: Any, masters: Any, tmp_path: Any
) -> None:
    """Through a file: nothing is cast, and the next steps have the bits they would have had."""

    def make(params: Any) -> Optimizer:
        return optim.AdamW(params, 1e-2, state_dtype=state_dtype, master_weights=masters)

    assert_a_saved_run_goes_on(make, dtype, tmp_path)


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
    with pytest.raises(torchweld.ArgumentError, match=named):
        optimizer.load_state_dict(saved)
    assert same(snapshot(params, optimizer), before)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"].append(saved["param_groups"][0])
    with pytest.raises(ValueError, match="number of parameter groups"):
        optimizer.load_state_dict(saved)
    assert same(snapshot(params, optimizer), before)


# --- Errors -----------------------------------------------------------------------------------

P = [torch.zeros(4, 4)]
BAD: dict[str, tuple[Callable[[], Any], str, str]] = {
    "state": (lambda: optim.AdamW(P, state_dtype="4bit"), "state_dtype", "8bit"),
    "state's dtype": (lambda: optim.AdamW(P, state_dtype=torch.int8), "state_dtype", "bfloat16"),
    "masters": (lambda: optim.AdamW(P, master_weights="all"), "master_weights", "remainder"),
    "rounding": (lambda: optim.AdamW(P, stochastic_rounding=1), "stochastic_rounding", "True or"),
    "rounding from masters": (
        lambda: optim.Lion([{"params": P, "master_weights": True}], stochastic_rounding=True),
        "stochastic_rounding",
        "one of the two",
    ),
    "size": (lambda: optim.AdamW(P, min_quantized_size=-1), "min_quantized_size", ">= 0"),
    "norm": (lambda: optim.AdamW(P, max_grad_norm=0.0), "max_grad_norm", "> 0"),
    "graph": (lambda: optim.AdamW(P, differentiable=True), "differentiable", "torch.optim"),
    "lion's lr": (lambda: optim.Lion(P, -1.0), "lr", ">= 0"),
    "lion's betas": (lambda: optim.Lion(P, betas=(0.9, 1.0)), "betas", r"\[0, 1\)"),
    "lion's graph": (lambda: optim.Lion(P, differentiable=True), "differentiable", "False"),
    "lamb's clip": (lambda: optim.LAMB(P, trust_clip=(2.0, 1.0)), "trust_clip", "least"),
    "lamb's betas": (lambda: optim.LAMB(P, betas=True), "betas", "two numbers"),
    "lars' coefficient": (
        lambda: optim.LARS(P, trust_coefficient=-1.0),
        "trust_coefficient",
        ">= 0",
    ),
    "a group": (lambda: optim.AdamW([{"params": P, "state_dtype": 8}]), "state_dtype", "8bit"),
    "max_unorm": (lambda: optim.LAMB8bit(P, max_unorm=2.0), "max_unorm", "1.0"),
    "lamb's eps": (lambda: optim.LAMB(P, eps=-1), "eps", ">= 0"),
    "lars' eps": (lambda: optim.LARS(P, eps=-1.0), "eps", ">= 0"),
    "adafactor's eps": (lambda: optim.TransformersAdafactor(P, eps=(-1, 0)), "eps", ">= 0"),
    "two rates": (lambda: optim.Lion(P, lr=torch.ones(2)), "lr", "one number"),
    "a group's norm": (
        lambda: optim.AdamW([{"params": P, "max_grad_norm": 1.0}]),
        "max_grad_norm",
        "the optimizer's",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_arguments_are_named(case: str) -> None:
    function, argument, accepted = BAD[case]
    with pytest.raises(torchweld.ArgumentError, match=accepted) as caught:
        function()
    assert caught.value.argument == argument


EIGHT_BIT = {
    optim.Adam8bit: optim.Adam,
    optim.AdamW8bit: optim.AdamW,
    optim.LAMB8bit: optim.LAMB,
    optim.Lion8bit: optim.Lion,
}


@pytest.mark.parametrize("alias", EIGHT_BIT)
def test_bitsandbytes_names(alias: Any) -> None:
    """Its arguments, and an error for unsupported ones."""
    settings = {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1}
    a = run(lambda p: alias(p, **settings, min_8bit_size=8192, is_paged=False, args=None))
    if alias is optim.LAMB8bit:
        settings["eps"] = 1e-8  # there; LAMB's own is 1e-6
    b = run(lambda p: EIGHT_BIT[alias](p, **settings, state_dtype="8bit", min_quantized_size=8192))
    assert same(snapshot(*a), snapshot(*b))
    for refused in ({"is_paged": True}, {"percentile_clipping": 5}, {"block_wise": False}):
        with pytest.raises(torchweld.ArgumentError) as caught:
            alias(P, **refused)
        assert caught.value.argument in refused


def test_torchs_own_errors() -> None:
    with pytest.raises(ValueError, match="learning rate"):
        optim.AdamW(P, lr=-1.0)
    with pytest.raises(TypeError):
        optim.AdamW(P, momentum=0.9)  # type: ignore[call-arg]


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


def test_kernels_refuse_by_themselves() -> None:
    """Called past Python's checks: before anything is written."""
    adam, absmaxes = torch.ops.torchweld.adam.cpu, torch.ops.torchweld.adam_absmaxes.cpu

    def call(of: Any = adam, **changed: Any) -> None:
        given: dict[str, Any] = {
            "params": [torch.zeros(4, 300)],
            "grads": [torch.ones(4, 300)],
            "masters": [],
            "moments": [torch.zeros(4, 300, dtype=torch.uint8) for _ in range(2)],
            "absmaxes": [torch.zeros(4, 2) for _ in range(2)],
            "new_absmaxes": [],
            "steps": [torch.tensor(0.0)],
            "edges": [],
            "rounding_offsets": [],
            "companions": [],
            "lr": torch.tensor(1.0),
            "ratios": None,
        }
        given |= changed
        try:
            numbers: tuple[Any, ...] = (None, None, None, None, given.pop("each", None), [])
            of(*given.values(), *numbers, 0.9, 0.999, 1e-8, 0.0, True, False, False)
        finally:
            assert changed.get("params") or not given["params"][0].any()

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


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.AdamW(p, cautious=True, ema_decay=0.9),
        lambda p: optim.AdEMAMix(p, alpha_warmup=4, beta3_warmup=4),
        ScheduleFreeAdamW,
        lambda p: optim.Muon(p, ns_dtype=torch.float32),
    ],
    ids=["AdamW", "AdEMAMix", "schedule-free", "Muon"],
)
def test_a_compiled_step_has_the_same_bits(make: Any) -> None:
    torch.compiler.reset()
    results = []
    for compiles in (False, True):
        params = draw(shapes=[(8, 40), (5, 6)])
        optimizer = make(params)
        step: Any = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
        for seed in range(3):
            draw_grads(params, seed)
            step()
        results.append(snapshot(params, optimizer))
    assert same(*results)
