"""Rotary embeddings with a norm by warps with roles, under an imitation of Hopper."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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


_start = launch.start


def _imitate(launched: Any, options: dict[str, Any]) -> None:
    """Start a kernel of warps with roles; the interpreter has the others."""
    is_specialised = launched.kernel.fn.__name__.endswith("_specialised")
    (imitated_gluon.start if is_specialised else _start)(launched, options)


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that ran; the last tile is the fastest."""
    found: list[str] = []

    def start(launched: Any, options: dict[str, Any]) -> None:
        found.append(launched.kernel.fn.__name__)
        _imitate(launched, options)

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


class Drawn(NamedTuple):
    """Queries, keys, their weights, the tables of angles, positions, and the angles of each row."""

    sources: list[torch.Tensor | None]
    weights: list[torch.Tensor | None]
    tables: tuple[torch.Tensor, torch.Tensor]
    positions: torch.Tensor | None
    angles: tuple[torch.Tensor, torch.Tensor]

    def factors(self, plus_one: bool) -> list[torch.Tensor | None]:
        return [w if w is None or not plus_one else w.double() + 1 for w in self.weights]


def _draw_call(
    *,
    dtype: torch.dtype = torch.bfloat16,
    heads: tuple[int, int | None] = (2, 1),
    tokens: int = 40,
    full: bool = True,
    positions: bool = False,
    weighted: bool = True,
    transposed: bool = True,
) -> Drawn:
    def make(count: int | None) -> torch.Tensor | None:
        if count is None:
            return None
        if transposed:
            return _draw(2, tokens, count, 128).to(dtype).transpose(1, 2)
        return _draw(2, count, tokens, 128).to(dtype)

    angle = _draw(tokens + 3, 128 if full else 64)
    tables, at = (angle.cos(), angle.sin()), None
    if positions:
        made = torch.Generator().manual_seed(0)
        at = torch.randint(0, tokens + 3, (2, 1, tokens), generator=made)
        angles = tables[0][at], tables[1][at]
    else:
        angles = tables = tables[0][:tokens], tables[1][:tokens]
    kind = torch.float32 if dtype == torch.bfloat16 else dtype
    weights = [_draw(128).to(kind) if weighted else None, _draw(128).to(kind) if weighted else None]
    return Drawn([make(count) for count in heads], weights, tables, at, angles)


def _find_unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def _worst(
    *,
    dtype: torch.dtype = torch.bfloat16,
    plus_one: bool = False,
    rounded: str = "none",
    **of_call: Any,
) -> float:
    """The largest error of the results, in units of what their roundings allow."""
    drawn = _draw_call(dtype=dtype, **of_call)
    how = (128, False, False, EPS, plus_one, rounded, None)
    given = (*drawn.sources, *drawn.tables, drawn.positions, *drawn.weights)
    found = rotary.rotary_embedding(*given, *how)
    allowed = {"none": 1.0, "result": 2.0, "both": 3.0}[rounded] * _find_unit(dtype)
    worst = 0.0
    each = zip(drawn.sources, drawn.factors(plus_one), found[:2], found[2:], strict=True)
    for source, factor, y, rstd in each:
        if source is None:
            continue
        exact, scale, statistics = _rotate_exactly(source, factor, *drawn.angles)
        # A result is rounded, and before it each of its two terms.
        error = (y.double() - exact).abs() / (1.01 * allowed * scale + 1e-6)
        worst = max(worst, error.nan_to_num(math.inf).max().item())
        error = (rstd.double() - statistics).abs() / (2.0**-20 * statistics)
        worst = max(worst, error.nan_to_num(math.inf).max().item())
    return worst


def _differentiate(
    drawn: Drawn, grads: list[torch.Tensor | None], *how: Any, needs: bool = True
) -> tuple[torch.Tensor, ...]:
    scales = [
        None if x is None else (x.double().square().mean(-1) + EPS).rsqrt().float()
        for x in drawn.sources
    ]
    given = (*drawn.sources, *drawn.tables, drawn.positions, *drawn.weights)
    plus_one, rounded = how
    rest = (128, False, False, EPS, plus_one, rounded, None, *scales, needs, needs)
    y, key = grads
    assert y is not None
    return rotary.rotary_embedding_backward(
        y, y.new_empty(0) if key is None else key, *given, *rest
    )


