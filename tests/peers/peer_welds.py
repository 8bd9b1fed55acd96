"""What fuse() welds in each architecture of transformers is what docs/welds.md says.

As a script, it writes the column of the installed release of transformers, or the cells of the
architectures that it is given.
"""

from __future__ import annotations

import copy
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers

import torchweld
from torchweld.fusion.graph.regions import Region, Root

PAGE = Path(__file__).parents[2] / "docs" / "welds.md"
RELEASE = ".".join(transformers.__version__.split(".")[:2])
_NONE = "-"
_NEXT = "\n## Heads"  # the table of peer_heads.py


def _count(kind: str) -> Counter[str]:
    """The welds of a training step of an architecture, by the op, in all layers."""
    torch.manual_seed(0)
    model = models.make_kind(kind)
    torch.compiler.reset()
    torchweld.fuse(model)
    words = torch.arange(32).view(2, 16) % 100 + 3
    model(input_ids=words, labels=words)
    counts: Counter[str] = Counter()
    for cls, modules in Counter(map(type, model.modules())).items():
        for slot in cls.weld_captures.slots.values() if issubclass(cls, Region) else ():
            ops = Counter(placed.op for placed in slot.placed if not placed.reason)
            # Layers share graphs.
            times = 1 if issubclass(cls, Root) else max(1, modules // max(1, slot.graphs))
            counts.update({op: times * count for op, count in ops.items() if not slot.off})
    return counts


def _read() -> tuple[list[str], dict[str, list[str]]]:
    """The page's releases, newest first, and each architecture's cells."""
    table = PAGE.read_text().split(_NEXT)[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return head[1:], {name.strip("`"): cells for name, *cells in rows}


HEADS, ROWS = _read()


def _list_known() -> list[tuple[str, str]]:
    """The cells of this release, or of the newest one that the page has."""
    at = HEADS.index(RELEASE) if RELEASE in HEADS else 0
    return [(kind, row[at]) for kind, row in ROWS.items() if row[at] != _NONE]


@pytest.mark.filterwarnings("ignore")  # of the models
@pytest.mark.parametrize(("kind", "cell"), _list_known())
def test_no_weld_is_lost(kind: str, cell: str) -> None:
    expected = {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", cell)}
    assert expected
    found = _count(kind)
    assert {name: found[name] for name in expected if found[name] < expected[name]} == {}


# What has no float64, or no gradients in eager torch: casts to float32 within, writes that autograd
# refuses, NaN.
_WITHOUT_A_TRUTH = ("fsmt", "inkling2_loop_text", "inkling2_text", "mra", "rwkv", "xglm")
_WITHOUT_NUMBERS = ("led", "longformer")
# In transformers 4.56 masks have float64's smallest number, or experts cast.
_OF_THE_OLDEST = {
    *("ernie4_5_moe", "glm4_moe", "mpt", "mvp", "nllb-moe", "open-llama"),
    *("seamless_m4t", "seamless_m4t_v2", "trocr"),
}


@pytest.mark.filterwarnings("ignore")  # of the models
@pytest.mark.parametrize("kind", [kind for kind, _ in _list_known()])
def test_gradients_are_as_exact_as_eagers(kind: str) -> None:
    """In evaluation, since a weld drops other elements. Of 175 architectures the median of the
    errors' ratio was 1.00, and the largest 1.24."""
    has_no_truth = {*_WITHOUT_A_TRUTH, *_WITHOUT_NUMBERS}
    if kind in has_no_truth | (_OF_THE_OLDEST if RELEASE == "4.56" else set()):
        pytest.skip("eager torch has no gradients to compare with in float64")
    torch.manual_seed(0)
    torch.compiler.reset()
    plain = models.make_kind(kind).eval().float()
    exact: Any = copy.deepcopy(plain).double()
    fused = torchweld.fuse(copy.deepcopy(plain))
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")  # torch's grouped products have no float64
    with torchweld.use_backend("cpu", "eager"):
        truth, expected, found = map(_list_gradients, (exact, plain, fused))
    assert truth.keys() == expected.keys() == found.keys()
    errors = [
        sum(float((each[name] - truth[name]).square().sum()) for name in truth)
        for each in (found, expected)
    ]
    assert errors[0] <= 3**2 * errors[1]


def _list_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    words = torch.arange(32).view(2, 16) % 100 + 3
    model(input_ids=words, labels=words).loss.backward()
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


def _write(kinds: list[str]) -> None:
    """Write this release's cells; rows without a weld in any release are left out."""
    names = list(dict.fromkeys((*HEADS, RELEASE)))
    names.sort(key=lambda name: [-int(part) for part in name.split(".")])
    rows = {kind: dict(zip(HEADS, cells, strict=True)) for kind, cells in ROWS.items()}
    for kind in kinds or models.list_names():
        try:
            counts = _count(kind)
        except (Exception, SystemExit) as error:  # models that cannot be made small
            print(f"{kind}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}")
            continue
        cell = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        rows.setdefault(kind, {})[RELEASE] = cell or _NONE
    text = PAGE.read_text()
    lines = [f"| architecture | {' | '.join(names)} |", "|---|" + "--|" * len(names)]
    for kind, cells in sorted(rows.items()):
        shown = [cells.get(name, _NONE) for name in names]
        if set(shown) != {_NONE}:
            lines.append(f"| `{kind}` | {' | '.join(shown)} |")
    rest = _NEXT + text.partition(_NEXT)[2]
    PAGE.write_text(text[: text.index("| architecture")] + "\n".join(lines) + "\n" + rest)


if __name__ == "__main__":
    _write(sys.argv[1:])
