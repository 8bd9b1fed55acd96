"""ring_attention: each process has a slice of the sequence, and keys and values travel.

A chunk is sent only to processes with queries that see some of it under the layout. Partial results
are merged using the log of their sums of exponentials. The backward fetches the chunks again, so
that no process ever holds more than two slices.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from torchweld import checks
from torchweld.dispatch.call import call
from torchweld.dispatch.choice import choose
from torchweld.distributed.styles import Style
from torchweld.errors import ArgumentError
from torchweld.nn import BlockSparseAttention
from torchweld.ops.attention import block_sparse
from torchweld.random import Shard, drawn
from torchweld.registry import EAGER
from torchweld.sparse import BlockLayout

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
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | int | None = None,
    shard: Shard | None = None,
    balanced: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """block_sparse_attention of a sequence sharded over the processes of a group.

    If all draw the same seed, dropout is that of a single process.

    Args:
        q: this process's queries, [batch, heads, length / processes, head_dim].
        k: its keys, [batch, key heads, length / processes, head_dim].
        v: its values.
        layout: the layout of the whole sequence, and of all heads; its block divides the chunks.
        group: the processes; None: all.
        scale: factor of the scores; None: 1 / sqrt(head_dim).
        causal: no query sees a later key.
        key_padding_mask: booleans [batch, length], of the whole sequence; True is ignored.
        alibi_slopes: [heads] or [batch, heads], float32; the slope times the distance of query and
            key in the whole sequence is subtracted from their score. Slopes get no gradient.
        sinks: [heads], for each head the learnt score of a key without a value. Each process gets
            the gradient from its own queries; the sum over the group is the whole gradient.
        softcap: if not 0, scores become softcap * tanh(score / softcap) before anything is added.
        dropout_p: the probability that a weight is dropped if training is true.
        training: False drops nothing.
        seed: what to drop, the same in every process; None draws one from torch's generator.
        shard: the place of the group's batch and heads in [batch, heads, length, head_dim], if
            other groups have the rest. Its last two offsets are 0.
        balanced: process i of p has chunks i and 2p-1-i of 2p, as `ring_slice` takes them, so that
            causal attention is equal work for all processes. False: slices in order.
        return_lse: also return the log of the sum of exponentials, which is differentiable.

    Returns:
        A tensor of q's shape and dtype; with `return_lse` also one of [batch, heads, queries].
    """
    name = "ring_attention"
    checks.dense(name, "q", q, _OP.dtypes)
    if q.ndim != 4 or k.ndim != 4 or q.shape[2] != k.shape[2]:
        came = f"of shapes {list(q.shape)} and {list(k.shape)}"
        raise ArgumentError(name, "q and k", came, "[batch, heads, a slice's length, head_dim]")
    if sinks is not None:
        checks.shaped(name, "sinks", sinks, [q.shape[1]], "[heads]")
    group = dist.group.WORLD if group is None else group
    assert group is not None
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    length, chunks = count * q.shape[2], 2 if balanced else 1
    if (layout.queries, layout.keys) != (length, length) or q.shape[2] % (chunks * layout.block):
        came = f"of {layout.queries} x {layout.keys} tokens, block {layout.block}"
        accepted = f"one of {length} x {length}, whose block divides {chunks} chunk(s) of a slice"
        raise ArgumentError(name, "layout", came, f"{accepted} of {q.shape[2]}")
    sizes = (*q.shape[:2], length, q.shape[3])
    shard = Shard(sizes, (0, 0, 0, 0)) if shard is None else shard
    _check_shard(shard, sizes, layout)
    p, seed = drawn(name, "q", q, dropout_p, training, seed)
    if checks.autocasts(q.device.type) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    batch, heads = ((at, at + n) for at, n in zip(shard.offsets[:2], sizes[:2], strict=True))
    layout = _of_heads(layout, batch, heads)
    ring = Ring(group, rank, *_divided(layout, causal, rank, count, balanced))
    how = _How(scale, key_padding_mask, alibi_slopes, softcap, p, seed, shard)
    y, lse = _RingAttention.apply(q, k, v, sinks, ring, how)
    return (y, lse) if return_lse else y  # type: ignore[no-any-return]


def ring_slice(
    x: torch.Tensor,
    dim: int = 1,
    group: dist.ProcessGroup | None = None,
    *,
    balanced: bool = False,
) -> torch.Tensor:
    """This process's slice of a whole sequence, as `ring_attention` takes it.

    `ring_slice(torch.arange(length), 0)` returns the positions of its tokens.

    Args:
        x: a tensor with the whole sequence.
        dim: the sequence's dimension.
        group: the processes; None: all.
        balanced: chunks i and 2p-1-i of 2p, not the i-th of p slices.
    """
    places = _places(dist.get_world_size(group), balanced)
    chunks = len(places) * len(places[0])
    if x.shape[dim] % chunks:
        came = f"of {x.shape[dim]} tokens"
        raise ArgumentError("ring_slice", "x", came, f"a multiple of {chunks} chunks")
    parts = x.chunk(chunks, dim)
    return torch.cat([parts[i] for i in places[dist.get_rank(group)]], dim)


def _check_shard(shard: Shard, sizes: Sequence[int], layout: BlockLayout) -> None:
    """Check that the shard contains these sizes, and that the layout is that of the whole."""
    came = f"of sizes {list(shard.sizes)} and offsets {list(shard.offsets)}"
    fits = len(shard.sizes) == len(shard.offsets) == 4 and min(shard.offsets) >= 0
    if fits:
        ends = [at + size for at, size in zip(shard.offsets, sizes, strict=True)]
        fits = all(end <= size for end, size in zip(ends, shard.sizes, strict=True))
    if not fits or [*shard.sizes[2:]] != [*sizes[2:]]:
        accepted = f"one that has {list(sizes)} in it, with all of the last two dimensions"
        raise ArgumentError("ring_attention", "shard", came, accepted)
    batch, heads = shard.sizes[:2]
    if layout.batch not in (1, batch) or layout.heads not in (1, heads):
        came = f"for a batch of {layout.batch} and {layout.heads} heads"
        accepted = f"one for {batch} or 1, and {heads} or 1"
        raise ArgumentError("ring_attention", "layout", came, accepted)


def _places(count: int, balanced: bool) -> list[tuple[int, ...]]:
    """The numbers of each process's chunks."""
    return [(rank, 2 * count - 1 - rank) if balanced else (rank,) for rank in range(count)]


