"""A linear layer and its activation in one kernel: a GEMM with bias and activation at its end.

- triton: our kernel, for every activation, if `torchweld tune` found it faster than two steps.
- cpu: oneDNN's 16-bit GEMM, if no gradient is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from torchweld import state
from torchweld.dispatch.autograd import (
    autograd_function,
    derive_from_reference,
    exports_a_derivative,
    find_apply,
)
from torchweld.dispatch.bare import BareOp
from torchweld.dispatch.proof import Results, name_results
from torchweld.isolate import leave_dispatch_modes
from torchweld.ops import activation as activations
from torchweld.ops.gemm import common as layers
from torchweld.ops.gemm import fused_choice, gemm
from torchweld.ops.gemm.fused_choice import Forms, Kind
from torchweld.registry import Differentiable

_SOURCE = "triton_kernels/linear_act.py"
SOURCES: dict[str, tuple[str, ...]] = {
    "cpu": activations.SOURCES["cpu"],
    "triton": (_SOURCE, *activations.SOURCES["triton"]),
}
MADE_OF = (
    "torch's GEMMs; after the first {}. On the GPU one kernel replaces the first GEMM and that"
    " pass where it is faster"
)

# With fewer products a GEMM takes microseconds, no longer than its launch.
_SMALLEST = 2**28
# Triton's kernel would have to copy longer rows, see its _factor.
_LONGEST_ROW = 2**22
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# oneDNN's names of activations. relu is left out, since oneDNN's turns NaN into 0.
_ONEDNN = {"gelu": "gelu", "silu": "swish", "sigmoid": "sigmoid", "tanh": "tanh"}


def _fake(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    *_, save_z = rest
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return y, torch.empty_like(y) if save_z else y.new_empty(0)


# y, and z, the sum before the activation. `tile` is an index into the source's table.
_kernel = BareOp(
    "linear_act",
    "(Tensor input, Tensor weight, Tensor? bias, str activation, str approximate, int tile,"
    " bool save_z) -> (Tensor y, Tensor z)",
    _fake,
    backends=(),
    triton=_SOURCE,
).step("triton")


def _fake_gradients(
    grad_y: torch.Tensor,
    z: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> tuple[torch.Tensor, ...]:
    grad_z = torch.empty_like(z, memory_format=torch.contiguous_format)
    return grad_z, z.new_empty(0) if bias is None else torch.empty_like(bias)


# The gradients of z and, if a bias is given, of the bias, which z already contains.
_backward = BareOp(
    "act_backward",
    "(Tensor grad_y, Tensor z, Tensor? bias, str activation, str approximate)"
    " -> (Tensor grad_z, Tensor grad_bias)",
    _fake_gradients,
    backends=(),
    triton=activations.SOURCES["triton"][0],
).step("triton")


def plan(
    backend: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *kind: str
) -> Callable[..., torch.Tensor]:
    """What serves activation(linear(x, weight, bias)): one kernel if it is faster, or two steps.

    It is a function of the three tensors.
    """
    arguments = (x, weight, bias)
    if kind[0] == "identity":
        return _run_gemm
    if backend == "triton" and (tile := choose_tile_for(*arguments, *kind)) is not None:
        return partial(_run_in_one_kernel, (*kind, tile))
    if backend == "cpu" and _onednn_activates(*arguments, *kind):
        return partial(_run_onednn, kind)
    return layers.plan_in_two_steps(backend, *arguments, *kind)


def _run_gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *_: Any
) -> torch.Tensor:
    return gemm.linear(x, weight, bias)


def _run_onednn(
    kind: tuple[str, ...],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *_: Any,
) -> torch.Tensor:
    algorithm = kind[1] if kind[0] == "gelu" else ""
    return gemm.onednn(x, weight, bias, _ONEDNN[kind[0]], algorithm)


def _onednn_activates(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *kind: str
) -> bool:
    """Whether oneDNN can run these and is faster: it writes once, and does not round the sum.

    In float32 torch's own GEMM is faster by more than the time of the pass.
    """
    if kind[0] not in _ONEDNN or kind not in activations.KINDS:
        return False
    if gemm.wants_gradient(x, weight, bias) or not gemm.is_served_by_onednn(x, weight, bias):
        return False
    return _onednn_keeps_nan(x.dtype, *kind)


@functools.cache
def _onednn_keeps_nan(dtype: torch.dtype, *kind: str) -> bool:
    """Whether oneDNN's activation maps NaN to NaN; torch 2.10's float16 sigmoid returns 0."""
    with leave_dispatch_modes():
        x, weight = torch.full((2, 8), torch.nan, dtype=dtype), torch.ones(3, 8, dtype=dtype)
        return bool(_run_onednn(kind, x, weight, None).isnan().all())


# --- One kernel and its nodes ---------------------------------------------------------------------
# There are two nodes, as in two steps: first the GEMM's, whose gradients a pipeline schedule can
# run separately, then the activation's.


def _run_in_one_kernel(
    how: tuple[Any, ...],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *_: Any,
) -> torch.Tensor:
    *kind, tile = how
    dtype = gemm.find_dtype(x)
    x, weight = x.to(dtype), weight.to(dtype)
    if bias is not None and bias.dtype is not dtype:
        bias = bias.float()
    if not gemm.wants_gradient(x, weight, bias):
        return _kernel(x, weight, bias, *kind, tile, False)[0]  # type: ignore[no-any-return]
    with torch.no_grad():
        y, z = _kernel(x, weight, bias, *kind, tile, True)
    z = gemm.enter_graph(x, weight, None, z)
    return _ACTIVATION.enter_graph(z, bias, *kind, y)  # type: ignore[no-any-return]


def _gradients(
    grad_y: torch.Tensor, z: torch.Tensor, bias: torch.Tensor | None, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of z, which contains the bias, and of the bias."""
    *kind, need_bias = rest
    return _backward(grad_y, z, bias if need_bias else None, *kind)


