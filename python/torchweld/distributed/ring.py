"""ring_attention: each process has a slice of the sequence, and keys and values travel.

A slice goes to the processes whose queries see something of it by the layout, and to no others.
What each slice contributes is merged by the log of its sum of exponentials. The backward fetches
the slices again, so that no process ever holds more than two.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from torchweld import checks
from torchweld.dispatch.call import call
from torchweld.dispatch.choice import choose
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
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | int | None = None,
) -> torch.Tensor:
    """block_sparse_attention of a sequence that is shared by the processes of a group, in order.

    It drops what one process would drop, if all draw the same seed.

    Args:
        q: this process's queries, [batch, heads, length / processes, head_dim].
        k: its keys, [batch, key heads, length / processes, head_dim].
        v: its values.
        layout: of the whole sequence. Slices are multiples of its block.
        group: the processes; None: all.
        scale: of the scores; None: 1 / sqrt(head_dim).
        causal: no query sees a later key.
        key_padding_mask: booleans [batch, length], of the whole sequence; True is ignored.
        softcap: not 0: scores become softcap * tanh(score / softcap).
        dropout_p: the probability of a weight to be dropped, where training is true.
        training: False drops nothing.
        seed: what to drop, the same in every process; None draws one from torch's generator.

    Returns:
        A tensor of q's shape and dtype.
    """
    name = "ring_attention"
    checks.dense(name, "q", q, _OP.dtypes)
    if q.ndim != 4 or k.ndim != 4 or q.shape[2] != k.shape[2]:
        came = f"of shapes {list(q.shape)} and {list(k.shape)}"
        raise ArgumentError(name, "q and k", came, "[batch, heads, a slice's length, head_dim]")
    group = dist.group.WORLD if group is None else group
    assert group is not None
    count, rank = dist.get_world_size(group), dist.get_rank(group)
    length = count * q.shape[2]
    if (layout.queries, layout.keys) != (length, length) or q.shape[2] % layout.block:
        came = f"of {layout.queries} x {layout.keys} tokens, block {layout.block}"
        accepted = f"one of {length} x {length}, whose block divides a slice of {q.shape[2]}"
        raise ArgumentError(name, "layout", came, accepted)
    p, seed = drawn(name, "q", q, dropout_p, training, seed)
    if checks.autocasts(q.device.type) and q.dtype != torch.float64:
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    ring = Ring(group, rank, *_divided(layout, causal, rank, count))
    how = _How(scale, key_padding_mask, softcap, p, seed)
    return _RingAttention.apply(q, k.contiguous(), v.contiguous(), ring, how)  # type: ignore[no-any-return]


class _How(NamedTuple):
    """The arguments that every slice's part has in common."""

    scale: float | None
    padding: torch.Tensor | None
    softcap: float
    p: float
    seed: torch.Tensor | None


