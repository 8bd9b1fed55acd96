"""Gradients and torch.optim's habits: scaled, clipped, sparse; closures, hooks and schedulers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import torchweld
from optimizers import (
    KINDS,
    Optimizer,
    ScheduleFreeAdamW,
    U,
    draw,
    draw_grads,
    maker,
    run,
    run_bits,
    same,
    snapshot,
    threads,
)
from torchweld import numerics, optim
from torchweld.optim import lr_scheduler

BF16 = torch.bfloat16

# --- Not finite -------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_float32_states_spread_as_in_torch(bad: float, backend: str) -> None:
    (p,), optimizer = run(lambda p: optim.AdamW(p, lr=1e-2), 2, shapes=[(16, 300)])
    q = p.detach().clone().requires_grad_()
    peer = torch.optim.AdamW([q], lr=1e-2)
    peer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    draw_grads([p], 7)
    p.grad[3, 7] = bad
    q.grad = p.grad
    optimizer.step()
    peer.step()
    torch.testing.assert_close(p, q, equal_nan=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize(
    ("kind", "masters"),
    [(optim.AdamW, False), (optim.AdamW, "rounded"), (optim.Lion, False), (optim.LAMB, False)],
)
def test_only_an_element_of_a_block_is_skipped(
    kind: Any, masters: Any, bad: float, backend: str
) -> None:
    """And reset: the others step as if its gradient were zero, and it enters no norm."""
    dtype, places = BF16 if masters else torch.float32, [(3, 7), (15, 299)]
    make, results = maker(kind, {}, "8bit", masters), []
    for value, name in ((bad, None), (bad, "eager"), (0.0, None)):

        def draw_bad(params: Any, seed: int, value: float = value) -> None:
            draw_grads(params, seed)
            for at in places if seed == 2 else ():
                params[0].grad[at] = value

        results.append(run(make, 3, dtype, [(16, 300)], grads=draw_bad, backend=name))
    before, _ = run(make, 2, dtype, [(16, 300)])
    (found,), optimizer = results[0]
    assert same(*(snapshot(*result) for result in results[:2]))
    assert all(t.isfinite().all() for t in snapshot(*results[0]))
    if kind is optim.Lion and bad == 1e30:  # which is finite where nothing is squared
        return
    for at in places:
        assert found[at] == before[0][at]
        assert optimizer.state[found]["exp_avg_codes"][at] == 127
        assert optimizer.state[found].get("exp_avg_sq_codes", torch.zeros(16, 300))[at] == 0
    moved, without = found != before[0], results[2][0][0].detach()
    assert moved.any() if masters else moved.sum() == found.numel() - 2
    # Without two elements the norm of 4800 is smaller by a few parts in ten thousand.
    torch.testing.assert_close(found[moved], without[moved], rtol=0, atol=1e-2 * 1e-3 * 10)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("kind", [optim.Adafactor, optim.TransformersAdafactor])
def test_adafactor_spreads_as_in_eager(kind: Any, bad: float, backend: str) -> None:
    """NaN in one element spreads through the mean to all of the tensor's elements."""

    def draw_bad(params: Any, seed: int) -> None:
        draw_grads(params, 7 if seed == 2 else seed)
        for p in params[:2] if seed == 2 else ():
            p.grad.view(-1)[4000] = bad

    given: Any = lambda p: kind(p), 3, torch.float32, [(9, 700), (5000,), (3,)]
    results = [run_bits(*given, grads=draw_bad, backend=name) for name in (None, "eager")]
    assert all(p.isfinite().all() for p in results[0][2:3])
    assert bad == 1e30 or not any(p.isfinite().all() for p in results[0][:2])
    torch.testing.assert_close(*results, rtol=8 * U, atol=8 * U * 0.1, equal_nan=True)


# --- Scaled -----------------------------------------------------------------------------------

ROUNDED = (optim.AdamW, {"stochastic_rounding": True})
SCALED = [
    *((*kind, torch.float32) for kind in KINDS),
    *((kind, s | {"state_dtype": "8bit"}, torch.float32) for kind, s in KINDS[:9]),
    (*ROUNDED, BF16),
    (optim.AdamW, {"stochastic_rounding": True, "state_dtype": "8bit"}, BF16),
    (optim.Muon, {"ns_dtype": torch.float32}, torch.float32),
]


