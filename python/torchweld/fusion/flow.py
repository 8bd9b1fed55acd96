"""Data flow between a module's submodules, read from the source of its forward."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from torchweld.fusion.rewrite import CannotRewriteError, compile_like, parse, why_not

_Names = tuple[str, str]


@functools.lru_cache(maxsize=4096)
def find_pairs(forward: Any) -> tuple[frozenset[_Names], str]:
    """Pairs of submodules (a, b) where only `self.b` gets what `self.a` returns, or why not.

    The forward has `self.b(self.a(x))`, or two statements in a row for it, after which nothing
    reads the name of the first result.
    """
    calls: _Calls | None = None

    def read() -> None:
        nonlocal calls
        calls = _read(forward, {})[2]

    reason = why_not(read)
    return (frozenset(), reason or "") if calls is None else (frozenset(calls.found), "")


def rewrite_pairs(forward: Any, pairs: Collection[_Names]) -> Callable[..., Any]:
    """The forward with `self.weld_pair(i, x)` for `self.b(self.a(x))`, the pair number i."""
    wanted = {names: at for at, names in enumerate(pairs)}
    tree, function, calls = _read(forward, wanted)
    if not calls.found >= wanted.keys():
        raise CannotRewriteError("its forward does not pass one's result straight to the other")
    return compile_like(forward, tree, function)


def _read(forward: Any, wanted: Mapping[_Names, int]) -> tuple[ast.Module, ast.FunctionDef, _Calls]:
    tree, function = parse(forward)
    calls = _Calls(function, wanted)
    if not any(name == calls.own for name in _list_stored(function)):
        function.body = calls.change_block(function.body)
    return tree, function, calls


def _list_stored(function: ast.AST) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id


class _Calls(ast.NodeTransformer):
    """Finds nested calls of two submodules, and replaces the wanted ones."""

    def __init__(self, function: ast.FunctionDef, wanted: Mapping[_Names, int]) -> None:
        arguments = function.args.posonlyargs + function.args.args
        self.own = arguments[0].arg if arguments else ""
        self.wanted = wanted
        self.found: set[_Names] = set()
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
                method = ast.Attribute(ast.Name(self.own, ast.Load()), "weld_pair", ast.Load())
                replaced = ast.Call(method, [ast.Constant(at), self.visit(x)], [])
                return ast.copy_location(replaced, node)
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
            if _is_name(part):
                part = value.args[0] if value.args else None
        elif isinstance(value, ast.BinOp):
            part = value.right if _is_name(value.left) else value.left
        elif isinstance(value, ast.Attribute):
            part = value.value
        value = part


def _is_name(value: ast.expr) -> bool:
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