@functools.lru_cache(maxsize=32)
def _divided(
    layout: BlockLayout, causal: bool, rank: int, count: int
) -> tuple[list[BlockLayout | None], list[bool]]:
    """This process's part for each one's keys, None if it sees none; and who sees its own."""
    layout = layout.causal() if causal else layout
    each = layout.queries // count
    kinds = layout.kinds().amax((0, 1))
    lines, columns = (size // count for size in kinds.shape)
    sees = kinds.view(count, lines, count, columns).amax((1, 3)).bool().tolist()
    mine = (rank * each, (rank + 1) * each)
    parts = [
        layout.part(mine, (source * each, (source + 1) * each)) if seen else None
        for source, seen in enumerate(sees[rank])
    ]
    return parts, [sees[other][rank] for other in range(count)]


class Ring(NamedTuple):
    """The processes, and which slices travel between them."""

    group: dist.ProcessGroup
    rank: int
    parts: list[BlockLayout | None]
    seen_by: list[bool]

    def slices(self, mine: torch.Tensor) -> Iterator[tuple[int, torch.Tensor | None]]:
        """Each source from this process back, with its slice where this process sees of it.

        All processes take the same steps; while one is taken, the next slice is on its way.
        """
        coming = self._fetch(1, mine)
        yield self.rank, mine if self.parts[self.rank] is not None else None
        for step in range(1, len(self.parts)):
            came, works = coming
            coming = self._fetch(step + 1, mine)
            for work in works:
                work.wait()
            yield (self.rank - step) % len(self.parts), came

    def _fetch(self, step: int, mine: torch.Tensor) -> tuple[torch.Tensor | None, list[Any]]:
        """Send this process's slice `step` places on, and receive the one from as far back."""
        count = len(self.parts)
        if step >= count:
            return None, []
        source, target = (self.rank - step) % count, (self.rank + step) % count
        came = None if self.parts[source] is None else torch.empty_like(mine)
        return came, self.exchange(mine if self.seen_by[target] else None, target, came, source)

    def exchange(
        self, sent: torch.Tensor | None, target: int, came: torch.Tensor | None, source: int
    ) -> list[Any]:
        """Begin to send and to receive, as far as there is something."""
        operations = []
        for operation, tensor, peer in ((dist.isend, sent, target), (dist.irecv, came, source)):
            if tensor is not None:
                operations.append(dist.P2POp(operation, tensor, group=self.group, group_peer=peer))
        return dist.batch_isend_irecv(operations) if operations else []


def _inputs(ring: Ring, source: int, how: _How, q: torch.Tensor, slices: torch.Tensor) -> Any:
    """The op's arguments for one slice of keys and values."""
    layout, (k, v) = ring.parts[source], slices
    assert layout is not None
    each, count = q.shape[2], len(ring.parts)
    sizes = (*q.shape[:2], count * each, q.shape[3])
    shard = Shard(sizes, (0, 0, ring.rank * each, source * each)) if how.p else None
    padding = None if how.padding is None else how.padding[:, source * each : (source + 1) * each]
    given = {"scale": how.scale, "key_padding_mask": padding, "softcap": how.softcap}
    dropout = {"dropout_p": how.p, "seed": how.seed, "shard": shard}
    return block_sparse._inputs(q, k, v, layout.to(q.device), **given, **dropout)  # type: ignore[arg-type]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, ring: Ring, how: _How) -> torch.Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        y = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device)
        with torch.autocast(q.device.type, enabled=False):
            for source, slices in ring.slices(torch.stack([k, v])):
                if slices is None:
                    continue
                one, its = call(_OP, *_inputs(ring, source, how, q, slices))
                both = torch.logaddexp(lse, its)
                y = y * _share(lse, both) + one * _share(its, both)
                lse = both
        y = y.to(q.dtype)
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.ring, ctx.how = ring, how
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Any) -> Any:
        q, k, v, y, lse = ctx.saved_tensors
        ring = ctx.ring
        grad_q = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        mine = torch.stack([k, v])
        total = torch.zeros(mine.shape, dtype=lse.dtype, device=q.device)
        grad_y = grad_y.contiguous()
        for source, slices in ring.slices(mine):
            sent = None
            if slices is not None:
                inputs = _inputs(ring, source, ctx.how, q, slices)
                to_q, *to_slices = _part_backward(grad_y, inputs, y, lse)
                grad_q += to_q
                sent = torch.stack(to_slices)
            if source == ring.rank:
                total += 0 if sent is None else sent
                continue
            user = (2 * ring.rank - source) % len(ring.parts)  # as far on as the source is back
            came = torch.empty_like(mine) if ring.seen_by[user] else None
            for work in ring.exchange(sent, source, came, user):
                work.wait()
            total += 0 if came is None else came
        grad_k, grad_v = total.to(k.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None


def _share(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """What part of the sum of exponentials is one slice's; none where no key is seen."""
    return torch.where(whole == -torch.inf, 0, torch.exp(part - whole)).unsqueeze(-1)


def _part_backward(grad_y: Any, inputs: Any, y: Any, lse: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of q and of a slice; a kernel takes the whole row's result and sum for its own."""
    backend = choose(_OP, inputs)
    if backend != EAGER:
        wanted = (True, True, True, False)
        kernel = _OP.kernels[backend]
        return kernel.backward(grad_y, None, *inputs, y, lse, *wanted)[:3]  # type: ignore[no-any-return]
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        one, its = _OP.reference(*leaves, *inputs[3:])
    share = _share(its.detach(), lse).to(y.dtype)
    of_sum = (share * grad_y * (one.detach() - y)).sum(-1).to(its.dtype)
    return torch.autograd.grad((one, its), leaves, (share * grad_y, of_sum))


class RingAttention(ParallelStyle):
    """BlockSparseAttention whose inputs are slices of the sequence."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        assert isinstance(module, BlockSparseAttention)
        module.forward = functools.partial(_attend, module, device_mesh)  # type: ignore[method-assign]
        return module


def _attend(
    module: BlockSparseAttention,
    mesh: DeviceMesh,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_padding_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    whole = q.new_empty(()).expand(mesh.size() * q.shape[2], 1)
    return ring_attention(
        *(q, k, v, module.layouts.of(whole, whole), mesh.get_group()),
        scale=module.scale,
        causal=module.causal,
        key_padding_mask=key_padding_mask,
        softcap=module.softcap,
        dropout_p=module.dropout,
        training=module.training,
    )
