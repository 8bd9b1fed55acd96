"""Copies of modules for trials: with random values, without hooks, never on a meta device."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

import torch

from torchweld.dispatch.dtensor import is_dtensor
from torchweld.fusion.kernelized import KERNEL_FUNCTIONS
from torchweld.fusion.weld import why_not_own_forward

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SEED = 20
# Numbers drawn per tensor, which are then repeated. A prime, so that no two rows are equal.
_DRAWN = 1_048_573


class CannotCopyError(ValueError):
    """A module cannot be copied out of its model. The message says why."""


class Twin:
    """A copy of `module` whose tensors have the same shapes but new values.

    Args:
        module: the module to copy.
        device: the copy's device.
        dtype: the dtype of its floating-point tensors; None: each keeps its own.
        like: an earlier copy of the same device and dtype, whose parameters the copy shares.

    Random values are rounded to the tensor's dtype in `module`, so that twins of different dtypes
    have the same values.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device: torch.device,
        dtype: torch.dtype | None = None,
        like: Twin | None = None,
    ) -> None:
        self._device, self._dtype = device, dtype
        self._inside = {id(part) for part in module.modules()}
        self._memo: dict[int, Any] = {}
        if like is not None:
            shared = {id(parameter) for parameter in module.parameters()}
            self._memo = {key: like._memo[key] for key in shared & like._memo.keys()}
        self._generator = torch.Generator().manual_seed(_SEED)
        self.module = self._copy_module(module)

    def of(self, part: torch.nn.Module) -> torch.nn.Module:
        """The copy of a part of the module."""
        copy: torch.nn.Module = self._memo[id(part)]
        return copy

    def _copy_module(self, module: torch.nn.Module) -> torch.nn.Module:
        if id(module) in self._memo:
            return self.of(module)
        if id(module) not in self._inside:
            raise CannotCopyError("it refers to a module outside itself")
        if isinstance(module, torch.jit.ScriptModule):
            raise CannotCopyError("it is scripted")
        if reason := why_not_own_forward(module):
            raise CannotCopyError(reason)
        copy = torch.nn.Module.__new__(type(module))
        self._memo[id(module)] = copy
        for name, value in vars(module).items():
            if "_hooks" in name:
                value = type(value)()
            elif name in ("forward", "_old_forward", "_hf_hook"):
                continue
            elif name == "_compiled_call_impl":
                value = None
            elif name != KERNEL_FUNCTIONS:  # they are no parts of it
                value = self._copy_value(value)
            vars(copy)[name] = value
        return copy

    def _copy_value(self, value: Any) -> Any:
        if isinstance(value, torch.nn.Module):
            return self._copy_module(value)
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value)
        if type(value) in (list, tuple, set, frozenset):
            return type(value)(self._copy_value(item) for item in value)
        if isinstance(value, dict) and type(value).__init__ is dict.__init__:
            return type(value)((key, self._copy_value(item)) for key, item in value.items())
        if isinstance(value, MethodType) and isinstance(value.__self__, torch.nn.Module):
            return MethodType(value.__func__, self._copy_module(value.__self__))
        if isinstance(value, functools.partial):
            function, *args = (self._copy_value(v) for v in (value.func, *value.args))
            return functools.partial(function, *args, **self._copy_value(value.keywords))
        if isinstance(value, FunctionType) and any(map(_is_state, _list_closure(value))):
            raise CannotCopyError("a function in its attributes holds a module or a tensor")
        return value

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._memo:
            self._memo[id(tensor)] = self._draw(tensor)
        copy: torch.Tensor = self._memo[id(tensor)]
        return copy

    def _draw(self, tensor: torch.Tensor) -> torch.Tensor:
        known = type(tensor) in _PLAIN or is_dtensor(tensor)
        if not known or tensor.is_quantized or tensor.layout != torch.strided:
            raise CannotCopyError(f"it holds a {type(tensor).__name__} of {tensor.dtype}")
        if not tensor.is_floating_point():
            copy = torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._device)
            return copy if tensor.is_meta else copy.copy_(tensor.detach())
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        dtype = self._dtype or tensor.dtype
        if not (is_parameter or tensor.is_meta or is_dtensor(tensor)):
            return tensor.detach().to(self._device, dtype, copy=True)
        drawn = (
            self._draw_values(tensor.shape, is_parameter).to(tensor.dtype).to(self._device, dtype)
        )
        count = tensor.shape.numel()
        values = drawn.repeat(-(-count // _DRAWN))[:count].view(tensor.shape)
        return torch.nn.Parameter(values) if is_parameter else values

    def _draw_values(self, shape: torch.Size, is_parameter: bool) -> torch.Tensor:
        """Draw values, which the caller repeats until there are enough.

        A buffer's values are positive, like variances. A matrix's values make its products about 1.
        """
        low, high = 0.5, 1.5
        if is_parameter:
            high = math.sqrt(3 / min(shape[-2:])) if len(shape) > 1 and min(shape[-2:]) else 1.0
            low = -high
        values = torch.empty(min(shape.numel(), _DRAWN), device="cpu", dtype=torch.float32)
        return values.uniform_(low, high, generator=self._generator)


def _list_closure(function: FunctionType) -> Iterable[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            continue


def _is_state(value: Any) -> bool:
    return isinstance(value, (torch.nn.Module, torch.Tensor))
