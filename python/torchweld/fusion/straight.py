"""Straight forwards: their code computes the same on every call, so that a weld may replace it.

A trial shows what a forward computes on the trial's inputs. It shows no branch that none of them
takes, such as one on the number of rows or on a global. So the code of what a weld replaces as a
whole is read from its source. It may call only functions that compute the same each time. It may
decide only by the module's settings, which a weld compares at each call, and by dtypes about casts.
"""

from __future__ import annotations

import ast
import builtins
import enum
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple, NoReturn, TypeGuard

import torch

from torchweld.fusion.casts import CAST, CASTS, list_cast, name_cast
from torchweld.fusion.rewrite import CannotRewriteError, parse, parse_wrapper, why_not
from torchweld.fusion.settings import is_plain, is_setting, is_torchs, read_settings

# Functions of torch, and methods of tensors, that compute the same on every call. None compares
# numbers or limits them: beyond the limit they would compute something else.
_SMOOTH_NAMES = (
    "abs add addcdiv addcmul addmm baddbmm bmm cat celu chunk clone concat contiguous cos "
    "detach div divide einsum elu erf exp expm1 gelu layer_norm leaky_relu linear log log1p "
    "logsigmoid matmul mean mish mm movedim mul multiply neg negative norm normalize permute "
    "pow reciprocal relu repeat_interleave rms_norm rsqrt rsub selu sigmoid silu sin softmax "
    "softplus sqrt square squeeze stack std sub subtract sum t tanh tensor_split transpose "
    "true_divide unbind var var_mean view_as_complex view_as_real"
)
_SMOOTH = set(_SMOOTH_NAMES.split())
# They change no number, so that sizes may be among their arguments.
_SHAPERS_NAMES = (
    "broadcast_to expand expand_as flatten narrow reshape split unflatten unsqueeze view view_as"
)
_SHAPERS = set(_SHAPERS_NAMES.split())
_SIZES = {"dim", "size"}


def _find(names: Iterable[str], *places: Any) -> set[Any]:
    found = (getattr(place, name, None) for place in places for name in names)
    return {function for function in found if function is not None}


_SMOOTH_FUNCTIONS = _find(_SMOOTH, torch, torch.nn.functional)
_SHAPER_FUNCTIONS = _find(_SHAPERS, torch)
_CAST_FUNCTIONS = _find((CAST,), torch.amp.autocast_mode)
_OF_AUTOCAST = ("is_autocast_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype")
_DTYPE_FUNCTIONS = _find((*_OF_AUTOCAST, "promote_types"), torch)
_PURE = {bool, float, getattr, hasattr, int, isinstance, len, list, tuple, type}
_PURE |= set(filter(callable, vars(math).values()))
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le},
    **{ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not},
}


class Kind(enum.IntEnum):
    """What is known of a value that a call computes."""

    FIXED = 0  # the same as long as the settings are
    DTYPE = 1  # a dtype, a device, or whether autocast is on
    SIZE = 2  # of a tensor's dimension
    TENSOR = 3


class _Thing(NamedTuple):
    """What is there before a call: a setting, a parameter, a submodule, a function."""

    value: Any
    own: bool = False  # whether it is an attribute of the module


class _Method(NamedTuple):
    """A method of a tensor."""

    tensor: Any
    name: str


class _Context:
    """What the methods of a torch.autograd.Function get."""

    @staticmethod
    def save_for_backward(*tensors: Any) -> None:
        """Keep tensors."""


_NONE: Mapping[str, Kind] = {}
_UNKNOWN = object()  # an argument that no trial gave
_NO_NAMED: Mapping[str, Any] = MappingProxyType({})  # **kwargs of a call that names no others
# A Kind, one of these classes, or a tuple of values.
_Value = Any


def why_not_straight(
    what: Any, takes: int = 1, compared: bool = False, named: Mapping[str, Kind] = _NONE
) -> str | None:
    """Why a module's forward, or a function, may compute something else on other calls, or None.

    Args:
        what: the module or the function.
        takes: how many tensors it gets. Its other arguments have their defaults.
        compared: whether a weld compares at each call what it reads from its file.
        named: what is known of other arguments that it gets.
    """
    module = what if isinstance(what, torch.nn.Module) else None
    cls: Any = getattr(type(what), "welded_from", type(what))
    function = what if module is None else cls.forward
    if _is_of_torch(function):
        return None
    own = [] if module is None else [_Thing(module, True)]
    given = [*own, *[Kind.TENSOR] * takes]
    reader = _Reader(module, compared)
    return why_not(lambda: reader.call(_Thing(function), given, dict(named), ast.Name("it")))


