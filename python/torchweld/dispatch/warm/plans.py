"""Records the allocations and launches of a Triton call and replays them for later, alike calls.

With few rows a call's Python takes longer than its kernels: on an EPYC 80 us for a residual with
dropout and norm, without Triton's own time, which looks up the compiled kernel by 40 arguments at
each launch. All decisions are the same for calls whose tensors differ only in their addresses. So a
call is recorded: the tensors that it allocates, and the compiled kernels that it launches with
their arguments. Later calls only allocate and launch. Only calls that have found their short way
(cache.py) are recorded, so not the first of a kind: its sizes may never come again.

A call is recorded only if its function is marked (triton_kernels/launch.py says what that
promises), and it does nothing but allocate, view and launch. Other calls run as they are. Plans
build tensor descriptors directly, skipping Triton's checks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchweld.dispatch.warm.generate import compile_function
from torchweld.dispatch.warm.guards import Guard, guards, has_lazy, make_guard
from torchweld.isolate import leave_dispatch_modes

_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_VIEWS = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.view.default,
}


# How compiled graphs of torch allocate, in half the time.
_MAKERS: dict[str, Callable[..., torch.Tensor]] = {
    kind: getattr(guards, f"_empty_strided_{kind}")
    for kind in ("cpu", "cuda")
    if hasattr(guards, f"_empty_strided_{kind}")
}
# Limits: sizes with plans, and plans of a size. Gradients may have other strides, or be absent.
_SIZES, _ALIKE = 1024, 8
# Threads record in turn: a mode that another thread's ends before leaves torch's flag of modes set.
# A thread that does not get its turn calls as ever, since a recorded call may wait for a trial.
_recording = threading.RLock()


class _Step(NamedTuple):
    """A launch: what starts it, its arguments, and (argument, tensor) pairs to fill in.

    `described` are the pairs whose argument is a descriptor of the tensor.
    """

    launch: Callable[..., Any]
    by_address: bool  # how it takes tensors
    arguments: list[Any]
    places: list[tuple[int, int]]
    described: list[tuple[int, int]]
    seed_at: int | None  # the argument that is the seed's number


class Plan(NamedTuple):
    """A recorded call."""

    device: int  # -1: the CPU, for Triton's interpreter
    steps: list[_Step]
    seed: int | None  # the argument whose number launches take
    function: Callable[..., Any]

    def run(self, inputs: Sequence[Any]) -> Any:
        """Allocate, launch, and return the results."""
        return self.function(*inputs)


def _write(
    inputs: int,
    made: Sequence[torch.Tensor],
    steps: Sequence[_Step],
    results: Sequence[str],
    seed: int | None,
    launching: Any,
) -> Callable[..., Any]:
    """Make a plan's function. Tensors are numbered: first the call's arguments, then those made."""
    scope: dict[str, Any] = {"describe": _describe, "check": launching.check_allocated}
    lines = [f"def run({', '.join(f't{number}' for number in range(inputs))}):"]
    read = {number for step in steps for _, number in (*step.places, *step.described)}
    for number in sorted(number for number in read if number < inputs):
        lines.append(f"if t{number}.data_ptr() < {launching.FAR}: check(t{number})")
    for number, tensor in enumerate(made, inputs):
        scope[f"make{number}"] = _allocation_of(tensor)
        lines.append(f"t{number} = make{number}()")
    if seed is not None:
        lines.append(f"seed = t{seed}.item()")
    for at, step in enumerate(steps):
        scope[f"launch{at}"] = step.launch
        scope |= {f"c{at}_{place}": value for place, value in enumerate(step.arguments)}
        given = [f"c{at}_{place}" for place in range(len(step.arguments))]
        for place, number in step.places:
            given[place] = f"t{number}.data_ptr()" if step.by_address else f"t{number}"
        for place, number in step.described:
            given[place] = f"describe(t{number}, {given[place]})"
        if step.seed_at is not None:
            given[step.seed_at] = "seed"
        lines.append(f"launch{at}({', '.join(given)})")
    lines.append(f"return {', '.join(results)}".strip())
    return compile_function("run", "\n    ".join(lines), scope, "a plan")


class _Recorder(TorchDispatchMode):
    """Sees what a call allocates, and whether it does anything that a plan cannot repeat."""

    traces = False

    def __init__(self, launching: Any) -> None:
        super().__init__()
        self._launching = launching
        self._start, self._repeat = launching.start, launching.repeat
        self.made: list[torch.Tensor] = []
        self.launches: list[tuple[Any, dict[str, Any], Any]] = []
        self.fits = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        reads = func is torch.ops.aten._local_scalar_dense.default
        reads_seed = reads and _read_seed(args[0]) is not None
        if func not in _ALLOCATIONS and func not in _VIEWS and not reads_seed:
            with self:  # inference mode does not take composite ops such as reshape apart
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            self.fits = False
        result = func(*args, **kwargs)
        if func in _ALLOCATIONS:
            self.made.append(result)
        return result

    def start(self, launch: Any, options: dict[str, Any]) -> None:
        """Start a kernel, unseen by this mode, and keep how."""
        with leave_dispatch_modes():  # the interpreter is written in torch
            compiled = self._start(launch, options)
        self.launches.append((launch, options, compiled))

    def make_plan(self, inputs: Sequence[Any], result: Any) -> Plan | None:
        """The plan of the recorded call; None if it cannot be repeated."""
        given = [x for x in inputs if isinstance(x, torch.Tensor)]
        begins = {(t.untyped_storage()._cdata, t.data_ptr()) for t in (*given, *self.made)}
        # A pointer belongs to one tensor for sure only if no two begin there.
        if not self.fits or len(begins) < len(given) + len(self.made):
            return None
        numbered = [*inputs, *self.made]
        results = list(result) if isinstance(result, tuple) else [] if result is None else [result]
        numbers: list[int] = []
        made = list(self.made)
        for x in results:
            number = _find(numbered, x)
            if number is None or number < len(inputs) or number in numbers:
                return None
            at = number - len(inputs)
            if _count_bytes(x) != _count_bytes(made[at]):
                return None
            made[at] = x  # may have another shape than it was allocated in
            numbers.append(number)
        by_place = {at: number for at, x in enumerate(inputs) if (number := _read_seed(x))}
        seed, value = next(iter(by_place.items()), (None, None))
        steps, device = [], given[0].get_device()
        for launched in self.launches:
            if (step := self._make_step(numbered, value, device, *launched)) is None:
                return None
            steps.append(step)
        names = [f"t{number}" for number in numbers]
        if isinstance(result, tuple):
            names = [*names, ""]
        function = _write(len(inputs), made, steps, names, seed, self._launching)
        return Plan(device, steps, seed, function)

    def _make_step(
        self,
        numbered: Sequence[Any],
        seed: int | None,
        device: int,
        launch: Any,
        options: dict[str, Any],
        compiled: Any,
    ) -> _Step | None:
        arguments = list(launch.args)
        places: list[tuple[int, int]] = []
        described: list[tuple[int, int]] = []
        seed_at = next((at for at, x in enumerate(arguments) if type(x) is int and x == seed), None)
        for at, value in enumerate(arguments):
            is_descriptor = hasattr(value, "block_shape")
            tensor = value.base if is_descriptor else value
            if not isinstance(tensor, torch.Tensor):
                continue
            if (number := _find(numbered, tensor)) is None:
                return None
            (described if is_descriptor else places).append((at, number))
            arguments[at] = _describe(torch.empty(0), value) if is_descriptor else None
        if compiled is None:  # the interpreter
            start = partial(_start_again, self._start, launch, options)
            return _Step(start, False, arguments, places, described, seed_at)
        rest = launch.kernel.arg_names[len(arguments) :]
        arguments += [options[name] for name in rest]
        start, by_address = self._repeat(compiled, launch.grid, device)
        return _Step(start, by_address, arguments, places, described, seed_at)


def _start_again(start: Any, launch: Any, options: dict[str, Any], *arguments: Any) -> None:
    start(launch._replace(args=arguments), options)


def _read_seed(x: Any) -> int | None:
    """The number of a seed that was drawn on the host, which has 63 bits; None for others."""
    if not (isinstance(x, torch.Tensor) and x.is_cpu and x.dtype is torch.int64 and x.numel() == 1):
        return None
    number = int(x.item())
    return number if number >> 62 else None


def _find(numbered: Sequence[Any], tensor: torch.Tensor) -> int | None:
    """The number of the tensor that begins where this one does; None if there is none.

    A part of a tensor may begin where another one in its memory does, and has other bytes.
    """
    owner = tensor.untyped_storage()._cdata
    sharing = [
        number
        for number, x in enumerate(numbered)
        if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata == owner
    ]
    for number in sharing:
        x = numbered[number]
        if x.data_ptr() == tensor.data_ptr() and x.dtype == tensor.dtype:
            is_whole = len(sharing) == 1 or _count_bytes(x) == _count_bytes(tensor)
            return number if is_whole else None
    return None


def _allocation_of(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Allocate a tensor like this one."""
    shape, stride, dtype, device = tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
    if device.type in _MAKERS:  # on the current device
        return partial(_MAKERS[device.type], shape, stride, dtype)
    return partial(torch.empty_strided, shape, stride, dtype=dtype, device=device)


