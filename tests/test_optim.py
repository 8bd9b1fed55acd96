"""Optimizers: torch.optim's numbers and habits, whatever their states are stored as."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import torchweld
from torchweld import optim
from torchweld.functional import dequantize_8bit, quantize_8bit
from torchweld.ops._optimizer import read_param

U = 2.0**-24
SHAPES = ((7,), (33, 700), (64, 256), (1,), (), (0, 5), (40, 30, 5))
Optimizer = torch.optim.Optimizer


@pytest.fixture(params=["cpu", "eager"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with torchweld.use_backend(request.param):
        yield request.param


def _params(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def _grads(params: list[torch.Tensor], seed: int, scale: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


def _run(
    make: Callable[[list[torch.Tensor]], Optimizer],
    steps: int = 6,
    dtype: torch.dtype = torch.float32,
    shapes: Any = SHAPES,
) -> tuple[list[torch.Tensor], Optimizer]:
    params = _params(dtype, shapes)
    optimizer = make(params)
    for seed in range(steps):
        _grads(params, seed)
        optimizer.step()
    return params, optimizer


def _snapshot(params: list[torch.Tensor], optimizer: Optimizer) -> list[torch.Tensor]:
    """Parameters and all that is kept of them."""
    state = [v for p in params for v in optimizer.state[p].values()]
    return [t.detach().clone() for t in [*params, *state]]


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- Numbers ----------------------------------------------------------------------------------


class _Transformer:
    """Gradients of a small transformer as it is trained, of float32 weights."""

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
    """50 steps on a transformer: within the roundings of a step, of torch's loop and its fused one.

    A step rounds a parameter once on either side, and some ten times in an update that is at most
    about lr / sqrt(1 - beta2), at the first of amsgrad's steps, and lr otherwise.
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
    ours, optimizer = _run(
        lambda p: optim.AdamW(p, lr=1e-2, master_weights=masters), 20, dtype, shapes
    )
    exact = [p.detach().double().requires_grad_() for p in _params(dtype, shapes)]
    peers = [p.detach().float().requires_grad_() for p in _params(dtype, shapes)]
    optimizers = [torch.optim.AdamW(p, lr=1e-2) for p in (exact, peers)]
    given = _params(dtype, shapes)
    for seed in range(20):
        _grads(given, seed)
        for params, other in zip((exact, peers), optimizers, strict=True):
            for p, q in zip(params, given, strict=True):
                p.grad = q.grad.to(p.dtype)
            other.step()
    for p, e, t in zip(ours, exact, peers, strict=True):
        mine = optimizer.state[p]["master"] if masters else p
        errors = [(x.double() - e).square().mean().sqrt() for x in (mine, t)]
        assert errors[0] <= 1.1 * errors[1]


def test_torchs_fused_bfloat16() -> None:
    """Its states and weights in bfloat16: the same bits but where roundings meet a tie."""
    a, ours = _run(lambda p: optim.AdamW(p, state_dtype=torch.bfloat16), 20, torch.bfloat16)
    b, theirs = _run(lambda p: torch.optim.AdamW(p, fused=True), 20, torch.bfloat16)
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
    a, ours = _run(lambda p: _sgd(optim, p, **settings))
    b, theirs = _run(lambda p: _sgd(torch.optim, p, **settings))
    for p, q in zip(a, b, strict=True):
        assert ((p - q).abs() <= 6 * 8 * U * (q.abs() + 1)).all()
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    with torch.no_grad():
        for p, q in zip(a, b, strict=True):
            p.copy_(q)
    for params, optimizer in ((a, ours), (b, theirs)):
        _grads(params, 9)
        optimizer.step()
    for p, q in zip(a, b, strict=True):
        assert ((p - q).abs() <= 8 * U * (q.abs() + 1)).all()


def test_lion_as_published(backend: str) -> None:
    """In float64 from the paper's algorithm; no step is taken in the direction of zero."""
    lr, beta1, beta2, decay = 1e-3, 0.9, 0.99, 0.1
    params, optimizer = _run(lambda p: optim.Lion(p, lr, (beta1, beta2), decay), 10)
    exact = [p.detach().double() for p in _params()]
    momenta = [torch.zeros_like(p) for p in exact]
    given = _params()
    for seed in range(10):
        _grads(given, seed)
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


