"""Ops outside the registry: those without a gradient, and those that write to their arguments.

They have an overload for each backend, as all ops do, and are chosen by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchweld import _evidence
from torchweld.errors import ArgumentError, BackendError
from torchweld.ops import _call
from torchweld.registry import BACKENDS, EAGER, implement_in_triton

_LIBRARY = torch.library.Library("torchweld", "FRAGMENT")


class PlainOp:
    """The definition of such an op; `fake` is left out where it returns nothing.

    `triton` is the file that has its kernel, where there is one. `proof` names the rule whose
    evidence a GPU kernel of it goes by; without one it serves by name alone.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        fake: Callable[..., Any] = lambda *_: None,
        backends: tuple[str, ...] = ("cpu",),
        triton: str | None = None,
        proof: str | None = None,
    ) -> None:
        self.name = name
        self._proof = proof
        self.backends = backends = (*backends, "triton") if triton else backends
        for backend in backends:
            _LIBRARY.define(f"{name}.{backend}{schema}")
            torch.library.register_fake(f"torchweld::{name}.{backend}", fake, lib=_LIBRARY)
        if triton:
            implement_in_triton(_LIBRARY, name, triton)

    def kernel(self, device: torch.device) -> Any:
        """The overload that serves this device, or None where the reference does.

        Raises BackendError if a backend was asked for by name and cannot serve.
        """
        if _call.forced is not None:
            if _call.forced == EAGER:
                return None
            if reason := self.why_not(_call.forced, device):
                raise BackendError(self.name, _call.forced, reason)
            return getattr(getattr(torch.ops.torchweld, self.name), _call.forced)
        if self.why_not("cpu", device) is None:
            return getattr(torch.ops.torchweld, self.name).cpu
        if self._proof is None or self.why_not("cuda", device) is not None:
            return None
        # No speeds are weighed: what a step replaces is one of many passes.
        proven = _evidence.is_proven(self._proof, "cuda", device.index)
        return getattr(torch.ops.torchweld, self.name).cuda if proven else None

    def why_not(self, backend: str, device: torch.device) -> str | None:
        """Why this backend has no kernel for tensors of this device."""
        if backend not in BACKENDS:
            accepted = " or ".join([EAGER, *BACKENDS])
            raise ArgumentError(
                _call.BACKEND_VARIABLE, "the environment variable", repr(backend), accepted
            )
        if backend not in self.backends:
            return f"{self.name} has no {backend} kernel"
        if device.type not in BACKENDS[backend].devices:
            return f"the tensors are on {device}"
        return BACKENDS[backend].missing()
