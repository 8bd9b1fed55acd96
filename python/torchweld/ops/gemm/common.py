"""Shared by the ops in this folder: the layer in two steps, checks, and sample arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from torchweld import checks, state
from torchweld.dispatch.bare import BareOp
from torchweld.dispatch.call import call, decide, run_checkpointed, run_on
from torchweld.dispatch.warm.guards import are_comparable
from torchweld.errors import ArgumentError
from torchweld.ops.activation import BIAS_ACT
from torchweld.ops.gemm import gemm
from torchweld.registry import Composite, Op, activation
from torchweld.registry import weight as weight_spec


def decide_recomputed(recompute: bool, op: Composite, *inputs: Any) -> Any:
    """As `decide`; with `recompute`, only its inputs are saved for the backward pass."""
    if recompute and gemm.wants_gradient(*inputs):
        return run_checkpointed(call, op, *inputs)
    return decide(op, *inputs)


# --- The layer in two steps -----------------------------------------------------------------------
# Calls that guards can compare are planned: all is decided, and nothing asks for the dispatcher.
# Others (modes, transforms, graphs, subclasses of tensors) ask at each step.

# Modes that keep results and return them again later.
_CHECKPOINTS = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)

# bias_act in place: no new pages, and half the lines in the caches.
_IN_PLACE = BareOp(
    "bias_act_", "(Tensor(a!) input, Tensor? bias, str activation, str approximate) -> ()"
)
_bias_act_ = _IN_PLACE.overload("cpu")

# On the CPU, the GEMM's share of a 16-bit bias; the activation's pass adds the rest. The GEMM
# rounds the sum, and small sums lose least. The derivative curves most near a sum of 0, so it is
# most accurate with all of the bias in the GEMM. Large sums suffer most from rounding, so the
# result is most accurate with none of the bias in the GEMM, as where no gradient is needed. With
# three quarters both are more accurate than with all. The remainder is exact: numbers within a
# factor of 2 have a representable difference.
_GEMMS_SHARE = 0.75


def plan_in_two_steps(
    backend: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *kind: str
) -> Callable[..., torch.Tensor]:
    """What serves activation(linear(x, weight, bias)): the GEMM, then bias_act on this backend."""
    dtype, in_gemm = gemm.find_dtype(x), kind[0] == "relu"
    is_cast = bias is not None and bias.dtype not in (dtype, torch.float32)
    if not are_comparable((x, weight, bias)) or (dtype.itemsize == 2 and is_cast):
        return partial(_run_each, backend, kind)
    linear = gemm.find_linear(x, weight, bias)
    trains = gemm.wants_gradient(x, weight, bias)
    if backend == "cpu" and not trains:
        return partial(_run_in_place, linear, in_gemm, kind)
    is_split = bias is not None and not in_gemm and backend == "cpu" and dtype.itemsize == 2
    needs_z = gemm.wants_gradient(x, weight, bias if in_gemm else None)
    z = x.new_empty(0, dtype=dtype).requires_grad_(needs_z)
    act = plan_act(BIAS_ACT, backend, z, None if in_gemm else bias, *kind)
    if is_split:
        return partial(_run_split, dtype, linear, *act)
    return partial(_run_with_bias if in_gemm else _run_before_bias, linear, *act)


def _run_each(
    backend: str,
    kind: tuple[str, ...],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *_: Any,
) -> torch.Tensor:
    z, bias = run_gemm(backend, x, weight, bias, kind[0])
    return act(backend, z, bias, *kind)


def _run_with_bias(
    linear: Callable[..., torch.Tensor],
    act: Callable[..., torch.Tensor],
    how: tuple[str, ...],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *_: Any,
) -> torch.Tensor:
    return act(linear(x, weight, bias), None, *how)


def _run_before_bias(
    linear: Callable[..., torch.Tensor],
    act: Callable[..., torch.Tensor],
    how: tuple[str, ...],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *_: Any,
) -> torch.Tensor:
    return act(linear(x, weight), bias, *how)


def _run_split(
    dtype: torch.dtype,
    linear: Callable[..., torch.Tensor],
    act: Callable[..., torch.Tensor],
    how: tuple[str, ...],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *_: Any,
) -> torch.Tensor:
    most, rest = _split(bias, dtype)
    return act(linear(x, weight, most), rest, *how)


def _run_in_place(
    linear: Callable[..., torch.Tensor],
    in_gemm: bool,
    kind: tuple[str, ...],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *_: Any,
) -> torch.Tensor:
    z = linear(x, weight, bias if in_gemm else None)
    if not z.is_contiguous():
        return act("cpu", z, None if in_gemm else bias, *kind)
    _IN_PLACE.direct(z, None if in_gemm else bias, *kind)
    return z


def plan_act(
    op: Op, backend: str, z: Any, other: Any, *kind: str
) -> tuple[Callable[..., torch.Tensor], tuple[str, ...]]:
    """What does what `op` does for two tensors like these, and its last arguments."""
    function, first, taken_at, _ = op.kernels[backend].make_ready((z, other, *kind))
    return partial(function, *first), kind if 2 in taken_at else ()


def run_gemm(
    backend: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The GEMM's result, and the rest of the bias, which the activation's pass adds.

    On a GPU the pass adds all of the bias, since splitting it would take three launches.
    """
    if activation == "relu":
        # The derivative jumps where the sum changes sign: do not round before the bias is added.
        return gemm.linear(x, weight, bias), None
    dtype = gemm.find_dtype(x)
    if bias is not None and dtype.itemsize == 2 and bias.dtype is not dtype:
        bias = bias.to(torch.promote_types(bias.dtype, torch.float32))
    splits = dtype.itemsize == 2 and backend == "cpu" and gemm.wants_gradient(x, weight, bias)
    if bias is None or not splits:
        return gemm.linear(x, weight), bias
    most, rest = _split(bias, dtype)
    return gemm.linear(x, weight, most), rest