CODECS = list(
    itertools.product(
        [torch.float32, torch.bfloat16, torch.float16],
        [torch.float32, torch.bfloat16, "8bit"],
        [False, True, "remainder"],
    )
)


@pytest.mark.parametrize(("dtype", "state_dtype", "masters"), CODECS)
def test_the_kernel_is_the_reference_to_the_bit(
    dtype: torch.dtype, state_dtype: Any, masters: Any
) -> None:
    """Every codec, at any thread count, with each of the rule's branches."""
    threads = torch.get_num_threads()
    for kind, settings in (
        (optim.AdamW, {}),
        (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
        (optim.SGD, {"weight_decay": 0.1}),
        (optim.SGD, {"momentum": 0.9, "dampening": 0.1, "nesterov": False}),
        (optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (optim.Lion, {"weight_decay": 0.1}),
    ):

        def make(params: Any, kind: Any = kind, settings: Any = settings) -> Optimizer:
            return kind(
                params,
                lr=1e-2,
                state_dtype=state_dtype,
                master_weights=masters,
                min_quantized_size=0,
                **settings,
            )

        with torchweld.use_backend("eager"):
            expected = _snapshot(*_run(make, 3, dtype))
        try:
            for count in (1, 3):
                torch.set_num_threads(count)
                with torchweld.use_backend("cpu"):
                    assert _same(_snapshot(*_run(make, 3, dtype)), expected)
        finally:
            torch.set_num_threads(threads)


def test_an_8_bit_step_is_a_float32_step_between_codes() -> None:
    """torch's own step from the decoded state; the new state is its moments, encoded."""
    (p,), optimizer = _run(
        lambda p: optim.AdamW(p, lr=1e-2, state_dtype="8bit"), 3, shapes=[(64, 700)]
    )
    state = optimizer.state[p]
    q = p.detach().clone().requires_grad_()
    peer = torch.optim.AdamW([q], lr=1e-2)
    peer.state[q] = {"step": state["step"].clone()} | {
        name: dequantize_8bit(state[f"{name}_codes"], state[f"{name}_absmax"], signed=signed)
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False))
    }
    _grads([p], 9)
    q.grad = p.grad
    optimizer.step()
    peer.step()
    assert ((p - q).abs() <= 2 * U * q.abs() + 20 * U * 1e-2).all()
    for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        codes, absmax = quantize_8bit(peer.state[q][name], signed=signed)
        torch.testing.assert_close(absmax, state[f"{name}_absmax"], rtol=4 * U, atol=0)
        assert (codes == state[f"{name}_codes"]).float().mean() > 0.999


@pytest.mark.parametrize("state_dtype", [torch.float32, "8bit"])
def test_a_remainder_is_half_of_a_master(state_dtype: Any, backend: str) -> None:
    """The same float32s at every step; the bfloat16 beside them rounds ties away from zero."""
    runs = []
    for masters in (True, "remainder"):
        params = _params(torch.bfloat16)
        runs.append(
            (params, optim.AdamW(params, 1e-2, state_dtype=state_dtype, master_weights=masters))
        )
    for seed in range(20):
        for params, optimizer in runs:
            _grads(params, seed)
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
    """The largest, ties, subnormals, infinity: what a step leaves as it is comes back."""
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
    params = _params(shapes=[(64, 64), (63, 64), (5000,), (16, 16, 16)])
    optimizer = optim.AdamW(
        [{"params": params}, {"params": _params(shapes=[(8, 8)]), "min_quantized_size": 64}],
        state_dtype="8bit",
    )
    every = [p for group in optimizer.param_groups for p in group["params"]]
    _grads(every, 0)
    optimizer.step()
    quantized = ["exp_avg_codes" in optimizer.state[p] for p in every]
    assert quantized == [True, False, False, True, True]
    bytes_of = {k: v.nbytes for k, v in optimizer.state[params[0]].items() if k != "step"}
    assert sum(bytes_of.values()) == 2 * (4096 + 4 * 64)  # rows of 64 are blocks of their own


