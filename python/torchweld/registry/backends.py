"""The ways to run an op."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Backend:
    """A way to run ops: the device types that it serves, and why it is missing, if it is."""

    name: str
    devices: set[str]
    # Set by what loads the backend's library.
    missing: Callable[[], str | None]


# Looked up once: torch.compile traces through what asks for it.
_TRITON_MISSING = (
    "triton is not installed; CUDA builds of torch bring it"
    if importlib.util.find_spec("triton") is None
    else None
)


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("cpu", {"cpu"}, lambda: "its library is not loaded"),
        Backend("cuda", {"cuda"}, lambda: "its library is not loaded"),
        Backend("triton", {"cuda"}, lambda: _TRITON_MISSING),
    )
}
# Not an entry of BACKENDS: it needs no overload, its autograd is torch's, and it always serves.
EAGER = "eager"
