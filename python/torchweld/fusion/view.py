"""The view of a model that recognisers get: it answers each question once per configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch.nn.functional import linear
from torch.nn.parameter import is_lazy

from torchweld.fusion import probe
from torchweld.fusion.settings import may_read
from torchweld.fusion.straight import why_not_straight
from torchweld.fusion.twin import CannotCopyError, Twin
from torchweld.fusion.weld import (
    Weld,
    count_elements,
    forward_of,
    is_overridden,
    is_sharded,
    name_hooks,
    why_not_change,
    why_not_copy,
)
from torchweld.ops.activation import ACTIVATIONS

_CPU = torch.device("cpu")
# Modules with more parameters (elements) than this are tried on the CPU.
_LARGE = 2**26


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
    _answers: dict[Hashable, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())
        self.names = {id(module): name for name, module in self.modules.items()}
        for module in self.modules.values():
            for child in module._modules.values():
                if child is not None:
                    self.parents.setdefault(id(child), []).append(module)

    def ask_once(
        self,
        question: Hashable,
        module: torch.nn.Module,
        answer: Callable[[], Any],
        numbered: bool = True,
    ) -> Any:
        """The answer for a module's configuration, computed once.

        Layers that read their numbers share an answer only if the question is not `numbered`.
        """
        key = (question, make_key(module), numbered and read_numbers(module))
        if key not in self._answers:
            self._answers[key] = answer()
        return self._answers[key]

    def device(self, module: torch.nn.Module) -> torch.device:
        """The device to try a twin on: the CPU for large modules."""
        if count_elements(module) > _LARGE:
            return _CPU
        for tensor in (*module.parameters(), *module.buffers()):
            if not tensor.is_meta:
                return tensor.device
        return _CPU

    # --- What a module computes -------------------------------------------------------------------

    def activation(self, module: Any) -> tuple[str, str] | None:
        """Name and approximation of the activation that a module or a function computes."""
        if not isinstance(module, torch.nn.Module):
            return None if why_not_straight(module) else recognise_activation([module])
        if not _is_plain_leaf(module):
            return None
        kind: tuple[str, str] | None = self.ask_once(
            "activation", module, lambda: recognise_module_activation(module)
        )
        return kind

    def is_unknown_activation(self, module: torch.nn.Module) -> bool:
        """Whether a module is elementwise but none of torchweld's activations."""
        if not _is_plain_leaf(module) or self.activation(module):
            return False
        return bool(self.ask_once("elementwise", module, lambda: is_elementwise(module)))

    def linear(self, module: torch.nn.Module) -> str | None:
        """The kind of linear layer: "plain", "transposed" like GPT-2's Conv1D, or None."""
        names = [name for name, value in module._parameters.items() if value is not None]
        if names not in (["weight"], ["weight", "bias"]) or module._modules or module._buffers:
            return None
        weight = module._parameters["weight"]
        assert weight is not None
        if isinstance(module, Weld) or is_lazy(weight) or weight.ndim != 2:
            return None
        if forward_of(module) is torch.nn.Linear.forward:
            return "plain"
        if isinstance(module, torch.nn.Embedding):
            return None
        form: str | None = self.ask_once("linear", module, lambda: recognise_linear(module))
        return form

    def sizes(self, module: torch.nn.Module) -> tuple[int, int] | None:
        """The widths of a linear layer's input and result, also for a layer with an adapter."""
        if form := self.linear(module):
            rows, columns = module.weight.shape  # type: ignore[union-attr,misc]
            return (columns, rows) if form == "plain" else (rows, columns)
        widths = tuple(getattr(module, name, None) for name in ("in_features", "out_features"))
        return widths if all(isinstance(size, int) for size in widths) else None  # type: ignore[return-value]

    # --- What runs after what ---------------------------------------------------------------------

    def find_scope(self, module: torch.nn.Module, consumer: torch.nn.Module) -> Scope | str | None:
        """The innermost module, from `module` outwards, in which a module feeds `consumer`.

        None if modules run but none feeds it; a reason if none runs.
        """
        reason: str | None = ""
        for _ in range(3):
            scope = self.watch(module)
            if isinstance(scope, str):
                reason = scope if reason == "" else reason
            elif any(edge.consumer is consumer for edge in scope.edges):
                return scope
            else:
                reason = None
            above = self.parents.get(id(module), [])
            if len(above) != 1:
                break
            module = above[0]
        return reason

    def watch(self, module: torch.nn.Module) -> Scope | str:
        """The module with the edges between its leaves, or the reason that it does not run."""
        if reason := why_not_copy(module):
            return reason
        answer = self.ask_once("edges", module, lambda: _watch(module, self.device(module)), False)
        if isinstance(answer, str):
            return answer
        inputs, edges = answer
        parts = list(module.modules())
        return Scope(
            *(module, inputs),
            [probe.Edge(parts[a], b if isinstance(b, str) else parts[b]) for a, b in edges],
        )

    def why_not_inner(self, module: torch.nn.Module, is_called: bool) -> str | None:
        """Why a module's result must not change and its call must not be skipped, or None."""
        name = self.names.get(id(module)) or type(module).__name__
        if len(self.parents.get(id(module), [])) > 1:
            return f"{name} is shared"
        if hooks := name_hooks(module, besides="torch.distributed" if is_called else None):
            return f"{name} has {hooks}, which would see another result"
        if reason := why_not_change(module):
            return f"{name}: {reason}"
        if not is_called and is_overridden(module):
            return f"{name} has a hook of accelerate's: fuse before it places the model"
        if is_sharded(module):
            return f"{name} has its own shards: fuse before fully_shard"
        return None


