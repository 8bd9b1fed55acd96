"""Contract 2: derivatives in float64, first and second."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import selection
import torchweld
from conftest import Target
from oracle import incoming, is_floating, run, total
from torchweld import functional, numerics
from torchweld.bench.cases import CASES
from torchweld.dispatch.call import call
from torchweld.registry import Op, materialize


def _small_samples(op: Op) -> list[list[Any]]:
    samples = [materialize(s, torch.float64, requires_grad=True) for s in CASES[op.name].samples]
    tensors = [[v for v in s if isinstance(v, torch.Tensor)] for s in samples]
    sizes = [[t.numel() for t in found] for found in tensors]
    return [s for s, found in zip(samples, sizes, strict=True) if found[0] > 0 and max(found) <= 64]


def _requires_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _check(op: Op, inputs: list[Any]) -> None:
    tensors = [v for v in inputs if _requires_grad(v)]

    def function(*given: torch.Tensor) -> Any:
        replacement = iter(given)
        return call(op, *[next(replacement) if _requires_grad(v) else v for v in inputs])

    assert torch.autograd.gradcheck(function, tensors, nondet_tol=0.0)


# The reference has the kernels' gradients: see test_float64_equals_the_reference.
@pytest.mark.parametrize("backend", ["cpu", "eager"] if selection.WHOLE else ["cpu"])
@pytest.mark.targets(composites=True)
def test_gradcheck(op: Op, backend: str) -> None:
    """Check the kernels: the baseline instruction set has some for float64.

    With create_graph=True torch differentiates the reference, which test_transforms.py compares.
    """
    samples = _small_samples(op)
    assert samples
    with torchweld.use_backend(backend):
        for inputs in samples:
            _check(op, inputs)


@pytest.mark.targets(composites=True)
def test_float64_equals_the_reference(op: Op) -> None:
    """Equal to a few units in the last place, so no intermediate is float32."""
    for arguments in CASES[op.name].samples:
        inputs = materialize(arguments, torch.float64)
        with torchweld.use_backend("cpu"):
            ours = run(op, inputs)
        eager = run(op, inputs, op.reference)
        grads = {f"grad_{name}": incoming(eager[name]) for name in op.public}
        sums = CASES[op.name].terms(*inputs, **grads)
        for name, expected in eager.items():
            tolerance = 64 * 2**-53 * sums[name].max() if sums[name].numel() else 0
            assert torch.all((ours[name] - expected).abs() <= tolerance), (name, arguments)


@pytest.mark.targets(composites=True)
def test_frozen_parameters_get_no_gradient(target: Target) -> None:
    """Gradients that are not required are neither computed nor returned."""
    arguments = next(
        s for s in CASES[target.op.name].samples if materialize(s, torch.float32)[0].numel() > 0
    )
    inputs = materialize(arguments, torch.float32, target.device, requires_grad=True)
    for frozen in [v for v in inputs[1:] if isinstance(v, torch.Tensor)]:
        frozen.requires_grad_(False)
    total(call(target.op, *inputs)).backward()
    assert inputs[0].grad is not None
    assert all(v.grad is None for v in inputs[1:] if isinstance(v, torch.Tensor))


@pytest.mark.targets(composites=True)
def test_changing_a_saved_tensor_is_noticed(target: Target) -> None:
    """Autograd checks the versions of saved tensors."""
    arguments = next(
        s for s in CASES[target.op.name].samples if materialize(s, torch.float32)[0].numel() > 0
    )
    inputs = materialize(arguments, torch.float32, target.device, requires_grad=True)
    result = total(call(target.op, *inputs))
    unsaved = target.op.unsaved(*inputs) if target.op.unsaved else ()
    saved = [
        value
        for name, value in zip(target.op.forward_signature.arguments, inputs, strict=True)
        if name in target.op.backward_signature.arguments
        and name not in unsaved
        and is_floating(value)
    ]
    if not saved:  # the op saves only numbers
        return
    with torch.no_grad():
        saved[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


_ROWS = torch.arange(6) % 5
_EXPERTS = torch.stack([_ROWS % 3, (_ROWS + 1) % 3], 1)
# Calls with some of their inputs computed from others, as in models with a gate of the input, a
# router, a predicted weight or a tied embedding; t is a matrix [6, 8].
_RELATED: dict[str, Any] = {
    "bias_act": lambda t: functional.bias_act(t, t.sum(0)),
    "gated_act": lambda t: functional.gated_act(t, t * t),
    "gated_act of one": lambda t: functional.gated_act(t, t),
    "layer_norm": lambda t: functional.layer_norm(t, (8,), t.mean(0), t.sum(0)),
    "rms_norm": lambda t: functional.rms_norm(t, (8,), t.mean(0)),
    "dropout_add_layer_norm": lambda t: functional.dropout_add_layer_norm(t * t, t, t.mean(0)),
    "linear_act": lambda t: functional.linear_act(t * t, t, t.sum(1), activation="silu"),
    "batch_norm_act": lambda t: functional.batch_norm_act(
        t, None, None, t.mean(0), t.sum(0), True, activation="silu"
    ),
    "softmax_dropout": lambda t: functional.softmax_dropout(t[None, None], (t * t)[None, None]),
    "linear_cross_entropy": lambda t: functional.linear_cross_entropy(t * t, t, _ROWS),
    "linear_cross_entropy of rows": lambda t: functional.linear_cross_entropy(
        t * t, t, _ROWS, reduction="none"
    ),
    "experts_mlp": lambda t: functional.experts_mlp(
        t, *(t.new_ones(3, 8, n) * t[:1, None, :n] for n in (8, 4)), _EXPERTS, t[:, :2].sigmoid()
    ),
    "rotary_embedding_qk": lambda t: torch.cat(
        functional.rotary_embedding_qk(
            *(t[None, None],) * 2,
            *(t.new_full((6, 4), x) for x in (0.6, 0.8)),
            q_norm_weight=t.mean(0),
            k_norm_weight=t.sum(0),
            norm_eps=1e-6,
        )
    ),
}


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("name", _RELATED)
def test_inputs_computed_from_others(name: str, backend: str) -> None:
    """A gradient with a graph is the one without."""
    t = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    order = ("cpu", "eager") if backend == "cpu" else ("eager",)
    with torchweld.use_backend(*order):
        y = _RELATED[name](t).pow(3).sum()
        (expected,) = torch.autograd.grad(y, t, retain_graph=True)
        (found,) = torch.autograd.grad(y, t, create_graph=True)
    torch.testing.assert_close(found, expected, **numerics.SECOND64)
