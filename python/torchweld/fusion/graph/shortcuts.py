"""What Dynamo does at length and a capture does not need, or needs once.

Each shortcut has the result and the guards of the long way.

All names of Dynamo that this needs are here.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import guards, output_graph, symbolic_convert, variables
from torch._dynamo.exc import Unsupported
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import higher_order_ops
from torch._dynamo.variables.base import (
    AttributeMutationNew,
    ValueMutationNew,
    VariableTracker,
)
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.lists import SliceVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable
from torch.fx.experimental import symbolic_shapes

from torchweld.fusion.graph.record import read_casts

_is_serving: Callable[[], bool] = bool  # whether a region is captured now
# The method of a variable that reads an attribute, by its name; torch 2.14 has renamed it.
READ = "var_getattr" if hasattr(VariableTracker, "var_getattr") else "tp_getattro_impl"


# --- What is needless: names of functions for a log, which are read from whole files; all backends,
# imported to ask whether one of them runs in a transform of torch.func; torch.export and Inductor,
# imported to leave their lines out of messages; and 50 ms in which the processor's caches are
# emptied, to time the guards for a log.
_NEEDLESS = (
    (symbolic_convert, "get_funcname", None),
    (symbolic_convert.InstructionTranslator, "_throw_if_in_functorch", None),
    (symbolic_shapes, "uninteresting_files", guards.uninteresting_files()),
    (output_graph, "uninteresting_files", guards.uninteresting_files()),
    (guards, "profile_guard_manager", 0.0),
)


def _unless_serving(function: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    return lambda *args: answer if _is_serving() else function(*args)


def _if_imported(is_local_map: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo imports much of torch.distributed to ask whether a function is one of its."""

    def ask(value: Any) -> Any:
        return "torch.distributed.tensor.experimental._func_map" in sys.modules and is_local_map(
            value
        )

    return ask


# --- Sets -----------------------------------------------------------------------------------------


