"""Adaptive norms and gated residuals: blocks whose norms are modulated by a condition.

    adaptive_norm(x) = norm(x) * (1 + scale) + shift
    gated_residual(x, branch) = x + gate * branch

A modulation (scale, shift, gate) has a row for each sample, or for each token. All modulations of a
call have the same shape; often they are parts of one projection.

Read on in: csrc/core/modulation.h, csrc/cpu/modulation.cpp, csrc/bind/modulation.cpp,
triton_kernels/modulation.py, triton_kernels/modulation_rows.py, bench/cases/modulation.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchweld import checks
from torchweld.dispatch.call import Decision, decide_arranged
from torchweld.dispatch.kernels import define
from torchweld.dispatch.warm.cache import short
from torchweld.errors import ArgumentError
from torchweld.ops import norm as norms
from torchweld.registry import ROWS, Op, activation, residual
from torchweld.registry.cost import count_per_element

_SOURCES = {"cpu": ("csrc/cpu/modulation.cpp",), "triton": ("triton_kernels/modulation.py",)}


@short()
def adaptive_layer_norm(
    input: Tensor, scale: Tensor, shift: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """layer_norm(input) * (1 + scale) + shift, over the last dimension.

    Args:
        input: [*, width]; float32, bfloat16, float16 (or float64).
        scale, shift: [width], [batch, width], or of input's rank with sizes of 1 after the leading
            ones shared with it, as [batch, 1, width] for each sample, [batch, tokens,
            width] for each token. In input's dtype, or float32 and 16 bits in either order. They
            may be parts of one projection, as `chunk` returns them.
        eps: added to the variance, >= 0.

    Returns:
        A contiguous tensor of input's shape and dtype.
    """
    given = {"input": input, "scale": scale, "shift": shift}
    return decide_arranged(ADAPTIVE_LAYER_NORM, _arrange, given, eps)  # type: ignore[no-any-return]


@short()
def adaptive_rms_norm(
    input: Tensor, scale: Tensor, shift: Tensor | None = None, *, eps: float | None = None
) -> Tensor:
    """rms_norm(input) * (1 + scale) + shift, over the last dimension.

    Args:
        input, scale, shift: as in `adaptive_layer_norm`.
        eps: added to the mean square, >= 0; None: as in rms_norm.

    Returns:
        A contiguous tensor of input's shape and dtype.
    """
    given = {"input": input, "scale": scale, "shift": shift}
    return decide_arranged(ADAPTIVE_RMS_NORM, _arrange, given, eps)  # type: ignore[no-any-return]


@short()
def gated_residual(input: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    """input + gate * branch.

    Args:
        input: [*, width], the residual stream; float32, bfloat16, float16 (or float64).
        gate: a modulation, as scale in `adaptive_layer_norm`.
        branch: of input's shape; of input's dtype, or float32 and 16 bits in either order.

    Returns:
        A contiguous tensor of input's shape, of the wider dtype of input and branch.
    """
    given = {"input": input, "gate": gate, "branch": branch}
    return decide_arranged(GATED_RESIDUAL, _arrange_gated, given)  # type: ignore[no-any-return]


@short()
def gated_residual_layer_norm(
    input: Tensor,
    gate: Tensor,
    branch: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    eps: float = 1e-5,
    return_residual: bool = False,
) -> Any:
    """adaptive_layer_norm(z, scale, shift) with z = gated_residual(input, gate, branch).

        x, stream = gated_residual_layer_norm(
            stream, gate, branch, scale, shift, return_residual=True
        )

    Args:
        input, gate, branch: as in `gated_residual`.
        scale, shift, eps: as in `adaptive_layer_norm`, of gate's shape and dtype.
        return_residual: return (y, z).

    Returns:
        y; z, both of the wider dtype of input and branch. Where autocast computes torch's norm in
        float32, as on CUDA, y is float32, and 16-bit input takes two passes.
    """
    given = {"input": input, "gate": gate, "branch": branch, "scale": scale, "shift": shift}
    return _decide_gated(_LAYER_NORM, adaptive_layer_norm, given, eps, return_residual)


@short()
def gated_residual_rms_norm(
    input: Tensor,
    gate: Tensor,
    branch: Tensor,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    eps: float | None = None,
    return_residual: bool = False,
) -> Any:
    """adaptive_rms_norm(z, scale, shift) with z = gated_residual(input, gate, branch).

    Args:
        input, gate, branch: as in `gated_residual`.
        scale, shift, eps: as in `adaptive_rms_norm`, of gate's shape and dtype.
        return_residual: return (y, z).

    Returns:
        y; z, both of the wider dtype of input and branch. Where autocast computes torch's norm in
        float32, as on CUDA, y is float32, and 16-bit input takes two passes.
    """
    given = {"input": input, "gate": gate, "branch": branch, "scale": scale, "shift": shift}
    return _decide_gated(_RMS_NORM, adaptive_rms_norm, given, eps, return_residual)


def _widens(norm: Op, x: Any, branch: Any) -> bool:
    """Whether autocast makes float32 of a 16-bit stream in this norm."""
    for each in (x, branch):
        if not isinstance(each, Tensor) or each.dtype.itemsize != 2:  # others keep their dtype
            return False
    kind = x.device.type
    return kind in norm.autocast and checks.autocasts(kind)


def _decide_gated(
    both: _AdaptiveNorm,
    adaptive: Callable[..., Tensor],
    given: Mapping[str, Any],
    eps: Any,
    return_residual: bool,
) -> Any:
    """y, or (y, z); by two ops where autocast, with one rule for all tensors of an op, widens."""
    if not _widens(both.norm, given["input"], given["branch"]):
        returned = ("y", "z") if return_residual else "y"
        return decide_arranged(both.gated, _arrange_gated, given, eps, returned=returned)

    def run(input: Tensor, gate: Tensor, branch: Tensor, *modulations: Tensor | None) -> Any:
        z = gated_residual(input, gate, branch)
        y = adaptive(z, *modulations, eps=eps)
        return (y, z) if return_residual else y

    return Decision(None, run, list(given.values()), list(given))


# --- Arguments ------------------------------------------------------------------------------------


def _of_rank(x: Any, modulation: Any) -> Any:
    """A modulation of fewer dimensions, with sizes of 1 before its last one."""
    rank, its = getattr(x, "ndim", 0), getattr(modulation, "ndim", 0)
    if not 0 < its < rank:
        return modulation
    return modulation.reshape(*modulation.shape[:-1], *[1] * (rank - its), modulation.shape[-1])


def _arrange(x: Any, *modulations: Any) -> tuple[Any, ...]:
    return x, *(_of_rank(x, modulation) for modulation in modulations)


def _arrange_gated(x: Any, gate: Any, branch: Any, *modulations: Any) -> tuple[Any, ...]:
    x = norms.promote_residual(x, branch)
    _, gate, *rest = _arrange(x, gate, *modulations)
    return x, gate, branch, *rest


def _inputs(input: Any, scale: Any, shift: Any = None, *, eps: Any) -> tuple[Any, ...]:
    return *_arrange(input, scale, shift), eps


def _inputs_gated(input: Any, gate: Any, branch: Any) -> tuple[Any, ...]:
    return _arrange_gated(input, gate, branch)


def _inputs_gated_norm(
    input: Any,
    gate: Any,
    branch: Any,
    scale: Any,
    shift: Any = None,
    *,
    eps: Any,
    return_residual: bool = False,
) -> tuple[Any, ...]:
    return *_arrange_gated(input, gate, branch, scale, shift), eps


def _fits(x: Tensor, modulation: Tensor) -> bool:
    """Whether each row of the modulation serves adjacent rows of x, as many for each."""
    sizes, its = x.shape, modulation.shape
    if len(sizes) != len(its) or not len(its) or sizes[-1] != its[-1]:
        return False
    at = 0
    while at < len(its) - 1 and its[at] == sizes[at]:
        at += 1
    return all(size == 1 for size in its[at:-1])


def _is_plain(x: Tensor, first: Tensor, *modulations: Tensor | None) -> bool:
    """Whether eager torch computes what the kernels do; it would accept more."""
    if not (first.dtype is x.dtype and _fits(x, first)):
        return False
    for value in modulations:
        if value is not None and not (value.dtype is x.dtype and value.shape == first.shape):
            return False
    return checks.all_dense(x, first, *modulations)


def _check_modulations(op: Op, x: Any, branch: Any = None, **modulations: Any) -> None:
    """Check all tensors; the first modulation decides on the others."""
    checks.dense(op.name, "input", x, op.dtypes)
    if x.ndim == 0:
        raise ArgumentError(op.name, "input", "0-dimensional", "at least one dimension")
    narrowest = ("input", x)
    if "gate" in modulations:
        wide = x.dtype is torch.float32  # a narrower input was promoted before
        kinds = checks.parameters_beside(x) if wide else [x.dtype]
        checks.dense(op.name, "branch", branch, kinds, "input")
        checks.like(op.name, "branch", branch, x, "input")
        checks.shaped(op.name, "branch", branch, x.shape, "input's shape")
        narrowest = ("branch", branch)
    first, like = next(iter(modulations.items()))
    for name, value in modulations.items():
        if value is None and name == "shift":
            continue
        checks.dense(op.name, name, value, checks.parameters_beside(narrowest[1]), narrowest[0])
        checks.like(op.name, name, value, x, "input")
        if not _fits(x, value):
            accepted = (
                f"[width], [batch, width], or input's shape, {list(x.shape)}, with ones for some of"
                " the last sizes before the width"
            )
            raise ArgumentError(op.name, name, f"of shape {list(value.shape)}", accepted)
        checks.shaped(op.name, name, value, like.shape, f"the shape of {first}")
        if value.dtype is not like.dtype:
            accepted = f"the dtype of {first}, {like.dtype}"
            raise ArgumentError(op.name, name, f"of dtype {value.dtype}", accepted)


def _size(leading: tuple[int, ...], row: tuple[int, ...], *kinds: str) -> list[Any]:
    """A tensor for each letter: an activation x, or a modulation m with a row for each sample."""
    samples = tuple(1 if at else n for at, n in enumerate(leading))
    makers = {"x": (activation, leading), "m": (residual, samples)}
    return [make(*sizes, *row) for make, sizes in (makers[kind] for kind in kinds)]


# --- References -----------------------------------------------------------------------------------


def _widen(*values: Tensor | None) -> list[Any]:
    """The tensors in the widest of their dtypes."""
    kind = torch.float16
    kinds = {value.dtype for value in values if value is not None}
    if len(kinds) == 1:
        return list(values)
    for each in kinds:
        kind = torch.promote_types(kind, each)
    return [None if value is None else value.to(kind) for value in values]


def _modulate(x_hat: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    y = x_hat * (1 + scale)
    return y if shift is None else y + shift


def _gate(x: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    """input + gate * branch, of input's dtype; a wider input or gate adds without rounding."""
    wide, gate, branch = _widen(x, gate, branch)
    return (wide + gate * branch).to(x.dtype).contiguous()


