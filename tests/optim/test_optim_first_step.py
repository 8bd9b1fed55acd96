"""The first step on a GPU, with CPU kernels on trial in place of a GPU's; and gradient release."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import selection
from optimizers import ScheduleFreeAdamW, same, snapshot
from refusing import refuses
from torchweld import numerics, optim, state
from torchweld.dispatch import choice
from torchweld.dispatch.bare import BareOp
from torchweld.ops.optimizer import rule as rules
from torchweld.registry import EAGER
from trying import Trials, try_on_cpu

Make = Callable[[Any], torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    "adamw": optim.AdamW,
    "adam, amsgrad": lambda p: optim.Adam(p, amsgrad=True, weight_decay=0.1),
    "8bit": lambda p: optim.AdamW(p, state_dtype="8bit", min_quantized_size=16),
    "masters": lambda p: optim.AdamW(p, master_weights=True, max_grad_norm=0.5),
    "stochastic": lambda p: optim.AdamW(p, stochastic_rounding=True),
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "lars": lambda p: optim.LARS(p, lr=0.1, momentum=0.9),
    "lamb": lambda p: optim.LAMB(p, weight_decay=0.1),
    "lion": optim.Lion,
    "adafactor": optim.Adafactor,
}
SIXTEEN_BITS = {"masters", "stochastic"}


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trials:
    """Steps of CPU tensors are tried as on a GPU."""
    return try_on_cpu(monkeypatch, tmp_path)


def _params(name: str, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if name in SIXTEEN_BITS else torch.float32
    shapes = ((64, 128), (48,), (33, 7), (0, 4))
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    return params


@pytest.mark.parametrize("name", MAKES)
def test_a_right_kernel_serves(name: str, trials: Trials) -> None:
    """From the first step on, bitwise as if selected by name; the trial has no side effects."""
    ours, asked = _params(name), _params(name)
    optimizer, named = MAKES[name](ours), MAKES[name](asked)
    for _ in range(3):
        optimizer.step()
        with choice.use_backend("cpu"):
            named.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, asked, strict=True))
    assert {answer.backend for answer in trials.answers()} == {"cpu"}
    assert not trials.timed
    counted = [int(state["step"]) for state in optimizer.state.values()]
    assert set(counted) == {3}


def _plant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make kernels move parameters by a percent too much."""
    overload = BareOp.overload

    def wrong(op: BareOp, backend: str) -> Any:
        kernel = overload(op, backend)
        if backend == EAGER or kernel is None or "_" in op.name:
            return kernel

        def moved(params: list[torch.Tensor], *others: Any) -> None:
            before = [p.clone() for p in params]
            kernel(params, *others)
            for p, was in zip(params, before, strict=True):
                p.add_((p - was) * 0.5)

        return moved

    monkeypatch.setattr(BareOp, "overload", wrong)


@pytest.mark.parametrize("name", ["adamw", "adam, amsgrad", "sgd", "8bit", "lamb"])
def test_a_wrong_kernel_is_refused(
    name: str, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one warning; torch's step or the reference takes its place, from the first step on."""
    _plant(monkeypatch)
    ours, asked = _params(name), _params(name)
    optimizer, named = MAKES[name](ours), MAKES[name](asked)
    with pytest.warns(RuntimeWarning, match="is not used: wrong result: params is off"):
        optimizer.step()
    optimizer.step()  # a second warning would be an error
    with choice.use_backend(EAGER):
        named.step()
        named.step()
    torch.testing.assert_close([*ours], [*asked], **numerics.SUMMED_SMALL)


@pytest.mark.parametrize("off", ["raises", "has no memory"])
def test_a_trial_never_fails_the_step(
    off: str, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise RuntimeError("no kernel image") if off == "raises" else torch.OutOfMemoryError("no")

    monkeypatch.setattr(BareOp, "overload", lambda op, name: None if name == EAGER else failing)
    params = _params("adamw")
    before = copy.deepcopy(params)
    with pytest.warns(RuntimeWarning):
        optim.AdamW(params).step()
    torch_params = [torch.nn.Parameter(p.detach()) for p in before]
    for p, q in zip(params, torch_params, strict=True):
        q.grad = p.grad
    torch.optim.AdamW(torch_params, fused=True).step()
    assert all(torch.equal(a, b) for a, b in zip(params, torch_params, strict=True))


# --- torch's own step -------------------------------------------------------------------------

PAIRS: dict[str, tuple[Make, Make]] = {
    "AdamW": (optim.AdamW, lambda p: torch.optim.AdamW(p, fused=True)),
    "Adam": (
        lambda p: optim.Adam(p, amsgrad=True, weight_decay=0.1, maximize=True),
        lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1, maximize=True, fused=True),
    ),
    "SGD": (
        lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, fused=True),
    ),
    "plain SGD": (lambda p: optim.SGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1, fused=True)),
}