def _refuse(text: str) -> NoReturn:
    raise CannotRewriteError(f"its forward {text}")


def _quote(node: ast.AST) -> str:
    text = ast.unparse(node).partition("\n")[0]
    return f"`{text if len(text) <= _QUOTED else text[:_QUOTED] + ' ...'}`"


_QUOTED = 60


class _Function(NamedTuple):
    """A function that is being read."""

    names: dict[str, Any]  # of its file
    cls: Any  # the class in which it is defined, if it calls super()
    variables: dict[str, _Value]
    results: list[_Value]


class _Reader:
    """Follows code of a module, or of a function, with kinds of values in place of tensors."""

    def __init__(self, module: torch.nn.Module | None, compared: bool) -> None:
        self._module, self._compared = module, compared
        self._running: list[Any] = []
        self._bare: list[Any] = []  # what wrappers call that were read

    # --- Statements -------------------------------------------------------------------------------

    def _run(self, function: Any, args: list[_Value], named: dict[str, _Value]) -> _Value:
        inner: Any = inspect.unwrap(function)
        if inner in self._running:
            _refuse(f"calls {inner.__name__} in itself")
        cells, wrapped = [cell.cell_contents for cell in inner.__closure__ or ()], {}
        try:
            read = parse(function, True, is_bare=function in self._bare)[1]
        except CannotRewriteError:
            if (wrapper := parse_wrapper(function)) is None:
                raise
            read, inner, cells = wrapper, function, []
            self._bare.append(function.__wrapped__)
            wrapped = {name: _Thing(function.__wrapped__) for name in function.__code__.co_freevars}
        variables = wrapped | _bind(inner, args, named)
        at = _Function(inner.__globals__, cells and cells[0], variables, [])
        self._running.append(inner)
        self._read_block(read.body, at)
        self._running.pop()
        return functools.reduce(_join, at.results) if at.results else _Thing(None)

    def _read_block(self, block: list[ast.stmt], at: _Function) -> bool:
        """Whether the block ends in a return or an error."""
        return any(self._read_statement(statement, at) for statement in block)

    def _read_statement(self, statement: ast.stmt, at: _Function) -> bool:
        match statement:
            case ast.Return(value=value):
                at.results.append(_Thing(None) if value is None else self._read(value, at))
                return True
            case ast.Raise():
                return True
            case ast.Assign(targets=[target], value=value):
                _assign(target, self._read(value, at), at)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                _assign(target, self._read(value, at), at)
            case ast.AugAssign(target=ast.Name(id=name) as target, value=value):
                values = [self._read_name(name, at), self._read(value, at)]
                _assign(target, _compute(values, statement), at)
            case ast.If():
                return self._read_if(statement, at)
            case ast.With(items=[ast.withitem(context_expr=ast.Call() as context)]):
                keywords = [ast.unparse(keyword) for keyword in context.keywords]
                function = self._read(context.func, at)
                is_autocast = isinstance(function, _Thing) and _is_autocast(function.value)
                if not is_autocast or "enabled=False" not in keywords:
                    _refuse(f"has {_quote(statement)}")
                return self._read_block(statement.body, at)
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case ast.Expr(value=value) if self._read(value, at) == _Thing(None):
                pass
            case _:
                _refuse(f"has {_quote(statement)}")
        return False

    def _read_if(self, statement: ast.If, at: _Function) -> bool:
        test, blocks = self._read(statement.test, at), (statement.body, statement.orelse)
        if isinstance(test, _Thing):
            return self._read_block(blocks[not test.value], at)
        kind = _level(test)
        if kind < Kind.TENSOR and isinstance(statement.body[0], ast.Raise):
            return self._read_block(statement.orelse, at)
        cast = list_cast(blocks) if kind == Kind.DTYPE else None
        if kind > Kind.FIXED and cast is None:
            _refuse(f"decides by {_quote(statement.test)}")
        ends, ways = [], []
        for block in blocks:
            way = at._replace(variables=dict(at.variables))
            ends.append(self._read_block(block, way))
            ways += [] if ends[-1] else [way.variables]
        for name in {name for way in ways for name in way}:
            values = [way[name] for way in ways if name in way]
            if any(value is not at.variables.get(name) for value in values):
                joined = _raise_to(kind, functools.reduce(_join, values))
                if cast is not None and joined is Kind.TENSOR and name not in cast:
                    _refuse(f"decides by {_quote(statement.test)}")
                at.variables[name] = joined
        return all(ends)

    # --- Expressions ------------------------------------------------------------------------------

    def _read(self, node: ast.expr, at: _Function) -> _Value:
        match node:
            case ast.Constant(value=value):
                return _Thing(value)
            case ast.Name(id=name):
                return self._read_name(name, at)
            case ast.Attribute(value=value, attr=name):
                return self._read_attribute(self._read(value, at), name, node)
            case ast.Call(func=ast.Name(id="super")):
                return _Thing(super(at.cls, self._module), True)  # type: ignore[arg-type]
            case ast.Call(func=function, args=args, keywords=keywords):
                called, given = self._read(function, at), self._read_each(args, at)
                named = {str(each.arg): self._read(each.value, at) for each in keywords}
                named = {name: each for name, each in named.items() if each != _Thing(_NO_NAMED)}
                return self.call(called, given, named, function)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return tuple(self._read_each(parts, at))
            case ast.GeneratorExp(elt=part, generators=[ast.comprehension(ifs=[]) as each]):
                return self._read_generator(part, each, node, at)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                value = self._read(operand, at)
                return _Thing(not value.value) if isinstance(value, _Thing) else value
            case ast.UnaryOp(operand=operand):
                return _compute([self._read(operand, at)], node)
            case ast.BinOp(left=left, right=right):
                return _compute([self._read(left, at), self._read(right, at)], node)
            case ast.BoolOp(op=op, values=parts):
                return self._read_bool(isinstance(op, ast.Or), parts, node, at)
            case ast.Compare(left=left, ops=ops, comparators=others):
                return _compare([self._read(each, at) for each in (left, *others)], ops, node)
            case ast.IfExp():
                return self._read_choice(node, at)
            case ast.Subscript(value=value, slice=index):
                return self._read_part(self._read(value, at), index, node, at)
        return _refuse(f"has {_quote(node)}")

    def _read_name(self, name: str, at: _Function) -> _Value:
        if name in at.variables:
            value = at.variables[name]
            return _refuse(f"reads {name}, which no trial gave") if value is _UNKNOWN else value
        value = at.names.get(name, getattr(builtins, name, _UNKNOWN))
        if not (_is_constant(value) or (self._compared and is_plain(value)) or _is_table(value)):
            _refuse(f"reads {name}, which may change")
        return _Thing(value)

    def _read_each(self, nodes: list[ast.expr], at: _Function) -> list[_Value]:
        values: list[_Value] = []
        for node in nodes:
            value = self._read(node.value if isinstance(node, ast.Starred) else node, at)
            several = isinstance(node, ast.Starred) and type(value) is tuple
            values += value if several else [value]
        return values

    def _read_generator(
        self, part: ast.expr, each: ast.comprehension, node: ast.expr, at: _Function
    ) -> _Value:
        """The values of `part for each in a tuple`."""
        several, values = self._read(each.iter, at), []
        if type(several) is not tuple:
            _refuse(f"has {_quote(node)}")
        for one in several:
            inside = at._replace(variables=dict(at.variables))
            _assign(each.target, one, inside)
            values.append(self._read(part, inside))
        return tuple(values)

    def _read_attribute(self, value: _Value, name: str, node: ast.expr) -> _Value:
        if isinstance(value, _Thing) and value.value is _Context:
            is_saved = name == "saved_tensors"
            return Kind.TENSOR if is_saved else _Thing(getattr(_Context, name, None))
        if isinstance(value, _Thing) and not isinstance(value.value, torch.Tensor):
            found = inspect.getattr_static(type(value.value), name, None)
            if self._is_module(value) and name == "training":
                return Kind.FIXED
            if self._is_module(value) and isinstance(found, property):
                return self._run(found.fget, [value], {})
            made = getattr(value.value, name, _UNKNOWN)
            if made is _UNKNOWN:
                _refuse(f"reads {_quote(node)}, which it lacks")
            is_known = (
                value.own or _is_constant(made) or value.value is math or value.value is torch
            )
            if not (is_known or self._is_compared(value, name, made)):
                _refuse(f"reads {_quote(node)}, which may change")
            return _Thing(made, value.own)
        kind = _level(value)
        if kind == Kind.TENSOR and name in ("shape", "ndim"):
            return Kind.FIXED if isinstance(value, _Thing) else Kind.SIZE
        if kind == Kind.DTYPE or (kind == Kind.TENSOR and name in ("dtype", "device")):
            return Kind.DTYPE
        if kind == Kind.TENSOR and name in ("T", "mT", "data"):
            return Kind.TENSOR
        if kind == Kind.TENSOR and name in _SMOOTH | _SHAPERS | CASTS | _SIZES:
            return _Method(value, name)
        return _refuse(f"uses {_quote(node)}, which fuse() does not know")

    def _read_bool(
        self, is_or: bool, parts: list[ast.expr], node: ast.expr, at: _Function
    ) -> _Value:
        kind, value = Kind.FIXED, None
        symbolic = False
        for place, part in enumerate(parts):
            value = self._read(part, at)
            if not isinstance(value, _Thing):
                kind, symbolic = max(kind, _level(value)), True
            elif bool(value.value) is is_or:
                if all(isinstance(before, ast.Compare) for before in parts[:place]):
                    return value  # whatever they compare
                break
        if kind == Kind.TENSOR:
            _refuse(f"decides by {_quote(node)}")
        return kind if symbolic else value

    def _read_choice(self, node: ast.IfExp, at: _Function) -> _Value:
        test = self._read(node.test, at)
        if isinstance(test, _Thing):
            return self._read(node.body if test.value else node.orelse, at)
        kind, values = _level(test), [self._read(each, at) for each in (node.body, node.orelse)]
        if kind > Kind.FIXED and Kind.TENSOR in map(_level, values):
            names = {name_cast(each) for each in (node.body, node.orelse)}
            if kind > Kind.DTYPE or len(names) > 1 or None in names:
                _refuse(f"decides by {_quote(node.test)}")
        return _raise_to(kind, _join(*values))

    def _read_part(self, value: _Value, index: ast.expr, node: ast.expr, at: _Function) -> _Value:
        if isinstance(value, tuple) and isinstance(index, ast.Constant):
            return value[index.value]  # type: ignore[index]
        if isinstance(value, _Thing) and _is_table(value.value):
            key = self._read(index, at)
            return (
                _Thing(value.value[key.value])
                if isinstance(key, _Thing)
                else _refuse(f"decides by {_quote(node)}")
            )
        bounds: list[ast.expr] = []
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        for part in parts:
            ends = [part.lower, part.upper, part.step] if isinstance(part, ast.Slice) else [part]
            bounds += [end for end in ends if end is not None]
        kind = max(map(_level, self._read_each(bounds, at)), default=Kind.FIXED)
        # Of a last dimension any part is one that the trial saw.
        is_last = isinstance(parts[0], ast.Constant) and parts[0].value is ...
        if kind > (Kind.SIZE if is_last or _level(value) == Kind.SIZE else Kind.FIXED):
            _refuse(f"decides by {_quote(node)}")
        return _level(value)

    # --- Calls ------------------------------------------------------------------------------------

    def call(
        self, called: _Value, args: list[_Value], named: dict[str, _Value], node: ast.expr
    ) -> _Value:
        """The value of a call of what `node` says."""
        given = [*args, *(v for name, v in named.items() if name not in ("dtype", "device"))]
        if isinstance(called, _Method):
            if called.name in _SMOOTH:
                _compute([called.tensor, *given], node)
            is_size = called.name in _SIZES
            return _level_of_size(called.tensor) if is_size else Kind.TENSOR
        function: Any = called.value if isinstance(called, _Thing) else None
        if isinstance(function, functools.partial):
            args = [*map(_Thing, function.args), *args]
            named = {name: _Thing(each) for name, each in function.keywords.items()} | named
            return self.call(_Thing(function.func), args, named, node)
        if isinstance(function, MethodType) and function.__self__ is self._module:
            own = _Thing(self._module, True)
            return self.call(_Thing(function.__func__), [own, *args], named, node)
        if isinstance(function, MethodType) and _is_node(function.__self__):
            context = _Thing(_Context)
            self._run(function.__self__.backward, [context, Kind.TENSOR], {})
            return self._run(function.__self__.forward, [context, *args], named)
        if function is _Context.save_for_backward:
            return _Thing(None)
        if getattr(function, "__self__", None) is _NO_NAMED and function.__name__ == "get":
            return args[1] if len(args) > 1 else _Thing(None)
        if isinstance(function, torch.nn.Module):
            if not called.own and (reason := why_not_straight(function)):
                raise CannotRewriteError(reason)
            return _raise_to(Kind.TENSOR, _compute(given, node))
        if getattr(type(function), "__hash__", None) is None:
            function = None
        if function in _SMOOTH_FUNCTIONS:
            return _raise_to(Kind.TENSOR, _compute(given, node))
        if function in _SHAPER_FUNCTIONS or _is_of_torch(function):
            return Kind.TENSOR
        if function in _DTYPE_FUNCTIONS:
            return Kind.DTYPE
        if function in _CAST_FUNCTIONS:
            return args[0]
        if function in _PURE:
            return self._call_pure(function, args, node)
        is_cached = isinstance(function, functools._lru_cache_wrapper)
        if is_cached and all(isinstance(e, _Thing) and is_setting(e.value) for e in args):
            return _Thing(function(*(each.value for each in args)))  # the same from now on
        hands_itself = any(map(self._is_module, args)) and not self._is_method(function)
        if not isinstance(function, FunctionType) or hands_itself or is_torchs(function):
            _refuse(f"uses {_quote(node)}, which fuse() does not know")
        before, in_class = self._compared, self._is_method(function)
        self._compared = before and (in_class or not called.own)  # a weld compares no other names
        result = self._run(function, args, named)
        self._compared = before
        return result

    def _is_module(self, value: _Value) -> bool:
        return isinstance(value, _Thing) and value.value is not None and value.value is self._module

    def _is_compared(self, value: _Value, name: str, made: Any) -> bool:
        """Whether an attribute of the module's class is a setting that a weld compares."""
        module = self._module
        return value.value is type(module) and dict(read_settings(module)).get(name, ...) is made

    def _is_method(self, function: Any) -> bool:
        """Whether a function is a method of the module: a weld compares what those read."""
        name = getattr(function, "__name__", "")
        found = (vars(base).get(name) for base in type(self._module).__mro__)
        return any(function in _list_wrapped(each) for each in found)

    def _call_pure(self, function: Any, args: list[_Value], node: ast.expr) -> _Value:
        """A function of Python, of things or of sizes."""
        if function is getattr and isinstance(args[0], _Thing):
            name = args[1].value
            if len(args) > 2 and not hasattr(args[0].value, name):
                return args[2]
            return self._read_attribute(args[0], name, node)
        if function is len and type(args[0]) is tuple:
            return _Thing(len(args[0]))
        if all(isinstance(each, _Thing) for each in args):
            return _Thing(function(*(each.value for each in args)))
        kind = _level(tuple(args))
        if kind == Kind.TENSOR and function is not len:
            _refuse(f"decides by {_quote(node)} of a tensor")
        return min(kind, Kind.SIZE)


