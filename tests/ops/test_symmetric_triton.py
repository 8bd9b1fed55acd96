"""Symmetric products in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import imitated_gluon
import torchweld
from selection import TRITON_DEVICE as DEVICE
from selection import of_triton
from torchweld.dispatch.warm import plans
from torchweld.ops.optimizer import orthogonal

triton = pytest.importorskip("triton")
tl = triton.language
symmetric = pytest.importorskip("torchweld.triton_kernels.symmetric")
symmetric_specialised = pytest.importorskip("torchweld.triton_kernels.symmetric_specialised")
launch = pytest.importorskip("torchweld.triton_kernels.launch")

pytestmark = of_triton


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that ran, where the warp-specialised one does, in an imitation of its GPU."""
    if DEVICE != "cpu":
        pytest.skip("a GPU runs it")
    found: list[str] = []
    plain = launch.start

    def start(launched: Any, options: dict[str, Any]) -> Any:
        found.append(launched.kernel.fn.__name__)
        imitated = "gl" in launched.kernel.fn.__globals__
        return (imitated_gluon.start if imitated else plain)(launched, options)

    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(symmetric, "runs_on", lambda device: True)
    monkeypatch.setattr(symmetric_specialised, "processors", lambda device: 2)
    return found


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).half().to(DEVICE)


def _worst(shape: tuple[int, int, int], is_added: bool, *, two: bool = False) -> float:
    """The largest error of a product, in its bound; infinite if it is not symmetric."""
    x = _random(*shape)
    if is_added:
        x = x[:, :, : shape[1]] + x[:, :, : shape[1]].mT
    y = x.clone() if two else None
    alpha, beta = (2.0, 0.5) if is_added else (1.0, 0.0)
    found = symmetric.symmetric_product(x, y, alpha, beta)
    wide = x.double()
    exact = alpha * wide @ wide.mT + (beta * wide if is_added else 0)
    terms = alpha * wide.abs() @ wide.abs().mT + (beta * wide.abs() if is_added else 0)
    bound = 2.0**-11 * exact.abs() + (x.shape[2] + 2) * 2.0**-24 * terms + 2.0**-25
    error = ((found.double() - exact).abs() / bound).nan_to_num(torch.inf).max().item()
    return error if torch.equal(found, found.mT) else float("inf")


SIZES = [(1, 128, 64), (3, 136, 136), (2, 264, 264), (1, 520, 520), (2, 384, 384)]


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("shape", SIZES, ids=lambda shape: "x".join(map(str, shape)))
def test_products_by_specialised_warps(
    shape: tuple[int, int, int], is_added: bool, started: list[str]
) -> None:
    """Tiles that end in the next matrix, on and off the diagonal, more of them than programs."""
    shape = (*shape[:2], shape[1] if is_added else shape[2])
    assert _worst(shape, is_added) <= 1
    assert _worst(shape, is_added, two=True) <= 1
    assert started == 2 * ["symmetric_specialised"]


def test_rows_that_descriptors_do_not_take(started: list[str]) -> None:
    assert _worst((1, 129, 64), False) <= 1
    assert started == ["_symmetric"]


