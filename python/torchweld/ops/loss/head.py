"""A last layer whose classes devices share, and whose logits each device gets whole.

It is one op, so that a graph shows the layer: a loss that takes its place sends no logits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchweld import state
from torchweld.dispatch.dtensor import as_dtensor, replicate
from torchweld.dispatch.library import LIBRARY
from torchweld.errors import ArgumentError
from torchweld.isolate import leave_dispatch_modes
from torchweld.ops.loss.rows import as_matrix
from torchweld.ops.loss.sharding import reduce


class SharedHead(NamedTuple):
    """The number of all classes, and the devices that share them, each the same number."""

    classes: int
    devices: int
    group: str  # the name of the process group

    @property
    def most(self) -> int:
        """The largest number of classes that a device has."""
        return -(-self.classes // self.devices)

    def compute_logits(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The logits of all classes; each device has x, and its own part of the weight and bias."""
        kind, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:  # as linear() casts
            dtype = torch.get_autocast_dtype(kind)
        return GATHERED_LINEAR(x, weight, bias, dtype, *self)  # type: ignore[no-any-return]

    def as_dtensors(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[Any, Any, Any]:
        """The same tensors as DTensors, as linear() and linear_cross_entropy take them."""
        from torch.distributed.tensor import Shard

        mesh, shape = _find_mesh(self.group, x.device.type), (self.classes, weight.shape[1])
        own = None if bias is None else as_dtensor(bias, mesh, [Shard(0)], shape[:1])
        return self.place(x), as_dtensor(weight, mesh, [Shard(0)], shape), own

    def place(self, x: torch.Tensor) -> Any:
        """A tensor that each device has, as a DTensor."""
        mesh = _find_mesh(self.group, x.device.type)
        return as_dtensor(x, mesh, replicate(mesh), x.shape)


# For a group's name and a kind of device, with the group that had the name.
_meshes: dict[tuple[str, str], tuple[Any, Any]] = {}


def _find_group(name: str) -> Any:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]


def _find_mesh(name: str, kind: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    key, group = (name, kind), _find_group(name)
    if key not in _meshes or _meshes[key][0] is not group:
        with leave_dispatch_modes():  # its ranks are numbers
            _meshes[key] = group, DeviceMesh.from_group(group, kind)
    return _meshes[key][1]


# --- The op ---------------------------------------------------------------------------------------


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *given: Any,
) -> torch.Tensor:
    head, own = SharedHead(*given), None if bias is None else bias.to(dtype)
    part = torch.nn.functional.linear(x.to(dtype), weight.to(dtype), own)
    part = torch.nn.functional.pad(part, (0, head.most - weight.shape[0]))
    rows, ops = as_matrix(part).contiguous(), torch.ops._c10d_functional
    gathered = ops.all_gather_into_tensor.default(rows, head.devices, head.group)
    parts = ops.wait_tensor.default(gathered).view(head.devices, *rows.shape)
    parts = parts.transpose(0, 1).contiguous().flatten(1)
    if parts.shape[1] != head.classes:
        parts = parts[:, : head.classes].clone(memory_format=torch.contiguous_format)
    return parts.view(*x.shape[:-1], head.classes)


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *given: Any,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], SharedHead(*given).classes), dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, _, *given = inputs
    ctx.save_for_backward(x, weight, bias)
    ctx.head = SharedHead(*given)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    """Each device has the whole gradient of the logits, and sums what all classes add to x's.

    The sum is in x's dtype, which may be wider than that of the products.
    """
    x, weight, bias = ctx.saved_tensors
    if torch.is_grad_enabled() and not state.is_compiling():
        accepted = "False where devices share the words of a head"
        raise ArgumentError("HeadParallel", "create_graph", "True", accepted)
    rank = _find_group(ctx.head.group).rank()
    own = grad.narrow(-1, min(rank * ctx.head.most, ctx.head.classes), weight.shape[0])
    of_x = of_weight = of_bias = None
    if ctx.needs_input_grad[0]:
        part = (own @ weight.to(own.dtype)).to(x.dtype)
        of_x = reduce(part, "sum", ctx.head.group)
    if ctx.needs_input_grad[1]:
        of_weight = (as_matrix(own).mT @ as_matrix(x.to(own.dtype))).to(weight.dtype)
    if bias is not None and ctx.needs_input_grad[2]:
        of_bias = as_matrix(own).sum(0).to(bias.dtype)
    return of_x, of_weight, of_bias, *_REST


_REST = (None,) * 4


LIBRARY.define(
    "gathered_linear(Tensor x, Tensor weight, Tensor? bias, ScalarType dtype, int classes,"
    " int devices, str group) -> Tensor"
)
LIBRARY.impl("gathered_linear", _run, "CompositeExplicitAutograd")
torch.library.register_fake("torchweld::gathered_linear", _fake, lib=LIBRARY)
torch.library.register_autograd(
    "torchweld::gathered_linear", _backward, setup_context=_save, lib=LIBRARY
)
GATHERED_LINEAR = torch.ops.torchweld.gathered_linear.default