@pytest.fixture
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel serves, and the reference must not."""
    monkeypatch.setattr(BareOp, "overload", lambda op, name: None)
    monkeypatch.setattr(rules.Rule, "_reference", lambda *_: pytest.fail("the reference serves"))


@pytest.mark.usefixtures("unproven")
@pytest.mark.parametrize("name", PAIRS)
def test_torchs_step_serves_what_is_not_proven(name: str) -> None:
    """Bitwise torch's fused optimizer, with a rate per group, found_inf and a scale."""
    ours, theirs = _params(name), _params(name)
    a, b = (
        make([{"params": some[:1], "lr": 0.05}, {"params": some[1:]}])
        for make, some in zip(PAIRS[name], (ours, theirs), strict=True)
    )
    for scale, found_inf in ((None, None), (8.0, 0.0), (8.0, 1.0), (None, None)):
        optimizer: Any
        for optimizer, params in ((a, ours), (b, theirs)):
            for p in params:
                p.grad = torch.full_like(p, 0.25) * (scale or 1)
            if scale is None:
                for attribute in ("grad_scale", "found_inf"):
                    optimizer.__dict__.pop(attribute, None)
            else:
                optimizer.grad_scale = torch.tensor(scale)
                optimizer.found_inf = torch.tensor(found_inf)
            optimizer.step()
    torch.testing.assert_close([*ours], [*theirs], **numerics.SAME)
    counts = [int(state["step"]) for state in a.state.values()]
    assert set(counts) == {3}


def _whole(name: str) -> list[torch.nn.Parameter]:
    return [p for p in _params(name) if p.numel()]


@pytest.mark.usefixtures("unproven")
def test_torchs_adafactor_serves_what_is_not_proven() -> None:
    """Bitwise torch's own, with factors and without, in groups of two rates."""
    ours, theirs = _whole("adafactor"), _whole("adafactor")
    a, b = (
        make([{"params": some[:1], "lr": 0.05}, {"params": some[1:]}], weight_decay=0.1, d=1.5)
        for make, some in (
            (optim.Adafactor, ours),
            (partial(torch.optim.Adafactor, foreach=True), theirs),
        )
    )
    for _ in range(3):
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        for name, value in b.state[q].items():
            assert torch.equal(a.state[p][name].view_as(value), value), name


