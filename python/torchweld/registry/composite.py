"""The declaration of an op that is made of other ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchweld.registry.op import Op


@dataclass(frozen=True, eq=False, repr=False)
class Composite(Op):
    """GEMMs of torch's and ops of ours between them, which share one choice of a backend.

    It has no kernel and no autograd function of its own, and its schemas only name its arguments:
    torch differentiates the GEMMs, so that the gradients of their two factors are graph nodes that
    a schedule can run apart.
    """

    # The backend for the ops, then the forward's arguments, to the result.
    fused: Callable[..., Any] = field(kw_only=True)
    # A backend and the forward's arguments to a word on how it runs them, where that is measured.
    detail: Callable[..., str] | None = None
    # For the docs: what it is made of, where {} stands for the kernels, and what it saves.
    made_of: str = "torch's GEMMs; between them {}"
    saves: str = (
        "the GEMMs' inputs and the result of the first; with `recompute`, only the op's inputs"
    )
