"""Three losses of fine-tuning on log-probabilities whose logits never exist whole.

`hidden` is the model's last hidden state [batch, length, features], `head` the weight of its head
[words, features], `labels` the next tokens [batch, length] with -100 where nothing is learnt.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from torchweld.functional import linear_logprobs


def dpo(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    reference: torch.Tensor,
    beta: float = 0.1,
) -> torch.Tensor:
    """Direct preference optimisation; the batch's first half is chosen, the second rejected.

    `reference` has the frozen model's sums of log-probabilities, [batch].
    """
    log_p = linear_logprobs(hidden, head, labels)
    assert isinstance(log_p, torch.Tensor)
    chosen, rejected = (log_p.sum(-1) - reference).chunk(2)
    return -logsigmoid(beta * (chosen - rejected)).mean()


def grpo(
    hidden: torch.Tensor,
    head: torch.Tensor,
    labels: torch.Tensor,
    advantages: torch.Tensor,
    sampled: torch.Tensor,
    temperature: float = 1.0,
    clip: float = 0.2,
    bonus: float = 0.01,
) -> torch.Tensor:
    """Group-relative policy optimisation with an entropy bonus.

    `advantages` are [batch], `sampled` the sampler's log-probabilities [batch, length], at the same
    temperature.
    """
    log_p, entropy = linear_logprobs(
        hidden, head, labels, temperature=temperature, return_entropy=True
    )
    mask = labels != -100
    ratio = torch.where(mask, log_p - sampled, 0).exp()
    advantage = advantages[:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -((gain + bonus * entropy) * mask).sum() / mask.sum()


def distil(
    hidden: torch.Tensor,
    head: torch.Tensor,
    words: torch.Tensor,
    teacher: torch.Tensor,
) -> torch.Tensor:
    """Cross entropy with the teacher's K most probable words.

    `words` are [batch, length, K], padded with -100, and `teacher` their log-probabilities, padded
    with -inf.
    """
    log_p = linear_logprobs(hidden, head, words)
    assert isinstance(log_p, torch.Tensor)
    rows = (words != -100).any(-1).sum()
    return -(teacher.exp() * log_p).sum() / rows
