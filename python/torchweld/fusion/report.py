"""The table that explain_fusion returns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchweld.table import Table

_WIDTH = 100  # of a printed line
Filter = Callable[[torch.nn.Module, str], bool]


@dataclass(frozen=True)
class Weldable:
    """A row of `explain_fusion`: an op that a module runs, or why it does not.

    Attributes:
        where: the module's name in the model.
        what: its class.
        becomes: the torchweld function that computes a part of its forward; "" for none.
        welded: whether it does so already, or fuse() would make it.
        reason: why no function does; "" if one does.
    """

    where: str
    what: str
    becomes: str = ""
    welded: bool = False
    reason: str = ""


class WeldReport(tuple[Weldable, ...]):
    """A table of what fuse() changes in a model or has changed, and what it does not."""

    def table(self) -> Table:
        """Two lines for a group of modules that differ only in the numbers in their names."""
        table = Table(["module, and what it becomes"], numbers_from=99)
        groups: dict[Any, list[Weldable]] = {}
        for row in self:
            where = re.sub(r"\d+", "*", row.where)
            key = (where, row.what, row.becomes, row.welded, row.reason)
            groups.setdefault(key, []).append(row)
        for (_, what, becomes, welded, reason), rows in groups.items():
            where = _merge_names([row.where for row in rows]) or "(the model)"
            where += f" ({len(rows)}x)" if len(rows) > 1 else ""
            welds = f"{becomes}, {'welded' if welded else 'to be welded'}"
            note = f"not changed: {reason}" if reason else welds
            for text, indent in ((f"{where}: {what}", ""), (note, "    ")):
                for line in textwrap.wrap(
                    text, _WIDTH, initial_indent=indent, subsequent_indent=indent
                ):
                    table.add(line, style="dim" if reason else "")
        return table

    def __str__(self) -> str:
        if not self:
            return "torchweld has no fused kernel for any module of this model"
        return self.table().plain()

    def __repr__(self) -> str:
        return str(self)


def _merge_names(names: Sequence[str]) -> str:
    """Merge the names into one, with a star where their numbers differ."""
    parts = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)
