"""What a run computes: steps of ATen in normal form, between numbered tensors."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchweld.dispatch.dtensor import is_dtensor
from torchweld.fusion.graph.normal import normalize

_BATCH_NORM = inspect.signature(torch.nn.functional.batch_norm)
_HEADS = inspect.signature(torch.nn.functional.multi_head_attention_forward)
HEADS = tuple(_HEADS.parameters)  # the names of its arguments, in order
_RANDOM = torch.Tag.nondeterministic_seeded


@dataclass(frozen=True)
class Ref:
    """A tensor, by its number."""

    at: int


@dataclass(frozen=True)
class Number:
    """A size or a float, also a symbolic one, by its text: -0.0 is not 0.0, and 4 is no 4.0."""

    text: str


@dataclass
class Step:
    """One operation. Tensors among its arguments are Refs, numbers are Numbers."""

    func: Any  # an overload of ATen, or the name of what is recorded whole
    args: tuple[Any, ...]
    kwargs: tuple[Any, ...]
    outs: tuple[int, ...]
    node: int  # the place of the graph's node that ran it
    epoch: int  # counts changes of a state, as autocast: steps of two epochs never are one op
    writes: tuple[int, ...]  # storages

    @property
    def is_view(self) -> bool:
        return not isinstance(self.func, str) and self.func.is_view

    @property
    def is_random(self) -> bool:
        return isinstance(self.func, str) or _RANDOM in self.func.tags

    @property
    def name(self) -> str:
        return self.func if isinstance(self.func, str) else self.func.overloadpacket.__name__


class Record:
    """Steps in order, who made each tensor and who reads it.

    A number is of a tensor and its contents: a write gives new ones to all tensors of that memory.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.values: list[torch.Tensor] = []
        self.made_by: dict[int, int] = {}
        self.users: dict[int, list[int]] = collections.defaultdict(list)
        self.node, self.epoch = -1, 0
        self._numbers: dict[int, int] = {}
        self._sharing: dict[int, list[int]] = collections.defaultdict(list)  # tensors of a storage

    def number(self, x: torch.Tensor) -> int:
        """The number of a tensor, a new one for a new tensor."""
        if id(x) not in self._numbers:
            self._numbers[id(x)] = len(self.values)
            self._sharing[find_storage(x)].append(id(x))
            self.values.append(x)  # so that no other tensor gets its id
        return self._numbers[id(x)]

    def add(self, func: Any, args: Any, kwargs: Any, out: Any, writes: tuple[int, ...]) -> None:
        given, named = self.encode(args), self.encode(kwargs)
        for tensor in (each for storage in writes for each in self._sharing.pop(storage, ())):
            del self._numbers[tensor]
        outs = tuple(self.number(x) for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        at = len(self.steps)
        self.steps.append(Step(func, given, named, outs, self.node, self.epoch, writes))
        for number in {*list_refs(given), *list_refs(named)}:
            self.users[number].append(at)
        for number in outs:
            self.made_by.setdefault(number, at)

    def cut(self, length: int) -> None:
        """Forget the steps from the one with this number on."""
        gone = self.steps[length:]
        for number in {ref for step in gone for ref in list_refs((step.args, step.kwargs))}:
            self.users[number] = [at for at in self.users[number] if at < length]
        self.made_by = {number: at for number, at in self.made_by.items() if at < length}
        del self.steps[length:]

    def encode(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Ref(self.number(value))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return Number(str(value.node.expr))
        if type(value) in (int, float):
            return Number(repr(value))
        if isinstance(value, (list, tuple)):
            return tuple(self.encode(each) for each in value)
        if isinstance(value, dict):
            return tuple((name, self.encode(value[name])) for name in sorted(value))
        return value

    # --- For patterns

    def maker(self, value: Any, *funcs: Any) -> Step | None:
        """The step that made a value, if it is one of these operations and writes to nothing."""
        if isinstance(value, Ref) and value.at in self.made_by:
            step = self.steps[self.made_by[value.at]]
            return step if step.func in funcs and not step.writes else None
        return None

    def readers(self, number: int, *funcs: Any) -> list[Step]:
        """The steps that read a tensor and are one of these operations."""
        return [self.steps[at] for at in self.users[number] if self.steps[at].func in funcs]

    def strip(self, value: Any, *funcs: Any) -> Any:
        """The value before these operations, which have one input each."""
        while (step := self.maker(value, *funcs)) is not None:
            value = step.args[0]
        return value

    def shape(self, value: Ref) -> torch.Size:
        return self.values[value.at].shape


def list_refs(value: Any) -> list[int]:
    """The numbers of all tensors in a step's arguments."""
    if isinstance(value, Ref):
        return [value.at]
    if isinstance(value, tuple):
        return [number for each in value for number in list_refs(each)]
    return []


def as_float(value: Any) -> float | None:
    """A float among a step's arguments; None of anything else, as a symbol."""
    if not isinstance(value, Number):
        return None
    try:
        return float(value.text)
    except ValueError:
        return None


def find_storage(x: torch.Tensor) -> int:
    """A number that tensors share which share memory."""
    return find_part(x).untyped_storage()._cdata


def find_part(x: Any) -> torch.Tensor:
    """This device's part of a DTensor, which has the memory; any other tensor itself."""
    return x._local_tensor if is_dtensor(x) else x  # type: ignore[no-any-return]


def find_places(x: Any) -> tuple[Any, ...]:
    """The mesh of a DTensor and its placements there; () of any other tensor."""
    return (x.device_mesh, *x.placements) if is_dtensor(x) else ()


# --- Modes that record ----------------------------------------------------------------------------


@contextlib.contextmanager
def recording(record: Record) -> Iterator[None]:
    """Record what runs, without gradients. Casts of autocast are recorded at each use."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad(), _Calls(record), _Functions(record):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)


class _Calls(TorchDispatchMode):
    """Records calls of ATen."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _list_written(func, args, kwargs) if func._schema.is_mutable else ()
        calls = [(func, args, kwargs)] if written else normalize(func, args, kwargs)
        out = func(*args, **kwargs)
        if func.namespace != "prim":  # questions about a tensor's device
            for call, each in zip(calls, out if len(calls) > 1 else (out,), strict=True):
                self.record.add(*call, each, written)
        return out


def _list_written(func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    written = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            tensors = (x for x in tree_leaves(value) if isinstance(x, torch.Tensor))
            written += [find_storage(x) for x in tensors]
    return tuple(written)


class _Functions(TorchFunctionMode):
    """Records functions of torch as one step whose operations depend on the device."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.nn.functional.dropout, torch.dropout):
            return self._drop(*_read_dropout(*args, **kwargs))
        length = len(self.record.steps)
        out = func(*args, **kwargs)
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.record.cut(length)
            given = _read_attention(*args, **kwargs)
            self.record.add("scaled_dot_product_attention", given, {}, out, ())
        if func is torch.nn.functional.multi_head_attention_forward:
            self.record.cut(length)
            given = _read(_HEADS, args, kwargs)
            self.record.add("multi_head_attention_forward", given, {}, out, ())
        if func is torch.nn.functional.batch_norm:
            self.record.cut(length)
            given = _read(_BATCH_NORM, args, kwargs)
            statistics = given[1:3] if given[5] else ()
            written = tuple(find_storage(x) for x in statistics if x is not None)
            self.record.add("batch_norm", given, {}, out, written)
        return out

    def _drop(self, x: torch.Tensor, p: float, training: bool, inplace: bool) -> torch.Tensor:
        if p == 0 or not training:
            return x
        length = len(self.record.steps)
        out = x if inplace else torch.empty_like(x)
        self.record.cut(length)
        self.record.add("dropout", (x, p), {}, out, (find_storage(x),) if inplace else ())
        return out


def _read_dropout(
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    train: bool | None = None,
) -> tuple[torch.Tensor, float, bool, bool]:
    """The arguments of torch.nn.functional.dropout; torch.dropout calls the third one `train`."""
    return input, p, training if train is None else train, inplace


def _read_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Any, ...]:
    """The arguments of torch.nn.functional.scaled_dot_product_attention, in order."""
    return query, key, value, attn_mask, float(dropout_p), is_causal, scale, enable_gqa


def _read(signature: inspect.Signature, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The arguments of a function of torch, in order, with its defaults."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args


@functools.cache
def list_devices() -> tuple[str, ...]:
    """The kinds of devices whose autocast a record depends on."""
    kinds = ("cpu", "cuda")
    return tuple(kind for kind in kinds if torch.amp.is_autocast_available(kind))


def read_casts() -> tuple[Any, ...]:
    """The state of autocast."""
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in list_devices()
    )
