"""Intercept gradients that DistributedDataParallel has reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchweld.optim.offload._members import Member


class Reductions:
    """Whether DDP reduces the gradients, and whether a callback waits for its backward's end."""

    def __init__(self) -> None:
        self.are_awaited = self._is_queued = False

    def begin(self, ddp: Any, owner: Any) -> None:
        """Pass the gradients of this model to `owner`."""
        ddp.register_comm_hook((weakref.ref(owner), ddp.process_group), _reduce_and_send)
        self.are_awaited = True

    def await_end(self, members: Iterable[Member]) -> None:
        """After this backward, record the gradients that DDP has written."""
        if not self.are_awaited or self._is_queued:
            return
        self._is_queued = True

        def take() -> None:
            self._is_queued = False
            for m in members:
                m.take_reduced()

        engine = torch.autograd.Variable._execution_engine
        # DDP queues its own callback later than this one, but before any callback runs.
        engine.queue_callback(lambda: engine.queue_callback(take))


def _reduce_and_send(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
    """Reduce as DDP does, then pass the gradients to the owner."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    owner, group = state
    params, grads = bucket.parameters(), bucket.gradients()
    send: Callable[[Any], Any] = lambda future: _send(owner, params, grads, future)  # noqa: E731
    return allreduce_hook(group, bucket).then(send)


def _send(owner: Any, params: Any, grads: Any, future: Any) -> Any:
    offload = owner()
    if offload is not None:
        offload._reduced(params, grads)
    return future.value()
