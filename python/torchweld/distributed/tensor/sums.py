"""Sums of the gradients of a plan's parameters over devices, after a backward pass; no_sync."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from torchweld import state
from torchweld.collectives.runs import divide_into_runs
from torchweld.dispatch.dtensor import SUMMED_LATER

_BUCKET = 2**26  # bytes of gradients in one all-reduce


@contextmanager
def no_sync(model: torch.nn.Module) -> Iterator[None]:
    """Only accumulate gradients in each process; the next backward pass outside exchanges the sum.

    Use it for all microbatches but the last, under `tp_plan`, `sequence_plan`, DDP, FSDP2, and
    combinations of them. Under a plan, gradients inside the context are DTensors of parts.

    Args:
        model: the model, with its wrappers.
    """
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(False, recurse=False)
                stack.callback(module.set_requires_gradient_sync, True, recurse=False)
        for sums in find_sums(model.parameters()):
            stack.enter_context(sums.postpone())
        yield


def find_sums(parameters: Iterable[torch.nn.Parameter]) -> list[Sums]:
    """Find the Sums that add up gradients of these parameters."""
    return [*dict.fromkeys(_SUMS[p] for p in parameters if p in _SUMS)]


# Maps parameters to the Sums that add up their gradients.
_SUMS: Any = WeakTensorKeyDictionary()


class Sums:
    """Adds up the gradients of a plan's parameters.

    A device may have the gradient of its own rows, heads or slice only. The gradient stays such a
    part during the backward pass. After it, all parts of a dtype are reduced together.
    """

    def __init__(self) -> None:
        self._parameters: Any = WeakTensorKeyDictionary()  # in the order of the plan on all devices
        self._waits = False
        self._queued_in = -1

    def add(self, parameter: torch.nn.Parameter) -> None:
        """Add up this parameter's gradients from now on."""
        self._parameters[parameter] = None
        _SUMS[parameter] = self
        setattr(parameter, SUMMED_LATER, True)
        parameter.register_hook(partial(self._place_gradient, weakref.ref(parameter)))

    @contextmanager
    def postpone(self) -> Iterator[None]:
        """Postpone the sums to `finish` or to the first backward pass outside the context."""
        previous, self._waits = self._waits, True
        try:
            yield
        finally:
            self._waits = previous

    def _place_gradient(self, reference: Any, grad: Any) -> Any:
        """Give a gradient its parameter's placements, except where it is a part of a sum."""
        parameter = reference()
        pairs = [*zip(grad.placements, parameter.placements, strict=True)]
        # Shard a replicated gradient before the sum, so that a device sends only its part.
        cut = [own if old.is_replicate() else old for old, own in pairs]
        differentiable = torch.is_grad_enabled()  # for create_graph=True
        kept_parts = [
            old if _is_part(old) and own.is_replicate() and not differentiable else own
            for old, own in pairs
        ]
        for placements in (cut, kept_parts):
            if grad.placements != tuple(placements):
                grad = grad.redistribute(placements=placements)
        before = parameter.grad
        if before is not None and before.placements != grad.placements:
            parts = [
                a if _is_part(a) else b for a, b in zip(before.placements, kept_parts, strict=True)
            ]
            parameter.grad, grad = extend_parts(before, parts), extend_parts(grad, parts)
        task = state.find_backward_pass()
        # A backward pass that failed has not called back.
        if not self._waits and self._queued_in != task:
            self._queued_in = task
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # type: ignore[attr-defined]
        return grad

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce the gradients that are parts."""
        groups: dict[Any, list[torch.nn.Parameter]] = defaultdict(list)
        for p in self._parameters:
            for dim, placement in enumerate(getattr(p.grad, "placements", ())):
                if _is_part(placement):
                    groups[p.device_mesh, dim, p.grad.dtype].append(p)
        for (mesh, dim, _), parameters in groups.items():
            for bucket in divide_into_runs(parameters, _count_bytes, _BUCKET):
                _reduce(bucket, mesh.get_group(dim), dim)


def _is_part(placement: Placement) -> bool:
    """Whether each device has one term of a sum."""
    return type(placement) is Partial and placement.reduce_op == "sum"


def extend_parts(x: Any, placements: Sequence[Placement]) -> DTensor:
    """Make x a sum along more dimensions: the first device keeps its value, others have zeros."""
    more = [
        at for at, of in enumerate(placements) if _is_part(of) and not _is_part(x.placements[at])
    ]
    local, here = x.to_local(), x.device_mesh.get_coordinate()
    local = local if all(here[at] == 0 for at in more) else torch.zeros_like(local)
    return _wrap_local(x, local, placements)


def _wrap_local(x: Any, local: torch.Tensor, placements: Sequence[Placement]) -> DTensor:
    return DTensor.from_local(
        local, x.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride()
    )


def _count_bytes(parameter: torch.nn.Parameter) -> int:
    """Count the bytes of a gradient's local part."""
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.to_local().nbytes


def _reduce(parameters: list[torch.nn.Parameter], group: dist.ProcessGroup, dim: int) -> None:
    """Add up the gradients over one dimension of the mesh, in one flat tensor."""
    grads: Any = [p.grad for p in parameters]
    parts = [grad.to_local() for grad in grads]
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat, group=group)
    sums = flat.split([part.numel() for part in parts])
    for p, grad, part, total in zip(parameters, grads, parts, sums, strict=True):
        placements = list(grad.placements)
        placements[dim] = Replicate()
        # Clone: the parts of two parameters can be one tensor.
        p.grad = _wrap_local(grad, total.view_as(part).clone(), placements)