# --- Values ---------------------------------------------------------------------------------------


def _is_of_torch(function: Any) -> bool:
    """Whether a function is a forward of one of torch's modules."""
    package = str(getattr(function, "__module__", ""))
    return package.startswith("torch.nn.modules.") and function.__name__ == "forward"


def _list_wrapped(function: Any) -> Iterator[Any]:
    """A function, and those that its decorators wrapped."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _is_constant(value: Any) -> bool:
    """Whether nobody is expected to change a name's value: a module, a class, torch's function."""
    is_own = isinstance(value, FunctionType) and not is_torchs(value)
    return (callable(value) and not is_own) or isinstance(value, ModuleType)


def _is_table(value: Any) -> bool:
    """Whether a value is transformers' table of activations."""
    return isinstance(value, dict) and type(value).__module__.startswith("transformers.")


def _is_autocast(value: Any) -> bool:
    """Whether a value is torch.autocast, or transformers' form of it."""
    name = (str(getattr(value, "__module__", "")).split(".")[0], getattr(value, "__name__", ""))
    return value is torch.autocast or name == ("transformers", "maybe_autocast")


def _is_node(value: Any) -> TypeGuard[type[torch.autograd.Function]]:
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def _level(value: _Value) -> Kind:
    """The kind of a value."""
    if isinstance(value, Kind):
        return value
    if type(value) is tuple:
        return max(map(_level, value), default=Kind.FIXED)
    thing = value.value if isinstance(value, _Thing) else value
    if isinstance(thing, torch.Tensor):
        return Kind.TENSOR
    if is_setting(thing) or thing is ...:
        return Kind.FIXED
    return _refuse(f"computes with a {type(thing).__name__}")


