"""The norm across heads that several devices share: a sum of squares a token travels."""

from __future__ import annotations

from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch.dtensor import as_dtensor, find_indices, find_sharded_dim, is_dtensor
from torchweld.errors import ArgumentError
from torchweld.ops.rotary.checked import DTYPES, NAME, check_norm


def shares_heads(x: Any, heads: int) -> bool:
    """Whether devices have different heads of x, which are its dimension `heads`."""
    if not is_dtensor(x):
        return False
    return any(find_sharded_dim(p) in (heads, heads + x.ndim) for p in x.placements)


def normalize(
    x: Any, weight: Any, eps: Any, plus_one: Any, rounded: Any, heads: int
) -> torch.Tensor:
    """The norm of a DTensor's tokens over the heads of all devices, in float32 at least."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    checks.dense(NAME, "x", x, DTYPES)
    check_norm(x, None, weight, None, eps, plus_one, rounded, heads, [1] * (x.ndim - 1))
    if eps is None:
        raise ArgumentError(NAME, "norm_across_heads", "True without norm_eps", "both")
    mesh, rank, heads = x.device_mesh, x.ndim, heads + x.ndim
    cut = [find_sharded_dim(p) for p in x.placements]
    along = [at is not None and at % rank == heads for at in cut]
    if any(at is not None and at % rank == rank - 1 for at in cut):
        raise ArgumentError(NAME, "x", "a DTensor sharded along its columns", "along other ones")
    own = x.to_local(grad_placements=x.placements)
    wide = own.to(torch.promote_types(x.dtype, torch.float32))
    squares = wide.square().sum([heads, -1], keepdim=True)
    shape = [1 if at in (heads, rank - 1) else x.shape[at] for at in range(rank)]
    rows = [Replicate() if is_cut else p for is_cut, p in zip(along, x.placements, strict=True)]
    parts = [Partial() if is_cut else p for is_cut, p in zip(along, x.placements, strict=True)]
    total: torch.Tensor = _Sum.apply(squares, mesh, parts, rows, shape)  # type: ignore[no-untyped-call]
    y = wide * (total / (x.shape[heads] * x.shape[-1]) + eps).rsqrt()
    if rounded == "both":
        y = y.to(x.dtype).to(wide.dtype)
    if weight is not None:
        factor = _take_weight(x, weight, heads, cut).to(wide.dtype)
        y = y * (1 + factor if plus_one else factor)
    if rounded != "none":
        y = y.to(x.dtype).to(wide.dtype)
    return DTensor.from_local(
        y, mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )


class _Sum(torch.autograd.Function):
    """The sum over devices, whose gradient is the sum of the devices' gradients."""

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, mesh: Any, parts: Any, rows: Any, shape: Any
    ) -> torch.Tensor:
        ctx.how = (mesh, parts, rows, shape)
        whole = as_dtensor(own, mesh, parts, shape)
        return whole.redistribute(mesh, rows).to_local()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _Sum.apply(grad, *ctx.how), *(None,) * 4  # type: ignore[no-untyped-call]


def _take_weight(x: Any, weight: Any, heads: int, cut: list[int | None]) -> torch.Tensor:
    """The weight of this device's heads; its gradient is a part where devices have other rows."""
    from torch.distributed.tensor import Partial, Replicate

    mesh = x.device_mesh
    if not is_dtensor(weight):
        if weight.requires_grad and torch.is_grad_enabled():
            actual, accepted = "a plain tensor that requires grad", "a DTensor, as x is"
            raise ArgumentError(NAME, "norm_weight", actual, accepted)
        whole = weight
    else:
        grads = [Replicate() if at is None else Partial() for at in cut]
        whole = weight.redistribute(mesh, [Replicate()] * mesh.ndim)
        whole = whole.to_local(grad_placements=grads)
    mine = find_indices(x.shape, mesh, x.placements, heads).to(whole.device)
    between = [1] * (x.ndim - heads - 2)
    return whole.view(x.shape[heads], *between, x.shape[-1]).index_select(0, mine)
