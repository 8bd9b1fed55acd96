"""block_sparse_attention: attention over only the blocks of a layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch import choice
from torchweld.dispatch.autograd import derivatives_of_reference
from torchweld.dispatch.call import call
from torchweld.dispatch.kernels import define
from torchweld.errors import ArgumentError
from torchweld.ops.attention.reference import attention, attention_of_few, four, terms
from torchweld.ops.attention.samples import SAMPLES, TINY, flops, measured, sized
from torchweld.random import Shard, drawn, place
from torchweld.registry import Numerics, Op, Rows
from torchweld.sparse import BlockLayout
from torchweld.sparse.lists import count_of, words_of


def block_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: BlockLayout,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_padding_mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | int | None = None,
    shard: Shard | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q @ k.mT * scale) @ v over the keys that the layout lets each query see.

    A query that sees no key gives zeros, and zero gradients.

    Args:
        q: [batch, heads, queries, head_dim], of any strides; leading dimensions may be left out.
        k: [batch, key heads, keys, head_dim]; heads are a multiple of key heads, and adjacent
            heads share a key head.
        v: of k's shape.
        layout: a torchweld.sparse.BlockLayout of these lengths. For packed sequences, in a batch of
            one, use `BlockLayout.documents`.
        scale: factor of the scores; None: 1 / sqrt(head_dim).
        causal: the last query sees every key, each one before it one key less.
        key_padding_mask: booleans [batch, keys]; True is ignored, as in nn.MultiheadAttention.
        alibi_slopes: [heads] or [batch, heads], float32; the slope times the distance of query and
            key is subtracted from their score. Slopes get no gradient.
        sinks: [heads], for each head the learnt score of a key without a value.
        softcap: if not 0, scores become softcap * tanh(score / softcap) before anything is added.
        dropout_p: the probability that a weight is dropped if training is true.
        training: False drops nothing.
        seed: what to drop, see torchweld.random; None draws one from torch's generator. The same
            scores [batch, heads, queries, keys] are dropped as in softmax_dropout.
        shard: the place of q in a larger tensor, which decides dropout and distances. The last
            offset is not q's but the number of the first key, a multiple of 4. Keys and values are
            those of q's heads, or of all heads.
        return_lse: also return the log of the sum of exponentials, which is differentiable.

    Returns:
        A tensor of q's shape and dtype; with `return_lse` also a float32 tensor [batch, heads,
        queries], -inf where a query sees nothing.
    """
    given = (q, k, v, layout, scale, causal, key_padding_mask, alibi_slopes, sinks, softcap)
    inputs = _inputs(*given, dropout_p, training, seed, shard)
    if not return_lse and _torch_is_faster(*inputs):
        _check(*inputs)
        return attention_of_few(*inputs)
    y, lse = call(OP, *inputs)
    return (y, lse) if return_lse else y


# With fewer queries than this a kernel that goes over blocks of queries has mostly padding.
_FEW = 16


def _torch_is_faster(q, k, v, sinks, rows, *rest: Any) -> bool:
    """Whether these are the few queries of decoding on a CPU, with what torch's attention has.

    With a layout of some blocks the kernel reads fewer keys.
    """
    *_, slopes, _, _, _, _, softcap, _, seed, whole, _ = rest
    if rows is not None or choice.forced is not None or torch.compiler.is_compiling():
        return False
    if not q.is_cpu or q.is_nested or type(q) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if not (q.ndim == k.ndim == 4 and q.shape[2] < min(_FEW, k.shape[2])):
        return False
    return sinks is None and slopes is None and not softcap and seed is None and not whole


def _inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: BlockLayout,
    scale: float | None = None,
    causal: bool = False,
    key_padding_mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | int | None = None,
    shard: Shard | None = None,
    return_lse: bool = False,
) -> Sequence[Any]:
    name = OP.name
    p, seed = drawn(name, "q", q, dropout_p, training, seed)
    whole, offset = place(shard)
    for argument, value in (("q", q), ("k", k)):
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            raise ArgumentError(name, argument, _came(value), "a tensor [*, length, head_dim]")
    if not isinstance(layout, BlockLayout):
        raise ArgumentError(name, "layout", _came(layout), "a torchweld.sparse.BlockLayout")
    if checks.autocasts(q.device.type) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if scale is None:
        scale = q.shape[-1] ** -0.5 if q.shape[-1] else 1.0
    checks.factor(name, "scale", scale, q.dtype)
    checks.factor(name, "softcap", softcap, q.dtype)
    group = _heads(q) // max(_heads(k), 1) if _heads(k) else 1
    lengths = (q.shape[-2] if q.ndim > 1 else 1, k.shape[-2] if k.ndim > 1 else 1)
    if lengths != (layout.queries, layout.keys):
        accepted = f"one of the lengths of q and k, {lengths[0]} x {lengths[1]}"
        raise ArgumentError(name, "layout", f"of {layout.queries} x {layout.keys} tokens", accepted)
    if q.ndim == 4:
        k, v = (_for_batch(x, q.shape[0]) for x in (k, v))
    if key_padding_mask is not None and key_padding_mask.ndim == 2:
        key_padding_mask = key_padding_mask[:, None, None]
        if q.ndim == 4:
            key_padding_mask = _for_batch(key_padding_mask, q.shape[0])
    if alibi_slopes is not None and alibi_slopes.ndim in (1, 2):
        alibi_slopes = alibi_slopes[..., None, None]
    if sinks is not None and sinks.ndim == 1:
        sinks = sinks[:, None, None]
    lists = layout.lists or (None,) * 5
    own = (layout.block, max(group, 1), float(scale), causal, float(softcap))
    return (q, k, v, sinks, *lists, key_padding_mask, alibi_slopes, *own, p, seed, whole, offset)


