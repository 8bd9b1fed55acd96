"""A welded module is the same object with another class. Its attributes do not change."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, ClassVar, NamedTuple

import torch
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks
from torch.nn.parameter import is_lazy

from torchweld.fusion.settings import (
    Names,
    Settings,
    has_globals,
    has_methods,
    has_settings,
    list_globals,
    list_methods,
    read_settings,
)


class Weld:
    """Base of the classes that welded modules get.

    `make_class` makes a class from a subclass of this one, the module's own class, and settings.
    The settings become class attributes. Their names begin with weld_, so they hide none of the
    module's attributes. Nothing is written to the module itself: setting its class back restores
    it.
    """

    # The function that runs, in words; "" for a submodule of another weld.
    weld_becomes: ClassVar[str] = ""
    # Names of the submodules that the weld no longer calls, and their kinds.
    weld_inner: ClassVar[tuple[str, ...]] = ()
    weld_inner_kinds: ClassVar[tuple[Any, ...]] = ()
    # Whether several proposals may give a module this class, each with pairs of its own.
    weld_shares: ClassVar[bool] = False
    welded_from: ClassVar[Any]
    weld_settings: ClassVar[tuple[tuple[str, Any], ...]]

    weld_class: ClassVar[type[Weld]]

    def weld_may_skip(self) -> bool:
        """Whether the skipped submodules were not replaced and have no hooks.

        Hooks of a plan's styles apply to the whole weld.
        """
        modules: dict[str, Any] = self._modules  # type: ignore[attr-defined]
        return not has_global_hooks() and all(
            is_of_kind(modules.get(name), kind)
            and (is_bare(modules[name]) or _is_planned(modules[name]))
            for name, kind in zip(self.weld_inner, self.weld_inner_kinds, strict=True)
        )

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

    def _get_name(self) -> str:
        """The name in the model's repr."""
        return f"Welded{type(self).__name__}"


class Tried(Weld):
    """A weld for calls of the verified form; other calls run the original forward.

    So do all calls after a change of the module's own settings, or of a submodule that the weld
    skips.
    """

    # How many arguments of the class's own forward the tried call has. They are the first ones.
    weld_takes: ClassVar[int] = 1
    # The module's own settings when it was fused, which the trial took into account.
    weld_own: ClassVar[Settings] = ()
    # Methods of its class that its forward calls, and the forward, as they were then.
    weld_methods: ClassVar[tuple[tuple[str, Any], ...]] = ()
    # Functions and plain values of files that they read, as they were then.
    weld_globals: ClassVar[Names] = ()
    # Names of that forward's parameters, and all of its defaults.
    weld_names: ClassVar[tuple[str, ...]] = ()
    weld_defaults: ClassVar[dict[str, Any]] = {}
    weld_run: Callable[..., Any]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "welded_from" in vars(cls):
            cls.weld_names, cls.weld_defaults = read_parameters(cls.welded_from)
            cls.weld_methods = list_methods(cls.welded_from)
            cls.weld_globals = list_globals(cls.welded_from, cls.welded_from.forward)
            # torch.export looks up names of inputs in the signature.
            own: Any = cls.forward
            code, closure = own.__code__, own.__closure__
            forward: Any = FunctionType(code, own.__globals__, "forward", own.__defaults__, closure)
            forward.__kwdefaults__ = own.__kwdefaults__
            forward.__signature__ = inspect.signature(cls.welded_from.forward)
            cls.forward = forward  # type: ignore[method-assign]

    def weld_may_skip(self) -> bool:
        return (
            has_settings(self, self.weld_own)
            and has_methods(self, self.welded_from, self.weld_methods)
            and has_globals(self.weld_globals)
            and super().weld_may_skip()
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self.weld_arguments(args, kwargs)
        if arguments is None:
            return self.welded_from.forward(self, *args, **kwargs)
        return self.weld_run(*arguments)

    def weld_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """The arguments of a call like the one that was tried, or None."""
        if not self.weld_may_skip():
            return None
        if len(args) == self.weld_takes and not kwargs:
            return args
        taken = self.weld_names[: len(args)]
        if len(args) > len(self.weld_names) or any(name in kwargs for name in taken):
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


class Rewritten(Weld):
    """A weld whose forward is recompiled from the source of its class's own."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "welded_from" in vars(cls):
            cls.forward = cls.weld_rewrite(cls.welded_from.forward)
        super().__init_subclass__(**kwargs)  # a base of the module's may wrap the new forward

    forward: Any

    @classmethod
    def weld_rewrite(cls, forward: Any) -> Callable[..., Any]:
        """The new forward, in the globals of its file."""
        raise NotImplementedError


_CLASSES: dict[Any, type] = {}
_MISSING = object()
# Chooses among ways to compute the same.
_CHOSEN = "config._experts_implementation"
_NOTHING: dict[str, Any] = {}


def make_class(weld: type[Weld], was: type, settings: tuple[tuple[str, Any], ...]) -> type:
    """Make the class of a welded module. It keeps the name of `was`: other code reads the name."""
    key: Any = (weld, was, settings)
    if issubclass(weld, Tried):
        key += (list_methods(was), list_globals(was, was.forward))  # type: ignore[attr-defined]
    if key in _CLASSES:
        return _CLASSES[key]
    body: dict[str, Any] = {"weld_class": weld, "welded_from": was, "weld_settings": settings}
    body |= {f"weld_{name}": value for name, value in settings}
    # torch.fx traces into modules that are not of torch.nn.
    body |= {"__module__": was.__module__, "__doc__": weld.__doc__}
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


class Kind(NamedTuple):
    """What a skipped module was when it was fused."""

    was: type
    settings: Settings
    names: Names = ()


def kind_of(module: torch.nn.Module) -> Kind:
    """A module's class and settings, such as the approximation of torch's GELU."""
    cls: Any = getattr(type(module), "welded_from", type(module))
    return Kind(cls, read_settings(module), list_globals(cls, cls.forward))


def is_of_kind(module: Any, kind: Kind) -> bool:
    """Whether a module still is what it was when it was fused."""
    cls = type(module)
    is_same = getattr(cls, "welded_from", cls) is kind.was
    return is_same and has_settings(module, kind.settings) and has_globals(kind.names)


# --- Questions about one module that need no run --------------------------------------------------

# A scope with fewer parameters (elements) than this is small enough in any case.
_SMALL = 2**24
# The most elements of a scope: a copy takes 4 GiB.
_LARGEST = 2**30
# A scope is a block, not a model: it has at most this many times the elements of its largest
# parameter.
_BLOCK = 24


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether fully_shard made the module a unit of its own."""
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def forward_of(module: Any) -> Any:
    """The forward function of a module's class, or None if the class does not define one."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    return getattr(type(module), "forward", None)


def count_elements(module: torch.nn.Module) -> int:
    """Count the elements of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))


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
    return why_not_own_forward(module)


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


