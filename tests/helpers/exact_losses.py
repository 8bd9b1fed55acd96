"""Losses in float64 by their documented formula, with inputs and options of each kind."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

UNIT = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}
# How many of them a result may be off, in the largest element. A probability's relative error is
# the error of its exponent: three roundings of half a unit (scale, cap, temperature) of at most 12,
# the largest logit here. Sums, logarithm and products add 8. In 16 bits only what is stored is
# rounded. What float64 is compared with makes the same roundings, and sums 2100 terms in up to 20.
ROUNDINGS = {torch.float64: 72, torch.float32: 26, torch.bfloat16: 8}


def agree(got: Any, exact: Any, dtype: torch.dtype) -> None:
    """Hold a tensor to its exact value, or each of several."""
    if not isinstance(got, torch.Tensor):
        for pair in zip(got, exact, strict=True):
            agree(*pair, dtype)
        return
    assert got.shape == exact.shape
    exact = exact.detach().double()
    largest = max(exact.abs().max().item(), 2.0**-30) if exact.numel() else 1.0
    off = (got.detach().double() - exact).abs().max().item() if exact.numel() else 0.0
    assert off <= ROUNDINGS[dtype] * UNIT[dtype] * largest, (off / largest, UNIT[dtype])


def exact_loss(u: torch.Tensor, target: torch.Tensor, kw: dict[str, Any]) -> torch.Tensor:
    """The documented formula in float64, of logits u in whichever options remain."""
    kw = dict(kw)
    u = u * kw.pop("logit_scale", 1.0)
    if cap := kw.pop("softcap", None):
        u = cap * torch.tanh(u / cap)
    temperature = kw.pop("temperature", 1.0)
    u = u / (temperature.double()[:, None] if torch.is_tensor(temperature) else temperature)
    z, tokens = kw.pop("z_loss", 0.0), kw.pop("token_weights", None)
    reduction = kw.pop("reduction", "mean")
    weight = kw.get("weight")
    if weight is not None:
        kw["weight"] = weight.double()
    soft = target.is_floating_point()
    target = target.double() if soft else target
    loss = F.cross_entropy(u, target, reduction="none", **kw)
    counted = torch.ones(len(u)).double() if soft else (target != -100).double()
    loss = loss + z * counted * u.logsumexp(1) ** 2
    each = counted
    if weight is not None and not soft:
        each = counted * weight.double()[target.clamp(0)]
    if tokens is not None:
        loss, each = loss * tokens.double(), each * tokens.double()
    if reduction == "none":
        return loss
    return loss.sum() / each.sum() if reduction == "mean" else loss.sum()


def options(rows: int, classes: int) -> dict[str, dict[str, Any]]:
    made = torch.Generator().manual_seed(1)
    weight = torch.rand(classes, generator=made) + 0.1
    tokens = torch.rand(rows, generator=made)
    temperature = torch.rand(rows, generator=made) + 0.5
    return {
        "plain": {},
        "sum": {"reduction": "sum"},
        "none": {"reduction": "none"},
        "smoothing": {"label_smoothing": 0.1},
        "all smooth": {"label_smoothing": 1.0, "weight": weight},
        "weights": {"weight": weight, "label_smoothing": 0.2},
        "z": {"z_loss": 1e-2, "token_weights": tokens},
        "caps": {"softcap": 4.0, "logit_scale": 0.5, "temperature": 0.7},
        "temperatures": {"softcap": 4.0, "temperature": temperature, "reduction": "none"},
    }


def make(rows: int, classes: int, features: int, dtype: torch.dtype) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(rows, features, generator=made, dtype=torch.float64)
    weight = torch.randn(classes, features, generator=made, dtype=torch.float64)
    bias = torch.randn(classes, generator=made, dtype=torch.float64)
    weight *= 3 * features**-0.5
    target = torch.randint(0, classes, (rows,), generator=made)
    target[1::5] = -100
    return [x.to(dtype), weight.to(dtype), bias.to(dtype), target]


def soften(rows: int, classes: int) -> torch.Tensor:
    """Probabilities that need not sum to 1."""
    made = torch.Generator().manual_seed(2)
    mass = torch.rand(rows, 1, generator=made) + 0.5
    return torch.rand(rows, classes, generator=made).softmax(1) * mass
