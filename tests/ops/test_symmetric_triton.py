"""Symmetric products in Triton's interpreter, or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchweld
from selection import TRITON_DEVICE as DEVICE
from selection import of_triton
from torchweld.dispatch.warm import plans
from torchweld.ops.optimizer import orthogonal

triton = pytest.importorskip("triton")
tl = triton.language
symmetric = pytest.importorskip("torchweld.triton_kernels.symmetric")

pytestmark = of_triton


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).half().to(DEVICE)


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
