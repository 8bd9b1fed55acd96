"""Models of transformers that are built fused, by its patch mapping: before they have weights."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from torchweld.errors import ArgumentError
from torchweld.fusion import fuse
from torchweld.fusion.weld import find_original, find_welds


@contextmanager
def patch(model: Any, kind: Any = AutoModelForCausalLM) -> Iterator[dict[str, type]]:
    """Build models with fused modules in `from_pretrained` and `from_config`, inside this context.

    `fuse` decides on a model without weights what the classes of its layers become, and
    transformers puts those classes in place of its own while it builds a model. Parameters have the
    same names, so that any checkpoint loads, and files of such a model load without torchweld. What
    is outside of its layers, such as its loss, is left to `torchweld.fuse(model)`, which may
    follow.

    Args:
        model: a config, or what `AutoConfig.from_pretrained` takes: a name or a path.
        kind: the class that will build it, such as `AutoModelForCausalLM`.

    Yields:
        The classes by the names of those that they replace.
    """
    mapping_file = _find_patching()
    config = AutoConfig.from_pretrained(model) if isinstance(model, str) else model
    if not isinstance(config, PretrainedConfig):
        accepted = "a config of transformers, or the name or path of one"
        raise ArgumentError("patch", "model", f"a {type(model).__name__}", accepted)
    _check_kind(kind, config)
    with torch.device("meta"):
        empty = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    mapping = _find_classes(empty)
    recorded = {cls: dict(found) for cls, found in _list_recorders(empty)}
    mapping_file.register_patch_mapping(mapping)
    try:
        yield mapping
    finally:
        mapping_file.unregister_patch_mapping(list(mapping))
        # transformers leaves both if a constructor fails, and the second one in any case.
        _put_back(mapping)
        for cls, found in recorded.items():
            cls._can_record_outputs.update(found)


def _check_kind(kind: Any, config: PretrainedConfig) -> None:
    is_auto = hasattr(kind, "_model_mapping")  # and says itself which configs it knows
    if is_auto or (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        taken = PretrainedConfig if is_auto else getattr(kind, "config_class", None)
        if isinstance(config, taken or PretrainedConfig):
            return
        accepted = f"a class for a {type(config).__name__}"
    else:
        accepted = "a model's class of transformers, such as AutoModelForCausalLM"
    raise ArgumentError("patch", "kind", getattr(kind, "__name__", repr(kind)), accepted)


def _find_patching() -> Any:
    try:
        return importlib.import_module("transformers.monkey_patching")
    except ImportError:
        accepted = "a release with transformers.monkey_patching, 5.3 or later"
        version = transformers.__version__
        raise ImportError(f"patch: transformers is {version}; accepted: {accepted}") from None


def _find_classes(empty: torch.nn.Module) -> dict[str, type]:
    """The classes that a model's repeated layers become.

    Layers of one class share the class that the first of them gets: its graphs tell them apart.
    """
    fuse(empty)
    found: dict[str, type] = {}
    for _, module in find_welds(empty):
        cls = type(module)
        if module is not empty and _is_in_its_file(cls):
            found.setdefault(cls.__name__, cls)
    return found


def _is_in_its_file(cls: type) -> bool:
    """Whether the class that a weld replaces is what its file has under its name."""
    original: Any = find_original(cls)
    file = sys.modules.get(original.__module__)
    in_transformers = original.__module__.startswith("transformers.")
    return in_transformers and getattr(file, original.__name__, None) is original


def _list_recorders(model: torch.nn.Module) -> Iterator[tuple[Any, dict[str, Any]]]:
    for module in model.modules():
        for cls in type(module).__mro__:
            if vars(cls).get("_can_record_outputs"):
                yield cls, vars(cls)["_can_record_outputs"]


def _put_back(mapping: dict[str, type]) -> None:
    files = [f for n, f in list(sys.modules.items()) if n.startswith("transformers") and f]
    for name, cls in mapping.items():
        for file in files:
            if vars(file).get(name) is cls:
                setattr(file, name, find_original(cls))