def _split(bias: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The GEMM's share of a bias, and the rest of it, which gets the gradient."""
    most = (_GEMMS_SHARE * clamp_to_finite(bias)).to(dtype)
    return most, bias - most


def act(
    backend: str, z: torch.Tensor, bias: torch.Tensor | None, activation: str, approximate: str
) -> torch.Tensor:
    """bias_act on this backend, in place if nothing else needs z."""
    if backend == "cpu" and not gemm.wants_gradient(z, bias) and may_overwrite(z):
        _bias_act_(z, bias, activation, approximate)
        return z
    if type(z) is torch.Tensor:
        return BIAS_ACT.kernels[backend](z, bias, activation, approximate)  # type: ignore[no-any-return]
    return run_on(BIAS_ACT, backend, z, bias, activation, approximate)


def may_overwrite(z: torch.Tensor) -> bool:
    """Whether a GEMM's result may be overwritten: not if it is traced or kept."""
    if state.is_compiling() or (state.count_dispatch_modes() and _is_kept()):
        return False
    return type(z) is torch.Tensor and z.is_contiguous()


def _is_kept() -> bool:
    """Whether a selective checkpoint sees the GEMM, and may keep its result."""
    modes = _get_current_dispatch_mode_stack()
    return any(isinstance(mode, _CHECKPOINTS) for mode in modes)


def make_zeros_with_graph(bias: torch.Tensor | None) -> torch.Tensor | None:
    """The bias minus its value: zeros with a graph, for second derivatives of a sum with bias."""
    return None if bias is None else bias - clamp_to_finite(bias)


def clamp_to_finite(bias: torch.Tensor) -> torch.Tensor:
    """The bias detached and with infinities clamped, so that bias minus the result keeps them."""
    largest = torch.finfo(bias.dtype).max
    return bias.detach().clamp(-largest, largest)


# --- Checks ---------------------------------------------------------------------------------------


def fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether torch's GEMM raises the errors for anything else that may be wrong."""
    return (
        weight.ndim == 2
        and checks.all_dense(x, weight, bias)
        and (bias is None or (bias.dtype is weight.dtype and bias.shape == weight.shape[:1]))
    )


def check(name: str, x: Any, of: str = "input", *, jagged: bool = True, **parameters: Any) -> None:
    """Check x, then a weight, then its bias; the argument `of` gave x its width."""
    checks.dense(name, "input", x, Op.dtypes, jagged=jagged)
    if x.ndim == 0:
        raise ArgumentError(name, "input", "0-dimensional", "[*, in_features]")
    dtypes = Op.dtypes if checks.autocasts(x.device.type) else (x.dtype,)
    (weight_name, weight), (bias_name, bias) = parameters.items()
    checks.dense(name, weight_name, weight, dtypes, of)
    checks.like(name, weight_name, weight, x, "input")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        accepted = f"[out_features, {x.shape[-1]}], to go with {of}"
        raise ArgumentError(name, weight_name, f"of shape {list(weight.shape)}", accepted)
    if bias is None:
        return
    checks.dense(name, bias_name, bias, [weight.dtype], weight_name)
    checks.like(name, bias_name, bias, x, "input")
    if bias.shape != weight.shape[:1]:
        accepted = f"[{weight.shape[0]}], as {weight_name} is {list(weight.shape)}"
        raise ArgumentError(name, bias_name, f"of shape {list(bias.shape)}", accepted)


def hidden_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The second GEMM's input, without rows, for `check`."""
    return torch.empty((0, weight.shape[0]), dtype=x.dtype, device=x.device)


# --- Declarations ---------------------------------------------------------------------------------


def arguments(leading: tuple[int, ...], width: int, features: int) -> tuple[Any, ...]:
    """x, weight and bias of this size."""
    return (activation(*leading, width), weight_spec(features, width), activation(features))
