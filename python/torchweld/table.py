"""Tables and progress for a terminal: drawn by rich if it is installed, else plain."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass
class Table:
    """Columns of text; columns from `numbers_from` on are right-aligned."""

    headers: Sequence[str]
    numbers_from: int
    # Cells, rich's style, and whether the row begins a group.
    rows: list[tuple[Sequence[str], str, bool]] = field(default_factory=list)

    def add(self, *cells: str, style: str = "", group: bool = False) -> None:
        self.rows.append((cells, style, group))

    def show(self) -> None:
        """Print the table: in colour on a terminal, plain to a file or a pipe."""
        if sys.stdout and sys.stdout.isatty() and _rich():
            self._show_rich()
        else:
            print(self.plain())

    def plain(self) -> str:
        cells = [self.headers, *(cells for cells, _, _ in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [self._line(self.headers, widths), "  ".join("-" * width for width in widths)]
        for cells_, _, group in self.rows:
            if group and len(lines) > 2:
                lines.append("")
            lines.append(self._line(cells_, widths))
        return "\n".join(lines)

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = [
            cell.rjust(width) if at >= self.numbers_from else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    def _show_rich(self) -> None:
        from rich.console import Console
        from rich.table import Table as RichTable

        drawn = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for at, header in enumerate(self.headers):
            side: Literal["right", "left"] = "right" if at >= self.numbers_from else "left"
            drawn.add_column(header, justify=side, no_wrap=True)
        for at, (cells, style, group) in enumerate(self.rows):
            if group and at:
                drawn.add_row()
            drawn.add_row(*cells, style=style)
        console = Console(highlight=False)
        # On a narrow terminal, wrapped lines read better than cut-off columns.
        console.width = max(console.width, len(self.plain().splitlines()[1]))
        console.print(drawn)


def _rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def progress(items: Sequence[object]) -> Iterator[int]:
    """The position of each item in turn, with a bar on stderr that names the current item."""
    if not (sys.stderr and sys.stderr.isatty()):
        yield from range(len(items))
    elif _rich():
        yield from _rich_progress(items)
    else:
        for at, item in enumerate(items):
            print(f"\r\x1b[K[{at + 1}/{len(items)}] {item}", end="", file=sys.stderr, flush=True)
            yield at
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _rich_progress(items: Sequence[object]) -> Iterator[int]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = [
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    ]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(items))
        for at, item in enumerate(items):
            bar.update(task, description=str(item))
            yield at
            bar.advance(task)
