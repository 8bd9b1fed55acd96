"""Linear layers and attention that torch computes in plain loops: in 16 bits on CPUs without units.

Nothing else changes: in float32, and on other devices, torch runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from torchweld.fusion.rewrite import reads
from torchweld.fusion.view import View
from torchweld.fusion.weld import Change, Proposal, Weld, forward_of, why_not_change
from torchweld.ops.attention.converted import attention
from torchweld.ops.gemm import gemm
from torchweld.ops.gemm.linear_act import linear_as_torch
from torchweld.ops.gemm.product import is_converted

_HOW = "in 16 bits by float32 GEMMs"
ATTENTION = f"attention {_HOW}"
# Names of torch's function, and of the table in which transformers finds what calls it.
_CALLS, _TABLE = "scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS"
_CONV1D = "transformers.pytorch_utils"


# --- Linear layers --------------------------------------------------------------------------------


class Linear(Weld):
    """torch.nn.Linear."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    _parameters: dict[str, Any]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Here and not by getattr, a Python function of torch's that takes longer than our checks.
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        if weight is None or bias is None:  # it has no bias, or they are computed or replaced
            weight, bias = self.weight, self.bias
        if input.dtype is torch.float32 and not torch.is_autocast_enabled("cpu"):  # the usual case
            return linear(input, weight, bias)
        return linear_as_torch(input, weight, bias)


class Conv1D(Weld):
    """The layer of transformers whose weight is transposed."""

    weight: torch.Tensor
    bias: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if gemm.is_converted(x, self.weight.mT, self.bias):
            return linear_as_torch(x, self.weight.mT, self.bias)
        return self.welded_from.forward(self, x)  # type: ignore[no-any-return]


def find_plain_linear(module: torch.nn.Module, view: View) -> Iterator[Proposal]:
    """A linear layer that no other weld has taken."""
    weight = module._parameters.get("weight")
    if weight is None or not needs_products(weight):
        return
    is_conv = type(module).__name__ == "Conv1D" and type(module).__module__ == _CONV1D
    weld: type[Weld] = Conv1D if is_conv else Linear
    if not (is_conv or forward_of(module) is torch.nn.Linear.forward):
        return
    around = view.parents.get(id(module), ())
    is_read = any(isinstance(parent, torch.nn.MultiheadAttention) for parent in around)
    if not is_read and why_not_change(module) is None:  # a MultiheadAttention reads the weight
        changes = (Change(module, weld, f"linear {_HOW}"),)
        yield Proposal(module, type(module).__name__, changes, module, known=True, tried=True)


def needs_products(weight: torch.Tensor) -> bool:
    """Whether a layer of this weight would be slow in 16 bits, its own or those of autocast."""
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return is_converted(weight, weight.dtype if weight.dtype.itemsize == 2 else torch.bfloat16)


# --- Attention ------------------------------------------------------------------------------------


def multiplies_slowly(x: torch.Tensor) -> bool:
    """Whether torch would multiply this tensor in plain loops, in its dtype or in autocast's."""
    return is_converted(x, gemm.find_dtype(x))


class _PlainProducts(TorchFunctionMode):
    """In it, torch's linear layers and attention in 16 bits are by float32 GEMMs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _INSTEAD.get(func, func)(*args, **kwargs or {})


_INSTEAD: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.scaled_dot_product_attention: attention,
    linear: linear_as_torch,
}


def serve_products(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward in which calls of torch's linear and attention in 16 bits are by float32 GEMMs."""

    @functools.wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # Dynamo follows no mode around methods in Python
            return forward(self, *args, **kwargs)
        first = next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)), None)
        if first is None or not multiplies_slowly(first):
            return forward(self, *args, **kwargs)
        with _PlainProducts():
            return forward(self, *args, **kwargs)

    return run


class Attention(Weld):
    """A module whose forward calls torch's attention."""

    forward: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "welded_from" in vars(cls):
            cls.forward = serve_products(cls.welded_from.forward)
        super().__init_subclass__(**kwargs)


def is_slow_attention(module: torch.nn.Module) -> bool:
    """Whether a forward calls torch's attention, on a CPU that would be slow in 16 bits."""
    forward = forward_of(module)
    config = getattr(module, "config", None)
    by_table = getattr(config, "_attn_implementation", None) == "sdpa" and reads(forward, _TABLE)
    is_torchs = reads(forward, _CALLS) or by_table
    return is_torchs and any(map(needs_products, module.parameters()))


def find_plain_attention(module: torch.nn.Module, view: View) -> Iterator[Proposal]:
    """A module that calls torch's attention and that no other weld has taken."""
    if why_not_change(module) is None and is_slow_attention(module):
        changes = (Change(module, Attention, ATTENTION),)
        yield Proposal(module, type(module).__name__, changes, module, known=True, tried=True)
