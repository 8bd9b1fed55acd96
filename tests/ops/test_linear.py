"""torch's linear in 16 bits, by oneDNN or by float32 GEMMs, and the transposing kernel."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional

import torchweld
from oracle import Pool
from seams import splits_backwards
from torchweld.ops.gemm import gemm, product

TRANSPOSED = torch.ops.torchweld.transposed.cpu
MIRROR = torch.ops.torchweld.mirror_.cpu
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
# Rows, in_features, out_features: the gradient is smaller than x and the result, and larger.
SIZES = pytest.mark.parametrize("sizes", [(96, 200, 40), (200, 24, 136)], ids=str)


@pytest.fixture(autouse=True)
def _small_ones(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve small inputs too, on every CPU."""
    monkeypatch.setattr(gemm, "_SMALLEST", 0)
    monkeypatch.setattr(product, "_SMALLEST", 0)
    monkeypatch.setattr(gemm, "_PRODUCTS_OF_AN_ELEMENT", 0)
    monkeypatch.setattr(gemm, "_has_amx", lambda: True)
    with torchweld.use_backend("cpu"):
        yield


# --- The kernel -----------------------------------------------------------------------------------


@every_dtype
def test_transposed(dtype: torch.dtype) -> None:
    """Sizes around a tile's and a block's, all bit patterns, and no rows or columns."""
    sizes = (0, 1, 7, 8, 9, 15, 63, 64, 65, 71, 72, 127, 128, 200)
    bits = torch.arange(2**16).to(torch.int16)
    for rows, columns in itertools.product(sizes, sizes):
        x = bits.roll(rows * columns)[: rows * columns].view(rows, columns)
        y = TRANSPOSED(x.view(dtype))
        assert y.is_contiguous()
        assert torch.equal(y.view(torch.int16), x.t())


@every_dtype
def test_transposed_in_any_layout(dtype: torch.dtype) -> None:
    x = torch.randn(150, 300).to(dtype)
    for view in (x.t(), x[1:, 3:], x[::2, ::3], x[:1].expand(70, 300)):
        assert torch.equal(TRANSPOSED(view), view.t())


@every_dtype
def test_mirror(dtype: torch.dtype) -> None:
    """The lower triangle's bits, also above the diagonal."""
    for size in (0, 1, 2, 7, 8, 9, 63, 64, 65, 72, 127, 128, 200):
        bits = torch.arange(size * size).to(torch.int16).view(size, size)
        matrix = bits.clone()
        MIRROR(matrix.view(dtype))
        assert torch.equal(matrix, bits.tril() + bits.tril(-1).t())


def test_mirror_says_what_it_takes() -> None:
    for x in (torch.ones(2, 2), torch.ones(2, 3).half(), torch.ones(4, 4).half()[:2, :2]):
        with pytest.raises(RuntimeError, match="contiguous square of 16-bit elements"):
            MIRROR(x)


def test_transposed_says_what_it_takes() -> None:
    for x in (torch.ones(2, 3), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, 3).int()):
        with pytest.raises(RuntimeError, match=r"not a matrix of 16-bit|dtype is not one"):
            TRANSPOSED(x)
    torch.library.opcheck(TRANSPOSED, (torch.ones(2, 3, dtype=torch.bfloat16),))


# --- The layer ------------------------------------------------------------------------------------


def _inputs(sizes: tuple[int, int, int], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    rows, width, out = sizes
    shapes = ((rows // 8, 8, width), (out, width), (out,))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


@every_dtype
@SIZES
@pytest.mark.parametrize("bias", [True, False])
def test_rounds_once(sizes: tuple[int, int, int], dtype: torch.dtype, bias: bool) -> None:
    """The result and each gradient, in any layout of x."""
    x, *parameters = _inputs(sizes, dtype)[: 3 if bias else 2]
    ours, rounding = Pool(), Pool()
    for layout in (lambda t: t, lambda t: t.transpose(0, 1), lambda t: t.mT.contiguous().mT):
        given = [layout(x.detach()).requires_grad_(), *parameters]
        found = _with_gradients(gemm.linear, given)
        exact = _with_gradients(functional.linear, [t.detach().double() for t in given])
        for value, truth in zip(found, exact, strict=True):
            assert value.dtype is dtype
            ours.add(value - truth, truth)
            rounding.add(truth.to(dtype) - truth, truth)
    print(f"{ours.rms / rounding.rms:.3f} of what rounding costs")
    assert ours.rms <= 1.1 * rounding.rms


def _with_gradients(
    linear: Callable[..., torch.Tensor], given: list[torch.Tensor]
) -> list[torch.Tensor]:
    given = [t.requires_grad_() for t in given]
    y = linear(*given)
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape).bfloat16()  # exact in all dtypes
    return [y, *torch.autograd.grad(y, given, grad.to(y.dtype))]


@SIZES
def test_what_is_saved(sizes: tuple[int, int, int]) -> None:
    """It saves only the other factor of each required gradient."""
    x, weight, bias = _inputs(sizes)
    for frozen, expected in ((x, {x}), (weight, {weight}), (bias, {x, weight})):
        saved: set[torch.Tensor] = set()
        frozen.requires_grad_(False)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, s=saved: s.add(t) or t, lambda t: t
        ):
            y = gemm.linear(x, weight, bias)
        leaves = [t for t in (x, weight, bias) if t.requires_grad]
        found = torch.autograd.grad(y.sum(), leaves)
        assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in expected}
        assert [g.shape for g in found] == [t.shape for t in leaves]
        frozen.requires_grad_()


@SIZES
def test_second_derivatives(sizes: tuple[int, int, int]) -> None:
    """They have the bits of torch's own ops."""
    found: list[Any] = []
    expected: list[Any] = []
    for linear, results in ((gemm.linear, found), (functional.linear, expected)):
        torch.manual_seed(0)
        leaves = _inputs(sizes)
        y = linear(*leaves)
        first = torch.autograd.grad(y, leaves, torch.ones_like(y), create_graph=True)
        results += torch.autograd.grad(first[0].sum() + first[1].sum(), leaves[:2])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@SIZES
@splits_backwards
def test_a_split_backward(sizes: tuple[int, int, int]) -> None:
    """x's gradient first and the parameters' gradients later, with the same bits."""
    x, *parameters = _inputs(sizes)
    expected = torch.autograd.grad(gemm.linear(x, *parameters).square().sum(), [x, *parameters])
    loss = gemm.linear(x, *parameters).square().sum()
    (grad_x,), groups = stage_backward_input([loss], None, [x], iter(parameters))
    assert all(p.grad is None for p in parameters)
    stage_backward_weight(iter(parameters), groups)
    found = [grad_x, *[p.grad for p in parameters]]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_torch_raises_for_wrong_shapes() -> None:
    x, weight, bias = _inputs((96, 200, 40))
    for given in ((x[..., 1:], weight), (x, weight, bias[1:]), (x, weight.float())):
        with pytest.raises(RuntimeError):
            gemm.linear(*given)
