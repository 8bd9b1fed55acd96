"""Rules that torch lacks, or options of them: papers in float64, averages, and cautious steps."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torchweld
from optimizers import (
    MATRICES,
    SHAPES,
    Algorithm,
    ScheduleFreeAdamW,
    U,
    draw,
    draw_grads,
    draw_steps,
    in_float64,
    lamb,
    run,
    same,
    snapshot,
)
from torchweld import optim
from torchweld.ops.optimizer.reference import read_param

Params = list[torch.Tensor]
FEW = ((7,), (33, 70), (16, 256), (40, 30))


def _in_float64(algorithm: Algorithm, steps: int, shapes: Any, settings: dict[str, Any]) -> Any:
    """The algorithm on the parameters and gradients of `run`."""
    return in_float64(algorithm, draw(shapes=shapes), draw_steps(steps, shapes), settings)


def _adam(g: Any, t: int, kept: dict[str, Any], beta1: float, beta2: float) -> tuple[Any, Any]:
    """Adam's first moment, corrected, and what it is divided by."""
    kept["m"] = beta1 * kept.get("m", 0) + (1 - beta1) * g
    kept["v"] = beta2 * kept.get("v", 0) + (1 - beta2) * g * g
    return kept["m"] / (1 - beta1**t), (kept["v"] / (1 - beta2**t)).sqrt() + 1e-8


def _step_cautiously(p: Any, g: Any, u: Any, s: dict[str, Any]) -> torch.Tensor:
    """A decayed step, with the mask of Liang et al. and the decay of Chen et al."""
    if s.get("cautious"):
        mask = (u * g > 0).double()
        u = u * mask / mask.mean().clamp(min=1e-3)
    decayed = p * (1 - s["lr"] * s["weight_decay"])
    spares = s.get("cautious_decay")
    found: torch.Tensor = torch.where(u * p >= 0, decayed, p) if spares else decayed
    return found - s["lr"] * u


def _adamw(p: Any, g: Any, t: int, kept: dict[str, Any], s: dict[str, Any]) -> torch.Tensor:
    m, root = _adam(g, t, kept, 0.9, 0.999)
    return _step_cautiously(p, g, m / root, s)


def _lion(p: Any, g: Any, t: int, kept: dict[str, Any], s: dict[str, Any]) -> torch.Tensor:
    m = kept.get("m", 0)
    kept["m"] = 0.99 * m + 0.01 * g
    return _step_cautiously(p, g, (0.9 * m + 0.1 * g).sign(), s)


def _lars(p: Any, g: Any, t: int, kept: dict[str, Any], s: dict[str, Any]) -> torch.Tensor:
    """torch's SGD on a gradient rescaled to the parameter."""
    lr, momentum, decay = float(s["lr"]), s.get("momentum", 0.9), s.get("weight_decay", 0.0)
    a, b = p.norm(), g.norm()
    if a > 0 and b > 0:
        ratio = s.get("trust_coefficient", 1e-3) * a / (b + decay * a + s.get("eps", 1e-8))
        g = (g + decay * p) * ratio
        if s.get("clip"):
            g = g * min(1 / ratio, 1 / lr)
    first = "m" not in kept
    kept["m"] = g if first else momentum * kept["m"] + (1 - s.get("dampening", 0)) * g
    found: torch.Tensor = p - lr * (g + momentum * kept["m"] if s.get("nesterov") else kept["m"])
    return found


def _ademamix(p: Any, g: Any, t: int, kept: dict[str, Any], s: dict[str, Any]) -> torch.Tensor:
    """Algorithm 1, with its schedulers of alpha and beta3."""
    warmup, beta1, last = s.get("alpha_warmup", 0), s["betas"][0], s["betas"][2]
    alpha = min(t / warmup, 1) * s["alpha"] if warmup else s["alpha"]
    beta3 = last
    if t < warmup:
        # The paper's formula, of the logarithms of both ends.
        a, b = math.log(beta1), math.log(last)
        beta3 = min(math.exp(a * b / ((1 - t / warmup) * b + t / warmup * a)), last)
    m, root = _adam(g, t, kept, *s["betas"][:2])
    kept["slow"] = beta3 * kept.get("slow", 0) + (1 - beta3) * g
    u: torch.Tensor = (m + alpha * kept["slow"]) / root
    return p - s["lr"] * (u + s["weight_decay"] * p)


