"""torchweld: fused kernels for transformer training that drop into the PyTorch stack you run."""

from torchweld import _native

__version__ = "0.1.0"

# Schemas come before what implements them.
from torchweld import functional, nn, optim, random
from torchweld.errors import ArgumentError, BackendError
from torchweld.ops._call import Explanation, backends, explain, use_backend

_native.load()

__all__ = [
    "ArgumentError",
    "BackendError",
    "Explanation",
    "__version__",
    "backends",
    "explain",
    "functional",
    "nn",
    "optim",
    "random",
    "use_backend",
]
