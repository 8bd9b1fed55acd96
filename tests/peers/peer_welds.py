"""What fuse() welds in each architecture of transformers is what docs/welds.md says.

As a script, it writes that page's column for the installed release of transformers, or the cells of
the architectures that it is given.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import models
import pytest
import torch
import transformers

import torchweld
from torchweld import functional

PAGE = Path(__file__).parents[2] / "docs" / "welds.md"
RELEASE = ".".join(transformers.__version__.split(".")[:2])
_FUNCTION = re.compile("|".join(sorted(vars(functional), key=len, reverse=True)))
_NONE = "-"
_NEXT = "\n## Heads"  # the table of peer_heads.py


def _count(kind: str) -> Counter[str]:
    """The welds of an architecture, by function."""
    torch.manual_seed(0)
    model = torchweld.fuse(models.make_kind(kind))
    welded = (row.becomes for row in torchweld.explain_fusion(model) if row.welded)
    found = (_FUNCTION.search(becomes) for becomes in welded)
    return Counter(match.group() for match in found if match)


def _read() -> tuple[list[str], dict[str, list[str]]]:
    """The page's releases, newest first, and each architecture's cells."""
    table = PAGE.read_text().split(_NEXT)[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return head[1:], {name.strip("`"): cells for name, *cells in rows}


RELEASES, ROWS = _read()
# The column of this release, or of the newest one that the page has.
COLUMN = RELEASES.index(RELEASE) if RELEASE in RELEASES else 0
KNOWN = {kind: cells[COLUMN] for kind, cells in ROWS.items() if cells[COLUMN] != _NONE}


@pytest.mark.filterwarnings("ignore")  # of the models
@pytest.mark.parametrize("kind", KNOWN)
def test_no_weld_is_lost(kind: str) -> None:
    expected = {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", KNOWN[kind])}
    assert expected
    found = _count(kind)
    assert {name: found[name] for name in expected if found[name] < expected[name]} == {}


def _write(kinds: list[str]) -> None:
    """Write this release's cells; rows without a weld in any release are left out."""
    releases = [RELEASE, *(release for release in RELEASES if release != RELEASE)]
    releases.sort(key=lambda release: [int(part) for part in release.split(".")], reverse=True)
    rows = {kind: dict(zip(RELEASES, cells, strict=True)) for kind, cells in ROWS.items()}
    for kind in kinds or models.list_names():
        try:
            counts = _count(kind)
        except (Exception, SystemExit) as error:  # models that cannot be made small
            print(f"{kind}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}")
            continue
        cell = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        rows.setdefault(kind, {})[RELEASE] = cell or _NONE
    text = PAGE.read_text()
    lines = [f"| architecture | {' | '.join(releases)} |", "|---|" + "--|" * len(releases)]
    for kind, cells in sorted(rows.items()):
        shown = [cells.get(release, _NONE) for release in releases]
        if set(shown) != {_NONE}:
            lines.append(f"| `{kind}` | {' | '.join(shown)} |")
    rest = _NEXT + text.partition(_NEXT)[2]
    PAGE.write_text(text[: text.index("| architecture")] + "\n".join(lines) + "\n" + rest)


if __name__ == "__main__":
    _write(sys.argv[1:])
