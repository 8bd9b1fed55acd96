"""Runs optimizers, for their tests."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_type_hints

import torch

import selection
import torchweld
from torchweld import optim
from torchweld.bench.measure.steps import find_class
from torchweld.ops.optimizer.reference import read_param
from torchweld.ops.optimizer.rule import RULES as EVERY_RULE

U = 2.0**-24
SHAPES = ((7,), (33, 700), (64, 256), (1,), (), (0, 5), (40, 30, 5))
# Batches of matrices, a row, a column, an empty tensor, and a vector longer than kVectorRow.
MATRICES = (*SHAPES, (9000,), (6, 5, 3, 3), (1, 300), (300, 1), (3, 0, 4))
Optimizer = torch.optim.Optimizer


def draw(
    dtype: torch.dtype = torch.float32, shapes: Any = SHAPES, device: str = "cpu"
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(s, generator=generator) for s in shapes)
    return [t.to(device, dtype).requires_grad_() for t in drawn]


def draw_grads(params: list[torch.Tensor], seed: int, scale: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.device, p.dtype)


def draw_steps(steps: int, shapes: Any = SHAPES) -> Iterator[list[torch.Tensor]]:
    """The gradients of each step of `run`."""
    params = draw(shapes=shapes)
    for seed in range(steps):
        draw_grads(params, seed)
        yield [p.grad for p in params if p.grad is not None]


def draw_grads_by_row(params: list[torch.Tensor], seed: int) -> None:
    """Rows of different scales: zeros, subnormal, large, and with a non-finite element."""
    draw_grads(params, seed)
    for p in params:
        assert p.grad is not None
        magnitudes = torch.tensor([1.0, 0.0, 1e-42, 1e-20, 1e15, 1e-3], device=p.device)
        p.grad *= magnitudes[torch.arange(len(p)) % 6].view(-1, 1)
        p.grad[7::31, 0] = torch.nan
        p.grad[11::31, -1] = torch.inf


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(
    make: Callable[[list[torch.Tensor]], Any],
    steps: int = 6,
    dtype: torch.dtype = torch.float32,
    shapes: Any = SHAPES,
    device: str = "cpu",
    *,
    grads: Callable[[list[torch.Tensor], int], None] = draw_grads,
    backend: str | None = None,
    count: int | None = None,
) -> tuple[list[torch.Tensor], Any]:
    """Parameters after some steps, and their optimizer. `count` is the number of threads."""
    params = draw(dtype, shapes, device)
    optimizer = make(params)
    with contextlib.ExitStack() as stack:
        if backend is not None:
            stack.enter_context(torchweld.use_backend(backend))
        if count is not None:
            stack.enter_context(threads(count))
        for seed in range(steps):
            grads(params, seed)
            optimizer.step()
    return params, optimizer


def run_bits(*arguments: Any, **named: Any) -> list[torch.Tensor]:
    """The parameters and states after `run` with these arguments."""
    return snapshot(*run(*arguments, **named))


class Room:
    """Copies of tensors at this offset in larger memory, which is full of sevens."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.buffers: list[torch.Tensor] = []
        self._counts: list[int] = []

    def place(self, t: torch.Tensor) -> torch.Tensor:
        buffer = torch.full((t.numel() + self.offset + 5,), 7, dtype=t.dtype, device=t.device)
        self.buffers.append(buffer)
        self._counts.append(t.numel())
        return buffer[self.offset : self.offset + t.numel()].view(t.shape).copy_(t.detach())

    def assert_untouched(self) -> None:
        for buffer, count in zip(self.buffers, self._counts, strict=True):
            assert (buffer[: self.offset] == 7).all()
            assert (buffer[self.offset + count :] == 7).all()


# --- The papers' algorithms ---

# The parameter after a step, from the parameter, its gradient, the step's number, what the
# algorithm keeps, and settings.
Algorithm = Callable[[Any, Any, int, dict[str, Any], dict[str, Any]], torch.Tensor]


