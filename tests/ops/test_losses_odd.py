"""Losses where other implementations were wrong without an error, and float16."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch.nn import functional as F  # noqa: N812

import torchweld
from torchweld import functional
from torchweld.errors import ArgumentError

BACKENDS = pytest.mark.parametrize("backend", ["cpu", "eager"])
LINEAR, LOGPROBS = functional.linear_cross_entropy, functional.linear_logprobs
# Roundings of float32 in sums of 4097 terms, which kernels add in blocks, and of logits up to 20.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def _make(rows: int, classes: int, features: int = 8) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(classes)
    x = torch.randn(rows, features, generator=made)
    weight = torch.randn(classes, features, generator=made)
    return [x, weight, torch.randint(0, classes, (rows,), generator=made)]


@BACKENDS
@pytest.mark.parametrize("classes", [1, 2047, 2048, 2049, 4097])
def test_the_last_tile_counts_only_its_classes(backend: str, classes: int) -> None:
    """No log-probability is above 0, and the probabilities of all classes sum to 1."""
    x, weight, _ = _make(3, classes)
    every = torch.arange(classes).expand(3, -1)
    with torchweld.use_backend(backend):
        log_p = LOGPROBS(x, weight, every)
    assert isinstance(log_p, torch.Tensor)
    assert (log_p <= 0).all()
    torch.testing.assert_close(log_p.exp().sum(1), torch.ones(3), **CLOSE)


@BACKENDS
def test_entropy_is_of_the_tempered_distribution(backend: str) -> None:
    """With its gradient, which is not dropped."""
    x, weight, target = _make(5, 301)
    x.requires_grad_()
    with torchweld.use_backend(backend):
        _, entropy = LOGPROBS(x, weight, target, temperature=0.5, return_entropy=True)
        (grad,) = torch.autograd.grad(entropy.sum(), x)
    exact = torch.distributions.Categorical(logits=x.double() @ weight.double().T / 0.5).entropy()
    before = torch.distributions.Categorical(logits=x.double() @ weight.double().T).entropy()
    (true,) = torch.autograd.grad(exact.sum(), x)
    torch.testing.assert_close(entropy.double(), exact, **CLOSE)
    assert (entropy.double() - before).abs().min() > 0.1
    torch.testing.assert_close(grad, true, rtol=1e-4, atol=1e-5)
    assert grad.abs().max() > 0.1


@BACKENDS
@pytest.mark.parametrize("kind", ["ids", "probabilities"])
def test_a_gradient_for_each_row(backend: str, kind: str) -> None:
    """reduction="none" takes any gradient, also 0 and negative ones, not their mean."""
    x, weight, target = _make(6, 77)
    if kind == "probabilities":
        target = torch.rand(6, 77)
    given = [x.requires_grad_(), weight.requires_grad_()]
    upstream = torch.tensor([0.0, -2.0, 1.0, 3.0, 0.5, 0.0])
    with torchweld.use_backend(backend):
        loss = LINEAR(given[0], given[1], target, reduction="none", memory=3000)
        assert isinstance(loss, torch.Tensor)
        found = torch.autograd.grad(loss, given, upstream)
    plain = F.cross_entropy(F.linear(*given), target, reduction="none")
    for mine, theirs in zip(found, torch.autograd.grad(plain, given, upstream), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(found[0][0], torch.zeros(8))


@BACKENDS
def test_probabilities_need_not_sum_to_one(backend: str) -> None:
    """The gradient of a row is p * sum(w * q) - w * q."""
    x, weight, _ = _make(4, 50)
    q, classes = torch.rand(4, 50), torch.rand(50) + 0.1
    given = [x.requires_grad_(), weight.requires_grad_()]
    with torchweld.use_backend(backend):
        loss = LINEAR(given[0], given[1], q, weight=classes)
    plain = F.cross_entropy(F.linear(*given), q, classes)
    torch.testing.assert_close(loss, plain, **CLOSE)
    assert isinstance(loss, torch.Tensor)
    pairs = zip(torch.autograd.grad(loss, given), torch.autograd.grad(plain, given), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@BACKENDS
def test_float16_under_a_loss_scale(backend: str) -> None:
    """Gradients of 2**-26 vanish in float16. With a scale of 2**15 before them they are there."""
    x, weight, target = _make(1000, 300, 16)
    given = [t.half().requires_grad_() for t in (x, weight)]
    exact = [t.detach().double().requires_grad_() for t in given]
    with torchweld.use_backend(backend):
        loss = LINEAR(given[0], given[1], target)
        assert isinstance(loss, torch.Tensor)
        (loss * 2**-16 * 2.0**15).backward()
    (F.cross_entropy(F.linear(*exact), target) / 2).backward()
    for mine, true in zip(given, exact, strict=True):
        assert mine.grad is not None
        assert true.grad is not None
        assert mine.grad.dtype == torch.float16
        error = (mine.grad.double() - true.grad).square().mean().sqrt()
        # Two roundings of 2**-11, of the logits' gradient and of the product.
        assert error <= 2 * 2**-11 * true.grad.square().mean().sqrt() + 2**-24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_added_to_those_that_exist(dtype: torch.dtype) -> None:
    """The weight's gradient goes into its .grad, chunk by chunk, without a second gradient."""
    x, weight, target = _make(60, 301, 16)
    given = [t.to(dtype).requires_grad_() for t in (x, weight)]
    given[1].grad = torch.ones_like(given[1])
    kept = given[1].grad
    exact = [t.detach().double().requires_grad_() for t in given]
    loss = LINEAR(given[0], given[1], target, accumulate="grad", memory=40000, reduction="sum")
    assert isinstance(loss, torch.Tensor)
    (loss * 0.5).backward()
    (F.cross_entropy(F.linear(*exact), target, reduction="sum") * 0.5).backward()
    assert given[1].grad is kept
    assert exact[1].grad is not None
    # In float32 the 26 roundings that test_losses.py counts; in 16 bits two chunks round once each.
    unit = 26 * 2.0**-23 if dtype == torch.float32 else 2.0**-7
    true = exact[1].grad + 1
    assert (kept.double() - true).abs().max() <= unit * true.abs().max()
    assert given[0].grad is not None
    given[1].grad = None  # the first step makes it
    LINEAR(given[0], given[1], target, accumulate="grad").backward()
    assert given[1].grad is not None
    with pytest.raises(ArgumentError, match=r"accumulate is 'grad'; accepted: .* a leaf"):
        LINEAR(x.to(dtype), given[1] * 1, target, accumulate="grad")


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(data=strategies.data())
def test_any_loss_in_any_chunks(data: strategies.DataObject) -> None:
    """Ignored rows, smoothing, soft cap, class weights and -inf: plain torch's in one chunk."""
    count = data.draw(strategies.integers(1, 30))
    classes = data.draw(strategies.sampled_from([1, 2, 33, 2049]))
    made = torch.Generator().manual_seed(data.draw(strategies.integers(0, 99)))
    x = torch.randn(count, 5, generator=made, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(classes, 5, generator=made, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, classes, (count,), generator=made)
    share = data.draw(strategies.floats(0, 0.9))
    target[torch.rand(count, generator=made) < share] = -100
    kw: dict[str, Any] = {
        "label_smoothing": data.draw(strategies.sampled_from([0.0, 0.1, 1.0])),
        "softcap": data.draw(strategies.sampled_from([None, 2.0])),
        "z_loss": data.draw(strategies.sampled_from([0.0, 0.1])),
        "reduction": data.draw(strategies.sampled_from(["mean", "sum", "none"])),
    }
    if data.draw(strategies.booleans()):
        kw["weight"] = torch.rand(classes, generator=made, dtype=torch.float64) + 0.1
    if kw["label_smoothing"] == 0 and classes > 2:  # a logit of -inf, which is not the target
        bias = torch.zeros(classes, dtype=torch.float64)
        bias[0] = -torch.inf
        kw["linear_bias"] = bias
        target = torch.where(target == 0, 1, target)
    results = []
    least = (classes + 3 * 5) * 8
    each = data.draw(strategies.integers(1, 12))
    for backend, memory in (("cpu", least * each), ("eager", 2**26)):
        with torchweld.use_backend(backend):
            loss = LINEAR(x, weight, target, memory=memory, **kw)
            assert isinstance(loss, torch.Tensor)
            grads = torch.autograd.grad(
                (loss * torch.arange(1, loss.numel() + 1)).sum(), (x, weight)
            )
        results.append([loss, *grads])
    for got, true in zip(*results, strict=True):
        torch.testing.assert_close(got, true, rtol=1e-9, atol=1e-11, equal_nan=True)
