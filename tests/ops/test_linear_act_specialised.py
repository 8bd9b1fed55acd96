"""linear_act's Gluon kernel under an imitation of Hopper: its numbers and its protocol."""

from __future__ import annotations

import math
import types
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import imitated_gluon
from imitated_gluon import Descriptor, Pointer, round_to_bfloat16
from torchweld.ops import activation as activations
from torchweld.triton_kernels import linear_act, linear_act_specialised

ROWS, COLUMNS, INNER, PART = 128, 128, 64, 64
# Ragged in every direction; programs with two tiles and with one, and with fewer steps than slots.
SIZES = ((300, 200, 200), (130, 136, 40))


def _error(
    module: types.ModuleType,
    kind: str = "gelu",
    sizes: tuple[int, int, int] = SIZES[0],
    dtype: str = "bfloat16",
    *,
    transposed: bool = False,
    bias: bool = True,
    save_z: bool = True,
) -> float:
    """The largest error of y and z, in units of what the roundings of z and y allow."""
    rows, columns, inner = sizes
    numbers = np.random.default_rng(0)

    def round_(values: np.ndarray) -> np.ndarray:
        if dtype == "bfloat16":
            return round_to_bfloat16(values)
        return values.astype(np.float16).astype(np.float32)

    x, weight = (round_(numbers.standard_normal((n, inner))) for n in (rows, columns))
    added = numbers.standard_normal(columns).astype(np.float32) if bias else np.zeros(columns)
    y, z = (np.full((rows, columns), np.nan, np.float32) for _ in range(2))
    factor = (weight.T, (INNER, COLUMNS)) if transposed else (weight, (COLUMNS, INNER))
    imitated_gluon.run(
        module,
        "linear_act_specialised",
        4,
        Descriptor(x, (ROWS, INNER), dtype),
        Descriptor(*factor, dtype),
        None,
        Pointer(added) if bias else None,
        Descriptor(y, (ROWS, PART), dtype),
        Descriptor(z, (ROWS, PART), dtype) if save_z else None,
        None,
        *(rows, columns, inner, kind, transposed, 2, ROWS, COLUMNS, INNER, 3, 4, 104),
    )
    sums = x.astype(np.float64) @ weight.T.astype(np.float64)
    exact_z = torch.from_numpy(sums + added)
    name, _, approximate = kind.partition("_")
    known = activations.ACTIVATIONS[name, approximate or "none"]
    exact_y = known.function(exact_z)
    # The products' sum is rounded before the bias is added, then z or y is.
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    slope = 1.13 if name == "gelu" else 1.0
    in_z = unit * torch.from_numpy(np.abs(sums)) + 1e-5 * math.sqrt(inner)
    allowed = 1.01 * slope * in_z + (1.01 * unit + 2.0**-15) * exact_y.abs() + 1e-6
    worst = ((torch.from_numpy(y) - exact_y).abs() / allowed).nan_to_num(math.inf).max()
    if save_z:
        error = (torch.from_numpy(z) - exact_z).abs() / (1.01 * in_z + 1.01 * unit * exact_z.abs())
        worst = torch.maximum(worst, error.nan_to_num(math.inf).max())
    return float(worst)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("save_z", [True, False])
def test_numbers(sizes: tuple[int, int, int], dtype: str, save_z: bool) -> None:
    for bias, transposed in ((True, False), (False, True)):
        found = _error(
            linear_act_specialised,
            "gelu",
            sizes,
            dtype,
            transposed=transposed,
            bias=bias,
            save_z=save_z,
        )
        assert found <= 1


@pytest.mark.parametrize("kind", ["gelu_tanh", "relu", "sigmoid"])
def test_other_activations(kind: str) -> None:
    assert _error(linear_act_specialised, kind) <= 1


@pytest.mark.parametrize("save_z", [True, False])
def test_a_second_product_multiplies(save_z: bool) -> None:
    numbers = np.random.default_rng(0)
    rows, columns, inner = SIZES[0]
    x, gate, up = (
        round_to_bfloat16(numbers.standard_normal((n, inner))) for n in (rows, columns, columns)
    )
    results = [np.full((rows, columns), np.nan, np.float32) for _ in range(3)]
    y, *saved = (Descriptor(each, (ROWS, PART)) for each in results)
    factors = (Descriptor(each, (COLUMNS, INNER)) for each in (gate, up))
    imitated_gluon.run(
        linear_act_specialised,
        "linear_act_specialised",
        4,
        *(Descriptor(x, (ROWS, INNER)), *factors, None, y, *(saved if save_z else (None, None))),
        *(rows, columns, inner, "silu", False, 2, ROWS, COLUMNS, INNER, 3, 4, 104),
    )
    wide = torch.from_numpy(x).double()
    products = [wide @ torch.from_numpy(each).double().T for each in (gate, up)]
    rounded = [each.bfloat16().double() for each in products]
    exact = torch.nn.functional.silu(rounded[0]) * rounded[1]
    # A product near the middle of two numbers is rounded to either.
    found = torch.from_numpy(results[0]).double()
    either = ((found - exact).abs() > 2**-8 * exact.abs()).double().mean()
    assert either < 0.01
    # Such a step of 2**-8 of the gate changes silu by up to four times as much, of `up` by as much.
    torch.testing.assert_close(found, exact, rtol=2.0**-5, atol=1e-3)
    if save_z:
        for each, product in zip(results[1:], products, strict=True):
            torch.testing.assert_close(
                torch.from_numpy(each).double(), product, rtol=2.0**-8, atol=1e-4
            )


