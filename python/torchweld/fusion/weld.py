"""A welded module is the same object with another class. Its attributes do not change."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import MethodType
from typing import Any, ClassVar

import torch


class Weld:
    """Base of the classes that welded modules get.

    `make_class` makes a class from a subclass of this one, the module's own class, and settings.
    The settings become class attributes. Their names begin with weld_, so they hide none of the
    module's attributes. Nothing is written to the module itself: setting its class back restores
    it.
    """

    welded_from: ClassVar[Any]
    weld_settings: ClassVar[tuple[tuple[str, Any], ...]]

    weld_class: ClassVar[type[Weld]]

    @property
    def qconfig(self) -> Any:
        """What torch.ao.quantization sets on each module, from the outside in.

        It then looks for exact classes, so that submodules get their own back.
        """
        if "qconfig" in vars(self):
            return vars(self)["qconfig"]
        raise AttributeError("qconfig")

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        modules: dict[str, Any] = self._modules  # type: ignore[attr-defined]
        for module in modules.values():
            if isinstance(module, Weld):
                set_class(module, find_original(type(module)))  # type: ignore[arg-type]
        vars(self)["qconfig"] = value

    @qconfig.deleter
    def qconfig(self) -> None:
        del vars(self)["qconfig"]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Recreate the class for copies and pickles, since pickle would not find it."""
        return _make_bare, (self.weld_class, self.welded_from, self.weld_settings), dict(vars(self))


# A class goes with the last module that has it, and what it has captured goes with it.
_CLASSES: weakref.WeakValueDictionary[Any, type] = weakref.WeakValueDictionary()


def make_class(weld: type[Weld], was: type, settings: tuple[tuple[str, Any], ...]) -> type:
    """Make the class of a welded module. It keeps the name of `was`: other code reads the name."""
    key: Any = (weld, was, settings)
    made = _CLASSES.get(key)
    if made is not None:
        return made
    body: dict[str, Any] = {"weld_class": weld, "welded_from": was, "weld_settings": settings}
    body |= {f"weld_{name}": value for name, value in settings}
    # torch.fx traces into modules that are not of torch.nn.
    body |= {"__module__": was.__module__, "__doc__": weld.__doc__}
    return _CLASSES.setdefault(key, type(was.__name__, (weld, was), body))


def find_original(cls: type) -> type:
    """Find the original class of a welded module; recreate it if the module was sharded since."""
    if "welded_from" in vars(cls):
        return cls.welded_from  # type: ignore[attr-defined,no-any-return]
    bases = tuple(find_original(base) if issubclass(base, Weld) else base for base in cls.__bases__)
    return type(cls.__name__, bases, dict(vars(cls)))


def _make_bare(weld: type[Weld], was: type, settings: tuple[tuple[str, Any], ...]) -> Any:
    """Make an instance without attributes."""
    cls = make_class(weld, was, settings)
    return object.__new__(cls)


def set_class(module: torch.nn.Module, cls: Any) -> None:
    """Set the class, and replace the old class's forward in the instance's attributes.

    accelerate's hooks put that method there, and call it.
    """
    for name in _OWN_FORWARDS:
        if _is_own_forward(module, name):
            object.__setattr__(module, name, MethodType(cls.forward, module))
    module.__class__ = cls


def find_welds(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The name and module of every weld in the model."""
    for name, module in model.named_modules():
        if isinstance(module, Weld):
            yield name, module


_OWN_FORWARDS = ("forward", "_old_forward")


def _is_own_forward(module: torch.nn.Module, name: str) -> bool:
    """Whether this attribute of the instance is its class's forward."""
    value = vars(module).get(name)
    return isinstance(value, MethodType) and value.__func__ is getattr(type(module), "forward", 0)


def forward_of(module: Any) -> Any:
    """The forward function of a module's class, or None if the class does not define one."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    return getattr(type(module), "forward", None)


def why_not_change(module: torch.nn.Module) -> str | None:
    """Why a module's class cannot be changed, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted: fuse before scripting"
    if isinstance(module, torch.fx.GraphModule):
        return "its forward is a traced graph: fuse before tracing"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "it is parametrized: its weight is computed at each call"
    has_parts = module._modules or {*module._parameters.values()} - {None}
    if not has_parts and (name := _find_global(module)):
        return f"other models share it: it is a global, {name}"
    # accelerate's hooks call a method that set_class replaces too.
    runs_own = any(_is_own_forward(module, name) for name in _OWN_FORWARDS)
    if "forward" in vars(module) and not runs_own:
        return "its forward is set on the instance, so that its class's would never run"
    return None


def _find_global(module: torch.nn.Module) -> str | None:
    """The global that holds a module without parts, such as `transformers.activations.gelu`.

    A library's modules hold such globals beside the class. What a script keeps is its model.
    """
    cls = getattr(type(module), "welded_from", type(module))
    if cls.__module__ == "__main__":
        return None
    names = getattr(sys.modules.get(cls.__module__), "__dict__", {})
    for name, value in list(names.items()):
        if value is module:
            return f"{cls.__module__}.{name}"
    return None
