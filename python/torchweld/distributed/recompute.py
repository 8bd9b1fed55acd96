"""Activation checkpointing: what a block saves, and what its backward recomputes.

    checkpoint(block, x, use_reentrant=False, context_fn=selective)

keeps the results of GEMMs, attention and reductions over devices. It recomputes norms, activations
and dropouts, which take one pass over memory each and drop the same elements as before.
transformers accepts it too: `gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn":
selective}`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_aten = torch.ops.aten
# No batched GEMMs: attention's scores grow with the square of the sequence length.
_GEMMS = {_aten.mm, _aten.addmm, _aten._scaled_mm, torch.ops.mkldnn._linear_pointwise}
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
}
_REDUCTIONS = {
    torch.ops._c10d_functional.all_reduce,
    torch.ops._c10d_functional.reduce_scatter_tensor,
}
_OURS = {torch.ops.torchweld.linear_act, torch.ops.torchweld.block_sparse_attention}
_KEPT = _GEMMS | _ATTENTION | _REDUCTIONS | _OURS


def save_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether a selective checkpoint keeps this op's result; for torch.utils.checkpoint.

    A policy of your own can ask it first:

        def policy(context, op, *args, **kwargs):
            if op is torch.ops.torchweld.layer_norm.cuda:
                return CheckpointPolicy.MUST_SAVE
            return save_policy(context, op, *args, **kwargs)
    """
    if getattr(op, "overloadpacket", None) in _KEPT and not _draws(op, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether it draws random numbers: if it were skipped, later recomputed ops would get them."""
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return False
    return dict(zip(names, args, strict=False)).get("dropout_p", kwargs.get("dropout_p", 0)) > 0


def selective() -> Any:
    """The contexts of a checkpoint with save_policy, for its forward and its recomputation."""
    return create_selective_checkpoint_contexts(save_policy)


def recompute(module: torch.nn.Module, keep: bool = False) -> torch.nn.Module:
    """Wrap a module to save only its input for the backward; dropout masks are reproduced.

    Args:
        module: a block, after tensor parallelism and before FSDP2.
        keep: also save the results that `save_policy` selects.

    Returns:
        A module around it, with the same state_dict.
    """
    context: dict[str, Any] = {"context_fn": selective} if keep else {}
    return checkpoint_wrapper(module, **context)
