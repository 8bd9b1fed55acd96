"""mlp: two linear layers with an activation between them, a transformer's feed-forward block."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from torchweld.ops.activation import common as activations
from torchweld.ops.gemm import common as layers
from torchweld.ops.gemm import epilogue, gemm
from torchweld.ops.gemm.act_linear import act_linear, algorithm_for
from torchweld.ops.gemm.act_linear import explain as explain_backward
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
        recompute: save only x, and recompute the rest in the backward. On the CPU the backward then
            holds two tensors of the hidden layer's size at a time, not three.

    Returns:
        A tensor [*, out_features].
    """
    return layers.recomputed(recompute, OP, x, w1, b1, w2, b2, activation, approximate, recompute)


def _fused(backend, x, w1, b1, w2, b2, activation, approximate, recompute):
    if not _fits(x, w1, b1, w2, b2):
        _check(x, w1, b1, w2, b2, activation, approximate, recompute)
    first = (backend, x, w1, b1, activation, approximate)
    if recompute and backend == "cpu" and activation != "identity":
        return _lean(*first, w2, b2)
    if backend == "cuda":
        algorithm = algorithm_for(x, w1, b1, w2, b2, activation, approximate)
        if algorithm is not None:
            y, z, bias = epilogue.unjoined(*first)
            assert z is not None  # since it needs a gradient
            return act_linear(z, bias, w2, b2, activation, approximate, y, algorithm)
    return gemm.linear(epilogue.linear_and_act(*first), w2, b2)


def _lean(backend, x, w1, b1, activation, approximate, w2, b2):
    """The forward recomputed in a backward, which does not save the activation."""
    z, bias = layers.summed(backend, x, w1, b1, activation)
    plain = type(w2) in (torch.Tensor, torch.nn.Parameter)
    if gemm.wants_gradient(z, bias) and layers.may_overwrite(z) and plain:
        return act_linear(z, bias, w2, b2, activation, approximate)
    return gemm.linear(layers.act(backend, z, bias, activation, approximate), w2, b2)


def _explain(backend, x, w1, b1, w2, b2, activation, approximate, recompute):
    forward = epilogue.explain(backend, x, w1, b1, activation, approximate)
    backward = explain_backward(x, w1, b1, w2, b2) if backend == "cuda" else ""
    return f"{forward}; in the backward {backward}" if backward else forward


def _fits(x, w1, b1, w2, b2):
    return layers.fits(x, w1, b1) and layers.fits(x, w2, b2)


def _reference(x, w1, b1, w2, b2, activation, approximate, recompute):
    if not _fits(x, w1, b1, w2, b2):
        _check(x, w1, b1, w2, b2, activation, approximate, recompute)
    return linear(activations.activate(OP, linear(x, w1, b1), activation, approximate), w2, b2)


def _check(x, w1, b1, w2, b2, activation, approximate, recompute):
    layers.check(OP.name, x, w1=w1, b1=b1)
    layers.check(OP.name, layers.hidden_of(x, w1), "w1", w2=w2, b2=b2)
    activations.check(OP.name, activation, approximate)


def _flops(x, w1, b1, w2, *_):
    rows = x.shape[:-1].numel()
    return of_gemms(rows * w1.numel(), rows * w2.numel())


def _terms(x, w1, b1, w2, b2, activation, approximate, recompute, grad_y):
    """Terms, counting every product of the four GEMMs."""
    known = activations.ACTIVATIONS[activation, approximate]
    x, w1, w2, grad = (t.double().abs() for t in (x, w1, w2, grad_y))
    z = linear(x, w1, None if b1 is None else b1.double().abs())
    grad_z, hidden = (grad @ w2) * known.slope(z), known.value(z)
    return {
        "y": linear(hidden, w2, None if b2 is None else b2.double().abs()),
        "grad_x": grad_z @ w1,
        "grad_w1": layers.outer(grad_z, x),
        "grad_b1": grad_z.sum_to_size(grad_z.shape[-1:]),
        "grad_w2": layers.outer(grad, hidden),
        "grad_b2": grad.sum_to_size(grad.shape[-1:]),
    }


def arguments(leading, width, features, out, *kind, recompute=False):
    """The arguments of a sample."""
    first = layers.arguments(leading, width, features)
    return (*first, weight(out, features), activation(out), *kind, recompute)


# Leading sizes, in_features, hidden_features, out_features.
_SHAPES: tuple[tuple[tuple[int, ...], int, int, int], ...] = (
    ((), 1, 1, 1),
    ((2, 3), 5, 7, 3),
    ((256,), 67, 127, 61),
    ((16,), 31, 10007, 17),
    ((64,), 31, 67, 10007),
    ((0,), 8, 5, 3),
)


def _samples():
    found = [arguments(*s, "gelu", "none") for s in _SHAPES]
    found += [arguments(*_SHAPES[2], *kind) for kind in activations.KINDS[1:]]
    found += [arguments(*s, "gelu", "none", recompute=True) for s in _SHAPES[1:3]]
    x, w1, _, w2, *_ = arguments(*_SHAPES[1])
    return (*found, *((x, w1, None, w2, None, "gelu", "tanh", lean) for lean in (False, True)))


_RESULTS = ("y", "grad_x", "grad_w1", "grad_b1", "grad_w2", "grad_b2")

OP = Composite(
    name="mlp",
    forward="(Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str activation,"
    " str approximate, bool recompute) -> (Tensor y)",
    backward="(Tensor grad_y, Tensor x, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2,"
    " str activation, str approximate, bool recompute) -> (Tensor grad_x, Tensor grad_w1,"
    " Tensor grad_b1, Tensor grad_w2, Tensor grad_b2)",
    reference=_reference,
    fused=_fused,
    check=_check,
    fake=lambda x, w1, b1, w2, *_: (x.new_empty((*x.shape[:-1], w2.shape[0])),),
    sharding=ROWS,
    sized=lambda leading, row: arguments(leading, *row, *row, *row, "gelu", "none"),
    flops=_flops,
    sources=epilogue.SOURCES,
    refuses=epilogue.refuses,
    detail=_explain,
    made_of=f"{epilogue.MADE_OF}. On cuda a GEMM takes the activation's backward by the same rule",
    samples=_samples(),
    benchmarks=tuple(arguments((rows,), 768, 3072, 768, "gelu", "none") for rows in (64, 2048)),
    benchmarks_on_gpu=tuple(
        arguments((8192,), width, 4 * width, width, "gelu", kind)
        for width in (1024, 4096)
        for kind in ("none", "tanh")
    ),
    tiny=arguments((1,), 64, 64, 64, "gelu", "none"),
    # A chain of two GEMMs with two roundings to 16 bits between them.
    numerics=Numerics(
        fp32=dict.fromkeys(_RESULTS, 2.0),
        terms=_terms,
        rounding=dict.fromkeys(_RESULTS, 3.0),
    ),
    small=65536,
)
