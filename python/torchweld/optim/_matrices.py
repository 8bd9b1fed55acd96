"""The matrices of a parameter, and the orthogonalisation of whole matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch

from torchweld import checks
from torchweld.ops.optimizer.orthogonal import (
    QUINTIC,
    Coefficients,
    count_operations,
    orthogonalize,
    polar_express,
)
from torchweld.optim._params import Group

ALGORITHMS = ("standard", "gram", "polar_express")
ITERATED = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Iteration(NamedTuple):
    """How the matrices of a group are orthogonalised."""

    coefficients: Coefficients
    gram: bool
    dtype: torch.dtype | None
    eps: float
    adjust_lr_fn: str | None

    def scale(self, rows: int, columns: int) -> float:
        """The factor that gives the steps of matrices of any shape a like size."""
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns)) if columns else 1.0

    def cost(self, rows: int, columns: int) -> float:
        """The operations that a matrix takes."""
        return count_operations(rows, columns, len(self.coefficients), self.gram)


class MatrixPlace(NamedTuple):
    """One matrix in a parameter: its place in the stack, its rows and its columns."""

    place: tuple[int, ...]
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of columns."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """The matrix, as a view."""
        return t[self.place][slice(*self.rows), slice(*self.columns)]


def find_iteration(function: str, group: Group) -> Iteration:
    """Find how this group's matrices are orthogonalised; check its settings."""
    algorithm, dtype = group.get("algorithm", "standard"), group.get("ns_dtype")
    numbers, steps = group["ns_coefficients"], group["ns_steps"]

    def check(name: str, value: Any, fits: bool, accepted: str) -> None:
        checks.fits(function, name, value, fits, accepted)

    check("algorithm", algorithm, algorithm in ALGORITHMS, " | ".join(ALGORITHMS))
    accepted = "None, torch.bfloat16, float16, float32 or float64"
    check("ns_dtype", dtype, dtype is None or dtype in ITERATED, accepted)
    check("ns_steps", steps, isinstance(steps, int) and 0 <= steps < 100, "an int in [0, 100)")
    fits = isinstance(numbers, (tuple, list)) and len(numbers) > 0
    each = fits and all(isinstance(one, (tuple, list)) and len(one) == 3 for one in numbers)
    three = fits and len(numbers) == 3 and all(isinstance(n, (int, float)) for n in numbers)
    check("ns_coefficients", numbers, each or three, "three numbers, or three for each step")
    accepted = f"three numbers for each of {steps} steps, as ns_steps says"
    check("ns_coefficients", numbers, not each or len(numbers) == steps, accepted)
    coefficients: Any = [tuple(one) for one in numbers] if each else [tuple(numbers)] * steps
    if algorithm == "polar_express":
        accepted = "the default: polar_express has its own coefficients"
        check("ns_coefficients", numbers, tuple(numbers) == QUINTIC, accepted)
        coefficients = polar_express(steps)
    eps = float(group["eps"])
    return Iteration(tuple(coefficients), algorithm == "gram", dtype, eps, group["adjust_lr_fn"])


def find_regions(function: str, shape: Sequence[int], group: Group) -> list[MatrixPlace]:
    """Find the matrices of a parameter of this shape: its last two dimensions, packed or not."""
    *stack, rows, columns = shape
    size = (rows, columns)[dim := group.get("split_dim", 0)]
    cuts = _cut(function, size, group.get("split_sizes"), group.get("heads"))
    packed: Any = [(cut, (0, columns)) if dim == 0 else ((0, rows), cut) for cut in cuts]
    return [
        MatrixPlace(place, *of_one) for place in product(*map(range, stack)) for of_one in packed
    ]


def _cut(function: str, size: int, split_sizes: Any, heads: Any) -> list[tuple[int, int]]:
    """Cut a dimension of packed projections into its parts, and each part into its heads."""
    parts = [size] if split_sizes is None else split_sizes
    fits = isinstance(parts, (tuple, list)) and all(isinstance(n, int) and n >= 0 for n in parts)
    accepted = f"sizes that add up to {size}"
    checks.fits(function, "split_sizes", split_sizes, fits and sum(parts) == size, accepted)
    heads = 1 if heads is None else heads
    counts = [heads] * len(parts) if not isinstance(heads, (tuple, list)) else heads
    accepted = f"a number for each of {len(parts)} parts"
    checks.fits(function, "heads", heads, len(counts) == len(parts), accepted)
    for part, count in zip(parts, counts, strict=True):
        fits = isinstance(count, int) and count >= 1 and part % count == 0
        checks.fits(function, "heads", heads, fits, f"a divisor of {part}")
    sizes = [part // count for part, count in zip(parts, counts, strict=True) for _ in range(count)]
    ends = list(accumulate(sizes))
    return [(end - of_one, end) for end, of_one in zip(ends, sizes, strict=True)]


class Matrix(NamedTuple):
    """A whole matrix, which its orthogonalisation overwrites."""

    values: torch.Tensor
    iteration: Iteration


def orthogonalize_all(matrices: Iterable[Matrix]) -> None:
    """Orthogonalise matrices in place, all matrices of a shape together."""
    alike: dict[Any, list[Matrix]] = {}
    for one in matrices:
        values = one.values
        key = (values.shape, values.dtype, values.device, one.iteration)
        alike.setdefault(key, []).append(one)
    for (shape, *_, iteration), some in alike.items():
        orthogonalize(
            [one.values for one in some],
            iteration.coefficients,
            gram=iteration.gram,
            dtype=iteration.dtype,
            eps=iteration.eps,
            scale=iteration.scale(*shape),
        )
