"""A mapping for the package `kernels`: which of our layers replaces a forward, by its name."""

from __future__ import annotations

import importlib.metadata
import re
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.utils import import_utils

from torchweld.errors import ArgumentError
from torchweld.fusion.patterns.gated_mlp import GatedMLP
from torchweld.fusion.patterns.norm import LayerNorm, Norm, RMSNorm
from torchweld.fusion.plan import decide
from torchweld.fusion.weld import Change
from torchweld.huggingface import _kernel_layers as layers

_OLDEST = (0, 17)
# Names that transformers gives to layers, and names in its default mapping that it gives to none.
LAYERS: dict[str, type[torch.nn.Module]] = {
    "RMSNorm": layers.RMSNorm,
    "RMSNormZeroCentered": layers.RMSNormZeroCentered,
    "RMSNormGated": layers.RMSNormGated,
    "LayerNorm": layers.LayerNorm,
    "rotary_pos_emb": layers.RotaryPosEmb,
    "SwiGLUMLP": layers.SwiGLUMLP,
    "GeGLUMLP": layers.GeGLUMLP,
    "SiLU": layers.SiLU,
    "GeLU": layers.GELU,
    "GeluTanh": layers.GELUTanh,
    "NewGELU": layers.GELUTanh,
    "FastGELU": layers.GELUTanh,
    "QuickGELU": layers.QuickGELU,
    "ForCausalLMLoss": layers.ForCausalLMLoss,
}


@dataclass(frozen=True)
class Repository:
    """What `kernels` asks for a layer: ours is in this package, so that nothing is downloaded."""

    layer: type[torch.nn.Module]

    def load(self) -> type[torch.nn.Module]:
        return self.layer

    def __str__(self) -> str:
        return f"torchweld.huggingface (layer `{self.layer.__name__}`)"


class KernelMapping(dict[str, Any]):
    """A mapping for `kernels.register_kernel_mapping`; as a context it is in force inside."""

    def __enter__(self) -> KernelMapping:
        from kernels import use_kernel_mapping

        self._context = use_kernel_mapping(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def kernel_mapping() -> KernelMapping:
    """The layers that `kernels.kernelize` takes from torchweld, on the CPU and on CUDA.

    Use it as a context around `kernels.kernelize(model, mode=..., device=...)`, or give it once to
    `kernels.register_kernel_mapping`. Registered, it also serves `from_pretrained(...,
    use_kernels=True)`: a model that was made so kernelizes itself again in `train()` and `eval()`,
    and would lose layers of a context that has ended. All modes are served, with torch.compile and
    without. Other names and devices keep the mapping that they had.

    Returns:
        A dictionary that is a context, too. It raises an error if `kernels` is missing, too old or
        switched off by DISABLE_KERNEL_MAPPING.
    """
    _check_installed()
    _warn_of_no_names()
    from kernels import CUDAProperties, Device, Mode

    # Of two intervals that hold a GPU `kernels` takes the smaller one, and transformers registers
    # its own without an end.
    gpu = Device(type="cuda", properties=CUDAProperties(min_capability=70, max_capability=9999))
    mapping = KernelMapping()
    for name, layer in LAYERS.items():
        modes = {Mode.TRAINING: Repository(layer), Mode.INFERENCE: Repository(layer)}
        modes |= {mode | Mode.TORCH_COMPILE: repo for mode, repo in modes.items()}
        mapping[name] = {"cpu": modes, gpu: modes}
    return mapping


def _check_installed() -> None:
    accepted = f"kernels >= {'.'.join(map(str, _OLDEST))}: pip install kernels"
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"kernel_mapping: kernels is not installed; accepted: {accepted}"
        ) from None
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
        raise ImportError(f"kernel_mapping: kernels is {version}; accepted: {accepted}")
    from kernels.layer import globals as switches

    if switches._DISABLE_KERNEL_MAPPING:
        accepted = "0 or unset: with it kernelize keeps every forward"
        raise ArgumentError("kernel_mapping", "DISABLE_KERNEL_MAPPING", "1", accepted)


