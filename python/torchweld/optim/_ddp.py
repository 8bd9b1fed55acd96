"""Keep DistributedDataParallel from averaging gradients that an optimizer averages itself."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from torchweld.errors import ArgumentError


def leave_gradients(function: str, ddp: torch.nn.Module) -> None:
    """Stop it from averaging gradients."""
    if not isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
        accepted = "a torch.nn.parallel.DistributedDataParallel"
        raise ArgumentError(function, "ddp", f"a {type(ddp).__name__}", accepted)

    # Not at the top: torch without torch.distributed lacks the class. Annotations are no strings:
    # torch compares them with its own classes.
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
    """Check that no DistributedDataParallel averages these parameters' gradients as well.

    A parameter has no reference to it, so this searches all objects, once.
    """
    ours, known = set(map(id, params)), {id(ref()) for ref in attached}
    wrapper = torch.nn.parallel.DistributedDataParallel
    for found in gc.get_objects():
        if not issubclass(type(found), wrapper) or id(found) in known:
            continue
        if any(id(p) in ours for p in found.parameters()):
            came = "in a DistributedDataParallel, which averages gradients too"
            raise ArgumentError(function, "params", came, "one that attach(ddp) was called with")