def _is_plain_leaf(module: torch.nn.Module) -> bool:
    """Whether a module is no weld, and has no submodules, parameters or buffers."""
    own = {*module.children(), *module._parameters.values(), *module._buffers.values()}
    return not isinstance(module, Weld) and own <= {None}


def _watch(
    module: torch.nn.Module, device: torch.device
) -> tuple[tuple[Any, ...], list[tuple[int, int | str]]] | str:
    """Inputs, and edges by places among the module's modules, so that equal ones share them."""
    try:
        twin = Twin(module, device, torch.float32)
        inputs = probe.find_inputs(twin.module, device)
        if isinstance(inputs, str):
            return inputs
        edges = probe.watch(twin.module, inputs)
    except Exception as error:
        return probe.read_refusal(error)
    places = {id(part): place for place, part in enumerate(twin.module.modules())}
    return tuple(inputs), [
        (places[id(a)], b if isinstance(b, str) else places[id(b)]) for a, b in edges
    ]


# --- Recognition by a run -------------------------------------------------------------------------


def recognise_activation(
    functions: Sequence[Callable[[torch.Tensor], Any]],
) -> tuple[str, str] | None:
    """Name and approximation of the activation that all these functions compute, or None.

    The functions run on small and large numbers.
    """
    ends = torch.tensor([-1e3, -50.0, 50.0, 1e3], dtype=torch.float32)
    x = torch.cat([torch.linspace(-12, 12, 961, dtype=torch.float32), ends]).view(5, -1)
    try:
        with torch.no_grad():
            results = [function(x.clone()) for function in functions]
    except Exception as error:
        probe.read_refusal(error)
        return None
    for kind, known in ACTIVATIONS.items():
        expected = known.function(x.double())
        allowed = 2e-6 * (1 + expected.abs())
        if kind[0] != "identity" and all(_is_near(y, expected, allowed) for y in results):
            return kind
    return None


def recognise_module_activation(module: torch.nn.Module) -> tuple[str, str] | None:
    """The activation that a module computes in training and in evaluation, or None."""
    try:
        copies = [Twin(module, _CPU).module.train(training) for training in (True, False)]
    except CannotCopyError:
        return None
    return None if why_not_straight(module, compared=True) else recognise_activation(copies)


def is_elementwise(module: torch.nn.Module) -> bool:
    """Whether a part of x gives the same part of the result, and the result is not x."""
    x = probe.values((5, 193), _CPU)
    try:
        copy = Twin(module, _CPU).module.train()
        with torch.no_grad():
            y, part = copy(x.clone()), copy(x[1:, :7].clone())
    except Exception as error:
        probe.read_refusal(error)
        return False
    same_shape = isinstance(y, torch.Tensor) and y.shape == x.shape
    return same_shape and _is_near(part, y[1:, :7].double(), 1e-6) and not torch.equal(y, x)


def recognise_linear(module: torch.nn.Module) -> str | None:
    """Whether a module with a matrix is a linear layer: "plain", "transposed", or None."""
    if why_not_straight(module, compared=True):
        return None
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
    except Exception as error:
        probe.read_refusal(error)
    return None


def _is_near(y: Any, expected: torch.Tensor, allowed: Any) -> bool:
    same = isinstance(y, torch.Tensor) and y.shape == expected.shape
    return same and bool(((y.double() - expected).abs() <= allowed).all())


# --- Configurations -------------------------------------------------------------------------------

_SCALARS = (bool, int, float, str, bytes, complex, type(None), torch.dtype, torch.device, type)


def make_key(module: torch.nn.Module, seen: dict[int, int] | None = None) -> Hashable:
    """Make a key that is equal for modules that compute the same.

    It holds classes, shapes, dtypes and settings, but not a layer's number. Objects of other kinds
    count as equal only if they are identical. `seen` has the numbers of modules around this one.
    """
    seen = {} if seen is None else seen
    if id(module) in seen:
        return "seen", seen[id(module)]
    seen[id(module)] = len(seen)
    attributes = [
        (name, _key_of_value(value, seen))
        for name, value in vars(module).items()
        if not _is_irrelevant(name, value)
    ]
    return type(module), tuple(attributes)


def read_numbers(module: torch.nn.Module) -> Hashable:
    """The numbers of a layer and its parts that their code may read."""
    return tuple(
        (name, value)
        for part in module.modules()
        for name, value in vars(part).items()
        if _is_number(name, value) and may_read(part, name)
    )


def _is_number(name: str, value: Any) -> bool:
    return isinstance(value, int) and ("idx" in name or "index" in name or "layer_id" in name)


def _is_irrelevant(name: str, value: Any) -> bool:
    """Whether an attribute is the layer's number, a hook, or set by a call."""
    return (
        _is_number(name, value) or name in ("training", "_compiled_call_impl") or "_hooks" in name
    )


def _key_of_value(value: Any, seen: dict[int, int]) -> Hashable:
    if isinstance(value, _SCALARS):
        return type(value), value
    if isinstance(value, torch.nn.Module):
        return make_key(value, seen)
    if isinstance(value, torch.Tensor) and not is_lazy(value):
        return type(value), tuple(value.shape), value.dtype, value.device.type, value.layout
    if isinstance(value, (set, frozenset)) and all(isinstance(item, _SCALARS) for item in value):
        return type(value), frozenset(value)
    if isinstance(value, (list, tuple, torch.Size)):
        return type(value), tuple(_key_of_value(item, seen) for item in value)
    if isinstance(value, dict):
        return type(value), tuple((key, _key_of_value(item, seen)) for key, item in value.items())
    if isinstance(value, MethodType):
        return "method", id(value.__func__)
    if isinstance(value, functools.partial):
        return "partial", id(value.func), _key_of_value([*value.args, value.keywords], seen)
    return "object", id(value)