def _level_of_size(tensor: _Value) -> Kind:
    return Kind.FIXED if isinstance(tensor, _Thing) else Kind.SIZE


def _raise_to(kind: Kind, value: _Value) -> _Value:
    """A value that depends on what has this kind."""
    return value if kind == Kind.FIXED else max(kind, _level(value))


def _join(a: _Value, b: _Value) -> _Value:
    """One of two values."""
    if a is b or (isinstance(a, _Thing) and isinstance(b, _Thing) and a.value is b.value):
        return a
    if type(a) is type(b) is tuple and len(a) == len(b):
        return tuple(map(_join, a, b))
    return _mix([a, b], "computes a tensor or a size")


def _mix(values: Iterable[_Value], otherwise: str) -> Kind:
    """The highest kind of values. Sizes and dtypes must not change tensors."""
    kinds = {_level(value) for value in values}
    if Kind.TENSOR in kinds and not kinds <= {Kind.TENSOR, Kind.FIXED}:
        _refuse(otherwise)
    return max(kinds, default=Kind.FIXED)


def _compute(values: Iterable[_Value], node: ast.AST) -> Kind:
    flat = [part for value in values for part in (value if type(value) is tuple else (value,))]
    return _mix(flat, f"computes with a size or a dtype: {_quote(node)}")