@pytest.mark.parametrize(("kind", "settings", "dtype"), SCALED, ids=str)
def test_grad_scaler(kind: Any, settings: dict[str, Any], dtype: torch.dtype, backend: str) -> None:
    """Unscaled inside the step; if a gradient is infinite, skipped and not counted."""
    a, b = (draw(dtype, [(64, 64), (9, 300)]) for _ in range(2))
    ours, plain = (maker(kind, settings)(params) for params in (a, b))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in range(4):
        scaler.scale(torch.ones(()))
        draw_grads(a, seed)
        draw_grads(b, seed)
        for p in a:
            assert p.grad is not None
            p.grad.mul_(scaler.get_scale())
        if seed == 2:
            a[1].grad[0, 0] = torch.inf  # type: ignore[index]
        before = snapshot(a, ours)
        scaler.step(ours)
        scaler.update()
        if seed == 2:
            assert same(snapshot(a, ours), before)
        else:
            plain.step()
            assert same(snapshot(a, ours), snapshot(b, plain))
    assert scaler.get_scale() == 512.0
    assert all(group.get("k", 3) == 3 for group in ours.param_groups)  # schedule-free's count


def test_a_scaled_gradient_is_left_unscaled(backend: str) -> None:
    """After scaler.step, as torch's fused steps leave it; unchanged if the step was skipped."""
    scale = 1024.0
    for found in (0.0, 1.0):
        left = []
        for make in (
            lambda p: optim.AdamW(p, max_grad_norm=1e9),
            lambda p: torch.optim.AdamW(p, fused=True),
        ):
            params = draw(shapes=[(33, 70), (5,)])
            for p in params:
                p.grad = torch.full_like(p, 3 * scale)
            optimizer: Any = make(params)
            optimizer.grad_scale = torch.tensor(scale)
            optimizer.found_inf = torch.tensor(found)
            optimizer.step()
            left.append([p.grad for p in params])
        assert same(*left)
        assert (left[0][0] == (3 * scale if found else 3)).all()
    embedding = torch.nn.Embedding(9, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    optimizer = optim.SGD(embedding.parameters(), lr=0.1)
    optimizer.grad_scale = torch.tensor(2.0)
    optimizer.step()
    assert embedding.weight.grad.to_dense().sum() == 2


def test_what_a_scaler_sets() -> None:
    """Numbers of one element in any shape; others are refused before anything is written."""
    runs = []
    for shape in ((), (1,), (1, 1)):
        params = draw(shapes=[(33, 70), (5,)])
        draw_grads(params, 0)
        optimizer: Any = optim.AdamW(params, max_grad_norm=1.0)
        optimizer.grad_scale = torch.full(shape, 4.0)
        optimizer.found_inf = torch.zeros(shape)
        optimizer.step()
        runs.append([t for p in params for t in (p, p.grad)])
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])
    params = draw(shapes=[(5,)])
    draw_grads(params, 0)
    held: list[Any] = [params[0], params[0].grad]
    before = [t.detach().clone() for t in held]
    optimizer = optim.AdamW(params)
    optimizer.grad_scale = torch.ones(2)
    with pytest.raises(torchweld.ArgumentError, match=r"grad_scale is of \[2\]"):
        optimizer.step()
    held = [params[0], params[0].grad]
    assert same(held, before)


@pytest.mark.parametrize("offloads", [False, True])
def test_a_scaler_without_any_gradient(offloads: bool) -> None:
    """It sets 0 for found_inf, no tensor: no parameter steps."""
    params = draw(shapes=[(5,)])
    before = params[0].detach().clone()
    optimizer: Any = optim.AdamW(params)
    optimizer = optim.Offload(optimizer, threads=1) if offloads else optimizer
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert torch.equal(params[0], before)


