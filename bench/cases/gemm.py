"""Cases of the ops composed of torch's GEMMs and our passes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from torchweld.bench.cases import batch_norm
from torchweld.bench.cases.declare import CASES, Arguments, Cases, vary
from torchweld.ops.activation import ACTIVATIONS, KINDS
from torchweld.ops.gemm.common import arguments
from torchweld.registry import activation, constant, parameter, variance, weight


def _outer(grad: Tensor, x: Tensor) -> Tensor:
    """A weight's gradient: the sum over the rows of grad and x."""
    return torch.einsum("...n,...k->nk", grad, x)


def _size_of(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.double().abs()


def _as_kind(kind: Iterable[str]) -> dict[str, str]:
    return dict(zip(("activation", "approximate"), kind, strict=True))


# --- linear_act -----------------------------------------------------------------------------------


def _terms_of_linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, *kind: Any, grad_y: Tensor
) -> dict[str, Tensor]:
    """bias_act's terms, counting every product of the GEMMs as a term."""
    known = ACTIVATIONS[kind]
    x, weight, grad = x.double().abs(), weight.double().abs(), grad_y.double().abs()
    z = linear(x, weight, _size_of(bias))
    grad_z = grad * known.slope(z)
    return {
        "y": known.value(z),
        "grad_input": grad_z @ weight,
        "grad_weight": _outer(grad_z, x),
        "grad_bias": grad_z.sum_to_size(grad_z.shape[-1:]),
    }


def _linear_act(leading: tuple[int, ...], width: int, features: int, *kind: Any) -> Arguments:
    return (*arguments(leading, width, features), *(kind or KINDS[0]))


# Leading sizes, in_features, out_features: one element, odd and prime sizes, one to five
# dimensions, no rows, no features on either side, and enough features for pooled errors.
_LINEAR: tuple[tuple[tuple[int, ...], int, int], ...] = (
    ((), 1, 1),
    ((3,), 5, 7),
    ((2, 3), 31, 13),
    ((2, 1, 3), 8, 24),
    ((2, 1, 3, 1), 17, 19),
    ((256,), 67, 127),
    ((2,), 7, 8193),
    ((3,), 5, 4096),
    ((0,), 8, 5),
    ((2, 0, 3), 8, 5),
    ((3,), 0, 4),
    ((3,), 4, 0),
)
_LINEAR_MEASURED = ((64, 768, 3072), (2048, 768, 3072), (2048, 4096, 11008))
_LINEAR_ON_GPU = ((1024, 4096), (4096, 16384))


def _without_bias(x: Any, weight: Any, _: Any, *kind: Any) -> Arguments:
    return (x, weight, None, *kind)


CASES["linear_act"] = Cases(
    samples=(
        *(_linear_act(*shape) for shape in _LINEAR),
        *(_linear_act(*shape, *kind) for shape in _LINEAR[1:6] for kind in KINDS[1:]),
        *(_without_bias(*_linear_act(*shape, *kind)) for shape in _LINEAR[1:3] for kind in KINDS),
    ),
    benchmarks=tuple(_linear_act((rows,), *features) for rows, *features in _LINEAR_MEASURED),
    benchmarks_on_gpu=tuple(
        _linear_act((8192,), *features, "gelu", form)
        for features in _LINEAR_ON_GPU
        for form in ("none", "tanh")
    ),
    tiny=_linear_act((1,), 64, 64),
    terms=_terms_of_linear_act,
    # A 16-bit z, or its gradient, is rounded before the result is.
    rounding=2.0,
)


# --- mlp ------------------------------------------------------------------------------------------


