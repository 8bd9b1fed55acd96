"""The arguments of the op, made from the arguments of the public function."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch.dtensor import is_dtensor
from torchweld.errors import ArgumentError
from torchweld.ops.rotary.checked import NAME, find_positions
from torchweld.ops.rotary.reference import gather


def prepare(*given: Any, **named: Any) -> tuple[Any, ...]:
    """The op's arguments, made of the public function's."""
    arrange, raw, *rest = plan(*given, **named)
    return (*arrange(*raw.values()), *rest)


def plan(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    *,
    k: torch.Tensor | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    proportional: bool = False,
    seq_dim: int = -2,
    norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    norm_eps: float | None = None,
    norm_plus_one: bool = False,
    norm_rounding: str = "none",
    norm_across_heads: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    """What makes the op's tensors, the raw ones that it takes, and the op's other arguments."""
    for name, value in (("x", x), ("cos", cos)):
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(NAME, name, f"a {type(value).__name__}", "a tensor")
    if seq_dim not in (-2, -3):
        raise ArgumentError(NAME, "seq_dim", repr(seq_dim), "-2 or -3")
    if sin is None and not cos.is_complex():
        raise ArgumentError(NAME, "sin", "None with a real cos", "a tensor like cos")
    if sin is not None and not isinstance(sin, torch.Tensor):
        raise ArgumentError(NAME, "sin", f"a {type(sin).__name__}", "a tensor")
    if cos.ndim == 0 or x.ndim == 0:
        name = "cos" if cos.ndim == 0 else "x"
        raise ArgumentError(NAME, name, "of no dimensions", "at least one")
    angles, width = cos.shape[-1], x.shape[-1]
    if rotary_dim is None:
        rotary_dim = width if angles == width else 2 * angles  # a tensor while torch.jit traces
    elif not (isinstance(rotary_dim, torch.Tensor) and torch.jit.is_tracing()):
        is_int = isinstance(rotary_dim, checks.INTEGER)
        checks.fits(NAME, "rotary_dim", rotary_dim, is_int, "an even int")
    heads_at = -1 if seq_dim == -3 else -2  # among x's dimensions but the last
    if cu_seqlens is not None:
        if position_ids is not None:
            raise ArgumentError(NAME, "cu_seqlens", "given with position_ids", "one of the two")
        if x.ndim < -seq_dim:
            raise ArgumentError(NAME, "cu_seqlens", "given for an x without tokens", "None")
        heads_of = _find_heads_of_positions(1, x.ndim - 2, seq_dim, heads_at)
    elif position_ids is not None:
        if not isinstance(position_ids, torch.Tensor):
            actual = f"a {type(position_ids).__name__}"
            raise ArgumentError(NAME, "position_ids", actual, "a tensor")
        heads_of = _find_heads_of_positions(position_ids.ndim, x.ndim - 2, seq_dim, heads_at)
    else:
        has_tokens = seq_dim == -3 or cos.ndim == x.ndim - 1
        heads_of = heads_at - 1 if 1 < cos.ndim < x.ndim and has_tokens else None
    checks.flag(NAME, "norm_across_heads", norm_across_heads)
    heads = heads_at - 1 if norm_across_heads else None
    eps = float(norm_eps) if isinstance(norm_eps, checks.NUMBER) else norm_eps
    layout = (int(rotary_dim), interleaved, proportional)
    norm = (eps, norm_plus_one, norm_rounding, heads)
    given = {"x": x, "k": k, "cos": cos, "sin": sin, "position_ids": position_ids}
    given |= {"cu_seqlens": cu_seqlens, "norm_weight": norm_weight, "k_norm_weight": k_norm_weight}
    return (partial(_arrange, seq_dim, heads_of), given, *layout, *norm)


def _arrange(
    seq_dim: int,
    heads_of: int | None,
    x: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
) -> tuple[Any, ...]:
    """The op's tensors: positions, or angles without them, get a size of 1 for the heads."""
    if sin is None:
        cos, sin = cos.real, cos.imag
    if cu_seqlens is not None:
        position_ids = find_positions(cu_seqlens, x, x.shape[seq_dim])
    if position_ids is None:
        if heads_of is not None:
            cos, sin = cos.unsqueeze(heads_of), sin.unsqueeze(heads_of)
    elif heads_of is not None:
        position_ids = position_ids.unsqueeze(heads_of)
    if position_ids is not None and is_dtensor(x):  # a table's rows are not x's
        cos, sin = gather(cos, position_ids), gather(sin, position_ids)
        position_ids = None
    if k is not None:
        norm_weight, k_norm_weight = in_one_dtype(x, norm_weight, k_norm_weight)
    return x, k, cos, sin, position_ids, norm_weight, k_norm_weight


def _find_heads_of_positions(own: int, rank: int, seq_dim: int, heads_at: int) -> int | None:
    """Where positions of `own` dimensions get a size of 1 for the heads; None: they have it.

    `rank` is the number of x's dimensions but heads and columns.
    """
    if own == rank:
        return heads_at
    return -1 if seq_dim == -3 and own < rank else None


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
