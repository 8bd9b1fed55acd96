"""Runs Gluon kernels for Hopper on the CPU, as late as their protocol allows.

Partitions of warps are threads. An mbarrier counts arrivals and bytes. A TMA copy makes its target
NaN at once and arrives only when somebody waits for its barrier; a wgmma reads its operands from
shared memory, and a copy to global memory its source, only when somebody waits for it. So a wait
that is missing shows in the result, and one for what never comes is a dead lock, which is found at
once: no partition runs. Shared memory that threads wrote is refused by TMA and wgmma before a
fence. One partition, a different one from program to program, goes on after a wait only when all
others wait, so that they overwrite what it should have read before.

Layouts are ignored: whether they fit, the compiler says.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.language import constexpr


class ProtocolError(AssertionError):
    """What a GPU would answer by a wrong result, or not at all."""


def round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)


_ROUND: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bfloat16": round_to_bfloat16,
    "float16": lambda x: x.astype(np.float16),
    "float32": lambda x: x,
}


class _Registers(np.ndarray):
    """A tensor in registers. A product is rounded only after the sum that takes it."""

    product: np.ndarray | None = None  # exact, in float64

    def __mul__(self, other: Any) -> Any:
        made = super().__mul__(other)
        if made.dtype == np.float32:
            made.product = np.multiply(np.asarray(self), other, dtype=np.float64)
        return made

    def __add__(self, other: Any) -> Any:
        return super().__add__(other) if self.product is None else self._fuse(np.add, other)

    def __sub__(self, other: Any) -> Any:
        return super().__sub__(other) if self.product is None else self._fuse(np.subtract, other)

    def _fuse(self, function: Any, other: Any) -> Any:
        with np.errstate(invalid="ignore"):
            return _registers(function(self.product, np.asarray(other)))

    def to(self, kind: Any) -> Any:
        return _registers(_ROUND[kind](np.asarray(self)))


def _registers(x: Any) -> Any:
    """A tensor: integers as they are, and other numbers as float32. A scalar is Python's."""
    values = np.asarray(x)
    if values.ndim == 0:
        return values.item()
    return (values if values.dtype.kind in "bi" else values.astype(np.float32)).view(_Registers)


class _Memory:
    """A part of shared memory.

    `unfenced` has, for each part of the allocation, the threads whose writes only threads see yet.
    """

    layout = None

    def __init__(self, values: Any, unfenced: Sequence[set[int]], dtype: str) -> None:
        self.values, self.unfenced, self.dtype = values, unfenced, dtype

    def _view(self, values: Any) -> _Memory:
        return _Memory(values, self.unfenced, self.dtype)

    def index(self, at: int) -> _Memory:
        is_part = len(self.unfenced) == len(self.values)
        unfenced = [self.unfenced[int(at)]] if is_part else self.unfenced
        return _Memory(self.values[int(at)], unfenced, self.dtype)

    def permute(self, order: Sequence[int]) -> _Memory:
        return self._view(self.values.transpose(order))

    def reshape(self, shape: Sequence[int]) -> _Memory:
        return self._view(self.values.reshape(shape))

    def slice(self, start: int, length: int, dim: int = 0) -> _Memory:
        return self._view(self.values[(slice(None),) * dim + (slice(start, start + length),)])

    def reinterpret(self, shape: Sequence[int]) -> _Memory:
        """Matrices of other rows, or one as parts of its columns and their rows, as a swizzled
        one's lie.
        """
        if self.values.ndim == 3:
            return self._view(self.values.reshape(shape))
        _, rows, columns = shape
        begins = [range(0, size, n) for size, n in zip(self.values.shape, shape[1:], strict=True)]
        parts = [self.values[i : i + rows, j : j + columns] for j in begins[1] for i in begins[0]]
        return self._view(parts)

    def load(self, layout: Any) -> _Registers:
        return _registers(self.values.copy())

    def store(self, values: np.ndarray) -> None:
        if values.shape != self.values.shape:
            raise ProtocolError(f"{values.shape} is stored as {self.values.shape}")
        self.values[...] = values
        for each in self.unfenced:
            each.add(threading.get_ident())

    def read_late(self) -> np.ndarray:
        if any(self.unfenced):
            raise ProtocolError("shared memory is read asynchronously before a fence")
        return np.array(self.values)


