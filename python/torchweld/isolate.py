"""Runs code where the caller does not notice, without the caller's modes, hooks and states."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

leave_dispatch_modes = _disable_current_modes
leave_transforms = temporarily_clear_interpreter_stack


@contextmanager
def leave_modes() -> Iterator[None]:
    """Leave dispatch modes, transforms and inference mode: later calls use what is made here."""
    with ExitStack() as stack:
        stack.enter_context(leave_dispatch_modes())
        stack.enter_context(leave_transforms())
        stack.enter_context(torch.inference_mode(False))
        yield


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Run on a device, without the caller's modes, hooks, autocast and inference mode.

    A checkpoint's hooks would call the op again when a saved tensor is unpacked, counters would
    count the calls, and offloading would move their tensors.
    """
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(leave_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            stack.enter_context(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        yield
