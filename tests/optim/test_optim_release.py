"""Gradient release: the trajectory of whole steps, and gradients that are gone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import selection
import torchweld
from optimizers import ScheduleFreeAdamW, same, snapshot
from torchweld import optim

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
    with pytest.raises(torchweld.ArgumentError, match="second backward pass"):
        backward(models[0], 2)
    trajectories = [list(model.parameters()) for model in models]
    assert same(*trajectories) == (bucket_bytes > 1)  # type: ignore[arg-type]


def test_what_is_refused() -> None:
    model = _model()

    def refuses(match: str, optimizer: Any, **settings: Any) -> None:
        with pytest.raises(torchweld.ArgumentError, match=match):
            optim.release_gradients(model, optimizer, **settings)

    refuses("max_grad_norm", optim.AdamW(model.parameters(), max_grad_norm=1.0))
    refuses("optimizer", torch.optim.AdamW(model.parameters()))
    refuses("optimizer", optim.OneBitAdam(model.parameters(), freeze_step=2))
    refuses("bucket_bytes", optim.AdamW(model.parameters()), bucket_bytes=0)
    optimizer = optim.AdamW(model.parameters())
    optim.release_gradients(model, optimizer, bucket_bytes=1)
    model(torch.ones(2, WIDTH)).square().mean().backward()
    with pytest.raises(torchweld.ArgumentError, match="second backward pass"):
        model(torch.ones(2, WIDTH)).square().mean().backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.step()
    scaler.scale(model(torch.ones(2, WIDTH)).square().mean())
    model[0].weight.grad = torch.ones(WIDTH, WIDTH)
    with pytest.raises(torchweld.ArgumentError, match="GradScaler"):
        scaler.step(optimizer)
