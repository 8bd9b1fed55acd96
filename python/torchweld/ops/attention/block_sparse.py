"""block_sparse_attention: attention over only the blocks of a layout.

    y = dropout(softmax(softcap(scale * q k^T) + bias)) v, over the blocks of a layout

Read on in: python/torchweld/ops/attention/reference.py, csrc/core/block_sparse.h,
csrc/cpu/block_sparse.cpp, csrc/cpu/block_sparse_few.cpp,
triton_kernels/attention/block_sparse_attention.py, bench/cases/attention.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch.autograd import derive_from_reference
from torchweld.dispatch.call import decide_arranged
from torchweld.dispatch.dtensor import is_dtensor
from torchweld.dispatch.kernels import define
from torchweld.dispatch.warm.cache import short
from torchweld.errors import ArgumentError
from torchweld.ops.attention.reference import add_dims, attention, count_distances
from torchweld.ops.attention.samples import (
    NO_LISTS,
    STAND_IN,
    dividing,
    flops,
    has_long_lines,
    sized,
    take_sample,
)
from torchweld.random import Shard, draw_seed, split_shard
from torchweld.registry import Op, Rows
from torchweld.sparse import BlockBias, BlockLayout
from torchweld.sparse.lists import Lists, count_of, words_of


@short(shaped=BlockLayout, fixed={"q": (-1, -3), "k": (-1, -3)})
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
    bias: torch.Tensor | BlockBias | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | int | None = None,
    shard: Shard | None = None,
    return_lse: bool = False,
) -> Any:
    """softmax(q @ k.mT * scale) @ v over the keys that the layout lets each query see.

    A query that sees no key gives zeros, and zero gradients.

    Args:
        q: [batch, heads, queries, head_dim], of any strides; leading dimensions may be left out.
        k: [batch, key heads, keys, head_dim]; heads are a multiple of key heads, and adjacent
            heads share a key head.
        v: [batch, key heads, keys, value_dim]; any value_dim.
        layout: a torchweld.sparse.BlockLayout of these lengths, for all heads, each head or each
            key head. For packed sequences use `BlockLayout.documents`.
        scale: factor of the scores; None: 1 / sqrt(head_dim).
        causal: the last query sees every key, and each earlier query sees one key fewer.
        key_padding_mask: booleans [batch, keys]; True is ignored, as in nn.MultiheadAttention.
        alibi_slopes: [heads] or [batch, heads], float32; the slope times the distance of query and
            key is subtracted from their score. Slopes get no gradient.
        bias: numbers that are added to the scores, after the softcap. Either a tensor that
            broadcasts to [batch, heads, queries, keys], of q's dtype, which is read only in the
            blocks of the layout; or a `torchweld.sparse.BlockBias`, with a number per distance. The
            tensor, or the table of the BlockBias, gets a gradient.
        sinks: [heads], for each head the learnt score of a key without a value.
        softcap: if not 0, scores become softcap * tanh(score / softcap) before anything is added.
        dropout_p: the probability that a weight is dropped if training is true.
        training: False drops nothing.
        seed: the seed of dropout, see torchweld.random; None draws one from torch's generator. The
            same elements are dropped as by softmax_dropout of scores [batch, heads, queries, keys].
        shard: the place of q in a larger tensor, which decides dropout and distances. The last
            offset is not q's but the number of the first key, a multiple of 8. Pass the keys and
            values of q's heads, or of all heads.
        return_lse: also return the log of the sum of exponentials, which is differentiable.

    Returns:
        A tensor [batch, heads, queries, value_dim] of q's dtype; with `return_lse` also a float32
        tensor [batch, heads, queries], -inf where a query sees nothing.
    """
    settings = (scale, causal, key_padding_mask, alibi_slopes, bias, sinks, softcap)
    arranged = _prepare(q, k, v, layout, *settings, dropout_p, training, seed, shard)
    return decide_arranged(OP, *arranged, returned=("y", "lse") if return_lse else "y")


def _inputs(*given: Any, **named: Any) -> Sequence[Any]:
    """The op's arguments, made of the public function's."""
    arrange, raw, *rest = _prepare(*given, **named)
    return (*arrange(*raw.values()), *rest)


def _prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: BlockLayout,
    scale: float | None = None,
    causal: bool = False,
    key_padding_mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: torch.Tensor | BlockBias | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | int | None = None,
    shard: Shard | None = None,
    return_lse: bool = False,
) -> Sequence[Any]:
    """What makes the op's first arguments, the raw ones that it takes, and the op's others."""
    name = OP.name
    p, seed = draw_seed(name, "q", q, dropout_p, training, seed, "dropout_p")
    whole, offset = split_shard(shard)
    for argument, value in (("q", q), ("k", k)):
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            raise ArgumentError(name, argument, _describe(value), "a tensor [*, length, head_dim]")
    # A step of decoding takes 30 us, and each question to a tensor a part of one.
    shape, kind, dtype = q.shape, q.device.type, q.dtype
    if not isinstance(layout, BlockLayout):
        raise ArgumentError(name, "layout", _describe(layout), "a torchweld.sparse.BlockLayout")
    narrow = None
    if checks.autocasts(kind) and dtype != torch.float64:
        narrow = torch.get_autocast_dtype(kind)
    if scale is None:
        scale = shape[-1] ** -0.5 if shape[-1] else 1.0
    else:
        checks.factor(name, "scale", scale, dtype)
    checks.factor(name, "softcap", softcap, dtype)
    key_heads = _count_heads(k.shape)
    group = max(_count_heads(shape) // key_heads if key_heads else 1, 1)
    row = 0
    if isinstance(bias, BlockBias):
        first = offset[-2:] if offset and len(offset) > 1 else (0, 0)
        lengths = (t.shape[-2] if t.ndim > 1 else 1 for t in (q, k))
        bias, row = bias.by_distance(*lengths, *first)
    elif bias is not None and not isinstance(bias, torch.Tensor):
        accepted = "a tensor [batch, heads, queries, keys] or a torchweld.sparse.BlockBias"
        raise ArgumentError(OP.name, "bias", _describe(bias), accepted)
    if bias is not None and is_dtensor(bias) and not is_dtensor(q):
        raise ArgumentError(name, "bias", "a DTensor", "a plain tensor, as q is")
    arrange = partial(_arrange, narrow, group, row)
    given = {"q": q, "k": k, "v": v, "layout": layout, "sinks": sinks, "bias": bias}
    given |= {"key_padding_mask": key_padding_mask, "alibi_slopes": alibi_slopes}
    own = (row, layout.block, group, float(scale), causal, float(softcap))
    return (arrange, given, *own, p, seed, whole, offset)


def _arrange(
    narrow: torch.dtype | None,
    group: int,
    row: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: BlockLayout,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_padding_mask: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> Sequence[Any]:
    """The op's tensors; `narrow` is the dtype that autocast asks for, `row` of a BlockBias."""
    shape, key_shape = q.shape, k.shape
    lengths = (shape[-2] if len(shape) > 1 else 1, key_shape[-2] if len(key_shape) > 1 else 1)
    if lengths != (layout.queries, layout.keys):
        actual = f"of {layout.queries} x {layout.keys} tokens"
        accepted = f"one of the lengths of q and k, {lengths[0]} x {lengths[1]}"
        raise ArgumentError(OP.name, "layout", actual, accepted)
    if narrow is not None:
        q, k, v = q.to(narrow), k.to(narrow), v.to(narrow)
    if bias is not None and row == 0:
        bias = bias if narrow is None else bias.to(narrow)
        if bias.ndim > 1 and any(
            n == 1 != m for n, m in zip(bias.shape[-2:], lengths, strict=True)
        ):
            bias = bias.expand(*bias.shape[:-2], *lengths)
    lists: tuple[torch.Tensor | None, ...] = NO_LISTS
    if layout.lists is not None:
        key_heads = _count_heads(key_shape) if group > 1 else 0
        if group > 1 and layout.heads == key_heads and _count_heads(shape) == group * key_heads:
            layout = layout.repeat_for_query_heads(group)
        lists = layout.lists or NO_LISTS
    if len(shape) == 4 and not shape[0] == key_shape[0] == v.shape[0]:
        k, v = _expand_to_batch(k, shape[0]), _expand_to_batch(v, shape[0])
    if sinks is not None or key_padding_mask is not None or alibi_slopes is not None:
        sinks, key_padding_mask, alibi_slopes = _in_four_dims(
            shape, sinks, key_padding_mask, alibi_slopes
        )
    return (q, k, v, sinks, bias, *lists, key_padding_mask, alibi_slopes)


