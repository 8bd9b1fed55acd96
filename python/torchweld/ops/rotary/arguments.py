"""The arguments of the op, made from the arguments of the public function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch.dtensor import is_dtensor
from torchweld.errors import ArgumentError
from torchweld.ops.rotary.checked import NAME, find_positions
from torchweld.ops.rotary.reference import gather


def prepare(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    proportional: bool = False,
    seq_dim: int = -2,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float | None = None,
    norm_plus_one: bool = False,
    norm_rounding: str = "none",
    norm_across_heads: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    """The op's arguments: angles with a size of 1 for the heads, which rows share."""
    for name, value in (("x", x), ("cos", cos)):
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(NAME, name, f"a {type(value).__name__}", "a tensor")
    if seq_dim not in (-2, -3):
        raise ArgumentError(NAME, "seq_dim", repr(seq_dim), "-2 or -3")
    if sin is None:
        if not cos.is_complex():
            raise ArgumentError(NAME, "sin", "None with a real cos", "a tensor like cos")
        cos, sin = cos.real, cos.imag
    if not isinstance(sin, torch.Tensor):
        raise ArgumentError(NAME, "sin", f"a {type(sin).__name__}", "a tensor")
    if cos.ndim == 0 or x.ndim == 0:
        name = "cos" if cos.ndim == 0 else "x"
        raise ArgumentError(NAME, name, "of no dimensions", "at least one")
    angles, width = cos.shape[-1], x.shape[-1]
    if rotary_dim is None:
        rotary_dim = width if angles == width else 2 * angles
    heads_at = -1 if seq_dim == -3 else -2  # among x's dimensions but the last
    if cu_seqlens is not None:
        if position_ids is not None:
            raise ArgumentError(NAME, "cu_seqlens", "given with position_ids", "one of the two")
        if x.ndim < -seq_dim:
            raise ArgumentError(NAME, "cu_seqlens", "given for an x without tokens", "None")
        position_ids = find_positions(cu_seqlens, x, x.shape[seq_dim])
    if position_ids is not None:
        position_ids = _add_heads(position_ids, x.ndim - 2, seq_dim, heads_at)
    elif 1 < cos.ndim < x.ndim and (seq_dim == -3 or cos.ndim == x.ndim - 1):
        cos, sin = cos.unsqueeze(heads_at - 1), sin.unsqueeze(heads_at - 1)
    if is_dtensor(x) and position_ids is not None:  # a table's rows are not x's
        cos, sin = gather(cos, position_ids), gather(sin, position_ids)
        position_ids = None
    checks.flag(NAME, "norm_across_heads", norm_across_heads)
    heads = heads_at - 1 if norm_across_heads else None
    eps = float(norm_eps) if isinstance(norm_eps, checks.NUMBER) else norm_eps
    checks.fits(
        NAME, "rotary_dim", rotary_dim, isinstance(rotary_dim, checks.INTEGER), "an even int"
    )
    layout = (int(rotary_dim), interleaved, proportional)
    norm = (eps, norm_plus_one, norm_rounding, heads)
    return (x, None, cos, sin, position_ids, norm_weight, None, *layout, *norm)


def _add_heads(position_ids: Any, rank: int, seq_dim: int, heads_at: int) -> torch.Tensor:
    """Positions with a size of 1 for the heads; `rank` is the number of x's other dimensions."""
    if not isinstance(position_ids, torch.Tensor):
        raise ArgumentError(NAME, "position_ids", f"a {type(position_ids).__name__}", "a tensor")
    if position_ids.ndim == rank:
        return position_ids.unsqueeze(heads_at)
    if seq_dim == -3 and position_ids.ndim < rank:
        return position_ids.unsqueeze(-1)
    return position_ids


def check_heads(q: Any, k: Any, seq_dim: int) -> None:
    """Check that keys have the sizes of queries, but for the number of heads."""
    if not isinstance(k, torch.Tensor):
        raise ArgumentError(NAME, "k", f"a {type(k).__name__}", "a tensor")
    if not isinstance(q, torch.Tensor) or seq_dim not in (-2, -3):
        return  # another check names it
    heads = -3 if seq_dim == -2 else -2
    sizes = zip(range(-q.ndim, 0), q.shape, k.shape, strict=False)
    if k.ndim != q.ndim or any(at != heads and own != size for at, own, size in sizes):
        accepted = f"q's, {list(q.shape)}, but for the number of heads"
        raise ArgumentError(NAME, "k", f"of shape {list(k.shape)}", accepted)


def in_one_dtype(x: torch.Tensor, a: Any, b: Any) -> Sequence[Any]:
    """The norm weights in a dtype that holds both, since kernels read one."""
    accepted = checks.beside(x)
    if not all(isinstance(w, torch.Tensor) and w.dtype in accepted for w in (a, b)):
        return a, b  # None, or another check names it
    wide = torch.promote_types(a.dtype, b.dtype)
    return a.to(wide), b.to(wide)