def _count_bytes(tensor: torch.Tensor) -> int:
    """Count the bytes from the tensor's first element to its last."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _describe(tensor: torch.Tensor, like: Any) -> Any:
    """A descriptor like this one, which Triton has checked, of another tensor."""
    descriptor = object.__new__(type(like))
    descriptor.__dict__.update(like.__dict__, base=tensor)
    return descriptor


class Planned:
    """A Triton function that repeats what an earlier call did for one like it.

    `find` returns the function, which is imported at its first use; `overload` serves other calls.
    """

    def __init__(self, find: Callable[[], Callable[..., Any]], overload: Any) -> None:
        self._find, self._overload = find, overload
        # By the elements of the first tensor; no plan where a call cannot be repeated.
        self._plans: dict[int, tuple[tuple[Guard, Plan | None], ...]] = {}

    def __call__(self, *inputs: Any) -> Any:
        size = _count_elements(inputs)
        plans = self._plans.get(size, ())
        for matches, plan in plans:
            if matches(*inputs):
                if plan is not None and _is_current(plan.device):
                    return plan.run(inputs)
                break
        else:
            function = self._find()
            launching = getattr(function, "launching", None)
            is_fit = launching and not has_lazy(inputs)
            found = is_fit and make_guard(inputs, aligned=True)
            if found and len(plans) < _ALIKE and _recording.acquire(blocking=False):
                try:
                    plan, result = _record(function, launching, inputs)
                finally:
                    _recording.release()
                if len(self._plans) >= _SIZES:
                    self._plans.clear()
                self._plans[size] = (*self._plans.get(size, ()), (found, plan))
                return result
        return self._overload(*inputs)


def _count_elements(inputs: Sequence[Any]) -> int:
    x = inputs[0]  # a gradient that is absent is None
    return next(t for t in inputs if t is not None).numel() if x is None else x.numel()  # type: ignore[no-any-return]


def _record(
    function: Callable[..., Any], launching: Any, inputs: Sequence[Any]
) -> tuple[Plan | None, Any]:
    """Run the call; returns its plan, too. `launching` is the module triton_kernels/launch.py."""
    recorder = _Recorder(launching)
    launching.watch(recorder)
    try:
        with recorder:
            result = function(*inputs)
    finally:
        launching.watch(None)
    return recorder.make_plan(inputs, result), result


def _is_current(device: int) -> bool:
    """Whether Triton launches on this device; it has no other way to be told."""
    return device < 0 or torch._C._cuda_getDevice() == device
