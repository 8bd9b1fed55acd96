"""The short way of a call: one look-up on the raw arguments, then a function that is ready.

The first call of its kind takes the whole path: arguments are checked and prepared, a backend is
chosen, autocast and autograd are asked. All of that is the same for a later call with tensors that
differ only in their numbers, and often for one with another number of rows. So the first call
caches which function ran, and where each argument came from. Only what can be told for sure is
kept: each prepared argument is a raw one, a constant, made of raw ones by a function that the call
names, or the seed of dropout; each result is what that function returned, or a raw argument. No
tensor or other object of a call is kept.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from torchweld import state
from torchweld.dispatch import choice, seeds
from torchweld.dispatch.kernels import Casting, Kernel
from torchweld.dispatch.warm.generate import compile_function
from torchweld.dispatch.warm.guards import (
    INCOMPARABLE,
    PLAIN,
    IsLike,
    copy_constant,
    is_constant,
    make_comparison,
)
from torchweld.dispatch.warm.recorder import RECORDER, Note
from torchweld.dispatch.warm.sizes import Extents, find_varying, measure
from torchweld.registry import OPS, Composite

P = ParamSpec("P")
R = TypeVar("R")
# Limits: sizes kept per op, calls kept per size, calls that others with new sizes are compared
# with, and calls from which is learnt what varies.
_SIZES, _ALIKE, _FORMS, _CALLS = 1024, 4, 16, 8


class _Way(NamedTuple):
    """A cached call: which calls are like it, and the function that serves them."""

    is_like: IsLike
    run: Callable[..., Any]


class _Form(NamedTuple):
    """A cached call, with what later calls with other sizes are compared by."""

    way: _Way
    recipe: Any  # equal for calls that differ only in sizes
    calls: Sequence[Extents]  # two or more where sizes may vary


@dataclass
class _Cache:
    """The calls of a public function."""

    shaped: type | None
    sources: Mapping[int, Collection[int]]
    seed_at: int | None
    # By the selected backends and the elements of the first tensor; at -1 are the last ones whose
    # sizes may vary.
    ways: dict[Any, dict[int, tuple[_Way, ...]]] = field(default_factory=dict)
    # By the selected backends, and what does not vary of the first tensor's sizes.
    forms: dict[Any, tuple[_Form, ...]] = field(default_factory=dict)

    def key_of(self, x: torch.Tensor) -> tuple[Any, ...]:
        """The key of the forms of calls whose first tensor is like x."""
        shape, rank = x.shape, x.ndim
        fixed = [shape[dim] for dim in self.sources.get(0, ()) if -rank <= dim < rank]
        return choice.forced, rank, *fixed

    def look(self, given: Sequence[Any]) -> Callable[..., Any] | None:
        """What serves a call whose sizes are new, if one with other sizes was like it."""
        x = given[0]
        if type(x) not in PLAIN:
            return None
        try:
            for form in self.forms.get(self.key_of(x), ()):
                if len(form.calls) > 1 and form.way.is_like(*given):
                    self.keep(-1, form.way)
                    return form.way.run
        except INCOMPARABLE:
            pass
        return None

    def keep(self, size: int, way: _Way) -> None:
        """Keep what serves calls whose first tensor has so many elements; -1: any number."""
        sizes = self.ways.setdefault(choice.forced, {-1: ()})
        if len(sizes) > _SIZES:
            sizes.clear()
            sizes[-1] = ()
        others = [one for one in sizes.get(size, ()) if one is not way]
        sizes[size] = (way, *others)[:_ALIKE]

    def clear(self) -> None:
        """Forget all calls."""
        self.ways.clear()
        self.forms.clear()


_caches: dict[Callable[..., Any], _Cache] = {}  # by public function


def list_generated(function: Callable[..., Any], given: Sequence[Any]) -> list[Any]:
    """The functions generated for a public function and for a cached call like this one.

    They are the look-up, the comparison, what serves, and the node in autograd's graph. Without a
    call like it there is only the first.
    """
    kept = _caches[function].ways.get(choice.forced, {-1: ()})
    for way in (*kept.get(given[0].numel(), ()), *kept[-1]):
        with suppress(*INCOMPARABLE):
            if way.is_like(*given):
                served = [cell.cell_contents for cell in way.run.__closure__ or ()]
                nodes = [getattr(each, "__self__", None) for each in served]
                forwards = [getattr(node, "forward", None) for node in nodes]
                return [function, *way, *served, *forwards]
    return [function]


def forget() -> None:
    """Forget all ways. Tests that replace parts of the path call this."""
    for cache in _caches.values():
        cache.clear()


def short(
    *,
    small: bool = False,
    shaped: type | None = None,
    fixed: Mapping[str, Collection[int]] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a public function the short way; its first argument is a tensor.

    The function may do anything but depend on numbers in its tensors, or on anything of torch that
    `make_comparison` does not compare.

    Args:
        small: the function has the arguments of the op with its name, and the op's reference is a
            single torch op. Small CPU inputs fall back to it without a look-up, which would take as
            long.
        shaped: the class of an argument that decides only by its attribute `form`.
        fixed: by argument, the dimensions with a part in decisions; its other sizes decide nothing,
            but for what a Note says, nor do equal sizes of other tensors. None: the last one of the
            first argument, which is the width of its rows.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
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
        own = {names[0]: (-1,)} if fixed is None else fixed
        sources = {names.index(name): dims for name, dims in own.items()}
        cache = _Cache(shaped, sources, names.index("seed") if "seed" in names else None)
        given = ", ".join(names)
        serve = _SERVE.format(
            given=given,
            first=names[0],
            small=_SMALL.format(first=names[0], given=given) if small else "",
        )
        source = _SOURCE.format(
            name=function.__name__,
            declared=", ".join(declared),
            passed=", ".join(passed),
            given=given,
            serve=serve,
        )
        scope: dict[str, Any] = {
            "_function": function,
            "_defaults": defaults,
            "_cache": cache,
            "_ways": cache.ways,
            "_choice": choice,
            "_numel": torch.Tensor.numel,
            # This is state.is_compiling() with one Python call less.
            "_compiling": state.is_dynamo_compiling,
            "_compiler": torch.compiler,
            "_profiler": torch.autograd.profiler,
            "_INCOMPARABLE": INCOMPARABLE,
            "_find": _find,
            "_ops": OPS,
            "_name": function.__name__,
        }
        made: Any = compile_function(function.__name__, source, scope)
        _caches[made] = cache
        return functools.update_wrapper(made, function)  # type: ignore[no-any-return]

    return decorate


_SOURCE = """
def {name}({declared}):
    if _compiling() or _compiler._is_compiling_flag:
        return _function({passed})
    if _profiler._is_profiler_enabled:
        with _profiler.record_function("torchweld::{name}"):
            return _serve({given})
{serve}
def _serve({given}):
{serve}
def _whole({given}):
    return _function({passed})
