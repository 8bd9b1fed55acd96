"""Makes Triton's interpreter faster.

The interpreter replaces the functions of `triton.language` before a launch, and again at every call
of a device function. The repetition takes half of its time and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


def patch_once_per_launch() -> None:
    patch = interpreter._patch_lang
    patched: set[int] = set()  # modules of functions that this launch has called

    def patch_for_launch(fn: Callable[..., Any]) -> Any:
        patched.clear()
        patched.add(id(fn.__globals__))
        return patch(fn)

    def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in patched:
            patched.add(id(self.fn.__globals__))
            patch(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = patch_for_launch
    interpreter.InterpretedFunction.__call__ = call_device_function
