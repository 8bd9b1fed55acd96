"""The GEMM of a linear layer: torch's own, or in 16 bits on the CPU one with our backward.

On CPUs with 16-bit units it is oneDNN's, which adds the bias to the sums, while torch first copies
it to every row of the result. On others it is a product by float32 GEMMs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torchweld import state
from torchweld.dispatch.autograd import (
    exports_a_derivative,
    find_apply,
    list_reached,
    make_unaliased,
    wants_gradient,
)
from torchweld.dispatch.bare import BareOp
from torchweld.dispatch.warm.guards import are_comparable, is_plain
from torchweld.ops.gemm import product
from torchweld.registry.processor import has_units

_TRANSPOSED = BareOp(
    "transposed", "(Tensor input) -> Tensor", lambda x: x.new_empty((x.shape[1], x.shape[0]))
)

# With fewer products the node costs as much as it gains.
_SMALLEST = 2**30
# Transposing one element pays off from this many products on, see weight_gradient.
_PRODUCTS_OF_AN_ELEMENT = 512
# What autocast casts.
CAST = (torch.float32, torch.bfloat16, torch.float16)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """torch.nn.functional.linear, or what computes the same in less time."""
    if not state.is_compiling() and product.is_small(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    if is_converted(x, weight, bias):
        dtype = find_dtype(x)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        trains = wants_gradient(x, weight, bias)
        return _Converted.apply(x, weight, bias) if trains else _convert(x, weight, bias)
    if (
        state.is_compiling()  # the number of rows must not become a guard
        or x.numel() * weight.shape[:1].numel() < _SMALLEST
        or not is_served_by_onednn(x, weight, bias)
    ):
        return torch.nn.functional.linear(x, weight, bias)
    if wants_gradient(x, weight, bias):
        return _OneDNN.apply(x, weight, bias)
    return onednn(x, weight, bias)


def find_linear(
    x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor | None
) -> Callable[..., torch.Tensor]:
    """The layer for calls like one with these tensors, which guards can compare.

    Only in 16 bits more than torch's serves. Where that is by float32 GEMMs, nothing but sizes is
    left to decide. A tensor of the others may be what x is computed from.
    """
    dtype, given = find_dtype(x), [t for t in (x, weight, *others) if t is not None]
    if not are_comparable(given):
        return linear
    if dtype.itemsize != 2:
        return torch.nn.functional.linear
    is_cast = any(t.dtype is not dtype for t in given)
    if is_cast or not (product.is_converted(x, dtype) and product.may_run()):
        return linear
    return partial(_run_converted, wants_gradient(*given))


def _run_converted(
    trains: bool, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The layer by float32 GEMMs, or torch's where the sizes do not pay."""
    columns, terms = weight.shape
    if not product.pays(x.shape[:-1].numel(), columns, terms, weight.stride(1)):
        return torch.nn.functional.linear(x, weight, bias)
    return (_apply_converted if trains else _convert)(x, weight, bias)  # type: ignore[no-any-return]


def onednn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str = "none",
    algorithm: str = "",
) -> torch.Tensor:
    """oneDNN's linear layer and activation; `is_served_by_onednn` says which arguments it takes.

    torch's op packs x and tells oneDNN the weight's strides, but reads the bias as if packed.
    """
    bias = None if bias is None else bias.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], algorithm)


def find_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of a GEMM of x: autocast leaves float64 as it is."""
    kind = x.device.type
    cast = torch.is_autocast_enabled(kind) and x.dtype is not torch.float64
    return torch.get_autocast_dtype(kind) if cast else x.dtype


# --- Which calls ----------------------------------------------------------------------------------


def is_converted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the layer is by float32 GEMMs: in 16 bits on a CPU without units for them."""
    dtype = find_dtype(x)
    if not product.is_converted(x, dtype) or exports_a_derivative():
        return False
    if why_not_fused(x, weight, bias) is not None:
        return False
    tensors = [t for t in (x, weight, bias) if t is not None]
    casts = torch.is_autocast_enabled("cpu")
    if not all(t.is_cpu and (t.dtype is dtype or (casts and t.dtype in CAST)) for t in tensors):
        return False
    if state.is_compiling():  # the number of rows must not become a guard
        return product.may_run()
    rows, (columns, terms) = x.shape[:-1].numel(), weight.shape
    return product.pays(rows, columns, terms, weight.stride(1)) and product.may_run(*tensors)


def is_served_by_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether oneDNN's 16-bit GEMM can run: not while compiling or under autocast."""
    if state.is_compiling() or not (x.is_cpu and has_units(x.dtype)):
        return False
    if torch.is_autocast_enabled("cpu") or not torch._C._get_mkldnn_enabled():
        return False
    tensors = [t for t in (x, weight, bias) if t is not None]
    return (
        all(t.is_cpu and t.dtype is x.dtype for t in tensors)
        and why_not_fused(x, weight, bias) is None
        and x.ndim > 1
        and 0 not in (*x.shape, *weight.shape)
    )