"""


# A call, once for each way into it: a call of one by the other would take as long as a look-up.
_SERVE = """\
    try:{small}
        _kept, _size = _ways[_choice.forced], _numel({first})
        for _is_like, _run in _kept.get(_size, ()):
            if _is_like({given}):
                break
        else:
            _run = None
            for _way in _kept[-1]:
                if _way[0]({given}):
                    _cache.keep(_size, _way)
                    _run = _way[1]
                    break
    except _INCOMPARABLE:
        _run = None
    if _run is None:
        _run = _cache.look(({given},))
        if _run is None:
            return _find(_whole, _cache, ({given},))
    return _run({given})
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


def _find(function: Callable[..., Any], cache: _Cache, given: Sequence[Any]) -> Any:
    """Take the whole path, and keep what it came to."""
    previous = RECORDER.notes, RECORDER.is_final
    notes: list[Note] = []
    RECORDER.notes, RECORDER.is_final = notes, True
    try:
        result = function(*given)
        is_final = RECORDER.is_final
    finally:
        RECORDER.notes, RECORDER.is_final = previous
    if is_final and len(notes) == 1 and _can_keep():
        _keep(cache, notes[0], given, result)
    return result


def _keep(cache: _Cache, note: Note, given: Sequence[Any], result: Any) -> None:
    """Keep a noted call, for calls with other sizes too if one like it had others."""
    x = given[0]
    # What is no op's decides by alignment itself, as losses do: their targets may be a slice.
    aligned = note.op is not None and choice.is_on_gpu(x)
    compare = functools.partial(
        make_comparison, given, aligned=aligned, shaped=cache.shaped, seed_at=cache.seed_at
    )
    is_like = compare()
    made = is_like and _make_run(note, given, result, cache.seed_at)
    if not (is_like and made):
        return
    run, recipe = made
    recipe = (_describe(given, cache.shaped, cache.seed_at), recipe)
    way = _Way(is_like, run)
    calls: list[Extents] = [measure(given)]
    key = cache.key_of(x)
    forms = list(cache.forms.get(key, ())) if _may_vary(note, x) else []
    for at, form in enumerate(forms):
        if len(form.calls) >= _CALLS or not _is_equal(form.recipe, recipe):
            continue
        varying = find_varying([*form.calls, *calls], cache.sources)
        if varying and (is_like := compare(varying=varying, conditions=_write_span(note))):
            way, calls = _Way(is_like, run), [*form.calls, *calls]
            del forms[at]
            break
    cache.keep(-1 if len(calls) > 1 else x.numel(), way)
    if _may_vary(note, x):
        cache.forms[key] = (_Form(way, recipe, calls), *forms)[:_FORMS]


