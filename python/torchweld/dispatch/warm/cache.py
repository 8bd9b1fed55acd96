"""The short way of a call: one look-up on the raw arguments, then a function that is ready.

A public function decides: it checks and prepares its arguments, chooses a backend, asks autocast
and autograd, and returns a Decision (call.py), a function with its arguments. All of that is the
same for a later call with tensors that differ only in their numbers, and often for one with another
number of rows. So the first call keeps the function. Each of its arguments is a raw one of the same
name, a constant, made of raw ones by a function that the Decision has, or the seed of dropout; each
result is what that function returned, or a raw argument. No tensor or other object of a call is
kept.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from torchweld import state
from torchweld.dispatch import choice, proof, seeds
from torchweld.dispatch.autograd import Ready
from torchweld.dispatch.call import Decision
from torchweld.dispatch.kernels import Casting, Kernel
from torchweld.dispatch.warm.generate import compile_function
from torchweld.dispatch.warm.guards import (
    INCOMPARABLE,
    Guard,
    copy_constant,
    is_constant,
    make_guard,
)
from torchweld.dispatch.warm.plans import Planned, Repeated
from torchweld.dispatch.warm.sizes import Extents, find_varying, measure
from torchweld.registry import OPS, Op

P = ParamSpec("P")
R = TypeVar("R")
# Limits: sizes kept per op, calls kept per size, calls that others with new sizes are compared
# with, and calls from which is learnt what varies.
_SIZES, _ALIKE, _FORMS, _CALLS = 1024, 4, 16, 8


class _Way(NamedTuple):
    """A cached call: which calls are like it, and the function that serves them.

    `narrow` makes the way of calls that have the sizes of a call, which a plan may serve.
    """

    matches: Guard
    run: Callable[..., Any]
    narrow: Callable[[Sequence[Any]], _Way | None] | None = None


class _Form(NamedTuple):
    """A cached call, with what later calls with other sizes are compared by."""

    way: _Way
    recipe: Any  # equal for calls that differ only in sizes
    calls: Sequence[Extents]  # two or more where sizes may vary


@dataclass
class _Cache:
    """The calls of a public function."""

    places: Mapping[str, int]  # of its arguments, by name
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
        if type(x) not in state.PLAIN:
            return None
        try:
            for form in self.forms.get(self.key_of(x), ()):
                if len(form.calls) > 1 and form.way.matches(*given):
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

    def adopt(self, size: int, way: _Way, given: Sequence[Any]) -> Callable[..., Any]:
        """Keep a way of any sizes for calls of this one, whose plan hangs on it."""
        way = (way.narrow and way.narrow(given)) or way
        self.keep(size, way)
        return way.run

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
            if way.matches(*given):
                served = [cell.cell_contents for cell in way.run.__closure__ or ()]
                nodes = [getattr(each, "__self__", None) for each in served]
                forwards = [getattr(node, "forward", None) for node in nodes]
                plans = [each.forward for each in served if isinstance(each, Repeated)]
                return [function, *way[:2], *served, *forwards, *plans]
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
    `make_guard` does not compare.

    Args:
        small: the function has the arguments of the op with its name, and the op's reference is a
            single torch op. Small CPU inputs fall back to it without a look-up, which would take as
            long.
        shaped: the class of an argument that decides only by its attribute `form`.
        fixed: by argument, the dimensions with a part in decisions; its other sizes decide nothing,
            but for what a Decision says, nor do equal sizes of other tensors. None: the last one of
            the first argument, which is the width of its rows.
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
        places = {name: at for at, name in enumerate(names)}
        cache = _Cache(places, shaped, sources, names.index("seed") if "seed" in names else None)
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
            "_take": run_decision,
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
        return _take(_function({passed}))
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
        for _matches, _run, _ in _kept.get(_size, ()):
            if _matches({given}):
                break
        else:
            _run = None
            for _way in _kept[-1]:
                if _way[0]({given}):
                    _run = _cache.adopt(_size, _way, ({given},))
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


def run_decision(decided: Any) -> Any:
    """The results of a public function that decided, or computed them itself."""
    return decided.run() if type(decided) is Decision else decided


def _find(function: Callable[..., Any], cache: _Cache, given: Sequence[Any]) -> Any:
    """Take the whole path, and keep what it decided."""
    left_open = proof.left_open
    decision = function(*given)
    if type(decision) is not Decision:
        return decision
    is_final = proof.left_open == left_open
    result = decision.run()
    if is_final and not state.is_watched():
        _keep(cache, decision, given)
    return result


def _keep(cache: _Cache, decision: Decision, given: Sequence[Any]) -> None:
    """Keep a decision, for calls with other sizes too if one like it had others."""
    x = given[0]
    function = decision.function
    kernel = function.kernel if isinstance(function, Casting) else function
    is_planned = isinstance(kernel, Kernel) and kernel.backend == "triton"
    # What is no op's decides by alignment itself, as losses do: their targets may be a slice.
    aligned = is_planned or (decision.op is not None and choice.is_on_gpu(x))
    compare = functools.partial(
        make_guard, aligned=aligned, shaped=cache.shaped, seed_at=cache.seed_at
    )
    matches = compare(given)
    made = matches and _make_run(decision, cache, given)
    if not (matches and made):
        return
    make_run, recipe = made
    recipe = (_describe(given, cache.shaped, cache.seed_at), recipe)
    way = _Way(matches, make_run(True))
    calls: list[Extents] = [measure(given)]
    key = cache.key_of(x)
    forms = list(cache.forms.get(key, ())) if _may_vary(decision, x) else []
    for at, form in enumerate(forms):
        if len(form.calls) >= _CALLS or not _is_equal(form.recipe, recipe):
            continue
        varying = find_varying([*form.calls, *calls], cache.sources)
        conditions = _write_span(decision)
        if varying and (matches := compare(given, varying=varying, conditions=conditions)):
            narrow = functools.partial(_narrow, compare, make_run) if is_planned else None
            way, calls = _Way(matches, make_run(False), narrow), [*form.calls, *calls]
            del forms[at]
            break
    cache.keep(-1 if len(calls) > 1 else x.numel(), way)
    if _may_vary(decision, x):
        cache.forms[key] = (_Form(way, recipe, calls), *forms)[:_FORMS]


def _narrow(
    compare: Callable[..., Guard | None],
    make_run: Callable[[bool], Callable[..., Any]],
    given: Sequence[Any],
) -> _Way | None:
    matches = compare(given)
    return _Way(matches, make_run(True)) if matches else None


def _may_vary(decision: Decision, x: torch.Tensor) -> bool:
    """Whether calls with other sizes may be served alike.

    On a GPU one answer holds for a kernel at all numbers of rows; GEMMs have tiles for each.
    """
    return not choice.is_on_gpu(x) or isinstance(decision.function, (Kernel, Casting))


def _write_span(decision: Decision) -> Sequence[str]:
    """The code that asks whether a decision holds for a number of elements."""
    most = f"a0.numel() < {decision.below}" if decision.below < math.inf else ""
    least = f"a0.numel() >= {decision.least}" if decision.least else ""
    return [*filter(None, (least, most))]


def _describe(given: Sequence[Any], shaped: type | None, seed_at: int | None) -> Any:
    """All of a call's arguments that is compared, but for the sizes of tensors."""
    first = {id(value): at for at, value in reversed([*enumerate(given)])}
    each: list[Any] = [torch.is_grad_enabled()]
    constants: list[Any] = []
    for at, value in enumerate(given):
        if isinstance(value, torch.Tensor):
            each.append((first[id(value)], type(value), value.dtype, value.device))
            each.append((value.requires_grad, value.is_inference()))
        elif type(value) is shaped:
            each.append(value.form)  # type: ignore[attr-defined]
        elif at == seed_at and type(value) is int:
            each.append(int)
        else:
            each.append(type(value))
            constants.append(value)
    kind = given[0].device.type
    is_cast = torch.is_autocast_enabled(kind)
    return *each, copy_constant(constants), torch.get_autocast_dtype(kind) if is_cast else None


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two recipes are equal; a list in them may be a tuple's."""
    try:
        return bool(one == other)
    except INCOMPARABLE:
        return False