def in_float64(
    algorithm: Algorithm,
    start: list[torch.Tensor],
    of_steps: Iterable[list[torch.Tensor]],
    settings: dict[str, Any],
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """The parameters after all steps, and what the algorithm keeps of each."""
    exact = [p.detach().double() for p in start]
    kept: list[dict[str, Any]] = [{} for _ in exact]
    for t, of_step in enumerate(of_steps, start=1):
        grads = [g.detach().double() for g in of_step]
        if limit := settings.get("max_grad_norm"):
            norm = torch.cat([g.flatten() for g in grads]).norm()
            grads = [g * min(1.0, limit / (norm + 1e-6)) for g in grads]
        if settings.get("maximize"):
            grads = [-g for g in grads]
        for i, g in enumerate(grads):
            exact[i] = algorithm(exact[i], g, t, kept[i], settings)
    return exact, kept


def lamb(p: Any, g: Any, t: int, kept: dict[str, Any], s: dict[str, Any]) -> torch.Tensor:
    """The paper's algorithm with Apex's and DeepSpeed's variants."""
    (beta1, beta2), decay = s.get("betas", (0.9, 0.999)), s.get("weight_decay", 0.0)
    rate = 1 - beta1 if s.get("grad_averaging", True) else 1
    m = kept["m"] = beta1 * kept.get("m", 0) + rate * g
    v = kept["v"] = beta2 * kept.get("v", 0) + (1 - beta2) * g * g
    if s.get("bias_correction", True):
        m, v = m / (1 - beta1**t), v / (1 - beta2**t)
    u = m / (v.sqrt() + s.get("eps", 1e-6)) + decay * p
    ratio = p.norm() / u.norm() if p.norm() > 0 and u.norm() > 0 else torch.tensor(1.0)
    if clip := s.get("trust_clip"):
        ratio = ratio.clamp(*clip)
    if decay == 0 and not s.get("always_adapt", True):
        ratio = torch.tensor(1.0)
    found: torch.Tensor = p - s["lr"] * ratio * u
    return found


def snapshot(params: list[torch.Tensor], optimizer: Optimizer) -> list[torch.Tensor]:
    """Clones of the parameters and their states."""
    state = [v for p in params for v in optimizer.state[p].values()]
    return [t.detach().clone() for t in [*params, *state]]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_same_but_for_ties(
    found: tuple[list[torch.Tensor], Optimizer], expected: Any, masters: Any
) -> None:
    """Compare short runs of Adafactor: the same bits, except where sums round at a tie."""
    for p, e in zip(found[0], expected[0], strict=True):
        a, b = found[1].state[p], expected[1].state[e]
        assert list(a) == list(b)
        for name in a.keys() & {"row_var", "col_var", "variance"}:
            torch.testing.assert_close(a[name], b[name], rtol=4 * U, atol=0)
        if masters and p.dtype != torch.float32:
            entry = "master" if masters is True or p.dtype == torch.float16 else str(masters)
            values = [read_param(t.detach(), s[entry]) for t, s in ((p, a), (e, b))]
            torch.testing.assert_close(*values, rtol=8 * U, atol=8 * U * 0.1)
        else:
            others = (p != e).float().sum()
            assert others <= max(1, 0.01 * p.numel()) or p.dtype == torch.float32
            u = {torch.float32: U, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[p.dtype]
            torch.testing.assert_close(p, e, rtol=8 * u, atol=8 * U * 0.1)


# How parameters are stored: `maker` takes stochastic rounding as a kind of masters.
CODECS = [
    (dtype, state_dtype, masters)
    for dtype, state_dtype, masters in itertools.product(
        [torch.float32, torch.bfloat16, torch.float16],
        [torch.float32, torch.bfloat16, "8bit"],
        [False, True, "remainder", "remainder8", "rounded"],
    )
    # With other dtypes both kinds of remainders are float32 masters, or none.
    if masters not in ("remainder8", "rounded") or dtype == torch.bfloat16
]


class ScheduleFreeAdamW(optim.ScheduleFreeAdamW):
    """In train mode from the start, as other optimizers are."""

    def __init__(self, params: Any, lr: float = 2.5e-3, **settings: Any) -> None:
        super().__init__(params, lr, **settings)
        self.train()


# Settings that cover each branch of each rule.
RULES: list[tuple[Any, dict[str, Any]]] = [
    (optim.AdamW, {}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    (optim.SGD, {"weight_decay": 0.1}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.1, "nesterov": False}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.Lion, {"weight_decay": 0.1}),
    (optim.LAMB, {"weight_decay": 0.1}),
    (optim.LARS, {"weight_decay": 0.1}),
    (optim.AdEMAMix, {"weight_decay": 0.1}),
    (ScheduleFreeAdamW, {"weight_decay": 0.1}),
    (optim.AdamW, {"cautious": True, "cautious_decay": True, "amsgrad": True}),
    (optim.Lion, {"weight_decay": 0.1, "cautious": True, "cautious_decay": True}),
    (optim.AdamW, {"ema_decay": 0.9}),
]


def rules_of(*codec: Any) -> list[tuple[Any, dict[str, Any]]]:
    """The rules to run with this dtype, state_dtype and masters: all of them in the whole matrix.

    A kernel is compiled for a rule, a dtype and a state_dtype. Each kernel runs with one kind of
    masters, each rule with all kinds, and each codec with a rule that has moments.
    """
    found = [RULES[at] for at, *of in _rules_and_codecs() if tuple(of) == codec]
    assert found
    return found


@functools.cache
def _rules_and_codecs() -> list[tuple[Any, ...]]:
    every = [(at, *codec) for at, codec in itertools.product(range(len(RULES)), CODECS)]
    return every if selection.WHOLE else selection.cover(every, _list_parts)


def _list_parts(combination: tuple[Any, ...]) -> set[Any]:
    rule, dtype, state_dtype, masters = combination
    kind, settings = RULES[rule]
    parts = {(rule, dtype, state_dtype), (rule, str(masters))}
    if masters == "rounded":
        parts.add((rule, state_dtype, masters))
    if kind is not optim.SGD or "momentum" in settings:
        parts.add((dtype, state_dtype, str(masters)))
    return parts


# One optimizer of each rule, with every setting having an effect.
BY_RULE: dict[str, Any] = {
    "adam": lambda p: optim.AdamW(p, weight_decay=0.1),
    "sgd": lambda p: optim.LARS(p, momentum=0.9, weight_decay=0.1),
    "lion": lambda p: optim.Lion(p, weight_decay=0.1),
    "muon": lambda p: optim.Muon(p, ns_dtype=torch.float32),
    "lamb": lambda p: optim.LAMB(p, eps=1e-3, weight_decay=0.1),
    "ademamix": lambda p: optim.AdEMAMix(
        p, betas=(0.9, 0.99, 0.95), alpha_warmup=5, beta3_warmup=5, weight_decay=0.1
    ),
    "schedule_free": lambda p: ScheduleFreeAdamW(p, weight_decay=0.1),
    "adafactor": lambda p: optim.TransformersAdafactor(
        p, 5.0, (1e-3, 2.0), 0.5, beta1=0.9, weight_decay=0.1, relative_step=False
    ),
}


for _rule in EVERY_RULE.values():
    if _rule.name not in BY_RULE:  # with a weight decay, and with each flag in turn
        _kind = find_class(_rule)
        _taken = inspect.signature(_kind).parameters
        _decay = {"weight_decay": 0.1} if "weight_decay" in _taken else {}
        _flags = [n for n, kind in get_type_hints(_rule.settings).items() if kind is bool]
        RULES += [(_kind, _decay), *((_kind, {**_decay, flag: True}) for flag in _flags)]
        BY_RULE[_rule.name] = functools.partial(_kind, **_decay)


# All rules with settings, and Adafactor's two.
KINDS: list[tuple[Any, dict[str, Any]]] = [
    *RULES,
    (optim.LARS, {"clip": True}),
    (optim.Adafactor, {}),
    (optim.TransformersAdafactor, {"relative_step": False, "lr": 1e-2}),
]


def maker(
    kind: Any, settings: dict[str, Any], state_dtype: Any = torch.float32, masters: Any = False
) -> Callable[[list[torch.Tensor]], Optimizer]:
    """Make optimizers that store every matrix this way, even small ones."""
    kept = {"stochastic_rounding": True} if masters == "rounded" else {"master_weights": masters}
    stored = {"state_dtype": state_dtype, "min_quantized_size": 0} | kept
    return lambda params: kind(params, **{"lr": 1e-2} | stored | settings)