def _terms_of_mlp(x: Tensor, *rest: Any, grad_y: Tensor) -> dict[str, Tensor]:
    """Terms, counting every product of the four GEMMs."""
    up_weight, up_bias, down_weight, down_bias, activation, approximate, _ = rest
    known = ACTIVATIONS[activation, approximate]
    x, up, down, grad = (t.double().abs() for t in (x, up_weight, down_weight, grad_y))
    z = linear(x, up, _size_of(up_bias))
    grad_z, hidden = (grad @ down) * known.slope(z), known.value(z)
    return {
        "y": linear(hidden, down, _size_of(down_bias)),
        "grad_input": grad_z @ up,
        "grad_up_weight": _outer(grad_z, x),
        "grad_up_bias": grad_z.sum_to_size(grad_z.shape[-1:]),
        "grad_down_weight": _outer(grad, hidden),
        "grad_down_bias": grad.sum_to_size(grad.shape[-1:]),
    }


def _mlp(
    leading: tuple[int, ...], width: int, features: int, out: int, *kind: str, lean: bool = False
) -> Arguments:
    second = (weight(out, features), activation(out))
    return (*arguments(leading, width, features), *second, *(kind or KINDS[0]), lean)


_MLP: tuple[tuple[tuple[int, ...], int, int, int], ...] = (
    ((), 1, 1, 1),
    ((2, 3), 5, 7, 3),
    ((256,), 67, 127, 61),
    ((16,), 31, 10007, 17),
    ((64,), 31, 67, 10007),
    ((0,), 8, 5, 3),
)


def _mlp_without_biases(lean: bool) -> Arguments:
    x, up_weight, _, down_weight, *_ = _mlp(*_MLP[1])
    return (x, up_weight, None, down_weight, None, "gelu", "tanh", lean)


CASES["mlp"] = Cases(
    samples=(
        *(_mlp(*shape) for shape in _MLP),
        *(_mlp(*_MLP[2], *kind) for kind in KINDS[1:]),
        *(_mlp(*shape, lean=True) for shape in _MLP[1:3]),
        *map(_mlp_without_biases, (False, True)),
    ),
    benchmarks=tuple(_mlp((rows,), 768, 3072, 768) for rows in (64, 2048)),
    benchmarks_on_gpu=tuple(
        _mlp((8192,), width, 4 * width, width, "gelu", form)
        for width in (1024, 4096)
        for form in ("none", "tanh")
    ),
    tiny=_mlp((1,), 64, 64, 64),
    terms=_terms_of_mlp,
    rounding=3.0,  # a chain of two GEMMs with two roundings to 16 bits between them
)


# --- gated_mlp ------------------------------------------------------------------------------------


def _terms_of_gated_mlp(x: Tensor, *rest: Any, grad_y: Tensor) -> dict[str, Tensor]:
    *factors, activation, approximate = rest
    known = ACTIVATIONS[activation, approximate]
    x, *weights, grad = (t.double().abs() for t in (x, *factors, grad_y))
    gate, up = linear(x, weights[0]), linear(x, weights[1])
    grad_hidden = grad @ weights[2]
    activated = known.value(gate)
    grad_gate, grad_up = grad_hidden * up * known.slope(gate), grad_hidden * activated
    return {
        "y": linear(activated * up, weights[2]),
        "grad_input": grad_gate @ weights[0] + grad_up @ weights[1],
        "grad_gate_weight": _outer(grad_gate, x),
        "grad_up_weight": _outer(grad_up, x),
        "grad_down_weight": _outer(grad, activated * up),
    }


def _gated_mlp(leading: tuple[int, ...], width: int, features: int, *kind: str) -> Arguments:
    weights = (weight(features, width), weight(features, width), weight(width, features))
    return (activation(*leading, width), *weights, *(kind or ("silu", "none")))