def _in_four_dims(shape: torch.Size, sinks: Any, padding: Any, slopes: Any) -> tuple[Any, ...]:
    """The three with as many dimensions as q; a dimension that does not matter has size 1."""
    if sinks is not None and sinks.ndim == 1:
        sinks = sinks[:, None, None]
    if padding is not None and padding.ndim == 2:
        padding = padding[:, None, None]
        if len(shape) == 4:
            padding = _expand_to_batch(padding, shape[0])
    if slopes is not None and slopes.ndim in (1, 2):
        slopes = slopes[..., None, None]
    return sinks, padding, slopes


def _expand_to_batch(x: Any, batch: int) -> Any:
    """Expand one sequence to the whole batch, as torch's attention does."""
    if isinstance(x, torch.Tensor) and x.ndim == 4 and x.shape[0] == 1 != batch:
        return x.expand(batch, -1, -1, -1)
    return x


def _describe(value: Any) -> str:
    return "a scalar" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _count_heads(shape: torch.Size) -> int:
    return shape[-3] if len(shape) > 2 else 1


def _reference(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    _check(*arguments)  # torch accepts more than kernels do
    args = OP.Args(*arguments)
    kind = args.q.device.type
    if not checks.autocasts(kind):  # torch has no autocast of meta tensors
        return attention(args)
    with torch.autocast(kind, enabled=False):  # already cast
        return attention(args)


def _backward_reference(*arguments: Any) -> tuple[Any, ...]:
    args = OP.backward_signature.Args(*arguments)
    grad_y = torch.zeros_like(args.y) if args.grad_y is None else args.grad_y
    grad_lse = torch.zeros_like(args.lse) if args.grad_lse is None else args.grad_lse
    return derive_from_reference(OP)(*args._replace(grad_y=grad_y, grad_lse=grad_lse))


def _check(*arguments: Any) -> None:
    name, args = OP.name, OP.Args(*arguments)
    q, k, v = args.q, args.k, args.v
    checks.dense(name, "q", q, OP.dtypes)
    if not 1 <= q.ndim <= 4:
        accepted = "[batch, heads, queries, head_dim]; batch and heads may be left out"
        raise ArgumentError(name, "q", f"of {q.ndim} dimensions", accepted)
    for argument, value in (("k", k), ("v", v)):
        checks.dense(name, argument, value, [q.dtype], "q")
        checks.like(name, argument, value, q, "q")
    if (
        k.ndim != q.ndim
        or k.shape[-1] != q.shape[-1]
        or add_dims(k).shape[0] != add_dims(q).shape[0]
    ):
        accepted = f"one that fits q, {list(q.shape)}: [batch, key heads, keys, head_dim]"
        raise ArgumentError(name, "k", f"of shape {list(k.shape)}", accepted)
    if v.ndim != k.ndim or v.shape[:-1] != k.shape[:-1]:
        accepted = f"one that fits k, {list(k.shape)}: any width after the same sizes"
        raise ArgumentError(name, "v", f"of shape {list(v.shape)}", accepted)
    if not isinstance(args.causal, int):  # kernels also take 0 and 1
        checks.flag(name, "causal", args.causal)
    shape = add_dims(q).shape
    _check_heads(shape, add_dims(k).shape[1], args.group, args.whole, args.offset)
    beside = [q.dtype] if q.dtype == torch.float32 else [q.dtype, torch.float32]
    if args.sinks is not None:
        how: dict[str, Any] = {"meaning": "[heads]: with two dimensions of one"}
        how["shape"] = [shape[1], 1, 1]
        checks.companion(name, "sinks", args.sinks, beside, q, "q", **how)
    if args.key_padding_mask is not None:
        padding = [shape[0], 1, 1, add_dims(k).shape[2]]
        how = {"shape": padding, "meaning": "[batch, keys]: with two dimensions of one"}
        mask = args.key_padding_mask
        checks.companion(name, "key_padding_mask", mask, [torch.bool], q, "q", **how)
    if (slopes := args.alibi_slopes) is not None:
        batch = [shape[0]] if slopes.ndim == 4 else []
        how = {"meaning": "[heads] or [batch, heads]: with two dimensions of one"}
        how["shape"] = [*batch, shape[1], 1, 1]
        checks.companion(name, "alibi_slopes", slopes, beside, q, "q", **how)
    if args.bias is not None:
        _check_bias(q, k, args.bias, args.bias_row)
    _check_shard(q, args.seed, args.whole, args.offset)
    if args.rows is not None:
        _check_lists(args)


def _check_bias(q: Any, k: Any, bias: Any, row: int) -> None:
    name, shape, keys = OP.name, add_dims(q).shape, add_dims(k).shape[2]
    narrow = row > 0 and q.dtype != torch.float32
    checks.dense(name, "bias", bias, [q.dtype, torch.float32] if narrow else [q.dtype], "q")
    checks.like(name, "bias", bias, q, "q")
    if not 2 <= bias.ndim <= q.ndim and not (row and bias.ndim == 3):
        accepted = "[batch, heads, queries, keys]; no more dimensions than q"
        raise ArgumentError(name, "bias", f"of {bias.ndim} dimensions", accepted)
    batches: tuple[int, ...] = (1,)
    if row:
        last = [1, count_distances(shape[2], keys, row)]
        accepted = f"of a table for {shape[1]} heads or one"
    else:
        last, batches = [shape[2], keys], (1, shape[0])
        accepted = f"one that broadcasts to {[*shape[:3], keys]}"
    batch, heads, *rest = add_dims(bias).shape
    if rest != last or batch not in batches or heads not in (1, shape[1]):
        raise ArgumentError(name, "bias", f"of shape {list(bias.shape)}", accepted)
    if row and row < keys < shape[2]:
        actual = f"on a plane, with {shape[2]} queries and {keys} keys"
        raise ArgumentError(name, "bias", actual, "no more queries than keys")


def _check_shard(q: Any, seed: Any, whole: Any, offset: Any) -> None:
    *place, first_key = offset or [0]
    checks.dropout(OP.name, "q", q, seed, whole, [*place, 0] if offset else offset)
    if whole and whole[-1] != q.shape[-1]:
        accepted = f"sizes that end in {q.shape[-1]}, as q's do"
        raise ArgumentError(OP.name, "shard", f"of sizes {list(whole)}", accepted)
    if first_key < 0 or first_key % 8:
        accepted = "offsets that end in a multiple of 8, the number of the first key"
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


def _check_lists(args: Any) -> None:
    name, shape, block = OP.name, add_dims(args.q).shape, args.block
    count = [count_of(n, block) for n in (shape[2], add_dims(args.k).shape[2])]
    for field in Lists._fields:
        value = getattr(args, field)
        checks.dense(name, "layout", value, [torch.int32])
        checks.like(name, "layout", value, args.q, "q")
    for lines, n in ((args.rows, count[0]), (args.columns, count[1])):
        fits = (
            lines.ndim == 4 and lines.shape[0] in (1, shape[0]) and lines.shape[1] in (1, shape[1])
        )
        if not fits or [*lines.shape[2:]] != [n, 4]:
            actual = f"one of {list(lines.shape[:3])}, batch, heads and blocks"
            accepted = f"one of {shape[0]} or 1, {shape[1]} or 1, and {n}"
            raise ArgumentError(name, "layout", actual, accepted)
    for entries in (args.row_entries, args.column_entries):
        checks.shaped(name, "layout", entries, [entries.shape[0], 2], "entries [blocks, 2]")
    bits = [args.masks.shape[0], block * words_of(block)]
    checks.shaped(name, "layout", args.masks, bits, "masks [masks, words]")


def _refuses(backend: str, arguments: Mapping[str, Any]) -> str | None:
    if backend == "triton":
        for name in ("q", "v"):
            if arguments[name].shape[-1] > 256:
                return f"heads of {arguments[name].shape[-1]} are wider than 256"
    return None


def _fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    y = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return y, q.new_empty(q.shape[:-1], dtype=kind)


_SHARED = (
    "Tensor? sinks, Tensor? bias, Tensor? rows, Tensor? row_entries, Tensor? columns,"
    " Tensor? column_entries, Tensor? masks, Tensor? key_padding_mask, Tensor? alibi_slopes,"
    " SymInt bias_row, int block, int group, float scale, bool causal, float softcap, float p,"
    " Tensor? seed, SymInt[]? whole, SymInt[]? offset"
)

OP = Op(
    name="block_sparse_attention",
    forward=f"(Tensor q, Tensor k, Tensor v, {_SHARED}) -> (Tensor y, Tensor lse)",
    backward="(Tensor? grad_y, Tensor? grad_lse, Tensor q, Tensor k, Tensor v,"
    f" {_SHARED}, Tensor y, Tensor lse, bool need_q, bool need_k, bool need_v, bool need_sinks,"
    " bool need_bias)"
    " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_sinks, Tensor grad_bias)",
    inputs=_inputs,
    reference=_reference,
    backward_reference=_backward_reference,
    check=_check,
    fake=_fake,
    sharding=Rows(lambda q, *_: min(q.ndim, 2)),  # batch and heads
    sized=sized,
    sample=take_sample,
    regime=has_long_lines,
    trial=dividing,
    arguments_while_compiling=STAND_IN,
    flops=flops,
    sources={
        "cpu": ("csrc/cpu/block_sparse.cpp", "csrc/cpu/block_sparse_few.cpp"),
        "triton": ("triton_kernels/attention/block_sparse_attention.py",),
    },
    refuses=_refuses,
    visible=False,
)
define(OP)
