"""route: a router's choice of experts for each token, and its side losses."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchweld import checks
from torchweld.errors import ArgumentError
from torchweld.registry import Op

_NAME = "route"
_SCORES = ("softmax", "sigmoid")


class Routes(NamedTuple):
    """The experts of each token, and the losses of the choice.

    Attributes:
        indices: [*, k], int64, the best first.
        weights: [*, k], float32 (float64 of float64).
        balance_loss: E * sum over the experts of (share of the choices) * (mean score), 1 if all
            experts are chosen and scored alike. The shares get no gradient.
        z_loss: the mean square of the logits' log-sum-exp.
    """

    indices: torch.Tensor
    weights: torch.Tensor
    balance_loss: torch.Tensor
    z_loss: torch.Tensor


def route(
    input: torch.Tensor,
    k: int,
    *,
    scores: str = "softmax",
    choice_bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    best_of_group: int = 2,
    renormalize: bool = False,
    scale: float = 1.0,
    token_mask: torch.Tensor | None = None,
) -> Routes:
    """Choose k experts for each token by a router's logits.

    Scores are computed in float32. Of equal ones the expert with the lower index is chosen, so that
    the choice is the same in every run, and in a trainer and a sampler with the same logits.

    Args:
        input: the logits, [*, E]; float32, bfloat16, float16 (or float64).
        k: experts per token.
        scores: "softmax" over the experts, or "sigmoid" of each logit.
        choice_bias: [E], added to the scores for the choice only, as in DeepSeek-V3; no gradient.
        groups: experts are in so many groups of equal size, one after another.
        top_groups: only the experts of this many groups are chosen from.
        best_of_group: a group counts as the sum of so many of its best scores, 2 in DeepSeek-V3, 1
            in DeepSeek-V2.
        renormalize: divide the weights by their sum.
        scale: a factor of the weights.
        token_mask: [*], True where a token counts in the losses; None: all do.

    Returns:
        The chosen experts, their weights, and two losses.
    """
    _check(input, k, scores, choice_bias, groups, top_groups, best_of_group, token_mask)
    checks.factor(_NAME, "scale", scale)
    checks.flag(_NAME, "renormalize", renormalize)
    with torch.autocast(input.device.type, enabled=False):
        logits = input if input.dtype is torch.float64 else input.float()
        own = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
        choice = own.detach() if choice_bias is None else own.detach() + choice_bias.detach()
        if groups > 1:
            choice = _mask_groups(choice, groups, top_groups, best_of_group)
        indices = torch.sort(choice, dim=-1, descending=True, stable=True).indices[..., :k]
        weights = own.gather(-1, indices)
        if renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
        weights = weights * scale
        shares = own if scores == "softmax" else own / (own.sum(-1, keepdim=True) + _TINY)
        losses = _find_losses(logits, shares, indices, token_mask)
    return Routes(indices, weights, *losses)


# Keeps a sum of zeros from dividing by zero; too small to change another sum's bits.
_TINY = 1e-20


def _mask_groups(
    choice: torch.Tensor, groups: int, top_groups: int, best_of_group: int
) -> torch.Tensor:
    """Make all experts outside the best groups the last choice."""
    each = choice.unflatten(-1, (groups, -1))
    counts = each.topk(min(best_of_group, each.shape[-1]), -1).values.sum(-1)
    best = torch.sort(counts, dim=-1, descending=True, stable=True).indices[..., :top_groups]
    is_best = torch.zeros_like(counts, dtype=torch.bool).scatter(-1, best, True)
    return torch.where(is_best[..., None], each, -torch.inf).flatten(-2)


def _find_losses(
    logits: torch.Tensor,
    shares: torch.Tensor,
    indices: torch.Tensor,
    token_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    experts = logits.shape[-1]
    counted = torch.ones_like(logits[..., 0]) if token_mask is None else token_mask.to(logits.dtype)
    tokens = counted.sum().clamp(min=1)
    # One pass for each choice: counting by atomics would add in any order.
    numbers = torch.arange(experts, device=logits.device)
    chosen = sum(
        ((indices[..., at, None] == numbers) * counted[..., None]).flatten(0, -2).sum(0)
        for at in range(indices.shape[-1])
    )
    means = (shares * counted[..., None]).flatten(0, -2).sum(0) / tokens
    balance = experts * (chosen / (tokens * indices.shape[-1]) * means).sum()
    squares = logits.logsumexp(-1).square() * counted
    return balance, squares.sum() / tokens


def _check(
    logits: Any,
    k: Any,
    scores: Any,
    choice_bias: Any,
    groups: Any,
    top_groups: Any,
    best_of_group: Any,
    token_mask: Any,
) -> None:
    checks.dense(_NAME, "input", logits, Op.dtypes)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ArgumentError(_NAME, "input", f"of shape {list(logits.shape)}", "[*, E]")
    if scores not in _SCORES:
        raise ArgumentError(_NAME, "scores", repr(scores), " or ".join(_SCORES))
    experts = logits.shape[-1]
    _check_count("groups", groups, experts)
    if experts % groups:
        raise ArgumentError(_NAME, "groups", repr(groups), f"a divisor of {experts} experts")
    _check_count("top_groups", top_groups, groups)
    _check_count("best_of_group", best_of_group, None)
    _check_count("k", k, experts if groups == 1 else experts // groups * top_groups)
    if choice_bias is not None:
        checks.dense(_NAME, "choice_bias", choice_bias, Op.dtypes)
        checks.like(_NAME, "choice_bias", choice_bias, logits, "input")
        checks.shaped(_NAME, "choice_bias", choice_bias, (experts,), "one an expert")
    if token_mask is not None:
        checks.dense(_NAME, "token_mask", token_mask, (torch.bool,))
        checks.like(_NAME, "token_mask", token_mask, logits, "input")
        checks.shaped(_NAME, "token_mask", token_mask, logits.shape[:-1], "one a token")


def _check_count(name: str, value: Any, most: int | None) -> None:
    if type(value) is not int or value < 1 or (most is not None and value > most):
        accepted = "an integer >= 1" if most is None else f"an integer from 1 to {most}"
        raise ArgumentError(_NAME, name, repr(value), accepted)
