"""Modules whose calls are captured: a model and its repeated layers."""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
import threading
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch.nn.modules.module import _has_any_global_hook as has_global_hooks
from torch.nn.parameter import is_lazy

from torchweld import state
from torchweld.fusion.graph import capture, compiled
from torchweld.fusion.graph.answers import OtherNumbersError
from torchweld.fusion.graph.backend import run_eagerly
from torchweld.fusion.graph.patterns import FINDERS
from torchweld.fusion.graph.rewrite import Placed, leaving_out, rewrite
from torchweld.fusion.weld import Weld, forward_of, make_class, set_class, why_not_change

# How many graphs a region has, of one mode: then its calls run as they are.
LIMIT = 8
OTHERS = 3  # how often it is captured again because a number decides a branch in another way
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


class Region(Weld):
    """A module whose forward is captured at its first call, and welded.

    Its class keeps the captures, so copies and pickles of the module have them too. Layers of a
    model with the same structure share a class, and so a graph.
    """

    weld_structure: ClassVar[str]
    weld_left_out: ClassVar[tuple[str, ...]]  # names that the filter leaves out
    weld_captures: ClassVar[Captures]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "welded_from" in vars(cls):
            cls.weld_captures = Captures(cls.welded_from.__name__, set(cls.weld_left_out))
            cls.forward = _make_forward(cls)  # type: ignore[attr-defined]


