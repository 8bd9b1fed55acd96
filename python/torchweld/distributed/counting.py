"""CountCollectives: the number and the bytes of collectives, by kind."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchweld.ops.loss.head import GATHERED_LINEAR

# Maps prefixes of the names of torch's ops to kinds. DDP, FSDP2, DTensor and pipelines all call
# these ops.
_KINDS = {
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
}
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class CountCollectives(TorchDispatchMode):
    """A context that counts this process's torch.distributed collectives, in both directions.

    A collective counts the bytes of its inputs in this process, or of its outputs if they are
    larger. A coalesced collective is one call. Receives are not counted, and neither is traffic
    that an engine sends without torch.

    Attributes:
        calls, bytes: sums by kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all",
            "broadcast", "reduce", "gather", "scatter", "send".
    """

    counts_welds = True  # it sees what a fused model sends

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile inside the context: collectives in compiled graphs count too."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its ops on the local tensors are dispatched here too
        result = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES:
            name = func._schema.name.partition("::")[2].strip("_")
            kind = next((kind for key, kind in _KINDS.items() if name.startswith(key)), None)
            if kind is not None:
                self._add(kind, _count_bytes(func, args, kwargs, result))
        elif func is GATHERED_LINEAR:  # whose exchange no mode sees
            self._add("all-gather", result.nbytes)
        return result

    def _add(self, kind: str, size: int) -> None:
        self.calls[kind] += 1
        self.bytes[kind] += size


def _count_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    names = [argument.name for argument in func._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
    outputs = [value for name, value in arguments.items() if name.startswith("output")]
    inputs = [value for name, value in arguments.items() if not name.startswith("output")]
    return max(map(_sum_bytes, (inputs, outputs or result)))


def _sum_bytes(values: Any) -> int:
    return sum(t.nbytes for t in tree_leaves(values) if isinstance(t, torch.Tensor))
