"""Isolates a trial from the modes and hooks that its caller has enabled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Run on a device, out of sight of the caller's modes, hooks, autocast and inference mode.

    A checkpoint's hooks would call the op again when a saved tensor is unpacked, counters would
    count the trial, and offloading would move its tensors.
    """
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            stack.enter_context(saved_tensors_hooks(_same, _same))
        yield


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