def _make_forward(cls: Any) -> Callable[..., Any]:
    @functools.wraps(cls.welded_from.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = super(cls, self).forward
        if state.is_compiling():  # a part of a larger capture
            return run(*args, **kwargs)
        return cls.weld_captures.call(self, run, args, kwargs)

    _CODES.add(forward.__code__)  # type: ignore[attr-defined]
    return forward


_CODES: set[Any] = set()  # of a region's forward: all of them have the same


class Captures:
    """The graphs of modules of one structure."""

    def __init__(self, name: str, left_out: set[str]) -> None:
        self.name, self.left_out = name, left_out
        self.slots: dict[tuple[bool, ...], Slot] = {}
        self._classes: tuple[Any, ...] = ()
        self._names: tuple[str, ...] = ()
        self._functions: tuple[Any, ...] = ()
        self._lock = threading.RLock()

    def call(self, module: Any, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call by its graph, which is captured if it is not there; or run it as it is."""
        if has_global_hooks() or capture.is_impossible():
            return run(*args, **kwargs)
        # Dynamo guards on all that a forward reads but on methods of classes, and on attributes of
        # a base that a class hides later.
        now = map(getattr, self._classes, self._names, _NONE)
        if not all(map(operator.is_, now, self._functions)):
            self.slots = {}
            self._watch(module)
        key = (
            module.training,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            state.is_capturing_at_all(),
        )
        slot = self.slots.get(key)
        if slot is None:
            with self._lock:
                slot = self.slots.setdefault(key, Slot(self))
            # Its parts have a compiler already, which makes their welds.
            parts = (part for part in module.modules() if part is not module)
            slot.off = any(getattr(part, "_compiled_call_impl", None) for part in parts)
        return self._call_by(slot, module, run, args, kwargs)

    def _call_by(self, slot: Slot, module: Any, run: Any, args: Any, kwargs: Any) -> Any:
        if slot.off:
            if slot.divides and module not in slot.divides:
                slot.divide(module)
            return run(*args, **kwargs)
        if self.left_out:  # Dynamo names modules by their ids
            self.left_out |= {str(id(each)) for each in self._list_left_out(module)}
        graphs = slot.graphs
        try:
            return slot.run(run, args, kwargs)
        except OtherNumbersError:
            failed = None
        except capture.CannotCaptureError as error:
            failed = error
        finally:
            if slot.graphs != graphs:
                self._watch(module)
                slot.judge()
        if failed is None:
            other = slot.find_other()
            return (
                self._call_by(other, module, run, args, kwargs) if other else run(*args, **kwargs)
            )
        if isinstance(module, Root) and not slot.reason:
            divide_at_hooks(module)
            slot.split(failed)
            return self._call_by(slot, module, run, args, kwargs)
        slot.stop(failed)
        if not isinstance(module, Root):
            slot.divide(module)
        return run(*args, **kwargs)

    def list_slots(self) -> Iterator[Slot]:
        """The graphs of each kind of call, so far."""
        for first in [*self.slots.values()]:
            slot: Slot | None = first
            while slot is not None:
                yield slot
                slot = slot.other

    def _list_left_out(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        return (each for name, each in module.named_modules() if name and name in self.left_out)

    def _watch(self, module: torch.nn.Module) -> None:
        """Note the methods and attributes of all classes inside."""
        noted = dict(
            zip(zip(self._classes, self._names, strict=True), self._functions, strict=True)
        )
        for cls in {type(part) for part in module.modules()}:
            for base in cls.__mro__:
                if base in (torch.nn.Module, object):
                    continue
                for name in vars(base):
                    if name.startswith("__") or (cls, name) in noted:
                        continue
                    value = getattr(cls, name, None)
                    if value is getattr(cls, name, None):  # not a new object for each access
                        noted[cls, name] = value
        self._classes = tuple(cls for cls, _ in noted)
        self._names = tuple(name for _, name in noted)
        self._functions = tuple(noted.values())


_NONE = itertools.repeat(None)  # for a method that was deleted


class Slot:
    """The graphs of one mode: with or without gradients, training or evaluation.

    Of calls whose numbers decide a branch in another way the next slot has the graphs.
    """

    def __init__(self, captures: Captures, others: int = OTHERS) -> None:
        self.captures = captures
        self.other: Slot | None = None
        self._others = others
        self.made: list[list[Placed]] = []  # of each graph
        self.off = False
        self.divides: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.reason = ""  # why it is off, or why it is captured in pieces
        self.run = capture.make(captures.name, _weakly(self._compile), whole=True)
        self._limit, self._pieces = LIMIT, False

    def _compile(self, module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        if not self._pieces and not capture.is_known(self.run):
            self.made = []
        made = rewrite(module, FINDERS, leaving_out(self.captures.left_out))
        self.made.append(made.placed)
        return run_eagerly(module, made)

    @property
    def graphs(self) -> int:
        return len(self.made)

    @property
    def placed(self) -> list[Placed]:
        """What stands in all graphs."""
        return [each for placed in self.made for each in placed]

    @property
    def welds(self) -> int:
        return sum(not each.reason for each in self.placed)

    def find_other(self) -> Slot | None:
        """The slot for calls with other numbers; None after a few of them."""
        if self.other is None and self._others:
            self.other = Slot(self.captures, self._others - 1)
        return self.other

    def stop(self, error: BaseException) -> None:
        """After a capture failed: the call runs as it is, now and later."""
        self.off, self.reason = True, capture.explain(error)

    def divide(self, module: torch.nn.Module) -> None:
        """Let the parts of a module that does not capture do so by themselves."""
        self.divides.add(module)
        divide(module)

    def split(self, error: BaseException) -> None:
        """After a capture as one graph failed: take several, and what is between them as it is."""
        self.reason, self._limit, self._pieces = capture.explain(error), 8 * LIMIT, True
        run = capture.make(self.captures.name, _weakly(self._compile), whole=False)

        def run_pieces(*given: Any) -> Any:
            with capture.skipping(*_CODES):  # regions in it capture by themselves
                return run(*given)

        self.run = run_pieces

    def judge(self) -> None:
        """After a capture: stop if nothing is welded, or if there are too many graphs."""
        if not self.welds:
            self.off = True
        elif self.graphs == self._limit:
            self.run = capture.only_known(self.run)
            warnings.warn(
                f"fuse: {self.captures.name} has {self.graphs} graphs, for as many kinds of calls;"
                " calls of further kinds run without welds",
                stacklevel=2,
            )


def _weakly(method: Any) -> Callable[..., Any]:
    """A method of an object that it does not keep alive: Dynamo keeps each backend forever."""
    found = weakref.WeakMethod(method)
    return lambda *given: found()(*given)  # type: ignore[misc]


# --- Which modules are regions --------------------------------------------------------------------


class Root(Region):
    """A model, captured as a whole, or in pieces around what does not capture."""


def weld(model: torch.nn.Module, filter_fn: Callable[[Any, str], bool] | None) -> int:
    """Make regions of a model and of its repeated layers; returns how many changed."""
    compiled.install()
    left_out = {
        name for name, part in model.named_modules() if filter_fn and not filter_fn(part, name)
    }
    # Models that are fused by themselves have graphs of their own; copies and pickles share theirs.
    key = _read_key(model) if isinstance(model, Region) else uuid.uuid4().hex[:8]
    before = [(part, type(part)) for part in model.modules()]
    try:
        for name, part, structure in list(list_layers(model)):
            _make_region(part, Region, name, f"{key} {structure}", left_out)
        _make_region(model, Root, "", f"{key} {_describe(model)}", left_out)
    except BaseException:
        for part, cls in before:
            set_class(part, cls)
        raise
    return sum(type(part) is not cls for part, cls in before)


def _read_key(module: Any) -> str:
    """What names the model that a region was fused with."""
    return str(type(module).weld_structure).split()[0]


def list_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any, str]]:
    """The elements of a model's containers that have parts, and a text for their structure.

    A container without a forward has calls of its elements only, whatever they are.
    """
    for name, part in model.named_modules():
        is_list = isinstance(part, _CONTAINERS[:2])
        if isinstance(part, _CONTAINERS):
            for key, layer in part._modules.items():
                is_layer = layer is not None and not isinstance(layer, _CONTAINERS[:2])
                if is_layer and (layer._modules or (is_list and not name)):
                    yield ".".join(filter(None, (name, key))), layer, _describe(layer)


def _make_region(
    module: Any, kind: type[Region], name: str, structure: str, left_out: set[str]
) -> bool:
    """Give a module the class of a region, which it may have already."""
    was = type(module)
    if isinstance(module, Region):
        was = was.welded_from
    if isinstance(module, Weld) and not isinstance(module, Region):
        return False
    if forward_of(module) is None or why_not_change(module) or not callable(was.forward):
        return False
    start = f"{name}." if name else ""
    inside = sorted(
        each.removeprefix(start) if each != name else ""
        for each in left_out
        if each == name or each.startswith(start)
    )
    settings = {"structure": structure, "left_out": tuple(inside)}
    cls = make_class(kind, was, tuple(settings.items()))
    if type(module) is cls:
        return False
    set_class(module, cls)
    return True


def _describe(module: torch.nn.Module) -> str:
    """A short text that modules of the same structure share."""
    parts = [(name, *_name_class(type(part))) for name, part in module.named_modules()]
    parameters = module.named_parameters()
    sizes = [(name, None if is_lazy(p) else tuple(p.shape)) for name, p in parameters]
    return hashlib.sha256(repr((parts, sizes)).encode()).hexdigest()[:16]


def _name_class(cls: Any) -> tuple[str, str]:
    cls = getattr(cls, "welded_from", cls)
    return cls.__module__, cls.__qualname__


def divide_at_hooks(root: Any) -> None:
    """Make regions of single layers with hooks, as FSDP's: Dynamo leaves torch's own out there."""
    left_out, key = set(type(root).weld_left_out), _read_key(root)
    inside: tuple[str, ...] = ()
    for name, part in root.named_modules():
        if name.startswith(inside) or part is root:
            continue
        if isinstance(part, Region):
            inside += (f"{name}.",)
        elif part._parameters and not part._modules and state.count_hooks(part, state.CALL_HOOKS):
            _make_region(part, Region, name, f"{key} {_describe(part)}", left_out)


def divide(module: Any) -> None:
    """Make regions of the parts of a region that does not capture."""
    left_out, key = set(type(module).weld_left_out), _read_key(module)
    for path, part, structure in list_parts(module):
        _make_region(part, Region, path, f"{key} {structure}", left_out)


def list_parts(module: torch.nn.Module) -> Iterator[tuple[str, Any, str]]:
    """The parts of a module that are regions if it is not, and a text for their structure."""
    for name, part in module.named_children():
        pairs = [(name, part)]
        if isinstance(part, _CONTAINERS):
            pairs = [(f"{name}.{key}", each) for key, each in part.named_children()]
        for path, each in pairs:
            if each._modules or not type(each).__module__.startswith("torch.nn."):
                yield path, each, _describe(each)