# --- Clipped ----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_is_that_of_clip_grad_norm(limit: float, backend: str) -> None:
    a = draw()
    b = draw()
    ours = optim.AdamW(a, lr=1e-2, max_grad_norm=limit)
    theirs = torch.optim.AdamW(b, lr=1e-2)
    for seed in range(5):
        draw_grads(a, seed)
        draw_grads(b, seed)
        kept = [p.grad.clone() for p in a]
        norm = torch.nn.utils.clip_grad_norm_(b, limit)
        ours.step()
        theirs.step()
        torch.testing.assert_close(ours.grad_norm, norm, rtol=1e-5, atol=0)
        assert same([p.grad for p in a], kept)  # gradients do not change
    for p, q in zip(a, b, strict=True):
        # The norm's rounding affects every element of an update.
        assert ((p - q).abs() <= 5 * (2 * U * q.abs() + 1e-5 * 1e-2)).all()


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_a_scaled_ascent_is_clipped(limit: float, backend: str) -> None:
    """SGD from zero: its step is the clipped gradient, whereas Adam's hardly feels a factor."""
    params = draw()
    draw_grads(params, 0)
    exact = torch.cat([p.grad.double().flatten() for p in params]).norm()
    factor = (limit / (exact + 1e-6)).clamp(max=1.0)
    expected = [factor * p.grad.double() for p in params]
    for p in params:
        p.data.zero_()
        assert p.grad is not None
        p.grad.mul_(8.0)
    optimizer: Any = optim.SGD(params, lr=1.0, maximize=True, max_grad_norm=limit)
    optimizer.grad_scale = torch.tensor(8.0)
    optimizer.step()
    for p, value in zip(params, expected, strict=True):
        # The norm, its sum with 1e-6, the quotient and the products each round once.
        assert ((p - value).abs() <= 8 * U * value.abs()).all()


def test_the_norm_has_the_same_bits_at_any_thread_count() -> None:
    params = draw(shapes=[(999, 37)] * 9 + [(5,)] * 20)
    draw_grads(params, 0)
    norms = []
    for count in (1, 2, 3):
        optimizer = optim.AdamW(params, lr=0.0, max_grad_norm=1.0)
        with threads(count):
            optimizer.step()
        assert optimizer.grad_norm is not None
        norms.append(optimizer.grad_norm.item())
    exact = torch.cat([p.grad.double().flatten() for p in params]).norm().item()  # type: ignore[union-attr]
    assert norms[0] == pytest.approx(exact, rel=2 * U)
    assert len(set(norms)) == 1


# --- Sparse, of another dtype, lazy -----------------------------------------------------------


def test_sparse_gradients() -> None:
    """SGD clips an embedding's with the others; other rules reject it, as torch's do."""
    torch.manual_seed(0)
    embedding, linear = torch.nn.Embedding(40, 16, sparse=True), torch.nn.Linear(16, 3)
    params: list[Any] = [*embedding.parameters(), *linear.parameters()]
    linear(embedding(torch.tensor([1, 5, 5, 2]))).square().sum().backward()
    assert params[0].grad.is_sparse
    for kind in (optim.AdamW, optim.Lion, optim.LAMB, optim.LARS, optim.Adafactor):
        with pytest.raises(torchweld.ArgumentError, match="sparse"):
            kind(params).step()
    clipped = optim.SGD(params, lr=0.1, max_grad_norm=1e-3)
    clipped.step()
    norms = [p.grad.to_dense().norm() for p in params]
    torch.testing.assert_close(clipped.grad_norm, torch.stack(norms).norm())