_derivatives_of_bias_act = derive_from_reference(activations.BIAS_ACT)


def _derivatives(
    grad_y: torch.Tensor, z: torch.Tensor, bias: torch.Tensor | None, *how: Any
) -> tuple[torch.Tensor | None, ...]:
    """Differentiable gradients, for second derivatives."""
    return _derivatives_of_bias_act(grad_y, z, layers.make_zeros_with_graph(bias), *how)


class Activation:
    """An activation's node; its result is the last argument, already computed.

    `gradients` is the backward pass by Triton, and `derivatives` by torch, for second derivatives.
    """

    backend = "triton"

    def __init__(
        self, name: str, forward: str, backward: str, gradients: Any, derivatives: Any
    ) -> None:
        self.backward = gradients
        self.function = autograd_function(
            Differentiable(
                name=name, forward=forward, backward=backward, backward_reference=derivatives
            ),
            self,
        )
        self._apply = find_apply(self.function)

    def enter_graph(self, *arguments: Any) -> Any:
        """The result, in autograd's graph."""
        return (self.function.apply if state.is_compiling() else self._apply)(*arguments)

    @staticmethod
    def forward(*arguments: Any) -> Any:
        y = arguments[-1]
        return torch.ops.aten._unsafe_view(y, y.shape)  # a node must not return its input


_ACTIVATION = Activation(
    "activated_with_its_gemm",
    "(Tensor input, Tensor? bias, str activation, str approximate, Tensor y) -> (Tensor activated)",
    "(Tensor grad_activated, Tensor input, Tensor? bias, str activation, str approximate,"
    " bool need_bias) -> (Tensor grad_input, Tensor grad_bias)",
    _gradients,
    _derivatives,
)


# --- Choice ---------------------------------------------------------------------------------------