def _schedule_free(y: Any, g: Any, t: int, kept: dict[str, Any], s: dict[str, Any]) -> torch.Tensor:
    """Algorithm 1: y, z and x, each stored, and x an average of all z."""
    rate = s["lr"] * min(1.0, t / s["warmup_steps"]) if s["warmup_steps"] else s["lr"]
    weight = t ** s["r"] * rate**2
    kept["weights"] = kept.get("weights", 0) + weight
    _, root = _adam(g, t, kept, 0.9, 0.999)
    z = kept["z"] = kept.get("z", y) - rate * (g / root + s["weight_decay"] * y)
    x = kept.get("x", y)
    x = kept["x"] = x + weight / kept["weights"] * (z - x)
    found: torch.Tensor = 0.1 * z + 0.9 * x
    return found


def _adafactor(p: Any, g: Any, t: int, kept: dict[str, Any], s: dict[str, Any]) -> torch.Tensor:
    """The paper's algorithm with the options of transformers' class."""
    rate = 1 - t ** s.get("decay_rate", -0.8)
    square = g * g + 1e-30

    def average(name: str, new: torch.Tensor) -> Any:
        kept[name] = rate * kept.get(name, 0) + (1 - rate) * new
        return kept[name]

    def rms(x: torch.Tensor) -> torch.Tensor:
        return x.square().mean().sqrt()

    if p.ndim > 1:
        rows = average("rows", square.mean(-1, keepdim=True))
        columns = average("columns", square.mean(-2, keepdim=True))
        u = g / (rows * columns / rows.mean(-2, keepdim=True)).sqrt()
    else:
        u = g / average("all", square).sqrt()
    u = u / (rms(u) / s.get("clip_threshold", 1.0)).clamp(min=1.0)
    lr = s.get("lr")
    if lr is None:
        lr = min(1e-6 * t if s.get("warmup_init") else 1e-2, t**-0.5)
    if s.get("scale_parameter", True):
        lr = lr * rms(p).clamp(min=1e-3)
    u = u * lr
    if beta1 := s.get("beta1"):
        u = kept["first"] = beta1 * kept.get("first", 0.0) + (1 - beta1) * u
    found: torch.Tensor = p - s.get("weight_decay", 0.0) * lr * p - u
    return found


@dataclass(frozen=True)
class Case:
    """An algorithm and settings; `bound` takes the exact result. `few`: how many may be off."""

    make: Any
    algorithm: Algorithm
    steps: int
    bound: Callable[[torch.Tensor], Any]
    settings: dict[str, Any]
    shapes: Any = SHAPES
    few: int = 0

    def __str__(self) -> str:
        return f"{self.make.__name__}-{self.settings}"


def _moved(by: float) -> Callable[[torch.Tensor], Any]:
    """Ten roundings of what a parameter has moved by at most, and one a step of its own."""
    return lambda e: 10 * U * (e.abs() + by)


