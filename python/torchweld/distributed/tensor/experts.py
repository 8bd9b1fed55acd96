"""ExpertsParallel: the style of a mixture's experts, which devices share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from torchweld.distributed.tensor.styles import Style, check_divides
from torchweld.errors import ArgumentError
from torchweld.fusion.experts import run_experts
from torchweld.ops.experts.grouped import Form


class ExpertsParallel(Style):
    """Shard stacked experts by dimension 0, and run each device's experts on all tokens.

    Devices add up their parts of each token's sum: an all-reduce in each direction, or a gather and
    a reduce-scatter where they share the sequence.

    Args:
        placement: placement of the stream.
        form: of experts of transformers, whose own forward takes no shards; None: the module's
            forward does.
    """

    def __init__(self, placement: Placement, form: Form | None = None) -> None:
        super().__init__()
        self.placement, self.form = placement, form

    def check(self, name: str, module: torch.nn.Module, count: int) -> None:
        for parameter in module.parameters(recurse=False):
            experts = parameter.shape[0]
            actual = f"{experts} experts in {name}"
            check_divides("tp_plan", actual, "numbers of experts", experts, count)

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        self.distribute(module, device_mesh, lambda _: Shard(0))
        # Each row is a token of its own, so shards of the sequence count as shards of rows.
        placed = self.place_rows(self.placement)
        rows = tuple(Shard(0) if of.is_shard() else of for of in placed)
        forward = module.forward if self.form is None else partial(_run_form, module, self.form)
        module.forward = partial(_run, forward, device_mesh, rows)  # type: ignore[method-assign]
        return module


def _run_form(module: Any, form: Form, *args: Any, **kwargs: Any) -> torch.Tensor:
    if kwargs:
        bound = signature(type(module).forward).bind(module, *args, **kwargs)
        for name in bound.kwargs:  # what the module's own forward takes by name only
            accepted = "tokens, their experts and their weights"
            raise ArgumentError("ExpertsParallel", name, "given", accepted)
        args = bound.args[1:]
    return run_experts(module, form, *args)


def _run(
    forward: Callable[..., Any],
    mesh: DeviceMesh,
    rows: tuple[Placement, ...],
    *args: torch.Tensor,
    **kwargs: torch.Tensor,
) -> torch.Tensor:
    def place(x: torch.Tensor) -> DTensor:
        return DTensor.from_local(x, mesh, rows, run_check=False)

    y = forward(*map(place, args), **{name: place(x) for name, x in kwargs.items()})
    return y.redistribute(placements=rows).to_local()  # type: ignore[no-any-return]
