"""CountCollectives: the number and bytes of a step's collectives, by kind."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# From the beginnings of the names of torch's ops, which DDP, FSDP2, DTensor and pipelines all call,
# to kinds.
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
    """A context that counts this process's collectives by torch.distributed, in both directions.

    A collective's bytes are those of the whole tensor, as far as this process has it: its inputs,
    or its outputs where they are larger. A coalesced collective is one call. Receives are not
    counted, nor what an engine sends without torch.

    Attributes:
        calls, bytes: sums by kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all",
            "broadcast", "reduce", "gather", "scatter", "send".
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = defaultdict(int)
        self.bytes: dict[str, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile inside the context: collectives of compiled graphs are counted too."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its ops on the local part come here again
        result = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES:
            name = func._schema.name.partition("::")[2].strip("_")
            kind = next((kind for key, kind in _KINDS.items() if name.startswith(key)), None)
            if kind is not None:
                self.calls[kind] += 1
                self.bytes[kind] += _bytes(func, args, kwargs, result)
        return result


def _bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
    outputs = [value for name, value in given.items() if name.startswith("output")]
    inputs = [value for name, value in given.items() if not name.startswith("output")]
    return max(map(_size, (inputs, outputs or result)))


def _size(values: Any) -> int:
    return sum(t.nbytes for t in tree_leaves(values) if isinstance(t, torch.Tensor))
