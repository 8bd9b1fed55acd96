"""torchweld: fused kernels for transformer training that drop into the PyTorch stack you run."""

from torchweld import functional, nn, optim, random, sparse
from torchweld.dispatch import native
from torchweld.dispatch.choice import backends, use_backend
from torchweld.errors import ArgumentError, BackendError, CollectiveError
from torchweld.explanation import Explanation, explain
from torchweld.fusion import explain_fusion, fuse, unfuse
from torchweld.graphs import keep_graphs
from torchweld.pages import keep_pages
from torchweld.version import __version__
from torchweld.warmup import warmup

native.load()  # implements the schemas, which the imports above have defined

__all__ = [
    "ArgumentError",
    "BackendError",
    "CollectiveError",
    "Explanation",
    "__version__",
    "backends",
    "explain",
    "explain_fusion",
    "functional",
    "fuse",
    "keep_graphs",
    "keep_pages",
    "nn",
    "optim",
    "random",
    "sparse",
    "unfuse",
    "use_backend",
    "warmup",
]
