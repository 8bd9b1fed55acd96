"""examples/preferences.py against plain torch with all logits, in float64."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, logsigmoid

import preferences

BATCH, LENGTH, FEATURES, WORDS = 4, 6, 8, 90
# Kernel and reference are of float64; their sums have at most WORDS * LENGTH terms.
TOLERANCE = WORDS * LENGTH * 2.0**-52


def _arguments() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    hidden = torch.randn(BATCH, LENGTH, FEATURES, generator=made, dtype=torch.float64)
    head = torch.randn(WORDS, FEATURES, generator=made, dtype=torch.float64)
    labels = torch.randint(0, WORDS, (BATCH, LENGTH), generator=made)
    labels[0, :3] = labels[2, 4:] = -100
    return hidden.requires_grad_(), head.requires_grad_(), labels


def _agree(ours: torch.Tensor, plain: torch.Tensor, *sources: torch.Tensor) -> None:
    pairs = zip(
        (ours, *torch.autograd.grad(ours, sources)),
        (plain, *torch.autograd.grad(plain, sources)),
        strict=True,
    )
    for got, true in pairs:
        assert true.abs().max() > 0
        torch.testing.assert_close(got, true, rtol=TOLERANCE, atol=TOLERANCE)


def _pick(log_p: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    picked = log_p.gather(-1, labels.clamp(0)[..., None]).squeeze(-1)
    return torch.where(labels == -100, 0, picked)


def test_dpo() -> None:
    hidden, head, labels = _arguments()
    reference = torch.randn(BATCH, dtype=torch.float64)
    sums = _pick(linear(hidden, head).log_softmax(-1), labels).sum(-1) - reference
    plain = -logsigmoid(0.1 * (sums[:2] - sums[2:])).mean()
    _agree(preferences.dpo(hidden, head, labels, reference), plain, hidden, head)


def test_grpo() -> None:
    hidden, head, labels = _arguments()
    advantages = torch.randn(BATCH, dtype=torch.float64)
    log_p = (linear(hidden, head) / 0.8).log_softmax(-1)
    picked, entropy = _pick(log_p, labels), -(log_p.exp() * log_p).sum(-1)
    sampled = picked.detach() + 0.3 * torch.randn(BATCH, LENGTH, dtype=torch.float64)
    mask = labels != -100
    ratio = (picked - sampled).exp()[mask]
    advantage = advantages[:, None].expand(BATCH, LENGTH)[mask]
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    plain = -(gain + 0.01 * entropy[mask]).mean()
    ours = preferences.grpo(hidden, head, labels, advantages, sampled, temperature=0.8)
    _agree(ours, plain, hidden, head)


def test_distillation() -> None:
    """64 words a position, some padded, one position without any."""
    hidden, head, _ = _arguments()
    teacher, words = torch.randn(BATCH, LENGTH, WORDS).double().log_softmax(-1).topk(64)
    words[:, :, 60:] = words[1, 2] = -100
    teacher[words == -100] = -torch.inf
    log_p = linear(hidden, head).log_softmax(-1)
    terms = teacher.exp() * log_p.gather(-1, words.clamp(0))
    plain = -terms.sum() / (BATCH * LENGTH - 1)
    _agree(preferences.distil(hidden, head, words, teacher), plain, hidden, head)
