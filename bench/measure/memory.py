"""Peak memory of torch's ops: counted on the CPU, read from the allocator on a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the live bytes that torch's ops allocate; `peak` is the maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {s._cdata for s in _storages((args, kwargs))}
        results = func(*args, **(kwargs or {}))
        for storage in _storages(results):
            if storage._cdata not in before | self._known:
                self._known.add(storage._cdata)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self._now)
        return results

    def _forget(self, name: int, size: int) -> None:
        self._known.discard(name)
        self._now -= size


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tree_leaves(values) if isinstance(t, torch.Tensor)]


def peak_bytes(call: Callable[[], Any], device: str) -> int:
    """The most bytes that a call holds beyond those allocated before it."""
    if device != "cuda":
        with LiveBytes() as live:
            call()
        return live.peak
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before
