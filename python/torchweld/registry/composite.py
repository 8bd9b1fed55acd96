"""The declaration of an op that is made of other ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchweld.registry.op import Op


@dataclass(frozen=True, eq=False, repr=False)
class Composite(Op):
    """torch's GEMMs and our ops between them, which share one choice of a backend.

    It has no kernel and no autograd function of its own, and its schemas only name its arguments:
    torch differentiates the GEMMs, so that a schedule can run the gradients of their two factors
    apart.
    """

    # Takes the backend of the ops and the forward's arguments; returns the result.
    fused: Callable[..., Any] = field(kw_only=True)
    # Takes the same; says in words how it runs them, where that was measured.
    detail: Callable[..., str] | None = None
    # For the docs: what it is made of, with {} for the kernels, and what it saves.
    made_of: str = "torch's GEMMs; between them {}"
    saves: str = (
        "the GEMMs' inputs and the result of the first; with `recompute`, only the op's inputs"
    )