class _Barrier:
    def __init__(self) -> None:
        self.phase, self.count, self.left, self.bytes = 0, 0, 0, 0
        self.late: list[Callable[[], None]] = []

    def index(self, at: int) -> _Barrier:
        return self

    def take(self, arrivals: int, moved: int) -> None:
        self.left -= arrivals
        self.bytes += moved
        if self.left < 0:
            raise ProtocolError("an arrival too many")
        if self.left == 0 and self.bytes == 0:
            self.phase ^= 1
            self.left = self.count


class _Barriers:
    def __init__(self, count: int) -> None:
        self.each = [_Barrier() for _ in range(count)]

    def index(self, at: int) -> _Barrier:
        return self.each[int(at)]


def _one(barrier: Any) -> _Barrier:
    return barrier.each[0] if isinstance(barrier, _Barriers) else barrier


class _Product:
    """A wgmma under way."""

    def __init__(self, compute: Callable[[], _Registers]) -> None:
        self.compute, self.value = compute, None


class Descriptor:
    """A tensor in global memory that TMA reads and writes in blocks; outside are zeros."""

    layout = None

    def __init__(
        self, values: np.ndarray, block: Sequence[int], dtype: str = "bfloat16", size: int = 2
    ) -> None:
        self.values, self.block, self.dtype, self.size = values, block, dtype, size

    def part(self, at: Sequence[int]) -> np.ndarray:
        return self.values[
            tuple(slice(int(low), int(low) + n) for low, n in zip(at, self.block, strict=True))
        ]


class Pointer:
    """An address of global memory, or a tensor of them."""

    def __init__(self, values: np.ndarray, at: Any = 0) -> None:
        self.values, self.at = values, at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.values, self.at + np.asarray(offset).astype(np.int64))