def _worst_gradient(
    *,
    dtype: torch.dtype = torch.bfloat16,
    plus_one: bool = False,
    rounded: str = "none",
    **of_call: Any,
) -> float:
    """The largest error of the gradients, in units of what one rounding and their sums allow."""
    drawn = _draw_call(dtype=dtype, **of_call)
    # Of another layout than the inputs.
    grads = [None if x is None else _draw(*x.shape).flip(2).to(dtype) for x in drawn.sources]
    has_weights = drawn.weights[0] is not None
    found = _differentiate(drawn, grads, plus_one, rounded, needs=has_weights)
    worst, unit = 0.0, _find_unit(dtype)
    each = zip(drawn.sources, drawn.factors(plus_one), grads, found[:2], found[2:], strict=True)
    for source, factor, grad, of_x, of_weight in each:
        if source is None or grad is None:
            continue
        x = source.double().requires_grad_()
        w = torch.ones(128) if factor is None else factor
        w = w.double().requires_grad_()
        y, _, rstd = _rotate_exactly(x, w, *drawn.angles)
        exact, exact_sum = torch.autograd.grad(y, (x, w), grad.double(), retain_graph=True)
        # The terms' magnitudes, of which none cancels another.
        normed = (x * rstd.unsqueeze(-1)).abs()
        size = grad.double().abs()
        cos, sin = (t.double().abs().amax(-1, keepdim=True) for t in drawn.angles)
        turned = size * cos + size.roll(64, -1) * sin
        scaled = turned * w.abs()
        terms = scaled + normed * (scaled * normed).mean(-1, keepdim=True)
        slack = 2.0**-20 * terms * rstd.unsqueeze(-1)
        error = (of_x.double() - exact).abs() / (1.01 * unit * exact.abs() + slack)
        worst = max(worst, error.nan_to_num(math.inf).max().item())
        if factor is None:
            continue
        unit_of_sum = _find_unit(of_weight.dtype)
        sums = (turned * normed).sum((0, 1, 2))
        error = (of_weight.double() - exact_sum).abs()
        error /= 1.01 * unit_of_sum * exact_sum.abs() + 2.0**-20 * sums
        worst = max(worst, error.nan_to_num(math.inf).max().item())
    return worst


CASES: dict[str, dict[str, Any]] = {
    "keys with fewer heads, tiles that end behind the tokens": {},
    "float16": {"dtype": torch.float16, "rounded": "both"},
    "one stream": {"heads": (4, None)},
    "a program without rows of queries": {"heads": (1, 2), "tokens": 32},
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


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, started: list[str]) -> None:
    assert _worst_gradient(**CASES[name]) <= 1
    has_sums = CASES[name].get("weighted", True)
    assert started == ["differentiate_specialised", *["_add_chunks"] * has_sums]


