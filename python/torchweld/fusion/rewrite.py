"""Forwards rewritten from their source: other names for what they call, and one call for pairs."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torchweld.fusion.settings import list_codes

# Decorators of transformers that rename or fill in arguments, or make a tuple of the result: the
# rewritten forward runs under them too. `capture_outputs` is none of them: it looks up the name of
# the module's class.
_KEPT = ("deprecate_kwarg", "can_return_tuple", "merge_with_config_defaults")
# These only write documentation, or say how a class looks a function up.
_DROPPED = (
    *("property", "staticmethod", "use_kernel_forward_from_hub", "use_kernel_func_from_hub"),
    *("auto_docstring", "add_start_docstrings_to_model_forward", "replace_return_docstrings"),
)
# transformers' base class of layers, which wraps the forward of each subclass, a weld's too.
_WRAPPING_BASE = "GradientCheckpointingLayer"


class CannotRewriteError(Exception):
    """A forward that is not rewritten; the message is the reason in words."""


def unwrap(forward: Any) -> Any:
    """The method under a forward's decorators, or None if there is none in Python."""
    inner = inspect.unwrap(forward) if callable(forward) else None
    return inner if isinstance(inner, types.FunctionType) else None


def parse(
    forward: Any, calls_super: bool = False, is_bare: bool = False
) -> tuple[ast.Module, ast.FunctionDef]:
    """Parse the source of a method with the decorators that its rewritten form keeps.

    `calls_super` accepts one that calls super(), which a rewritten form could not. `is_bare` says
    that it is called without its decorators.
    """
    inner = unwrap(forward)
    if inner is None:
        raise CannotRewriteError("its forward is not written in Python")
    is_super = "__class__" in inner.__code__.co_freevars
    if inner.__closure__ and not (calls_super and is_super and len(inner.__closure__) == 1):
        raise CannotRewriteError(
            "its forward calls super(): name the base class there"
            if is_super
            else f"its forward is {_name(inner)}'s closure"
        )
    lines, first = inspect.getsourcelines(inner)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef):
        raise CannotRewriteError("its forward is not a method by itself")
    decorators = [] if is_bare else function.decorator_list
    function.decorator_list = _keep_decorators(forward, decorators)
    ast.increment_lineno(tree, first - 1)
    return tree, function


def parse_wrapper(function: Any) -> ast.FunctionDef | None:
    """Parse what a user's decorator put around a function, if nothing else is in its closure."""
    inside = getattr(function, "__wrapped__", None)
    closure = getattr(function, "__closure__", None) or ()
    if inside is None or [cell.cell_contents for cell in closure] != [inside]:
        return None
    if not isinstance(function, types.FunctionType) or not isinstance(inside, types.FunctionType):
        return None
    tree = ast.parse(textwrap.dedent("".join(inspect.getsourcelines(function.__code__)[0])))
    wrapper = tree.body[0]
    match wrapper:
        case ast.FunctionDef(decorator_list=[ast.Call(func=ast.Attribute(attr="wraps"))]):
            return wrapper
        case ast.FunctionDef(decorator_list=[ast.Call(func=ast.Name(id="wraps"))]):
            return wrapper
    return None


def _keep_decorators(forward: Any, decorators: list[ast.expr]) -> list[ast.expr]:
    """The decorators to keep, which made all that a method is wrapped in."""
    inner, kept = unwrap(forward), []
    forward = _unwrap_base(forward)
    for decorator in decorators:
        called = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
        if called in _DROPPED:
            continue
        if called not in _KEPT:
            raise CannotRewriteError(
                f"its forward is decorated by {called}, which fuse() does not know"
            )
        codes = list_codes(getattr(inner.__globals__.get(called), "__code__", None))
        if getattr(forward, "__code__", None) in codes and forward is not inner:
            forward = forward.__wrapped__
            kept.append(decorator)
    if forward is not inner:  # by somebody else, after its class was made
        raise CannotRewriteError(f"its forward is wrapped by {_name(forward)}: fuse before that")
    return kept


def _unwrap_base(forward: Any) -> Any:
    """The forward that `_WRAPPING_BASE` wraps, once for each class down to the module's."""
    while (base := getattr(forward, "__globals__", {}).get(_WRAPPING_BASE)) is not None:
        wraps = getattr(base.__init_subclass__, "__func__", None)  # older ones have none
        if forward.__code__ not in list_codes(getattr(wraps, "__code__", None)):
            break
        forward = forward.__wrapped__
    return forward