class _How(NamedTuple):
    """The arguments common to all parts."""

    scale: float | None
    padding: torch.Tensor | None
    slopes: torch.Tensor | None
    softcap: float
    p: float
    seed: torch.Tensor | None
    shard: Shard


_Parts = dict[tuple[int, int], BlockLayout]
_of_heads = functools.lru_cache(maxsize=32)(BlockLayout.of_heads)


@functools.lru_cache(maxsize=32)
def _divided(
    layout: BlockLayout, causal: bool, rank: int, count: int, balanced: bool
) -> tuple[list[tuple[int, ...]], _Parts, list[list[int]], list[list[int]]]:
    """The places, the parts and the travelling chunks of a Ring."""
    layout = layout.causal() if causal else layout
    places = _places(count, balanced)
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

    def seen(by: int, source: int) -> list[int]:
        """Which chunks of one process are visible to another, at least in part."""
        return [i for i, at in enumerate(places[source]) if any(sees[q][at] for q in places[by])]

    others = range(count)
    return places, parts, [seen(other, rank) for other in others], [seen(rank, o) for o in others]


class Ring(NamedTuple):
    """The processes, and which chunks travel between them.

    Attributes:
        group: the processes.
        rank: this process's rank.
        places: the numbers of each process's chunks.
        parts: parts of the layout, keyed by the numbers of a local chunk of queries and of a chunk
            of keys.
        sent: for each process, which of this process's chunks it sees.
        fetched: for each process, which of its chunks this process sees.
    """

    group: dist.ProcessGroup
    rank: int
    places: list[tuple[int, ...]]
    parts: _Parts
    sent: list[list[int]]
    fetched: list[list[int]]

    @property
    def chunks(self) -> int:
        """How many chunks each process has."""
        return len(self.places[0])

    def slices(self, mine: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each source, going backwards from this process, with its chunks visible here.

        All processes take the same steps; the next chunks travel during a step.
        """
        coming = self._fetch(1, mine)
        yield self.rank, _some(mine, self.fetched[self.rank])
        for step in range(1, len(self.places)):
            came, works = coming
            coming = self._fetch(step + 1, mine)
            for work in works:
                work.wait()
            yield (self.rank - step) % len(self.places), came

    def _fetch(self, step: int, mine: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Send this process's chunks `step` ranks ahead, and receive from `step` ranks back."""
        count = len(self.places)
        if step >= count:
            return mine[:0], []
        source, target = (self.rank - step) % count, (self.rank + step) % count
        came = mine.new_empty((len(self.fetched[source]), *mine.shape[1:]))
        return came, self.exchange(_some(mine, self.sent[target]), target, came, source)

    def exchange(
        self, sent: torch.Tensor, target: int, came: torch.Tensor, source: int
    ) -> list[Any]:
        """Start sending and receiving, unless there are no chunks."""
        operations = []
        for operation, tensor, peer in ((dist.isend, sent, target), (dist.irecv, came, source)):
            if len(tensor):
                operations.append(dist.P2POp(operation, tensor, group=self.group, group_peer=peer))
        return dist.batch_isend_irecv(operations) if operations else []

    def pairs(self, source: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
        """Pairs to compute: indices of chunks of queries and of fetched ones, and their numbers."""
        for at, chunk in enumerate(self.fetched[source]):
            for i, mine in enumerate(self.places[self.rank]):
                numbers = (mine, self.places[source][chunk])
                if numbers in self.parts:
                    yield i, at, numbers


def _some(chunks: torch.Tensor, which: list[int]) -> torch.Tensor:
    return chunks if len(which) == len(chunks) else chunks[which]


def _keys_and_values(k: torch.Tensor, v: torch.Tensor, ring: Ring) -> torch.Tensor:
    """[chunks, 2, batch, key heads, tokens of a chunk, head_dim]."""
    return torch.stack([k, v]).unflatten(3, (ring.chunks, -1)).movedim(3, 0).contiguous()


def _inputs(
    ring: Ring, numbers: tuple[int, int], how: _How, q: torch.Tensor, slices: torch.Tensor
) -> Any:
    """The op's arguments for a chunk of queries, and one of keys and values."""
    k, v = slices
    each = q.shape[2]
    first_query, first_key = (number * each for number in numbers)
    padding = None if how.padding is None else how.padding[:, first_key : first_key + each]
    return block_sparse._inputs(
        *(q, k, v, ring.parts[numbers].to(q.device)),
        scale=how.scale,
        key_padding_mask=padding,
        alibi_slopes=how.slopes,
        softcap=how.softcap,
        dropout_p=how.p,
        seed=how.seed,
        shard=Shard(how.shard.sizes, (*how.shard.offsets[:2], first_query, first_key)),
    )


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, sinks: Any, ring: Ring, how: _How
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(q.dtype, torch.float32)
        queries = q.chunk(ring.chunks, 2)
        ys = [torch.zeros(part.shape, dtype=wide, device=q.device) for part in queries]
        # A sink has no value: it only starts the sum of exponentials.
        first = q.new_tensor(-torch.inf, dtype=wide) if sinks is None else sinks.to(wide)[:, None]
        lses = [first.expand(part.shape[:-1]) for part in queries]
        with torch.autocast(q.device.type, enabled=False):
            for source, slices in ring.slices(_keys_and_values(k, v, ring)):
                for i, at, numbers in ring.pairs(source):
                    one, its = call(_OP, *_inputs(ring, numbers, how, queries[i], slices[at]))
                    both = torch.logaddexp(lses[i], its)
                    ys[i] = ys[i] * _share(lses[i], both) + one * _share(its, both)
                    lses[i] = both
        y, lse = torch.cat(ys, 2).to(q.dtype), torch.cat(lses, 2)
        ctx.save_for_backward(q, k, v, sinks, y, lse)
        ctx.ring, ctx.how = ring, how
        return y, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Any, grad_lse: Any) -> Any:
        q, k, v, sinks, y, lse = ctx.saved_tensors
        ring = ctx.ring
        mine = _keys_and_values(k, v, ring)
        total = torch.zeros(mine.shape, dtype=lse.dtype, device=q.device)
        queries, saved = q.chunk(ring.chunks, 2), []
        for x in (grad_y, grad_lse, y, lse):
            saved.append([part.contiguous() for part in x.chunk(ring.chunks, 2)])
        grads = [torch.zeros(part.shape, dtype=lse.dtype, device=q.device) for part in queries]
        for source, slices in ring.slices(mine):
            made = torch.zeros(slices.shape, dtype=lse.dtype, device=q.device)
            for i, at, numbers in ring.pairs(source):
                inputs = _inputs(ring, numbers, ctx.how, queries[i], slices[at])
                to_q, *to_slices = _part_backward(inputs, *(parts[i] for parts in saved))
                grads[i] += to_q
                made[at] += torch.stack(to_slices)
            if source == ring.rank:
                total[ring.fetched[source]] += made
                continue
            user = (2 * ring.rank - source) % len(ring.places)  # as far ahead as the source is back
            came = mine.new_empty((len(ring.sent[user]), *mine.shape[1:]))
            for work in ring.exchange(made.to(k.dtype), source, came, user):
                work.wait()
            total[ring.sent[user]] += came
        grad_k, grad_v = total.movedim(0, 3).flatten(3, 4).to(k.dtype)
        grad_sinks = None
        if sinks is not None:
            weight = torch.exp(sinks.to(lse.dtype)[:, None] - lse)
            delta = (grad_y * y).sum(-1, dtype=lse.dtype) - grad_lse
            grad_sinks = -(weight * delta).sum((0, 2)).to(sinks.dtype)
        return torch.cat(grads, 2).to(q.dtype), grad_k, grad_v, grad_sinks, None, None


def _share(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The share of one part in the sum of exponentials; zero where no key is seen."""
    return torch.where(whole == -torch.inf, 0, torch.exp(part - whole)).unsqueeze(-1)


def _part_backward(
    inputs: Any, grad_y: Any, grad_lse: Any, y: Any, lse: Any
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k and v of a part; kernels need the result and the sum of whole rows."""
    backend = choose(_OP, inputs)
    if backend != EAGER:
        wanted = (True, True, True, False)
        kernel = _OP.kernels[backend]
        return kernel.backward(grad_y, grad_lse, *inputs, y, lse, *wanted)[:3]  # type: ignore[no-any-return]
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        one, its = _OP.reference(*leaves, *inputs[3:])
    share = _share(its.detach(), lse)
    of_sum = (share * grad_y * (one.detach() - y)).sum(-1) + share.squeeze(-1) * grad_lse
    to_one = (share * grad_y).to(one.dtype)
    return torch.autograd.grad((one, its), leaves, (to_one, of_sum.to(its.dtype)))


class RingAttention(Style):
    """BlockSparseAttention whose inputs are slices of the sequence.

    Args:
        heads: the mesh is of ring and tensor, and each device along the second has some heads.
    """

    def __init__(self, heads: bool = False) -> None:
        super().__init__()
        self.ring = heads

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        assert isinstance(module, BlockSparseAttention)
        if device_mesh.ndim != 1 + self.ring:
            came, accepted = f"of {device_mesh.ndim} dimensions", f"one of {1 + self.ring}"
            raise ArgumentError("RingAttention", "device_mesh", came, accepted)
        module.forward = functools.partial(_attend, module, device_mesh)  # type: ignore[method-assign]
        return module


def _attend(
    module: BlockSparseAttention,
    mesh: DeviceMesh,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    length = mesh.size(0) * q.shape[2]
    groups = mesh.size(1) if mesh.ndim > 1 else 1
    first = mesh.get_local_rank(1) * q.shape[1] if mesh.ndim > 1 else 0
    whole = q.new_empty(()).expand(length, 1)
    sizes = (q.shape[0], groups * q.shape[1], length, q.shape[3])
    y = ring_attention(
        *(q, k, v, module.layouts.of(whole, whole), mesh.get_group(0)),
        scale=module.scale,
        causal=module.causal,
        key_padding_mask=key_padding_mask,
        alibi_slopes=_heads_of(alibi_slopes, first, q.shape[1]),
        sinks=_heads_of(sinks, first, q.shape[1]),
        softcap=module.softcap,
        dropout_p=module.dropout,
        training=module.training,
        shard=Shard(sizes, (0, first, 0, 0)),
    )
    assert isinstance(y, torch.Tensor)
    return y


def _heads_of(x: torch.Tensor | None, first: int, count: int) -> torch.Tensor | None:
    """This device's heads of a replicated tensor; its gradient is the sum of the devices'."""
    if isinstance(x, DTensor):
        x = x.to_local(grad_placements=[Partial()] * x.device_mesh.ndim)
    return None if x is None else x[..., first : first + count]
