"""A mapping for the package `kernels`: which of our layers replaces a forward, by its name."""

from __future__ import annotations

import importlib.metadata
import re
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.utils import import_utils

from torchweld.errors import ArgumentError
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
    "LinearAct": layers.LinearAct,
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
    check_installed("kernel_mapping")
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


def check_installed(function: str) -> None:
    """Raise an error if `kernels` is missing, too old or switched off."""
    accepted = f"kernels >= {'.'.join(map(str, _OLDEST))}: pip install kernels"
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{function}: kernels is not installed; accepted: {accepted}") from None
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST:
        raise ImportError(f"{function}: kernels is {version}; accepted: {accepted}")
    from kernels.layer import globals as switches

    if switches._DISABLE_KERNEL_MAPPING:
        accepted = "0 or unset: with it kernelize keeps every forward"
        raise ArgumentError(function, "DISABLE_KERNEL_MAPPING", "1", accepted)


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
