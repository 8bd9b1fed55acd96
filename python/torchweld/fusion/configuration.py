"""Keys of module configurations, so that equal layers of a model are tried once."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from types import MethodType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

_SCALARS = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, type)


def make_key(module: torch.nn.Module) -> Hashable:
    """Make a key that is equal for modules that compute the same.

    It holds classes, shapes, dtypes and settings, but not a layer's number. Objects of other kinds
    count as equal only if they are identical.
    """
    return _key_of_module(module, {})


def _key_of_module(module: torch.nn.Module, seen: dict[int, int]) -> Hashable:
    if id(module) in seen:
        return "seen", seen[id(module)]
    seen[id(module)] = len(seen)
    attributes = [
        (name, _key_of_value(value, seen))
        for name, value in vars(module).items()
        if not _is_irrelevant(name, value)
    ]
    return type(module), tuple(attributes)


def _is_irrelevant(name: str, value: Any) -> bool:
    """Whether an attribute is the layer's number, a hook, or set by a call."""
    is_number = isinstance(value, int) and ("idx" in name or "index" in name or "layer_id" in name)
    return is_number or name in ("training", "_compiled_call_impl") or "_hooks" in name


def _key_of_value(value: Any, seen: dict[int, int]) -> Hashable:
    if isinstance(value, _SCALARS):
        return type(value), value
    if isinstance(value, torch.nn.Module):
        return _key_of_module(value, seen)
    if isinstance(value, torch.Tensor) and not is_lazy(value):
        return type(value), tuple(value.shape), value.dtype, value.device.type, value.layout
    if isinstance(value, (set, frozenset)) and all(isinstance(item, _SCALARS) for item in value):
        return type(value), frozenset(value)
    if isinstance(value, (list, tuple, torch.Size)):
        return type(value), tuple(_key_of_value(item, seen) for item in value)
    if isinstance(value, dict):
        return type(value), tuple((key, _key_of_value(item, seen)) for key, item in value.items())
    if isinstance(value, MethodType):
        return "method", id(value.__func__)
    if isinstance(value, functools.partial):
        return "partial", id(value.func), _key_of_value([*value.args, value.keywords], seen)
    return "object", id(value)
