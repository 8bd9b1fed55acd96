"""Chunks of rows inside ops of torch.library, and their arguments in one list.

While torch compiles or records, and for fake or batched tensors, chunks run inside an op: their
sizes depend on `memory` and on the ignored rows, which a graph does not know.
"""

from __future__ import annotations

from typing import Any

import torch

from torchweld.ops.loss import chunks, rows
from torchweld.ops.loss.chunks import Layer, Needs
from torchweld.ops.loss.results import LossFactors
from torchweld.ops.loss.rows import LossTransform
from torchweld.ops.opaque import define_opaque

LAYER = (
    "Tensor input, Tensor linear_weight, Tensor? bias, int memory, ScalarType logits_dtype,"
    " bool float32_sums, bool batch_invariant, SymInt widest"
)
_NEEDS = "bool need_input, bool need_weight, bool need_bias"
_HOW, _GRADS = f"Tensor target, {rows.GIVEN_SCHEMA}", rows.GRADS_SCHEMA
LAYERS, _HOWS = len(Layer._fields), 6  # the numbers of arguments in LAYER and _HOW
# The arguments of the autograd functions are plain: Dynamo makes no graph of tuples with tensors.
# The first three, which may need a gradient, are input, weight and bias of a layer.
FIELDS, FACTORS = LAYERS + len(LossTransform._fields), len(LossFactors._fields)
AFTER = (None,) * (FIELDS - 3)


def _split(inputs: tuple[Any, ...]) -> tuple[Layer, torch.Tensor, LossTransform, tuple[Any, ...]]:
    layer = Layer(*inputs[:LAYERS])
    target, *how = inputs[LAYERS : LAYERS + _HOWS]
    # Kernels do not take the number of classes; only the caller needs it.
    known = LossTransform(None, *how)._replace(kind=rows.accumulate_type(layer.logits_dtype))
    return layer, target, known, inputs[LAYERS + _HOWS :]


def _forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    layer, target, how, wanted = _split(inputs)
    plan = chunks.make_plan(layer, chunks.NO_GRADIENT, rows.FORWARD.find(layer.input))
    return chunks.run_forward(plan, layer, target, how, *wanted)


def _fake_forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    layer, target, how, wanted = _split(inputs)
    count = target.shape[0]
    return (
        layer.input.new_empty(target.shape, dtype=how.kind),
        layer.input.new_empty((count, rows.STATISTICS), dtype=how.kind),
        target.new_empty((count if wanted[-1] else 0,)),
    )


def _present(layer: Layer, grads: chunks.Gradients) -> tuple[torch.Tensor, ...]:
    """The gradients; an op returns an empty tensor in place of one that is not wanted."""
    return tuple([layer.input.new_empty(0) if grad is None else grad for grad in grads])


def _backward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    layer, target, how, (statistics, coefficients, grad_picked, *needs) = _split(inputs)
    plan = chunks.make_plan(layer, Needs(*needs), rows.BACKWARD_IN_PLACE.find(layer.input))
    rest = (statistics, coefficients, grad_picked)
    return _present(layer, chunks.run_backward(plan, layer, target, how, *rest))


def _fake_backward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    sources = zip(inputs[:3], inputs[-3:], strict=True)
    made = [torch.empty_like(x) if need and x is not None else None for x, need in sources]
    return _present(Layer(*inputs[:LAYERS]), tuple(made))  # type: ignore[arg-type]


def _both(*inputs: Any) -> tuple[torch.Tensor, ...]:
    layer, target, how, rest = _split(inputs[:-3])
    kernel = rows.BOTH_IN_PLACE.find(layer.input)
    plan = chunks.make_plan(layer, Needs(*inputs[-3:]), kernel)
    coefficients, grad_picked, smooth = rest
    given = (coefficients, grad_picked)
    made, gradients = chunks.run_both(plan, layer, target, how, lambda: given, smooth)
    return (*made, *_present(layer, gradients))


def _fake_both(*inputs: Any) -> tuple[torch.Tensor, ...]:
    made = _fake_forward(*inputs[: LAYERS + _HOWS], False)
    return (*made, *_fake_backward(*inputs))


run_forward = define_opaque(
    "linear_rows",
    f"({LAYER}, {_HOW}, bool entropy, bool smooth, bool argmax)"
    " -> (Tensor picked, Tensor statistics, Tensor argmax)",
    _forward,
    _fake_forward,
)


run_backward = define_opaque(
    "linear_rows_backward",
    f"({LAYER}, {_HOW}, Tensor statistics, {_GRADS}, {_NEEDS})"
    " -> (Tensor grad_input, Tensor grad_linear_weight, Tensor grad_bias)",
    _backward,
    _fake_backward,
)


run_both = define_opaque(
    "linear_rows_both",
    f"({LAYER}, {_HOW}, {_GRADS}, bool smooth, {_NEEDS})"
    " -> (Tensor picked, Tensor statistics, Tensor argmax,"
    " Tensor grad_input, Tensor grad_linear_weight, Tensor grad_bias)",
    _both,
    _fake_both,
)
