"""mlp and gated_mlp: a transformer's feed-forward blocks, of torch's GEMMs and passes of ours."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import linear

from torchweld import checks
from torchweld.dispatch.call import run_on
from torchweld.errors import ArgumentError
from torchweld.ops.activation import common as activations
from torchweld.ops.activation import gated_act
from torchweld.ops.gemm import epilogue, mlp_backward
from torchweld.ops.gemm import linear as gemm
from torchweld.ops.gemm.act_linear import act_linear
from torchweld.ops.gemm.linear_act import (
    act,
    activated,
    check,
    fits,
    in_one,
    in_two,
    is_ours,
    is_saved,
    outer,
    recomputed,
    summed,
    with_sum,
)
from torchweld.registry import ROWS, Composite, Numerics, activation, weight
from torchweld.registry.cost import of_gemms


def mlp(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    *,
    activation: str = "gelu",
    approximate: str = "none",
    recompute: bool = False,
) -> torch.Tensor:
    """linear(activation(linear(x, w1, b1)), w2, b2).

    Args:
        x: [*, in_features]; float32, bfloat16, float16 (or float64).
        w1: [hidden_features, in_features].
        b1: [hidden_features].
        w2: [out_features, hidden_features].
        b2: [out_features].
        activation: "gelu", "relu", "silu" or another of bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".
        recompute: save x alone, and compute the rest again in the backward, which on the CPU holds
            two tensors of the hidden layer's size at a time, and not three.

    Returns:
        A tensor [*, out_features].
    """
    return recomputed(recompute, MLP, x, w1, b1, w2, b2, activation, approximate, recompute)


def gated_mlp(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    *,
    activation: str = "silu",
    approximate: str = "none",
    recompute: bool = False,
) -> torch.Tensor:
    """linear(activation(linear(x, gate_weight)) * linear(x, up_weight), down_weight).

    The activated gate is not saved: gate and up are, and their product, which is a GEMM's input.

    Args:
        x: [*, in_features]; float32, bfloat16, float16 (or float64).
        gate_weight: [hidden_features, in_features].
        up_weight: [hidden_features, in_features].
        down_weight: [out_features, hidden_features].
        activation: "silu" (SwiGLU), "gelu" (GeGLU), "relu" (ReGLU) or another of bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".
        recompute: save x alone, and compute the rest again in the backward.

    Returns:
        A tensor [*, out_features].
    """
    return recomputed(
        recompute, GATED_MLP, x, gate_weight, up_weight, down_weight, activation, approximate
    )


# --- mlp ----------------------------------------------------------------------------------------


def _mlp(backend, x, w1, b1, w2, b2, activation, approximate, recompute):
    if not _fits_mlp(x, w1, b1, w2, b2):
        _check_mlp(x, w1, b1, w2, b2, activation, approximate, recompute)
    if recompute and backend == "cpu" and activation != "identity":
        z, bias = summed(x, w1, b1, activation)
        if is_saved(z, bias) and is_ours(z) and type(w2) in (torch.Tensor, torch.nn.Parameter):
            return act_linear(z, bias, w2, b2, activation, approximate)
        return gemm.linear(act(backend, z, bias, activation, approximate), w2, b2)
    if backend == "cuda":
        return _mlp_on_cuda(x, w1, b1, w2, b2, activation, approximate)
    return gemm.linear(activated(backend, x, w1, b1, activation, approximate), w2, b2)


def _mlp_on_cuda(x, w1, b1, w2, b2, activation, approximate):
    """Forward and backward of the activation, each in a GEMM or in a pass, as it is faster."""
    first = ("cuda", x, w1, b1, activation, approximate)
    made = in_one(*first)
    make = partial(with_sum, *first) if made is None else lambda: made
    algorithm = mlp_backward.choose(x, (w1, b1, w2, b2), activation, approximate, make)
    if algorithm is not None:
        y, z, zeros = make()
        return act_linear(z, zeros, w2, b2, activation, approximate, y, algorithm)
    if made is None:
        return linear(in_two(*first), w2, b2)
    return linear(epilogue.activated(made, activation, approximate), w2, b2)


def _explain_mlp(backend, x, w1, b1, w2, b2, activation, approximate, recompute):
    forward = epilogue.explain(backend, x, w1, b1, activation, approximate)
    backward = mlp_backward.explain(x, (w1, b1, w2, b2)) if backend == "cuda" else ""
    return f"{forward}; in the backward {backward}" if backward else forward


def _fits_mlp(x, w1, b1, w2, b2):
    return fits(x, w1, b1) and fits(x, w2, b2)


def _mlp_reference(x, w1, b1, w2, b2, activation, approximate, recompute):
    if not _fits_mlp(x, w1, b1, w2, b2):
        _check_mlp(x, w1, b1, w2, b2, activation, approximate, recompute)
    return linear(activations.activate(MLP, linear(x, w1, b1), activation, approximate), w2, b2)


def _check_mlp(x, w1, b1, w2, b2, activation, approximate, recompute):
    check(MLP.name, x, w1=w1, b1=b1)
    check(MLP.name, _hidden(x, w1), "w1", w2=w2, b2=b2)
    activations.check(MLP.name, activation, approximate)


def _mlp_flops(x, w1, b1, w2, *_):
    rows = x.shape[:-1].numel()
    return of_gemms(rows * w1.numel(), rows * w2.numel())


def _hidden(x, weight):
    """What goes into the second GEMM, without rows."""
    return torch.empty((0, weight.shape[0]), dtype=x.dtype, device=x.device)


def _mlp_terms(x, w1, b1, w2, b2, activation, approximate, recompute, grad_y):
    """Every product of the four GEMMs a term."""
    known = activations.ACTIVATIONS[activation, approximate]
    x, w1, w2, grad = (t.double().abs() for t in (x, w1, w2, grad_y))
    z = linear(x, w1, None if b1 is None else b1.double().abs())
    grad_z, hidden = (grad @ w2) * known.slope(z), known.value(z)
    return {
        "y": linear(hidden, w2, None if b2 is None else b2.double().abs()),
        "grad_x": grad_z @ w1,
        "grad_w1": outer(grad_z, x),
        "grad_b1": grad_z.sum_to_size(grad_z.shape[-1:]),
        "grad_w2": outer(grad, hidden),
        "grad_b2": grad.sum_to_size(grad.shape[-1:]),
    }


def _mlp_arguments(leading, width, features, out, *kind, recompute=False):
    first = (activation(*leading, width), weight(features, width), activation(features))
    return (*first, weight(out, features), activation(out), *kind, recompute)


# Leading sizes, in_features, hidden_features, out_features.
_MLP_SHAPES: tuple[tuple[tuple[int, ...], int, int, int], ...] = (
    ((), 1, 1, 1),
    ((2, 3), 5, 7, 3),
    ((256,), 67, 127, 61),
    ((16,), 31, 10007, 17),
    ((64,), 31, 67, 10007),
    ((0,), 8, 5, 3),
)


def _mlp_samples():
    found = [_mlp_arguments(*s, "gelu", "none") for s in _MLP_SHAPES]
    found += [_mlp_arguments(*_MLP_SHAPES[2], *kind) for kind in activations.KINDS[1:]]
    found += [_mlp_arguments(*s, "gelu", "none", recompute=True) for s in _MLP_SHAPES[1:3]]
    x, w1, _, w2, *_ = _mlp_arguments(*_MLP_SHAPES[1])
    return (*found, *((x, w1, None, w2, None, "gelu", "tanh", lean) for lean in (False, True)))


_MLP_RESULTS = ("y", "grad_x", "grad_w1", "grad_b1", "grad_w2", "grad_b2")

MLP = Composite(
    name="mlp",
    forward="(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str activation,"
    " str approximate, bool recompute) -> (Tensor y)",
    backward="(Tensor grad_y, Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2,"
    " str activation, str approximate, bool recompute) -> (Tensor grad_x, Tensor grad_w1,"
    " Tensor grad_b1, Tensor grad_w2, Tensor grad_b2)",
    reference=_mlp_reference,
    fused=_mlp,
    check=_check_mlp,
    fake=lambda x, w1, b1, w2, *_: (x.new_empty((*x.shape[:-1], w2.shape[0])),),
    sharding=ROWS,
    sized=lambda leading, row: _mlp_arguments(leading, *row, *row, *row, "gelu", "none"),
    flops=_mlp_flops,
    sources=epilogue.SOURCES,
    refuses=epilogue.refuses,
    detail=_explain_mlp,
    made_of=f"{epilogue.MADE_OF}. On cuda a GEMM takes the activation's backward by the same rule",
    samples=_mlp_samples(),
    benchmarks=tuple(
        _mlp_arguments((rows,), 768, 3072, 768, "gelu", "none") for rows in (64, 2048)
    ),
    benchmarks_on_gpu=tuple(
        _mlp_arguments((8192,), width, 4 * width, width, "gelu", kind)
        for width in (1024, 4096)
        for kind in ("none", "tanh")
    ),
    tiny=_mlp_arguments((1,), 64, 64, 64, "gelu", "none"),
    # A chain of two GEMMs, whose 16-bit middle is rounded twice.
    numerics=Numerics(
        fp32=dict.fromkeys(_MLP_RESULTS, 2.0),
        terms=_mlp_terms,
        rounding=dict.fromkeys(_MLP_RESULTS, 3.0),
    ),
    small=65536,
)


# --- gated_mlp ----------------------------------------------------------------------------------


def _gated_mlp(backend, x, gate_weight, up_weight, down_weight, activation, approximate):
    if not checks.all_dense(x, gate_weight, up_weight, down_weight):
        _check_gated_mlp(x, gate_weight, up_weight, down_weight, activation, approximate)
    gate, up = gemm.linear(x, gate_weight), gemm.linear(x, up_weight)
    hidden = run_on(gated_act.OP, backend, (gate, up, activation, approximate))
    return gemm.linear(hidden, down_weight)


def _gated_mlp_reference(x, gate_weight, up_weight, down_weight, activation, approximate):
    factors = (gate_weight, up_weight, down_weight)
    if up_weight.shape != gate_weight.shape or not checks.all_dense(x, *factors):
        _check_gated_mlp(x, *factors, activation, approximate)
    gate = activations.activate(GATED_MLP, linear(x, gate_weight), activation, approximate)
    return linear(gate * linear(x, up_weight), down_weight)


def _check_gated_mlp(x, gate_weight, up_weight, down_weight, activation, approximate):
    check(GATED_MLP.name, x, gate_weight=gate_weight, bias=None)
    check(GATED_MLP.name, x, up_weight=up_weight, bias=None)
    if up_weight.shape != gate_weight.shape:
        accepted = f"the shape of gate_weight, {list(gate_weight.shape)}"
        came = f"of shape {list(up_weight.shape)}"
        raise ArgumentError(GATED_MLP.name, "up_weight", came, accepted)
    hidden = _hidden(x, gate_weight)
    check(GATED_MLP.name, hidden, "gate_weight", down_weight=down_weight, bias=None)
    activations.check(GATED_MLP.name, activation, approximate)


def _gated_mlp_flops(x, *factors):
    rows = x.shape[:-1].numel()
    return of_gemms(*(rows * factor.numel() for factor in factors[:3]))


def _gated_mlp_terms(x, gate_weight, up_weight, down_weight, activation, approximate, grad_y):
    known = activations.ACTIVATIONS[activation, approximate]
    x, *weights = (t.double().abs() for t in (x, gate_weight, up_weight, down_weight))
    grad = grad_y.double().abs()
    gate, up = linear(x, weights[0]), linear(x, weights[1])
    grad_hidden = grad @ weights[2]
    activated = known.value(gate)
    grad_gate, grad_up = grad_hidden * up * known.slope(gate), grad_hidden * activated
    return {
        "y": linear(activated * up, weights[2]),
        "grad_x": grad_gate @ weights[0] + grad_up @ weights[1],
        "grad_gate_weight": outer(grad_gate, x),
        "grad_up_weight": outer(grad_up, x),
        "grad_down_weight": outer(grad, activated * up),
    }


def _gated_mlp_arguments(leading, width, features, *kind):
    weights = (weight(features, width), weight(features, width), weight(width, features))
    return (activation(*leading, width), *weights, *kind)


_GATED_SHAPES: tuple[tuple[tuple[int, ...], int, int], ...] = (
    ((), 1, 1),
    ((2, 3), 5, 7),
    ((256,), 67, 127),
    ((3, 1), 8, 1021),
    ((0,), 8, 5),
)


def _gated_mlp_samples():
    found = [_gated_mlp_arguments(*s, "silu", "none") for s in _GATED_SHAPES]
    return (*found, *(_gated_mlp_arguments(*_GATED_SHAPES[2], *kind) for kind in activations.KINDS))


_GATED_RESULTS = ("y", "grad_x", "grad_gate_weight", "grad_up_weight", "grad_down_weight")

GATED_MLP = Composite(
    name="gated_mlp",
    forward="(Tensor x, Tensor gate_weight, Tensor up_weight, Tensor down_weight, str activation,"
    " str approximate) -> (Tensor y)",
    backward="(Tensor grad_y, Tensor x, Tensor gate_weight, Tensor up_weight, Tensor down_weight,"
    " str activation, str approximate) -> (Tensor grad_x, Tensor grad_gate_weight,"
    " Tensor grad_up_weight, Tensor grad_down_weight)",
    reference=_gated_mlp_reference,
    fused=_gated_mlp,
    check=_check_gated_mlp,
    fake=lambda x, gate, up, down, *_: (x.new_empty((*x.shape[:-1], down.shape[0])),),
    sharding=ROWS,
    sized=lambda leading, row: _gated_mlp_arguments(leading, *row, *row, "silu", "none"),
    flops=_gated_mlp_flops,
    sources=activations.SOURCES,
    samples=_gated_mlp_samples(),
    benchmarks=tuple(
        _gated_mlp_arguments((rows,), 768, 2048, "silu", "none") for rows in (64, 2048)
    ),
    benchmarks_on_gpu=(_gated_mlp_arguments((8192,), 4096, 14336, "silu", "none"),),
    tiny=_gated_mlp_arguments((1,), 64, 64, "silu", "none"),
    # A chain of two GEMMs, whose 16-bit middle is rounded three times.
    numerics=Numerics(
        fp32=dict.fromkeys(_GATED_RESULTS, 2.0),
        terms=_gated_mlp_terms,
        rounding=dict.fromkeys(_GATED_RESULTS, 3.0),
    ),
    small=65536,
)
