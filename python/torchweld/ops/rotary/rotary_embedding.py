"""rotary_embedding: turn pairs of columns by angles, after an optional RMSNorm.

    (a, b) of a pair of columns becomes (a cos - b sin, b cos + a sin)

Read on in: python/torchweld/ops/rotary/reference.py, python/torchweld/ops/rotary/op.py,
csrc/core/rotary.h, csrc/cpu/rotary.cpp, triton_kernels/rotary.py, bench/cases/rotary.py.
"""

from __future__ import annotations

from typing import Any

import torch

from torchweld.dispatch.call import decide_arranged
from torchweld.dispatch.dtensor import is_dtensor
from torchweld.dispatch.warm.cache import short
from torchweld.ops.rotary.arguments import check_heads, plan
from torchweld.ops.rotary.op import OP
from torchweld.ops.rotary.over_devices import normalize, shares_heads


@short()
def rotary_embedding(
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
) -> torch.Tensor:
    """Rotate pairs of x's columns: (a, b) becomes (a cos - b sin, b cos + a sin).

    Arithmetic is float32, and the result is rounded once. The backward pass applies the transpose,
    which is not the inverse if cos and sin contain a factor, as in YaRN.

    Args:
        x: [*, heads, tokens, width], or [*, tokens, heads, width] with seq_dim=-3; float32,
            bfloat16, float16 (or float64). Any strides; views are not copied if columns are
            adjacent.
        cos: [*, tokens, angles], which broadcasts to x's tokens (the dimension of heads is left
            out, or 1), or with position_ids a table [rows, angles]. An angle for each pair, or for
            each column that is rotated; in x's dtype, or float32 for 16-bit x. With sin=None a
            complex tensor has both.
        sin: like cos.
        position_ids: [*, tokens], the rows of cos. On a CPU a row that does not exist is an error.
            On a GPU nothing waits for a check: the Triton kernel does not read a missing row, and
            makes the rotated columns NaN; eager torch fails with its device-side assertion.
        interleaved: True pairs columns 2i and 2i + 1, False i and i + rotary_dim / 2.
        rotary_dim: the number of leading columns to rotate; others do not change. None: the number
            of angles if that is x's width, else twice that. A partial rotation with an angle for
            each column needs it.
        proportional: True pairs columns i and i + width / 2, as Gemma 4 does.
        seq_dim: the dimension of tokens, -2 or -3.
        norm_weight: [width], or [heads * width] across heads, of an RMSNorm before the rotation; in
            x's dtype, or float32 for 16-bit x.
        norm_eps: added to the mean square; None: no norm.
        norm_plus_one: True multiplies by 1 + norm_weight, as Gemma does.
        norm_rounding: which values of the norm are rounded to x's dtype: "none", "result" (Gemma 3,
            torch.nn.RMSNorm), or "both" factors and their product (Llama, Qwen3).
        norm_across_heads: True takes the mean over the heads of a token, as OLMo 2 does. Processes
            that share the heads of a DTensor exchange one number per token.
        cu_seqlens: [documents + 1], where packed documents begin among the tokens, and where the
            last one ends; in place of position_ids. Positions count from 0 in each document, and
            again behind the last one.

    Returns:
        A tensor of x's shape, dtype and strides.
    """
    heads = -3 if seq_dim == -2 else -2
    how: dict[str, Any] = {
        "interleaved": interleaved,
        "rotary_dim": rotary_dim,
        "proportional": proportional,
        "seq_dim": seq_dim,
        "cu_seqlens": cu_seqlens,
    }
    if norm_across_heads is True and shares_heads(x, heads):
        # Normalise over the heads of several devices, rotate, and round once.
        wide = normalize(x, norm_weight, norm_eps, norm_plus_one, norm_rounding, heads)
        given: list[Any] = [cos, sin]
        for at, t in enumerate(given):
            if isinstance(t, torch.Tensor) and not t.is_complex():
                given[at] = t.to(wide.dtype)
        return rotary_embedding(wide, given[0], given[1], position_ids, **how).to(x.dtype)
    how |= {
        "norm_weight": norm_weight,
        "norm_eps": norm_eps,
        "norm_plus_one": norm_plus_one,
        "norm_rounding": norm_rounding,
        "norm_across_heads": norm_across_heads,
    }
    return decide_arranged(OP, *plan(x, cos, sin, position_ids, **how), returned="y")  # type: ignore[no-any-return]


# What `rotary_embedding_qk` calls arguments of the op.
_NAMES_OF_BOTH = {"x": "q", "norm_weight": "q_norm_weight"}


@short()
def rotary_embedding_qk(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor | None,
    position_ids: torch.Tensor | None = None,
    *,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    proportional: bool = False,
    seq_dim: int = -2,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    norm_eps: float | None = None,
    norm_plus_one: bool = False,
    norm_rounding: str = "none",
    norm_across_heads: bool = False,
    cu_seqlens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rotary_embedding` of queries and keys in one launch.

    Args:
        q: as x of `rotary_embedding`.
        k: like q; it may have another number of heads.
        cos, sin, position_ids, cu_seqlens: as in `rotary_embedding`.
        interleaved, rotary_dim, proportional, seq_dim: as in `rotary_embedding`.
        q_norm_weight, k_norm_weight: norm_weight of the queries and of the keys.
        norm_eps, norm_plus_one, norm_rounding, norm_across_heads: as in `rotary_embedding`, of both
            norms.

    Returns:
        The rotated queries and keys.
    """
    how: dict[str, Any] = {
        "interleaved": interleaved,
        "rotary_dim": rotary_dim,
        "proportional": proportional,
        "seq_dim": seq_dim,
        "norm_eps": norm_eps,
        "norm_plus_one": norm_plus_one,
        "norm_rounding": norm_rounding,
        "norm_across_heads": norm_across_heads,
        "cu_seqlens": cu_seqlens,
    }
    if is_dtensor(q) or is_dtensor(k):  # their numbers of heads are cut in different places
        rotated_q = rotary_embedding(q, cos, sin, position_ids, norm_weight=q_norm_weight, **how)
        rotated_k = rotary_embedding(k, cos, sin, position_ids, norm_weight=k_norm_weight, **how)
        return rotated_q, rotated_k
    check_heads(q, k, seq_dim)
    how |= {"k": k, "norm_weight": q_norm_weight, "k_norm_weight": k_norm_weight}
    arrange, given, *rest = plan(q, cos, sin, position_ids, **how)
    by_name = {_NAMES_OF_BOTH.get(name, name): value for name, value in given.items()}
    return decide_arranged(OP, arrange, by_name, *rest)  # type: ignore[no-any-return]
