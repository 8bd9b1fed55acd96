"""Answers recognisers' questions about a model, once per configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import linear
from torch.nn.parameter import is_lazy

from torchweld.fuse import probe
from torchweld.fuse.twin import CannotCopyError, Twin
from torchweld.fuse.weld import Change, Weld, is_overridden, why_overridden
from torchweld.ops.activation.common import ACTIVATIONS

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Proposal:
    """Changes that make one weld.

    If a recogniser yields several for one module, the first that computes the same is used.
    """

    module: torch.nn.Module
    what: str
    changes: tuple[Change, ...]  # the first is of `module`
    scope: torch.nn.Module  # the module to run when trying them
    inner: tuple[torch.nn.Module, ...] = ()  # modules no longer called, or with another result
    inputs: tuple[Any, ...] | None = None  # inputs of `scope`; None: find some
    part: torch.nn.Module | None = None  # the module whose traffic is measured; None: `scope`
    drops: bool = False  # whether dropout is drawn from torchweld's stream

    @property
    def becomes(self) -> str:
        """The function that runs in its place, in words."""
        return self.changes[0].becomes


@dataclass(frozen=True)
class Left:
    """A module that resembles a known kind, and the reason to leave it alone."""

    module: torch.nn.Module
    what: str
    reason: str


@dataclass(frozen=True)
class Scope:
    """A module that ran on a probe, with the edges between its leaves."""

    module: torch.nn.Module
    inputs: tuple[Any, ...]
    edges: list[probe.Edge]


@dataclass
class View:
    """A model as recognisers see it."""

    model: torch.nn.Module
    names: dict[int, str] = field(default_factory=dict)
    parents: dict[int, list[torch.nn.Module]] = field(default_factory=dict)
    _kept: dict[Hashable, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())
        self.names = {id(module): name for name, module in self.modules.items()}
        for module in self.modules.values():
            for child in module._modules.values():
                if child is not None:
                    self.parents.setdefault(id(child), []).append(module)

    def once(self, question: str, module: torch.nn.Module, answer: Callable[[], Any]) -> Any:
        """The answer for a module's configuration, computed once."""
        key = (question, configuration(module))
        if key not in self._kept:
            self._kept[key] = answer()
        return self._kept[key]

    def device(self, module: torch.nn.Module) -> torch.device:
        """The device to try a twin on: the CPU for large modules."""
        if _elements(module) > _LARGE:
            return _CPU
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                return tensor.device
        return _CPU

    # --- What a module computes -------------------------------------------------------------------

    def activation(self, module: Any) -> tuple[str, str] | None:
        """Name and approximation of the activation that a module or a function computes."""
        if not isinstance(module, torch.nn.Module):
            return _activation([module])
        if is_welded(module) or any(True for _ in module.children()) or has_state(module):
            return None
        found: tuple[str, str] | None = self.once("act", module, lambda: _module_activation(module))
        return found

    def is_unknown_activation(self, module: torch.nn.Module) -> bool:
        """Whether it is elementwise but none of torchweld's activations."""
        if is_welded(module) or module._modules or has_state(module) or self.activation(module):
            return False
        return bool(self.once("unknown act", module, lambda: _is_elementwise(module)))

    def linear(self, module: torch.nn.Module) -> str | None:
        """The kind of linear layer: "plain", "transposed" like GPT-2's Conv1D, or None."""
        names = [name for name, value in module._parameters.items() if value is not None]
        if is_welded(module) or module._modules or module._buffers or names[:1] != ["weight"]:
            return None
        weight = module._parameters["weight"]
        if weight is None or is_lazy(weight) or weight.ndim != 2 or set(names) - {"weight", "bias"}:
            return None
        if forward_of(module) is torch.nn.Linear.forward:
            return "plain"
        if isinstance(module, torch.nn.Embedding):
            return None
        found: str | None = self.once("linear", module, lambda: _linear(module))
        return found

    def sizes(self, module: torch.nn.Module) -> tuple[int, int] | None:
        """The widths of a linear layer's input and result, also for a layer with an adapter."""
        if form := self.linear(module):
            rows, columns = module.weight.shape  # type: ignore[union-attr,misc]
            return (columns, rows) if form == "plain" else (rows, columns)
        found = tuple(getattr(module, name, None) for name in ("in_features", "out_features"))
        return found if all(isinstance(size, int) for size in found) else None  # type: ignore[return-value]

    # --- What runs after what ---------------------------------------------------------------------

    def scope(self, module: torch.nn.Module, consumer: torch.nn.Module) -> Scope | str | None:
        """The innermost module, from `module` outwards, in which a module feeds `consumer`.

        None if modules run but none feeds it; a reason if none runs.
        """
        reason: str | None = ""
        for _ in range(3):
            found = self.watched(module)
            if isinstance(found, str):
                reason = found if reason == "" else reason
            elif any(edge.consumer is consumer for edge in found.edges):
                return found
            else:
                reason = None
            above = self.parents.get(id(module), [])
            if len(above) != 1:
                break
            module = above[0]
        return reason

    def between(self, part: torch.nn.Module, scope: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """The modules around `part` and inside `scope`."""
        inside = {id(module) for module in scope.modules()} - {id(scope)}
        for above in self.parents.get(id(part), []):
            if id(above) in inside:
                yield above
                yield from self.between(above, scope)

    def watched(self, module: torch.nn.Module) -> Scope | str:
        """The module with the edges between its leaves, or the reason that it does not run."""
        if reason := why_too_large(module):
            return reason
        names = {id(part): name for name, part in module.named_modules()}
        found = self.once("edges", module, lambda: _watched(module, self.device(module), names))
        if isinstance(found, str):
            return found
        inputs, edges = found
        parts = dict(module.named_modules())
        return Scope(
            module,
            inputs,
            [probe.Edge(parts[a], parts[b[1:]] if b.startswith(".") else b) for a, b in edges],
        )

    def why_not_inner(self, module: torch.nn.Module, is_called: bool) -> str | None:
        """Why a module's result must not change and its call must not be skipped, or None."""
        called = self.names.get(id(module)) or type(module).__name__
        if len(self.parents.get(id(module), [])) > 1:
            return f"{called} is shared"
        if hooks := hooks_in_words(module, besides="torch.distributed" if is_called else None):
            return f"{called} has {hooks}, which would see another result"
        if reason := why_fixed(module):
            return f"{called}: {reason}"
        if not is_called and is_overridden(module):
            return f"{called} has a hook of accelerate's: fuse before it places the model"
        if _is_sharded_alone(module):
            return f"{called} has its own shards: fuse before fully_shard"
        return None


# Twins with more parameters (elements) than this run on the CPU. Scopes with fewer are always
# allowed.
_LARGE = 2**26
_SMALL = 2**24
# The limit for scopes: a copy with 2**30 elements takes 4 GiB.
_LARGEST = 2**30
# A scope is a block, not a model: it has at most this many times the elements of its largest
# parameter.
_BLOCK = 24


def _elements(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))


