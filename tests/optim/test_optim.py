"""Optimizers: torch.optim's numbers, the reference's bits, and how states are stored."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch

import torchweld
from optimizers import (
    CODECS,
    MATRICES,
    SHAPES,
    U,
    assert_same_but_for_ties,
    draw,
    draw_grads,
    draw_grads_by_row,
    maker,
    rules_of,
    run,
    run_bits,
    same,
    snapshot,
    threads,
)
from torchweld import optim
from torchweld.functional import dequantize_8bit, quantize_8bit

Params = list[torch.Tensor]
STEPS = 20

# --- torch's numbers --------------------------------------------------------------------------

# A class, its settings, and what its group is changed by after two steps.
TRAJECTORIES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *(
        (name, settings, {})
        for name in ("Adam", "AdamW")
        for settings in (
            {"weight_decay": 0.1},
            {"weight_decay": 0.0, "amsgrad": True},
            {"weight_decay": 0.1, "maximize": True, "betas": (0.8, 0.99), "eps": 1e-6},
            {"weight_decay": 0.05, "amsgrad": True, "lr": torch.tensor(1e-3)},
        )
    ),
    ("SGD", {"lr": 0.1}, {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}, {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {}),
    (
        *("SGD", {"momentum": 0.8, "dampening": 0.3, "maximize": True, "lr": torch.tensor(0.05)}),
        {},
    ),
    # The first gradient of a momentum that begins late is undampened too.
    ("SGD", {"lr": 0.1}, {"momentum": 0.9, "dampening": 0.5}),
    ("Adafactor", {}, {}),
    ("Adafactor", {"lr": torch.tensor(0.05), "weight_decay": 0.1, "d": 2.0}, {}),
    ("Adafactor", {"eps": (1e-3, 0.5), "beta2_decay": -0.5, "maximize": True}, {}),
]


@functools.cache
def _train_with_torch(at: int) -> tuple[Params, list[Params], list[Params], float]:
    """A small transformer's parameters, the gradients of its steps, torch's results, and how far
    a step moves an element at most.

    One result is by torch's for-loop, the other by its fused step, if it has one.
    """
    name, settings, late = TRAJECTORIES[at]
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 32), layer, torch.nn.Linear(32, 50))
    kind, params = getattr(torch.optim, name), list(model.parameters())
    start, twins = ([p.detach().clone().requires_grad_() for p in params] for _ in range(2))
    optimizers = [kind(params, **settings, foreach=False)]
    if "fused" in inspect.signature(kind).parameters:
        optimizers.append(kind(twins, **settings, fused=True))
    of_steps, longest = [], 0.0
    for step in range(STEPS):
        tokens = torch.randint(50, (4, 17), generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        before = [p.detach().clone() for p in params]
        for p, q in zip(params, twins, strict=True):
            q.grad = p.grad
        for optimizer in optimizers:
            if step == 2:
                optimizer.param_groups[0].update(late)
            optimizer.step()
        of_steps.append([p.grad for p in params])
        pairs = zip(params, before, strict=True)
        longest = max(longest, *((p - b).abs().max().item() for p, b in pairs))
    return start, of_steps, [params, twins][: len(optimizers)], longest  # type: ignore[return-value]


@pytest.mark.parametrize("at", range(len(TRAJECTORIES)), ids=lambda at: str(TRAJECTORIES[at][:2]))
def test_torchs_trajectory(at: int, backend: str) -> None:
    """Each side rounds the parameter once per step, and the update some ten times."""
    name, settings, late = TRAJECTORIES[at]
    start, of_steps, results, longest = _train_with_torch(at)
    ours = [p.detach().clone().requires_grad_() for p in start]
    optimizer = getattr(optim, name)(ours, **settings)
    for step, grads in enumerate(of_steps):
        if step == 2:
            optimizer.param_groups[0].update(late)
        for p, g in zip(ours, grads, strict=True):
            p.grad = g
        optimizer.step()
    for peers in results:
        for p, peer in zip(ours, peers, strict=True):
            assert ((p - peer).abs() <= STEPS * (2 * U * peer.abs() + 20 * U * longest)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_further_from_float64_than_torch(dtype: torch.dtype) -> None:
    """The same gradients in float64: of 16-bit weights, masters are within float32's roundings."""
    shapes = ((64, 256), (100,))
    masters = dtype != torch.float32
    ours, optimizer = run(
        lambda p: optim.AdamW(p, lr=1e-2, master_weights=masters), 20, dtype, shapes
    )
    exact = [p.detach().double().requires_grad_() for p in draw(dtype, shapes)]
    peers = [p.detach().float().requires_grad_() for p in draw(dtype, shapes)]
    optimizers = [torch.optim.AdamW(p, lr=1e-2) for p in (exact, peers)]
    given = draw(dtype, shapes)
    for seed in range(20):
        draw_grads(given, seed)
        for params, other in zip((exact, peers), optimizers, strict=True):
            for p, q in zip(params, given, strict=True):
                p.grad = q.grad.to(p.dtype)
            other.step()
    for p, e, t in zip(ours, exact, peers, strict=True):
        mine = optimizer.state[p]["master"] if masters else p
        errors = [(x.double() - e).square().mean().sqrt() for x in (mine, t)]
        assert errors[0] <= 1.1 * errors[1]