@pytest.mark.parametrize(
    ("kind", "bias", "columns", "transposed", "serves"),
    [
        ("gelu", True, 64, False, True),
        ("gelu", True, 64, True, True),
        ("relu", False, 64, False, True),
        ("relu", True, 64, False, False),  # its slope jumps where the sum changes sign
        ("gelu", True, 60, False, False),  # rows that begin at multiples of 8 bytes
    ],
)
def test_which_calls_it_serves(
    kind: str, bias: bool, columns: int, transposed: bool, serves: bool
) -> None:
    def empty(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16, device="meta")

    weight = empty(64, columns).t() if transposed else empty(columns, 64)
    tile = next(tile for tile in linear_act.tiles(torch.bfloat16) if tile.specialised)
    launch = linear_act._linear_act_launch(
        empty(64, 64),
        weight,
        empty(columns) if bias else None,
        empty(64, columns),
        None,
        kind,
        tile,
        "ieee",
    )
    assert (launch.kernel is linear_act_specialised.linear_act_specialised) == serves


@pytest.mark.parametrize(
    ("rows", "dtype", "leads"),
    [(512, torch.float16, True), (256, torch.bfloat16, False), (512, torch.float32, False)],
)
def test_it_serves_untimed_where_it_fills_the_processors(
    rows: int, dtype: torch.dtype, leads: bool
) -> None:
    """Meta tensors have four processors."""
    x = torch.empty(rows, 64, dtype=dtype, device="meta")
    found = linear_act.candidates(x, torch.empty(256, 64, dtype=dtype, device="meta"))
    assert linear_act.tiles(torch.bfloat16)[linear_act.BY_RULE].specialised
    assert (found == [linear_act.BY_RULE]) == leads
    assert found


WAIT = "            total = warpgroup_mma_wait(1, deps=(total,))\n"
FAULTS = {
    "no wait for a copy": ("mbarrier.wait(ready.index(slot), (step // STAGES) & 1)", "pass"),
    "the other phase": ("(step // STAGES) & 1)", "(step // STAGES) & 1 ^ 1)"),
    "too few bytes": ("* INNER * 2)\n        copy_in(x,", "* INNER)\n        copy_in(x,"),
    "a slot is filled before its product": (WAIT, WAIT.replace("(1,", "(2,")),
    "the wrong slot is filled": ("(step + STAGES - 1) % STAGES", "step % STAGES"),
    "no wait for the last product": ("total = warpgroup_mma_wait(0, deps=(total,))", "pass"),
    "no wait for the tile before": ("mbarrier.wait(taken, (done & 1) ^ 1)", "pass"),
    "waits for a tile that never was": ("(taken, (done & 1) ^ 1)", "(taken, done & 1)"),
    "no fence after a tile is dropped": (
        "        fence_async_shared()\n        mbarrier.arrive(dropped",
        "        mbarrier.arrive(dropped",
    ),
    "no wait for a tile": ("mbarrier.wait(dropped, done & 1)", "pass"),
    "two arrivals": ("mbarrier.arrive(taken, count=1)", "mbarrier.arrive(taken, count=2)"),
    "no fence before a store": ("            fence_async_shared()\n", ""),
    "y is overwritten on its way": ("            wait_for_stores(0)\n", ""),
    "z is overwritten on its way": ("wait_for_stores(1)", "pass"),
    "no wait for the last stores": ("    wait_for_stores(0)\n\n\n", "\n\n"),
    "a count of two": ("mbarrier.init(taken, count=1)", "mbarrier.init(taken, count=2)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    text = Path(linear_act_specialised.__file__).read_text()
    name = f"{linear_act_specialised.__package__}.planted"
    module = imitated_gluon.plant(text, FAULTS[fault], tmp_path, name)
    assert imitated_gluon.is_found(lambda: _error(module), 1)
