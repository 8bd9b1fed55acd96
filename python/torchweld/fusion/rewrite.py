"""Forwards made anew from their source, with names of their file replaced by attributes."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from torchweld.fusion import probe


def parse(forward: Any) -> tuple[ast.Module, ast.FunctionDef]:
    """Parse the source of a method."""
    lines, first = inspect.getsourcelines(forward)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef):
        raise ValueError("it is no plain method")
    ast.increment_lineno(tree, first - 1)
    return tree, function


def compile_like(forward: Any, tree: ast.Module, function: ast.FunctionDef) -> Callable[..., Any]:
    """Compile a method's changed tree in the globals of its file, which compilers guard on."""
    _drop_annotations(function)
    made: dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(tree), inspect.getfile(forward), "exec")
    exec(code, forward.__globals__, made)
    result: Callable[..., Any] = made[function.name]
    return result


def rewrite(forward: Any, name: str, attribute: str) -> Callable[..., Any]:
    """The forward with `self.<attribute>` where it reads `name` from its file."""
    tree, function = parse(forward)
    if function.decorator_list:
        raise ValueError("it is no plain method")
    changed = _Names(function.args.args[0].arg, name, attribute)
    tree = changed.visit(tree)
    if not changed.count:
        raise ValueError(f"it does not read {name}")
    return compile_like(forward, tree, function)


def why_not_rewrite(forward: Any, name: str) -> str | None:
    """Why a forward cannot be made anew from its source, or None."""
    if forward.__closure__ or hasattr(forward, "__wrapped__"):
        return "its forward is decorated, or calls super()"
    try:
        rewrite(forward, name, "_")
    except (OSError, TypeError, SyntaxError, ValueError) as error:
        return f"its forward cannot be read ({probe.in_words(error)})"
    return None


def reads(forward: Any, *names: str) -> bool:
    """Whether the code of a forward reads all of these names."""
    code = getattr(inspect.unwrap(forward), "__code__", None) if callable(forward) else None
    return code is not None and set(names) <= set(code.co_names)


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
        return ast.Attribute(ast.Name(self.own, ast.Load()), self.attribute, ast.Load())
