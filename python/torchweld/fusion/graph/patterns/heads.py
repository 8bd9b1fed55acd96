"""torch's multi_head_attention_forward, which Dynamo leaves whole, in 16 bits or with a dropout."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import HEADS, Number, Record, Ref
from torchweld.fusion.patterns.attention import MultiheadAttention
from torchweld.ops.gemm.product import is_converted

# What torchweld has no way for.
_SPECIAL = ("bias_k", "bias_v", "add_zero_attn", "use_separate_proj_weight", "static_k", "static_v")
_GIVEN = (
    *("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask"),
    *("average_attn_weights", "is_causal"),
)


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
    call = _read(given)
    module: Any = SimpleNamespace(
        batch_first=False,
        num_heads=call["num_heads"],
        head_dim=call["embed_dim_to_check"] // call["num_heads"],
        dropout=call["dropout_p"],
        training=call["training"],
        in_proj_weight=call["in_proj_weight"],
        in_proj_bias=call["in_proj_bias"],
        out_proj=SimpleNamespace(weight=call["out_proj_weight"], bias=call["out_proj_bias"]),
        welded_from=SimpleNamespace(forward=lambda *_: _compute(*given)),
    )
    return _drop_none(MultiheadAttention.forward(module, *(call[name] for name in _GIVEN)))


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