def _name(function: Any) -> str:
    """Name a wrapper by the function that makes it; functools.wraps leaves its code's name."""
    code = getattr(function, "__code__", None)
    name = str(getattr(code, "co_qualname", getattr(code, "co_name", type(function).__name__)))
    return name.partition(".<locals>")[0]


def compile_like(forward: Any, tree: ast.Module, function: ast.FunctionDef) -> Callable[..., Any]:
    """Compile a method's changed tree in the globals of its file, which compilers guard on."""
    inner = unwrap(forward)
    _drop_annotations(function)
    made: dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(tree), inspect.getfile(inner), "exec")
    exec(code, inner.__globals__, made)
    result: Callable[..., Any] = made[function.name]
    return result


def rewrite(
    forward: Any, name: str, attribute: str, methods: Mapping[str, str] | None = None
) -> Callable[..., Any]:
    """The forward with `self.<attribute>` where it reads `name` from its file.

    `methods` replaces calls of submodules by calls of methods, which may leave their work to the
    attribute. Each submodule is called once, for one of the first arguments of one call of the
    name, and nothing else happens to its result in between.
    """
    tree, function = parse(forward)
    own = function.args.args[0].arg
    if methods:
        _leave_work(function, own, name, methods)
    changed = _Names(own, name, attribute)
    function.body = [changed.visit(statement) for statement in function.body]
    if not changed.count:
        raise CannotRewriteError(f"its forward does not read {name} itself")
    return compile_like(forward, tree, function)


def read_own(own: str, name: str) -> ast.Attribute:
    """The expression self.<name>; `own` is what the method calls itself."""
    return ast.Attribute(ast.Name(own, ast.Load()), name, ast.Load())


def why_not(write: Callable[[], object]) -> str | None:
    """Why `write` cannot make a forward from the source of another one, or None."""
    try:
        write()
    except CannotRewriteError as error:
        return str(error)
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        return f"its forward's source cannot be read ({type(error).__name__}): keep it in a file"
    return None


def reads(forward: Any, *names: str) -> bool:
    """Whether the code of a forward reads all of these names."""
    inner = unwrap(forward)
    return inner is not None and set(names) <= set(inner.__code__.co_names)


def look_up(function: ast.expr, names: Mapping[str, Any]) -> Any:
    """What a dotted name of a file stands for, or None."""
    if isinstance(function, ast.Attribute):
        return getattr(look_up(function.value, names), function.attr, None)
    return names.get(function.id) if isinstance(function, ast.Name) else None


def list_called(forward: Any, known: Mapping[Any, str]) -> list[str]:
    """The names of the functions among `known` that the source of a forward calls, in order."""
    calls: list[Any] = []

    def read() -> None:
        function, names = parse(forward, True)[1], unwrap(forward).__globals__
        nodes = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        nodes.sort(key=lambda node: (node.lineno, node.col_offset))
        calls.extend(look_up(node.func, names) for node in nodes)

    why_not(read)
    found = (known.get(call) for call in calls if callable(call) and call.__hash__)
    return list(dict.fromkeys(filter(None, found)))


def _drop_annotations(function: ast.FunctionDef) -> None:
    """Annotations may name what the file imports only for type checkers."""
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    for several in (arguments.vararg, arguments.kwarg):
        if several is not None:
            several.annotation = None
    function.returns = None


class _Names(ast.NodeTransformer):
    """Replaces a name by an attribute, and counts how often."""

    def __init__(self, own: str, name: str, attribute: str) -> None:
        self.own, self.name, self.attribute, self.count = own, name, attribute, 0

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id != self.name or not isinstance(node.ctx, ast.Load):
            return node
        self.count += 1
        return read_own(self.own, self.attribute)


# --- Work that a call leaves to a later one -------------------------------------------------------

# Methods that return a tensor's numbers in another shape, and what does not read the numbers.
_SHAPES = {
    *("transpose", "view", "reshape", "permute", "contiguous", "flatten", "unflatten", "unsqueeze"),
    "squeeze",
}
_PROPERTIES = {"shape", "size", "dtype", "device"}


