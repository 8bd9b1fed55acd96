"""Losses in two launches: the kernels against the general path, and what a warm call does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile
from torch.nn import functional as F  # noqa: N812

import torchweld
from conftest import PLACES, running_at
from torchweld import functional, numerics
from torchweld.dispatch import choice
from torchweld.ops.loss import arguments, chunks
from torchweld.ops.loss.ways import fused

pytest.importorskip("triton")
launch = pytest.importorskip("torchweld.triton_kernels.launch")

pytestmark = pytest.mark.skipif(PLACES["interpreter"][2] is not None, reason="a GPU is here")
ROWS, CLASSES, FEATURES = 9, 37, 24


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton serves, and nothing waits for targets."""
    monkeypatch.setattr(arguments, "is_checked", lambda _: False)
    with running_at("interpreter", monkeypatch):
        yield


def _draw(rows: int = ROWS, classes: int = CLASSES) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    target = torch.randint(0, classes, (rows,), generator=made)
    target[1], target[2], target[3] = -100, classes, -3  # ignored, and no classes
    return {
        "logits": draw(rows, classes) * 3,
        "target": target,
        "weight": draw(classes).abs() + 0.1,
        "temperature": draw(rows).abs() + 0.5,
        "tokens": draw(rows).abs(),
        "x": draw(rows, FEATURES),
        "grad": draw(rows),
    }


# Temperature and token weights; soft cap, smoothing and z-loss; reduction.
TERMS = [(False, (0.0, 0.0, 0.0)), (True, (4.0, 0.1, 1e-2)), (True, (0.0, 1.0, 0.0))]


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("classes", [1, CLASSES, 2100])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_kernels_are_the_general_path(
    reduction: str, terms: tuple[bool, Any], classes: int, kind: torch.dtype
) -> None:
    """Also for rows that are padded, and rows of the input that must not be multiplied by 0."""
    given, (is_full, (cap, smoothing, z)) = _draw(classes=classes), terms
    logits = torch.full((ROWS, classes + 3), torch.nan)[:, :classes].copy_(given["logits"])
    weight, temperature, tokens = (
        given[name] if is_full else None for name in ("weight", "temperature", "tokens")
    )
    whole = None if weight is None else weight.sum()
    how = (weight, whole, temperature, tokens, 0.7, cap, smoothing, z, -100)
    target = given["target"].to(kind)
    close = {**numerics.SUMMED, "equal_nan": True}
    forward, backward = fused.FORWARD, fused.BACKWARD
    assert forward.reference is not None
    assert backward.reference is not None
    inputs: tuple[Any, ...] = (logits, target, *how, reduction, torch.float32)
    found, wanted = forward.overload("triton")(*inputs), forward.reference(*inputs)
    torch.testing.assert_close(found, wanted, **close)
    each = found[0].isnan() if reduction == "none" else found[0].isnan()[None]
    assert each.any()
    assert reduction != "none" or each.tolist() == [at in (2, 3) for at in range(ROWS)]
    given["x"][1] = torch.inf
    grad = given["grad"] if reduction == "none" else given["grad"][0]
    for x in (given["x"], None):
        inputs = (grad, logits, target, found[2], found[1], *how, x)
        made, expected = backward.overload("triton")(*inputs), backward.reference(*inputs)
        torch.testing.assert_close(made, expected, **close)
        assert made[0].stride() == logits.stride()
        assert not made[0][1].any()
        assert x is None or not made[1][1].any()


LOSSES: dict[str, Callable[..., Any]] = {
    "logits": lambda x, weight, target: functional.cross_entropy(x @ weight.t(), target),
    "linear": lambda *given: functional.linear_cross_entropy(*given),
    "logprobs": lambda *given: -functional.linear_logprobs(*given).sum() / (ROWS - 1),
}


def _draw_layer() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    given = _draw()
    target = given["target"].clamp(max=CLASSES - 1)
    target[3] = 3
    weight = torch.randn(CLASSES, FEATURES, requires_grad=True)
    return given["x"].requires_grad_(), weight, target


@pytest.mark.parametrize("name", LOSSES)
def test_second_derivatives_and_gradients_in_batches(name: str) -> None:
    x, weight, target = _draw_layer()
    found: list[torch.Tensor] = []
    wanted: list[torch.Tensor] = []
    plain = F.cross_entropy(F.linear(x, weight), target)
    for loss, into in ((LOSSES[name](x, weight, target), found), (plain, wanted)):
        first = torch.autograd.grad(loss, [x, weight], create_graph=True)
        into += [*first, *torch.autograd.grad(first[0].square().sum(), [x, weight])]
    loss = LOSSES[name](x, weight, target)
    scales = torch.tensor([1.0, -2.0])
    found += torch.autograd.grad(loss, [x, weight], scales, is_grads_batched=True)
    wanted += [torch.stack([one, -2 * one]) for one in wanted[:2]]
    torch.testing.assert_close(found, wanted, **numerics.CHAINED_SMALL)