# --- Gradients that are not finite, scaled or clipped -------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_gradients_that_are_not_finite(bad: float, backend: str) -> None:
    """float32 states go torch's way. A block's element is skipped and starts anew, alone."""
    for state_dtype in (torch.float32, "8bit"):
        (p,), optimizer = _run(
            lambda p, d=state_dtype: optim.AdamW(p, lr=1e-2, state_dtype=d), 2, shapes=[(16, 300)]
        )
        q = p.detach().clone().requires_grad_()
        peer = torch.optim.AdamW([q], lr=1e-2)
        if state_dtype == torch.float32:
            peer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before = p.detach().clone()
        _grads([p], 7)
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
    """Unscaled inside the step; left out, with its count, where a gradient is infinite."""
    p, q = (torch.nn.Parameter(_params(shapes=[(64, 64)])[0].detach()) for _ in range(2))
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
        before = _snapshot([p], ours)
        scaler.step(ours)
        scaler.update()
        if seed == 2:
            assert _same(_snapshot([p], ours), before)
        else:
            (q * weight).sum().backward()
            plain.step()
            assert _same(_snapshot([p], ours), _snapshot([q], plain))
    assert scaler.get_scale() == 512.0
    assert ours.state[p]["step"] == 3


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_clipping_is_that_of_clip_grad_norm(limit: float, backend: str) -> None:
    a = _params()
    b = _params()
    ours = optim.AdamW(a, lr=1e-2, max_grad_norm=limit)
    theirs = torch.optim.AdamW(b, lr=1e-2)
    for seed in range(5):
        _grads(a, seed)
        _grads(b, seed)
        kept = [p.grad.clone() for p in a]
        norm = torch.nn.utils.clip_grad_norm_(b, limit)
        ours.step()
        theirs.step()
        torch.testing.assert_close(ours.grad_norm, norm, rtol=1e-5, atol=0)
        assert _same([p.grad for p in a], kept)  # gradients stay as they were
    for p, q in zip(a, b, strict=True):
        # The norm's rounding reaches every element of an update.
        assert ((p - q).abs() <= 5 * (2 * U * q.abs() + 1e-5 * 1e-2)).all()


def test_the_norm_has_the_same_bits_at_any_thread_count() -> None:
    params = _params(shapes=[(999, 37)] * 9 + [(5,)] * 20)
    _grads(params, 0)
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


# --- torch.optim's habits ---------------------------------------------------------------------


def test_arguments_of_torchs_constructors() -> None:
    """Those that choose an implementation are accepted, and change nothing."""
    plain = _snapshot(*_run(lambda p: optim.AdamW(p)))
    for extra in ({"foreach": True}, {"fused": True}, {"foreach": False}, {"capturable": True}):
        assert _same(_snapshot(*_run(lambda p, e=extra: optim.AdamW(p, **e))), plain)
    assert isinstance(optim.AdamW(_params()), torch.optim.AdamW)
    assert isinstance(optim.Adam(_params()), torch.optim.Adam)
    a = _snapshot(*_run(lambda p: optim.Adam(p, 1e-3, decoupled_weight_decay=True)))
    assert _same(a, _snapshot(*_run(lambda p: optim.AdamW(p, 1e-3, weight_decay=0))))


def test_groups_closures_hooks_and_schedulers() -> None:
    a, b = _params(), _params()
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


