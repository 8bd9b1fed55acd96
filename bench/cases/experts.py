"""Cases of the experts of a mixture."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from torchweld.bench.cases.declare import CASES, Arguments, Cases
from torchweld.ops.activation import ACTIVATIONS
from torchweld.ops.experts import mlp
from torchweld.ops.experts.grouped import ExpertNeeds, Form


def _terms(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    indices: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    *how: Any,
    grad_y: Tensor,
) -> dict[str, Tensor]:
    """Terms, counting every product of the GEMMs; a limit only makes errors smaller."""
    form = Form(*how[:-1])
    x, weights, grad = (t.detach().double().abs() for t in (x, weights, grad_y))
    factors = [
        None if t is None else t.detach().double().abs()
        for t in (gate_up, down, gate_up_bias, down_bias)
    ]
    known = ACTIVATIONS[form.activation, form.approximate]
    made = dict(zip(("gate_up", "down", "gate_up_bias", "down_bias"), factors, strict=True))
    found = {name: torch.zeros_like(t) for name, t in made.items() if t is not None}
    found |= {"y": torch.zeros_like(grad), "input": torch.zeros_like(x)}
    found["weights"] = torch.zeros_like(weights)
    for at, k in itertools.product(range(gate_up.shape[0]), range(indices.shape[-1])):
        on = indices[..., k] == at
        rows, s, g = x[on], weights[..., k][on][:, None], grad[on]
        first, last, *biases = [None if t is None else t[at] for t in factors]
        assert first is not None
        assert last is not None
        first, last = (first.t(), last.t()) if form.transposed else (first, last)
        taken = rows * s if form.weights_first else rows
        gate, up = _split_sizes(form, linear(taken, first, biases[0]))
        hidden = known.value(gate) * up
        results = linear(hidden, last, biases[1])
        grad_results = g if form.weights_first else g * s
        grad_hidden = grad_results @ last
        grad_gate, grad_up = grad_hidden * up * known.slope(gate), grad_hidden * known.value(gate)
        grad_z = _join_sizes(form, grad_gate, grad_up)
        grad_taken = grad_z @ first
        found["y"][on] += results if form.weights_first else results * s
        found["input"][on] += grad_taken * s if form.weights_first else grad_taken
        of_weights = grad_taken * rows if form.weights_first else g * results
        found["weights"][..., k][on] += of_weights.sum(-1)
        parts = {"gate_up": grad_z.t() @ taken, "down": grad_results.t() @ hidden}
        for name, part in parts.items():
            found[name][at] += part.t() if form.transposed else part
        for name, part in (("gate_up_bias", grad_z), ("down_bias", grad_results)):
            if name in found:
                found[name][at] += part.sum(0)
    return {name if name == "y" else f"grad_{name}": t for name, t in found.items()}


def _split_sizes(form: Form, z: Tensor) -> tuple[Tensor, Tensor]:
    if not form.gated:
        return z, torch.ones_like(z)
    gate, up = (z[..., ::2], z[..., 1::2]) if form.interleaved else z.chunk(2, -1)
    return gate, up + abs(form.up_offset)


def _join_sizes(form: Form, gate: Tensor, up: Tensor) -> Tensor:
    if not form.gated:
        return gate
    return (
        torch.stack([gate, up], -1).flatten(-2) if form.interleaved else torch.cat([gate, up], -1)
    )


def _samples() -> tuple[Arguments, ...]:
    """The larger samples are smooth: a derivative jumps where a 16-bit number is rounded."""
    samples = [
        mlp.arguments((), 1, 1, (1, 1, 1)),
        mlp.arguments((24,), 2, 3, (5, 7, 3), biases=True),
        mlp.arguments((256,), 2, 5, (67, 31, 61), biases=True, skipped=True),
        mlp.arguments((1250,), 8, 64, (160, 96, 160), biases=True),
        mlp.arguments((2, 3), 3, 2, (8, 33, 8)),
        mlp.arguments((0,), 2, 3, (8, 5, 3)),
    ]
    for name, form in mlp.FORMS.items():
        biases = name not in ("plain", "gelu", "transposed")
        samples.append(mlp.arguments((15,), 2, 2, (4, 3, 4), form, biases=biases, skipped=True))
        if Form(*form[:-1]).activation != "relu" and Form(*form[:-1]).limit is None:
            samples.append(mlp.arguments((64,), 4, 7, (48, 31, 37), form, biases=biases))
    return tuple(samples)


CASES[mlp.OP.name] = Cases(
    samples=_samples(),
    # Layers of OLMoE and, with half of its experts, Qwen3-30B-A3B.
    benchmarks=(
        mlp.arguments((512,), 8, 64, (2048, 1024, 2048)),
        mlp.arguments((512,), 8, 64, (2048, 768, 2048)),
    ),
    benchmarks_on_gpu=(mlp.arguments((8192,), 8, 128, (2048, 768, 2048)),),
    tiny=mlp.arguments((1,), 2, 4, (64, 64, 64)),
    terms=_terms,
    # A chain of two GEMMs with three roundings to 16 bits between them, and the result's own after
    # a sum of such rows. The terms of a router weight's gradient cancel.
    rounding={
        **dict.fromkeys(("y", *(f"grad_{name}" for name in ExpertNeeds._fields)), 3.0),
        **dict.fromkeys(("grad_gate_up_bias", "grad_down_bias"), 4.0),
        "grad_weights": 6.0,
    },
    # Where GEMMs are of 16 bits, as with AVX-512, a few elements of the smallest samples decide,
    # whose roundings are other ones in eager.
    eager=dict.fromkeys(("y", *(f"grad_{name}" for name in ExpertNeeds._fields)), 2.0),
)
