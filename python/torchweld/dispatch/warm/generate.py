"""Compiles functions whose code is written at run time; nothing else in the package does.

linecache keeps each source, so that tracebacks, debuggers and profiles show the generated lines.
"""

from __future__ import annotations

import itertools
import linecache
import weakref
from collections.abc import Callable
from typing import Any

FILES = "<torchweld: "  # how the names of all generated files begin
_numbers = itertools.count(1)


def compile_function(
    name: str, source: str, scope: dict[str, Any], about: str = "", into: Any = None
) -> Callable[..., Any]:
    """Compile a source that defines the function `name`, whose globals are `scope`.

    `about` names it in tracebacks; by default its name does. `into` gets all that the source
    defines, by default `scope` does; other functions are shown as long as this one lives.
    """
    file = f"{FILES}{about or name}, {next(_numbers)}>"
    defined = scope if into is None else into
    exec(compile(source, file, "exec"), scope, defined)
    function = defined[name]
    # Without a time of change, linecache does not look for the file on a disk.
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    weakref.finalize(function, linecache.cache.pop, file, None).atexit = False
    return function  # type: ignore[no-any-return]


def show_code(function: Callable[..., Any]) -> str | None:
    """The source that a generated function was compiled from; None for others."""
    code = getattr(function, "__code__", None)
    if code is None or not code.co_filename.startswith(FILES):
        return None
    return "".join(linecache.getlines(code.co_filename))
