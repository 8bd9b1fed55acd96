"""The bytes that a module's passes move: all operations except GEMMs and views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchweld.fuse import probe
from torchweld.fuse.twin import Twin
from torchweld.fuse.weld import Change

_MORE, _SMALL = 32, 2**22
_GEMMS = ("mm", "bmm", "addmm", "baddbmm", "linear", "attention", "convolution", "matmul")
_VIEWS = ("detach", "empty", "empty_like", "_unsafe_view", "_reshape_alias")


class _Count(TorchDispatchMode):
    """Counts the bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        if not (function.is_view or name in _VIEWS or any(part in name for part in _GEMMS)):
            tensors = tree_leaves((args, kwargs, result))
            self.moved += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return result


def gain(
    scope: torch.nn.Module,
    changes: Sequence[Change],
    inputs: Sequence[Any],
    device: torch.device,
) -> float | None:
    """The bytes that the passes of `scope` move before the changes, divided by those after."""

    # Enough rows that the traffic of parameters matters as little as in training.
    more = _MORE if sum(p.numel() for p in scope.parameters()) < _SMALL else 2
    rows = [x if x is None else torch.cat([x] * more) for x in inputs]

    def moved(module: torch.nn.Module) -> int:
        probe.freeze_large(module)  # their gradients are results of GEMMs
        count = _Count()
        probe.run(module.train(), rows, torch.float32, count)
        return count.moved

    original = Twin(scope, device, torch.float32)
    changed = Twin(scope, device, torch.float32, original)
    for change in changes:
        change.of(changed.of(change.module)).apply()
    before, after = moved(original.module), moved(changed.module)
    return before / after if after else None
