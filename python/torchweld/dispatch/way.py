"""The short way of a call: one look-up on the raw arguments, then a function that is ready.

The first call of its kind takes the whole path: arguments are checked and prepared, a backend is
chosen, autocast and autograd are asked. All of that is the same for a later call with tensors that
differ only in their numbers. So what the call came to is kept: the function that ran, and where its
arguments came from. Only what can be told for sure is kept: each prepared argument is a raw one, a
constant, or the seed of dropout, and the result is what that function returned.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from torchweld.dispatch import choice, seeds
from torchweld.dispatch.alike import (
    INCOMPARABLE,
    IsLike,
    copy_constant,
    is_constant,
    is_ordinary,
    make_comparison,
)
from torchweld.dispatch.kernels import Casting, Kernel
from torchweld.dispatch.recorder import RECORDER, Note
from torchweld.registry import OPS, Composite

P = ParamSpec("P")
R = TypeVar("R")
# By the selected backends and the elements of the first tensor.
_Ways = dict[Any, dict[int, tuple[tuple[IsLike, Callable[..., Any]], ...]]]
# Limits: sizes kept per op, and calls kept per size.
_SIZES, _ALIKE = 1024, 4
_every: list[_Ways] = []


def forget() -> None:
    """Forget all ways. Tests that replace parts of the path call this."""
    for ways in _every:
        ways.clear()


def short(
    *, small: bool = False, constant: type | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a public function the short way; its first argument is a tensor.

    `small`: the function has the arguments of the op with its name, and the op's reference is a
    single torch op. Small CPU inputs fall back to it without a look-up, which would take as long.

    The function may do anything but depend on numbers in its tensors, or on anything of torch that
    `make_comparison` does not compare. An argument of class `constant` is compared by ==, and the
    tensors in its `lists` belong to it.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        ways: _Ways = {}
        _every.append(ways)
        declared, passed, defaults = [], [], {}
        by_name = inspect.Parameter.KEYWORD_ONLY
        for parameter in parameters:
            name = parameter.name
            if parameter.kind is by_name and "*" not in declared:
                declared.append("*")
            has_default = parameter.default is not inspect.Parameter.empty
            declared.append(f"{name}=_defaults['{name}']" if has_default else name)
            passed.append(f"{name}={name}" if parameter.kind is by_name else name)
            defaults[name] = parameter.default
        names = [parameter.name for parameter in parameters]
        source = _SOURCE.format(
            name=function.__name__,
            declared=", ".join(declared),
            passed=", ".join(passed),
            given=", ".join(names),
            first=names[0],
            small=_SMALL.format(first=names[0], given=", ".join(names)) if small else "",
        )
        scope: dict[str, Any] = {
            "_function": function,
            "_defaults": defaults,
            "_ways": ways,
            "_constant": constant,
            "_seed_at": names.index("seed") if "seed" in names else None,
            "_choice": choice,
            "_numel": torch.Tensor.numel,
            "_compiling": is_dynamo_compiling,
            "_compiler": torch.compiler,
            "_INCOMPARABLE": INCOMPARABLE,
            "_find": _find,
            "_ops": OPS,
            "_name": function.__name__,
        }
        exec(compile(source, f"<the short way of {function.__name__}>", "exec"), scope)
        made: Any = scope[function.__name__]
        return functools.update_wrapper(made, function)  # type: ignore[no-any-return]

    return decorate


_SOURCE = """
def {name}({declared}):
    if _compiling() or _compiler._is_compiling_flag:
        return _function({passed})
    try:{small}
        for _is_like, _run in _ways[_choice.forced][_numel({first})]:
            if _is_like({given}):
                break
        else:
            _run = None
    except _INCOMPARABLE:
        _run = None
    if _run is None:
        return _find(_whole, _ways, ({given},), _seed_at, _constant)
    return _run({given})

def _whole({given}):
    return _function({passed})
