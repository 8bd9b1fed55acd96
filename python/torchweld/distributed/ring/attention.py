"""ring_attention: each process has a slice of the sequence; processes exchange keys and values.

A chunk is sent only to processes with queries that see some of it under the layout. Partial results
are merged using the log of their sums of exponentials. The backward pass fetches the chunks
again, so that no process ever holds more than two slices.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchweld import checks, state
from torchweld.dispatch.call import call
from torchweld.dispatch.choice import choose
from torchweld.errors import ArgumentError
from torchweld.ops.attention import block_sparse
from torchweld.random import Shard, draw_seed
from torchweld.registry import EAGER
from torchweld.sparse import BlockBias, BlockLayout

_OP = block_sparse.OP


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: BlockLayout,
    group: dist.ProcessGroup | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_padding_mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    bias: BlockBias | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | int | None = None,
    shard: Shard | None = None,
    balanced: bool = False,
    return_lse: bool = False,
) -> Any:
    """Compute block_sparse_attention of a sequence that is sharded over the processes of a group.

    If all processes use the same seed, they drop the same elements as a single process.

    Args:
        q: this process's queries, [batch, heads, length / processes, head_dim].
        k: this process's keys, [batch, key heads, length / processes, head_dim].
        v: this process's values, [batch, key heads, length / processes, value_dim].
        layout: the layout of the whole sequence, of all heads, each head or each key head; its
            block divides the chunks.
        group: the processes; None: all.
        scale: factor of the scores; None: 1 / sqrt(head_dim).
        causal: whether queries see no later keys.
        key_padding_mask: booleans [batch, length] for the whole sequence; True ignores the key.
        alibi_slopes: [heads] or [batch, heads], float32; the slope times the distance of query and
            key in the whole sequence is subtracted from their score. Slopes get no gradient.
        bias: a `torchweld.sparse.BlockBias` with distances on a line. Each process gets the
            gradient of the table from its own queries, as for sinks.
        sinks: [heads], for each head the learnt score of a key without a value. Each process gets
            the gradient from its own queries; the sum over the group is the whole gradient.
        softcap: if not 0, scores become softcap * tanh(score / softcap) before anything is added.
        dropout_p: the probability that a weight is dropped if training is true.
        training: False drops nothing.
        seed: the seed of dropout, the same in every process; None draws one from torch's generator.
        shard: the place of the group's batch and heads in [batch, heads, length, head_dim], if
            other groups have the rest. Its last two offsets are 0.
        balanced: process i of p has chunks i and 2p-1-i of 2p, as `ring_slice` takes them, so that
            causal attention is equal work for all processes. False: slices in order.
        return_lse: also return the log of the sum of exponentials, which is differentiable.

    Returns:
        A tensor [batch, heads, length / processes, value_dim] of q's dtype; with `return_lse` also
        one of [batch, heads, length / processes].
    """
    name = "ring_attention"
    checks.dense(name, "q", q, _OP.dtypes)
    if q.ndim != 4 or k.ndim != 4 or q.shape[2] != k.shape[2]:
        actual = f"of shapes {list(q.shape)} and {list(k.shape)}"
        raise ArgumentError(name, "q and k", actual, "[batch, heads, a slice's length, head_dim]")
    if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        accepted = f"{[*k.shape[:3]]} and any width, as k"
        raise ArgumentError(name, "v", f"of shape {list(v.shape)}", accepted)
    _check_bias(bias, q.shape[1])
    if sinks is not None:
        checks.shaped(name, "sinks", sinks, [q.shape[1]], "[heads]")
    group = dist.group.WORLD if group is None else group
    assert group is not None
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    length, chunks = count * q.shape[2], 2 if balanced else 1
    if (layout.queries, layout.keys) != (length, length) or q.shape[2] % (chunks * layout.block):
        actual = f"of {layout.queries} x {layout.keys} tokens, block {layout.block}"
        accepted = f"one of {length} x {length}, whose block divides {chunks} chunk(s) of a slice"
        raise ArgumentError(name, "layout", actual, f"{accepted} of {q.shape[2]}")
    if key_padding_mask is not None:  # of a slice, it would fail on some processes only
        checks.shaped(
            name, "key_padding_mask", key_padding_mask, [q.shape[0], length], "[batch, length]"
        )
    sizes = (*q.shape[:2], length, q.shape[3])
    shard = Shard(sizes, (0, 0, 0, 0)) if shard is None else shard
    shared = q.shape[1] // max(k.shape[1], 1)
    if layout.heads * shared == shard.sizes[1]:
        layout = layout.repeat_for_query_heads(shared)
    _check_shard(shard, sizes, layout)
    p, seed = draw_seed(name, "q", q, dropout_p, training, seed, "dropout_p")
    seed = None if seed is None else seed.to(q.device)  # once, and not at each step of the ring
    if checks.autocasts(q.device.type) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    batch, heads = ((at, at + n) for at, n in zip(shard.offsets[:2], sizes[:2], strict=True))
    layout = _slice_heads(layout, batch, heads)
    ring = Ring(group, rank, *_divide_layout(layout, causal, rank, count, balanced))
    options = _RingOptions(scale, key_padding_mask, alibi_slopes, bias, softcap, p, seed, shard)
    table = None if bias is None else bias.table
    y, lse = _RingAttention.apply(q, k, v, sinks, table, ring, options)
    return (y, lse) if return_lse else y


def ring_slice(
    x: torch.Tensor,
    dim: int = 1,
    group: dist.ProcessGroup | None = None,
    *,
    balanced: bool = False,
) -> torch.Tensor:
    """Take this process's slice of a whole sequence, as `ring_attention` expects it.

    `ring_slice(torch.arange(length), 0)` returns the positions of its tokens.

    Args:
        x: a tensor with the whole sequence.
        dim: the sequence's dimension.
        group: the processes; None: all.
        balanced: take chunks i and 2p-1-i of 2p, not the i-th of p slices.
    """
    is_int = isinstance(dim, checks.INTEGER) and not isinstance(dim, bool)
    is_dim = is_int and -x.ndim <= dim < x.ndim
    checks.fits("ring_slice", "dim", dim, is_dim, f"a dimension of x, which has {x.ndim}")
    places = _assign_chunks(dist.get_world_size(group), balanced)
    chunks = len(places) * len(places[0])
    if x.shape[dim] % chunks:
        actual = f"of {x.shape[dim]} tokens"
        raise ArgumentError("ring_slice", "x", actual, f"a multiple of {chunks} chunks")
    parts = x.chunk(chunks, dim)
    return torch.cat([parts[i] for i in places[dist.get_rank(group)]], dim)


def _check_bias(bias: Any, heads: int) -> None:
    name = "ring_attention"
    accepted = "None or a torchweld.sparse.BlockBias with distances on a line"
    if bias is not None and not isinstance(bias, BlockBias):
        actual = f"a {type(bias).__name__}"
        raise ArgumentError(name, "bias", actual, f"{accepted}: no process has all scores")
    if bias is not None and bias.bucket_of_distance.ndim != 1:
        raise ArgumentError(name, "bias", "one with distances on a plane", accepted)
    if bias is not None and bias.table.shape[0] not in (1, heads):
        actual = f"a table for {bias.table.shape[0]} heads"
        raise ArgumentError(name, "bias", actual, f"one for {heads} heads or one")


def _check_shard(shard: Shard, sizes: Sequence[int], layout: BlockLayout) -> None:
    """Check that the shard contains these sizes, and that the layout covers the whole tensor."""
    actual = f"of sizes {list(shard.sizes)} and offsets {list(shard.offsets)}"
    fits = len(shard.sizes) == len(shard.offsets) == 4 and min(shard.offsets) >= 0
    if fits:
        ends = [at + size for at, size in zip(shard.offsets, sizes, strict=True)]
        fits = all(end <= size for end, size in zip(ends, shard.sizes, strict=True))
    if not fits or [*shard.sizes[2:]] != [*sizes[2:]]:
        accepted = f"one that contains {list(sizes)}, with all of the last two dimensions"
        raise ArgumentError("ring_attention", "shard", actual, accepted)
    batch, heads = shard.sizes[:2]
    if layout.batch not in (1, batch) or layout.heads not in (1, heads):
        actual = f"for a batch of {layout.batch} and {layout.heads} heads"
        accepted = f"one for {batch} or 1, and {heads} or 1"
        raise ArgumentError("ring_attention", "layout", actual, accepted)


def _assign_chunks(count: int, balanced: bool) -> list[tuple[int, ...]]:
    """Return the numbers of each process's chunks."""
    return [(rank, 2 * count - 1 - rank) if balanced else (rank,) for rank in range(count)]


