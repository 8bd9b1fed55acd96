"""The first half of a gated MLP: in one kernel on Hopper, else two GEMMs and a pass.

The kernel serves by rule, where its tiles fill the GPU: an H200 takes 0.94 to 1.02 of the time of
its two GEMMs only, and a pass after them takes another 0.07.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from torchweld.dispatch.autograd import derive_from_reference
from torchweld.dispatch.bare import BareOp
from torchweld.dispatch.call import run_on
from torchweld.dispatch.proof import Results, name_results
from torchweld.dispatch.warm.guards import are_comparable
from torchweld.ops import activation as activations
from torchweld.ops.gemm import common as layers
from torchweld.ops.gemm import epilogue, fused_choice, gemm
from torchweld.ops.gemm.fused_choice import Forms, Kind


def _fake(x: torch.Tensor, gate_weight: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    *_, save = rest
    y = x.new_empty((*x.shape[:-1], gate_weight.shape[0]))
    return y, *(torch.empty_like(y) if save else y.new_empty(0) for _ in range(2))


# y, and both products.
_kernel = BareOp(
    "gated_linear",
    "(Tensor input, Tensor gate_weight, Tensor up_weight, str activation, str approximate,"
    " bool save) -> (Tensor y, Tensor gate, Tensor up)",
    _fake,
    backends=(),
    triton=epilogue.SOURCES["triton"][0],
).step("triton")


def plan(
    backend: str, x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, *how: str
) -> Callable[..., torch.Tensor]:
    """What serves activation(linear(x, gate_weight)) * linear(x, up_weight)."""
    arguments = (x, gate_weight, up_weight)
    if backend == "triton" and _is_in_one_kernel(*arguments, *how):
        return partial(_run_in_one_kernel, how)
    return _plan_in_steps(backend, *arguments, *how)


def _plan_in_steps(
    backend: str, x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, *how: str
) -> Callable[..., torch.Tensor]:
    linear = gemm.find_linear(x, gate_weight, up_weight)
    if not are_comparable((x, gate_weight, up_weight)):
        return partial(_run_in_steps, linear, partial(run_on, activations.GATED_ACT, backend), how)
    gate, up = (
        x.new_empty(0, dtype=gemm.find_dtype(x)).requires_grad_(gemm.wants_gradient(x, weight))
        for weight in (gate_weight, up_weight)
    )
    act = layers.plan_act(activations.GATED_ACT, backend, gate, up, *how)
    return partial(_run_in_steps, linear, *act)


def _run_in_steps(
    linear: Callable[..., torch.Tensor],
    function: Callable[..., torch.Tensor],
    rest: tuple[str, ...],
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
) -> torch.Tensor:
    return function(linear(x, gate), linear(x, up), *rest)


def _run_in_one_kernel(
    how: tuple[str, ...], x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor
) -> torch.Tensor:
    dtype = gemm.find_dtype(x)
    x, gate_weight, up_weight = (t.to(dtype) for t in (x, gate_weight, up_weight))
    save = gemm.wants_gradient(x, gate_weight, up_weight)
    with torch.no_grad():
        y, gate, up = _kernel(x, gate_weight, up_weight, *how, save)
    if not save:
        return y  # type: ignore[no-any-return]
    gate = gemm.enter_graph(x, gate_weight, None, gate)
    up = gemm.enter_graph(x, up_weight, None, up)
    return _ACTIVATION.enter_graph(gate, up, *how, y)  # type: ignore[no-any-return]


def _gradients(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return activations.GATED_ACT.kernels["triton"].steps.backward(*given)  # type: ignore[no-any-return]


_ACTIVATION = epilogue.Activation(
    "gated_with_its_gemms",
    "(Tensor gate, Tensor up, str activation, str approximate, Tensor y) -> (Tensor activated)",
    "(Tensor grad_activated, Tensor gate, Tensor up, str activation, str approximate)"
    " -> (Tensor grad_gate, Tensor grad_up)",
    _gradients,
    derive_from_reference(activations.GATED_ACT),
)


# --- Choice ---------------------------------------------------------------------------------------


def _is_in_one_kernel(
    x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, *how: str
) -> bool:
    arguments = (x, gate_weight, up_weight)
    if _why_not(*arguments) is not None:
        return False
    kind, by_rule = _kind(*arguments, *how), [fused_choice.kernels().BY_RULE]
    # A check runs outside of the caller's autocast, and without gradients.
    kept = gemm.find_dtype(x), gemm.wants_gradient(*arguments)
    forms = partial(_make_forms, *kept, *arguments, *how)
    return fused_choice.choose_tile(x, kind, lambda: by_rule, forms) is not None


def explain(
    backend: str,
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    _: torch.Tensor,
    *how: str,
) -> str:
    """Whether Triton runs one kernel or three steps, and why."""
    if backend != "triton":
        return ""
    arguments = (x, gate_weight, up_weight)
    kind, reason = _kind(*arguments, *how), _why_not(*arguments)
    return fused_choice.explain("torch's GEMMs, then a pass for the gate", x, kind, reason)


def _why_not(x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor) -> str | None:
    """Why one kernel cannot serve."""
    if up_weight.shape != gate_weight.shape:
        return "the weights' shapes differ"
    for weight in (gate_weight, up_weight):
        if (reason := epilogue.why_not(x, weight, None)) is not None:
            return reason
    dtype = gemm.find_dtype(x)
    if not fused_choice.kernels().serves_gated(*(t.to(dtype) for t in (x, gate_weight, up_weight))):
        return "it takes 16 bits, contiguous rows and enough tiles to fill a GPU of Hopper"
    return None


def _kind(x: torch.Tensor, gate_weight: torch.Tensor, up_weight: torch.Tensor, *how: str) -> Kind:
    columns, inner = gate_weight.shape
    return (
        ("op", "gated linear layers in one kernel"),
        ("dtype", str(gemm.find_dtype(x)).removeprefix("torch.")),
        ("features", f"{inner} to {columns}"),
        ("activation", " ".join(how)),
        ("saves both products", gemm.wants_gradient(x, gate_weight, up_weight)),
    )


def _make_forms(
    dtype: torch.dtype,
    save: bool,
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    *how: str,
) -> Forms:
    """One kernel against three steps."""
    x, gate_weight, up_weight = (t.detach().to(dtype) for t in (x, gate_weight, up_weight))
    weights = gate_weight, up_weight
    names = ("y", "gate", "up") if save else ("y",)

    def fused(x: torch.Tensor) -> Results:
        return name_results(_kernel(x, *weights, *how, save), *names)

    def unfused(x: torch.Tensor) -> torch.Tensor:
        return _plan_in_steps("triton", x, *weights, *how)(x, *weights)

    def trusted(x: torch.Tensor) -> Results:
        return name_results((unfused(x), *(gemm.linear(x, w) for w in weights)), *names)

    def exact(x: torch.Tensor) -> Results:
        gate, up = (epilogue.linear_in_float64(x, w, None) for w in weights)
        activated = activations.ACTIVATIONS[how].function(gate)  # type: ignore[index]
        return name_results((activated * up, gate, up), *names)

    return Forms(
        tensors=[x],
        unfused=unfused,
        fused={fused_choice.kernels().BY_RULE: fused},
        exact=exact,
        trusted=trusted,
        products_a_row=2 * gate_weight.numel(),
    )
