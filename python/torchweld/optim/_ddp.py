"""Communication hooks of DistributedDataParallel (DDP), for Offload and the 1-bit optimizers."""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torchweld.errors import ArgumentError


def leave_gradients(function: str, ddp: torch.nn.Module) -> None:
    """Stop DDP from averaging gradients."""
    if not isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
        accepted = "a torch.nn.parallel.DistributedDataParallel"
        raise ArgumentError(function, "ddp", f"a {type(ddp).__name__}", accepted)

    # The hook is defined here because a torch without torch.distributed lacks GradBucket. DDP
    # compares the annotations with its own classes, so they must not be strings.
    def leave(
        state: object, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(None, leave)


def check_attached(
    function: str, params: Sequence[torch.Tensor], attached: Sequence["weakref.ref[Any]"]
) -> None:
    """Check that no other DDP averages the gradients of these parameters.

    A parameter has no reference to its DDP, so this searches all objects, once.
    """
    ours, known = set(map(id, params)), {id(ref()) for ref in attached}
    wrapper = torch.nn.parallel.DistributedDataParallel
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if wrapper in kind.__mro__}
    for candidate in objects:
        if type(candidate) not in kinds or id(candidate) in known:
            continue
        if any(id(p) in ours for p in candidate.parameters()):
            actual = "in a DistributedDataParallel, which averages gradients too"
            raise ArgumentError(function, "params", actual, "one that attach(ddp) was called with")


class Reductions:
    """Passes the gradients that DDP has reduced to Offload."""

    def __init__(self) -> None:
        # Whether DDP passes gradients, and whether a callback is queued for this backward pass.
        self.are_awaited = self._is_queued = False

    def begin(self, ddp: Any, owner: Any) -> None:
        """Pass the gradients of this model to `owner`."""
        ddp.register_comm_hook((weakref.ref(owner), ddp.process_group), _reduce_and_send)
        self.are_awaited = True

    def await_end(self, members: Iterable[Any]) -> None:
        """After this backward pass, record the gradients that DDP has written."""
        if not self.are_awaited or self._is_queued:
            return
        self._is_queued = True

        def take() -> None:
            self._is_queued = False
            for m in members:
                m.take_reduced()

        engine = torch.autograd.Variable._execution_engine
        # DDP queues its callback after this call, but before any callback runs. So a callback that
        # this one queues runs after DDP's.
        engine.queue_callback(lambda: engine.queue_callback(take))


def _reduce_and_send(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations
    """Reduce a bucket as DDP does, then pass its gradients to the owner."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    owner, group = state
    params, grads = bucket.parameters(), bucket.gradients()
    send: Callable[[Any], Any] = lambda future: _send(owner, params, grads, future)  # noqa: E731
    return allreduce_hook(group, bucket).then(send)


def _send(owner: Any, params: Any, grads: Any, future: Any) -> Any:
    offload = owner()
    if offload is not None:
        offload._take_reduced(params, grads)
    return future.value()
