"""A layer that Dynamo has evaluated, and copies of its nodes with the guards of other layers."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch._dynamo import guards as dynamo_guards
from torch._dynamo.variables.base import (
    ValueMutationNew,
)
from torch._dynamo.variables.builder import VariableBuilder, wrap_fx_proxy
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._guards import Guard, Source

from torchweld.fusion import refusals

CHECKS = getattr(dynamo_guards, "GUARD_VALUE_DISPATCH", {})  # how torch compares a guard's values
IS_KNOWN = bool(CHECKS) and hasattr(Source, "get_value") and hasattr(Source, "clone")


class CannotRepeatError(Exception):
    """A copy cannot be finished: the call is captured again, layer by layer."""


class Values:
    """Arguments or results: a key for what Dynamo knows of them, their tensors, and the others."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        self.others: list[Any] = []  # compared by identity

    @property
    def nodes(self) -> set[Any]:
        return {each.as_proxy().node for each in self.tensors}

    def read(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self.read, value))
        if isinstance(value, dict):
            return tuple((name, self.read(each)) for name, each in value.items())
        value = value.realize()
        if type(value) is ConstantVariable:
            return "constant", type(value.value), repr(value.value)
        if type(value) is TupleVariable:
            return "tuple", *map(self.read, value.items)
        if type(value) is not TensorVariable:
            self.others.append(value)
            return "other", id(value)
        self.tensors.append(value)
        nodes = [each.as_proxy().node for each in self.tensors]
        return "tensor", nodes.index(nodes[-1]), describe(nodes[-1].meta["example_value"])


def describe(x: torch.Tensor) -> Any:
    places = str(tuple(x.shape)), str(tuple(x.stride())), str(x.storage_offset())
    return (*places, x.dtype, x.device, x.layout, x.requires_grad, x.is_leaf, type(x))


@dataclass
class Hole:
    """A call that writes outside of its layer, and is evaluated for each."""

    function: Any
    args: list[Any]
    named: dict[str, Any]
    first: Any  # the last node before it
    last: Any
    results: Values = field(default_factory=Values)
    key: Any = None
    tensors: list[Any] = field(default_factory=list)  # among its arguments
    dictionaries: list[tuple[Any, Any]] = field(default_factory=list)
    lazy: dict[int, Any] = field(default_factory=dict)  # sources of arguments that nothing has read


def _is_like(value: Any, first: Any) -> bool:
    """What torch does not compare of two values of a guard: 1, 1.0 and True are equal."""
    if isinstance(value, torch.Tensor):
        keys = torch._C._dispatch_keys
        return type(value) is type(first) and keys(value) == keys(first)
    is_number = isinstance(value, (int, float, complex, tuple))
    return type(value) is type(first) and (not is_number or repr(value) == repr(first))


def is_alias(guard: Guard) -> bool:
    return guard.create_fn_name() == "DUPLICATE_INPUT"


def renew(tx: Any, x: torch.Tensor) -> torch.Tensor:
    """A fake tensor like another one, which the graph has made."""
    with tx.fake_mode:
        return x.clone()


_PART = re.compile(r"\._(?:modules|parameters|buffers)\[(['\"])([^'\"\]]+)\1\]")


def _read_path(module: Any) -> str:
    """The path of a module as Dynamo notes it in nodes."""
    return _PART.sub(r".\2", module.get_nn_module_stack_source().name)


@functools.cache
def _list_fields(cls: Any) -> tuple[str, ...]:
    return tuple(each.name for each in dataclasses.fields(cls)) if is_dataclass(cls) else ()


class Swap:
    """Puts one source in the place of another one in all that begin with it."""

    def __init__(self, old: Any, new: Any) -> None:
        self._known = {old: new}

    def __call__(self, source: Any) -> Any:
        if source not in self._known:
            kind: Any = type(source)
            values = {name: getattr(source, name) for name in _list_fields(kind)}
            parts = {name: each for name, each in values.items() if isinstance(each, Source)}
            other = {name: self(each) for name, each in parts.items()}
            is_same = all(other[name] is each for name, each in parts.items())
            self._known[source] = source if is_same else dataclasses.replace(source, **other)
        return self._known[source]


class Finder:
    """Finds the values of sources."""

    def __init__(self, tx: Any) -> None:
        root = tx.output.root_tx
        self._names = {"G": root.f_globals, "L": root.f_locals}
        self._known: dict[Any, Any] = {}

    def __call__(self, source: Any) -> Any:
        return source.get_value(self._names, {}, self._known)


@dataclass
class _Found:
    """What a layer needs to be a copy: its source, values and guards."""

    swap: Callable[[Any], Any]
    find: Finder
    guards: list[Guard]
    tensors: list[tuple[Any, torch.Tensor]]
    module: Any


