"""Optimizers: torch.optim's numbers, however states are stored."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import torchweld
from optimizers import (
    CODECS,
    Optimizer,
    U,
    draw,
    draw_grads,
    draw_grads_by_row,
    maker,
    rules_of,
    run,
    same,
    snapshot,
)
from torchweld import optim
from torchweld.functional import dequantize_8bit, quantize_8bit
from torchweld.ops.optimizer.reference import read_param

# --- Numbers ----------------------------------------------------------------------------------


class _Transformer:
    """Gradients from training a small transformer with float32 weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.model = torch.nn.Sequential(torch.nn.Embedding(50, 32), layer, torch.nn.Linear(32, 50))

    def gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(50, (4, 17), generator=generator)
        self.model.zero_grad()
        logits = self.model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()


SETTINGS = [
    {"weight_decay": 0.1},
    {"weight_decay": 0.0, "amsgrad": True},
    {"weight_decay": 0.1, "maximize": True, "betas": (0.8, 0.99), "eps": 1e-6},
    {"weight_decay": 0.05, "amsgrad": True, "lr": torch.tensor(1e-3)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_torchs_trajectory(name: str, settings: dict[str, Any], backend: str) -> None:
    """50 steps on a transformer: within a step's roundings of torch's for-loop and fused steps.

    Each side rounds the parameter once per step, and the update some ten times. An update is at
    most about lr / sqrt(1 - beta2) in amsgrad's first step, and lr otherwise.
    """
    problem = _Transformer()
    theirs = list(problem.model.parameters())
    pairs: list[tuple[list[torch.Tensor], Optimizer]] = []
    for make in (
        lambda p: getattr(torch.optim, name)(p, **settings, fused=True),
        lambda p: getattr(optim, name)(p, **settings),
    ):
        mine = [p.detach().clone().requires_grad_() for p in theirs]
        pairs.append((mine, make(mine)))
    optimizer = getattr(torch.optim, name)(theirs, **settings, foreach=False)
    for step in range(50):
        problem.gradients(step)
        for params, other in pairs:
            for p, q in zip(params, theirs, strict=True):
                p.grad = q.grad
            other.step()
        optimizer.step()
    lr = float(settings.get("lr", 1e-3))
    for p, fused, ours in zip(theirs, pairs[0][0], pairs[1][0], strict=True):
        for peer in (p, fused):
            bound = 50 * (2 * U * peer.abs() + 20 * U * lr)
            assert ((ours - peer).abs() <= bound).all()


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


def _sgd(module: Any, params: Any, **settings: Any) -> Optimizer:
    return module.SGD(params, **{"lr": 0.1} | settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.8, "dampening": 0.3, "maximize": True, "lr": torch.tensor(0.05)},
    ],
    ids=str,
)
def test_torchs_sgd(settings: dict[str, Any], backend: str) -> None:
    """Its momentum, first undampened, and its state, both ways."""
    a, ours = run(lambda p: _sgd(optim, p, **settings))
    b, theirs = run(lambda p: _sgd(torch.optim, p, **settings))
    for p, q in zip(a, b, strict=True):
        assert ((p - q).abs() <= 6 * 8 * U * (q.abs() + 1)).all()
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    with torch.no_grad():
        for p, q in zip(a, b, strict=True):
            p.copy_(q)
    for params, optimizer in ((a, ours), (b, theirs)):
        draw_grads(params, 9)
        optimizer.step()
    for p, q in zip(a, b, strict=True):
        assert ((p - q).abs() <= 8 * U * (q.abs() + 1)).all()