def _gated_residual(x: Tensor, gate: Tensor, branch: Tensor) -> Tensor:
    if not (_is_plain(x, gate) and branch.shape == x.shape and branch.dtype is x.dtype):
        _check_gated(x, gate, branch)
    return _gate(x, gate, branch)


def _gated_residual_backward(
    grad_y: Tensor, gate: Tensor, branch: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    kind = torch.promote_types(grad_y.dtype, torch.float32)
    grad = grad_y.to(kind)
    grad_gate = (grad * branch).sum_to_size(gate.shape).to(gate.dtype)
    return grad_gate, (grad * gate).to(branch.dtype)


def _check_gated(x: Any, gate: Any, branch: Any) -> None:
    _check_modulations(GATED_RESIDUAL, x, branch, gate=gate)


GATED_RESIDUAL = Op(
    name="gated_residual",
    forward="(Tensor input, Tensor gate, Tensor branch) -> Tensor y",
    backward="(Tensor grad_y, Tensor gate, Tensor branch, bool need_gate, bool need_branch)"
    " -> (Tensor grad_gate, Tensor grad_branch)",
    inputs=_inputs_gated,
    reference=_gated_residual,
    backward_reference=_gated_residual_backward,
    same_gradient={"input": ("grad_y", lambda *_: True)},
    check=_check_gated,
    sharding=ROWS,
    sized=lambda leading, row: tuple(_size(leading, row, *"xmx")),
    flops=count_per_element(2, 4),
    sources=_SOURCES,
    eager_rounds=True,
)
define(GATED_RESIDUAL)


class _AdaptiveNorm:
    """The adaptive op of a norm, and the one with the gated residual before it."""

    def __init__(self, norm: Op, flops: tuple[int, int]) -> None:
        self.norm, self.centered = norm, norm is norms.LAYER_NORM
        statistics = "Tensor mean, Tensor rstd" if self.centered else "Tensor rstd"
        modulations = f"Tensor scale, Tensor? shift, float{'' if self.centered else '?'} eps"
        common: dict[str, Any] = {
            "sharding": ROWS,
            "sources": _SOURCES,
            "eager_rounds": True,
            "fake": self._fake,
        }
        self.op = Op(
            name=f"adaptive_{norm.name}",
            forward=f"(Tensor input, {modulations}) -> (Tensor y, {statistics})",
            backward=f"(Tensor grad_y, Tensor input, {modulations}, {statistics}, bool need_scale,"
            " bool need_shift) -> (Tensor grad_input, Tensor grad_scale, Tensor grad_shift)",
            inputs=_inputs,
            reference=self._reference,
            check=self._check,
            sized=lambda leading, row: (*_size(leading, row, *"xmm"), self.epsilon),
            flops=count_per_element(*flops),
            autocast=norm.autocast,
            **common,
        )
        branch, needed = "Tensor gate, Tensor branch", ("input", "gate", "branch", "scale", "shift")
        needs = ", ".join(f"bool need_{name}" for name in needed)
        grads = ", ".join(f"Tensor grad_{name}" for name in needed)
        self.gated = Op(
            name=f"gated_residual_{norm.name}",
            forward=f"(Tensor input, {branch}, {modulations}) -> (Tensor z, Tensor y,"
            f" {statistics})",
            backward=f"(Tensor? grad_z, Tensor? grad_y, Tensor z, {branch}, {modulations},"
            f" {statistics}, {needs}) -> ({grads})",
            inputs=_inputs_gated_norm,
            reference=self._gated_reference,
            backward_reference=self._gated_backward,
            check=self._check_gated,
            sized=lambda leading, row: (*_size(leading, row, *"xmxmm"), self.epsilon),
            flops=count_per_element(flops[0] + 2, flops[1] + 5),
            **common,
        )
        define(self.op)
        define(self.gated)

    epsilon = 1e-5  # of samples

    def _fake(self, x: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        outputs = [norms.result(x) for _ in range(2 if len(inputs) > 3 else 1)]
        saved = [norms.statistics(x, x.shape[-1:]) for _ in range(2 if self.centered else 1)]
        return *outputs, *saved

    def _compute(self, x: Tensor, scale: Tensor, shift: Tensor | None, eps: Any) -> Tensor:
        wide, scale, shift = _widen(x, scale, shift)
        x_hat = self.norm.reference(wide, wide.shape[-1:], *[None] * (1 + self.centered), eps)
        return _modulate(x_hat, scale, shift).to(x.dtype)

    def _reference(self, x: Tensor, scale: Tensor, shift: Tensor | None, eps: Any) -> Tensor:
        if not (_is_plain(x, scale, shift) and (eps is None or eps >= 0)):
            self._check(x, scale, shift, eps)
        kind = x.device.type
        if kind in self.op.autocast and checks.autocasts(kind):  # as a kernel's inputs are cast
            x = x.to(self.op.autocast[kind])
        return self._compute(x, scale, shift, eps).contiguous()

    def _gated_reference(
        self, x: Tensor, gate: Tensor, branch: Tensor, scale: Tensor, shift: Tensor | None, eps: Any
    ) -> tuple[Tensor, Tensor]:
        plain = _is_plain(x, gate, scale, shift) and branch.shape == x.shape
        if not (plain and branch.dtype is x.dtype and (eps is None or eps >= 0)):
            self._check_gated(x, gate, branch, scale, shift, eps)
        z = _gate(x, gate, branch)
        return z, self._compute(z, scale, shift, eps)

    def _gated_backward(
        self,
        grad_z: Any,
        grad_y: Any,
        z: Tensor,
        gate: Tensor,
        branch: Tensor,
        scale: Tensor,
        shift: Tensor | None,
        eps: Any,
        *_: Any,
    ) -> tuple[Tensor | None, ...]:
        """The gradients in eager torch, for second derivatives."""
        kind = torch.promote_types(z.dtype, torch.float32)
        grad_scale, grad_shift = torch.zeros_like(scale), None
        if shift is not None:
            grad_shift = torch.zeros_like(shift)
        if grad_y is None:  # only z was used; zero times infinity would be NaN
            total = grad_z.to(kind)
        else:
            wide, grad = z.to(kind), grad_y.to(kind)
            if self.centered:
                wide = wide - wide.mean(-1, keepdim=True)
            if eps is None:
                eps = 2.0**-52 if kind is torch.float64 else 2.0**-23
            rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
            x_hat = wide * rstd
            g = grad * (1 + scale.to(kind))
            total = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
            if self.centered:
                total = total - g.mean(-1, keepdim=True)
            total = total * rstd
            if grad_z is not None:
                total = total + grad_z
            grad_scale = (grad * x_hat).sum_to_size(scale.shape).to(scale.dtype)
            if shift is not None:
                grad_shift = grad.sum_to_size(shift.shape).to(shift.dtype)
        grads = _gated_residual_backward(total, gate, branch)
        return total.to(z.dtype), *grads, grad_scale, grad_shift

    def _check(self, x: Any, scale: Any, shift: Any, eps: Any) -> None:
        _check_modulations(self.op, x, scale=scale, shift=shift)
        self._check_eps(self.op, eps)

    def _check_gated(
        self, x: Any, gate: Any, branch: Any, scale: Any, shift: Any, eps: Any
    ) -> None:
        _check_modulations(self.gated, x, branch, gate=gate, scale=scale, shift=shift)
        self._check_eps(self.gated, eps)

    def _check_eps(self, op: Op, eps: Any) -> None:
        checks.epsilon(op.name, 0.0 if eps is None and not self.centered else eps)


_LAYER_NORM = _AdaptiveNorm(norms.LAYER_NORM, (9, 13))
_RMS_NORM = _AdaptiveNorm(norms.RMS_NORM, (6, 11))
ADAPTIVE_LAYER_NORM, GATED_RESIDUAL_LAYER_NORM = _LAYER_NORM.op, _LAYER_NORM.gated
ADAPTIVE_RMS_NORM, GATED_RESIDUAL_RMS_NORM = _RMS_NORM.op, _RMS_NORM.gated