_GATED: tuple[tuple[tuple[int, ...], int, int], ...] = (
    ((), 1, 1),
    ((2, 3), 5, 7),
    ((256,), 67, 127),
    ((3, 1), 8, 1021),
    ((0,), 8, 5),
)
CASES["gated_mlp"] = Cases(
    samples=(
        *(_gated_mlp(*shape) for shape in _GATED),
        *(_gated_mlp(*_GATED[2], *kind) for kind in KINDS),
    ),
    benchmarks=tuple(_gated_mlp((rows,), 768, 2048) for rows in (64, 2048)),
    benchmarks_on_gpu=(_gated_mlp((8192,), 4096, 14336),),
    tiny=_gated_mlp((1,), 64, 64),
    terms=_terms_of_gated_mlp,
    rounding=3.0,  # a chain of two GEMMs with three roundings to 16 bits between them
)


# --- linear_batch_norm_act ------------------------------------------------------------------------


def _terms_of_linear_batch_norm_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, grad_y: Tensor
) -> dict[str, Tensor]:
    """batch_norm_act's terms, counting every product of the GEMMs as a term."""
    running_mean, running_var, *affine, training, _, eps, _, activation, approximate = rest
    x, weight = x.double(), weight.double()
    shift = x.new_zeros(()) if bias is None else bias.double()
    z = linear(x, weight) + shift
    x, weight = x.abs(), weight.abs()
    size = linear(x, weight) + shift.abs()
    columns = (*((None, None) if training else (running_mean, running_var)), *affine)
    terms = batch_norm.terms(z, size, columns, eps, (activation, approximate), grad_y)
    grad_z = terms["grad_input"]
    return {
        "y": terms["y"],
        "grad_input": grad_z @ weight,
        "grad_weight": _outer(grad_z, x),
        "grad_bias": grad_z.sum_to_size(grad_z.shape[-1:]),
        "grad_bn_weight": terms["grad_weight"],
        "grad_bn_bias": terms["grad_bias"],
    }


def _batch_norm(*sizes: Any, bias: bool = True, **changes: Any) -> Arguments:
    x, weight, with_bias = arguments(*sizes)
    columns = {"running_mean": constant, "running_var": variance}
    columns |= {"bn_weight": parameter, "bn_bias": parameter}
    tensors = {"input": x, "weight": weight, "bias": with_bias if bias else None}
    tensors |= {name: make(sizes[-1]) for name, make in columns.items()}
    return vary("linear_batch_norm_act", (1,), (1,), **(tensors | changes))


def _batch_norm_samples() -> Iterable[Arguments]:
    """Training samples have no bias: its gradient is zero, and eager's is only rounding error.

    relu is left to tests/ops/test_batch_norm.py: its derivative jumps where a 16-bit z is rounded.
    """
    _, *others = [_as_kind(kind) for kind in KINDS if kind[0] != "relu"]
    shapes = (((8,), 3, 5), ((24,), 5, 7), ((2, 9), 31, 13), ((256,), 67, 127), ((17,), 7, 8193))
    for shape in (*shapes, ((0,), 8, 5)):
        yield _batch_norm(*shape, bias=False, **(batch_norm.UNTRACKED if shape[2] == 7 else {}))
    for kind in others[:2]:
        yield _batch_norm(*shapes[3], bias=False, **kind)
    for shape in (((1,), 3, 5), ((3,), 5, 4096), *shapes, ((0,), 8, 5)):
        yield _batch_norm(*shape, training=False)
    yield _batch_norm(*shapes[3], training=False, bias=False, **_as_kind(("silu", "none")))
    # Last, so that a new activation does not change the seeds of the others.
    for kind in others[2:]:
        yield _batch_norm(*shapes[3], bias=False, **kind)


CASES["linear_batch_norm_act"] = Cases(
    samples=tuple(_batch_norm_samples()),
    benchmarks=tuple(_batch_norm((rows,), *features) for rows, *features in _LINEAR_MEASURED),
    benchmarks_on_gpu=tuple(_batch_norm((8192,), *features) for features in _LINEAR_ON_GPU),
    tiny=_batch_norm((2,), 64, 64),
    terms=_terms_of_linear_batch_norm_act,
    fp32=2.5,
    # A 16-bit z, or its gradient, is rounded before the result is.
    rounding=2.0,
)