def test_lion_as_published(backend: str) -> None:
    """In float64 from the paper's algorithm; no step is taken in the direction of zero."""
    lr, beta1, beta2, decay = 1e-3, 0.9, 0.99, 0.1
    params, optimizer = run(lambda p: optim.Lion(p, lr, (beta1, beta2), decay), 10)
    exact = [p.detach().double() for p in draw()]
    momenta = [torch.zeros_like(p) for p in exact]
    given = draw()
    for seed in range(10):
        draw_grads(given, seed)
        for i, (p, m) in enumerate(zip(exact, momenta, strict=True)):
            g = given[i].grad.double()
            direction = (beta1 * m + (1 - beta1) * g).sign()
            exact[i] = p - lr * (direction + decay * p)
            momenta[i] = beta2 * m + (1 - beta2) * g
    # Three roundings a step, of a parameter that was up to ten steps further from zero.
    for p, e, m in zip(params, exact, momenta, strict=True):
        torch.testing.assert_close(optimizer.state[p]["exp_avg"].double(), m, rtol=1e-5, atol=1e-8)
        assert ((p - e).abs() <= 10 * 3 * U * (e.abs() + 10 * lr)).all()
    still = torch.ones(3, requires_grad=True)
    still.grad = torch.tensor([0.0, 1.0, -1.0])
    optim.Lion([still], 0.5).step()
    assert still.tolist() == [1.0, 0.5, 1.5]


