"""A welded module is the same object with another class. Its attributes do not change."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import MethodType
from typing import Any, ClassVar, NamedTuple

import torch


class Weld:
    """Base of the classes that welded modules get.

    `make_class` makes a class from a subclass of this one, the module's own class, and settings.
    The settings become class attributes. Their names begin with weld_, so they hide none of the
    module's attributes. Nothing is written to the module itself: setting its class back restores
    it.
    """

    # The function that runs, in words; "" for a submodule of another weld.
    weld_becomes: ClassVar[str] = ""
    # Names of the submodules that the weld no longer calls, and their classes.
    weld_inner: ClassVar[tuple[str, ...]] = ()
    weld_inner_classes: ClassVar[tuple[type, ...]] = ()
    # Whether several proposals may give a module this class, each with pairs of its own.
    weld_shares: ClassVar[bool] = False
    # How many arguments of the class's own forward the tried call has. They are the first ones.
    weld_takes: ClassVar[int] = 1
    # Names of that forward's parameters, and all of its defaults.
    weld_names: ClassVar[tuple[str, ...]] = ()
    weld_defaults: ClassVar[dict[str, Any]] = {}
    welded_from: ClassVar[Any]
    weld_settings: ClassVar[tuple[tuple[str, Any], ...]]

    weld_class: ClassVar[type[Weld]]

    def weld_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """The arguments that were tried, or None: then the class's own forward runs the call.

        It runs calls with other arguments, and all calls after something happened to a submodule
        that the weld skips.
        """
        if not self.weld_may_skip():
            return None
        if len(args) == self.weld_takes and not kwargs:
            return args
        if len(args) > len(self.weld_names) or not kwargs.keys().isdisjoint(
            self.weld_names[: len(args)]
        ):
            return None  # its own forward raises
        values = dict(zip(self.weld_names, args, strict=False))
        values |= kwargs
        first = [values.pop(name, _MISSING) for name in self.weld_names[: self.weld_takes]]
        if any(value is _MISSING for value in first):
            return None
        for name, value in values.items():
            if name not in self.weld_defaults or value is not self.weld_defaults[name]:
                return None
        return tuple(first)

    def weld_may_skip(self) -> bool:
        """Whether the skipped submodules were not replaced and have no hooks.

        Hooks of a plan's styles apply to the whole weld.
        """
        modules: dict[str, Any] = self._modules  # type: ignore[attr-defined]
        return all(
            type(modules[name]) is cls and (is_bare(modules[name]) or _is_planned(modules[name]))
            for name, cls in zip(self.weld_inner, self.weld_inner_classes, strict=True)
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Recreate the class for copies and pickles, since pickle would not find it."""
        return _make_bare, (self.weld_class, self.welded_from, self.weld_settings), dict(vars(self))

    def _get_name(self) -> str:
        """The name in the model's repr."""
        return f"Welded{type(self).__name__}"


_CLASSES: dict[Any, type] = {}
_MISSING = object()


class Change(NamedTuple):
    """A module, and the class that it gets: a weld with settings."""

    module: torch.nn.Module
    weld: type[Weld]
    becomes: str = ""
    settings: dict[str, Any] = {}  # noqa: RUF012 - never written to

    def of(self, module: torch.nn.Module) -> Change:
        """The same change for another module."""
        return self._replace(module=module)

    def apply(self) -> None:
        """Set the class. A class that proposals share gets the pairs of all of them."""
        was: Any = type(self.module)
        settings = {"becomes": self.becomes, **self.settings}
        if self.weld.weld_shares and isinstance(self.module, self.weld):
            settings["pairs"] = (*was.weld_pairs, *settings["pairs"])
            was = find_original(was)
        if inner := settings.get("inner"):
            settings["inner_classes"] = tuple(type(self.module._modules[name]) for name in inner)
        set_class(self.module, make_class(self.weld, was, tuple(settings.items())))


def make_class(weld: type[Weld], was: type, settings: tuple[tuple[str, Any], ...]) -> type:
    """Make the class of a welded module. It keeps the name of `was`: other code reads the name."""
    key = (weld, was, settings)
    if key in _CLASSES:
        return _CLASSES[key]
    body: dict[str, Any] = {"weld_class": weld, "welded_from": was, "weld_settings": settings}
    body |= {f"weld_{name}": value for name, value in settings}
    body |= {"__module__": weld.__module__, "__doc__": weld.__doc__}
    names, defaults = read_parameters(was)
    body |= {"weld_names": names, "weld_defaults": defaults}
    return _CLASSES.setdefault(key, type(was.__name__, (weld, was), body))


def read_parameters(module: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Read the names of a forward's positional parameters, and all of its defaults."""
    cls: Any = module if isinstance(module, type) else type(module)
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(p.name for p in parameters if p.kind in by_position)
    return names, {p.name: p.default for p in parameters if p.default is not p.empty}


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


def is_overridden(module: torch.nn.Module) -> bool:
    """Whether a module runs another forward than its class's."""
    return "forward" in vars(module) and not _is_own_forward(module, "forward")


def why_not_own_forward(module: torch.nn.Module) -> str | None:
    """Why a module would not run the forward of a new class, or None.

    With accelerate's hooks it does: they call a method that set_class replaces too.
    """
    if not is_overridden(module) or _is_own_forward(module, "_old_forward"):
        return None
    return "its forward is set on the instance, so that its class's would never run"


_STYLES = "torchweld.distributed"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def name_hooks(module: torch.nn.Module, besides: str | tuple[str, ...] | None) -> str:
    """Name the kinds of hooks on a module, except hooks from the packages `besides`."""
    kinds = []
    for kind in _HOOKS:
        hooks = getattr(module, kind, {}).values()
        packages = [str(getattr(hook, "__module__", "")) for hook in hooks]
        if any(besides is None or not package.startswith(besides) for package in packages):
            kinds.append(kind.strip("_").replace("_", " "))
    return " and ".join(kinds)


def _is_planned(module: torch.nn.Module) -> bool:
    """Whether only styles of `torchweld.distributed` have hooks on a module, or set its forward."""
    forward = vars(module).get("forward")
    package = getattr(getattr(forward, "func", forward), "__module__", "")
    is_own = forward is None or str(package).startswith(_STYLES)
    return is_own and not name_hooks(module, besides=_STYLES)


def is_bare(module: Any) -> bool:
    """Whether a call of a module runs its class's forward and no hook."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in vars(module)
    )
