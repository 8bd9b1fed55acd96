"""Normal forms of fusion/graph/normal.py compute the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchweld import numerics
from torchweld.fusion.graph import normal
from torchweld.fusion.graph.normal import aten

_VALUES = [0.0, -0.0, 1.0, -2.5, 1e-30, 3e38, 6e-8, 65504.0, float("inf"), float("nan")]


def _numbers(dtype: torch.dtype) -> torch.Tensor:
    odd = torch.tensor(_VALUES)
    usual = torch.randn(4086, generator=torch.Generator().manual_seed(0)) * 10
    return torch.cat((odd, usual)).to(dtype).view(64, 64)


# A rule, and calls that it rewrites.
CALLS: list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = [
    (normal.square, aten.pow.Tensor_Scalar, (2,), {}),
    (normal.square, aten.pow.Tensor_Scalar, (2.0,), {}),
    (normal.square, aten.square.default, (), {}),
    (normal.root, aten.pow.Tensor_Scalar, (-0.5,), {}),
    (normal.whole_number, aten.mul.Tensor, (3,), {}),
    (normal.whole_number, aten.add.Tensor, (3,), {}),
    (normal.whole_number, aten.add.Tensor, (3,), {"alpha": 2}),
    (normal.whole_number, aten.sub.Tensor, (3,), {}),
    (normal.whole_number, aten.div.Tensor, (3,), {}),
    *((normal.power_of_two, aten.div.Tensor, (2.0**n,), {}) for n in (-14, -3, 1, 5, 14)),
    (normal.power_of_two, aten.div.Tensor, (-8.0,), {}),
    (normal.dimension, aten.mean.dim, ([-1], True), {}),
    (normal.dimension, aten._softmax.default, (-1, False), {}),
    (normal.dimension, aten.unsqueeze.default, (-1,), {}),
    (normal.dimension, aten.cat.default, (-1,), {}),
    (normal.dimension, aten.stack.default, (-2,), {}),
    (normal.dimension, aten.slice.Tensor, (-2, 3, 9), {}),
    (normal.part, aten.slice.Tensor, (1, 3), {}),
    (normal.part, aten.slice.Tensor, (0, -9, 2**63 - 1, 2), {}),
    (normal.part, aten.slice.Tensor, (1, 9, 3), {}),
    (normal.turn, aten.t.default, (), {}),
    (normal.turn, aten.permute.default, ([1, 0],), {}),
    (normal.turn, aten.permute.default, ([-1, 0],), {}),
    (normal.turn, aten.transpose.int, (-1, 0), {}),
    (normal.view, aten._unsafe_view.default, ([-1],), {}),
    (normal.view, aten._unsafe_view.default, ([32, 128],), {}),
    (normal.view, aten.view.default, ([8, -1, 16],), {}),
    (normal.cast, aten._to_copy.default, (), {"dtype": torch.float64, "device": "cpu"}),
    (normal.cast, aten._to_copy.default, (), {"dtype": torch.half, "layout": torch.strided}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at", range(len(CALLS)), ids=lambda at: CALLS[at][0].__name__)
def test_a_rule_keeps_the_bits(at: int, dtype: torch.dtype) -> None:
    rule, func, args, kwargs = CALLS[at]
    x: Any = _numbers(dtype)
    x = [x, x.flip(0)] if func in (aten.cat.default, aten.stack.default) else x
    if "device" in kwargs:
        kwargs = {**kwargs, "device": x.device}
    made = rule(func, (x, *args), kwargs)
    if rule is normal.root and dtype.itemsize == 2:
        assert made is None
        return
    assert made is not None
    other, given, named = made
    want, got = func(x, *args, **kwargs), other(*given, **named)
    assert want.dtype == got.dtype
    assert want.shape == got.shape
    assert want.stride() == got.stride()
    torch.testing.assert_close(got, want, **numerics.SAME, equal_nan=True)
    signs = torch.signbit(got) == torch.signbit(want)
    assert bool((signs | want.isnan()).all())


@pytest.mark.parametrize("func", sorted(normal.COMMUTE, key=str), ids=str)
def test_the_order_of_two_arguments_keeps_the_bits(func: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, y = _numbers(dtype), _numbers(dtype).flip(0, 1)
        torch.testing.assert_close(func(x, y), func(y, x), **numerics.SAME, equal_nan=True)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.split.Tensor, (32,)),
        (aten.split.Tensor, (20, -1)),
        (aten.split_with_sizes.default, ([10, 0, 54], 1)),
    ],
)
def test_parts_of_a_split(func: Any, args: tuple[Any, ...]) -> None:
    """Rotations of hand-written models take halves by `chunk`, which no pattern read."""
    x = _numbers(torch.float32)
    parts = func(x, *args)
    for (slices, given, _), part in zip(normal.normalize(func, (x, *args), {}), parts, strict=True):
        made = slices(*given)
        assert (made.shape, made.stride(), made.storage_offset()) == (
            *(part.shape, part.stride()),
            part.storage_offset(),
        )


def test_what_has_other_bits_is_left_alone() -> None:
    x, whole = _numbers(torch.float32), torch.arange(4)
    calls = [
        (aten.pow.Tensor_Scalar, (x, 3)),
        (aten.div.Tensor, (x, 3.0)),
        (aten.mul.Tensor, (whole, 2)),
        (aten.pow.Tensor_Scalar, (whole, 2)),
        (aten.add.Tensor, (x, 2**25 + 1)),
    ]
    for func, args in calls:
        assert normal.normalize(func, args, {}) == [(func, args, {})]