LAMBS: list[dict[str, Any]] = [
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "betas": (0.8, 0.99), "eps": 1e-8, "maximize": True},
    {"bias_correction": False, "grad_averaging": False, "weight_decay": 0.01},
    {"trust_clip": (0.5, 2.0)},
    {"always_adapt": False},
    {"always_adapt": False, "weight_decay": 0.1, "max_grad_norm": 1.0},
]
LARSES: list[dict[str, Any]] = [
    {"lr": 0.5, "weight_decay": 0.1},
    {"lr": 0.5, "weight_decay": 0.01, "nesterov": True, "trust_coefficient": 0.02, "eps": 1e-3},
    {"clip": True, "lr": torch.tensor(1e-3), "trust_coefficient": 0.02, "momentum": 0.0},
    {"lr": 0.5, "momentum": 0.8, "dampening": 0.3, "maximize": True},
]
ADAFACTORS: list[dict[str, Any]] = [
    {},
    {"warmup_init": True, "beta1": 0.9},
    {"lr": 1e-3, "relative_step": False, "scale_parameter": False, "weight_decay": 0.1},
    {"lr": 1e-3, "relative_step": False, "clip_threshold": 0.5, "decay_rate": -0.5},
]
CAUTIOUS: list[dict[str, Any]] = [
    {"cautious": True},
    {"cautious_decay": True},
    {"cautious": True, "cautious_decay": True},
]
# A cautious step moves by 1e-2 over the least share of a tensor's elements, some half, with twenty
# roundings; an element whose sign turns on a rounding differs by a step or by a decay.
CAUTIOUS_BOUND = 20 * (1e-2 * 4 * 20 * U + 2 * 5 * U)
ADEMAMIX = {"betas": (0.9, 0.999, 0.999), "alpha": 5.0, "weight_decay": 0.1, "lr": 1e-2}
# A step moves by up to lr * (1 + alpha), with twenty roundings of it, and rounds a parameter of up
# to 5 twice. The schedule of beta3 differs by the 1e-8 in its logarithm: 1e-6 of a step.
ADEMAMIX_BOUND = 50 * (1e-2 * 6 * 20 * U + 2 * 5 * U + 1e-2 * 6 * 1e-6)
CASES = [
    # Three roundings a step, of a parameter that was up to ten steps further from zero.
    Case(
        *(optim.Lion, _lion, 10, lambda e: 10 * 3 * U * (e.abs() + 10 * 1e-3)),
        {"lr": 1e-3, "weight_decay": 0.1},
    ),
    *(Case(optim.LAMB, lamb, 8, _moved(8.0), {"lr": 1e-2} | s) for s in LAMBS),
    *(Case(optim.LARS, _lars, 8, _moved(8 * float(s["lr"])), s) for s in LARSES),
    *(
        Case(
            *(optim.TransformersAdafactor, _adafactor, 10),
            *(lambda e: 20 * U * (e.abs() + 10 * 1e-2), s, MATRICES),
        )
        for s in ADAFACTORS
    ),
    *(
        Case(optim.AdEMAMix, _ademamix, 50, lambda _: ADEMAMIX_BOUND, ADEMAMIX | warmup, FEW[:3])
        for warmup in ({}, {"alpha_warmup": 30, "beta3_warmup": 30})
    ),
    *(
        Case(
            *(kind, algorithm, 20, lambda _: CAUTIOUS_BOUND),
            *({"lr": 1e-2, "weight_decay": 0.1} | flags, FEW, 2),
        )
        for kind, algorithm in ((optim.AdamW, _adamw), (optim.Lion, _lion))
        for flags in CAUTIOUS
    ),
]


@functools.cache
def _exact(at: int, without: str | None = None) -> Any:
    """The numbers of a case, or without one of its options; for all backends."""
    case = CASES[at]
    settings = case.settings if without is None else case.settings | {without: False}
    return _in_float64(case.algorithm, case.steps, case.shapes, settings)


@pytest.mark.parametrize("at", range(len(CASES)), ids=lambda at: str(CASES[at]))
def test_a_papers_numbers(at: int, backend: str) -> None:
    case = CASES[at]
    found, optimizer = run(lambda p: case.make(p, **case.settings), case.steps, shapes=case.shapes)
    exact, kept = _exact(at)
    pairs = list(zip(found, exact, strict=True))
    assert sum(((p - e).abs() > case.bound(e)).sum() for p, e in pairs) <= case.few
    if case.algorithm is _lion:
        for p, of_p in zip(found, kept, strict=True):
            m = optimizer.state[p]["exp_avg"].double()
            torch.testing.assert_close(m, of_p["m"], rtol=1e-5, atol=1e-8)
    # Each option has an effect that the bound shows.
    for name in case.settings.keys() & {"cautious", "cautious_decay", "alpha_warmup"}:
        other, _ = _exact(at, name)
        pairs = list(zip(found, other, strict=True))
        assert max(((p - e).abs() / case.bound(e)).max() for p, e in pairs) > 10


@pytest.mark.parametrize(("warmup", "r"), [(0, 0.0), (20, 1.0)])
def test_schedule_free_numbers(warmup: int, r: float, backend: str) -> None:
    """The parameter is y in train mode and x in eval mode, and the state has z."""
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "warmup_steps": warmup, "r": r}
    params, optimizer = run(lambda p: ScheduleFreeAdamW(p, **settings), 50, shapes=FEW[:3])
    y, kept = _in_float64(_schedule_free, 50, FEW[:3], settings)
    bound = 50 * (1e-2 * 20 * U + 6 * 5 * U)

    def off(found: Params, exact: Params) -> float:
        return max((p - e).abs().max().item() for p, e in zip(found, exact, strict=True))

    assert off(params, y) <= bound
    assert off([optimizer.state[p]["z"] for p in params], [of_p["z"] for of_p in kept]) <= bound
    optimizer.eval()
    assert off(params, [of_p["x"] for of_p in kept]) <= 2 * bound
    assert off(params, y) > 10 * bound
    assert optimizer.param_groups[0]["k"] == 50


