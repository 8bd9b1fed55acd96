"""Compares a model that several processes share with one process's model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from oracle import TORCH
from torchweld import numerics

NEAR = numerics.FLOAT64

shares_rows = pytest.mark.skipif(
    TORCH < (2, 12),
    reason="DTensor of torch < 2.12 refuses a linear layer of a shard of the sequence",
)
has_neighbours = pytest.mark.skipif(
    TORCH < (2, 12),
    reason="torch < 2.12 sends between stages that are neighbours on one rank; gloo cannot",
)


def whole_of(t: Any) -> Any:
    if not isinstance(t, DTensor):
        return t
    if t.dtype != torch.int16:
        return t.full_tensor()
    # Neither gloo nor NCCL can gather these.
    layout = {"shape": t.shape, "stride": t.stride()}
    bits = DTensor.from_local(
        t.to_local().view(torch.float16), t.device_mesh, t.placements, **layout
    )
    return bits.full_tensor().view(torch.int16)


def step_stages(pipe: Any, x: torch.Tensor, **given: Any) -> None:
    """A step of a pipeline, whose first stage gets x, and whose last one gets it as its targets."""
    target = x if pipe.is_last else None
    pipe.schedule.step(*((x,) if pipe.is_first else ()), target=target, **given)


def differentiate(run: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results, and the gradients of a sum of them in which each has another factor."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    results = run(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    floating = [r for r in results if r.is_floating_point()]
    total: Any = sum((k + 1) * r.sin().sum() for k, r in enumerate(floating))
    return [*results, *torch.autograd.grad(total, leaves)]


def assert_whole(found: Iterable[Any], wanted: Iterable[Any], **near: float) -> None:
    """Compare tensors that processes share with tensors of one process."""
    torch.testing.assert_close([*map(whole_of, found)], [*wanted], **near)


def grads_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The whole gradients, by name; wrappers add nothing to names."""
    names = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    return {name: whole_of(p.grad).clone() for name, p in names.items() if p.grad is not None}


def assert_grads(model: torch.nn.Module, wanted: Any, **near: float) -> None:
    """Compare a model's gradients with another model's, or with gradients by name."""
    wanted = wanted if isinstance(wanted, Mapping) else grads_of(wanted)
    found = grads_of(model)
    assert found
    assert len(found) == sum(p.requires_grad for p in model.parameters())
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name], msg=lambda m, n=name: f"{n}: {m}", **near)