class _RingOptions(NamedTuple):
    """The arguments that all parts share."""

    scale: float | None
    padding: torch.Tensor | None
    slopes: torch.Tensor | None
    bias: BlockBias | None
    softcap: float
    p: float
    seed: torch.Tensor | None
    shard: Shard


_Parts = dict[tuple[int, int], BlockLayout]
_slice_heads = functools.lru_cache(maxsize=32)(BlockLayout.of_heads)


@functools.lru_cache(maxsize=32)
def _divide_layout(
    layout: BlockLayout, causal: bool, rank: int, count: int, balanced: bool
) -> tuple[list[tuple[int, ...]], _Parts, list[list[int]], list[list[int]]]:
    """Return the places, the parts, and the sent and fetched chunks of a Ring."""
    layout = layout.causal() if causal else layout
    places = _assign_chunks(count, balanced)
    chunks = count * len(places[0])
    each = layout.queries // chunks
    kinds = layout.kinds().amax((0, 1))
    lines, columns = (size // chunks for size in kinds.shape)
    sees = kinds.view(chunks, lines, chunks, columns).amax((1, 3)).bool().tolist()
    spans = [(i * each, (i + 1) * each) for i in range(chunks)]
    parts = {
        (mine, other): layout.part(spans[mine], spans[other])
        for mine in places[rank]
        for other in range(chunks)
        if sees[mine][other]
    }

    def list_seen(by: int, source: int) -> list[int]:
        """List the chunks of one process that another sees at least in part."""
        return [i for i, at in enumerate(places[source]) if any(sees[q][at] for q in places[by])]

    others = range(count)
    return (
        places,
        parts,
        [list_seen(other, rank) for other in others],
        [list_seen(rank, o) for o in others],
    )


class Ring(NamedTuple):
    """The processes, and the chunks that they exchange.

    Attributes:
        group: the processes.
        rank: this process's rank.
        places: the numbers of each process's chunks.
        parts: parts of the layout, keyed by the numbers of a local chunk of queries and of a chunk
            of keys.
        sent: for each process, the chunks of this process that it sees.
        fetched: for each process, its chunks that this process sees.
    """

    group: dist.ProcessGroup
    rank: int
    places: list[tuple[int, ...]]
    parts: _Parts
    sent: list[list[int]]
    fetched: list[list[int]]

    @property
    def chunks(self) -> int:
        """The number of chunks of each process."""
        return len(self.places[0])

    def slices(self, mine: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each source, going backwards from this process, with its chunks visible here.

        All processes take the same steps, and fetch the next chunks during a step.
        """
        coming = self._fetch(1, mine)
        yield self.rank, _select_chunks(mine, self.fetched[self.rank])
        for step in range(1, len(self.places)):
            received, works = coming
            coming = self._fetch(step + 1, mine)
            for work in works:
                work.wait()
            yield (self.rank - step) % len(self.places), received

    def _fetch(self, step: int, mine: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Send this process's chunks `step` ranks ahead, and receive from `step` ranks back."""
        count = len(self.places)
        if step >= count:
            return mine[:0], []
        source, target = (self.rank - step) % count, (self.rank + step) % count
        received = mine.new_empty((len(self.fetched[source]), *mine.shape[1:]))
        return received, self.exchange(
            _select_chunks(mine, self.sent[target]), target, received, source
        )

    def exchange(
        self, sent: torch.Tensor, target: int, received: torch.Tensor, source: int
    ) -> list[Any]:
        """Start sending and receiving, unless there are no chunks."""
        operations = []
        for operation, tensor, peer in ((dist.isend, sent, target), (dist.irecv, received, source)):
            if len(tensor):
                operations.append(dist.P2POp(operation, tensor, group=self.group, group_peer=peer))
        return dist.batch_isend_irecv(operations) if operations else []

    def pairs(self, source: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """Yield pairs to compute: indices of query chunks and fetched chunks, and their numbers."""
        for at, chunk in enumerate(self.fetched[source]):
            for i, mine in enumerate(self.places[self.rank]):
                numbers = (mine, self.places[source][chunk])
                if numbers in self.parts:
                    yield i, at, numbers


def _select_chunks(chunks: torch.Tensor, which: list[int]) -> torch.Tensor:
    return chunks if len(which) == len(chunks) else chunks[which]


class _Chunks(NamedTuple):
    """Joins the keys and values of chunks in one tensor, so that one message has both.

    Attributes:
        shapes: the shapes of a chunk's keys and of its values, [batch, key heads, tokens, width].
    """

    shapes: tuple[torch.Size, torch.Size]

    @classmethod
    def of(cls, k: torch.Tensor, v: torch.Tensor, ring: Ring) -> _Chunks:
        """Describe the chunks of a slice."""
        return cls((k.chunk(ring.chunks, 2)[0].shape, v.chunk(ring.chunks, 2)[0].shape))

    def join(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Join a slice's keys and values to [chunks, elements of a chunk's keys and values]."""
        tokens = self.shapes[0][2]
        parts = [x.unflatten(2, (-1, tokens)).movedim(2, 0).flatten(1) for x in (k, v)]
        return torch.cat(parts, 1)

    def split(self, joined: torch.Tensor) -> list[torch.Tensor]:
        """Split a joined chunk into its keys and values."""
        parts = joined.split([shape.numel() for shape in self.shapes], -1)
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def slices(self, joined: torch.Tensor) -> list[torch.Tensor]:
        """Assemble the keys and values of a slice from its joined chunks."""
        chunks = zip(*[self.split(chunk) for chunk in joined], strict=True)
        return [torch.cat(parts, 2) for parts in chunks]


def _make_inputs(
    ring: Ring,
    numbers: tuple[int, int],
    options: _RingOptions,
    q: torch.Tensor,
    keys_and_values: Sequence[torch.Tensor],
) -> Any:
    """Make the op's arguments for a chunk of queries and a chunk of keys and values."""
    k, v = keys_and_values
    each = q.shape[2]
    first_query, first_key = (number * each for number in numbers)
    padding = None if options.padding is None else options.padding[:, first_key : first_key + each]
    return block_sparse._inputs(
        *(q, k, v, ring.parts[numbers].to(q.device)),
        scale=options.scale,
        key_padding_mask=padding,
        alibi_slopes=options.slopes,
        bias=options.bias,
        softcap=options.softcap,
        dropout_p=options.p,
        seed=options.seed,
        shard=Shard(options.shard.sizes, (*options.shard.offsets[:2], first_query, first_key)),
    )


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, sinks: Any, table: Any, ring: Ring, options: _RingOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        queries, chunks = q.chunk(ring.chunks, 2), _Chunks.of(k, v, ring)
        ys = [q.new_zeros((*part.shape[:3], v.shape[3]), dtype=wide) for part in queries]
        # A sink has no value: it only starts the sum of exponentials.
        first = q.new_tensor(-torch.inf, dtype=wide) if sinks is None else sinks.to(wide)[:, None]
        lses = [first.expand(part.shape[:-1]) for part in queries]
        with torch.autocast(q.device.type, enabled=False):
            for source, slices in ring.slices(chunks.join(k, v)):
                for i, at, numbers in ring.pairs(source):
                    part = chunks.split(slices[at])
                    part_y, part_lse = call(
                        _OP, *_make_inputs(ring, numbers, options, queries[i], part)
                    )
                    both = torch.logaddexp(lses[i], part_lse)
                    old, new = (_compute_share(x, both) for x in (lses[i], part_lse))
                    ys[i] = ys[i] * old + part_y * new
                    lses[i] = both
        y, lse = torch.cat(ys, 2).to(q.dtype), torch.cat(lses, 2)
        ctx.save_for_backward(q, k, v, sinks, table, y, lse)
        ctx.ring, ctx.options = ring, options
        return y, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Any, grad_lse: Any) -> Any:
        if state.has_tangents((grad_y, grad_lse)):
            raise RuntimeError(
                "the gradient of attention along a ring has a tangent, and its backward pass knows"
                " no forward-mode AD: differentiate the attention of one device"
            )
        q, k, v, sinks, _, y, lse = ctx.saved_tensors
        ring = ctx.ring
        chunks = _Chunks.of(k, v, ring)
        mine = chunks.join(k, v)
        biases = _TableGradient(ctx.options.bias if ctx.needs_input_grad[4] else None)
        total = torch.zeros(mine.shape, dtype=lse.dtype, device=q.device)
        queries, saved = q.chunk(ring.chunks, 2), []
        for x in (grad_y, grad_lse, y, lse):
            saved.append([part.contiguous() for part in x.chunk(ring.chunks, 2)])
        grads = [torch.zeros(part.shape, dtype=lse.dtype, device=q.device) for part in queries]
        for source, slices in ring.slices(mine):
            chunk_grads = torch.zeros(slices.shape, dtype=lse.dtype, device=q.device)
            for i, at, numbers in ring.pairs(source):
                part = chunks.split(slices[at])
                inputs = _make_inputs(ring, numbers, ctx.options, queries[i], part)
                rows = [parts[i] for parts in saved]
                (to_q, *to_part), to_bias = _differentiate_part(inputs, rows, biases.wanted)
                grads[i] += to_q
                for sums, grad in zip(chunks.split(chunk_grads[at]), to_part, strict=True):
                    sums += grad
                biases.add(to_bias, *(number * queries[i].shape[2] for number in numbers))
            if source == ring.rank:
                total[ring.fetched[source]] += chunk_grads
                continue
            # The user is as many ranks ahead as the source is behind.
            user = (2 * ring.rank - source) % len(ring.places)
            received = mine.new_empty((len(ring.sent[user]), *mine.shape[1:]))
            for work in ring.exchange(chunk_grads.to(k.dtype), source, received, user):
                work.wait()
            total[ring.sent[user]] += received
        grad_k, grad_v = (grad.to(k.dtype) for grad in chunks.slices(total))
        grad_sinks = None
        if sinks is not None:
            weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
            delta = (grad_y * y).sum(-1, dtype=lse.dtype) - grad_lse
            grad_sinks = -(weight * delta).sum((0, 2)).to(sinks.dtype)
        grad_q = torch.cat(grads, 2).to(q.dtype)
        return grad_q, grad_k, grad_v, grad_sinks, biases.total, None, None


class _TableGradient:
    """The gradient of a bias's table, added up over parts."""

    def __init__(self, bias: BlockBias | None) -> None:
        self.bias, self.wanted = bias, bias is not None
        self.total: Any = None if bias is None else torch.zeros_like(bias.table)

    def add(self, grad: torch.Tensor | None, first_query: int, first_key: int) -> None:
        """Add a part's gradient by distance."""
        if self.bias is None or grad is None:
            return
        length = (grad.shape[-1] + 1) // 2
        table = self.bias.table.detach().requires_grad_()
        with torch.enable_grad():
            values, _ = self.bias.with_table(table).by_distance(
                length, length, first_query, first_key
            )
        self.total += torch.autograd.grad(values, table, grad)[0]


def _compute_share(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Compute a part's share of the sum of exponentials; zero where no key is visible."""
    return torch.where(whole == -torch.inf, 0, torch.exp(part - whole)).unsqueeze(-1)


def _differentiate_part(
    inputs: Any, rows: Sequence[torch.Tensor], bias: bool
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Compute a part's gradients of q, k and v, and of the bias if it is wanted.

    `rows` are grad_y, grad_lse, y and lse of whole rows.
    """
    grad_y, grad_lse, y, lse = rows
    backend = choose(_OP, inputs)
    if backend != EAGER:
        needs_grad = (True, True, True, False, bias)
        kernel = _OP.kernels[backend]
        grads = kernel.backward(grad_y, grad_lse, *inputs, y, lse, *needs_grad)
        return grads[:3], grads[4] if bias else None
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (*inputs[:3], *inputs[4:5][: int(bias)])]
        of_bias = leaves[3] if bias else inputs[4]
        part_y, part_lse = _OP.reference(*leaves[:3], inputs[3], of_bias, *inputs[5:])
    share = _compute_share(part_lse.detach(), lse)
    to_lse = (share * grad_y * (part_y.detach() - y)).sum(-1) + share.squeeze(-1) * grad_lse
    to_y = (share * grad_y).to(part_y.dtype)
    grads = torch.autograd.grad((part_y, part_lse), leaves, (to_y, to_lse.to(part_lse.dtype)))
    return grads[:3], grads[3] if bias else None