def why_not_fused(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Why torch's GEMM has to run, which also raises any error."""
    tensors = [t for t in (x, weight, bias) if t is not None]
    if any(type(t) not in state.PLAIN and not state.is_traced(t) for t in tensors):
        return "a tensor is of a subclass"
    if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        return "the sizes of input and weight do not match"
    if bias is not None and bias.shape != weight.shape[:1]:
        return "the sizes of weight and bias do not match"
    return None


# --- Autograd -------------------------------------------------------------------------------------


def _differentiate(ctx: Any, *grads: Any) -> Any:
    grad, (x, weight) = grads[0], ctx.saved_tensors
    to_x, to_weight, to_bias, *_ = goes_on = list_reached(ctx)
    gradients: list[Any] = [None] * len(goes_on)
    if grad is None:
        return tuple(gradients)
    rows = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1])
    if to_x:
        gradients[0] = product.multiply(grad, weight)
    if to_weight:
        gradients[1] = weight_gradient(rows, x.reshape(rows.shape[0], x.shape[-1]))
    if to_bias:
        gradients[2] = rows.sum(0)
    return tuple(gradients)


class LinearNode(torch.autograd.Function):
    """The backward of a linear layer that saved x and weight; a schedule can run it in parts.

    A subclass's first arguments are x, weight and bias; its first result is the layer's.
    """

    backward = staticmethod(_differentiate)


class ComputedNode(LinearNode):
    """The node of a layer whose result, the last argument, is already computed."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, result: Any) -> Any:
        ctx.save_for_backward(x, weight)
        return torch.ops.aten._unsafe_view(result, result.shape)  # not one of the node's inputs


_apply_computed = find_apply(ComputedNode)


def enter_graph(*arguments: Any) -> torch.Tensor:
    """A computed layer's result, in autograd's graph by a ComputedNode."""
    compiling = state.is_compiling()
    return (ComputedNode.apply if compiling else _apply_computed)(*arguments)  # type: ignore[no-any-return]


class _OneDNN(LinearNode):
    """The layer on oneDNN. It saves a factor only if the other factor needs a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        to_x, to_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if to_weight else None, weight if to_x else None)
        return make_unaliased(onednn(x, weight, bias))


class _Converted(LinearNode):
    """The layer by float32 GEMMs. It saves a factor only if the other factor needs a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
        to_x, to_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if to_weight else None, weight if to_x else None)
        return make_unaliased(_convert(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        if torch.is_grad_enabled() or state.is_watched() or not is_plain(grad):
            return _differentiate(ctx, grad)
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = list_reached(ctx)
        rows = grad.reshape(grad.shape[:-1].numel(), grad.shape[-1])
        return (
            product.multiply_plain(grad, weight) if to_x else None,
            product.multiply_plain(rows.t(), x.reshape(rows.shape[0], -1)) if to_weight else None,
            rows.sum(0) if to_bias else None,
        )


_apply_converted = find_apply(_Converted)


def _convert(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    start = None if bias is None else bias.expand(rows.shape[0], bias.shape[0])
    made = product.PRODUCT(rows, weight.t(), start, 1.0, 1.0)
    return made.view(*x.shape[:-1], made.shape[1])  # type: ignore[no-any-return]


def weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """grad.t() @ x for two matrices.

    oneDNN's GEMM with AMX rearranges a transposed first factor once for every panel of the second
    factor's columns; at (2048, 3072).t() @ (2048, 768) that takes half of its 10 ms. A transposing
    pass reads and writes each element only once. It transposes grad or, if they have fewer
    elements, x and the result.
    """
    if product.serves(grad.t(), x):
        return product.multiply(grad.t(), x)
    # On a GPU torch transposes; a graph must be of torch's ops.
    if grad.is_cuda or state.is_compiling() or torch.is_grad_enabled():
        return grad.t() @ x
    (rows, out), inner = grad.shape, x.shape[1]
    of_grad, of_the_others = rows * out, (rows + out) * inner
    if not _gains(grad, x, min(of_grad, of_the_others)):
        return grad.t() @ x
    transposed = torch.ops.torchweld.transposed.cpu
    if of_grad <= of_the_others:
        return transposed(grad) @ x
    return transposed(transposed(x) @ grad)


def _gains(grad: torch.Tensor, x: torch.Tensor, elements: int) -> bool:
    """Whether weight_gradient gains from transposing this many elements.

    With fewer products per thread, oneDNN leaves one of two threads idle unless it rearranges.
    Without AMX the GEMM takes ten times as long, while rearranging takes no longer.
    """
    least = max(_SMALLEST * torch.get_num_threads(), _PRODUCTS_OF_AN_ELEMENT * elements)
    if grad.shape[1] * x.numel() < least or not (grad.is_contiguous() and x.is_contiguous()):
        return False
    wanted = grad.dtype is x.dtype is torch.bfloat16 and _has_amx()
    return wanted and _TRANSPOSED.why_not("cpu", (grad,)) is None


@functools.cache
def _has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()