@dataclass
class Evaluated:
    """An evaluated layer."""

    module: Any
    given: Values
    parts: list[Any]
    given_at: dict[Any, int]
    lifted: dict[Any, Any]  # nodes of parameters and other inputs of the graph: their sources
    result: Any
    guards: list[tuple[Guard, Any, Any]]
    sources: Any
    methods: list[tuple[Any, str]]

    def find(self, tx: Any, module: Any) -> _Found | None:
        """Check each guard for another layer; None if one does not hold."""
        old, new, find = self.module.source, module.source, Finder(tx)
        swap = Swap(old, new)
        if not tx.output.side_effects.mutated_sources.isdisjoint(map(swap, self.sources)):
            return None
        if any(tx.output.side_effects.has_pending_mutation_of_attr(*each) for each in self.methods):
            return None
        guards, tensors = [], []
        for guard, check, wanted in self.guards:
            source, make = swap(guard.originating_source), guard.create_fn
            try:
                value = find(source)
                if check is None:
                    other = swap(make.keywords["source_b"])  # type: ignore[attr-defined]
                    is_same = value is find(other)
                    make = functools.partial(make.func, source_b=other)  # type: ignore[attr-defined]
                else:
                    first = find(guard.originating_source)
                    is_same = check.eval_fn(value, wanted) and _is_like(value, first)
            except Exception as error:  # e.g. an attribute that this layer lacks
                refusals.raise_others(error)
                return None
            if not is_same:
                return None
            if guard.create_fn_name() == "TENSOR_MATCH":  # made with the graph's input
                tensors.append((source, value))
            else:
                guards.append(Guard(source, make, stack=guard.stack, user_stack=guard.user_stack))
        return _Found(swap, find, guards, tensors, module)

    def repeat(self, tx: Any, given: Values, found: _Found) -> Any:
        """Copy the nodes for another layer; returns its result."""
        try:
            return self._repeat(tx, given, found)
        except Exception as error:
            refusals.raise_others(error)
            raise CannotRepeatError(str(error)) from error

    def _repeat(self, tx: Any, given: Values, found: _Found) -> Any:
        tracer = tx.output.current_tracer
        made = {old: given.tensors[at].as_proxy().node for old, at in self.given_at.items()}
        variables = {old: given.tensors[at] for old, at in self.given_at.items()}
        for old, source in self.lifted.items():
            new = source if source is None else found.swap(source)
            made[old] = old
            if new != source:
                variable: Any = VariableBuilder(tx, new)(found.find(new))  # type: ignore[arg-type]
                made[old] = variable.as_proxy().node
        for source, value in found.tensors:
            VariableBuilder(tx, source)(value)
        tracer.traced_sources |= type(tracer.traced_sources)(map(found.swap, self.sources))
        dynamo_guards.install_guard(*found.guards)
        ordered = tx.output.guard_on_key_order  # dictionaries that guards read by position
        ordered.update([found.swap(source) for source in ordered])
        stacks = self._list_stacks(found.module)

        def get_variable(node: Any) -> Any:
            if node not in variables:
                new, x = made[node], node.meta["example_value"]
                new.meta.pop("example_value", None)
                variables[node] = wrap_fx_proxy(
                    tx, torch.fx.Proxy(new, tracer), example_value=renew(tx, x)
                )
            return variables[node]

        def get(value: Any) -> Any:
            if isinstance(value, LazyVariableTracker):
                value = value.realize()
            if isinstance(value, TensorVariable):
                return get_variable(value.as_proxy().node)
            if type(value) is TupleVariable:
                return TupleVariable([get(each) for each in value.items])
            return value

        for part in self.parts:
            if isinstance(part, Hole):
                self._fill(tx, part, get, found, variables)
                for each in part.results.tensors:
                    node = each.as_proxy().node
                    made[node] = variables[node].as_proxy().node
                continue
            new = tracer.graph.node_copy(part, made.__getitem__)
            if (stack := new.meta.get("nn_module_stack")) is not None:
                new.meta["nn_module_stack"] = {
                    name: (place, cls)
                    for key, (path, cls) in stack.items()
                    for name, place in (stacks.get(key.split("@")[0], (key, path)),)
                }
            made[part] = new
        return get(self.result)

    def _fill(
        self, tx: Any, hole: Hole, get: Any, found: _Found, variables: dict[Any, Any]
    ) -> None:
        """Evaluate a call that writes outside of the layer."""

        def give(value: Any) -> Any:
            if id(value) in hole.lazy:
                source = found.swap(hole.lazy[id(value)])
                return LazyVariableTracker.create(found.find(source), source)
            if isinstance(value, ConstDictVariable):
                items = {key: give(each) for key, each in value.items.items()}
                return ConstDictVariable(items, value.user_cls, mutation_type=ValueMutationNew())
            return get(value)

        args = [give(each) for each in hole.args]
        named = {name: give(each) for name, each in hole.named.items()}
        result = tx.inline_user_function_return(hole.function, args, named)
        results = Values()
        if results.read(result) != hole.key:
            raise CannotRepeatError("a method of an object from outside returns other tensors")
        for old, new in zip(hole.results.tensors, results.tensors, strict=True):
            variables[old.as_proxy().node] = new

    def _list_stacks(self, module: Any) -> dict[str, tuple[str, str]]:
        """For the key of each module inside: the key and the path of the new layer's module."""
        old, new = self.module.value, module.value
        path = _read_path(module)
        inside = dict(new.named_modules(remove_duplicate=False))
        return {
            str(id(part)): (str(id(inside[name])), f"{path}.{name}" if name else path)
            for name, part in old.named_modules(remove_duplicate=False)
        }