def test_lion_takes_no_step_towards_zero() -> None:
    """Where neither the momentum nor the gradient has a direction."""
    still = torch.ones(3, requires_grad=True)
    still.grad = torch.tensor([0.0, 1.0, -1.0])
    optim.Lion([still], 0.5).step()
    assert still.tolist() == [1.0, 0.5, 1.5]


@pytest.mark.parametrize("make", [optim.LAMB, optim.LARS])
def test_zeros_have_no_scale(make: Any, backend: str) -> None:
    """A parameter of zeros moves as if it had one; without a gradient it stays."""
    zero, still = (torch.full((3,), value, requires_grad=True) for value in (0.0, 2.0))
    zero.grad, still.grad = torch.tensor([1.0, -1.0, 0.0]), torch.zeros(3)
    make([zero, still], 0.5).step()
    assert zero.tolist() == pytest.approx([-0.5, 0.5, 0.0], rel=1e-5)
    assert still.tolist() == [2.0] * 3


# --- Schedule-free --------------------------------------------------------------------------------


THREE = ((7,), (33, 70), (16, 256))


@pytest.mark.parametrize("masters", [False, True, "remainder", "remainder8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_modes_return_bit_for_bit(dtype: torch.dtype, masters: Any) -> None:
    def make(p: Params) -> optim.ScheduleFreeAdamW:
        return ScheduleFreeAdamW(p, lr=1e-2, master_weights=masters)

    (params, optimizer), (others, twin) = (run(make, 5, dtype, THREE) for _ in range(2))
    assert isinstance(optimizer, optim.ScheduleFreeAdamW)
    before = snapshot(params, optimizer)
    optimizer.eval()
    optimizer.eval()
    state = optimizer.state[params[1]]
    y = before[1].double() if not masters or dtype == torch.float32 else None
    if y is not None:  # x lies beyond y, seen from z
        x = y + (y - state["z"].double()) / 9
        unit = U if dtype == torch.float32 else 2.0**-8
        assert ((params[1].double() - x).abs() <= 4 * unit * x.abs() + 4 * U).all()
    assert not torch.equal(params[1], before[1])
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.train()
    assert same(snapshot(params, optimizer), before)
    optimizer.eval()
    with pytest.raises(torchweld.ArgumentError, match=r"train\(\)"):
        optimizer.step()
    optimizer.train()
    for some, one in ((params, optimizer), (others, twin)):
        draw_grads(some, 7)
        one.step()
    assert same(snapshot(params, optimizer), snapshot(others, twin))
    # A checkpoint of eval mode: the points of gradients return within their roundings.
    optimizer.eval()
    again = optim.ScheduleFreeAdamW([p.detach().clone() for p in params], master_weights=masters)
    again.load_state_dict(saved)
    assert not again.param_groups[0]["train_mode"]
    assert again.param_groups[0]["k"] == 5


def test_a_write_in_eval_mode_is_kept() -> None:
    params, optimizer = run(ScheduleFreeAdamW, 3, shapes=THREE)
    assert isinstance(optimizer, optim.ScheduleFreeAdamW)
    optimizer.eval()
    with torch.no_grad():
        params[0].fill_(2.0)
    z = optimizer.state[params[0]]["z"]
    optimizer.train()
    torch.testing.assert_close(params[0].detach(), 2 + (z - 2) * (1 - 0.9))


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_group_that_is_added_later_is_in_the_mode_of_the_others(mode: str) -> None:
    """Each group's trajectory equals a separate optimizer's."""
    first, second = torch.linspace(-1, 1, 12), torch.linspace(2, 3, 8)
    together = [first.clone().requires_grad_(), second.clone().requires_grad_()]
    apart = [first.clone().requires_grad_(), second.clone().requires_grad_()]
    optimizer = optim.ScheduleFreeAdamW(together[:1], lr=0.1)
    alone = [optim.ScheduleFreeAdamW([p], lr=0.1) for p in apart]
    for each in (optimizer, *alone):
        each.train()
    for step in range(4):
        if step == 2:
            getattr(optimizer, mode)()
            optimizer.add_param_group({"params": together[1:]})
            if mode == "eval":
                optimizer.train()
        for i, (p, own) in enumerate(zip(together, apart, strict=True)):
            p.grad = own.grad = torch.full_like(p, 0.3 - step)
            if i == 0 or step >= 2:
                alone[i].step()
        optimizer.step()
    for each in (optimizer, *alone):
        each.eval()
    assert same(together, apart)  # type: ignore[arg-type]


def test_the_iterate_completes_sixteen_bits() -> None:
    """z is float32 for bfloat16 parameters, with codes for the second moment."""
    params, optimizer = run(
        lambda p: ScheduleFreeAdamW(
            p, state_dtype="8bit", master_weights="remainder8", min_quantized_size=0
        ),
        3,
        torch.bfloat16,
        THREE,
    )
    state = optimizer.state[params[1]]
    assert state["z"].dtype == torch.float32
    assert state["exp_avg_sq_codes"].dtype == torch.uint8
    assert state["remainder8"].dtype == torch.int8
    assert (read_param(params[1].detach(), state["remainder8"]) != params[1]).any()


# --- Averages -------------------------------------------------------------------------------------


MAKERS: dict[str, Any] = {
    "AdamW": optim.AdamW,
    "SGD": lambda p, **s: optim.SGD(p, momentum=0.9, **s),
    "Lion": optim.Lion,
    "LAMB": optim.LAMB,
    "LARS": lambda p, **s: optim.LARS(p, trust_coefficient=1.0, **s),
    "AdEMAMix": optim.AdEMAMix,
    "Muon": lambda p, **s: optim.Muon([{"params": p[1:]}, {"params": p[:1], "rule": "lion"}], **s),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_average_of_torchs_model(name: str, dtype: torch.dtype, backend: str) -> None:
    """AveragedModel's, which copies first and is updated after each step; training is unchanged."""
    make = MAKERS[name]
    params = draw(dtype, THREE)
    model = torch.nn.ParameterList([p.detach().float() for p in params])
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(model)
    optimizer = make(params, lr=1e-2, ema_decay=0.9)
    for seed in range(5):
        draw_grads(params, seed)
        optimizer.step()
        with torch.no_grad():
            for copied, p in zip(model, params, strict=True):
                copied.copy_(p)
        averaged.update_parameters(model)
    for p, expected in zip(params, averaged.module.parameters(), strict=True):
        assert optimizer.state[p]["ema"].dtype == torch.float32
        # torch's lerp rounds a product and a sum together.
        torch.testing.assert_close(
            optimizer.state[p]["ema"], expected.detach(), rtol=0, atol=5 * 2 * U * 5
        )
        assert not torch.equal(optimizer.state[p]["ema"], p.float())
    plain, _ = run(lambda p: make(p, lr=1e-2), 5, dtype, THREE)
    assert same([p.detach() for p in plain], [p.detach() for p in params])


@pytest.mark.parametrize("masters", [True, "remainder", "remainder8"])
def test_masters_are_averaged(masters: Any, backend: str) -> None:
    params, optimizer = run(
        lambda p: optim.AdamW(p, lr=1e-4, master_weights=masters, ema_decay=0.5),
        1,
        torch.bfloat16,
        THREE,
    )
    for p, start in zip(params, draw(torch.bfloat16, THREE), strict=True):
        state = optimizer.state[p]
        full = read_param(p.detach(), state["master" if masters is True else masters])
        expected = (start.float() + full) / 2
        torch.testing.assert_close(state["ema"], expected.detach(), rtol=2 * U, atol=0)
        assert (full != start).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_averages_are_shown_and_parameters_return(dtype: torch.dtype) -> None:
    params, optimizer = run(lambda p: optim.AdamW(p, ema_decay=0.9), 3, dtype, THREE)
    assert isinstance(optimizer, optim.AdamW)
    before = snapshot(params, optimizer)
    with optimizer.ema_weights():
        for p in params:
            assert torch.equal(p, optimizer.state[p]["ema"].to(dtype))
        with pytest.raises(torchweld.ArgumentError, match="ema_weights"):
            optimizer.step()
        with pytest.raises(torchweld.ArgumentError, match="twice"), optimizer.ema_weights():
            pass
    assert same(before, snapshot(params, optimizer))
    optimizer.step()
    with pytest.raises(ZeroDivisionError), optimizer.ema_weights():
        _ = 1 // 0
    optimizer.step()
    with (
        pytest.raises(torchweld.ArgumentError, match="ema_decay"),
        optim.AdamW(draw()).ema_weights(),
    ):
        pass


def test_averages_of_muon_begin_with_loaded_weights() -> None:
    """Its states are made with the optimizer, before a model may be loaded."""
    params = draw(shapes=THREE[1:])
    optimizer = optim.Muon(params, ema_decay=0.5)
    with torch.no_grad():
        for p in params:
            p.fill_(3.0)
    optimizer.refresh_masters()
    for _ in range(2):
        assert all((optimizer.state[p]["ema"] == 3).all() for p in params)
        optimizer.refresh_masters()
    draw_grads(params, 0)
    optimizer.step()
    averages = [optimizer.state[p]["ema"].clone() for p in params]
    optimizer.refresh_masters()
    assert same(averages, [optimizer.state[p]["ema"] for p in params])


# --- Cautious steps and cautious weight decay -----------------------------------------------------


def test_signs_of_tiny_numbers() -> None:
    """Products of the authors' code underflow; here every element moves."""
    p = torch.zeros(4, 4).requires_grad_()
    p.grad = torch.full((4, 4), 1e-30)
    optim.AdamW([p], lr=1.0, cautious=True, eps=1e-38).step()
    assert (p < 0).all()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, "8bit"], ids=str)
def test_muon_moves_where_the_gradient_agrees(state_dtype: Any) -> None:
    """Compared with a step without the mask: zeros, and the rest divided by its share."""
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0, "ns_dtype": torch.float32}
    settings |= {"state_dtype": state_dtype, "min_quantized_size": 0}
    shapes = FEW[1:]
    for steps in (0, 2):
        moved = []
        for masks in (False, True):
            params, optimizer = run(lambda p: optim.Muon(p, **settings), steps, shapes=shapes)
            before = [p.detach().clone() for p in params]
            optimizer.param_groups[0]["cautious"] = masks
            draw_grads(params, 5)
            optimizer.step()
            moved.append([q - p.detach() for p, q in zip(params, before, strict=True)])
        grads = [p.grad for p in params if p.grad is not None]
        for plain, masked, g in zip(*moved, grads, strict=True):
            mask = plain * g > 0
            expected = plain * mask / mask.double().mean()
            torch.testing.assert_close(masked, expected.float(), rtol=1e-4, atol=4 * 2.0**-22)
            assert 0.5 < mask.float().mean() < 1


