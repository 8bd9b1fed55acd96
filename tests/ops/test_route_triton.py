"""route's Triton kernels in the interpreter, or on a GPU: as eager torch chooses and computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchweld
from selection import TRITON_DEVICE as DEVICE
from selection import combine, of_triton
from torchweld import functional
from torchweld.ops.experts import route

pytest.importorskip("triton")

pytestmark = of_triton

DEEPSEEK = {"groups": 8, "top_groups": 3, "scale": 2.5}
RESULTS = ("indices", "weights", "balance_loss", "z_loss", "gradient")


def _run(logits: torch.Tensor, k: int, **how: Any) -> dict[str, torch.Tensor]:
    """Results, and the gradient of a sum of all with factors of different sizes."""
    leaf = logits.detach().requires_grad_()
    found = functional.route(leaf, k, **how)
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(found.weights.shape, generator=generator).to(logits.device)
    total = (found.weights * heads).sum() + 3 * found.balance_loss + found.z_loss / 2
    (grad,) = torch.autograd.grad(total, leaf)
    return dict(zip(RESULTS, (*found, grad), strict=True))


def _draw(experts: int, dtype: torch.dtype, *leading: int) -> torch.Tensor:
    """Multiples of 1/8: many are equal."""
    generator = torch.Generator().manual_seed(experts)
    drawn = torch.randint(-20, 20, (*leading, experts), generator=generator) / 8
    return drawn.to(DEVICE, dtype)


# Experts, how many of them a row chooses, and groups of experts.
CHOICES: list[tuple[int, int, dict[str, Any]]] = [
    (1, 1, {}),
    (60, 5, {}),
    (256, 8, {}),
    (64, 6, DEEPSEEK),
    (16, 3, {"groups": 4, "top_groups": 2, "best_of_group": 1}),
]
FLAGS = [False, True]


@pytest.mark.parametrize(
    ("choice", "scores", "renormalize", "masked", "dtype"),
    combine(CHOICES, ["softmax", "sigmoid"], FLAGS, FLAGS, [torch.float32, torch.float16]),
    ids=str,
)
def test_it_chooses_and_computes_as_eager(
    choice: tuple[int, int, dict[str, Any]],
    scores: str,
    renormalize: bool,
    masked: bool,
    dtype: torch.dtype,
) -> None:
    experts, k, how = choice
    logits = _draw(experts, dtype, 3, 43)
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(3, 43, generator=generator) < 0.7
    bias = torch.randint(-2, 3, (experts,), generator=generator) / 8
    how = how | {"scores": scores, "renormalize": renormalize}
    how |= {"token_mask": mask.to(DEVICE) if masked else None, "choice_bias": bias.to(DEVICE)}
    found = _run(logits, k, **how)
    with torchweld.use_backend("eager"):
        exact = _run(logits.double(), k, **how)
    assert torch.equal(found["indices"], exact["indices"])
    assert found["weights"].dtype == torch.float32
    assert found["gradient"].dtype == dtype
    for name in RESULTS[1:]:
        unit = torch.finfo(found[name].dtype).eps
        error = (found[name].double() - exact[name]).abs().max()
        assert error <= 16 * unit * exact[name].abs().max() + 2.0**-20, name


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("experts", "k", "how"), [(60, 5, {}), (5, 5, {}), (64, 6, DEEPSEEK)])
def test_nan_is_chosen_first(experts: int, k: int, how: dict[str, Any], scores: str) -> None:
    """Every index is an expert's where logits are NaN or infinite, each one once, as in eager.

    A comparison with NaN takes its right operand on a GPU, so a column past the last expert was
    chosen, and the caller's gather ended the process. NumPy returns NaN's place instead: the
    interpreter hid it until it compared as a GPU does.
    """
    logits = _draw(experts, torch.float32, 43)
    for row, values in enumerate(([torch.nan], [torch.nan] * experts, [torch.inf, torch.nan])):
        logits[row, -len(values) :] = torch.tensor(values, device=DEVICE)
    logits[3, 1] = torch.nan
    bias = torch.zeros(experts, device=DEVICE)
    bias[0] = -torch.inf
    for choice_bias in (None, bias):
        found = functional.route(logits, k, scores=scores, choice_bias=choice_bias, **how)
        with torchweld.use_backend("eager"):
            expected = functional.route(logits, k, scores=scores, choice_bias=choice_bias, **how)
        assert torch.equal(found.indices, expected.indices)
        torch.testing.assert_close(found.weights, expected.weights, equal_nan=True)


@pytest.mark.parametrize(
    ("experts", "k", "how"),
    [(5, 4, {}), (8, 8, {}), (64, 6, DEEPSEEK), (16, 5, {"groups": 4, "top_groups": 2})],
)
def test_more_are_chosen_than_a_bias_leaves(experts: int, k: int, how: dict[str, Any]) -> None:
    """Experts that a bias of -inf switches off are chosen in their order, each once.

    The kernel marked those that it had chosen by -inf, too, so that it took expert 0 again. Tests
    had no infinite bias.
    """
    logits = _draw(experts, torch.float32, 7)
    bias = torch.full((experts,), float("-inf"), device=DEVICE)
    bias[experts // 2] = 0.0
    found = _run(logits, k, choice_bias=bias, **how)
    with torchweld.use_backend("eager"):
        expected = _run(logits.double(), k, choice_bias=bias, **how)
    assert torch.equal(found["indices"], expected["indices"])


def test_the_same_bits_at_every_run() -> None:
    logits = _draw(60, torch.float32, 300)
    found, again = (_run(logits, 4, renormalize=True) for _ in range(2))
    assert all(torch.equal(found[name], again[name]) for name in RESULTS)


def test_all_tokens_are_masked() -> None:
    logits = _draw(8, torch.float32, 5)
    found = _run(logits, 2, token_mask=torch.zeros(5, dtype=torch.bool, device=DEVICE))
    assert found["balance_loss"] == found["z_loss"] == 0
    assert found["gradient"].isfinite().all()


def test_second_derivatives_are_eager_torchs() -> None:
    logits = _draw(8, torch.float32, 5)
    seconds = []
    for backend in ("triton", "eager"):
        with torchweld.use_backend(backend):
            leaf = logits.detach().requires_grad_()
            total = functional.route(leaf, 2, renormalize=True).weights.square().sum()
            (first,) = torch.autograd.grad(total, leaf, create_graph=True)
            seconds.append(torch.autograd.grad(first.square().sum(), leaf)[0])
    torch.testing.assert_close(*seconds)


@pytest.mark.parametrize(
    ("experts", "k", "dtype", "groups", "served"),
    [
        (256, 8, torch.bfloat16, 8, True),
        (60, 4, torch.float32, 1, True),
        (60, 4, torch.float32, 4, False),
        (2048, 4, torch.float32, 1, False),
        (256, 65, torch.float32, 1, False),
        (256, 8, torch.float64, 1, False),
    ],
)
def test_what_a_kernel_serves(
    experts: int, k: int, dtype: torch.dtype, groups: int, served: bool
) -> None:
    logits = torch.empty(4, experts, dtype=dtype, device=DEVICE)
    found = route._find_backend(logits, k, groups)
    assert found == ("triton" if served else None)
    with torchweld.use_backend("eager"):
        assert route._find_backend(logits, k, groups) is None
    assert route._find_backend(logits[:0], k, groups) is None
