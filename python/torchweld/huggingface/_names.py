"""Names of layers for `kernels`: of classes that have none, if they compute what a name says."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.fusion.graph.alone import STATES, Alone, CannotRecordError, Known
from torchweld.fusion.graph.mlp import GatedMLP
from torchweld.fusion.graph.patterns import layer_norm, rms_norm
from torchweld.fusion.graph.patterns.activation import Activation, compute
from torchweld.fusion.weld import why_not_change
from torchweld.huggingface import _kernel_layers as layers
from torchweld.huggingface._kernel_layers import Parts
from torchweld.huggingface._kernel_mapping import check_installed

_NAMED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_Reference = Callable[..., Any]


def name_layers(model: torch.nn.Module) -> list[str]:
    """Name the layers of a model that `kernels` has no name for, so that `kernelize` finds them.

    transformers names its RMSNorms, activations and rotations. This names norms of other classes,
    MLPs, linear layers with their activation, and the loss of a language model. A module gets a
    name if its forward is proven to compute what the name's layer does, of the attributes that the
    layer reads. A name is a class's; `kernelize` takes only the modules that were proven.

    Args:
        model: a model whose forwards nothing has replaced yet.

    Returns:
        Names of the modules that got one, in the order of the model.
    """
    check_installed("name_layers")
    if not isinstance(model, torch.nn.Module):
        accepted = "a torch.nn.Module"
        raise ArgumentError("name_layers", "model", f"a {type(model).__name__}", accepted)
    from kernels import replace_kernel_forward_from_hub

    named, known = [], Known()
    for path, module in model.named_modules():
        cls: Any = type(module)
        has_name = hasattr(cls, "kernel_layer_name")
        if (has_name and cls.kernel_condition is not _was_named) or why_not_change(module):
            continue
        name, parts = known.find(_find_name, module)
        if name is not None and not has_name:
            replace_kernel_forward_from_hub(cls, name, _was_named)
        if name is not None and cls.kernel_layer_name == name:
            _NAMED.add(module)
            if parts is not None:
                module.torchweld_parts = parts
            named.append(path)
    return [*named, *_name_loss(model)]


def _was_named(module: torch.nn.Module) -> bool:
    return module in _NAMED


def _find_name(module: Any) -> tuple[str | None, Parts | None]:
    """The name of a layer that computes what a module does, from the same attributes."""
    children = dict(module.named_children())
    if not children:
        return _name_norm(module), None
    if children.keys() >= {"gate_proj", "up_proj", "down_proj"}:
        return _name_mlp(module), None
    parts = _read_linear(module, children)
    return (None if parts is None else "LinearAct"), parts


def _prove(
    module: Any,
    inputs: list[torch.Tensor],
    list_references: Callable[[Alone], Iterator[tuple[Any, _Reference]]],
) -> Any:
    """What comes with the first reference that the forward is proven to be in every state.

    None without one.
    """
    found = []
    for state in STATES:
        try:
            alone = Alone(module, type(module).forward, inputs, state)
        except CannotRecordError:
            if state.transposed:  # as GPT-2's Conv1D raises an error then
                continue
            return None
        references = list_references(alone)
        found.append(next((what for what, ref in references if not alone.why_not(ref)), None))
        if found[-1] is None or found[-1] != found[0]:
            return None
    return found[0]


# --- Norms ----------------------------------------------------------------------------------------


def _name_norm(module: Any) -> str | None:
    weight: Any = getattr(module, "weight", None)
    shape = getattr(module, "normalized_shape", None)
    if not (hasattr(module, "variance_epsilon") or hasattr(module, "eps")):
        return None
    is_weighted = isinstance(weight, torch.Tensor)
    sizes = shape or (weight.shape if is_weighted else None)
    if sizes is None:
        return None
    x = torch.empty(3, 5, *sizes, device=weight.device if is_weighted else None)
    if hasattr(module, "activation"):
        return _prove(module, [x, torch.empty_like(x)], _list_gated_norms)  # type: ignore[no-any-return]
    return _prove(module, [x], _list_norms)  # type: ignore[no-any-return]


def _list_norms(alone: Alone) -> Iterator[tuple[str, _Reference]]:
    yield "LayerNorm", _layer_norm
    yield "LayerNorm", _layer_norm_by_hand
    yield "RMSNorm", _rms_norm_of_torch
    for kind in ("rounded", "wide", "promoted", "torch"):
        yield "RMSNorm", partial(_rms_norm, kind=kind)
    yield "RMSNormZeroCentered", partial(_rms_norm, kind="plus_one")


def _rms_norm(module: Any, x: Any, kind: str) -> Any:
    weight = getattr(module, "weight", None)
    return rms_norm.compute(x, weight, layers.read_epsilon(module), kind)


def _rms_norm_of_torch(module: Any, x: Any) -> Any:
    return torch.nn.functional.rms_norm(x, module.normalized_shape, module.weight, module.eps)


def _layer_norm(module: Any, x: Any) -> Any:
    shape = getattr(module, "normalized_shape", None) or module.weight.shape
    bias, eps = getattr(module, "bias", None), layers.read_epsilon(module)
    return torch.nn.functional.layer_norm(x, shape, module.weight, bias, eps)


def _layer_norm_by_hand(module: Any, x: Any) -> Any:
    bias = getattr(module, "bias", None)
    return layer_norm.by_hand(x, module.weight, bias, layers.read_epsilon(module))


def _list_gated_norms(alone: Alone) -> Iterator[tuple[str, _Reference]]:
    for norm in ("rounded", "wide", "promoted", "torch"):
        for kind in alone.list_kinds():
            yield "RMSNormGated", partial(_gated_norm, norm=norm, kind=kind)


def _gated_norm(module: Any, x: Any, gate: Any, norm: str, kind: Activation) -> Any:
    if kind.name != ("silu" if module.activation == "swish" else module.activation):
        raise ValueError("another activation")
    return (_rms_norm(module, x, norm) * compute(gate.float(), kind)).to(x.dtype)


# --- MLPs -----------------------------------------------------------------------------------------


def _name_mlp(module: Any) -> str | None:
    weight = getattr(module.gate_proj, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2:
        return None
    x = torch.empty(3, 5, weight.shape[1], device=weight.device)
    return _prove(module, [x], partial(_list_mlps, module))  # type: ignore[no-any-return]


def _list_mlps(module: Any, alone: Alone) -> Iterator[tuple[str, _Reference]]:
    by_erf = layers.is_by_erf(getattr(module, "act_fn", None))
    names = {("silu", "none"): "SwiGLUMLP", ("gelu", "none" if by_erf else "tanh"): "GeGLUMLP"}
    mlp = GatedMLP("gate_proj", "up_proj", "down_proj")
    for kind in alone.list_kinds():
        if name := names.get((kind.name, kind.approximate)):
            yield name, partial(mlp.compute, kind=kind)


def _read_linear(module: Any, children: dict[str, Any]) -> Parts | None:
    """A module of a linear layer and its activation, perhaps with a second layer and a dropout."""
    linear = [n for n, c in children.items() if getattr(getattr(c, "weight", 0), "ndim", 0) == 2]
    drops = [name for name, child in children.items() if isinstance(child, torch.nn.Dropout)]
    acts = [name for name in children if name not in (*linear, *drops)]
    if len(acts) != 1 or not 1 <= len(linear) <= 2 or len(drops) > 1:
        return None
    (first, *second), (act,) = linear, acts
    weight = children[first].weight
    for is_transposed in (False, True):
        x = torch.empty(3, 5, weight.shape[0 if is_transposed else 1], device=weight.device)

        def list_references(alone: Alone, by: bool = is_transposed) -> Iterator[Any]:
            for kind in alone.list_kinds():
                how = kind.name, kind.approximate, by
                yield how, partial(_linear_act, first, (*second, *drops), kind, by)

        if (how := _prove(module, [x], list_references)) is not None:
            kinds = layers.PartKind.of(children[first]), layers.PartKind.of(children[act])
            activation, approximate, _ = how
            after = (*second, *drops)
            return Parts(first, act, after, activation, approximate, is_transposed, kinds)
    return None


def _linear_act(
    first: str, after: tuple[str, ...], kind: Activation, by: bool, module: Any, x: Any
) -> Any:
    layer = getattr(module, first)
    if by:
        y = torch.addmm(layer.bias, x.view(-1, x.size(-1)), layer.weight)
        y = y.view(*x.size()[:-1], layer.weight.shape[1])
    else:
        y = torch.nn.functional.linear(x, layer.weight, layer.bias)
    y = compute(y, kind)
    for name in after:
        y = getattr(module, name)(y)
    return y


def _name_loss(model: Any) -> list[str]:
    """Make the loss of a language model a layer, whose forward `kernelize` may replace."""
    from kernels import use_kernel_forward_from_hub
    from transformers.loss.loss_utils import ForCausalLMLoss

    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        return []
    # The property of that name reads this attribute.
    model._loss_function = use_kernel_forward_from_hub("ForCausalLMLoss")(ForCausalLMLoss)
    return ["_loss_function"]
