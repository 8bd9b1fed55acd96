"""Layers that Dynamo evaluates once: the nodes of the first one are copied for those like it.

A layer is like another one if its arguments are alike and each guard that Dynamo made for the first
one holds for it. Then Dynamo would walk the same way through the same code, so that a copy of the
nodes, with the layer's own parameters, is what it would record. The guards are made for the layer,
too. What a layer writes to objects from outside, as a cache for keys and values, is no part of
this: the method that writes is evaluated for each layer, with the copied tensors.

All names of Dynamo that this needs and torch 2.10 lacks are here; without them each layer is
evaluated.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch._dynamo import guards as dynamo_guards
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import LocalSource
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables.base import (
    AttributeMutationNew,
    MutationType,
    ValueMutationNew,
)
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._guards import Guard

from torchweld.fusion.graph.evaluated import (
    CHECKS,
    Evaluated,
    Finder,
    Hole,
    Swap,
    Values,
    describe,
    is_alias,
    renew,
)
from torchweld.fusion.graph.record import find_storage, read_casts
from torchweld.fusion.graph.shortcuts import READ

MOST = 4  # different graphs of layers of one class


class _UnlikeError(Exception):
    """A layer's graph is for this layer only."""


class Repeats:
    """The layers that one capture has evaluated, by class and arguments."""

    def __init__(self) -> None:
        self.made = 0
        self._output: Any = None
        self._known: dict[Any, list[Evaluated]] = {}
        self._is_recording = False

    def call(
        self, evaluate: Callable[..., Any], module: Any, tx: Any, args: Any, named: Any
    ) -> Any:
        """Call a layer by a copy of another one's nodes, or evaluate it."""
        output = tx.output
        if self._output is not output:  # Dynamo begins again after what it learns
            self._output, self._known = output, {}
        is_inner = self._is_recording or output.current_tracer.parent is not None
        if is_inner or module.source is None:
            return evaluate(module, tx, args, named)
        given = Values()
        read = functools.partial(Values.read, value=(tuple(args), dict(named)))
        key = (type(module.value), read(given), _read_state(tx))
        layers = self._known.setdefault(key, [])
        for layer in layers:
            if (found := layer.find(tx, module)) is not None:
                self.made += 1
                return layer.repeat(tx, given, found)
        if len(layers) == MOST:
            return evaluate(module, tx, args, named)
        self._is_recording = True
        try:
            recording = _Recording(tx, module, given)
            with recording.watch():
                result = evaluate(module, tx, args, named)
        finally:
            self._is_recording = False
        if read(Values()) != key[1]:
            recording.why = "it changes its arguments"
        with contextlib.suppress(_UnlikeError):
            layers.append(recording.finish(result))
        return result


def _read_state(tx: Any) -> Any:
    modes = getattr(tx.symbolic_torch_function_state, "mode_stack", ())
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), read_casts(), len(modes)