@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=str)
def test_gradients_of_another_dtype(kind: Any, settings: dict[str, Any], backend: str) -> None:
    """p.grad_dtype: a float32 gradient of a bfloat16 parameter is used to the last bit."""
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")
    p = torch.linspace(-1, 1, 600).view(6, 100).to(BF16).requires_grad_()
    p.grad_dtype = torch.float32
    g = torch.randn(6, 100, generator=torch.Generator().manual_seed(0))
    other = draw(BF16, [(6, 100)])[0]
    wide = p.detach().float().requires_grad_()
    masters = {"master_weights": True}
    make = maker(kind, settings | masters)
    p.grad, other.grad, wide.grad = g, g.to(BF16), g.clone()
    optimizer = make([p, other])
    optimizer.step()
    make([wide]).step()
    torch.testing.assert_close(optimizer.state[p]["master"], wide, **numerics.ROUNDED)
    assert torch.equal(p, optimizer.state[p]["master"].to(BF16))


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_lazily_conjugated_and_negated_tensors(name: str, backend: str) -> None:
    found = []
    for module in (optim, torch.optim):
        torch.manual_seed(0)
        p = torch.randn(9, dtype=torch.complex64).requires_grad_()
        negated = torch._neg_view(torch.randn(9)).requires_grad_()
        p.grad = torch.randn(9, dtype=torch.complex64).conj()
        if module is torch.optim:  # whose AdamW takes none
            p.grad = p.grad.resolve_conj()
        negated.grad = torch._neg_view(torch.randn(9))
        assert negated.is_neg()
        assert negated.grad.is_neg()
        optimizer = getattr(module, name)([p, negated], lr=0.1)
        optimizer.step()
        optimizer.step()
        found.append([p.detach(), negated.detach()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


# --- torch.optim's habits -------------------------------------------------------------------------


def test_arguments_of_torchs_constructors() -> None:
    assert isinstance(optim.AdamW(draw()), torch.optim.AdamW)
    assert isinstance(optim.Adam(draw()), torch.optim.Adam)
    a = run_bits(lambda p: optim.Adam(p, 1e-3, decoupled_weight_decay=True))
    assert same(a, run_bits(lambda p: optim.AdamW(p, 1e-3, weight_decay=0)))


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
    torch.testing.assert_close([*a], [*b], **numerics.ROUNDED)


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


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.AdamW(p, cautious=True, ema_decay=0.9),
        ScheduleFreeAdamW,
        lambda p: optim.Muon(p, ns_dtype=torch.float32, ns_steps=1),
    ],
    ids=["AdamW", "schedule-free", "Muon"],
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


@pytest.mark.parametrize("warmup", [False, True])
def test_the_rate_that_transformers_schedule_asks_for(warmup: bool) -> None:
    """AdafactorSchedule calls _get_lr with the first parameter's state."""
    p = torch.full((4, 6), 0.5).requires_grad_()
    optimizer = optim.TransformersAdafactor([p], warmup_init=warmup)
    for step in range(1, 4):
        p.grad = torch.ones_like(p)
        rate = optimizer._get_lr(optimizer.param_groups[0], optimizer.state[p])
        scale = p.detach().square().mean().sqrt().item()
        taken = max(step - 1, 1)
        expected = scale * min(1e-6 * taken if warmup else 1e-2, taken**-0.5)
        assert rate == pytest.approx(expected, rel=1e-6)
        optimizer.step()
    fixed = optim.TransformersAdafactor([p], lr=0.25, relative_step=False, scale_parameter=False)
    assert fixed._get_lr(fixed.param_groups[0], {}) == 0.25


# --- The schedulers for large batches -----------------------------------------------------------


@pytest.mark.parametrize("optimizer", [optim.LARS, optim.LAMB])
@pytest.mark.parametrize(
    ("schedule", "scale"), [(lr_scheduler.LinearScaling, 16.0), (lr_scheduler.SqrtScaling, 4.0)]
)
def test_a_large_batch(schedule: Any, scale: float, optimizer: Any) -> None:
    """Warm-up, decay and end; each group keeps its own rate; a saved schedule resumes."""
    lr = torch.tensor(0.1)
    params = draw()
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": lr}]
    trained = optimizer(groups, lr=0.2)

    def make(last: int = -1) -> Any:
        return schedule(
            trained,
            4096,
            256,
            warmup_steps=4,
            total_steps=10,
            power=2.0,
            warmup_start=0.5,
            last_epoch=last,
        )

    scheduler, found = make(), []
    for step in range(12):
        found.append([float(group["lr"]) for group in trained.param_groups])
        draw_grads(params, step)
        trained.step()
        if step == 5:
            saved = scheduler.state_dict()
            scheduler = make(5)
            scheduler.load_state_dict(saved)
        scheduler.step()
    rise = [0.5, 0.625, 0.75, 0.875, 1.0]
    expected = rise + [((10 - step) / 6) ** 2 for step in range(5, 10)] + [0.0, 0.0]
    for (first, second), factor in zip(found, expected, strict=True):
        assert first == pytest.approx(0.2 * scale * factor)
        assert second == pytest.approx(0.1 * scale * factor)
    assert trained.param_groups[1]["lr"] is lr  # changed in place, as by torch's schedulers