def _make_run(
    decision: Decision, cache: _Cache, given: Sequence[Any]
) -> tuple[Callable[[bool], Callable[..., Any]], Any] | None:
    """What makes a function of the raw arguments that does what was decided, and its recipe.

    It is told whether calls of that function have the same sizes, so that plans may serve them.
    None if an input is neither a raw argument of its name, nor a constant, the seed of dropout, or
    made of raw arguments by `arrange`.
    """
    op, inputs, seed_at = decision.op, decision.inputs, cache.seed_at
    raw = {name: at for name, at in cache.places.items() if isinstance(given[at], torch.Tensor)}
    casting = decision.function if isinstance(decision.function, Casting) else None
    if isinstance(decision.function, (Kernel, Casting)):
        function, first, taken_at, places = decision.function.make_ready(inputs)
    else:
        function, first, taken_at = decision.function, [], range(len(inputs))
        results = op.public if op else ()
        places = [f"r[{at}]" for at in range(len(results))] if len(results) > 1 else ["r"]
    called = "function"
    constants, arguments = [*first], [f"c{at}" for at in range(len(first))]
    if isinstance(function, Planned):
        constants, called = [Ready(function, function)], "c0.forward"
    # Arguments that are compared by their form may be arranged as tensors of other sizes.
    is_alike = not any(type(value) is cache.shaped for value in given)
    is_planned = bool(constants) and is_alike and isinstance(constants[0].forward, Planned)
    kept = len(constants)
    taken: dict[str, int] = {}
    arranging, others = "", []  # others must be constants
    if decision.arrange is not None:
        for name, value in decision.given.items():
            if value is None and name not in cache.places:
                continue
            if given[cache.places[name]] is not value:
                return None
            taken[name] = cache.places[name]
        raw_ones = (f"a{taken[name]}" if name in taken else "None" for name in decision.given)
        arranging = f"t = arrange({', '.join(raw_ones)})"
    for at, (name, value) in enumerate(zip(decision.names, inputs, strict=True)):
        is_tensor, is_arranged = isinstance(value, torch.Tensor), at < decision.arranged
        is_raw = is_tensor and name in raw and given[raw[name]] is value
        if at not in taken_at:  # a part of `first`
            others.append(value)
        elif is_arranged or is_raw:
            if is_raw and not is_arranged:
                taken[name] = raw[name]
            arguments.append(f"t[{at}]" if is_arranged else f"a{raw[name]}")
            if casting is not None and casting.changes(value):
                arguments[-1] += f".to(c{len(constants)})"
                constants.append(casting.dtype)
        elif is_tensor and op is not None and at == op.seed_at:
            arguments.append(_write_seed(op, given, seed_at))
        else:
            arguments.append(f"c{len(constants)}")
            constants.append(value)
            others.append(value)
    if not is_constant(others):
        return None
    constants[kept:] = copy_constant(constants[kept:])
    # A tensor that the op does not take may have decided an argument by its numbers.
    if {*raw.values()} - {*taken.values(), seed_at}:
        return None
    served = f"{called}({', '.join(arguments)})"
    code = (arranging, served, _write_results(decision, places, taken))
    make = _write_run(len(given), *code, len(constants))
    make_exact = make
    if is_alike and (unchanged := _name_unchanged(decision, given)):  # nothing to arrange
        served = re.sub(r"\bt\[(\d+)\]", lambda found: unchanged[int(found[1])], served)
        make_exact = _write_run(len(given), "", served, code[2], len(constants))

    def make_run(is_exact: bool) -> Callable[..., Any]:
        if not is_exact:
            return make(function, decision.arrange, *constants)  # type: ignore[no-any-return]
        own = [Repeated(constants[0]), *constants[1:]] if is_planned else constants
        return make_exact(function, decision.arrange, *own)  # type: ignore[no-any-return]

    functions = _identify(function), _identify(decision.arrange)
    return make_run, (*functions, code, tuple(constants), decision[-2:])