@pytest.mark.parametrize(
    "what", ["found_inf", "transformers", "masters", "empty", "compiled", "torch's"]
)
def test_where_torch_has_no_such_adafactor(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference serves: an unscaled step, another rule, coded states, nothing to divide by."""
    monkeypatch.setattr(BareOp, "overload", lambda op, name: None)
    served = []
    reference = rules.Rule._reference
    monkeypatch.setattr(
        rules.Rule, "_reference", lambda *given: (served.append(1), reference(*given))[1]
    )
    params = _params("masters" if what == "masters" else what)
    make = optim.TransformersAdafactor if what == "transformers" else optim.Adafactor
    if what == "compiled":
        monkeypatch.setattr(state, "is_compiling", lambda: True)
    optimizer = make(
        params[-1:] if what == "empty" else params[:1], master_weights=what == "masters"
    )
    if what == "found_inf":
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    optimizer.step()
    assert bool(served) == (what != "torch's")


@pytest.mark.parametrize("what", ["dampened", "strides"])
def test_the_reference_serves_what_torch_has_no_step_for(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BareOp, "overload", lambda op, name: None)
    params, asked = _params(what), _params(what)
    dampening = 0.5 if what == "dampened" else 0.0
    if what == "strides":
        for some in (params, asked):
            some[0].grad = some[0].grad.t().contiguous().t()
    for some, backend in ((params, None), (asked, EAGER)):
        optimizer = optim.SGD(some, 0.1, momentum=0.9, dampening=dampening)
        with choice.use_backend(backend):
            optimizer.step()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, asked, strict=True))


# --- Gradient release -----------------------------------------------------------------------------


WIDTH, LAYERS = 64, 12
ONE = 4 * WIDTH * WIDTH  # bytes of a matrix's gradient


def _model(dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers).to(dtype)


class _Peak:
    """The bytes of gradients at each arrival of one, before it may be released."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.bytes = 0
        self._params = list(model.parameters())
        for p in self._params:
            p.register_post_accumulate_grad_hook(self._look)

    def _look(self, _: torch.Tensor) -> None:
        held = sum(p.grad.nbytes for p in self._params if p.grad is not None)
        self.bytes = max(self.bytes, held)


def _train(
    model: torch.nn.Module, optimizer: Any, release: Any, micro_batches: int = 1, steps: int = 3
) -> None:
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4)
    dtype = next(model.parameters()).dtype
    torch.manual_seed(1)
    for _ in range(steps):
        for i in range(micro_batches):
            loss = model(torch.randn(8, WIDTH).to(dtype)).square().mean()
            if release is not None and i + 1 < micro_batches:
                with release.accumulate():
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


