"""A cache of tensors that stay valid in any mode of later calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def cache_tensors(maxsize: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Cache results like functools.lru_cache, except under a dispatch mode or inference mode.

    A FakeTensorMode makes and accepts only fake tensors, and autograd cannot save tensors that were
    made in inference_mode.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        cached = functools.lru_cache(maxsize=maxsize)(function)

        @functools.wraps(function)
        def call(*arguments: Any) -> T:
            has_mode = torch._C._len_torch_dispatch_stack() or torch.is_inference_mode_enabled()
            return function(*arguments) if has_mode else cached(*arguments)

        return call

    return decorate