"""


_SMALL = """
        _op = _ops[_name]
        if (
            _numel({first}) < _op.small
            and _choice.forced is None
            and {first}.is_cpu
            and {first}.dtype in _op.dtypes_of_eager
            and not {first}.is_nested
        ):
            return _op.reference({given})"""


def _find(
    function: Callable[..., Any],
    ways: _Ways,
    given: Sequence[Any],
    seed_at: int | None,
    constant: type | None,
) -> Any:
    """Take the whole path, and keep what it came to."""
    previous = RECORDER.notes, RECORDER.is_final
    notes: list[Note] = []
    RECORDER.notes, RECORDER.is_final = notes, True
    try:
        result = function(*given)
        is_final = RECORDER.is_final
    finally:
        RECORDER.notes, RECORDER.is_final = previous
    if not (is_final and len(notes) == 1 and _can_keep()):
        return result
    x = given[0]
    # What is no op's decides by alignment itself, as losses do: their targets may be a slice.
    aligned = notes[0].op is not None and choice.is_on_gpu(x)
    is_like = make_comparison(given, aligned=aligned, constant=constant)
    seed = None if seed_at is None else given[seed_at]
    run = is_like and _make_run(notes[0], given, result, seed, constant)
    if is_like and run:
        sizes = ways.setdefault(choice.forced, {})
        if len(sizes) >= _SIZES:
            sizes.clear()
        size = x.numel()
        sizes[size] = ((is_like, run), *sizes.get(size, ()))[:_ALIKE]
    return result


def _can_keep() -> bool:
    return (
        is_ordinary()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._get_tracing_state()
        and not torch.compiler.is_compiling()
        and forward_ad._current_level < 0
    )


def _make_run(
    note: Note, given: Sequence[Any], result: Any, seed: Any, constant: type | None
) -> Callable[..., Any] | None:
    """A function of the raw arguments that does what the noted call did; None without one."""
    if isinstance(note.function, (Kernel, Casting)):
        function, first, taken_at, places = note.function.make_ready(note.inputs)
    else:
        function, first, places = _plan(note), [], _list_places(note.result)
        taken_at = range(len(note.inputs))
    returned = _write_result(result, note.result, places)
    # A tensor that the op does not take may have decided an argument by its numbers.
    taken = {id(value) for value in note.inputs}
    if returned is None or any(is_tensor(value) and id(value) not in taken for value in given):
        return None
    objects: list[Any] = [value for value in given if type(value) is constant]
    owned = [t for value in objects for t in value.lists or ()]
    constants, arguments = [*first], [f"c{at}" for at in range(len(first))]
    drawn_at = note.op and note.op.seed_at
    for at, value in enumerate(note.inputs):
        if at not in taken_at:  # a part of `first`
            if not is_constant(value):
                return None
        elif is_tensor(value) and (number := _find_same(value, given)) is not None:
            arguments.append(f"a{number}")
            if isinstance(note.function, Casting) and note.function.changes(value):
                arguments[-1] += f".to(c{len(constants)})"
                constants.append(note.function.dtype)
        elif is_tensor(value) and at == drawn_at and seed is None:
            on_cpu = "empty(1, dtype=int64).random_()"
            arguments.append(on_cpu if note.inputs[0].is_cpu else "draw(a0)")
        elif is_constant(value) or _find_same(value, owned) is not None:
            arguments.append(f"c{len(constants)}")
            constants.append(copy_constant(value))
        else:
            return None
    make = _write_run(len(given), ", ".join(arguments), returned, len(constants))
    return make(function, *constants)


def _plan(note: Note) -> Callable[..., Any]:
    """What serves calls like the noted one: a composite may have decided all of it."""
    function = note.function
    if not (isinstance(note.op, Composite) and isinstance(function, functools.partial)):
        return function
    return note.op.plan(*function.args, *note.inputs) or function


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _find_same(value: Any, among: Sequence[Any]) -> int | None:
    return next((at for at, one in enumerate(among) if one is value), None)


def _list_places(result: Any) -> list[str]:
    """Where each of a function's results is in `r`, all that it returns."""
    return [f"r[{at}]" for at in range(len(result))] if isinstance(result, tuple) else ["r"]


def _write_result(result: Any, made: Any, places: Sequence[str]) -> str | None:
    """The code of the public result, made of what the noted call returned; None without one."""
    each = made if isinstance(made, tuple) else (made,)
    wanted = result if isinstance(result, tuple) else (result,)
    found = [_find_same(value, each) for value in wanted]
    if None in found:
        return None
    items = [places[at] for at in found if at is not None]
    return f"({', '.join(items)},)" if isinstance(result, tuple) else items[0]


@functools.cache
def _write_run(given: int, arguments: str, returned: str, constants: int) -> Callable[..., Any]:
    """Make a function that makes the ready functions of such calls."""
    kept = "".join(f", c{at}" for at in range(constants))
    source = (
        f"def make(function{kept}):\n"
        f"    def run({', '.join(f'a{at}' for at in range(given))}):\n"
        f"        r = function({arguments})\n"
        f"        return {returned}\n"
        "    return run\n"
    )
    scope: dict[str, Any] = {"empty": torch.empty, "int64": torch.int64, "draw": seeds.draw_again}
    exec(compile(source, "<a ready function>", "exec"), scope)
    made: Callable[..., Any] = scope["make"]
    return made