def _warn_of_no_names() -> None:
    """transformers gives its layers no names if it does not take the installed `kernels`."""
    if import_utils.is_kernels_available():
        return
    oldest = getattr(import_utils, "KERNELS_MIN_VERSION", "another")
    end = getattr(import_utils, "KERNELS_MAX_VERSION", "another")
    warnings.warn(
        f"transformers {transformers.__version__} takes kernels >= {oldest}, < {end}, and"
        f" {importlib.metadata.version('kernels')} is installed: its layers have no names for"
        " kernelize; torchweld.huggingface.name_layers(model) names norms, MLPs and the loss",
        stacklevel=3,
    )


# --- Names for layers that have none --------------------------------------------------------------

_NAMED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def name_layers(model: torch.nn.Module) -> list[str]:
    """Name the layers of a model that `kernels` has no name for, so that `kernelize` finds them.

    transformers names its RMSNorms, activations and rotations. This names norms of other classes,
    gated MLPs, and the loss of a language model. `fuse` decides what a module computes, by its
    trials. A name is a class's; `kernelize` takes only the modules that were tried.

    Args:
        model: a model whose forwards nothing has replaced yet.

    Returns:
        Names of the modules that got one, in the order of the model.
    """
    _check_installed()
    if not isinstance(model, torch.nn.Module):
        accepted = "a torch.nn.Module"
        raise ArgumentError("name_layers", "model", f"a {type(model).__name__}", accepted)
    from kernels import replace_kernel_forward_from_hub

    accepted, _ = decide(model, _is_part, True, measure=False)
    named, names = [], {id(module): name for name, module in model.named_modules()}
    for change in (change for each in accepted for change in each.proposal.changes):
        name, cls = _find_name(change), type(change.module)
        if not hasattr(cls, "kernel_layer_name") and name is not None:
            replace_kernel_forward_from_hub(cls, name, _was_named)
        was_named = getattr(cls, "kernel_condition", None) is _was_named
        if was_named and cls.kernel_layer_name == name:  # type: ignore[attr-defined]
            _NAMED.add(change.module)
            named.append(names[id(change.module)])
    return [*named, *_name_loss(model)]


def _was_named(module: torch.nn.Module) -> bool:
    return module in _NAMED


def _is_part(module: torch.nn.Module, name: str) -> bool:
    """Whether a weld of a module may have a name: other welds would claim its parts."""
    return not module._modules or hasattr(module, "gate_proj")


def _find_name(change: Change) -> str | None:
    """The name of a layer that computes what a weld does, from the same attributes."""
    weld, of = change.weld, change.settings
    if weld in (LayerNorm, RMSNorm):  # torch's
        return weld.__name__
    if weld is Norm:
        reads = of["eps"] in ("eps", "variance_epsilon"), of["weight_name"] in ("weight", None)
        if not all(reads) or of["gate"] or (of["centered"] and of["offset"]):
            return None
        if of["centered"]:
            own = of["weight_name"] and of["bias_name"] in ("bias", None)
            return "LayerNorm" if own else None
        return "RMSNormZeroCentered" if of.get("offset") else "RMSNorm"
    if weld is GatedMLP:
        layers_of = of["gate"], of["up"], of["down"], of["dropout"], of["after"]
        if layers_of != ("gate_proj", "up_proj", "down_proj", None, None):
            return None
        return {"silu": "SwiGLUMLP", "gelu": "GeGLUMLP"}.get(of["activation"])
    return None


def _name_loss(model: Any) -> list[str]:
    """Make the loss of a language model a layer, whose forward `kernelize` may replace."""
    from kernels import use_kernel_forward_from_hub
    from transformers.loss.loss_utils import ForCausalLMLoss

    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        return []
    # The property of that name reads this attribute.
    model._loss_function = use_kernel_forward_from_hub("ForCausalLMLoss")(ForCausalLMLoss)
    return ["_loss_function"]
