"""The communication hook of DistributedDataParallel (DDP) for the 1-bit optimizers."""

import gc
import weakref
from collections.abc import Sequence
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
