"""Functions whose results are constants of a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def assume_constant_result(function: Function) -> Function:
    """Mark a function as torch.compiler.assume_constant_result does.

    torch's own function imports the compiler, which takes longer than importing torchweld.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