def _contain(test: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo makes a variable of each element of a set, which may be hundreds of classes."""

    def test_or_ask(tx: Any, inst: Any) -> Any:
        left, right = tx.stack[-2:]
        if not _is_serving() or not _is_untouched(tx, right):
            return test(tx, inst)
        left, elements, source = left.realize(), right.peek_value(), right.original_source()
        if not isinstance(left, (ConstantVariable, UserDefinedClassVariable)):
            return test(tx, inst)
        key = left.as_python_constant()
        is_in = key in elements
        if hasattr(guards.GuardBuilder, "SET_NOT_CONTAINS"):
            name, more = ("SET_CONTAINS" if is_in else "SET_NOT_CONTAINS"), {}
        else:  # torch 2.10
            name, more = "SET_CONTAINS", {"invert": not is_in}
        check = functools.partial(getattr(guards.GuardBuilder, name), key=key, **more)
        guards.install_guard(source.make_guard(check))
        tx.popn(2)
        tx.push(ConstantVariable.create(is_in is (inst.argval == 0)))
        return None

    return test_or_ask


def _is_untouched(tx: Any, variable: Any) -> bool:
    """Whether a variable is a set from outside that nothing has read or written yet."""
    if not isinstance(variable, LazyVariableTracker) or variable.is_realized():
        return False
    value = variable.peek_value()
    return type(value) in (set, frozenset) and value not in tx.output.side_effects


# --- Lists of layers ------------------------------------------------------------------------------


def _slice(read: Callable[..., Any]) -> Callable[..., Any]:
    """A slice of a list of layers is another module, which Dynamo builds layer by layer."""

    def read_or_list(tx: Any, inst: Any) -> Any:
        taken = 3 if inst.opname == "BINARY_SLICE" else 2
        if not _is_serving() or not _is_walked(tx, taken):
            return read(tx, inst)
        layers, *places = tx.popn(taken)
        if taken == 2:
            places = places[0].realize().items
        function: Any = _list
        variable = UserFunctionVariable(function)
        tx.push(tx.inline_user_function_return(variable, [layers, *places], {}))
        return None

    return read_or_list


def _list(layers: torch.nn.ModuleList, *places: Any) -> Any:
    return tuple(layers._modules.values())[slice(*places)]


def _is_walked(tx: Any, taken: int) -> bool:
    """Whether a slice of a list of layers is read, and a loop walks through it and forgets it."""
    layers, places = tx.stack[-taken].realize(), tx.stack[-1]
    is_module = isinstance(layers, UnspecializedNNModuleVariable)
    if not is_module or type(layers.value) is not torch.nn.ModuleList:
        return False
    if taken == 2 and not isinstance(places.realize(), SliceVariable):
        return False
    at = tx.instruction_pointer  # of the next instruction
    following = next(each.opname for each in tx.instructions[at:] if each.opname != "CACHE")
    caller = getattr(tx.stack[-taken - 1], "fn", None) if len(tx.stack) > taken else None
    return following == "GET_ITER" or (following in ("PRECALL", "CALL") and caller is enumerate)


# --- Settings -------------------------------------------------------------------------------------


class _Settings:
    """Constants that a class with its own __getattribute__ returned in one capture.

    They hold until something writes to an object from outside, or to a new one that it refers to.
    """

    def __init__(self) -> None:
        self.writes = 0
        self.known: dict[Any, tuple[Any, Any, Any]] = {}
        self._held: list[Any] = []  # new objects to which ones from outside refer, by their mark
        self._may_hold_all = False

    def store(self, item: Any, value: Any) -> None:
        """Note that an attribute is written."""
        if self._is_outside(item):
            self._forget()
            VariableTracker.visit(lambda each: self._held.append(each.mutation_type), value)

    def change(self, item: Any) -> None:
        """Note that a list, a dictionary or another container is written."""
        if self._is_outside(item):
            self._forget()
            self._may_hold_all = True

    def _is_outside(self, item: Any) -> bool:
        is_held = any(item.mutation_type is each for each in self._held)
        return not _is_new(item) or self._may_hold_all or is_held

    def _forget(self) -> None:
        self.writes += 1
        self.known = {}


def _is_new(item: Any) -> bool:
    """Whether the forward has made an object."""
    return isinstance(item.mutation_type, (AttributeMutationNew, ValueMutationNew))


def _find_settings(output: Any) -> _Settings:
    found: _Settings | None = vars(output).get("_weld_settings")
    if found is None:
        found = output._weld_settings = _Settings()
    return found


def _note_store(store: Callable[..., Any]) -> Callable[..., Any]:
    def note_and_store(
        effects: Any, item: Any, name: str, value: Any, *rest: Any, **named: Any
    ) -> Any:
        if _is_serving():
            _find_settings(effects.output_graph_weakref()).store(item, value)
        return store(effects, item, name, value, *rest, **named)

    return note_and_store


@functools.cache
def _list_sets() -> tuple[Any, ...]:
    """Dynamo's variables of sets. A release that has them elsewhere is not captured."""
    found = [variables.SetVariable, getattr(variables, "UserDefinedSetVariable", None)]
    return tuple(cls for each in found if each for cls in each.__mro__ if "Set" in cls.__name__)


def _note_change(change: Callable[..., Any]) -> Callable[..., Any]:
    def note_and_change(effects: Any, item: Any) -> Any:
        if _is_serving():
            if isinstance(item, _list_sets()) and not _is_new(item):
                raise Unsupported("a set from outside is written, which Dynamo does not repeat")
            _find_settings(effects.output_graph_weakref()).change(item)
        return change(effects, item)

    return note_and_change


def _remember(read: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo walks through a configuration's __getattribute__ for each setting of each layer."""

    def read_or_remember(variable: Any, tx: Any, name: str) -> Any:
        is_plain = type(variable.value).__getattribute__ is object.__getattribute__
        if is_plain or not variable.source or not _is_serving():
            return read(variable, tx, name)
        settings = _find_settings(tx.output)
        state = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), read_casts()
        key = (id(variable), name, state)
        if key in settings.known:
            _, found, sources = settings.known[key]
            _trace(tx, {*sources, _find_source(found)} - {None})
            return found
        writes = settings.writes
        with _tracing_apart(tx) as sources:
            found = read(variable, tx, name)
        is_kept = type(found) is ConstantVariable or _find_source(found) is not None
        if is_kept and settings.writes == writes:
            settings.known[key] = variable, found, sources
        return found

    return read_or_remember


def _find_source(variable: Any) -> Any:
    """Where a variable comes from; None of what the forward makes."""
    if isinstance(variable, LazyVariableTracker):
        return variable.realize().source if variable.is_realized() else variable.original_source()
    return variable.source


def _trace(tx: Any, sources: set[Any]) -> None:
    """Note sources as read, as Dynamo does in versions after 2.10."""
    if (traced := getattr(tx.output.current_tracer, "traced_sources", None)) is not None:
        traced.update(sources)


@contextlib.contextmanager
def _tracing_apart(tx: Any) -> Iterator[set[Any]]:
    """The sources that are read here."""
    tracer, found = tx.output.current_tracer, set[Any]()
    before = getattr(tracer, "traced_sources", None)
    if before is None:
        yield found
        return
    tracer.traced_sources = type(before)()
    try:
        yield found
    finally:
        found |= set(tracer.traced_sources)
        tracer.traced_sources = before
        _trace(tx, found)


# --- Where they are put ---------------------------------------------------------------------------

_OPCODES = {"CONTAINS_OP": _contain, "BINARY_SUBSCR": _slice, "BINARY_SLICE": _slice}


# What they wrap: the class, its method, and the wrapper.
PLACES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (SideEffects, "store_attr", _note_store),
    (SideEffects, "mutation", _note_change),
    (UserDefinedObjectVariable, READ, _remember),
)


def install(is_serving: Callable[[], bool]) -> None:
    """Put the other shortcuts into Dynamo's tables, once; they wait for a capture."""
    global _is_serving
    _is_serving = is_serving
    for home, name, answer in _NEEDLESS:
        if (function := getattr(home, name, None)) is not None:
            setattr(home, name, _unless_serving(function, answer))
    wrapped = getattr(higher_order_ops, "LocalMapWrappedHigherOrderVariable", None)
    if wrapped is not None:
        wrapped.should_wrap_in_hop = staticmethod(_if_imported(wrapped.should_wrap_in_hop))
    for cls in list_subclasses(symbolic_convert.InstructionTranslatorBase):
        for name, handle in _OPCODES.items():
            if (code := dis.opmap.get(name)) is not None:
                cls.dispatch_table[code] = handle(cls.dispatch_table[code])


def list_subclasses(cls: Any) -> list[Any]:
    """A class and all that inherit from it."""
    return [cls, *(each for sub in cls.__subclasses__() for each in list_subclasses(sub))]