def test_muon_spares_what_its_step_moves_away_from_zero() -> None:
    shapes, results = FEW[1:], []
    for settings in ({}, {"cautious_decay": True}, {"weight_decay": 0.0}):
        make: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.5, "ns_dtype": torch.float32}
        params, _ = run(lambda p, s=make | settings: optim.Muon(p, **s), 1, shapes=shapes)
        results.append([p.detach() for p in params])
    for start, decayed, spared, plain in zip(draw(shapes=shapes), *results, strict=True):
        u = start.detach() - plain
        assert torch.equal(spared, torch.where(u * start < 0, plain, decayed))


def test_groups_have_their_own(backend: str) -> None:
    """Groups that differ share no batch, and the keys of a plain group are torch's."""
    shapes = [(16, 32)] * 4
    params, apart = draw(shapes=shapes), draw(shapes=shapes)
    flags: list[dict[str, Any]] = [{}, {"cautious": True}, {"cautious_decay": True}, {}]
    both = zip(params, flags, strict=True)
    together = optim.AdamW([{"params": [p], **flag} for p, flag in both], weight_decay=0.1)
    single = [
        optim.AdamW([p], weight_decay=0.1, **flag) for p, flag in zip(apart, flags, strict=True)
    ]
    for seed in range(4):
        for some in (params, apart):
            draw_grads(some, seed)
        for optimizer in (together, *single):
            optimizer.step()
    assert same([p.detach() for p in params], [p.detach() for p in apart])
    assert "cautious" not in together.param_groups[0]
    assert together.param_groups[1]["cautious"] is True
    again = optim.AdamW(draw(shapes=shapes), cautious=True)
    again.load_state_dict(torch.optim.AdamW(draw(shapes=shapes)).state_dict())
    assert again.param_groups[0]["cautious"] is True


def test_nothing_agrees() -> None:
    """The share counts as at least 1/1000: no division by zero."""
    p = torch.ones(100, 20).requires_grad_()
    optimizer = optim.Lion([p], lr=1.0, cautious=True)
    p.grad = torch.ones_like(p)
    optimizer.step()
    p.grad = torch.full_like(p, -0.05)  # the momentum of 0.01 outweighs a tenth of it
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(p, before)
    p.grad[0, 0] = 1.0
    optimizer.step()
    assert math.isclose((before - p.detach())[0, 0].item(), 1000.0)