def test_any_layout_and_complex_numbers(backend: str) -> None:
    """Transposed, strided, channels-last, expanded and shared gradients, complex parameters."""

    def params() -> list[torch.Tensor]:
        made = _params(shapes=[(40, 30), (64, 20), (4, 8, 3, 3), (50, 6), (50, 6)])
        with torch.no_grad():
            views = [
                made[0].t(),
                made[1][:, ::2],
                made[2].to(memory_format=torch.channels_last),
                made[3],
                torch.view_as_complex(made[4].reshape(50, 3, 2)),
            ]
        return [v.detach().clone(memory_format=torch.preserve_format) for v in views]

    def gradients(made: list[torch.Tensor], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for p in made:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        made[3].grad = torch.randn(6, generator=generator).expand(50, 6)
        made[0].grad = made[0].grad.t().contiguous().t()

    for state_dtype in (torch.float32, torch.bfloat16, "8bit"):
        made = [params(), params()]
        ours = optim.AdamW(made[0], 1e-2, state_dtype=state_dtype, min_quantized_size=0)
        theirs = torch.optim.AdamW(made[1], 1e-2)
        for seed in range(3):
            for each in made:
                gradients(each, seed)
            ours.step()
            theirs.step()
        atol = {torch.float32: 1e-7, torch.bfloat16: 1e-3}.get(state_dtype, 6e-3)
        for p, q in zip(*made, strict=True):
            assert p.stride() == q.stride()
            torch.testing.assert_close(p, q, rtol=1e-6, atol=atol)


def test_a_stale_saved_tensor_is_noticed(backend: str) -> None:
    """A step bumps the versions of what it writes to."""
    p = _params(shapes=[(64, 64)])[0]
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
    """Both ways bit for bit, and the run goes on."""
    a, ours = _run(lambda p: getattr(optim, name)(p, amsgrad=amsgrad))
    b, theirs = _run(lambda p: getattr(torch.optim, name)(p, amsgrad=amsgrad))
    saved = {k: v.clone() for k, v in ours.state[a[1]].items()}
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert all(torch.equal(theirs.state[b[1]][k], v) for k, v in saved.items())
    fresh = getattr(optim, name)(a, amsgrad=amsgrad)
    fresh.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert all(torch.equal(fresh.state[a[1]][k], v) for k, v in saved.items())
    with torch.no_grad():
        for p, q in zip(a, b, strict=True):
            q.copy_(p)
    _grads(a, 50)
    _grads(b, 50)
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

    a, first = _run(make, dtype=dtype)
    torch.save([first.state_dict(), a], tmp_path / "saved.pt")
    state, b = torch.load(tmp_path / "saved.pt", weights_only=True)
    second = make(b)
    second.load_state_dict(state)
    for seed in (20, 21):
        for params, optimizer in ((a, first), (b, second)):
            _grads(params, seed)
            optimizer.step()
    assert _same(_snapshot(a, first), _snapshot(b, second))


def test_states_are_converted_to_how_this_optimizer_keeps_them() -> None:
    """From float32 to codes and back, masters to remainders and back."""
    a, wide = _run(lambda p: optim.AdamW(p, master_weights=True), dtype=torch.bfloat16)
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
    assert back.param_groups[0]["state_dtype"] == torch.float32


def test_copies_and_pickles() -> None:
    params, optimizer = _run(lambda p: optim.AdamW(p, state_dtype="8bit", max_grad_norm=1.0))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        theirs = other.param_groups[0]["params"]
        assert _same(_snapshot(params, optimizer), _snapshot(theirs, other))
        _grads(theirs, 3)
        other.add_param_group({"params": _params(shapes=[(64, 64)])})
        other.step()
        assert other.grad_norm is not None
        assert other.param_groups[1]["state_dtype"] == "8bit"


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
    params, optimizer = _run(lambda p: optim.AdamW(p, state_dtype="8bit"))
    before = _snapshot(params, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    function, named = DAMAGE[damage]
    function(saved["state"][1])
    with pytest.raises(torchweld.ArgumentError, match=named):
        optimizer.load_state_dict(saved)
    assert _same(_snapshot(params, optimizer), before)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"].append(saved["param_groups"][0])
    with pytest.raises(ValueError, match="number of parameter groups"):
        optimizer.load_state_dict(saved)
    assert _same(_snapshot(params, optimizer), before)


# --- Errors -----------------------------------------------------------------------------------

P = [torch.zeros(4, 4)]
BAD: dict[str, tuple[Callable[[], Any], str, str]] = {
    "state": (lambda: optim.AdamW(P, state_dtype="4bit"), "state_dtype", "8bit"),
    "state's dtype": (lambda: optim.AdamW(P, state_dtype=torch.int8), "state_dtype", "bfloat16"),
    "masters": (lambda: optim.AdamW(P, master_weights="all"), "master_weights", "remainder"),
    "size": (lambda: optim.AdamW(P, min_quantized_size=-1), "min_quantized_size", ">= 0"),
    "norm": (lambda: optim.AdamW(P, max_grad_norm=0.0), "max_grad_norm", "> 0"),
    "graph": (lambda: optim.AdamW(P, differentiable=True), "differentiable", "torch.optim"),
    "lion's lr": (lambda: optim.Lion(P, -1.0), "lr", ">= 0"),
    "lion's betas": (lambda: optim.Lion(P, betas=(0.9, 1.0)), "betas", r"\[0, 1\)"),
    "lion's graph": (lambda: optim.Lion(P, differentiable=True), "differentiable", "False"),
    "a group": (lambda: optim.AdamW([{"params": P, "state_dtype": 8}]), "state_dtype", "8bit"),
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
    optim.Lion8bit: optim.Lion,
}


@pytest.mark.parametrize("alias", EIGHT_BIT)
def test_bitsandbytes_names(alias: Any) -> None:
    """Its arguments, and an error where it would have done something else."""
    settings = {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1}
    a = _run(lambda p: alias(p, **settings, min_8bit_size=8192, is_paged=False, args=None))
    b = _run(lambda p: EIGHT_BIT[alias](p, **settings, state_dtype="8bit", min_quantized_size=8192))
    assert _same(_snapshot(*a), _snapshot(*b))
    for refused in ({"is_paged": True}, {"percentile_clipping": 5}, {"block_wise": False}):
        with pytest.raises(torchweld.ArgumentError) as caught:
            alias(P, **refused)
        assert caught.value.argument in refused


def test_torchs_own_errors() -> None:
    with pytest.raises(ValueError, match="learning rate"):
        optim.AdamW(P, lr=-1.0)
    with pytest.raises(TypeError):
        optim.AdamW(P, momentum=0.9)


def test_a_step_that_cannot_be_taken_writes_nothing(backend: str) -> None:
    """Sparse gradients, and parameters that are not of the shape that they had."""
    params, optimizer = _run(lambda p: optim.AdamW(p, state_dtype="8bit"))
    before = _snapshot(params, optimizer)
    _grads(params, 0)
    params[1].grad = params[1].grad.to_sparse()
    with pytest.raises(torchweld.ArgumentError, match="sparse"):
        optimizer.step()
    assert _same(_snapshot(params, optimizer), before)
    params[1].grad = None
    params[4].data = torch.ones(3)
    params[4].grad = torch.ones(3)
    with pytest.raises(torchweld.ArgumentError, match=r"\[3\]"):
        optimizer.step()
    params[4].data = before[4]
    assert _same(_snapshot(params, optimizer), before)


def test_kernels_refuse_by_themselves() -> None:
    """Called past Python's checks: before anything is written."""
    adam = torch.ops.torchweld.adam.cpu

    def call(**changed: Any) -> None:
        given: dict[str, Any] = {
            "params": [torch.zeros(4, 300)],
            "grads": [torch.ones(4, 300)],
            "completions": [],
            "moments": [torch.zeros(4, 300, dtype=torch.uint8) for _ in range(2)],
            "absmaxes": [torch.zeros(4, 2) for _ in range(2)],
            "steps": [torch.tensor(0.0)],
            "lr": torch.tensor(1.0),
        }
        given |= changed
        try:
            adam(*given.values(), 0.9, 0.999, 1e-8, 0.0, True, None, None)
        finally:
            assert changed.get("params") or not given["params"][0].any()

    call(lr=torch.tensor(0.0))
    x = torch.zeros(4, 300)
    wrong: list[dict[str, Any]] = [
        {"grads": []},
        {"grads": [torch.ones(4, 299)]},
        {"grads": [torch.ones(4, 300).half()]},
        {"grads": [torch.ones(300, 4).t()]},
        {"moments": [x, x]},
        {"moments": [x.double()] * 2, "absmaxes": []},
        {"moments": [x.to(torch.uint8)], "absmaxes": [torch.zeros(4, 2)]},
        {"absmaxes": [torch.zeros(4, 3)] * 2},
        {"absmaxes": []},
        {"completions": [x]},
        {"completions": [x.short()]},
        {"params": [x.double()], "grads": [x.double()]},
        {"steps": []},
        {"steps": [torch.tensor(0)]},
        {"lr": torch.ones(2)},
    ]
    for changed in wrong:
        with pytest.raises(RuntimeError):
            call(**changed)
    with pytest.raises(RuntimeError):
        torch.ops.torchweld.sum_of_squares.cpu([])