def _compare(values: list[_Value], ops: list[ast.cmpop], node: ast.AST) -> _Value:
    settings = [value.value for value in values if isinstance(value, _Thing)]
    if isinstance(ops[0], (ast.Is, ast.IsNot)) and any(setting is None for setting in settings):
        both = len(settings) == 2 and settings[0] is settings[1]
        return _Thing(both is isinstance(ops[0], ast.Is))
    compare = _COMPARE.get(type(ops[0]))
    if len(settings) == len(values) == 2 and all(map(is_setting, settings)) and compare:
        return _Thing(compare(*settings))
    kind = _level(tuple(values))
    if kind == Kind.TENSOR:
        _refuse(f"compares numbers: {_quote(node)}")
    return kind


def _bind(function: Any, args: list[_Value], named: dict[str, _Value]) -> dict[str, _Value]:
    """The variables of a call."""
    signature = inspect.signature(function, follow_wrapped=False)
    given = signature.bind_partial(*args, **named).arguments
    variables: dict[str, _Value] = {}
    for name, parameter in signature.parameters.items():
        default = parameter.default
        is_set = default is not parameter.empty and is_setting(default)
        variables[name] = given.get(name, _Thing(default) if is_set else _UNKNOWN)
        if parameter.kind == parameter.VAR_POSITIONAL:
            variables[name] = tuple(given.get(name, ()))
        elif parameter.kind == parameter.VAR_KEYWORD:
            variables[name] = _UNKNOWN if name in given else _Thing(_NO_NAMED)
    return variables


def _assign(target: ast.expr, value: _Value, at: _Function) -> None:
    match target:
        case ast.Name(id=name):
            _level(value)  # nothing with attributes: a weld compares only those of the module
            at.variables[name] = value
        case ast.Tuple(elts=parts):
            in_pairs = type(value) is tuple and len(value) == len(parts)
            for at_part, part in enumerate(parts):
                bare = part.value if isinstance(part, ast.Starred) else part
                _assign(bare, value[at_part] if in_pairs else _level(value), at)
        case _:
            _refuse(f"sets {_quote(target)}")
