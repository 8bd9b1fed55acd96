"""The row kernels of the losses: statistics of each row of logits, and the gradient of the logits.

csrc/core/loss_rows.h has the formulas. Everything here has rows: logits [n, V], targets [n, K] in
which -1 is ignored and ELSEWHERE is a column of another device, results [n] or [n, K] in float32
(float64 of float64).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchweld.dispatch.bare import BareOp

# Columns of the statistics and of the gradient's coefficients.
HIGHEST, SUM, ENTROPY_SUM, SMOOTH, DOT, MASS = range(6)
STATISTICS = 6
ON_P, ON_LSE, ON_ENTROPY, ON_SMOOTH, ON_DOT = range(5)
COEFFICIENTS = 5
ELSEWHERE = -2


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """The rows of a tensor in one dimension; a size may be 0."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


class LossTransform(NamedTuple):
    """How u follows from the logits, and the weights of its sums.

    how[:4] are tensors, and how[1:6] are the arguments that kernels take.
    """

    sum_of_weights: torch.Tensor | None  # over all classes; None: their number
    weight: torch.Tensor | None  # of the classes, [V]
    probabilities: torch.Tensor | None  # [n, V]
    inverse_temperature: torch.Tensor | None  # [n]
    scale: float
    softcap: float  # 0: none
    classes: int = 0
    kind: torch.dtype = torch.float32  # of the sums

    def get_whole_weight(self) -> Any:
        """The sum of the classes' weights."""
        return self.classes if self.sum_of_weights is None else self.sum_of_weights

    def take(self, rows: slice | torch.Tensor) -> LossTransform:
        """Take some of the rows."""
        q, inverse = self.probabilities, self.inverse_temperature
        return self._replace(
            probabilities=None if q is None else q[rows],
            inverse_temperature=None if inverse is None else inverse[rows],
        )


def accumulate_type(dtype: torch.dtype) -> torch.dtype:
    """The dtype that kernels compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def transform(logits: torch.Tensor, how: LossTransform) -> torch.Tensor:
    """u of the logits, differentiable."""
    u = logits.to(accumulate_type(logits.dtype))
    u = u * how.scale if how.scale != 1 else u
    if how.softcap:
        u = how.softcap * torch.tanh(u / how.softcap)
    inverse = how.inverse_temperature
    return u if inverse is None else u * inverse.unsqueeze(1)


def _pick(u: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    inside = (target >= 0) & (target < u.shape[1])
    if u.shape[1] == 0:
        picked = torch.full(target.shape, torch.nan, dtype=u.dtype, device=u.device)
    else:
        picked = u.gather(1, torch.where(inside, target, 0))
    return torch.where(inside, picked, torch.where(target < 0, 0.0, torch.nan).to(u.dtype))


def is_ignored(target: torch.Tensor) -> torch.Tensor:
    """Whether all targets of a row are ignored, so that nothing depends on the row; [n]."""
    return (target == -1).all(1) & (target.shape[1] > 0)


def _weigh(how: LossTransform, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """w, and w * q."""
    weight = u.new_ones(u.shape[1]) if how.weight is None else how.weight
    q = how.probabilities
    return weight, None if q is None else q.to(u.dtype) * weight


def forward_reference(
    logits: torch.Tensor, target: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *given, entropy, smooth, argmax = rest
    how = LossTransform(None, *given)
    u = transform(logits, how)
    statistics = u.new_zeros(u.shape[0], STATISTICS)
    if u.shape[1]:
        statistics[:, HIGHEST] = u.amax(1)
    else:
        statistics[:, HIGHEST] = -torch.inf
    highest = statistics[:, HIGHEST]
    x = u - torch.where(highest == -torch.inf, 0, highest).unsqueeze(1)
    e = x.exp()
    statistics[:, SUM] = e.sum(1)
    if entropy:
        statistics[:, ENTROPY_SUM] = torch.where(e == 0, 0, e * x).sum(1)
    weight, mass = _weigh(how, u)
    if smooth:
        statistics[:, SMOOTH] = (u * weight).sum(1)
    if mass is not None:
        statistics[:, DOT] = torch.where(mass == 0, 0, mass * u).sum(1)
        statistics[:, MASS] = mass.sum(1)
    ignored = is_ignored(target)
    neutral = torch.eye(STATISTICS, dtype=u.dtype, device=u.device)[SUM]
    statistics = torch.where(ignored.unsqueeze(1), neutral, statistics)
    best = u.argmax(1) if argmax and u.shape[1] else target.new_full((u.shape[0],), -1)
    best = torch.where(ignored, -1, best)
    return _pick(u, target), statistics, best if argmax else target.new_empty(0)


def backward_reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    statistics: torch.Tensor,
    coefficients: torch.Tensor,
    grad_picked: torch.Tensor,
    *given: Any,
) -> torch.Tensor:
    how = LossTransform(None, *given)
    u = transform(logits, how)
    on_p, on_lse, on_entropy, on_smooth, on_dot = coefficients.unsqueeze(2).unbind(1)
    highest = statistics[:, HIGHEST : HIGHEST + 1]
    highest = torch.where(highest == -torch.inf, 0, highest)
    total = statistics[:, SUM : SUM + 1]
    log_sum = torch.where(total == 0, 0, total.log())
    log_p = u - highest - log_sum
    p = log_p.exp()
    weight, mass = _weigh(how, u)
    inside = (target >= 0) & (target < u.shape[1])
    on_p = on_p + torch.where(on_lse == 0, 0, on_lse * (highest + log_sum))
    on_p = torch.where((target >= u.shape[1]).any(1, keepdim=True), torch.nan, on_p)
    if mass is not None:
        on_p = on_p - on_dot * statistics[:, MASS : MASS + 1]
    du = p * on_p + torch.where(p == 0, 0, p * log_p * on_entropy) + on_smooth * weight
    if mass is not None:
        du = du + on_dot * mass
    if u.shape[1]:
        du = du.scatter_add(1, torch.where(inside, target, 0), grad_picked * inside)
    if how.softcap:
        du = du * (1 - torch.tanh(logits.to(u.dtype) * (how.scale / how.softcap)) ** 2)
    du = du * how.scale
    if how.inverse_temperature is not None:
        du = du * how.inverse_temperature.unsqueeze(1)
    du = torch.where(is_ignored(target).unsqueeze(1), 0, du)
    return du.to(logits.dtype)


def _backward_in_place_reference(logits: torch.Tensor, *others: object) -> None:
    logits.copy_(backward_reference(logits, *others))  # type: ignore[arg-type]


def _both_in_place_reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    coefficients: torch.Tensor,
    grad_picked: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *how, smooth, argmax = rest
    results = forward_reference(logits, target, *how, False, smooth, argmax)
    logits.copy_(backward_reference(logits, target, results[1], coefficients, grad_picked, *how))
    return results


def _scale_reference(x: torch.Tensor, factor: torch.Tensor) -> None:
    """In parts; torch would round a GPU's factor to x's dtype."""
    for part in x.view(-1).split(2**24):
        part.copy_(part.to(accumulate_type(x.dtype)) * factor)


def _fake(logits: torch.Tensor, target: torch.Tensor, argmax: bool) -> tuple[torch.Tensor, ...]:
    kind = accumulate_type(logits.dtype)
    return (
        logits.new_empty(target.shape, dtype=kind),
        logits.new_empty((logits.shape[0], STATISTICS), dtype=kind),
        target.new_empty(logits.shape[:1] if argmax else (0,)),
    )


GIVEN_SCHEMA = (
    "Tensor? weight, Tensor? probabilities, Tensor? inverse_temperature, float scale, float softcap"
)
GRADS_SCHEMA = "Tensor coefficients, Tensor grad_picked"
# Every field of LossTransform, and of RowResults, for ops that graphs hold.
HOW_SCHEMA = f"Tensor? sum_of_weights, {GIVEN_SCHEMA}, SymInt classes, ScalarType kind"
RESULTS_SCHEMA = (
    "(Tensor log_probabilities, Tensor lse, Tensor entropy, Tensor smooth, Tensor soft,"
    " Tensor argmax)"
)

# The rows on which a kernel is checked at its first use on a GPU.
_SAMPLED = 64


def take_rows_but(weight: int) -> Callable[..., tuple[Any, ...]]:
    """Takes the first rows of every tensor but the classes' weight, the argument at this place."""

    def sample(*inputs: Any) -> tuple[Any, ...]:
        return tuple(
            value[:_SAMPLED]
            if isinstance(value, torch.Tensor) and value.ndim and at != weight + 1
            else value
            for at, value in enumerate(inputs)
        )

    return sample


