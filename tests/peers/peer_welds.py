"""What fuse() welds in each architecture of transformers is what docs/welds.md says.

As a script, it writes the columns of the installed release of transformers, or the cells of
the architectures that it is given; after `--by trial` or `--by graph` only those of one way.
"""

from __future__ import annotations

import itertools
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
from torchweld.fusion.graph.regions import Region, Root

PAGE = Path(__file__).parents[2] / "docs" / "welds.md"
RELEASE = ".".join(transformers.__version__.split(".")[:2])
_FUNCTION = re.compile("|".join(sorted(vars(functional), key=len, reverse=True)))
_NONE = "-"
_NEXT = "\n## Heads"  # the table of peer_heads.py


def _count(kind: str, way: str = "trial") -> Counter[str]:
    """The welds of an architecture, by function."""
    torch.manual_seed(0)
    model = models.make_kind(kind)
    if way == "graph":
        return _count_captured(model)
    torchweld.fuse(model)
    welded = [row.becomes for row in torchweld.explain_fusion(model) if row.welded]
    found = (_FUNCTION.search(becomes) for becomes in welded)
    return Counter(match.group() for match in found if match)


def _count_captured(model: torch.nn.Module) -> Counter[str]:
    """The welds of a training step, by the op, in all layers."""
    torch.compiler.reset()
    torchweld.fuse(model, by="graph")
    words = torch.arange(32).view(2, 16) % 100 + 3
    model(input_ids=words, labels=words)
    counts: Counter[str] = Counter()
    for kind, modules in Counter(map(type, model.modules())).items():
        for slot in kind.weld_captures.slots.values() if issubclass(kind, Region) else ():
            ops = Counter(placed.op for placed in slot.placed if not placed.reason)
            # Layers share graphs.
            times = 1 if issubclass(kind, Root) else max(1, modules // max(1, slot.graphs))
            counts.update({op: times * count for op, count in ops.items() if not slot.off})
    return counts


def _read() -> tuple[list[str], dict[str, list[str]]]:
    """The page's releases, newest first, and each architecture's cells."""
    table = PAGE.read_text().split(_NEXT)[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return head[1:], {name.strip("`"): cells for name, *cells in rows}


def _name(release: str, way: str) -> str:
    """The head of a column."""
    return release if way == "trial" else f"{release} by graph"


HEADS, ROWS = _read()


def _list_known() -> list[tuple[str, str, str]]:
    """The cells of this release, or of the newest one that the page has."""
    release = RELEASE if RELEASE in HEADS else HEADS[0]
    known = []
    for way in ("trial", "graph"):
        if (name := _name(release, way)) in HEADS:
            cells = ((kind, row[HEADS.index(name)]) for kind, row in ROWS.items())
            known += [(kind, way, cell) for kind, cell in cells if cell != _NONE]
    return known


@pytest.mark.filterwarnings("ignore")  # of the models
@pytest.mark.parametrize(("kind", "way", "cell"), _list_known())
def test_no_weld_is_lost(kind: str, way: str, cell: str) -> None:
    expected = {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", cell)}
    assert expected
    found = _count(kind, way)
    assert {name: found[name] for name in expected if found[name] < expected[name]} == {}


def _write(kinds: list[str], ways: list[str]) -> None:
    """Write this release's cells; rows without a weld in any release are left out."""
    names = list(dict.fromkeys((*HEADS, *(_name(RELEASE, way) for way in ways))))
    names.sort(key=lambda name: [-int(part) for part in name.split()[0].split(".")])
    rows = {kind: dict(zip(HEADS, cells, strict=True)) for kind, cells in ROWS.items()}
    for kind, way in itertools.product(kinds or models.list_names(), ways):
        try:
            counts = _count(kind, way)
        except (Exception, SystemExit) as error:  # models that cannot be made small
            print(f"{kind}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}")
            continue
        cell = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        rows.setdefault(kind, {})[_name(RELEASE, way)] = cell or _NONE
    text = PAGE.read_text()
    lines = [f"| architecture | {' | '.join(names)} |", "|---|" + "--|" * len(names)]
    for kind, cells in sorted(rows.items()):
        shown = [cells.get(name, _NONE) for name in names]
        if set(shown) != {_NONE}:
            lines.append(f"| `{kind}` | {' | '.join(shown)} |")
    rest = _NEXT + text.partition(_NEXT)[2]
    PAGE.write_text(text[: text.index("| architecture")] + "\n".join(lines) + "\n" + rest)


if __name__ == "__main__":
    given = sys.argv[1:]
    if given[:1] == ["--by"]:
        _write(given[2:], given[1:2])
    else:
        _write(given, ["trial", "graph"])