@pytest.mark.parametrize("size", [128, 256, 640, 2048, 2560, 3072, 3584, 4096, 5120, 8192])
def test_every_tile_has_a_place(size: int) -> None:
    """Each once: those with a number on or below the diagonal."""
    each, band = symmetric_specialised.count_tiles(size)
    found = [symmetric_specialised.place_of.fn(number, band) for number in range(each)]
    rows = 2 * -(-size // 256)
    assert sorted(found) == [(row, column) for row in range(rows) for column in range(row // 2 + 1)]


FAULTS: dict[str, tuple[Any, ...]] = {
    "no wait for factors": (
        "            mbarrier.wait(ready.index(slot), (step // STAGES) & 1)\n",
        "",
    ),
    "a slot is filled before its product has read it": (
        "warpgroup_mma_wait(1, deps=(total,))",
        "warpgroup_mma_wait(2, deps=(total,))",
    ),
    "no wait for what is added": ("            mbarrier.wait(is_added, done & 1)\n", ""),
    "what is added is fetched into a tile that is being finished": (
        "                mbarrier.wait(taken, (done & 1) ^ 1)\n",
        "",
    ),
    "no wait for a tile that is being finished": (
        "        else:\n            mbarrier.wait(taken, (done & 1) ^ 1)\n",
        "        else:\n",
    ),
    "no fence after a tile": (
        "        fence_async_shared()\n        mbarrier.arrive(dropped, count=1)\n",
        "        mbarrier.arrive(dropped, count=1)\n",
    ),
    "no wait for a tile": ("        mbarrier.wait(dropped, done & 1)\n", ""),
    "a tile is given back while it is copied out": (
        "        wait_for_stores(0)\n        mbarrier.arrive(taken, count=1)\n",
        "        mbarrier.arrive(taken, count=1)\n        wait_for_stores(0)\n",
    ),
    "a square is turned while the last one is copied out": (
        "                    wait_for_stores(0)\n",
        "",
    ),
    "squares are not turned": ("turned.permute((1, 0)).store(value)", "turned.store(value)"),
    "squares on the diagonal are not symmetric": ("gl.where(is_lower, value, mirrored)", "value"),
    "the diagonal is left out": ("if column <= row:", "if column < row:"),
    "squares are one another's": ("squares.index(part * HALVES + half)", "squares.index(part)"),
    "the next matrix's rows": (
        "            row = tile // each * size + row_tile * ROWS\n            column",
        "            row = row_tile * ROWS\n            column",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(
    fault: str, started: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = "torchweld.triton_kernels.symmetric_specialised"
    text = Path(str(symmetric_specialised.__file__)).read_text()
    module = imitated_gluon.plant(text, FAULTS[fault], tmp_path, name)
    monkeypatch.setitem(sys.modules, name, module)

    def measure() -> float:
        # Factors that commute but for rounding: only with two of them a tile is not symmetric.
        return max(_worst((2, 456, 456), added) for added in (False, True)) + _uneven()

    assert imitated_gluon.is_found(measure, 1)


def _uneven() -> float:
    """Nothing if a product of factors that commute but for rounding is symmetric."""
    gram = _random(1, 136, 64)
    gram = torch.bmm(gram, gram.mT) / 8
    square = torch.bmm(gram, gram) / 64
    found = symmetric.symmetric_product(gram, square, 1.0, 0.0)
    return 0.0 if torch.equal(found, found.mT) else float("inf")


def test_no_fault_is_found_where_none_is(started: list[str]) -> None:
    assert _uneven() == 0
    assert started == ["symmetric_specialised"]


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(1, 128, 64), (3, 130, 72), (2, 257, 136), (1, 5, 8), (2, 384, 8)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_products(shape: tuple[int, int, int], is_added: bool) -> None:
    """One rounding to 16 bits, and one in float32 for each term."""
    x = _random(*shape)
    if is_added:
        size = -(-shape[1] // 8) * 8
        x = _random(shape[0], size, size)
        x = x + x.mT
    alpha, beta = (2.0, 0.5) if is_added else (1.0, 0.0)
    found = orthogonal._SYMMETRIC.run(x, None, alpha, beta)
    wide = x.double()
    plus = wide if is_added else torch.zeros((), device=DEVICE)
    exact = alpha * wide @ wide.mT + beta * plus
    terms = alpha * wide.abs() @ wide.abs().mT + beta * plus.abs()
    bound = 2.0**-11 * exact.abs() + (x.shape[2] + 2) * 2.0**-24 * terms + 2.0**-25
    assert torch.all((found.double() - exact).abs() <= bound)
    assert torch.equal(found, found.mT)


def test_two_factors_that_commute() -> None:
    gram = _random(2, 200, 64) / 8
    gram = torch.bmm(gram, gram.mT)
    square = torch.bmm(gram, gram)
    found = orthogonal._SYMMETRIC.run(gram, square, 1.0, 0.0)
    exact = gram.double() @ square.double()
    assert (found.double() - exact).norm() <= 2.0**-9 * exact.norm()


@pytest.mark.parametrize("gram", [False, True])
def test_matrices_are_orthogonalised_by_it(gram: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As exactly as by full products: errors against float64 are of one size."""
    matrices = [_random(40, 72).float() + at for at in range(2)]
    settings: Any = {"gram": gram, "dtype": torch.float16, "eps": 1e-7, "scale": 1}
    results = []
    for fits in (False, True):
        calls: list[Any] = []
        monkeypatch.setattr(orthogonal, "has_descriptors", lambda _, fits=fits: fits)
        monkeypatch.setattr(orthogonal, "_TILES_FROM", 8)
        run = orthogonal._SYMMETRIC.run

        def count(*inputs: Any, run: Any = run, calls: Any = calls) -> Any:
            calls.append(inputs)
            return run(*inputs)

        with monkeypatch.context() as counting, torchweld.use_backend("triton", "eager"):
            counting.setattr(orthogonal._SYMMETRIC, "run", count)
            found = [m.clone() for m in matrices]
            orthogonal.orthogonalize(found, [orthogonal.QUINTIC] * 3, **settings)
        assert bool(calls) == fits
        results.append(found)
    exact = [m.double() for m in matrices]
    with torchweld.use_backend("eager"):
        orthogonal.orthogonalize(
            exact, [orthogonal.QUINTIC] * 3, **settings | {"dtype": torch.float64}
        )
    for wide, plain, tiled in zip(exact, *results, strict=True):
        assert (tiled - wide).norm() <= 1.5 * (plain - wide).norm() < 0.02 * wide.norm()


@pytest.mark.parametrize("gram", [False, True])
def test_batches_repeat_plans(gram: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second batch on, with the coefficients of all steps, no product is planned again."""
    planned, ran = [], []
    record, run = plans._record, plans.Plan.run
    monkeypatch.setattr(plans, "_record", lambda *a: planned.append(a) or record(*a))
    monkeypatch.setattr(plans.Plan, "run", lambda plan, x: ran.append(plan) or run(plan, x))
    monkeypatch.setattr(orthogonal, "has_descriptors", lambda _: True)
    monkeypatch.setattr(orthogonal, "_TILES_FROM", 8)
    steps, results = orthogonal.polar_express(5), []
    with torchweld.use_backend("triton", "eager"):
        for _ in range(2):
            before = len(planned)
            matrix = _random(24, 56).float()  # a size of this test alone
            settings: Any = {"gram": gram, "dtype": torch.float16, "eps": 1e-7, "scale": 1}
            orthogonal.orthogonalize([matrix], steps, **settings)
            results.append(matrix)
    assert before > 0
    assert len(planned) == before
    assert len(ran) >= 2 * len(steps)
    assert all(plan.steps[0].described for plan in ran)
    assert torch.equal(*results)


def test_larger_batches_take_products_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses them, and an answer for smaller ones serves all sizes."""
    monkeypatch.setattr(orthogonal, "has_descriptors", lambda _: True)

    def fits(*shape: int) -> bool:
        return orthogonal._fits_tiles(torch.empty(shape, dtype=torch.bfloat16, device="meta"))

    assert fits(1, 46336, 46336)
    assert not fits(1, 46344, 46344)
    assert not fits(1, 46344, 2048)  # a factor that fits, and a product that does not
    assert not fits(4, 16384, 32768)


def test_other_matrices_are_refused() -> None:
    x, product = _random(2, 16, 16), torch.ops.torchweld.symmetric_product.triton
    offset = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    for inputs, message in (
        ((x, x[:1]), "does not fit"),
        ((x[:, :8], None), "not square"),
        ((x, x.float()), "differ in dtype"),
        ((x, x.mT), "not contiguous"),
        ((offset, None), "multiples of 16 bytes"),
        ((x[:, :12, :12].contiguous(), None), "multiples of 16 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            product(*inputs, 1.0, 0.5)
    empty = x[:, :, :0]
    assert not product(empty, None, 1.0, 0.0).any()


@triton.jit
def _places(number_ptr, row_ptr, column_ptr, COUNT: tl.constexpr):  # type: ignore  # noqa
    at = tl.arange(0, COUNT)
    row, column = symmetric._place(tl.load(number_ptr + at))
    tl.store(row_ptr + at, row)
    tl.store(column_ptr + at, column)


def test_every_tile_below_the_diagonal_has_a_number() -> None:
    """The first, the second and the last tile of rows; a float32 root may be off by one."""
    rows = torch.arange(2**14, dtype=torch.int32, device=DEVICE)
    for columns in (rows * 0, (rows > 0).int(), rows):
        numbers = rows * (rows + 1) // 2 + columns
        found = [torch.empty_like(rows) for _ in range(2)]
        _places[(1,)](numbers, *found, COUNT=len(rows))
        assert torch.equal(found[0], rows)
        assert torch.equal(found[1], columns)