def _leave_work(function: ast.FunctionDef, own: str, name: str, methods: Mapping[str, str]) -> None:
    """Call methods for submodules where the call of `name` will surely do their work."""
    parents = {c: node for node in ast.walk(function) for c in ast.iter_child_nodes(node)}
    calls: dict[str, list[ast.Call]] = {}
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=who), attr=called)) if who == own:
                calls.setdefault(f".{called}", []).append(node)
            case ast.Call(func=ast.Name(id=called)):
                calls.setdefault(called, []).append(node)
    if any(len(calls.get(f".{submodule}", [])) != 1 for submodule in methods):
        raise CannotRewriteError(f"its forward does not call {' and '.join(methods)} once")
    later = calls[name][0] if len(calls.get(name, [])) == 1 else None
    whole = None if later is None else parents[later]
    if later is None or len(later.args) < 2 or not isinstance(whole, ast.Assign):
        raise CannotRewriteError(f"its forward does not assign the result of {name} once")
    left: list[list[ast.expr]] = []
    for (submodule, method), argument in zip(methods.items(), later.args[:2], strict=True):
        (first,) = calls[f".{submodule}"]
        start = _find_statement(first, parents)
        inside, around = (list(_list_around(node, parents)) for node in (whole, start))
        if_later = _read_tests([node for node in inside if node not in around], own, name)
        if_first = _read_tests([node for node in around if node not in inside], own, submodule)
        variable = argument.id if isinstance(argument, ast.Name) else ""
        targets = getattr(start, "targets", [])
        straight = [*map(ast.unparse, targets)] == [variable] and _strip(start.value) is first  # type: ignore[attr-defined]
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and node.id == variable:
                statement = _find_statement(node, parents)
                if _place(start) < _place(statement) < _place(whole):
                    straight = straight and _keeps(node, statement, parents)
        if not straight or variable not in _list_stored(whole):
            raise CannotRewriteError(f"{name} does not get the result of {submodule} as it is")
        made: ast.expr = ast.Call(read_own(own, method), first.args, first.keywords)
        for test in if_later:
            made = ast.IfExp(test, made, ast.Call(first.func, first.args, first.keywords))
        _put(parents[first], first, made)
        left.append(if_first)
    if len({ast.dump(ast.Tuple(tests)) for tests in left}) > 1:
        raise CannotRewriteError(f"its forward does not call {' and '.join(methods)} together")
    if left[0]:
        later.keywords.append(
            ast.keyword("weld_left", ast.BoolOp(ast.And(), [*left[0], ast.Constant(True)]))
        )


def _read_tests(blocks: list[ast.AST], own: str, name: str) -> list[ast.expr]:
    """What decides whether blocks run: only the module's own attributes."""
    tests = [node.test for node in blocks if isinstance(node, ast.If)]
    known = {part.id for test in tests for part in ast.walk(test) if isinstance(part, ast.Name)}
    if len(tests) < len(blocks) or not known <= {own}:
        raise CannotRewriteError(f"its arguments decide whether it reads {name}")
    return tests


