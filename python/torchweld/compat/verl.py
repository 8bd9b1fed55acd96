"""verl's linear_cross_entropy: log-probabilities and entropies of a head, without its logits."""

from __future__ import annotations

from typing import Any

import torch

from torchweld import functional
from torchweld.errors import ArgumentError


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of labels and the entropy, both differentiable.

    Args:
        hidden: [*, in_features].
        weight: [V, in_features].
        labels: classes, [*].
        temperature: the logits are divided by it.
        reduction: of the log-probabilities: "none", "sum" or "mean"; the entropy keeps its rows.
        dist_process_group: only None. Give a weight that is a DTensor sharded by its rows.

    Returns:
        The log-probabilities and the entropies, [*], float32.
    """
    if dist_process_group is not None:
        accepted = "None: a weight that is a DTensor, sharded by rows, brings its own group"
        kind = f"a {type(dist_process_group).__name__}"
        raise ArgumentError("linear_cross_entropy", "dist_process_group", kind, accepted)
    if reduction not in ("none", "sum", "mean"):
        accepted = "'none', 'sum' or 'mean'"
        raise ArgumentError("linear_cross_entropy", "reduction", repr(reduction), accepted)
    log_p, entropy = functional.linear_logprobs(
        hidden, weight, labels, temperature=temperature, return_entropy=True
    )
    return (log_p if reduction == "none" else getattr(log_p, reduction)()), entropy