def _for_batch(x: Any, batch: int) -> Any:
    """One sequence for the whole batch, as torch's attention takes it."""
    if isinstance(x, torch.Tensor) and x.ndim == 4 and x.shape[0] == 1 != batch:
        return x.expand(batch, -1, -1, -1)
    return x


def _came(value: Any) -> str:
    return "a scalar" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _heads(x: torch.Tensor) -> int:
    return x.shape[-3] if x.ndim > 2 else 1


def _reference(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    _check(*arguments)  # torch would accept more
    kind = arguments[0].device.type
    if not checks.autocasts(kind):  # torch has no autocast of meta tensors
        return attention(*arguments)
    with torch.autocast(kind, enabled=False):  # already cast
        return attention(*arguments)


def _backward_reference(grad_y: Any, grad_lse: Any, *arguments: Any) -> tuple[Any, ...]:
    y, lse = arguments[-6:-4]
    grad_y = torch.zeros_like(y) if grad_y is None else grad_y
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    return derivatives_of_reference(OP)(grad_y, grad_lse, *arguments)


def _check(
    q,
    k,
    v,
    sinks,
    rows,
    row_entries,
    columns,
    column_entries,
    masks,
    key_padding_mask,
    alibi_slopes,
    block,
    group,
    scale,
    causal,
    softcap,
    p,
    seed,
    whole,
    offset,
):
    name = OP.name
    checks.dense(name, "q", q, OP.dtypes)
    if not 1 <= q.ndim <= 4:
        accepted = "[batch, heads, queries, head_dim]; batch and heads may be left out"
        raise ArgumentError(name, "q", f"of {q.ndim} dimensions", accepted)
    for argument, value in (("k", k), ("v", v)):
        checks.dense(name, argument, value, [q.dtype], "q")
        checks.like(name, argument, value, q, "q")
    if k.ndim != q.ndim or k.shape[-1] != q.shape[-1] or four(k).shape[0] != four(q).shape[0]:
        accepted = f"one that goes with q, {list(q.shape)}: [batch, key heads, keys, head_dim]"
        raise ArgumentError(name, "k", f"of shape {list(k.shape)}", accepted)
    checks.shaped(name, "v", v, k.shape, "that of k")
    shape = four(q).shape
    _check_heads(shape, four(k).shape[1], group, whole, offset)
    beside = [q.dtype] if q.dtype == torch.float32 else [q.dtype, torch.float32]
    if sinks is not None:
        checks.dense(name, "sinks", sinks, beside, "q")
        checks.like(name, "sinks", sinks, q, "q")
        checks.shaped(name, "sinks", sinks, [shape[1], 1, 1], "[heads]: with two dimensions of one")
    if key_padding_mask is not None:
        checks.dense(name, "key_padding_mask", key_padding_mask, [torch.bool])
        checks.like(name, "key_padding_mask", key_padding_mask, q, "q")
        padding = [shape[0], 1, 1, four(k).shape[2]]
        meaning = "[batch, keys]: with two dimensions of one"
        checks.shaped(name, "key_padding_mask", key_padding_mask, padding, meaning)
    if alibi_slopes is not None:
        checks.dense(name, "alibi_slopes", alibi_slopes, beside, "q")
        checks.like(name, "alibi_slopes", alibi_slopes, q, "q")
        batch = [shape[0]] if alibi_slopes.ndim == 4 else []
        meaning = "[heads] or [batch, heads]: with two dimensions of one"
        checks.shaped(name, "alibi_slopes", alibi_slopes, [*batch, shape[1], 1, 1], meaning)
    _check_shard(q, seed, whole, offset)
    if rows is not None:
        _check_lists(q, k, rows, row_entries, columns, column_entries, masks, block)


def _check_shard(q, seed, whole, offset):
    *place, first_key = offset or [0]
    checks.dropout(OP.name, "q", q, seed, whole, [*place, 0] if offset else offset)
    if whole and whole[-1] != q.shape[-1]:
        accepted = f"sizes that end in {q.shape[-1]}, as those of q"
        raise ArgumentError(OP.name, "shard", f"of sizes {list(whole)}", accepted)
    if first_key < 0 or first_key % 4:
        accepted = "offsets that end in a multiple of 4, the number of the first key"
        raise ArgumentError(OP.name, "shard", f"of offsets {list(offset)}", accepted)


def _check_heads(
    shape: Sequence[int],
    key_heads: int,
    group: int,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
) -> None:
    """Check that keys and values have q's heads, or more of the whole tensor's heads."""
    first = offset[-3] if offset and len(offset) > 2 else 0
    here, last = shape[1] == key_heads * group, first + shape[1] <= key_heads * group
    if not here and not (whole and last):
        accepted = f"a number of heads that divides q's {shape[1]}"
        raise ArgumentError(OP.name, "k", f"of {key_heads} heads", accepted)


def _check_lists(q, k, rows, row_entries, columns, column_entries, masks, block):
    name, shape = OP.name, four(q).shape
    count = [count_of(n, block) for n in (shape[2], four(k).shape[2])]
    every = (rows, row_entries, columns, column_entries, masks)
    for value in every:
        checks.dense(name, "layout", value, [torch.int32])
        checks.like(name, "layout", value, q, "q")
    for lines, n in ((rows, count[0]), (columns, count[1])):
        fits = (
            lines.ndim == 4 and lines.shape[0] in (1, shape[0]) and lines.shape[1] in (1, shape[1])
        )
        if not fits or [*lines.shape[2:]] != [n, 4]:
            came = f"one of {list(lines.shape[:3])}, batch, heads and blocks"
            accepted = f"one of {shape[0]} or 1, {shape[1]} or 1, and {n}"
            raise ArgumentError(name, "layout", came, accepted)
    for entries in (row_entries, column_entries):
        checks.shaped(name, "layout", entries, [entries.shape[0], 2], "entries [blocks, 2]")
    bits = [masks.shape[0], block * words_of(block)]
    checks.shaped(name, "layout", masks, bits, "masks [masks, words]")


def _refuses(backend: str, given: Mapping[str, Any]) -> str | None:
    if backend == "triton" and given["q"].shape[-1] > 256:
        return f"heads of {given['q'].shape[-1]} are wider than 256"
    return None


def _fake(q, *_):
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    y = torch.empty_like(q, memory_format=torch.contiguous_format)
    return y, q.new_empty(q.shape[:-1], dtype=kind)


_LAYOUT = (
    "Tensor? rows, Tensor? row_entries, Tensor? columns, Tensor? column_entries, Tensor? masks,"
    " Tensor? key_padding_mask, Tensor? alibi_slopes, int block, int group, float scale,"
    " bool causal, float softcap, float p, Tensor? seed, SymInt[]? whole, SymInt[]? offset"
)

OP = Op(
    name="block_sparse_attention",
    forward=f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {_LAYOUT}) -> (Tensor y, Tensor lse)",
    backward="(Tensor? grad_y, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? sinks,"
    f" {_LAYOUT}, Tensor y, Tensor lse, bool need_q, bool need_k, bool need_v, bool need_sinks)"
    " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_sinks)",
    inputs=_inputs,
    reference=_reference,
    backward_reference=_backward_reference,
    check=_check,
    fake=_fake,
    sharding=Rows(lambda q, *_: min(q.ndim, 2)),  # batch and heads
    sized=sized,
    flops=flops,
    sources={
        "cpu": ("csrc/cpu/block_sparse.cpp",),
        "triton": ("triton_kernels/block_sparse_attention.py",),
    },
    samples=SAMPLES,
    benchmarks=measured(4096),
    benchmarks_on_gpu=(*measured(16384, 16), *measured(16384, 16, 128, 128)),
    tiny=TINY,
    numerics=Numerics(
        fp32=dict.fromkeys(("y", "lse", "grad_q", "grad_k", "grad_v", "grad_sinks"), 2.0),
        terms=terms,
        # y was rounded, and enters all gradients of a query. Tensor cores
        # take weights that are rounded too, as eager's are, for y and grad_v.
        rounding={"y": 2.0, "grad_q": 3.0, "grad_k": 3.0, "grad_v": 2.0, "grad_sinks": 3.0},
    ),
    small=0,
    refuses=_refuses,
)
define(OP)