class _Program:
    """One program of a launch."""

    def __init__(self, number: int, programs: int) -> None:
        self.number, self.programs = number, programs
        lock = threading.RLock()
        self.changed, self.idle = threading.Condition(lock), threading.Condition(lock)
        self.alive, self.waiting, self.staying, self.dead = 1, 0, 0, False
        self.local = threading.local()
        self.unfenced: list[set[int]] = []

    def queue(self, name: str) -> list[Any]:
        return self.local.__dict__.setdefault(name, [])

    # mbarriers

    def take(self, barrier: Any, arrivals: int, moved: int) -> None:
        with self.changed:
            _one(barrier).take(arrivals, moved)
            self._wake()
            if self.queue("products") or self.queue("stores"):
                # What is under way here may still read what others write: let them.
                self._stay(lambda: self.waiting + self.staying >= self.alive)

    def _stay(self, until: Callable[[], bool]) -> None:
        self.staying += 1
        self.idle.notify_all()
        self.idle.wait_for(lambda: self.dead or until())
        self.staying -= 1

    def _wake(self) -> None:
        self.waiting = 0
        self.changed.notify_all()

    def wait(self, barrier: Any, phase: int) -> None:
        barrier = _one(barrier)
        with self.changed:
            while barrier.phase == int(phase):
                late, barrier.late = barrier.late, []
                for arrive in late:
                    arrive()
                if late:
                    self._wake()
                    continue
                self.waiting += 1
                self.idle.notify_all()
                self.dead = self.dead or self.waiting >= self.alive
                if self.dead:
                    self.changed.notify_all()
                    self.idle.notify_all()
                    raise ProtocolError("a dead lock: every partition waits")
                self.changed.wait()
            if self.queue("is late"):
                self._stay(lambda: self.waiting + 1 >= self.alive)

    # TMA

    def copy_in(self, source: Descriptor, at: Any, barrier: Any, target: _Memory) -> None:
        barrier = _one(barrier)
        target.values[...] = np.nan

        def arrive() -> None:
            inside = source.part(at)
            target.values[...] = 0
            target.values[tuple(map(slice, inside.shape))] = inside
            barrier.take(0, -target.values.size * source.size)

        with self.changed:
            barrier.late.append(arrive)
            self._wake()

    def copy_out(self, target: Descriptor, at: Any, source: _Memory) -> None:
        if any(source.unfenced):
            raise ProtocolError("a copy of shared memory begins before a fence")

        def store() -> None:
            inside = target.part(at)
            inside[...] = source.values[tuple(map(slice, inside.shape))]

        self.queue("stores").append(store)

    def wait_for_stores(self, pending: int) -> None:
        stores = self.queue("stores")
        while len(stores) > pending:
            stores.pop(0)()

    # wgmma

    def multiply(
        self, a: Any, b: _Memory, c: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> Any:
        kept = None if isinstance(a, _Memory) else np.array(a)

        def compute() -> _Registers:
            left = a.read_late() if kept is None else kept
            added = c.value if isinstance(c, _Product) else c
            with np.errstate(invalid="ignore"):  # infinity times zero
                return _registers(left @ b.read_late() + (added if use_acc else 0))

        product = _Product(compute)
        self.queue("products").append(product)
        return product if is_async else self.wait_for_products(0, (product,))

    def wait_for_products(self, pending: int, deps: Sequence[Any]) -> Any:
        products = self.queue("products")
        while len(products) > pending:
            product = products.pop(0)
            product.value = product.compute()
        found = tuple(
            d.value if isinstance(d, _Product) and d.value is not None else d for d in deps
        )
        if pending == 0 and any(isinstance(each, _Product) for each in found):
            raise ProtocolError("a product is read before it is waited for")
        return found[0] if len(found) == 1 else found

    def fence(self) -> None:
        for unfenced in self.unfenced:
            unfenced.discard(threading.get_ident())

    def allocate(self, kind: Any, shape: Sequence[int], layout: Any) -> Any:
        if layout == "barrier":
            return _Barriers(shape[0])
        unfenced = [set[int]() for _ in range(shape[0])]
        self.unfenced += unfenced
        empty = (
            np.full(shape, -1, np.int32) if kind == "int32" else np.full(shape, np.nan, np.float32)
        )
        return _Memory(empty, unfenced, kind)

    # Partitions

    def specialize(self, parts: Sequence[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
        faults: list[BaseException] = []

        def run(late: bool, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
            self.queue("is late").extend([True] * late)
            try:
                function(*arguments)
                if self.queue("products") or self.queue("stores"):
                    raise ProtocolError("a partition ends before a product or a store has")
            except BaseException as fault:
                faults.append(fault)
            with self.changed:
                self.alive -= 1
                self.dead = self.dead or bool(faults)
                self._wake()
                self.idle.notify_all()

        threads = [
            threading.Thread(target=run, args=(self.number % len(parts) == i, *part))
            for i, part in enumerate(parts)
        ]
        self.alive = len(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]


def _language(program: _Program) -> dict[str, Any]:
    """The names that a kernel finds: `gl`, and the Hopper module's names."""

    def elementwise(function: Callable[..., Any]) -> Callable[..., Any]:
        return np.errstate(over="ignore")(lambda *given: _registers(function(*given)))

    def minimum(a: Any, b: Any, propagate_nan: Any = None) -> Any:
        return elementwise(np.fmin if propagate_nan is None else np.minimum)(a, b)

    def load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
        if np.ndim(pointer.at) == 0:
            return pointer.values[pointer.at].item() if mask else other
        inside = np.broadcast_to(mask, np.shape(pointer.at))
        return _registers(np.where(inside, pointer.values[np.where(inside, pointer.at, 0)], other))

    def store(pointer: Pointer, values: Any, mask: Any = True) -> None:
        inside = np.broadcast_to(mask, np.shape(pointer.at))
        pointer.values[pointer.at[inside]] = np.broadcast_to(values, inside.shape)[inside]

    def init(barrier: Any, count: int) -> None:
        _one(barrier).count = _one(barrier).left = count

    def nothing(*_: Any, **__: Any) -> None:
        return None

    gl = types.SimpleNamespace(
        constexpr=object,
        bfloat16="bfloat16",
        float16="float16",
        float32="float32",
        int32="int32",
        int64="int64",
        allocate_shared_memory=program.allocate,
        static_range=range,
        program_id=lambda axis: program.number,
        num_programs=lambda axis: program.programs,
        num_warps=lambda: 4,
        cdiv=lambda a, b: -(-a // b),
        to_tensor=lambda value: value,
        minimum=minimum,
        abs=elementwise(np.abs),
        load=load,
        store=store,
        warp_specialize=program.specialize,
        zeros=lambda shape, kind, *_: _registers(np.zeros(shape, kind)),
        full=lambda shape, value, *_: _registers(np.full(shape, value)),
        arange=lambda first, last, layout: np.arange(first, last),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        max=lambda x, axis: _registers(np.max(x, axis)),
        sum=lambda x, axis: _registers(np.sum(x, axis)),
        maximum=elementwise(np.maximum),
        where=elementwise(np.where),
        exp2=elementwise(np.exp2),
        sqrt_rn=elementwise(np.sqrt),
        log2=elementwise(np.log2),
        NVMMADistributedLayout=nothing,
        NVMMASharedLayout=nothing,
        BlockedLayout=nothing,
        DotOperandLayout=nothing,
        SliceLayout=nothing,
        SwizzledSharedLayout=nothing,
        DistributedLinearLayout=nothing,
    )
    mbarrier = types.SimpleNamespace(
        MBarrierLayout=lambda: "barrier",
        init=init,
        wait=program.wait,
        expect=lambda barrier, moved: program.take(barrier, 1, moved),
        arrive=lambda barrier, count=1: program.take(barrier, count, 0),
    )
    return {
        "gl": gl,
        "tl": gl,
        "mbarrier": mbarrier,
        "copy_in": program.copy_in,
        "copy_out": program.copy_out,
        "wait_for_stores": program.wait_for_stores,
        "round_in_pairs": lambda value: value.to("bfloat16"),
        "reinterpret": lambda memory, dtype, shape, layout: memory.reinterpret(shape),
        "warpgroup_mma": program.multiply,
        "warpgroup_mma_wait": lambda num_outstanding=0, deps=(): program.wait_for_products(
            num_outstanding, deps
        ),
        "fence_async_shared": program.fence,
    }


def _imitate(names: dict[str, Any], language: dict[str, Any], known: dict[int, Any]) -> Any:
    """A module's names with the language's replaced, in its own kernels and those they call."""
    if id(names) not in known:
        known[id(names)] = found = names | language
        for name, value in names.items():
            if isinstance(value, constexpr):
                found[name] = value.value
            elif hasattr(value, "fn") and name not in language:
                code, others = value.fn.__code__, value.fn.__globals__
                scope = _imitate(others, language, known)
                found[name] = types.FunctionType(code, scope, name, value.fn.__defaults__)
    return known[id(names)]


def run(module: types.ModuleType, name: str, programs: int, *arguments: Any) -> None:
    """Run a kernel of a module that has the usual names of Gluon, program by program."""
    for number in range(programs):
        _imitate(vars(module), _language(_Program(number, programs)), {})[name](*arguments)


def start(launch: Any, options: dict[str, Any]) -> None:
    """Start a launch of a Gluon kernel on tensors of the CPU, in place of launch.start."""
    function = launch.kernel.fn
    module = sys.modules[function.__module__]
    back: list[tuple[torch.Tensor, np.ndarray]] = []

    def imitate(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Pointer(torch.as_strided(value, (value.numel(),), (1,)).numpy())
        if hasattr(value, "block_shape"):
            view = torch.as_strided(value.base, value.shape, value.strides)
            values = view.float().numpy().copy()
            back.append((view, values))
            return Descriptor(values, value.block_shape, str(view.dtype).removeprefix("torch."))
        return value

    given = [imitate(value) for value in launch.args]
    names = launch.kernel.arg_names[len(given) :]
    run(module, function.__name__, launch.grid, *given, *(options[name] for name in names))
    for view, values in back:
        view.copy_(torch.from_numpy(values))


# --- Planted faults ---


def plant(source: str, fault: Sequence[Any], folder: Path, name: str = "planted") -> Any:
    """The module of a source with a fault: a text, what replaces it, and how often it stands."""
    before, after, count = (*fault, 1)[:3]
    assert source.count(before) == count, before
    path = folder / "planted.py"
    path.write_text(source.replace(before, after))
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_found(measure: Callable[[], float], allowed: float) -> bool:
    """Whether a fault breaks the protocol, or makes an error larger than is allowed."""
    try:
        return measure() > allowed
    except (ProtocolError, TypeError, AttributeError):
        return True