def _may_vary(note: Note, x: torch.Tensor) -> bool:
    """Whether calls with other sizes may be served alike.

    On a GPU one answer holds for a kernel at all numbers of rows; GEMMs have tiles for each.
    """
    return not choice.is_on_gpu(x) or isinstance(note.function, (Kernel, Casting))


def _write_span(note: Note) -> Sequence[str]:
    """The code that asks whether a note holds for a number of elements."""
    most = f"a0.numel() < {note.below}" if note.below < float("inf") else ""
    return [*filter(None, (f"a0.numel() >= {note.least}" if note.least else "", most))]


def _describe(given: Sequence[Any], shaped: type | None, seed_at: int | None) -> Any:
    """All of a call's arguments that is compared, but for the sizes of tensors."""
    first = {id(value): at for at, value in reversed([*enumerate(given)])}
    each: list[Any] = [torch.is_grad_enabled()]
    for at, value in enumerate(given):
        if isinstance(value, torch.Tensor):
            each.append((first[id(value)], type(value), value.dtype, value.device))
            each.append((value.requires_grad, value.is_inference()))
        elif type(value) is shaped:
            each.append(value.form)  # type: ignore[attr-defined]
        elif at == seed_at and type(value) is int:
            each.append(int)
        else:
            each.append((type(value), copy_constant(value)))
    kind = given[0].device.type
    is_cast = torch.is_autocast_enabled(kind)
    return (*each, torch.get_autocast_dtype(kind) if is_cast else None)


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two recipes are equal; a list in them may be a tuple's."""
    try:
        return bool(one == other)
    except INCOMPARABLE:
        return False


def _can_keep() -> bool:
    return (
        not state.has_modes()
        and not state.is_transforming()
        and not state.is_tracing()
        and not state.is_compiling()
        and not state.has_forward_ad()
    )


