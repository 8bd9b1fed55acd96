"""Calls of FlexAttention's mask functions for many pairs of tokens at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from torchweld.errors import ArgumentError
from torchweld.sparse.patterns import Grid, MaskFunction


def adapt_mask_function(
    function: MaskFunction, grid: Grid, batch_size: int | None, num_heads: int | None
) -> MaskFunction:
    """Adapt a function to indices that broadcast, by trying it on some pairs.

    Functions are written for single indices. Most compute the same for tensors of indices, which is
    fast. A function that reduces a vector of each token does not, so vmap vectorises it.
    """
    query, key = (
        torch.linspace(0, max(n - 1, 0), count, device=grid.device).long()
        for n, count in ((grid.queries, 16), (grid.keys, 17))
    )
    if not grid.queries or not grid.keys:
        return function
    batch, head = (torch.zeros((), dtype=torch.int64, device=grid.device) for _ in range(2))
    watch = _MaskWatch(batch, head)
    together, fault = _try_call(watch, function, batch, head, query[:, None], key[None])
    pairs = (query.repeat_interleave(17), key.repeat(16))
    vectorised = torch.vmap(function, in_dims=(None, None, 0, 0))
    with _Indexing():
        apart, _ = _try_call(watch, vectorised, batch, head, *pairs)
    for name, size, index in (("batch_size", batch_size, 0), ("num_heads", num_heads, 1)):
        if size is None and watch.seen[index]:
            accepted = f"a number, since mask_mod uses the {('batch', 'head')[index]}"
            raise ArgumentError("BlockLayout", name, "not given", accepted)
    if together is None and apart is None:
        actual = f"one that raises {type(fault).__name__}: {fault}"
        accepted = "a function of the indices (batch, head, query, key) that does not branch"
        raise ArgumentError("BlockLayout", "mask_mod", actual, accepted) from fault
    if together is None or not isinstance(together, torch.Tensor):
        return function if apart is None else _vectorise(function)
    elementwise = together.shape in ((16, 17), (16, 1), (1, 17))
    if apart is None and not elementwise:
        actual = f"one that returns a tensor of shape {list(together.shape)} for 16 x 17 pairs"
        raise ArgumentError("BlockLayout", "mask_mod", actual, "one that torch.vmap vectorises")
    if apart is None or (elementwise and torch.equal(together.expand(16, 17), apart.view(16, 17))):
        return function
    return _vectorise(function)


def _try_call(watch: _MaskWatch, function: MaskFunction, *indices: torch.Tensor) -> tuple[Any, Any]:
    """Call the function; return its result and the error that it raised."""
    try:
        with watch:
            return function(*indices), None
    except Exception as fault:  # any error of a user's function is reported
        return None, fault


def _vectorise(function: MaskFunction) -> MaskFunction:
    """Call the function for single indices, by vmap."""

    def vectorised(*indices: torch.Tensor) -> torch.Tensor:
        shape = torch.broadcast_shapes(*(index.shape for index in indices))
        with _Indexing():
            flat = torch.vmap(function)(*(index.expand(shape).reshape(-1) for index in indices))
        return flat.view(shape)

    return vectorised


class _MaskWatch(TorchFunctionMode):
    """Records which of these tensors torch's functions are called with."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self._tensors, self.seen = tensors, [False] * len(tensors)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        arguments = _pytree.tree_leaves((args, kwargs))
        for at, tensor in enumerate(self._tensors):
            self.seen[at] |= any(value is tensor for value in arguments)
        return func(*args, **(kwargs or {}))


class _Indexing(TorchFunctionMode):
    """Indexes by a single index without reading its value, which vmap would not allow."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            x, index = args
            index = index if isinstance(index, tuple) else (index,)
            plain = all(isinstance(i, torch.Tensor) or i == slice(None) for i in index)
            if plain and any(isinstance(i, torch.Tensor) for i in index):
                at = [i if isinstance(i, torch.Tensor) else None for i in index]
                return torch.ops.aten.index(x, at)
        return func(*args, **(kwargs or {}))