MAKERS: dict[str, Any] = {
    "AdamW": lambda p: optim.AdamW(p, 1e-2),
    "8 bits": lambda p: optim.AdamW(p, 1e-2, state_dtype="8bit", min_quantized_size=0),
    "rounded": lambda p: optim.AdamW(p, 1e-2, stochastic_rounding=True),
    "remainders": lambda p: optim.Lion(p, master_weights="remainder8", ema_decay=0.9),
    "LAMB": lambda p: optim.LAMB(p, weight_decay=0.1),
    "cautious": lambda p: optim.AdamW(p, cautious=True),
    "Muon": lambda p: optim.Muon(p, 0.02),
    "Adafactor": optim.Adafactor,
    "schedule-free": ScheduleFreeAdamW,
    "groups": lambda p: optim.AdamW(
        [
            {"params": [q], "weight_decay": 0.1 * i, "stochastic_rounding": True}
            for i, q in enumerate(p)
        ]
    ),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_trajectory_and_the_memory(name: str, micro_batches: int) -> None:
    """Bit for bit; and gradients of one bucket, here of three matrices, at most."""
    dtype = torch.bfloat16 if name in ("rounded", "remainders", "groups") else torch.float32
    results, peaks = [], []
    for releases in (False, True):
        model = _model(dtype)
        optimizer = MAKERS[name](list(model.parameters()))
        peak = _Peak(model)
        release = None
        if releases:
            bucket = 3 * ONE * dtype.itemsize // 4
            release = optim.release_gradients(model, optimizer, bucket_bytes=bucket)
        _train(model, optimizer, release, micro_batches)
        results.append(snapshot(list(model.parameters()), optimizer))
        peaks.append(peak.bytes * 4 // dtype.itemsize)
    assert same(*results)
    assert peaks[0] == LAYERS * ONE
    assert peaks[1] == (3 * ONE if micro_batches == 1 else LAYERS * ONE)


def test_what_has_no_hook_steps_as_usual() -> None:
    """A parameter that the model lacks, one without a gradient, and a bucket that never fills."""
    results = []
    for releases in (False, True):
        model, other = _model(), torch.nn.Parameter(torch.ones(WIDTH))
        model[0].weight.requires_grad_(False)
        optimizer = optim.AdamW([*model.parameters(), other], 1e-2)
        if releases:
            optim.release_gradients(model, optimizer)
        for _ in range(2):
            (model(torch.ones(2, WIDTH)) * other).square().mean().backward()
            optimizer.step()
            assert releases == (model.get_parameter("1.weight").grad is None)
            assert other.grad is not None
            optimizer.zero_grad()
        results.append(snapshot([model.get_parameter("1.weight"), other], optimizer))
    assert same(*results)


def test_a_tied_weight_steps_once() -> None:
    results = []
    for releases in (False, True):
        model = _model()
        model[5].weight = model[7].weight
        optimizer = optim.AdamW(model.parameters(), 1e-2)
        if releases:
            optim.release_gradients(model, optimizer, bucket_bytes=1)
        _train(model, optimizer, None)
        results.append(snapshot(list(model.parameters()), optimizer))
    assert same(*results)


def test_removed_hooks_leave_gradients() -> None:
    model = _model()
    optimizer = optim.AdamW(model.parameters())
    release = optim.release_gradients(model, optimizer, bucket_bytes=1)
    release.remove()
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(2, WIDTH)).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(torch.equal(v, before[name]) for name, v in model.state_dict().items())


class _Fails(torch.autograd.Function):
    """The identity, whose backward pass fails while `active`."""

    active = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if _Fails.active:
            raise RuntimeError("out of memory")
        return grad


@pytest.mark.parametrize(
    ("bucket_bytes", "checkpoints", "to_none"),
    selection.combine([1, 2**25], [None, False, True], [True, False]),
)
def test_a_backward_pass_that_failed_runs_again(
    bucket_bytes: int, checkpoints: bool | None, to_none: bool
) -> None:
    """If nothing stepped in the failed pass, the trajectory is the same as without failures."""
    models = [_model(), _model()]
    optimizers = [optim.AdamW(model.parameters(), 1e-2) for model in models]
    optim.release_gradients(models[0], optimizers[0], bucket_bytes=bucket_bytes)

    def backward(model: torch.nn.Sequential, seed: int, fails: bool = False) -> None:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        for i, layer in enumerate(model):
            x = _Fails.apply(x) if i == LAYERS // 2 else x  # type: ignore[no-untyped-call]
            if checkpoints is None or i == LAYERS - 1:
                x = layer(x)
            else:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=checkpoints)
        _Fails.active = fails
        x.square().mean().backward()

    for step in range(3):
        with pytest.raises(RuntimeError, match="out of memory"):
            backward(models[0], 9, fails=True)
        optimizers[0].zero_grad(set_to_none=to_none)
        for model, optimizer in zip(models, optimizers, strict=True):
            backward(model, step)
            if step < 2:
                optimizer.step()
                optimizer.zero_grad()
    refuses("second backward pass", backward, models[0], 2)
    trajectories = [list(model.parameters()) for model in models]
    assert same(*trajectories) == (bucket_bytes > 1)  # type: ignore[arg-type]


def test_what_is_refused() -> None:
    model = _model()
    release = partial(optim.release_gradients, model)
    refuses("max_grad_norm", release, optim.AdamW(model.parameters(), max_grad_norm=1.0))
    refuses("optimizer", release, torch.optim.AdamW(model.parameters()))
    refuses("optimizer", release, optim.OneBitAdam(model.parameters(), freeze_step=2))
    refuses("bucket_bytes", release, optim.AdamW(model.parameters()), bucket_bytes=0)
    optimizer = optim.AdamW(model.parameters())
    optim.release_gradients(model, optimizer, bucket_bytes=1)
    model(torch.ones(2, WIDTH)).square().mean().backward()
    refuses("second backward pass", model(torch.ones(2, WIDTH)).square().mean().backward)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.step()
    scaler.scale(model(torch.ones(2, WIDTH)).square().mean())
    model[0].weight.grad = torch.ones(WIDTH, WIDTH)
    refuses("GradScaler", scaler.step, optimizer)
