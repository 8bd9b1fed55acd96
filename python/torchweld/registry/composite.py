"""The declaration of an op composed of other ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchweld.registry.op import Op
from torchweld.registry.processor import has_units


@dataclass(kw_only=True, eq=False, repr=False)
class Composite(Op):
    """torch's GEMMs and our ops between them, which share one choice of a backend.

    It has no kernel and no autograd function of its own, and its schemas only name its arguments.
    torch differentiates the GEMMs, so that a pipeline schedule can run the gradients of input and
    weight separately.
    """

    # Takes the backend of the ops and the forward's arguments; returns what serves calls like this
    # one, a function of the forward's arguments.
    plan: Callable[..., Callable[..., Any]]
    # Takes the same arguments; says in words how it runs them, if that was measured.
    detail: Callable[..., str] | None = None
    # For the docs: the components, with {} for the kernels, and the saved tensors.
    made_of: str = "torch's GEMMs; between them {}"
    saves: str = (
        "the GEMMs' inputs and the result of the first; with `recompute`, only the op's inputs"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # Without units eager's GEMMs are slow at every size.
        fast = (x for x in self.dtypes_of_eager if x.itemsize != 2 or has_units(x))
        self.dtypes_of_eager = tuple(fast)
