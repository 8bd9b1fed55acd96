"""The names and types of a schema."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Signature:
    """Names and types of a schema's arguments and results."""

    schema: str
    arguments: tuple[str, ...] = field(init=False)
    types: tuple[str, ...] = field(init=False)
    results: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        parsed = torch._C.parse_schema(f"op{self.schema}")
        object.__setattr__(self, "arguments", tuple(a.name for a in parsed.arguments))
        object.__setattr__(self, "types", tuple(str(a.type) for a in parsed.arguments))
        object.__setattr__(self, "results", tuple(r.name for r in parsed.returns))