def choose_tile_for(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *kind: str
) -> int | None:
    """The tile for one kernel; None: no kernel can serve, or two steps are faster."""
    if why_not(x, weight, bias) is not None:
        return None
    arguments = (x, weight, bias)
    # A check runs outside of the caller's autocast, and without gradients.
    dtype, save_z = gemm.find_dtype(x), gemm.wants_gradient(x, weight, bias)
    tiles = partial(list_tiles, x, weight)
    forms = partial(_make_forms, dtype, save_z, *arguments, *kind)
    return fused_choice.choose_tile(x, _kind(*arguments, *kind), tiles, forms)


def explain(
    backend: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *kind: str
) -> str:
    """Whether Triton runs one kernel or two steps, and why."""
    if backend != "triton":
        return ""
    unfused = "torch's GEMM, then a pass for bias and activation"
    arguments = (x, weight, bias)
    return fused_choice.explain(unfused, x, _kind(*arguments, *kind), why_not(*arguments))


def why_not(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    """Why one kernel cannot serve."""
    if exports_a_derivative():
        return "inside torch.export: its two nodes would lose their derivative"
    if reason := gemm.why_not_fused(x, weight, bias):
        return reason
    tensors = [t for t in (x, weight, bias) if t is not None]
    if any(t.device != x.device or t.dtype not in _DTYPES for t in tensors):
        return "the tensors are on several devices, or of an unsupported dtype"
    if x.dtype is not weight.dtype and not torch.is_autocast_enabled(x.device.type):
        return "input and weight are of different dtypes"
    if weight.shape[1] >= _LONGEST_ROW:
        return f"more than {_LONGEST_ROW} input features"
    # While compiling nothing is timed, and the number of rows must not become a guard.
    if not state.is_compiling() and x.numel() * weight.shape[0] < _SMALLEST:
        return f"fewer than {_SMALLEST} products: too small to gain"
    return None


def _kind(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *kind: str) -> Kind:
    """Everything that a timing depends on besides the rows; sizes are text, hence constants."""
    columns, inner = weight.shape
    transposed = [name for name, t in (("input", x), ("weight", weight)) if t.stride(-1) != 1]
    return (
        ("op", "linear_act in one kernel"),
        ("dtype", str(gemm.find_dtype(x)).removeprefix("torch.")),
        ("features", f"{inner} to {columns}"),
        ("transposed", " ".join(transposed)),
        ("activation", " ".join(kind)),
        ("bias", bias is not None),
        ("saves z", gemm.wants_gradient(x, weight, bias)),
    )


def _make_forms(
    dtype: torch.dtype,
    save_z: bool,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *how: str,
) -> Forms:
    """One kernel with each of its tiles against two steps."""
    x, weight = x.detach().to(dtype), weight.detach().to(dtype)
    bias = None if bias is None else bias.detach().to(dtype)
    names = ("y", "z") if save_z else ("y",)

    def unfused(x: torch.Tensor) -> torch.Tensor:
        return layers.plan_in_two_steps("triton", x, weight, bias, *how)(x, weight, bias)

    def fused(tile: int, x: torch.Tensor) -> Results:
        return name_results(_kernel(x, weight, bias, *how, tile, save_z), *names)

    def trusted(x: torch.Tensor) -> Results:
        return name_results((unfused(x), linear(x, weight, bias)), *names)

    def exact(x: torch.Tensor) -> Results:
        z = linear_in_float64(x, weight, bias)
        return name_results((activations.ACTIVATIONS[how].function(z), z), *names)  # type: ignore[index]

    return Forms(
        tensors=[x],
        unfused=unfused,
        fused={t: partial(fused, t) for t in list_tiles(x, weight)},
        exact=exact,
        trusted=trusted,
        products_a_row=weight.numel(),
    )


def linear_in_float64(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """linear in float64. The weight is converted piece by piece to save memory."""
    wide = x.double()
    z = torch.cat([wide @ some.double().t() for some in weight.split(_FEATURES)], -1)
    return z if bias is None else z + bias.double()


_FEATURES = 2048


def list_tiles(x: torch.Tensor, weight: torch.Tensor) -> Sequence[int]:
    """The tiles worth timing."""
    dtype = gemm.find_dtype(x)
    return list(fused_choice.kernels().candidates(x.to(dtype), weight.to(dtype)))