def test_torchs_fused_bfloat16() -> None:
    """States and weights in bfloat16: the same bits except where roundings meet a tie."""
    a, ours = run(lambda p: optim.AdamW(p, state_dtype=torch.bfloat16), 20, torch.bfloat16)
    b, theirs = run(lambda p: torch.optim.AdamW(p, fused=True), 20, torch.bfloat16)
    for of in (
        lambda p, _: p,
        lambda p, optimizer: optimizer.state[p]["exp_avg"],
        lambda p, optimizer: optimizer.state[p]["exp_avg_sq"],
    ):
        pairs = [(of(p, ours), of(q, theirs)) for p, q in zip(a, b, strict=True)]
        differ = torch.cat([(x != y).flatten() for x, y in pairs])
        assert differ.float().mean() < 2e-3


# --- The reference's bits ---------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "state_dtype", "masters"), CODECS)
def test_the_kernel_is_the_reference_to_the_bit(
    dtype: torch.dtype, state_dtype: Any, masters: Any
) -> None:
    """Every codec, at any thread count, with each of the rule's branches."""
    for kind, settings in rules_of(dtype, state_dtype, masters):
        make = maker(kind, settings, state_dtype, masters)
        expected = run_bits(make, 2, dtype, backend="eager")
        for count in (1, 3):
            found = run_bits(make, 2, dtype, backend="cpu", count=count)
            assert same(found, expected), (kind, settings)


