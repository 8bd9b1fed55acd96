"""The names and types of a schema."""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

import torch


class Signature:
    """Names and types of a schema's arguments, and names of its results."""

    def __init__(self, schema: str) -> None:
        parsed = torch._C.parse_schema(f"op{schema}")
        self.arguments = tuple(argument.name for argument in parsed.arguments)
        self.types = tuple(str(argument.type) for argument in parsed.arguments)
        self.results = tuple(result.name for result in parsed.returns)

    @functools.cached_property
    def Args(self) -> Any:  # noqa: N802 - a class
        """A named tuple of the arguments."""
        return namedtuple("Args", self.arguments)