def why_not_copy(module: torch.nn.Module) -> str | None:
    """Why a module is too large to copy, or None."""
    elements = count_elements(module)
    largest = max((p.numel() for p in module.parameters() if not is_lazy(p)), default=0)
    if elements <= max(_SMALL, _BLOCK * largest) and elements <= _LARGEST:
        return None
    return f"with {elements / 1e6:.0f} million parameters its surroundings are too large to try"


# --- What a recogniser yields ---------------------------------------------------------------------


class Change(NamedTuple):
    """A module, and the class that it gets: a weld with settings."""

    module: torch.nn.Module
    weld: type[Weld]
    becomes: str = ""
    settings: dict[str, Any] = {}  # noqa: RUF012 - never written to

    def apply(self) -> None:
        """Set the class. A class that proposals share gets the pairs of all of them."""
        was: Any = type(self.module)
        settings = {"becomes": self.becomes, **self.settings}
        if self.weld.weld_shares and isinstance(self.module, self.weld):
            settings["pairs"] = (*was.weld_pairs, *settings["pairs"])
            was = find_original(was)
        if inner := settings.get("inner"):
            inside: Any = self.module._modules
            settings["inner_kinds"] = tuple(kind_of(inside[name]) for name in inner)
        if issubclass(self.weld, Tried):
            besides: set[Any] = {"training", _CHOSEN, settings.get("eps")}
            settings["own"] = read_settings(self.module, besides)
        set_class(self.module, make_class(self.weld, was, tuple(settings.items())))


@dataclass(frozen=True)
class Proposal:
    """Changes that make one weld.

    If a recogniser yields several for one module, the first that computes the same is used.
    """

    module: torch.nn.Module
    what: str
    changes: tuple[Change, ...]  # the first one changes `module`
    scope: torch.nn.Module  # the module to run when trying the changes of modules in it
    inner: tuple[torch.nn.Module, ...] = ()  # modules no longer called, or with another result
    inputs: tuple[Any, ...] | None = None  # inputs of `scope`; None: find some
    part: torch.nn.Module | None = None  # the module whose traffic is measured; None: `scope`
    drops: bool = False  # whether dropout is drawn from torchweld's stream
    tried: bool = False  # whether the recogniser has tried the changes, on a smaller model
    known: bool = False  # whether the classes are torch's own, so that fuse() need not try them

    def list_changes(self, scope: torch.nn.Module) -> tuple[Change, ...]:
        """The changes of modules in a scope."""
        inside = {id(module) for module in scope.modules()}
        return tuple(change for change in self.changes if id(change.module) in inside)

    @property
    def becomes(self) -> str:
        """The function that runs in the module's place, in words."""
        return self.changes[0].becomes


@dataclass(frozen=True)
class Skipped:
    """A module that resembles a known kind, and the reason not to change it."""

    module: torch.nn.Module
    what: str
    reason: str


def propose(
    module: torch.nn.Module,
    weld: type[Weld],
    becomes: str,
    settings: dict[str, Any] | None = None,
    scope: torch.nn.Module | None = None,
    **more: Any,
) -> Proposal:
    """Propose a weld of one module, which is tried by itself unless there is a scope."""
    changes = (Change(module, weld, becomes, settings or {}),)
    return Proposal(module, type(module).__name__, changes, scope or module, **more)