def _find_statement(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> ast.stmt:
    while not isinstance(node, ast.stmt):
        node = parents[node]
    return node


def _list_around(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    """The blocks around a statement; one in an else-branch has the branch too."""
    while (above := parents.get(node)) is not None:
        yield above
        if any(node is other for other in getattr(above, "orelse", ())):
            yield node
        node = above


def _place(statement: ast.stmt) -> tuple[int, int]:
    return statement.lineno, statement.col_offset


def _strip(value: ast.expr) -> ast.expr:
    """What an expression shapes."""
    while (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in _SHAPES
    ):
        value = value.func.value
    return value


def _keeps(node: ast.Name, statement: ast.stmt, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether a statement reads only a variable's shape, or shapes the variable itself."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if name == node.id:
            stripped = _strip(value)
            return isinstance(stripped, ast.Name) and stripped.id == name
    match parents[node]:
        case ast.Attribute(attr=name):
            return name in _PROPERTIES
    return False


def _put(parent: ast.AST, old: ast.AST, new: ast.AST) -> None:
    """Replace a child of a node."""
    for field, value in ast.iter_fields(parent):
        if value is old:
            setattr(parent, field, new)
        elif isinstance(value, list):
            value[:] = [new if item is old else item for item in value]


# --- Pairs of submodules --------------------------------------------------------------------------

_Pair = tuple[str, str]


@functools.lru_cache(maxsize=4096)
def find_pairs(forward: Any) -> tuple[frozenset[_Pair], str]:
    """Pairs of submodules (a, b) where only `self.b` gets what `self.a` returns, or why not.

    The forward has `self.b(self.a(x))`, or two statements in a row for it, after which nothing
    reads the name of the first result.
    """
    calls: _Pairs | None = None

    def read() -> None:
        nonlocal calls
        calls = _read_pairs(forward, {})[2]

    reason = why_not(read)
    return (frozenset(), reason or "") if calls is None else (frozenset(calls.found), "")


def rewrite_pairs(forward: Any, pairs: Collection[_Pair]) -> Callable[..., Any]:
    """The forward with `self.weld_pair(i, x)` for `self.b(self.a(x))`, the pair number i."""
    wanted = {names: at for at, names in enumerate(pairs)}
    tree, function, calls = _read_pairs(forward, wanted)
    if not calls.found >= wanted.keys():
        raise CannotRewriteError("its forward does not pass one's result straight to the other")
    return compile_like(forward, tree, function)


def _read_pairs(
    forward: Any, wanted: Mapping[_Pair, int]
) -> tuple[ast.Module, ast.FunctionDef, _Pairs]:
    tree, function = parse(forward)
    calls = _Pairs(function, wanted)
    if not any(name == calls.own for name in _list_stored(function)):
        function.body = calls.change_block(function.body)
    return tree, function, calls


def _list_stored(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id


class _Pairs(ast.NodeTransformer):
    """Finds nested calls of two submodules, and replaces the wanted ones."""

    def __init__(self, function: ast.FunctionDef, wanted: Mapping[_Pair, int]) -> None:
        arguments = function.args.posonlyargs + function.args.args
        self.own = arguments[0].arg if arguments else ""
        self.wanted = wanted
        self.found: set[_Pair] = set()
        self._function = function

    def change_block(self, block: list[ast.stmt]) -> list[ast.stmt]:
        """Join the statements that belong together, and change the calls in them."""
        joined: list[ast.stmt] = []
        for statement in block:
            if joined and self._join(joined[-1], statement):
                joined.pop()
            joined.append(statement)
        return [self.visit(statement) for statement in joined]

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, self.change_block(block))
        return super().generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        second, inner = self._read_call(node)
        first, x = self._read_call(inner)
        if first is not None and second is not None and x is not None:
            self.found.add((first, second))
            at = self.wanted.get((first, second))
            if at is not None:
                method = read_own(self.own, "weld_pair")
                return ast.Call(method, [ast.Constant(at), self.visit(x)], [])
        return super().generic_visit(node)

    def _read_call(self, node: ast.AST | None) -> tuple[str | None, ast.expr | None]:
        """The name and the argument of a call of a submodule with one argument."""
        if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
            (x,) = node.args
            match node.func:
                case ast.Attribute(value=ast.Name(id=self.own), attr=name):
                    return (None, None) if isinstance(x, ast.Starred) else (name, x)
        return None, None

    def _join(self, before: ast.stmt, after: ast.stmt) -> bool:
        """Put the call of a submodule where the next statement reads its result, if it can."""
        if not (isinstance(before, ast.Assign) and len(before.targets) == 1):
            return False
        target, value = before.targets[0], getattr(after, "value", None)
        first, _ = self._read_call(before.value)
        if not isinstance(target, ast.Name) or first is None:
            return False
        if not isinstance(after, (ast.Assign, ast.Return, ast.AugAssign)) or value is None:
            return False
        reader = next((call for call in _list_first(value) if self._reads(call, target.id)), None)
        second = None if reader is None else self._read_call(reader)[0]
        if reader is None or second is None or not self._dies(target.id, after):
            return False
        if self.wanted and (first, second) not in self.wanted:
            return False
        reader.args[0] = before.value
        return True

    def _reads(self, call: ast.Call, name: str) -> bool:
        x = self._read_call(call)[1]
        return isinstance(x, ast.Name) and x.id == name

    def _dies(self, name: str, statement: ast.stmt) -> bool:
        """Whether only this statement reads what the name stands for, and only once."""
        if _count_reads(statement, name) != 1:
            return False
        if _count_reads(self._function, name) == 1:
            return True
        blocks = (ast.Try, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
        inside = [node for node in ast.walk(self._function) if node is not self._function]
        if any(isinstance(node, blocks) for node in inside):
            return False  # an exception's handler or a function may read it later
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        stored = [name for target in targets for name in _list_stored(target)]
        return name in stored or isinstance(statement, ast.Return)


def _list_first(value: ast.expr | None) -> Iterator[ast.Call]:
    """The calls in an expression before which it computes nothing else."""
    while value is not None:
        part: ast.expr | None = None
        if isinstance(value, ast.Call):
            yield value
            part = value.func
            if _is_simple(part):
                part = value.args[0] if value.args else None
        elif isinstance(value, ast.BinOp):
            part = value.right if _is_simple(value.left) else value.left
        elif isinstance(value, ast.Attribute):
            part = value.value
        value = part


def _is_simple(value: ast.expr) -> bool:
    while isinstance(value, ast.Attribute):
        value = value.value
    return isinstance(value, (ast.Name, ast.Constant))


def _count_reads(tree: ast.AST, name: str) -> int:
    """How often a name is read. An augmented assignment to it reads it too."""
    reads = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name:
            reads += isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            reads += node.target.id == name
    return reads
