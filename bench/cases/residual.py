"""Cases of the ops of a residual stream."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from torch import Tensor
from torch.nn.functional import dropout

from torchweld.bench.cases import norm as norms
from torchweld.bench.cases.declare import CASES, Cases, derive_terms, vary
from torchweld.ops.residual import ADD_LAYER_NORM, ADD_RMS_NORM, BIAS_DROPOUT_ADD
from torchweld.random import drop
from torchweld.registry import parameter

# --- bias_dropout_add -----------------------------------------------------------------------------


def _plain_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Any, *_: Any
) -> Tensor:
    y = x if bias is None else x + bias
    return (residual + (y if seed is None else dropout(y, p))).to(residual.dtype)


def _add(shape: tuple[int, ...], p: float, **changes: Any) -> tuple[Any, ...]:
    return vary(BIAS_DROPOUT_ADD.name, shape[:-1], shape[-1:], p=p, **changes)


CASES[BIAS_DROPOUT_ADD.name] = Cases(
    samples=(
        _add((5, 48), 0.1),
        _add((1,), 0.0),
        _add((3, 1), 0.5),
        _add((7,), 0.25),
        _add((5, 7), 0.25, bias=None),
        _add((5, 7), 0.0, bias=None),
        _add((2, 3, 31), 0.9),
        _add((33, 64), 0.0),
        _add((4, 50, 768), 0.1),
        _add((17, 1000), 0.0),
        _add((2, 8193), 0.1),
        _add((2, 3, 2, 3, 5, 9), 1.0),
        _add((2, 2, 4, 18), 0.3, whole=[2, 6, 9, 64], offset=[0, 3, 5, 27]),
        _add((0, 64), 0.1),
        _add((2, 0, 7), 0.0),
        _add((3, 0), 0.1),
    ),
    benchmarks=tuple(_add(shape, p) for shape in norms.MEASURED for p in (0.0, 0.1)),
    benchmarks_on_gpu=tuple(_add(shape, p) for shape in norms.MEASURED_ON_GPU for p in (0.0, 0.1)),
    tiny=_add((1, 64), 0.1),
    terms=functools.partial(derive_terms, BIAS_DROPOUT_ADD.name),
    plain=_plain_add,
)


# --- dropout_add_layer_norm and dropout_add_rms_norm ----------------------------------------------


def _terms(
    x: Tensor,
    residual: Tensor,
    shape: Any,
    *rest: Any,
    grad_z: Tensor,
    grad_y: Tensor,
    centered: bool,
) -> dict[str, Tensor]:
    *parameters, p, _, seed, whole, offset, _ = rest
    kept = functools.partial(drop, p=p, seed=seed, whole=whole, offset=offset, trailing=len(shape))
    z, size = kept(x.double()), kept(x.double().abs())
    if residual is not None:
        z, size = z + residual, size + residual.double().abs()
    terms = norms.terms(z, size, shape, *parameters, grad_y=grad_y, centered=centered)
    grad = terms["grad_input"] + grad_z.double().abs()
    return terms | {"z": size, "grad_residual": grad, "grad_input": kept(grad)}


def _declare(add_norm: Any, eps: float) -> None:
    name, learnt = add_norm.op.name, add_norm.parameters
    given = functools.partial(vary, name, eps=eps)

    def plain(*inputs: Any) -> tuple[Tensor, Tensor]:
        p, _, seed, *_ = inputs[3 + len(learnt) :]
        return add_norm.compute(lambda x: dropout(x, p, seed is not None), *inputs)

    # The norms' shapes, with and without dropout; absent arguments; a shard; a wide y.
    drops = zip(norms.SHAPES, itertools.cycle((0.1, 0.0, 0.5)))
    samples = [given(*shape, p=p) for shape, p in drops]
    for absent, p, rows in (({"residual": None}, 0.25, 110), ({}, 0.25, 5), ({}, 0.0, 5)):
        for subset in itertools.product([None, parameter(48)], repeat=len(learnt)):
            changes = dict(zip(learnt, subset, strict=True)) | absent
            samples.append(given((rows,), (48,), p=p, **changes))
    shard = {"whole": [2, 6, 9, 4, 5], "offset": [0, 3, 5, 0, 0]}
    samples.append(given((2, 2, 4), (4, 5), p=0.3, **shard))
    samples += [given((110,), (96,), p=p, wide_y=True) for p in (0.0, 0.1)]
    samples.append(given((110,), (96,), residual=None, wide_y=True))

    def measure(sizes: Any) -> tuple[Any, ...]:
        return tuple(given((rows,), (width,), p=p) for rows, width in sizes for p in (0.0, 0.1))

    results = ("y", "grad_input", "grad_residual", "grad_weight", "grad_bias")
    CASES[name] = Cases(
        samples=tuple(samples),
        benchmarks=measure(norms.MEASURED),
        benchmarks_on_gpu=measure(norms.MEASURED_ON_GPU),
        tiny=given((1,), (64,), p=0.0),
        terms=functools.partial(_terms, centered=add_norm.centered),
        fp32=dict.fromkeys(results, 2.5),
        rounding={"grad_weight": 2.0},  # z was saved in 16 bits
        plain=plain,
    )


_declare(ADD_LAYER_NORM, 1e-5)
_declare(ADD_RMS_NORM, 1e-6)