def test_padded_logits_of_an_odd_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where logits are too many for one GEMM of unaligned rows."""
    x, weight, target = _draw_layer()
    bias = torch.randn(CLASSES, requires_grad=True)
    leaves = [x, weight, bias]
    monkeypatch.setattr(fused, "_UNPADDED", 0)
    monkeypatch.setattr(chunks, "_pads_rows", lambda _: True)
    loss = functional.linear_cross_entropy(x, weight, target, linear_bias=bias)
    wanted = F.cross_entropy(F.linear(*leaves), target)
    torch.testing.assert_close(loss, wanted, **numerics.SUMMED)
    exact = torch.autograd.grad(wanted, leaves)
    scales = torch.tensor([1.0, -2.0])
    again = torch.autograd.grad(loss, leaves, scales, is_grads_batched=True, retain_graph=True)
    found = torch.autograd.grad(loss, leaves)
    for one, batch, other in zip(found, again, exact, strict=True):
        torch.testing.assert_close(one, other, **numerics.CHAINED_SMALL)
        torch.testing.assert_close(batch, torch.stack([other, -2 * other]), **numerics.CHAINED)


WORDS = 53
T, TOKENS, CLASS_WEIGHT = torch.arange(ROWS), torch.rand(ROWS), torch.rand(WORDS)
# Launches of Triton and ops of torch that compute, forward and in both directions.
WARM: dict[str, tuple[Callable[..., Any], tuple[int, int], tuple[int, int]]] = {
    "plain": (lambda x, *_: functional.cross_entropy(x, T), (2, 3), (0, 0)),
    "none": (lambda x, *_: functional.cross_entropy(x, T, reduction="none"), (1, 2), (0, 0)),
    "all": (
        lambda x, *_: functional.cross_entropy(
            x, T, CLASS_WEIGHT, label_smoothing=0.1, z_loss=1e-3, softcap=9.0, token_weights=TOKENS
        ),
        (2, 3),
        (1, 1),  # the sum of the classes' weights
    ),
    "linear": (lambda _, x, w: functional.linear_cross_entropy(x, w, T), (2, 3), (1, 3)),
    "logprobs": (lambda _, x, w: functional.linear_logprobs(x, w, T), (1, 2), (2, 5)),
}
COMPUTES = {"mm", "sum", "neg", "mul", "div", "add", "where", "eq", "copy_", "clone"}


@pytest.mark.parametrize("name", WARM)
def test_a_warm_loss_launches_little(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(launch, "start", lambda launch, _: started.append(launch))
    call, launches, ops = WARM[name]
    x = torch.randn(ROWS, FEATURES, requires_grad=True)
    # No other test has so many classes, whose plan would start other launches.
    leaves = [torch.randn(ROWS, WORDS, requires_grad=True), x, torch.randn(WORDS, FEATURES)]
    leaves[2].requires_grad_()
    grad = torch.ones_like(call(*leaves))

    def run_both() -> None:
        torch.autograd.grad(call(*leaves), leaves, grad, allow_unused=True)

    for run, most, computed in zip((lambda: call(*leaves), run_both), launches, ops, strict=True):
        for _ in range(4):
            run()
        started.clear()
        with profile() as seen:
            run()
        assert len(started) == most
        names = Counter(e.name.removeprefix("aten::") for e in seen.function_events)
        kept = {op: n for op, n in names.items() if op in COMPUTES}
        assert sum(kept.values()) == computed, kept


def test_an_answer_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By calls of one class; not while it is not final."""
    asked: list[bool] = []
    finals = iter([False, True])
    x, *_ = _draw_layer()
    monkeypatch.setattr(choice, "is_on_gpu", lambda _: True)
    monkeypatch.setattr(
        fused.FORWARD, "_choose_on_gpu", lambda *_: ("triton", asked.append(True) or next(finals))
    )
    with torchweld.use_backend(None):
        (run,) = fused.FORWARD.find_for_all(x)
    how = (None, None, None, None, 1.0, 0.0, 0.0, 0.0, -100, "mean", torch.float32)
    logits = torch.randn(ROWS, CLASSES)
    losses = [run(logits, T, *how)[0] for _ in range(4)]
    assert len(asked) == 2
    for loss in losses:
        torch.testing.assert_close(loss, F.cross_entropy(logits, T), **numerics.SUMMED)