def test_sums_have_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program adds its rows one after another, so that two runs have the same bits."""
    drawn = _draw_call(tokens=250)
    grads = [None if x is None else _draw(*x.shape).bfloat16() for x in drawn.sources]
    found = [_differentiate(drawn, grads, False, "none") for _ in range(2)]
    assert all(map(torch.equal, *found))


def test_gradients_of_bad_positions_are_nan(started: list[str]) -> None:
    drawn = _draw_call(positions=True, heads=(2, None))
    assert drawn.positions is not None
    drawn.positions[0, 0, 3], drawn.positions[1, 0, 33] = 43, -1
    x = drawn.sources[0]
    assert x is not None
    of_x, _, of_weight, _ = _differentiate(drawn, [torch.ones_like(x), None], False, "none")
    bad = torch.zeros(2, 2, 40, 128, dtype=torch.bool)
    bad[0, :, 3] = bad[1, :, 33] = True
    assert torch.equal(of_x.isnan(), bad)
    assert of_weight.isnan().all()
    assert started == ["differentiate_specialised", "_add_chunks"]


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

# Of what both directions do; a text may stand once in each.
SHARED: dict[str, tuple[Any, ...]] = {
    "a slot is filled before it was read": (
        "mbarrier.wait(free.index(slot), (step // STAGES & 1) ^ 1)",
        "pass",
    ),
    "a tile is read before it came": (
        "mbarrier.wait(ready.index(slot), step // STAGES & 1)",
        "pass",
        2,
    ),
    "a slot is never given back": ("mbarrier.arrive(free.index(slot), count=1)", "pass", 2),
    "half of the bytes": ("ROWS * 2 * HALF * 2 * SOURCES", "ROWS * HALF * 2 * SOURCES"),
    "no fence": ("    fence_async_shared()\n    for half", "    for half", 2),
    "a program ends before its stores": ("    wait_for_stores(0)\n\n", "\n", 2),
    "the other half": (
        "[batch, token, head, half * HALF], source",
        "[batch, token, head, 0], source",
        2,
    ),
    "keys' tiles are counted with those of queries": ("own = tile - tiles", "own = tile"),
}
FORWARD = SHARED | {
    "results are overwritten while they are stored": (
        "    wait_for_stores(0)\n    results",
        "    results",
    ),
    "a mean of half": ("squares * (0.5 / HALF)", "squares * (1.0 / HALF)"),
    "one rounding for both": ("ROUNDED > 1)", "ROUNDED > 2)", 2),
}
BACKWARD = SHARED | {
    "results are overwritten while they are stored": (
        "        if part == 0:\n            wait_for_stores(0)\n",
        "",
    ),
    "a slot is given back before its last rows": ("part == _PARTS - 1", "part == 0"),
    "the first rows twice": ("4 * slot).slice(part * OWN, OWN)", "4 * slot).slice(0, OWN)"),
    "results in one place": (
        "results.index(1).slice(part * OWN, OWN)",
        "results.index(1).slice(0, OWN)",
    ),
    "scales of the first rows": ("row = own + part * OWN", "row = own"),
    "a rotation forward": ("u1 * cos[0] + u2 * sin[1]", "u1 * cos[0] - u2 * sin[1]"),
    "sums of weighted gradients": (
        "first_sum += g1 * first",
        "first_sum += g1 * weight[0] * first",
    ),
    "a mean of half": ("gl.sum(g2 * second, 1)) * (0.5", "gl.sum(g2 * second, 1)) * (1.0"),
    "no mean": ("g2 - second * mean[:, None]", "g2"),
    "keys' steps begin again": ("begin = program + step * programs - tiles", "begin = program"),
    "a slot of keys begins again": (
        "step, begin, all_tiles - tiles",
        "0 * step, begin, all_tiles - tiles",
    ),
    "sums of another program": ("gl.program_id(0) * 2 * HALF + column", "column"),
    "sums of the wrong half": (
        "start + HALF, gl.sum(sums[1], 0)",
        "start + HALF, gl.sum(sums[0], 0)",
    ),
}


@pytest.mark.parametrize(
    ("name", "direction"),
    [*((name, "forward") for name in FORWARD), *((name, "backward") for name in BACKWARD)],
)
def test_planted_faults_are_found(
    name: str, direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With more tiles than slots for each program."""
    fault = (FORWARD if direction == "forward" else BACKWARD)[name]
    planted: types.ModuleType = imitated_gluon.plant(
        Path(rotary_specialised.__file__).read_text(),
        fault,
        tmp_path,
        "torchweld.triton_kernels.planted",
    )
    for kernel in ("rotate_specialised", "differentiate_specialised"):
        monkeypatch.setattr(rotary_specialised, kernel, getattr(planted, kernel))

    def start(launched: Any, options: dict[str, Any]) -> None:
        monkeypatch.setitem(sys.modules, planted.__name__, planted)
        _imitate(launched, options)

    monkeypatch.setattr(launch, "start", start)
    how: dict[str, Any] = {"tokens": 250, "dtype": torch.float16}
    if name == "one rounding for both":
        assert _count_unequal("both") > 0
    else:
        measure = _worst if direction == "forward" else _worst_gradient
        assert imitated_gluon.is_found(lambda: measure(**how), 1)


@pytest.mark.parametrize("measure", [_worst, _worst_gradient])
def test_without_a_fault_nothing_is_found(measure: Callable[..., float]) -> None:
    assert not imitated_gluon.is_found(lambda: measure(tokens=250, dtype=torch.float16), 1)
