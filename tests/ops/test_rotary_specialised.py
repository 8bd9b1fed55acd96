"""Rotary embeddings with a norm by warps with roles, under an imitation of Hopper."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import imitated_gluon
from conftest import PLACES
from torchweld.triton_kernels import launch, rotary, rotary_specialised, tiled

pytestmark = pytest.mark.skipif(
    PLACES["interpreter"][2] is not None, reason=str(PLACES["interpreter"][2])
)
EPS = 1e-6


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that ran; the last tile is the fastest."""
    found: list[str] = []

    def start(launched: Any, options: dict[str, Any]) -> None:
        found.append(launched.kernel.fn.__name__)
        imitated_gluon.start(launched, options)

    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(tiled, "choose", lambda on, asked: asked.tiles[-1])
    monkeypatch.setattr(rotary_specialised, "runs_on", lambda device: True)
    monkeypatch.setattr(rotary_specialised, "processors", lambda device: 1)
    return found


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _rotate_exactly(
    x: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
) -> list[torch.Tensor]:
    """The result, the sum of its terms' magnitudes and rstd in float64, of angles for each row."""
    wide = x.double()
    rstd = (wide.square().mean(-1) + EPS).rsqrt()
    normed = wide * rstd.unsqueeze(-1)
    normed = normed if weight is None else normed * weight.double()
    first, second = normed.chunk(2, -1)
    (cos1, cos2), (sin1, sin2) = (
        (t.double().chunk(2, -1) if t.shape[-1] == x.shape[-1] else (t.double(), t.double()))
        for t in (cos, sin)
    )
    terms = (first * cos1, -second * sin1), (second * cos2, first * sin2)
    y = torch.cat([one + other for one, other in terms], -1)
    return [y, torch.cat([one.abs() + other.abs() for one, other in terms], -1), rstd]


def _worst(
    *,
    dtype: torch.dtype = torch.bfloat16,
    heads: tuple[int, int | None] = (2, 1),
    tokens: int = 40,
    full: bool = True,
    positions: bool = False,
    plus_one: bool = False,
    rounded: str = "none",
    weighted: bool = True,
    transposed: bool = True,
) -> float:
    """The largest error of the results, in units of what their roundings allow."""

    def make(count: int | None) -> torch.Tensor | None:
        if count is None:
            return None
        if transposed:
            return _draw(2, tokens, count, 128).to(dtype).transpose(1, 2)
        return _draw(2, count, tokens, 128).to(dtype)

    x, key = (make(count) for count in heads)
    angle = _draw(tokens + 3, 128 if full else 64)
    cos, sin = angle.cos(), angle.sin()
    at = None
    if positions:
        at = torch.randint(
            0, tokens + 3, (2, 1, tokens), generator=torch.Generator().manual_seed(0)
        )
        tables = cos, sin
        cos, sin = (table[at] for table in tables)
    else:
        cos, sin = cos[:tokens], sin[:tokens]
        tables = cos, sin
    kind = torch.float32 if dtype == torch.bfloat16 else dtype
    weights = [_draw(128).to(kind) if weighted else None, _draw(128).to(kind) if weighted else None]
    how = (128, False, False, EPS, plus_one, rounded, None)
    found = rotary.rotary_embedding(x, key, *tables, at, *weights, *how)
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    allowed = {"none": 1.0, "result": 2.0, "both": 3.0}[rounded] * unit
    worst = 0.0
    for source, weight, y, rstd in zip((x, key), weights, found[:2], found[2:], strict=True):
        if source is None:
            continue
        factor = weight if weight is None or not plus_one else weight.double() + 1
        exact, scale, statistics = _rotate_exactly(source, factor, cos, sin)
        # A result is rounded, and before it each of its two terms.
        error = (y.double() - exact).abs() / (1.01 * allowed * scale + 1e-6)
        worst = max(worst, error.nan_to_num(math.inf).max().item())
        error = (rstd.double() - statistics).abs() / (2.0**-20 * statistics)
        worst = max(worst, error.nan_to_num(math.inf).max().item())
    return worst


CASES: dict[str, dict[str, Any]] = {
    "keys with fewer heads, tiles that end behind the tokens": {},
    "float16": {"dtype": torch.float16, "rounded": "both"},
    "one stream": {"heads": (4, None)},
    "a head for each of 32 tokens": {"heads": (1, 1), "tokens": 33},
    "one token a tile": {"heads": (32, 16), "tokens": 3},
    "more heads than a tile": {"heads": (96, 2), "tokens": 17},
    "tokens are adjacent": {"transposed": False, "tokens": 32},
    "half of the angles": {"full": False},
    "positions": {"positions": True, "rounded": "result"},
    "positions of one token a tile": {"positions": True, "heads": (32, 1), "tokens": 33},
    "Gemma's weights": {"plus_one": True, "rounded": "both"},
    "no weights": {"weighted": False, "rounded": "both"},
}


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, started: list[str]) -> None:
    assert _worst(**CASES[name]) <= 1
    assert started == ["rotate_specialised"]