@pytest.mark.parametrize("masters", [False, True, "remainder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adafactors_kernel_is_the_reference(dtype: torch.dtype, masters: Any) -> None:
    """The same bits at any thread count: the reference's, except where sums meet a tie."""
    given = (lambda p: optim.Adafactor(p, master_weights=masters), 4, dtype, MATRICES)
    found = [run(*given, backend="cpu", count=count) for count in (1, 3)]
    assert same(snapshot(*found[0]), snapshot(*found[1]))
    assert_same_but_for_ties(found[0], run(*given, backend="eager"), masters)


@pytest.mark.parametrize("kind", [optim.Adafactor, optim.TransformersAdafactor])
def test_adafactors_kernel_rounds_as_the_reference(kind: Any) -> None:
    """Stochastically: the same bits at any thread count, except where sums meet a tie."""
    shapes = (*SHAPES, (9000,))
    given = (lambda p: kind(p, stochastic_rounding=True), 1, torch.bfloat16, shapes)
    expected, _ = run(*given, backend="eager")
    found = [run(*given, backend="cpu", count=count)[0] for count in (1, 3)]
    assert same(*found)
    for p, e, start in zip(found[0], expected, draw(torch.bfloat16, shapes), strict=True):
        assert (p != e).sum() <= max(1, 1e-3 * p.numel())
        assert p.numel() < 100 or (p != start).any()


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 12, 15, 16, 17, 33, 64, 100, 127, 128, 129])
def test_narrow_rows_are_blocks_of_their_own(width: int) -> None:
    """The reference's bits, for any number of parameters and any thread's begin."""
    shapes = [(rows, width) for rows in (1, 75, 3, 40_000 // (width + 64))]  # for three threads
    for kind, settings, some in (
        (optim.AdamW, {"amsgrad": True}, shapes[:2]),
        (optim.Lion, {}, shapes[2:]),
    ):
        given: Any = maker(kind, settings, "8bit"), 2, torch.float32, some
        expected = run_bits(*given, grads=draw_grads_by_row, backend="eager")
        for count in (1, 3):
            found = run_bits(*given, grads=draw_grads_by_row, backend="cpu", count=count)
            assert same(found, expected)


def _norms(optimizer: Any, task: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The norms of parameters and of their steps."""
    optimizer._rule.measure(task)
    of_param, of_step = task.sums.sqrt().unbind(1)
    return of_param, of_step


@pytest.mark.parametrize("name", ["LAMB", "LARS"])
def test_the_norms_are_exact(name: str) -> None:
    """At any thread count the ratio over 10^6 elements is bitwise that in float64."""
    p = torch.randn(1000, 1013, generator=torch.Generator().manual_seed(0)).requires_grad_()
    p.grad = p.detach().flip(0) * 1e-3
    optimizer = getattr(optim, name)([p])
    (task,) = optimizer._tasks()
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(_norms(optimizer, task))
    of_param, of_step = found[0]
    assert all(torch.equal(a, of_param) and torch.equal(b, of_step) for a, b in found)
    with torchweld.use_backend("eager"):
        a, b = _norms(optimizer, task)
    torch.testing.assert_close(of_param, a, rtol=1e-13, atol=0)
    torch.testing.assert_close(of_step, b, rtol=1e-13, atol=0)


# --- 8-bit states -----------------------------------------------------------------------------


def test_an_8_bit_step_is_a_float32_step_between_codes() -> None:
    """torch's own step from the decoded state; the new state is its moments, encoded."""
    (p,), optimizer = run(
        lambda p: optim.AdamW(p, lr=1e-2, state_dtype="8bit"), 3, shapes=[(64, 700)]
    )
    state = optimizer.state[p]
    q = p.detach().clone().requires_grad_()
    peer = torch.optim.AdamW([q], lr=1e-2)
    peer.state[q] = {"step": state["step"].clone()} | {
        name: dequantize_8bit(state[f"{name}_codes"], state[f"{name}_absmax"], signed=signed)
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False))
    }
    draw_grads([p], 9)
    q.grad = p.grad
    optimizer.step()
    peer.step()
    assert ((p - q).abs() <= 2 * U * q.abs() + 20 * U * 1e-2).all()
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        codes, absmax = quantize_8bit(peer.state[q][name], signed=signed)
        torch.testing.assert_close(absmax, state[f"{name}_absmax"], rtol=4 * U, atol=0)
        assert (codes == state[f"{name}_codes"]).float().mean() > 0.999


@pytest.mark.parametrize("loaded", [False, True])
def test_an_8_bit_second_moment_stays_where_the_first_does(loaded: bool, backend: str) -> None:
    """Small gradients among large ones, then none: no moment is divided by a root of zero."""
    moved = {}
    for state_dtype in (torch.float32, "8bit"):
        p = torch.zeros(16, 256, requires_grad=True)
        p.grad = torch.ones(16, 256)
        p.grad[:, 0] = 3e-4
        first = torch.float32 if loaded else state_dtype
        optimizer = optim.AdamW([p], lr=1e-3, weight_decay=0, state_dtype=first)
        optimizer.step()
        if loaded:
            given = optimizer.state_dict()
            optimizer = optim.AdamW([p], lr=1e-3, weight_decay=0, state_dtype=state_dtype)
            optimizer.load_state_dict(given)
        p.grad[:, 0] = 0
        for _ in range(20):
            optimizer.step()
        moved[state_dtype] = p[:, 0].abs().max().item()
    assert moved["8bit"] <= moved[torch.float32] < 0.01


def test_what_is_stored_in_8_bits() -> None:
    """Matrices of at least min_quantized_size elements; the rest in float32."""
    params = draw(shapes=[(64, 64), (63, 64), (5000,), (16, 16, 16)])
    optimizer = optim.AdamW(
        [{"params": params}, {"params": draw(shapes=[(8, 8)]), "min_quantized_size": 64}],
        state_dtype="8bit",
    )
    every = [p for group in optimizer.param_groups for p in group["params"]]
    draw_grads(every, 0)
    optimizer.step()
    quantized = ["exp_avg_codes" in optimizer.state[p] for p in every]
    assert quantized == [True, False, False, True, True]
    bytes_of = {k: v.nbytes for k, v in optimizer.state[params[0]].items() if k != "step"}
    assert sum(bytes_of.values()) == 2 * (4096 + 4 * 64)  # each row of 64 is a block