class _Recording:
    """The evaluation of a layer."""

    def __init__(self, tx: Any, module: Any, given: Values) -> None:
        self.tx, self.module, self.given = tx, module, given
        self.tracer = tx.output.current_tracer
        self.last = self.tracer.graph._root._prev
        self.before = set(tx.output.guards)
        self.inside: set[Any] = set()  # guards of holes
        self.holes: list[Hole] = []
        self.methods: list[tuple[Any, str]] = []  # of objects from outside
        self.why = ""  # why it is for this layer only
        self.random = len(tx.output.random_calls)
        self._in_hole = False
        self._born: list[Any] = []
        self._sources = self.tracer.traced_sources

    # --- While Dynamo evaluates

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        allow, load = SideEffects.check_allowed_side_effect, SideEffects.load_attr
        begin = MutationType.__init__
        inline: Any = InliningInstructionTranslator.inline_call
        recording = self

        def check_allowed(effects: Any, item: Any) -> Any:
            if not (self._in_hole or self._is_born(item)):
                self.why = "it writes to an object from outside"
            return allow(effects, item)

        def begin_mutation(mutation: Any, *args: Any) -> None:
            if isinstance(mutation, (ValueMutationNew, AttributeMutationNew)):
                self._born.append(mutation)
            begin(mutation, *args)

        def load_attr(effects: Any, item: Any, *args: Any, **more: Any) -> Any:
            if not (self._in_hole or self._is_born(item)):
                self.why = "it reads what was written"
            return load(effects, item, *args, **more)

        def inline_call(
            cls: Any, parent: Any, function: Any, args: Any, named: Any, **more: Any
        ) -> Any:
            run = functools.partial(inline.__func__, cls, parent, function, **more)
            owner = args[0] if args else None
            if isinstance(owner, LazyVariableTracker):
                owner = owner.unwrap()
            if recording._in_hole or not recording._is_other(owner):
                return run(args=args, kwargs=named)
            return recording._evaluate_hole(run, function, args, named)

        self.tracer.traced_sources = type(self._sources)()
        try:
            with (
                mock.patch.object(SideEffects, "check_allowed_side_effect", check_allowed),
                mock.patch.object(SideEffects, "load_attr", load_attr),
                mock.patch.object(MutationType, "__init__", begin_mutation),
                mock.patch.object(
                    InliningInstructionTranslator, "inline_call", classmethod(inline_call)
                ),
                self._watch_others(),
            ):
                yield
        finally:
            self.sources = self.tracer.traced_sources
            self.tracer.traced_sources = self._sources | self.sources

    def _is_born(self, item: Any) -> bool:
        """Whether an object was made in this layer."""
        return any(item.mutation_type is each for each in self._born)

    @contextlib.contextmanager
    def _watch_others(self) -> Iterator[None]:
        """Note what reads the state of an object from outside, which no guard is about."""
        classes: list[Any] = [type(each) for each in self.given.others]
        for each, cls in zip(self.given.others, classes, strict=True):
            vars(each)["_weld_recording"] = self
            each.__class__ = _watched(cls)
        try:
            yield
        finally:
            for each, cls in zip(self.given.others, classes, strict=True):
                each.__class__ = cls
                del vars(each)["_weld_recording"]

    def find_method(self, variable: Any, find: Any, tx: Any, name: str) -> Any:
        """Read an attribute of an object from outside, which must be a method of its class."""
        self._in_hole = True
        try:
            found = find(tx, name)
        finally:
            self._in_hole = False
        if not isinstance(found, UserMethodVariable):
            self.why = f"it reads an object from outside: {name}"
        self.methods.append((variable, name))
        return found

    def _evaluate_hole(self, run: Any, function: Any, args: Any, named: Any) -> Any:
        hole = Hole(function, list(args), dict(named), self.tracer.graph._root._prev, None)
        if type(function) not in (UserFunctionVariable, UserMethodVariable):
            self.why = "it hands an object from outside to a function that it makes"
        args = [self._hand(hole, each) for each in args]
        named = {name: self._hand(hole, each) for name, each in named.items()}
        sources, before = self.tracer.traced_sources, set(self.tx.output.guards)
        self.tracer.traced_sources, self._in_hole = type(sources)(), True
        try:
            result = run(args=args, kwargs=named)
        finally:
            self.tracer.traced_sources, self._in_hole = sources, False
        self.inside |= set(self.tx.output.guards) - before
        hole.last = self.tracer.graph._root._prev
        hole.key = hole.results.read(result)
        if any(value.items != items for value, items in hole.dictionaries):
            self.why = "a method of an object from outside writes to a dictionary"
        if hole.results.others:
            self.why = "a method of an object from outside returns no tensors"
        self.holes.append(hole)
        return result

    def _hand(self, hole: Hole, value: Any) -> Any:
        """Look at an argument of a hole, which a copy has to make again."""
        if isinstance(value, LazyVariableTracker):
            if not value.is_realized():
                # Another one, so that a later use outside of this call is seen.
                hole.lazy[id(value)] = source = value.original_source()
                return LazyVariableTracker.create(value.original_value(), source)
            value = value.unwrap()
        if type(value) is TensorVariable:
            hole.tensors.append(value)
        elif type(value) is TupleVariable:
            return TupleVariable([self._hand(hole, each) for each in value.items])
        elif type(value) is ConstDictVariable:
            hole.dictionaries.append((value, dict(value.items)))
            for each in value.items.values():
                self._hand(hole, each)
        elif type(value) is not ConstantVariable and not self._is_other(value):
            self.why = "it hands an object of its own to one from outside"
        return value

    def _is_other(self, value: Any) -> bool:
        return any(value is each for each in self.given.others)

    # --- Afterwards

    def finish(self, result: Any) -> Evaluated:
        if self.last.op == "placeholder":
            self.why = "nothing comes before it"
        if self.random != len(self.tx.output.random_calls):
            self.why = "it draws random numbers in Python"
        self._unless(not self.why)
        parts, inner = self._list_parts()
        made = {node for hole in self.holes for node in hole.results.nodes}
        given = {each.as_proxy().node: at for at, each in enumerate(self.given.tensors)}
        lifted: dict[Any, Any] = {}
        for node in inner:
            for each in node.all_input_nodes:
                if each in given or each in inner or each in made:
                    continue
                self._unless(each.op == "placeholder")
                lifted[each] = getattr(each.meta.get("grapharg"), "source", None)
        results = Values()
        results.read(result)
        handed = {each.as_proxy().node for hole in self.holes for each in hole.tensors}
        self._unless(not results.others)
        self._unless(results.nodes | handed <= {*given, *inner, *made})
        self._check_memory(results.nodes & set(inner), (*given, *lifted))
        return Evaluated(
            module=self.module,
            given=self.given,
            parts=parts,
            given_at=given,
            lifted=lifted,
            result=result,
            guards=self._list_guards(),
            sources=self.sources,
            methods=self.methods,
        )

    def _check_memory(self, results: set[Any], outside: tuple[Any, ...]) -> None:
        """A result that shares memory, or has gaps in it, is not described by its metadata."""
        values = [node.meta.get("example_value") for node in (*results, *outside)]
        memory = [find_storage(x) for x in values if isinstance(x, torch.Tensor)]
        for x in values[: len(results)]:
            self._unless(memory.count(find_storage(x)) == 1)
            self._unless(describe(renew(self.tx, x)) == describe(x))

    def _unless(self, holds: bool) -> None:
        if not holds:
            raise _UnlikeError(self.why)

    def _list_parts(self) -> tuple[list[Any], dict[Any, None]]:
        """The nodes to copy and the holes between them, in order."""
        parts: list[Any] = []
        inner: dict[Any, None] = {}
        holes = self.holes[::-1]
        node, root = self.last, self.tracer.graph._root
        while True:
            while holes and holes[-1].first is node:  # some make no nodes
                parts.append(holes.pop())
                node = parts[-1].last
            node = node._next
            if node is root:
                return parts, inner
            if node.op == "placeholder":
                continue
            # A node that reads a number, as `tolist`, has a symbol that no copy may share.
            is_plain = node.op in ("call_function", "call_method")
            is_plain &= "unbacked_bindings" not in node.meta
            self._unless(is_plain and not isinstance(node.target, torch._ops.HigherOrderOperator))
            name = getattr(node.target, "__name__", node.target)
            self._unless(name != "holds" and not name.startswith("register_"))
            parts.append(node)
            inner[node] = None

    def _list_guards(self) -> list[tuple[Guard, Any, Any]]:
        """The guards of this layer, how each is compared, and with what."""
        made = set(self.tx.output.guards) - self.before - self.inside
        for source in self.sources:
            made.update(self.tx.output.guards.get_guards_for_source(source))
        listed, find = [], Finder(self.tx)
        swap = Swap(self.module.source, LocalSource("no layer"))
        for guard in made:
            source = guard.originating_source
            if swap(source) is source:
                continue
            if is_alias(guard):
                other = guard.create_fn.keywords["source_b"]
                self._unless(find(source) is find(other))
                listed.append((guard, None, None))
                continue
            check: Any = CHECKS.get(guard.create_fn_name())
            self._unless(isinstance(check, dynamo_guards.GuardCheckSpec))
            value = find(source)
            listed.append((guard, check, check.get_metadata_fn(guard, value)))
        return listed


# What Dynamo asks a variable to hand it on, or for its class, whose tables of methods it has.
_PASSING = {
    "_lookup_tp_table",
    "lookup_tp_getset_member",
    "lookup_tp_method",
    "__class__",
    "__dict__",
    "realize",
    "unwrap",
    "is_realized",
    "source",
    "mutation_type",
    "python_type",
    "value_type",
    "value",
    "is_python_constant",
    "is_constant_none",
    "is_tensor",
    "is_constant_match",
    "source_location",
    "set_name_hint",
    "_weld_recording",
}


@functools.cache
def _watched(cls: Any) -> type[Any]:
    def read(variable: Any, name: str) -> Any:
        get: Any = functools.partial(cls.__getattribute__, variable)
        recording = get("_weld_recording")
        if recording._in_hole or name in _PASSING:
            return get(name)
        if name == READ:
            return functools.partial(recording.find_method, variable, get(name))
        recording.why = f"it reads an object from outside: {name}"
        return get(name)

    return type(cls.__name__, (cls,), {"__getattribute__": read})