def _name_unchanged(decision: Decision, given: Sequence[Any]) -> list[str]:
    """The names of arranged inputs; none if one of them is no raw argument, or there are none."""
    places = {id(value): at for at, value in enumerate(given) if isinstance(value, torch.Tensor)}
    arranged = decision.inputs[: decision.arranged]
    if not all(value is None or id(value) in places for value in arranged):
        return []
    return ["None" if value is None else f"a{places[id(value)]}" for value in arranged]


def _write_seed(op: Op, given: Sequence[Any], seed_at: int | None) -> str:
    """The code of a seed, which is given, or drawn for each call."""
    if seed_at is not None and given[seed_at] is not None:
        return f"as_seed({op.name!r}, a{seed_at}, a0.device)"
    return "empty(1, dtype=int64).random_()" if given[0].is_cpu else "draw(a0)"


def _write_results(decision: Decision, places: Sequence[str], taken: Mapping[str, int]) -> str:
    """The code of what the public function returns; the function's results are at `places`."""
    returned = decision.returned
    if returned is None:
        return places[0] if len(places) == 1 else f"({', '.join(places)},)"
    by_name = {name: f"a{at}" for name, at in taken.items()}
    by_name |= zip(decision.op.public if decision.op else (), places, strict=True)
    if isinstance(returned, str):
        return by_name[returned]
    return f"({', '.join(by_name[name] for name in returned)},)"


def _identify(function: Any) -> Any:
    """What two functions are compared by: partial ones by what they are made of."""
    if not isinstance(function, functools.partial):
        return function
    return _identify(function.func), *map(_identify, function.args), *function.keywords.items()


@functools.cache
def _write_run(
    given: int, arranging: str, served: str, returned: str, constants: int
) -> Callable[..., Any]:
    """Make a function that makes the ready functions of such calls."""
    kept = "".join(f", c{at}" for at in range(constants))
    lines = [
        f"def make(function, arrange{kept}):",
        f"    def run({', '.join(f'a{at}' for at in range(given))}):",
        f"        {arranging}" if arranging else "",
        f"        r = {served}",
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