@pytest.mark.parametrize(("dtype", "state_dtype", "masters"), CODECS)
def test_the_kernel_is_the_reference_to_the_bit(
    dtype: torch.dtype, state_dtype: Any, masters: Any
) -> None:
    """Every codec, at any thread count, with each of the rule's branches."""
    threads = torch.get_num_threads()
    for kind, settings in rules_of(dtype, state_dtype, masters):
        make = maker(kind, settings, state_dtype, masters)
        with torchweld.use_backend("eager"):
            expected = snapshot(*run(make, 3, dtype))
        try:
            for count in (1, 3):
                torch.set_num_threads(count)
                with torchweld.use_backend("cpu"):
                    assert same(snapshot(*run(make, 3, dtype)), expected)
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 12, 15, 16, 17, 33, 64, 100, 127, 128, 129])
def test_narrow_rows_are_blocks_of_their_own(width: int, backend: str) -> None:
    """The reference's bits, for any number of parameters and any thread's begin."""
    shapes = [(rows, width) for rows in (1, 75, 3, 40_000 // (width + 64))]  # for three threads
    results = []
    threads = torch.get_num_threads()
    for name, count in (("eager", 1), (backend, 1), (backend, 3)):
        params = draw(shapes=shapes)
        optimizers = [
            maker(optim.AdamW, {"amsgrad": True}, "8bit")(params[:2]),
            maker(optim.Lion, {}, "8bit")(params[2:]),
        ]
        try:
            torch.set_num_threads(count)
            with torchweld.use_backend("cuda" if name == "emulator" else name):
                for seed in range(3):
                    draw_grads_by_row(params, seed)
                    for optimizer in optimizers:
                        optimizer.step()
        finally:
            torch.set_num_threads(threads)
        results.append(snapshot(params[:2], optimizers[0]) + snapshot(params[2:], optimizers[1]))
    assert same(results[0], results[1])
    assert same(results[0], results[2])


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
    """Small gradients among large ones, then none: no moment is divided by a root of zero.

    `loaded`: after a first step with float32 states.
    """
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


@pytest.mark.parametrize("state_dtype", [torch.float32, "8bit"])
def test_a_remainder_is_half_of_a_master(state_dtype: Any, backend: str) -> None:
    """The same float32 values at every step; the bfloat16 part rounds ties away from zero."""
    runs = []
    for masters in (True, "remainder"):
        params = draw(torch.bfloat16)
        runs.append(
            (params, optim.AdamW(params, 1e-2, state_dtype=state_dtype, master_weights=masters))
        )
    for seed in range(20):
        for params, optimizer in runs:
            draw_grads(params, seed)
            optimizer.step()
        for p, q in zip(*(params for params, _ in runs), strict=True):
            master = runs[0][1].state[p]["master"]
            remainder = runs[1][1].state[q]["remainder"]
            assert torch.equal(read_param(q, remainder), master)
            tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
            assert torch.equal(p[~tie], q[~tie])
            assert (q[tie].abs() > master[tie].abs()).all()


@pytest.mark.parametrize("bits", [0x7F7FFFFF, 0x3F808000, 0x3F818000, 1, 0x8000, 0x7F800000])
def test_a_remainder_completes_any_float(bits: int, backend: str) -> None:
    """The largest number, ties, subnormals, infinity: unchanged values are reproduced exactly."""
    values = torch.tensor([bits, bits - 2**31], dtype=torch.int32).view(torch.float32)
    p = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    optimizer = optim.AdamW([p], lr=0.0, master_weights="remainder")
    p.grad = torch.zeros_like(p)
    optimizer.step()
    low = values.view(torch.int32) << 16 >> 16
    with torch.no_grad():
        p.copy_(((values.view(torch.int32) - low) >> 16).to(torch.int16).view(torch.bfloat16))
    optimizer.state[p]["remainder"].copy_(low)
    optimizer.step()
    assert torch.equal(read_param(p, optimizer.state[p]["remainder"]), values)


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


# --- Gradients that are not finite, scaled or clipped -------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_gradients_that_are_not_finite(bad: float, backend: str) -> None:
    """float32 states behave as in torch. In a block only the element is skipped and reset."""
    for state_dtype in (torch.float32, "8bit"):
        (p,), optimizer = run(
            lambda p, d=state_dtype: optim.AdamW(p, lr=1e-2, state_dtype=d), 2, shapes=[(16, 300)]
        )
        q = p.detach().clone().requires_grad_()
        peer = torch.optim.AdamW([q], lr=1e-2)
        if state_dtype == torch.float32:
            peer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before = p.detach().clone()
        draw_grads([p], 7)
        p.grad[3, 7] = bad
        q.grad = p.grad
        optimizer.step()
        peer.step()
        if state_dtype == torch.float32:
            torch.testing.assert_close(p, q, equal_nan=True)
            continue
        assert p[3, 7] == before[3, 7]
        state = optimizer.state[p]
        assert state["exp_avg_codes"][3, 7] == 127
        assert state["exp_avg_sq_codes"][3, 7] == 0
        assert all(v.isfinite().all() for v in (p, state["exp_avg_absmax"]))
        assert (p != before).sum() == p.numel() - 1


@pytest.mark.parametrize("state_dtype", [torch.float32, "8bit"])
def test_grad_scaler(state_dtype: Any, backend: str) -> None:
    """Unscaled inside the step; skipped and not counted if a gradient is infinite."""
    p, q = (torch.nn.Parameter(draw(shapes=[(64, 64)])[0].detach()) for _ in range(2))
    ours = optim.AdamW([p], 1e-2, state_dtype=state_dtype)
    plain = optim.AdamW([q], 1e-2, state_dtype=state_dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(64, 64, generator=generator)
        if seed == 2:
            weight[0, 0] = torch.inf
        p.grad = q.grad = None
        scaler.scale((p * weight).sum()).backward()
        before = snapshot([p], ours)
        scaler.step(ours)
        scaler.update()
        if seed == 2:
            assert same(snapshot([p], ours), before)
        else:
            (q * weight).sum().backward()
            plain.step()
            assert same(snapshot([p], ours), snapshot([q], plain))
    assert scaler.get_scale() == 512.0
    assert ours.state[p]["step"] == 3


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
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            optimizer = optim.AdamW(params, lr=0.0, max_grad_norm=1.0)
            optimizer.step()
            norms.append(optimizer.grad_norm.item())
    finally:
        torch.set_num_threads(threads)
    exact = torch.cat([p.grad.double().flatten() for p in params]).norm().item()
    assert norms[0] == pytest.approx(exact, rel=2 * U)
    assert len(set(norms)) == 1
