"""The bytes that a module's passes move: all operations except GEMMs and views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchweld.fusion import probe
from torchweld.fusion.twin import Twin
from torchweld.fusion.weld import Change

_MORE, _SMALL = 32, 2**22
_GEMMS = ("mm", "bmm", "addmm", "baddbmm", "linear", "attention", "convolution", "matmul")
_VIEWS = ("detach", "empty", "empty_like", "_unsafe_view", "_reshape_alias")


class _Count(TorchDispatchMode):
    """Counts the bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        if not (function.is_view or name in _VIEWS or any(part in name for part in _GEMMS)):
            tensors = tree_leaves((args, kwargs, result))
            self.nbytes += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return result


def measure_gain(
    scope: torch.nn.Module,
    changes: Sequence[Change],
    inputs: Sequence[Any],
    device: torch.device,
) -> float | None:
    """The factor by which the passes of `scope` move fewer bytes after the changes, or None.

    None if there are no bytes to compare with.
    """
    # Enough rows that the traffic of parameters matters as little as in training.
    more = _MORE if sum(p.numel() for p in scope.parameters()) < _SMALL else 2
    rows = [x if x is None else torch.cat([x] * more) for x in inputs]

    def count_bytes(module: torch.nn.Module) -> int:
        probe.freeze_large(module)  # gradients of large parameters are results of GEMMs
        count = _Count()
        probe.run(module.train(), rows, torch.float32, count)
        return count.nbytes

    original = Twin(scope, device, torch.float32)
    changed = Twin(scope, device, torch.float32, original)
    for change in changes:
        change.of(changed.of(change.module)).apply()
    before, after = count_bytes(original.module), count_bytes(changed.module)
    return before / after if after else None
