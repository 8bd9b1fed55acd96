"""Data parallelism made of sends and receives: a parameter server and a ring.

Read both, and count their messages. For training, torch.distributed.all_reduce is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchweld.errors import ArgumentError


def ring_reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum over processes; return this process's part of the sum, flat and padded.

    In each of n - 1 rounds a process sends a part to the next process, which adds its own. In the
    end process i has part i + 1 of n.
    """
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    parts = [part.clone() for part in _split(x, count)]
    for turn in range(count - 1):
        outgoing, incoming = (rank - turn) % count, (rank - turn - 1) % count
        parts[incoming] += _pass_on(parts[outgoing], group)
    return parts[(rank + 1) % count]


def ring_all_gather(part: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Gather the parts that `ring_reduce_scatter` returned, in order."""
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    parts = {(rank + 1) % count: part}
    for turn in range(count - 1):
        part = _pass_on(part, group)
        parts[(rank - turn) % count] = part
    return torch.cat([parts[i] for i in range(count)])


def ring_all_reduce(x: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum over processes by a reduce-scatter and an all-gather.

    In each of the two, a process sends (n - 1) / n of x.
    """
    return ring_all_gather(ring_reduce_scatter(x, group), group)[: x.numel()].view(x.shape)


def server_step(
    parameters: Sequence[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Step by a parameter server, process 0: it averages all gradients and sends the parameters.

    Args:
        parameters: the parameters, equal in all processes, with the process's own gradients.
        optimizer: the server's optimizer of these parameters; None in all other processes.
        group: the processes; None: all.
    """
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    if (optimizer is None) == (rank == 0):
        actual = "None" if rank == 0 else "given"
        accepted = "one in process 0, the server, and None in others"
        raise ArgumentError("server_step", "optimizer", actual, accepted)
    if any(p.grad is None for p in parameters):
        raise ArgumentError("server_step", "parameters", "one without a gradient", "gradients")
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    with torch.no_grad():
        if rank > 0:
            dist.send(flat, group=group, group_dst=0)
            dist.recv(flat, group=group, group_src=0)
        else:
            received = torch.empty_like(flat)
            for other in range(1, count):
                dist.recv(received, group=group, group_src=other)
                flat += received
            sizes = [grad.numel() for grad in grads]
            for grad, mean in zip(grads, (flat / count).split(sizes), strict=True):
                grad.copy_(mean.view_as(grad))
            assert optimizer is not None
            optimizer.step()
            flat = torch.cat([p.detach().flatten() for p in parameters])
            for other in range(1, count):
                dist.send(flat, group=group, group_dst=other)
        sizes = [p.numel() for p in parameters]
        for p, value in zip(parameters, flat.split(sizes), strict=True):
            p.copy_(value.view_as(p))


def _split(x: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    """Split the elements into equal parts, the last one padded with zeros."""
    each = -(-x.numel() // count)
    flat = torch.nn.functional.pad(x.flatten(), (0, count * each - x.numel()))
    return flat.split(each) if each else [flat] * count


def _pass_on(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Send to the next process of the ring, and receive from the previous one."""
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    received = torch.empty_like(x)
    sending = dist.isend(x, group=group, group_dst=(rank + 1) % count)
    dist.recv(received, group=group, group_src=(rank - 1) % count)
    assert sending is not None
    sending.wait()
    return received
