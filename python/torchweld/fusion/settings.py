"""Settings of a module: what its forward reads, and what may change after fuse()."""

from __future__ import annotations

import dis
import functools
import operator
from collections.abc import Collection, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch

# Attributes, joined by dots, and their values when the module was fused; ... for a missing one.
Settings = tuple[tuple[str, Any], ...]
# Functions, names that they read from their files, and the values of these then.
Names = tuple[tuple[FunctionType, str, Any], ...]

# Settings of skipped modules that welds read at each call.
_READ = {"training", "p", "inplace", "eps", "elementwise_affine"}
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, *_FUNCTIONS)
# Not integers: a layer's number would give each layer a class.
_PUBLIC = (bool, float, str, type(None), *_FUNCTIONS)


class Reads(NamedTuple):
    """What a method reads of its module: paths of attributes, and the names that it sets.

    `optional` are names that it may ask for by getattr or hasattr. If it hands the module to
    something else, `escapes`, it may read any attribute.
    """

    paths: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    escapes: bool = False


def has_settings(module: Any, settings: Settings) -> bool:
    """Whether a module's settings are the same still."""
    for name, then in settings:
        now = _follow(module, name) if "." in name else getattr(module, name, ...)
        if now is not then:
            now = _settle(now)
            if type(now) is not type(then) or now != then:
                return False
    return True


def has_methods(module: Any, cls: Any, methods: tuple[tuple[str, Any], ...]) -> bool:
    """Whether a module calls these methods of its class still."""
    own = vars(module)
    for name, then in methods:
        if getattr(cls, name, None) is not then or (name in own and name != "forward"):
            return False
    return True


def read_settings(module: Any, besides: Collection[Any] = _READ) -> Settings:
    """The settings that a module's forward reads, except those that a weld reads at each call."""
    cls: Any = getattr(type(module), "welded_from", type(module))
    reads = _read_class(cls, cls.forward)
    own, settings = vars(module), []
    parameters, modules = module._parameters, module._modules
    asked = reads.optional and _list_asked(module, reads)
    for name in reads.paths | asked:
        if parameters.get(name) is not None or modules.get(name) is not None:
            continue
        value = _follow(module, name) if "." in name else getattr(module, name, ...)
        if type(value) not in _PLAIN:
            value = _settle(value)
            if not (is_plain(value) or (value is ... and name in asked)):
                continue
        is_method = isinstance(value, FunctionType) and name not in own  # for has_methods()
        if not (is_method or name in besides):
            settings.append((name, value))
    if reads.escapes:
        inherited = {n: v for base in cls.__mro__[-3::-1] for n, v in vars(base).items()}
        for name, value in (inherited | own).items():
            known = name[0] == "_" or name in besides or name in reads.paths
            if type(value) in _PUBLIC and not known and (name in own or not callable(value)):
                settings.append((name, value))
    return tuple(sorted(settings, key=operator.itemgetter(0)))


def may_read(module: torch.nn.Module, name: str) -> bool:
    """Whether the code of a module's forward may read this attribute."""
    cls: Any = getattr(type(module), "welded_from", type(module))
    reads = _read_class(cls, getattr(cls, "forward", None))
    return reads.escapes or name in reads.paths or name in reads.optional


def why_not_fixed(module: torch.nn.Module) -> str | None:
    """Why a module may have effects that its settings do not tell of, or None.

    It reads a tensor whose numbers may change, or sets an attribute.
    """
    cls: Any = getattr(type(module), "welded_from", type(module))
    reads = _read_class(cls, cls.forward)
    own, buffers = vars(module), module._buffers
    for name in reads.stored:
        return f"its forward sets {name}"
    for name in reads.paths:
        value = own.get(name, buffers.get(name))
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            return f"its forward reads {name}, a tensor whose numbers may change"
    return None


@functools.lru_cache(maxsize=4096)
def _read_class(cls: type, forward: Any) -> Reads:
    """What the forward of a class reads, also in the class's methods that it calls.

    `forward` is a key of the cache: somebody may set another one on the class.
    """
    found, todo = [], ["forward"]
    for name in todo:  # which grows
        for function in _list_functions(cls, name):
            reads = _read_function(function)
            found.append(reads)
            todo += [path for path in sorted(reads.paths) if path not in todo]
    none: frozenset[str] = frozenset()
    return Reads(
        none.union(*(reads.paths for reads in found)),
        none.union(*(reads.stored for reads in found)),
        none.union(*(reads.optional for reads in found)),
        not found or any(reads.escapes for reads in found),
    )


def list_methods(cls: Any) -> tuple[tuple[str, Any], ...]:
    """The forward of a class, and the methods that it calls."""
    names = sorted({"forward", *_read_class(cls, cls.forward).paths})
    return tuple((n, getattr(cls, n)) for n in names if any(True for _ in _list_functions(cls, n)))


def list_globals(cls: Any, forward: Any) -> Names:
    """The functions and plain values that a class's forward reads from files, but torch's."""
    names = {"forward", *_read_class(cls, forward).paths}
    return list_read(tuple(each for name in sorted(names) for each in _list_functions(cls, name)))


