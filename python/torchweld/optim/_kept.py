"""A cache of tensors that later calls can use, whatever mode the first call runs in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def keep(maxsize: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """functools.lru_cache, except under a mode of dispatch or of inference.

    A FakeTensorMode makes fake tensors, and takes no others; autograd cannot save those of
    inference_mode.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        kept = functools.lru_cache(maxsize=maxsize)(function)

        @functools.wraps(function)
        def call(*arguments: Any) -> T:
            has_mode = torch._C._len_torch_dispatch_stack() or torch.is_inference_mode_enabled()
            return function(*arguments) if has_mode else kept(*arguments)

        return call

    return decorate
