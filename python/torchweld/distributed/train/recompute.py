"""Activation checkpointing: which results a block saves, and which its backward pass recomputes.

    checkpoint(block, x, use_reentrant=False, context_fn=selective_contexts)

keeps the results of GEMMs, attention and reductions over devices. It recomputes norms, activations
and dropouts, each in one pass over memory. Dropouts drop the same elements again.
transformers accepts it too: `gradient_checkpointing_kwargs={"use_reentrant": False,
"context_fn": selective_contexts}`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachingTorchDispatchMode,
    create_selective_checkpoint_contexts,
)

from torchweld.errors import ArgumentError

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
_OURS = {
    torch.ops.torchweld.product,  # on CPUs without 16-bit units
    torch.ops.torchweld.linear_act,
    torch.ops.torchweld.gated_linear,
    torch.ops.torchweld.block_sparse_attention,
    torch.ops.torchweld.experts_mlp,
}
_KEPT = _GEMMS | _ATTENTION | _REDUCTIONS | _OURS


def save_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide whether a selective checkpoint keeps this op's result; for torch.utils.checkpoint.

    Your own policy can call it:

        def policy(context, op, *args, **kwargs):
            if op is torch.ops.torchweld.layer_norm.triton:
                return CheckpointPolicy.MUST_SAVE
            return save_policy(context, op, *args, **kwargs)
    """
    if getattr(op, "overloadpacket", None) in _KEPT and not _draws_random_numbers(op, args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _draws_random_numbers(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op draws random numbers; skipping it would shift the draws of later ops."""
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return False
    return dict(zip(names, args, strict=False)).get("dropout_p", kwargs.get("dropout_p", 0)) > 0


class _SavesUnchanged(_CachingTorchDispatchMode):
    """Saves results in the forward pass, and refuses to change one in place.

    The backward pass would make the change twice. torch itself compares versions, which miss some
    changes: of a product of three dimensions, by `torch._foreach_` functions, of `unsafe_chunk`'s
    parts, and of `data`.
    """

    def __init__(self, storage: Any) -> None:
        super().__init__(save_policy, storage)
        self._saved: dict[int, Any] = {}  # ops by the address of their result's memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            self._refuse_to_change_saved(func, args, kwargs or {})
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if save_policy(None, func, *args, **(kwargs or {})) is CheckpointPolicy.MUST_SAVE:
            self._saved |= dict.fromkeys(_find_memory(result), func)
        return result

    def _refuse_to_change_saved(self, op: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        for at, argument in enumerate(op._schema.arguments):
            if argument.is_write:
                value = args[at] if at < len(args) else kwargs.get(argument.name)
                for saved in _find_memory(value) & self._saved.keys():
                    change = f"changes a saved result of {self._saved[saved]} in place, by {op}"
                    raise ArgumentError(
                        "selective_contexts",
                        "block",
                        f"one that {change}",
                        "other operations, or a checkpoint that saves no results",
                    )


def _find_memory(value: Any) -> set[int]:
    """The addresses of the memory of tensors. Sparse and traced tensors have none."""
    found: set[int] = set()
    for x in tree_leaves(value):
        if is_traceable_wrapper_subclass(x):  # a DTensor, or the result of a collective
            found |= _find_memory([getattr(x, name) for name in x.__tensor_flatten__()[0]])
        elif type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided:
            found.add(x.untyped_storage()._cdata)
    return found


def selective_contexts() -> Any:
    """Make a checkpoint's contexts with save_policy: for the forward pass and its repetition.

    Raises:
        ArgumentError: in the forward pass, if the block changes a saved result in place.
    """
    forward, again = create_selective_checkpoint_contexts(save_policy)
    return _SavesUnchanged(forward.storage), again  # type: ignore[attr-defined]


def recompute(module: torch.nn.Module, keep: bool = False) -> torch.nn.Module:
    """Wrap a module to save only its input for the backward pass; dropout masks are reproduced.

    A block of transformers gets no cache of keys and values: a second forward pass would add to it.

    Args:
        module: a block, after tensor parallelism and before FSDP2.
        keep: also save the results that `save_policy` selects.

    Returns:
        A module around this one, with the same state_dict.
    """
    context: dict[str, Any] = {"context_fn": selective_contexts} if keep else {}
    wrapped = checkpoint_wrapper(module, **context)
    wrapped.register_forward_pre_hook(_drop_empty_caches, with_kwargs=True)
    return wrapped


def _drop_empty_caches(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace caches of transformers by None, as its own checkpointing does."""
    layers = (m.layer_idx for m in module.modules() if hasattr(m, "layer_idx"))
    at: Any = next(layers, 0)

    def drop(value: Any) -> Any:
        if not hasattr(value, "get_seq_length"):
            return value
        if length := value.get_seq_length(at):
            accepted = "an empty one, or None: a second forward pass would add to it"
            raise ArgumentError("recompute", "cache", f"one of {length} tokens", accepted)
        return None

    return tuple(map(drop, args)), {name: drop(value) for name, value in kwargs.items()}
