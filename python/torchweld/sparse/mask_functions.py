"""FlexAttention's mask functions: how one can be called for many pairs of tokens at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from torchweld.errors import ArgumentError
from torchweld.sparse.patterns import Grid, MaskFunction


def understood(
    function: MaskFunction, grid: Grid, batch_size: int | None, num_heads: int | None
) -> MaskFunction:
    """The function for indices that broadcast, tried on some pairs.

    Functions are written for single indices. Most do the same for tensors of them, which is fast.
    One that reduces a vector of a token's, for instance, does not: it is vectorised by vmap.
    """
    query, key = (
        torch.linspace(0, max(n - 1, 0), count, device=grid.device).long()
        for n, count in ((grid.queries, 16), (grid.keys, 17))
    )
    if not grid.queries or not grid.keys:
        return function
    batch, head = (torch.zeros((), dtype=torch.int64, device=grid.device) for _ in range(2))
    watch = _Watch(batch, head)
    together, fault = _tried(watch, function, batch, head, query[:, None], key[None])
    pairs = (query.repeat_interleave(17), key.repeat(16))
    vectorised = torch.vmap(function, in_dims=(None, None, 0, 0))
    with _Indexing():
        apart, _ = _tried(watch, vectorised, batch, head, *pairs)
    for name, given, index in (("batch_size", batch_size, 0), ("num_heads", num_heads, 1)):
        if given is None and watch.seen[index]:
            accepted = f"a number, since mask_mod uses the {('batch', 'head')[index]}"
            raise ArgumentError("BlockLayout", name, "not given", accepted)
    if together is None and apart is None:
        came = f"one that raises {type(fault).__name__}: {fault}"
        accepted = "a function of the indices (batch, head, query, key) that does not branch"
        raise ArgumentError("BlockLayout", "mask_mod", came, accepted) from fault
    if together is None or not isinstance(together, torch.Tensor):
        return function if apart is None else _each(function)
    elementwise = together.shape in ((16, 17), (16, 1), (1, 17))
    if apart is None and not elementwise:
        came = f"one that returns a tensor of shape {list(together.shape)} for 16 x 17 pairs"
        raise ArgumentError("BlockLayout", "mask_mod", came, "one that torch.vmap vectorises")
    if apart is None or (elementwise and torch.equal(together.expand(16, 17), apart.view(16, 17))):
        return function
    return _each(function)


def _tried(watch: _Watch, function: MaskFunction, *indices: torch.Tensor) -> tuple[Any, Any]:
    """What the function returns, and what it raises."""
    try:
        with watch:
            return function(*indices), None
    except Exception as fault:  # whatever a user's function raises is reported as its own
        return None, fault


def _each(function: MaskFunction) -> MaskFunction:
    """The function called for single indices, by vmap."""

    def vectorised(*indices: torch.Tensor) -> torch.Tensor:
        shape = torch.broadcast_shapes(*(index.shape for index in indices))
        with _Indexing():
            found = torch.vmap(function)(*(index.expand(shape).reshape(-1) for index in indices))
        return found.view(shape)

    return vectorised


class _Watch(TorchFunctionMode):
    """Whether torch's functions are called with one of these tensors."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self._tensors, self.seen = tensors, [False] * len(tensors)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = _pytree.tree_leaves((args, kwargs))
        for at, tensor in enumerate(self._tensors):
            self.seen[at] |= any(value is tensor for value in given)
        return func(*args, **(kwargs or {}))


class _Indexing(TorchFunctionMode):
    """Under vmap, indexing by a single index is a selection: torch would read its value."""

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