def why_too_large(module: torch.nn.Module) -> str | None:
    """Why a module is too large to copy, or None."""
    elements = _elements(module)
    largest = max((p.numel() for p in module.parameters() if not is_lazy(p)), default=0)
    if elements <= max(_SMALL, _BLOCK * largest) and elements <= _LARGEST:
        return None
    return f"with {elements / 1e6:.0f} million parameters its surroundings are too large to try"


def is_welded(module: torch.nn.Module) -> bool:
    """Whether it is already welded."""
    return isinstance(module, Weld)


def forward_of(module: Any) -> Any:
    """The forward function of a module's class, or None if the class does not define one."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    return getattr(type(module), "forward", None)


def has_state(module: torch.nn.Module) -> bool:
    """Whether it has parameters or buffers itself, not only in submodules."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None for tensor in tensors)


def why_fixed(module: torch.nn.Module) -> str | None:
    """Why a module's class cannot be changed, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted: fuse before scripting"
    if isinstance(module, torch.fx.GraphModule):
        return "its forward is a traced graph: fuse before tracing"
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "it is parametrized: its weight is computed at each call"
    return why_overridden(module)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_in_words(module: torch.nn.Module, besides: str | None) -> str:
    """The kinds of hooks on it, without those of the package `besides`."""
    found = []
    for kind in _HOOKS:
        hooks = getattr(module, kind, {}).values()
        packages = [str(getattr(hook, "__module__", "")) for hook in hooks]
        if any(besides is None or not package.startswith(besides) for package in packages):
            found.append(kind.strip("_").replace("_", " "))
    return " and ".join(found)


def _is_sharded_alone(module: torch.nn.Module) -> bool:
    return any(base.__name__ == "FSDPModule" for base in type(module).__mro__)


def _module_activation(module: torch.nn.Module) -> tuple[str, str] | None:
    """The module in training, then in evaluation."""
    try:
        copies = [Twin(module, _CPU).module.train(training) for training in (True, False)]
    except CannotCopyError:
        return None
    return _activation(copies)


def _is_elementwise(module: torch.nn.Module) -> bool:
    """Whether part of x gives the same part of the result, and the result is not x."""
    x = probe.values((5, 193), _CPU)
    try:
        copy = Twin(module, _CPU).module.train()
        with torch.no_grad():
            y, part = copy(x.clone()), copy(x[1:, :7].clone())
    except Exception:
        return False
    same_shape = isinstance(y, torch.Tensor) and y.shape == x.shape
    return same_shape and _is_near(part, y[1:, :7].double(), 1e-6) and not torch.equal(y, x)


def _activation(functions: Sequence[Callable[[torch.Tensor], Any]]) -> tuple[str, str] | None:
    """The activation that all these functions compute on small and large numbers."""
    x = torch.cat([torch.linspace(-12, 12, 961), torch.tensor([-1e3, -50.0, 50.0, 1e3])]).view(
        5, -1
    )
    try:
        with torch.no_grad():
            made = [function(x.clone()) for function in functions]
    except Exception:
        return None
    for kind, known in ACTIVATIONS.items():
        expected = known.function(x.double())
        allowed = 2e-6 * (1 + expected.abs())
        if kind[0] != "identity" and all(_is_near(y, expected, allowed) for y in made):
            return kind
    return None


def _linear(module: torch.nn.Module) -> str | None:
    try:
        copy: Any = Twin(module, _CPU, torch.float32).module
        weight, bias = copy.weight.detach(), copy._parameters.get("bias")
        for form, matrix in (("plain", weight), ("transposed", weight.t())):
            if bias is not None and bias.shape != matrix.shape[:1]:
                continue
            with torch.no_grad():
                x = probe.values((2, 5, matrix.shape[1]), _CPU)
                expected = linear(x, matrix, bias)
                if _is_near(copy(x), expected.double(), 1e-4):
                    return form
    except Exception:
        return None
    return None


def _is_near(y: Any, expected: torch.Tensor, allowed: Any) -> bool:
    same = isinstance(y, torch.Tensor) and y.shape == expected.shape
    return same and bool(((y.double() - expected).abs() <= allowed).all())


def _watched(
    module: torch.nn.Module, device: torch.device, names: dict[int, str]
) -> tuple[tuple[Any, ...], list[tuple[str, str]]] | str:
    """Inputs, and edges by names in the module. Names of modules begin with a dot."""
    try:
        twin = Twin(module, device, torch.float32)
        inputs = probe.fitting(twin.module, device)
        if isinstance(inputs, str):
            return inputs
        edges = probe.watch(twin.module, inputs)
    except CannotCopyError as error:
        return str(error)
    except Exception as error:
        return f"it did not run on a probe ({type(error).__name__}: {error})"
    of_twin = {id(part): name for name, part in twin.module.named_modules()}
    named = [(of_twin[id(a)], b if isinstance(b, str) else "." + of_twin[id(b)]) for a, b in edges]
    return tuple(inputs), named


# --- Configurations -------------------------------------------------------------------------------

_SCALARS = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, type)


def configuration(module: torch.nn.Module) -> Hashable:
    """A key that is equal for modules that compute the same: classes, shapes, dtypes and settings.

    It ignores a layer's number. Objects of other kinds must be identical.
    """
    return _of_module(module, {})


def _of_module(module: torch.nn.Module, seen: dict[int, int]) -> Hashable:
    if id(module) in seen:
        return "seen", seen[id(module)]
    seen[id(module)] = len(seen)
    found = []
    for name, value in vars(module).items():
        counts = isinstance(value, int) and ("idx" in name or "index" in name or "layer_id" in name)
        if name not in ("training", "_compiled_call_impl") and "_hooks" not in name and not counts:
            found.append((name, _of_value(value, seen)))
    return type(module), tuple(found)


def _of_value(value: Any, seen: dict[int, int]) -> Hashable:
    if isinstance(value, _SCALARS):
        return type(value), value
    if isinstance(value, torch.nn.Module):
        return _of_module(value, seen)
    if isinstance(value, torch.Tensor) and not is_lazy(value):
        return type(value), tuple(value.shape), value.dtype, value.device.type, value.layout
    if isinstance(value, (set, frozenset)) and all(isinstance(item, _SCALARS) for item in value):
        return type(value), frozenset(value)
    if isinstance(value, (list, tuple, torch.Size)):
        return type(value), tuple(_of_value(item, seen) for item in value)
    if isinstance(value, dict):
        return type(value), tuple((key, _of_value(item, seen)) for key, item in value.items())
    if isinstance(value, MethodType):
        return "method", id(value.__func__)
    if isinstance(value, functools.partial):
        return "partial", id(value.func), _of_value([*value.args, value.keywords], seen)
    return "object", id(value)
