"""torch's multi_head_attention_forward, which Dynamo leaves whole, in 16 bits or with a dropout."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map

from torchweld import functional
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import HEADS, Number, Record, Ref
from torchweld.ops.attention.converted import attention
from torchweld.ops.gemm import gemm
from torchweld.ops.gemm.linear_act import linear_as_torch
from torchweld.ops.gemm.product import is_converted, multiply
from torchweld.sparse.by_length import DENSE

# What torchweld has no way for.
_SPECIAL = ("bias_k", "bias_v", "add_zero_attn", "use_separate_proj_weight", "static_k", "static_v")


def _read(given: tuple[Any, ...]) -> dict[str, Any]:
    *tensors, names, others = given
    return dict(others) | dict(zip(names, tensors, strict=True))


def _compute(*given: Any) -> Any:
    return torch.nn.functional.multi_head_attention_forward(**_read(given))


def _reference(*given: Any) -> Any:
    return _drop_none(_compute(*given))


def _drop_none(made: tuple[Any, Any]) -> Any:
    return made[0] if made[1] is None else made


def _run(*given: Any) -> Any:
    """softmax_dropout if weights are wanted; else attention over all keys, or by float32 GEMMs."""
    call = _read(given)
    inputs = [call[name] for name in ("query", "key", "value")]
    padding, mask, is_causal = (call[n] for n in ("key_padding_mask", "attn_mask", "is_causal"))
    is_slow = is_converted(inputs[0], gemm.find_dtype(inputs[0]))
    serves = torch.is_grad_enabled() or is_slow
    if call["need_weights"]:
        serves &= not is_causal
    else:  # masked only by position and padding
        serves &= mask is None or (is_causal and len({x.shape[0] for x in inputs}) == 1)
        serves &= padding is None or padding.dtype == torch.bool
    if not (serves or (is_slow and not call["need_weights"])):
        return _drop_none(_compute(*given))
    q, k, v = (_split_heads(x, call["num_heads"]) for x in _project(call, inputs))
    p, training = call["dropout_p"], call["training"]
    if call["need_weights"]:
        return _with_weights(call, q, k, v)
    if serves:
        result = functional.block_sparse_attention(
            *(q, k, v, DENSE.of(q, k)),
            causal=is_causal,
            key_padding_mask=padding,
            dropout_p=p,
            training=training,
        )
    else:
        result = attention(q, k, v, _make_mask(q, padding, mask), p * training)
    return _project_out(call, result)


def _with_weights(
    call: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = functional.softmax_dropout(
        multiply(q, k.transpose(-2, -1)),
        _make_mask(q, call["key_padding_mask"], call["attn_mask"]),
        scale=1 / math.sqrt(q.shape[-1]),
        p=call["dropout_p"],
        training=call["training"],
    )
    result = _project_out(call, multiply(weights.to(v.dtype), v))
    return result, weights.mean(1) if call["average_attn_weights"] else weights


def _project(call: dict[str, Any], inputs: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    weight, bias = call["in_proj_weight"], call["in_proj_bias"]
    if inputs[0] is inputs[1] is inputs[2]:
        yield from linear_as_torch(inputs[0], weight, bias).chunk(3, -1)
        return
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    for x, part, own in zip(inputs, weight.chunk(3), biases, strict=True):
        yield linear_as_torch(x, part, own)


def _split_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """From [length, batch, width] to [batch, heads, length, head size]."""
    return x.transpose(0, 1).unflatten(-1, (heads, -1)).transpose(1, 2)


def _project_out(call: dict[str, Any], of_heads: torch.Tensor) -> torch.Tensor:
    result = of_heads.transpose(1, 2).flatten(2)
    result = linear_as_torch(result, call["out_proj_weight"], call["out_proj_bias"])
    return result.transpose(0, 1)


def _make_mask(
    q: torch.Tensor, key_padding_mask: torch.Tensor | None, attn_mask: torch.Tensor | None
) -> torch.Tensor | None:
    """Convert torch's masks, where True excludes, to softmax_dropout's, where True includes."""
    masks = []
    if attn_mask is not None:
        shape = (*q.shape[:2], *attn_mask.shape[-2:])
        masks.append(attn_mask.view(shape) if attn_mask.ndim == 3 else attn_mask)
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None, :])
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return functools.reduce(torch.logical_and, [~mask for mask in masks])
    zeros = (torch.zeros_like(mask, dtype=q.dtype) for mask in masks)
    return functools.reduce(
        torch.add,
        [
            zero.masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask.to(q.dtype)
            for zero, mask in zip(zeros, masks, strict=True)
        ],
    )


def _run_laid(*given: Any) -> Any:
    """With torch's strides, where they leave the graph."""
    return tree_map(torch.Tensor.contiguous, _run(*given))


def find_heads(record: Record, at: int) -> Iterator[Proposal]:
    step = record.steps[at]
    if step.func != "multi_head_attention_forward":
        return
    call = dict(zip(HEADS, map(_decode, step.args), strict=True))
    out = record.values[step.outs[0]]
    # Without a dropout torch's attention on the CPU keeps no scores, and takes less time.
    drops = call["training"] and call["dropout_p"] and out.device.type == "cpu"
    if not (drops or is_converted(out, out.dtype)) or any(call[name] for name in _SPECIAL):
        return
    if out.ndim != 3:
        return
    inputs = {name: value.at for name, value in call.items() if isinstance(value, Ref)}
    others = tuple(pair for pair in call.items() if not isinstance(pair[1], Ref))
    constants = tuple(inputs), others
    name, numbers, outs = "multihead_attention", [*inputs.values()], list(step.outs)
    for run in (_run, _run_laid):
        yield Proposal(name, numbers, outs, _reference, run, constants)


def _decode(value: Any) -> Any:
    if not isinstance(value, Number):
        return value
    return int(value.text) if value.text.isdigit() else float(value.text)
