"""Activation checkpointing: what a block saves, and what its backward computes again."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# A GEMM or attention is many operations for each number that it makes; a norm, a dropout or an
# activation is about one, which costs less to compute again than to keep.
_SAVED = {
    "aten": {"mm", "addmm", "bmm", "baddbmm", "linear"},
    "mkldnn": {"_linear_pointwise"},
    "torchweld": {"block_sparse_attention", "linear_act"},
}
_ATTENTION = "_scaled_dot_product"


def save_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save what GEMMs and attention make, compute the rest again.

    For `torch.utils.checkpoint.create_selective_checkpoint_contexts`; `recompute` uses it.
    """
    namespace, _, name = op._schema.name.partition("::")
    if name in _SAVED.get(namespace, ()) or name.startswith(_ATTENTION):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def recompute(module: torch.nn.Module, selective: bool = False) -> torch.nn.Module:
    """The module, of which only the input is saved for the backward; what it drops stays dropped.

    Args:
        module: a block, after tensor parallelism and before FSDP2.
        selective: save what `save_policy` says, too.

    Returns:
        A module around it, whose state_dict is its own.
    """
    context: dict[str, Any] = {}
    if selective:
        context["context_fn"] = partial(create_selective_checkpoint_contexts, save_policy)
    return checkpoint_wrapper(module, **context)
