"""Vector lanes past a row's end must not affect sums and maxima, whatever they compute.

If a row's numbers are zeros or large, these lanes compute 0 / 0, 0 * infinity and infinity -
infinity. The widths cover every possible number of empty lanes of every instruction set.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import selection
import torchweld
from conftest import Target
from optimizers import RULES, maker
from oracle import exact, run
from torchweld import numerics, optim
from torchweld.registry import materialize

WIDTHS = (*range(1, 35), 47, 48, 49, 63, 64, 65, 127, 128, 129, 255, 257, 513)


# --- Optimizers -------------------------------------------------------------------------------


def _zeros_among(shape: tuple[int, ...], generator: torch.Generator) -> list[torch.Tensor]:
    """Gradients without zeros, with a row or a column of zeros, and all zero."""
    grads = [torch.randn(shape, generator=generator) for _ in range(4)]
    grads[1][0] = 0
    grads[2][..., -1] = 0
    grads[3].zero_()
    return grads


@functools.cache
def _gradients() -> list[torch.Tensor]:
    """Matrices, then vectors: two gradients of four for each width, the others in the other shape.

    Widths that leave as many of 16 lanes empty have different ones.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for rows in ((4,), ()):
        for i, width in enumerate(WIDTHS):
            first = (i // 2 + i // 16 + len(rows)) % 2
            found += _zeros_among((*rows, width), generator)[first::2]
    return found


KINDS: list[tuple[Any, dict[str, Any]]] = [
    *RULES,
    (optim.AdamW, {"eps": 0.0}),
    (optim.LAMB, {"eps": 0.0, "weight_decay": 0.1}),
    (optim.LARS, {"eps": 0.0}),
    (optim.Adafactor, {}),
    (optim.Adafactor, {"eps": (0.0, 1e-3)}),
    (optim.Adafactor, {"eps": (1e-30, 1e-3)}),
    (optim.TransformersAdafactor, {"lr": None, "eps": (0.0, 1e-3)}),
    (optim.TransformersAdafactor, {"lr": None, "beta1": 0.9}),
]


def _stepped(
    make: Any, dtype: torch.dtype, grads: list[torch.Tensor]
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    params = [torch.full_like(g, 0.5, dtype=dtype, requires_grad=True) for g in grads]
    optimizer = make(params)
    for _ in range(2):
        for p, g in zip(params, grads, strict=True):
            p.grad = g.to(dtype)
        optimizer.step()
    return params, optimizer


STORED = [  # dtypes of parameters and of states, and masters
    (torch.float32, torch.float32, False),
    (torch.float32, "8bit", False),
    (torch.bfloat16, torch.bfloat16, "remainder"),
    (torch.float16, torch.float32, True),
]
# One loop serves all rules, so each takes two of these.
CASES = [
    (*kind, *stored)
    for i, kind in enumerate(KINDS)
    for stored in (STORED if selection.WHOLE else STORED[i % 2 :: 2])
]


@pytest.mark.parametrize(("kind", "settings", "dtype", "state_dtype", "masters"), CASES, ids=str)
def test_zeros_in_gradients(
    kind: Any, settings: dict[str, Any], dtype: torch.dtype, state_dtype: Any, masters: Any
) -> None:
    """NaN exactly where the reference has NaN; other elements are equal up to rounding."""
    if "Adafactor" in kind.__name__:
        state_dtype = torch.float32
    grads, make = _gradients(), maker(kind, settings, state_dtype, masters)
    with torchweld.use_backend("cpu"):
        found, _ = _stepped(make, dtype, grads)
    with torchweld.use_backend("eager"):
        expected, _ = _stepped(make, dtype, grads)
    unit = torch.finfo(dtype).eps
    values = (torch.cat([p.flatten() for p in params]) for params in (found, expected))
    torch.testing.assert_close(*values, rtol=4 * unit, atol=1e-7, equal_nan=True)
    if "eps" not in settings:
        assert all(p.isfinite().all() for p in found)


def test_zeros_in_gradients_in_cuda(cuda_device: str) -> None:
    """Rules whose steps depend on sums, with a row of zeros and widths that leave lanes empty."""
    grads = [g.to(cuda_device) for g in _gradients()[: 2 * 40 : 3]]
    for kind, settings in KINDS[-9:]:
        make = maker(kind, settings)
        found, _ = _stepped(make, torch.float32, grads)
        with torchweld.use_backend("eager"):
            expected, _ = _stepped(make, torch.float32, grads)
        torch.testing.assert_close(found, expected, **numerics.ROUNDED, equal_nan=True)


# --- Other ops --------------------------------------------------------------------------------


def _rows(width: int, device: str) -> torch.Tensor:
    """Rows of zeros, constants, and numbers that overflow times rstd; and a zero column."""
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(width)).to(device)
    x[0], x[1], x[2] = 0, 3, 1e37 / width
    x[:, -1] *= (torch.arange(6, device=device) % 2) == 0
    return x


@pytest.mark.targets(
    "layer_norm",
    "rms_norm",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "adaptive_layer_norm",
    "adaptive_rms_norm",
    "softmax_dropout",
    "normalize_act",
    "batch_norm_act",
    "bias_act",
)
def test_rows_of_zeros_and_of_large_numbers(target: Target) -> None:
    """Results and gradients are finite where the float64 reference is."""
    few = target.place == "interpreter"
    for width in WIDTHS[2::9] if few else WIDTHS:
        arguments = target.op.sized((6,), (width,))
        inputs = materialize(arguments, torch.float32, target.device)
        inputs[0] = _rows(width, target.device)
        found, expected = run(target.op, inputs), exact(target.op, inputs)
        for name, value in found.items():
            oracle = expected[name].to(value.dtype)
            assert torch.equal(value.isfinite(), oracle.isfinite()), name


@pytest.mark.parametrize("signed", [True, False])
def test_blocks_of_zeros(signed: bool) -> None:
    """In 8 bits rows of zeros stay zero next to other rows, at every width."""
    for width in WIDTHS:
        x = torch.rand(5, width) + 0.5
        x[::2] = 0
        codes, absmax = torchweld.functional.quantize_8bit(x, signed=signed)
        back = torchweld.functional.dequantize_8bit(codes, absmax, signed=signed)
        assert torch.equal(back == 0, x == 0)
        half_of_the_widest_gap = 0.9 / 64 / 2  # of the signed map, which has fewer values per sign
        torch.testing.assert_close(back, x, rtol=0, atol=1.01 * half_of_the_widest_gap * 1.5)
