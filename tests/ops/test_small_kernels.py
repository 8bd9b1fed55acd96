"""CPU kernels that take the place of many of torch's ops: a whole loss of logits, and a route."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchweld
from torchweld import functional, numerics
from torchweld.errors import ArgumentError
from torchweld.ops.experts import route
from torchweld.ops.loss.ways import fused

ROWS, CLASSES = 150, 37
CLOSE = numerics.SUMMED
TERMS = [(False, (0.0, 0.0, 0.0)), (True, (4.0, 0.1, 1e-2)), (True, (0.0, 1.0, 0.0))]


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0]))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_a_loss_is_that_of_the_general_path(
    reduction: str, terms: tuple[bool, Any], dtype: torch.dtype, kind: torch.dtype
) -> None:
    """Rows of logits may be apart, and ignored rows of the input are not multiplied."""
    is_full, (cap, smoothing, z) = terms
    logits = (_draw(ROWS, CLASSES + 3) * 3).to(dtype)[:, :CLASSES]
    target = (torch.arange(ROWS) * 7 % CLASSES).to(kind)
    target[1::5] = -100
    weight, temperature, tokens = (
        _draw(n).abs().to(dtype) + 0.2 if is_full else None for n in (CLASSES, ROWS, ROWS)
    )
    whole = None if weight is None else weight.sum()
    how = (weight, whole, temperature, tokens, 0.7, cap, smoothing, z, -100)
    forward, backward = fused.FORWARD, fused.BACKWARD
    assert forward.reference is not None
    assert backward.reference is not None
    found = forward.overload("cpu")(logits, target, *how, reduction, dtype)
    wanted = forward.reference(logits, target, *how, reduction, dtype)
    torch.testing.assert_close(found, wanted, **CLOSE)
    loss, count, statistics = found
    grad = torch.ones_like(loss) * 0.5
    x = torch.randn(ROWS, 5, dtype=dtype)
    x[1::5] = torch.nan
    given = (grad, logits, target, statistics, count, *how, x)
    made = backward.overload("cpu")(*given)
    torch.testing.assert_close(made, backward.reference(*given), **CLOSE)
    assert not made[1].isnan().any()
    assert x[1].isnan().all()


@pytest.mark.parametrize("shape", [(150, 37), (4, 2000), (70, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_around_thresholds_are_exact(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """torch's op below a threshold and ours above it both round once."""
    logits = (_draw(*shape) * 2).to(dtype).requires_grad_()
    target = torch.arange(shape[0]) % shape[1]
    exact = logits.detach().double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact, target)
    for scale in ({}, {"z_loss": 0.0, "label_smoothing": 0.0}):
        found = functional.cross_entropy(logits, target, **scale)
        (made,) = torch.autograd.grad(found, logits)
        (right,) = torch.autograd.grad(wanted, exact, retain_graph=True)
        unit = torch.finfo(dtype).eps
        assert abs(found.double() - wanted) <= (unit + 2e-6) * wanted
        assert (made.double() - right).abs().max() <= (unit + 1e-6) * right.abs().max()


def test_a_target_that_is_no_class_is_named() -> None:
    logits, target = torch.randn(64, 300), torch.arange(64)
    functional.cross_entropy(logits, target)
    for bad in (300, -1):
        target[5] = bad
        for _ in range(2):
            with pytest.raises(ArgumentError, match=rf"target\[5\] is {bad}"):
                functional.cross_entropy(logits, target)


ROUTES: list[dict[str, Any]] = [
    {},
    {"scores": "sigmoid", "renormalize": True, "scale": 2.5},
    {"groups": 4, "top_groups": 2, "scores": "sigmoid"},
    {"groups": 2, "top_groups": 1, "best_of_group": 1, "renormalize": True},
]


@pytest.mark.parametrize("how", ROUTES, ids=str)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("experts", [8, 36, 260])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_route_is_eager_torchs(
    how: dict[str, Any], beside: bool, experts: int, dtype: torch.dtype
) -> None:
    logits = (_draw(3, 50, experts) * 2).to(dtype).requires_grad_()
    more = how | (
        {"choice_bias": _draw(experts).to(dtype) / 8, "token_mask": _draw(3, 50) > -1}
        if beside
        else {}
    )
    made = []
    for backend in ("cpu", "eager"):
        with torchweld.use_backend(backend):
            found = functional.route(logits, 3, **more)
            grads = [
                torch.linspace(1, 2, 450, dtype=dtype).view(3, 50, 3),
                *(torch.tensor([0.3, 0.7], dtype=dtype)),
            ]
            made.append((*found, *torch.autograd.grad(found[1:], logits, grads)))
    torch.testing.assert_close(*made, **numerics.SUMMED_SMALL)


def test_a_route_with_nan_and_equal_logits() -> None:
    """Of equal scores the first is chosen; NaN counts as the largest, and is an expert."""
    logits = torch.zeros(3, 6)
    logits[1, 4] = torch.nan
    logits[2] = -torch.inf
    logits[2, 5] = 0
    indices = functional.route(logits, 2).indices
    assert indices[0].tolist() == [0, 1]
    assert indices.min() >= 0
    assert indices.max() < 6
    assert indices[2].tolist() == [5, 0]


def test_a_route_has_the_same_bits_with_any_number_of_threads() -> None:
    logits = _draw(5000, 64)
    threads = torch.get_num_threads()
    made = []
    for count in (1, 2):
        torch.set_num_threads(count)
        made.append(functional.route(logits, 4))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    assert route._find_backend(logits, 4, 1) == "cpu"
