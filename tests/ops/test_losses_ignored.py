"""Rows of a loss that are ignored, and their weights."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import torchweld
from torchweld import functional


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}], ids=["", "more"])
@pytest.mark.parametrize("backend", ["cpu", "eager", None])
def test_token_weights_of_ignored_rows_get_no_gradient(
    backend: str | None, options: dict[str, float]
) -> None:
    """Zero, if some or all rows are ignored, in each reduction, also if such a weight is NaN.

    The mean of no rows divided zero by zero, and its derivative made these gradients NaN: the test
    of ignored rows differentiated only input and weight.
    """
    x, weight = torch.randn(7, 3), torch.randn(20, 3)
    target = torch.arange(7)
    for ignored in (slice(0, 3), slice(0, 7)):
        target[ignored] = -100
        for reduction, linear in itertools.product(("mean", "sum", "none"), (True, False)):
            tokens = torch.linspace(0.5, 2.0, 7)
            tokens[1] = torch.nan
            given = [t.clone().requires_grad_() for t in (tokens, x, weight)]
            how: dict[str, Any] = {"token_weights": given[0], "reduction": reduction, **options}
            with torchweld.use_backend(backend):
                if linear:
                    loss = functional.linear_cross_entropy(given[1], given[2], target, **how)
                else:
                    loss = functional.cross_entropy(F.linear(given[1], given[2]), target, **how)
                grads = torch.autograd.grad(loss.sum(), given)
            assert all(grad.isfinite().all() for grad in grads)
            assert torch.equal(grads[0] == 0, target == -100)