def _count_unequal(rounded: str) -> float:
    """The share of results, not turned, whose bits are not those of torch's roundings."""
    x, weight = _draw(1, 32, 2, 128).bfloat16().transpose(1, 2), _draw(128).bfloat16().float()
    cos, sin = torch.ones(32, 64), torch.zeros(32, 64)
    how = (128, False, False, EPS, False, rounded, None)
    y, _, rstd, _ = rotary.rotary_embedding(x, None, cos, sin, None, weight, None, *how)
    normed = x.float() * rstd.unsqueeze(-1)
    normed = normed.bfloat16().float() if rounded == "both" else normed
    return (y != (normed * weight).bfloat16()).double().mean().item()


@pytest.mark.parametrize("rounded", ["result", "both"])
def test_a_norm_is_rounded_as_asked(rounded: str) -> None:
    assert _count_unequal(rounded) == 0
    assert _count_unequal("none") == _count_unequal("result")  # nothing follows that rounds


@pytest.mark.parametrize("heads", [2, 32])
def test_positions_without_a_row_give_nan(heads: int, started: list[str]) -> None:
    x, angle = _draw(1, 40, heads, 128).bfloat16().transpose(1, 2), _draw(5, 64)
    positions = torch.arange(40).view(1, 1, 40) % 4
    positions[..., 3], positions[..., 33] = 5, -1
    how = (128, False, False, EPS, False, "none", None)
    y, *_ = rotary.rotary_embedding(x, None, angle.cos(), angle.sin(), positions, None, None, *how)
    bad = torch.zeros(40, dtype=torch.bool)
    bad[3] = bad[33] = True
    assert torch.equal(y.isnan(), bad[:, None].expand_as(y))
    assert started == ["rotate_specialised"]


REFUSED: dict[str, Callable[[], tuple[torch.Tensor, int]]] = {
    "few tokens": lambda: (_draw(2, 2, 15, 128).half(), 128),
    "float32": lambda: (_draw(2, 2, 40, 128), 128),
    "a part is rotated": lambda: (_draw(2, 2, 40, 128).half(), 64),
    "heads of 64": lambda: (_draw(2, 2, 40, 64).half(), 64),
    "rows at odd places": lambda: (_draw(2, 2, 40, 132)[..., :128].half().as_strided(
        (2, 2, 40, 128), (2 * 40 * 132, 40 * 132, 132, 1)), 128),
    "an expanded batch": lambda: (_draw(1, 2, 40, 128).half().expand(2, -1, -1, -1), 128),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_rows_have_the_plain_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(launch, "start", lambda one, options: ran.append(one.kernel.fn.__name__))
    if name == "rows at odd places":
        base = torch.zeros(2, 2, 40, 132, dtype=torch.float16)
        x, rotated = base[..., :128], 128
    else:
        x, rotated = REFUSED[name]()
    angle = _draw(x.shape[2], rotated // 2)
    how = (rotated, False, False, EPS, False, "none", None)
    rotary.rotary_embedding(x, None, angle.cos(), angle.sin(), None, None, None, *how)
    assert ran == ["_rotate"]


# --- Planted faults ---

FAULTS: dict[str, tuple[Any, ...]] = {
    "a slot is filled before it was read": (
        "mbarrier.wait(free.index(slot), (step // STAGES & 1) ^ 1)",
        "pass",
    ),
    "a tile is read before it came": (
        "mbarrier.wait(ready.index(slot), step // STAGES & 1)",
        "pass",
    ),
    "a slot is never given back": ("mbarrier.arrive(free.index(slot), count=1)", "pass"),
    "half of the bytes": ("ROWS * 2 * HALF * 2", "ROWS * HALF * 2"),
    "results are overwritten while they are stored": (
        "    wait_for_stores(0)\n    results",
        "    results",
    ),
    "no fence": ("    fence_async_shared()\n    for half", "    for half"),
    "a program ends before its stores": ("    wait_for_stores(0)\n\n", "\n"),
    "the other half": (
        "[batch, token, head, half * HALF], source",
        "[batch, token, head, 0], source",
    ),
    "tiles of keys as those of queries": (
        "tile - tiles, k[4], tokens, ROWS // K_HEADS",
        "tile - tiles, k[4], tokens, ROWS // HEADS",
    ),
    "a mean of half": ("0.5 / HALF", "1.0 / HALF"),
    "one rounding for both": ("ROUNDED > 1)", "ROUNDED > 2)", 2),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more tiles than slots for each program."""
    source = Path(rotary_specialised.__file__).read_text()
    planted: types.ModuleType = imitated_gluon.plant(
        source, FAULTS[name], tmp_path, "torchweld.triton_kernels.planted"
    )
    monkeypatch.setattr(rotary_specialised, "rotate_specialised", planted.rotate_specialised)

    def start(launched: Any, options: dict[str, Any]) -> None:
        monkeypatch.setitem(__import__("sys").modules, planted.__name__, planted)
        imitated_gluon.start(launched, options)

    monkeypatch.setattr(launch, "start", start)
    how: dict[str, Any] = {"tokens": 250, "dtype": torch.float16}
    if name == "one rounding for both":
        assert _count_unequal("both") > 0
    else:
        assert imitated_gluon.is_found(lambda: _worst(**how), 1)
