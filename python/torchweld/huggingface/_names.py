"""Names of layers for `kernels`: of classes that have none, if they compute what a name says."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.fusion.patterns.activation import in_words
from torchweld.fusion.patterns.gated_mlp import GatedMLP, find_gated_mlp
from torchweld.fusion.patterns.norm import LayerNorm, Norm, RMSNorm, find_norm
from torchweld.fusion.plan import decide
from torchweld.fusion.view import View
from torchweld.fusion.weld import Change, Proposal, Tried, kind_of, propose
from torchweld.huggingface._kernel_layers import Parts, run_parts
from torchweld.huggingface._kernel_mapping import check_installed

_NAMED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def name_layers(model: torch.nn.Module) -> list[str]:
    """Name the layers of a model that `kernels` has no name for, so that `kernelize` finds them.

    transformers names its RMSNorms, activations and rotations. This names norms of other classes,
    MLPs, linear layers with their activation, and the loss of a language model. The trials of
    `fuse` decide what a module computes. A name is a class's; `kernelize` takes only the modules
    that were tried.

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

    patterns = find_gated_mlp, find_linear_act, find_norm
    accepted, _ = decide(model, None, True, measure=False, patterns=patterns)
    named, names = [], {id(module): name for name, module in model.named_modules()}
    for change in (change for each in accepted for change in each.proposal.changes):
        name, cls = _find_name(change), type(change.module)
        if not hasattr(cls, "kernel_layer_name") and name is not None:
            replace_kernel_forward_from_hub(cls, name, _was_named)
        was_named = getattr(cls, "kernel_condition", None) is _was_named
        if was_named and cls.kernel_layer_name == name:  # type: ignore[attr-defined]
            _NAMED.add(change.module)
            if change.weld is LinearAct:
                change.module.torchweld_parts = change.settings["parts"]
            named.append(names[id(change.module)])
    return [*named, *_name_loss(model)]


def _was_named(module: torch.nn.Module) -> bool:
    return module in _NAMED


class LinearAct(Tried):
    """What `_kernel_layers.LinearAct` will compute, for its trial."""

    weld_parts: Parts

    def weld_run(self, x: torch.Tensor) -> Any:
        return run_parts(self, self.weld_parts, x)


def find_linear_act(module: torch.nn.Module, view: View) -> Iterator[Proposal]:
    """A module of a linear layer and its activation, perhaps with a second layer and a dropout."""
    children = dict(module.named_children())
    linear = {name: form for name, child in children.items() if (form := view.linear(child))}
    acts = {name: kind for name, child in children.items() if (kind := view.activation(child))}
    drops = [name for name, child in children.items() if isinstance(child, torch.nn.Dropout)]
    is_whole = len(linear) + len(acts) + len(drops) == len(children)
    if not (is_whole and len(acts) == 1 and 1 <= len(linear) <= 2 and len(drops) <= 1):
        return
    (first, *second), ((act, kind),) = linear, acts.items()
    inner = first, act
    kinds = kind_of(children[first]), kind_of(children[act])
    parts = Parts(*inner, (*second, *drops), *kind, linear[first] == "transposed", kinds)
    becomes, skipped = f"linear_act ({in_words(kind)})", tuple(children[name] for name in inner)
    yield propose(module, LinearAct, becomes, {"parts": parts}, inner=skipped)


def _find_name(change: Change) -> str | None:
    """The name of a layer that computes what a weld does, from the same attributes."""
    weld, of = change.weld, change.settings
    if weld in (LayerNorm, RMSNorm):  # torch's
        return weld.__name__
    if weld is Norm:
        reads = of["eps"] in ("eps", "variance_epsilon"), of["weight_name"] in ("weight", None)
        if not all(reads) or (of["centered"] and of["offset"]):
            return None
        if of["gate"]:
            is_last = of["gate"] == "last" and not (of["centered"] or of["offset"])
            return "RMSNormGated" if is_last and hasattr(change.module, "activation") else None
        if of["centered"]:
            own = of["weight_name"] and of["bias_name"] in ("bias", None)
            return "LayerNorm" if own else None
        return "RMSNormZeroCentered" if of.get("offset") else "RMSNorm"
    if weld is GatedMLP:
        layers_of = of["gate"], of["up"], of["down"], of["dropout"], of["after"]
        if layers_of != ("gate_proj", "up_proj", "down_proj", None, None):
            return None
        return {"silu": "SwiGLUMLP", "gelu": "GeGLUMLP"}.get(of["activation"])
    return "LinearAct" if weld is LinearAct else None


def _name_loss(model: Any) -> list[str]:
    """Make the loss of a language model a layer, whose forward `kernelize` may replace."""
    from kernels import use_kernel_forward_from_hub
    from transformers.loss.loss_utils import ForCausalLMLoss

    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        return []
    # The property of that name reads this attribute.
    model._loss_function = use_kernel_forward_from_hub("ForCausalLMLoss")(ForCausalLMLoss)
    return ["_loss_function"]