class RowOp(BareOp):
    """An op on rows of logits."""

    def find(self, first: torch.Tensor) -> Callable[..., Any]:
        """As for any op; float64 has a kernel only on the CPU."""
        if first.dtype == torch.float64 and first.device.type != "cpu":
            assert self.reference is not None
            return self.reference
        return super().find(first)


# Multiplies a gradient that was computed with the loss; a GPU reads nothing if the factor is 1.
SCALE = RowOp(
    "scale_",
    "(Tensor(a!) x, Tensor factor) -> ()",
    backends=(),
    triton="triton_kernels/loss/scale.py",
    reference=_scale_reference,
    sample=lambda x, factor: (x.flatten()[:_SAMPLED], factor),
)
_TRITON = "triton_kernels/loss/rows.py"
FORWARD = RowOp(
    "loss_rows",
    f"(Tensor logits, Tensor target, {GIVEN_SCHEMA}, bool entropy, bool smooth, bool argmax)"
    " -> (Tensor picked, Tensor statistics, Tensor argmax)",
    lambda logits, target, *others: _fake(logits, target, others[-1]),
    triton=_TRITON,
    sample=take_rows_but(1),
    reference=forward_reference,
)
BACKWARD = RowOp(
    "loss_rows_backward",
    f"(Tensor logits, Tensor target, Tensor statistics, {GRADS_SCHEMA}, {GIVEN_SCHEMA}) -> Tensor",
    lambda logits, *_: torch.empty_like(logits, memory_format=torch.contiguous_format),
    triton=_TRITON,
    sample=take_rows_but(4),
    reference=backward_reference,
)
BACKWARD_IN_PLACE = RowOp(
    "loss_rows_backward_",
    f"(Tensor(a!) logits, Tensor target, Tensor statistics, {GRADS_SCHEMA}, {GIVEN_SCHEMA}) -> ()",
    triton=_TRITON,
    sample=take_rows_but(4),
    reference=_backward_in_place_reference,
)
BOTH_IN_PLACE = RowOp(
    "loss_rows_both_",
    f"(Tensor(a!) logits, Tensor target, {GRADS_SCHEMA}, {GIVEN_SCHEMA}, bool smooth, bool argmax)"
    " -> (Tensor picked, Tensor statistics, Tensor argmax)",
    lambda logits, target, *others: _fake(logits, target, others[-1]),
    triton=_TRITON,
    sample=take_rows_but(3),
    reference=_both_in_place_reference,
)
