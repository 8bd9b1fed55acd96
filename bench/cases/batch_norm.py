"""Cases of normalize_act and batch_norm_act."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchweld.bench.cases.activation import activated, every_kind
from torchweld.bench.cases.declare import CASES, Cases, vary
from torchweld.ops.activation import ACTIVATIONS, KINDS
from torchweld.ops.batch_norm.columns import rows_of
from torchweld.registry import parameter

# Benchmark shapes, [rows, width]: small, a layer of a classifier or a projection head, and wide.
_MEASURED = ((64, 256), (2048, 3072), (1024, 11008))
_MEASURED_ON_GPU = ((4096, 4096), (8192, 16384))


def terms(
    z: Tensor, size: Tensor, columns: Any, eps: float, kind: Any, grad_y: Tensor
) -> dict[str, Tensor]:
    """For each result the sum of its terms' magnitudes, in float64.

    The columns are mean and var, weight and bias. z is normalised with mean and var, or its own
    statistics; `size` has its magnitudes.
    """
    mean, var, weight, bias = columns
    known, width = ACTIVATIONS[tuple(kind)], z.shape[-1]
    rows, size = rows_of(z.double()), rows_of(size)
    grad_y = rows_of(grad_y.double().abs())
    if mean is None:
        mean_size, rstd = _mean(size), (_mean((rows - _mean(rows)).square()) + eps).rsqrt()
    else:
        mean_size, rstd = mean.double().abs(), (var.double() + eps).rsqrt()
    scale = 1.0 if weight is None else weight.double().abs()
    x_hat = (size + mean_size) * rstd
    y = x_hat * scale + (0.0 if bias is None else bias.double().abs())
    g = grad_y * known.slope(y)
    grad_input = g + _mean(g) + x_hat * _mean(g * x_hat) if mean is None else g
    return {
        "y": known.value(y).view(z.shape),
        "grad_input": (grad_input * rstd * scale).view(z.shape),
        "grad_weight": (g * x_hat).sum(0).view(width),
        "grad_bias": g.sum(0).view(width),
    }


def _mean(values: Tensor) -> Tensor:
    return values.mean(0) if values.shape[0] else values.sum(0)


def _terms_of_normalize_act(x: Tensor, *rest: Any, grad_y: Tensor) -> dict[str, Tensor]:
    *columns, eps, activation, approximate = rest
    return terms(x, x.double().abs(), columns, eps, (activation, approximate), grad_y)


_parameters = [
    {"weight": w, "bias": b} for w in (None, parameter(48)) for b in (None, parameter(48))
]
CASES["normalize_act"] = Cases(
    samples=(
        *every_kind("normalize_act", "gelu"),
        *(vary("normalize_act", (5,), (48,), activation="silu", **each) for each in _parameters),
    ),
    benchmarks=activated("normalize_act", _MEASURED),
    benchmarks_on_gpu=activated("normalize_act", _MEASURED_ON_GPU),
    tiny=vary("normalize_act", (1,), (64,)),
    terms=_terms_of_normalize_act,
)


def _terms_of_batch_norm_act(x: Tensor, *rest: Any, grad_y: Tensor) -> dict[str, Tensor]:
    running_mean, running_var, *parameters, training, _, eps, _, activation, approximate = rest
    columns = (*((None, None) if training else (running_mean, running_var)), *parameters)
    return terms(x, x.double().abs(), columns, eps, (activation, approximate), grad_y)


# Rows and widths as for activations, without single rows.
_SHAPES: tuple[tuple[int, ...], ...] = (
    (3, 1),
    (5, 7),
    (2, 3, 31),
    (2, 1, 3, 1, 48),
    (33, 64),
    (256, 67),
    (17, 1000),
    (3, 1, 2, 4096),
    (2, 8193),
    (1031, 13),
    (0, 64),
    (2, 0, 3, 7),
    (3, 0),
)
UNTRACKED = {"running_mean": None, "running_var": None}
_name = "batch_norm_act"
CASES[_name] = Cases(
    samples=(
        *activated(_name, _SHAPES[:1]),
        *activated(_name, [(5, 7)], **UNTRACKED),
        *activated(_name, _SHAPES[2:]),
        *(
            s
            for shape in ((5, 7), (256, 67))
            for k in KINDS[1:]
            for s in activated(_name, [shape], k)
        ),
        *activated(_name, ((1, 5), (5, 7), (256, 67), (0, 64)), training=False),
        vary(_name, (6,), (10,), activation="silu", weight=None, bias=None),
    ),
    benchmarks=activated(_name, _MEASURED),
    benchmarks_on_gpu=activated(_name, _MEASURED_ON_GPU),
    tiny=vary(_name, (2,), (64,)),
    terms=_terms_of_batch_norm_act,
    fp32=2.5,
)
