"""What rotary embeddings accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchweld import checks, state
from torchweld.errors import ArgumentError

NAME = "rotary_embedding"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# What of a norm is rounded to the x's dtype.
ROUNDED = ("none", "result", "both")


def check(x: Any, key: Any, *rest: Any) -> None:
    """Check the arguments of the op."""
    cos, sin, positions, weight, key_weight, *layout, norm_eps, plus_one, rounded, heads = rest
    checks.dense(NAME, "x", x, DTYPES)
    if x.ndim == 0:
        raise ArgumentError(NAME, "x", "of no dimensions", "at least one")
    for name, table in (("cos", cos), ("sin", sin)):
        checks.dense(NAME, name, table, checks.beside(x), "x")
        checks.like(NAME, name, table, x, "x")
    if sin.shape != cos.shape or sin.dtype is not cos.dtype:
        actual = f"of shape {list(sin.shape)} and {sin.dtype}"
        raise ArgumentError(NAME, "sin", actual, f"cos's, {list(cos.shape)} and {cos.dtype}")
    shared = _check_angles(x, cos, positions)
    _check_width(x, cos, *layout)
    if key is not None:
        _check_key(x, key, shared, heads)
    check_norm(x, key, weight, key_weight, norm_eps, plus_one, rounded, heads, shared)


def _check_angles(x: torch.Tensor, cos: torch.Tensor, positions: Any) -> Sequence[int]:
    """The angles' sizes, aligned to x's dimensions but the last: 1 where rows share angles."""
    rank = x.ndim
    if positions is None:
        if not 1 <= cos.ndim <= rank:
            accepted = f"at least one and at most x's, {rank}"
            raise ArgumentError(NAME, "cos", f"of {cos.ndim} dimensions", accepted)
        sizes, name, tensor = list(cos.shape[:-1]), "cos", cos
    else:
        checks.dense(NAME, "position_ids", positions, [torch.int64, torch.int32])
        checks.like(NAME, "position_ids", positions, x, "x")
        if cos.ndim != 2:
            actual = f"of {cos.ndim} dimensions"
            raise ArgumentError(NAME, "cos", actual, "a row for each position: two dimensions")
        sizes, name, tensor = list(positions.shape), "position_ids", positions
        check_positions(positions, cos.shape[0])
    sizes = [1] * (rank - 1 - len(sizes)) + sizes
    if len(sizes) != rank - 1 or any(
        size not in (1, whole) for size, whole in zip(sizes, x.shape, strict=False)
    ):
        accepted = f"one that broadcasts to x's rows, {list(x.shape[:-1])}"
        raise ArgumentError(NAME, name, f"of shape {list(tensor.shape)}", accepted)
    return sizes


def check_positions(positions: torch.Tensor, rows: int) -> None:
    """Name the first position that the table has no row for; on a CPU, where looking is free."""
    if positions.device.type != "cpu" or type(positions) is not torch.Tensor:
        return
    if state.is_compiling() or state.is_transforming():
        return
    bad = ((positions < 0) | (positions >= rows)).flatten().nonzero()
    if bad.numel():
        at = int(bad[0])
        actual = f"{int(positions.flatten()[at])} at element {at}"
        raise ArgumentError(NAME, "position_ids", actual, f"from 0 to {rows - 1}, a row of cos")


def _check_width(
    x: torch.Tensor, cos: torch.Tensor, rotary_dim: Any, interleaved: Any, proportional: Any
) -> None:
    checks.flag(NAME, "interleaved", interleaved)
    checks.flag(NAME, "proportional", proportional)
    width = x.shape[-1]
    if rotary_dim % 2 or not 0 <= rotary_dim <= width:
        accepted = f"an even number from 0 to x's last size, {width}"
        raise ArgumentError(NAME, "rotary_dim", f"{rotary_dim}", accepted)
    if cos.shape[-1] not in (rotary_dim // 2, rotary_dim):
        accepted = f"{rotary_dim // 2} or {rotary_dim}, for rotary_dim={rotary_dim}"
        raise ArgumentError(NAME, "cos", f"of last size {cos.shape[-1]}", accepted)
    if proportional and (interleaved or width % 2):
        actual = "True with " + ("interleaved pairs" if interleaved else f"{width} columns")
        raise ArgumentError(NAME, "proportional", actual, "False, or halves of an even width")


def _check_key(x: torch.Tensor, key: Any, shared: Sequence[int], heads: int | None) -> None:
    checks.dense(NAME, "k", key, [x.dtype], "x")
    checks.like(NAME, "k", key, x, "x")
    fits = key.ndim == x.ndim and key.shape[-1] == x.shape[-1]
    sizes = zip(key.shape[:-1], x.shape[:-1], strict=True) if fits else ()
    other = [at for at, (own, size) in enumerate(sizes) if own != size]
    if not fits or len(other) > 1 or any(shared[at] != 1 for at in other):
        accepted = f"x's, {list(x.shape)}, but for the number of heads, which share angles"
        raise ArgumentError(NAME, "k", f"of shape {list(key.shape)}", accepted)
    if heads is not None and other and other[0] - x.ndim != heads:
        raise ArgumentError(NAME, "k", f"of shape {list(key.shape)}", "the heads where x has")


def check_norm(
    x: torch.Tensor,
    key: Any,
    weight: Any,
    key_weight: Any,
    norm_eps: Any,
    plus_one: Any,
    rounded: Any,
    heads: Any,
    shared: Sequence[int],
) -> None:
    """Check the arguments of a norm."""
    checks.flag(NAME, "norm_plus_one", plus_one)
    if rounded not in ROUNDED:
        raise ArgumentError(NAME, "norm_rounding", repr(rounded), " or ".join(ROUNDED))
    weights = [("norm_weight", weight, x), ("k_norm_weight", key_weight, key)]
    if norm_eps is None:
        for name, value, _ in weights:
            if value is not None:
                raise ArgumentError(NAME, name, "given without norm_eps", "both or neither")
        if heads is not None:
            raise ArgumentError(NAME, "norm_across_heads", "True without norm_eps", "both")
        return
    if not isinstance(norm_eps, checks.NUMBER) or not norm_eps >= 0:
        raise ArgumentError(NAME, "norm_eps", repr(norm_eps), "a number >= 0 or None")
    if heads is not None and (not -x.ndim <= heads <= -2 or shared[heads + x.ndim] != 1):
        accepted = f"a dimension of x, {list(x.shape)}, along which angles are shared"
        raise ArgumentError(NAME, "norm_across_heads", f"dimension {heads}", accepted)
    for name, value, of in weights:
        if value is None:
            continue
        if of is None:
            raise ArgumentError(NAME, name, "given without k", "both or neither")
        checks.dense(NAME, name, value, checks.beside(x), "x")
        checks.like(NAME, name, value, x, "x")
        count = of.shape[-1] * (1 if heads is None else of.shape[heads])
        checks.shaped(NAME, name, value, [count], "a number for each element that is normalised")
    if weight is not None and key_weight is not None and weight.dtype is not key_weight.dtype:
        raise ArgumentError(
            NAME, "k_norm_weight", f"of {key_weight.dtype}", f"norm_weight's, {weight.dtype}"
        )


def find_positions(cu_seqlens: Any, x: torch.Tensor, tokens: int) -> torch.Tensor:
    """The position of each token in its document, from where documents begin."""
    checks.dense(NAME, "cu_seqlens", cu_seqlens, [torch.int64, torch.int32])
    checks.like(NAME, "cu_seqlens", cu_seqlens, x, "x")
    if cu_seqlens.ndim != 1 or not cu_seqlens.numel():
        accepted = "a number for the begin of each document and one for the end of the last"
        raise ArgumentError(NAME, "cu_seqlens", f"of shape {list(cu_seqlens.shape)}", accepted)
    if cu_seqlens.device.type == "cpu" and not state.is_compiling():
        begins = cu_seqlens.tolist()
        if begins[0] != 0 or begins != sorted(begins) or begins[-1] > tokens:
            accepted = f"numbers that rise from 0 to at most {tokens}, the tokens of x"
            raise ArgumentError(NAME, "cu_seqlens", f"{begins}", accepted)
    places = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, places, right=True) - 1
    return places - cu_seqlens[document.clamp(0)]
