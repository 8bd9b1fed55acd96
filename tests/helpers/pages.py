"""The Python blocks of README.md and of the docs' pages, which tests run as a reader would."""

from __future__ import annotations

import linecache
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def with_python() -> list[str]:
    """The pages that have Python blocks."""
    listed = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    names = [str(page.relative_to(ROOT)) for page in listed]
    return [name for name in names if blocks(name)]


def blocks(page: str) -> list[tuple[str, str]]:
    """What each block needs ("" for nothing), by the comment before it, and its text."""
    found = re.findall(
        r"(?:<!-- needs (\w+) -->\n)?```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL
    )
    return [(need, text) for need, text in found]


def run(page: str, *met: str) -> int:
    """Run the page's blocks in order in one new namespace; how many ran.

    Blocks that need something that is not `met` are left out. Python finds the source of the
    others, as it would in a file.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    ran = 0
    for at, (need, text) in enumerate(blocks(page)):
        if need in ("", *met):
            name = f"{page}, block {at + 1}"
            linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
            exec(compile(text, name, "exec"), namespace)
            ran += 1
    return ran
