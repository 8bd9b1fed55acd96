"""The ways to run an op."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchweld.registry.constant import assume_constant_result

Capability = tuple[int, int]
# The oldest compute capability that Triton supports.
_TRITON_FROM = (8, 0)


@dataclass
class Backend:
    """A way to run ops: the device types it serves, and why it is missing, if it is."""

    name: str
    devices: set[str]
    # This and `why_unfit` are set by the loader of the backend's library.
    why_missing: Callable[[], str | None]
    # Why its kernels cannot run on a GPU of this compute capability; None if they can.
    why_unfit: Callable[[Capability], str | None] = lambda capability: None

    def why_not(self, device: torch.device) -> str | None:
        """Why it cannot run on this device, of a type it serves; None if it can."""
        if reason := self.why_missing():
            return reason
        return _why_unfit(self.name, device.index) if "cuda" in self.devices else None


# Looked up once: torch.compile traces through its users.
_TRITON_MISSING = (
    "triton is not installed; CUDA builds of torch bring it"
    if importlib.util.find_spec("triton") is None
    else None
)


def _why_too_old(capability: Capability) -> str | None:
    if capability >= _TRITON_FROM:
        return None
    return f"this GPU is sm_{_join(capability)}; Triton needs sm_{_join(_TRITON_FROM)} or newer"


def _join(capability: Capability) -> str:
    return "".join(map(str, capability))


# Constant under torch.compile, which cannot trace a query of a device.
@assume_constant_result
def _why_unfit(backend: str, device_index: int | None) -> str | None:
    return _find_why_unfit(backend, device_index)


@functools.cache
def _find_why_unfit(backend: str, device_index: int | None) -> str | None:
    if not torch.cuda.is_available():  # all tensors are fake
        return None
    return BACKENDS[backend].why_unfit(torch.cuda.get_device_capability(device_index))


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("cpu", {"cpu"}, lambda: "its library is not loaded"),
        Backend("cuda", {"cuda"}, lambda: "its library is not loaded"),
        Backend("triton", {"cuda"}, lambda: _TRITON_MISSING, _why_too_old),
    )
}


# Not an entry of BACKENDS: it needs no overload, its autograd is torch's, and it always serves.
EAGER = "eager"
