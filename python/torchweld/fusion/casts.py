"""Casts in the code of forwards: dtypes may decide about those."""

from __future__ import annotations

import ast
from collections.abc import Iterable

CASTS = {"bfloat16", "double", "float", "half", "to", "type_as"}
CAST = "_cast"  # of autocast, of one value or several


def list_cast(blocks: Iterable[list[ast.stmt]]) -> set[str] | None:
    """The variables that blocks only cast; None if they do more, or return different variables."""
    cast, ends = set(), []
    for block in blocks:
        for statement in block:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    cast |= {name} if name_cast(value) == name else set()
                case ast.Return(value=ast.expr() as value):
                    ends.append(name_cast(value))
                case _:
                    return None
    same = len(ends) in (0, 2) and len(set(ends)) < 2 and None not in ends
    return cast if same else None


def name_cast(value: ast.expr) -> str | None:
    """The name of the variable that an expression casts."""
    match value:
        case ast.Name(id=name):
            return name
        case ast.Call(func=ast.Attribute(attr=attr, value=inner)) if attr in CASTS:
            return name_cast(inner)
        case ast.Call(func=ast.Attribute(attr=attr), args=[inner, *_]) if attr == CAST:
            return name_cast(inner)
    return None