@functools.lru_cache(maxsize=4096)
def list_read(functions: tuple[FunctionType, ...]) -> Names:
    """What functions, and those that they call, read from their files."""
    todo = list(functions)
    found: dict[tuple[FunctionType, str], Any] = {}
    for function in todo:  # which grows
        for part in list_codes(function.__code__):
            for step in dis.get_instructions(part):
                value = (
                    function.__globals__.get(step.argval, ...) if step.opname == _GLOBAL else ...
                )
                is_function = isinstance(value, FunctionType) and not is_torchs(value)
                if isinstance(value, type) and issubclass(value, torch.autograd.Function):
                    both: Any = (value.forward, value.backward)
                    todo += [each for each in both if each not in todo]
                if value is ... or not (is_function or is_plain(value)):
                    continue
                found[function, step.argval] = value
                todo += [value] if is_function and value not in todo else []
    return tuple((*read, value) for read, value in found.items())


_GLOBAL = "LOAD_GLOBAL"


def is_torchs(function: Any) -> bool:
    """Whether a function is written in torch."""
    return str(getattr(function, "__module__", "")).startswith("torch.")


def has_globals(names: Names) -> bool:
    """Whether what functions read from their files is the same still."""
    for function, name, then in names:
        now = function.__globals__.get(name, ...)
        if now is not then and (type(now) is not type(then) or now != then):
            return False
    return True


def _list_functions(cls: type, name: str) -> Iterator[FunctionType]:
    """A method or a property of a class, and the versions in its bases that super() may call."""
    for base in cls.__mro__[: -2 if issubclass(cls, torch.nn.Module) else None]:
        value = vars(base).get(name)
        value = value.fget if isinstance(value, property) else value
        function: Any = value
        while hasattr(function, "__wrapped__"):
            if isinstance(function, FunctionType):
                yield function  # a decorator's, which may read attributes too
            function = function.__wrapped__
        if isinstance(function, FunctionType):
            yield function
            if "__class__" not in function.__code__.co_freevars:
                return


@functools.lru_cache(maxsize=4096)
def _read_function(function: FunctionType) -> Reads:
    code = function.__code__
    if not code.co_argcount:
        return Reads(escapes=True)
    paths, stored, optional, escapes = set(), set(), set(), False
    for part in list_codes(code):
        if _ASKS & {*part.co_names}:
            words = (word for word in part.co_consts if isinstance(word, str))
            optional |= {word for word in words if word.isidentifier()}
        steps = [step for step in dis.get_instructions(part) if step.opname not in _NO_STEPS]
        for at, step in enumerate(steps):
            loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            if not step.opname.startswith(_LOADS) or code.co_varnames[0] not in loaded:
                continue
            path, after = [], at + 1
            while steps[after].opname in ("LOAD_ATTR", "LOAD_METHOD"):
                path.append(steps[after].argval)
                after += 1
            is_last = loaded.index(code.co_varnames[0]) == len(loaded) - 1
            if is_last and path:
                paths.add(".".join(path))
                paths.add(path[0])
            elif is_last and steps[after].opname == "STORE_ATTR":
                stored.add(steps[after].argval)
            elif not (is_last and steps[at - 1].argval in _ASKS and _is_word(steps[after])):
                escapes |= not steps[after].opname.startswith("LOAD_SUPER")
    return Reads(frozenset(paths), frozenset(stored), frozenset(optional), escapes)


def _is_word(step: dis.Instruction) -> bool:
    return step.opname.startswith("LOAD_CONST") and isinstance(step.argval, str)


_ASKS = {"getattr", "hasattr"}
_LOADS = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "STORE_FAST_LOAD_FAST")
_NO_STEPS = ("CACHE", "PRECALL", "EXTENDED_ARG", "COPY", "DUP_TOP", "SWAP", "ROT_TWO")


def list_codes(code: Any) -> Iterator[Any]:
    """A function's code, and the code of the functions in it; nothing of anything else."""
    if isinstance(code, CodeType):
        yield code
        for constant in code.co_consts:
            yield from list_codes(constant)


def _follow(value: Any, path: str) -> Any:
    """What attributes lead to, or ... if one is missing. A tensor's own attributes are none."""
    for name in path.split("."):
        value = ... if isinstance(value, torch.Tensor) else getattr(value, name, ...)
    return value


def _list_asked(module: Any, reads: Reads) -> frozenset[str]:
    """What getattr() may ask of the module or of what it holds, such as its configuration."""
    kinds = (torch.Tensor, torch.nn.Module, type, *_FUNCTIONS)
    held = ((path, _follow(module, path)) for path in reads.paths)
    holders = [path for path, v in held if hasattr(v, "__dict__") and not isinstance(v, kinds)]
    return reads.optional.union(f"{path}.{name}" for path in holders for name in reads.optional)


def _settle(value: Any) -> Any:
    """A value that does not change by itself, and is equal for copies."""
    if isinstance(value, functools.partial):
        return value.func, value.args, tuple(value.keywords.items())
    return tuple(value) if type(value) is list else value


def is_setting(value: Any) -> bool:
    """Whether a weld can compare a value with what it was."""
    return type(value) in _PLAIN or is_plain(_settle(value))


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a function or the like, which nobody changes inside."""
    if type(value) is tuple:
        return all(map(is_plain, value))
    return type(value) in _PLAIN
