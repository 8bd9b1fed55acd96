"""Ops outside the registry: those without a gradient, and those that write to their arguments.

They have an overload for each backend, as all ops do, and are chosen by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchweld.dispatch import bare_trial, choice
from torchweld.dispatch.choice import choose
from torchweld.dispatch.library import define_overload
from torchweld.registry import BACKENDS, EAGER


class BareOp:
    """The definition of such an op; `fake` is left out if the op returns nothing.

    `triton` is the file with its Triton kernel. `reference` takes the same arguments; on a GPU the
    kernels are tried against it at their first use. `proof` names the rule whose evidence decides
    before that.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        fake: Callable[..., Any] = lambda *_: None,
        backends: tuple[str, ...] = ("cpu",),
        triton: str | None = None,
        proof: str | None = None,
        reference: Callable[..., Any] | None = None,
    ) -> None:
        self.name = name
        self.reference = reference
        self.proof = proof
        self.backends = (*backends, "triton") if triton else backends
        self._overloads = {
            backend: define_overload(name, backend, schema, fake, triton)
            for backend in self.backends
        }

    def run(self, *inputs: Any) -> Any:
        """The op, on the backend that serves these inputs; where none does, by its reference."""
        first = inputs[0][0] if isinstance(inputs[0], list) else inputs[0]
        if choice.forced is None and choice.on_trial(first):
            backend = bare_trial.proven(self, inputs)
        else:
            backend = choose(self, [first])
        serving = self.overload(backend) or self.reference
        assert serving is not None, f"{self.name} has no reference"
        return serving(*inputs)

    def kernel(self, *inputs: Any) -> Any:
        """The overload that serves these inputs; None if the reference does.

        Raises BackendError if none of the backends that were asked for by name can serve.
        """
        return self.overload(choose(self, inputs))

    def overload(self, backend: str) -> Any:
        """The backend's own op; None for eager, which the reference serves."""
        return self._overloads.get(backend)

    def why_not(self, backend: str, inputs: Sequence[Any]) -> str | None:
        """Why this backend has no kernel for these inputs; the first one's device decides."""
        if backend == EAGER:
            return None
        if backend not in self.backends:
            return f"{self.name} has no {backend} kernel"
        device: torch.device = inputs[0].device
        if device.type not in BACKENDS[backend].devices:
            return f"the tensors are on {device}"
        return BACKENDS[backend].why_not(device)