def _make_run(
    note: Note, given: Sequence[Any], result: Any, seed_at: int | None
) -> tuple[Callable[..., Any], Any] | None:
    """A function of the raw arguments that does what the noted call did, and its recipe."""
    if isinstance(note.function, (Kernel, Casting)):
        function, first, taken_at, places = note.function.make_ready(note.inputs)
    else:
        function, first, places = _plan(note), [], _list_places(note.result)
        taken_at = range(len(note.inputs))
    returned = _write_result(result, note.result, places, given)
    # A tensor that the op does not take may have decided an argument by its numbers.
    taken = {id(value) for value in (*note.inputs, *note.given)}
    unknown = [at for at, value in enumerate(given) if is_tensor(value) and id(value) not in taken]
    if returned is None or unknown not in ([], [seed_at]):
        return None
    arranged, arranging = 0, ""
    if note.arrange is not None:
        raw = [_find_same(value, given) for value in note.given]
        if None in raw:
            return None
        arranged = len(note.inputs) - note.kept
        arranging = f"t = arrange({', '.join(f'a{at}' for at in raw)})"
    constants, arguments = [*first], [f"c{at}" for at in range(len(first))]
    drawn_at = note.op and note.op.seed_at
    seed = None if seed_at is None else given[seed_at]
    for at, value in enumerate(note.inputs):
        number = _find_same(value, given) if is_tensor(value) else None
        if at not in taken_at:  # a part of `first`
            if not is_constant(value):
                return None
        elif at < arranged or number is not None:
            arguments.append(f"t[{at}]" if at < arranged else f"a{number}")
            if isinstance(note.function, Casting) and note.function.changes(value):
                arguments[-1] += f".to(c{len(constants)})"
                constants.append(note.function.dtype)
        elif is_tensor(value) and at == drawn_at:
            on_cpu = "empty(1, dtype=int64).random_()"
            drawn = on_cpu if note.inputs[0].is_cpu else "draw(a0)"
            arguments.append(
                drawn if seed is None else f"as_seed({note.op.name!r}, a{seed_at}, a0.device)"
            )
        elif is_constant(value):
            arguments.append(f"c{len(constants)}")
            constants.append(copy_constant(value))
        else:
            return None
    code = (arranging, ", ".join(arguments), returned)
    make = _write_run(len(given), *code, len(constants))
    recipe = (_identify(function), _identify(note.arrange), code, tuple(constants), note[-2:])
    return make(function, note.arrange, type(result), *constants), recipe


def _identify(function: Any) -> Any:
    """What two functions are compared by: partial ones by what they are made of."""
    if not isinstance(function, functools.partial):
        return function
    return _identify(function.func), *map(_identify, function.args), *function.keywords.items()


def _plan(note: Note) -> Callable[..., Any]:
    """The function to cache for this call; a composite may supply its own."""
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


def _write_result(
    result: Any, made: Any, places: Sequence[str], given: Sequence[Any]
) -> str | None:
    """The code of the public result; None unless it is what the noted call returned, or given."""
    each = made if isinstance(made, tuple) else (made,)
    items = []
    for value in result if isinstance(result, tuple) else (result,):
        if (at := _find_same(value, each)) is not None:
            items.append(places[at])
        elif is_tensor(value) and (at := _find_same(value, given)) is not None:
            items.append(f"a{at}")
        else:
            return None
    if not isinstance(result, tuple):
        return items[0]
    return f"kind({', '.join(items)})" if hasattr(result, "_fields") else f"({', '.join(items)},)"


@functools.cache
def _write_run(
    given: int, arranging: str, arguments: str, returned: str, constants: int
) -> Callable[..., Any]:
    """Make a function that makes the ready functions of such calls."""
    kept = "".join(f", c{at}" for at in range(constants))
    lines = [
        f"def make(function, arrange, kind{kept}):",
        f"    def run({', '.join(f'a{at}' for at in range(given))}):",
        f"        {arranging}" if arranging else "",
        f"        r = function({arguments})",
        f"        return {returned}",
        "    return run",
    ]
    scope: dict[str, Any] = {
        "empty": torch.empty,
        "int64": torch.int64,
        "draw": seeds.draw_again,
        "as_seed": seeds.as_seed,
    }
    return compile_function("make", "\n".join(filter(None, lines)), scope, "a ready function")
