"""cross_entropy: of logits, in one pass forward and one backward.

    loss of a row = -log softmax(u)[target], u = softcap(scale * logits) / temperature

Read on in: python/torchweld/ops/loss/results.py, python/torchweld/ops/loss/rows.py,
python/torchweld/ops/loss/ways/fused.py, csrc/core/loss_rows.h, csrc/cpu/loss_rows.cpp,
triton_kernels/loss/rows.py.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from torchweld import checks, state
from torchweld.dispatch import choice
from torchweld.dispatch.call import Decision
from torchweld.dispatch.warm.cache import short
from torchweld.errors import ArgumentError
from torchweld.names import Reduction
from torchweld.ops.loss import arguments, chunks, results
from torchweld.ops.loss.arguments import Settings
from torchweld.ops.loss.ways import again, fused
from torchweld.ops.loss.ways import torch as of_torch
from torchweld.registry import why_not_now

_NAME = "cross_entropy"
_TENSORS = ("input", "target", "weight", "temperature", "token_weights")
# With fewer logits plain torch is as fast as the general path, and torch's loss as one op of ours.
_SMALL, _PLAIN = 2**14, 2**16


@short(fixed={"input": (1,)})
def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    temperature: float | torch.Tensor | None = None,
    token_weights: torch.Tensor | None = None,
    return_lse: bool = False,
    inplace: bool = False,
) -> Any:
    """torch.nn.functional.cross_entropy, with sums in float32 and more kinds of loss.

    Logits are scaled, then soft-capped, then divided by the temperature. The loss of a row is

        weight[t] * (1 - label_smoothing) * -log p[t]
        + label_smoothing / V * sum(weight * -log p) + z_loss * lse^2,

    times its token weight. "mean" divides the sum by the sum of weight[t] * token weight over the
    rows that are not ignored; with probabilities as the target, by the sum of token weights.

    Args:
        input: logits, [V], [N, V] or [N, V, *]; float32, bfloat16, float16 (or float64).
        target: classes, [], [N] or [N, *], or probabilities of input's shape.
        weight: of the classes, [V]; it gets no gradient.
        size_average: deprecated in torch; use `reduction`.
        ignore_index: rows with this target have a loss and a gradient of 0.
        reduce: deprecated in torch; use `reduction`.
        reduction: "mean", "sum" or "none".
        label_smoothing: from 0 to 1.
        z_loss: factor of the square of the log-sum-exp.
        softcap: logits become softcap * tanh(logits / softcap).
        logit_scale: a factor of the logits.
        temperature: a number, or one a row; it gets no gradient.
        token_weights: a factor of each row's loss, of target's shape.
        return_lse: return the log-sum-exp of each row too, float32, 0 in ignored rows.
        inplace: let the backward pass write the gradient over the logits, which saves as much
            memory. The logits must be a result that nothing else needs; they cannot be a leaf.

    Returns:
        The loss in input's dtype, float32 under autocast; with `return_lse` a tuple.
        On a CPU a target out of range raises an error before anything is written. On a GPU it
        makes its row NaN; with TORCHWELD_CHECK_TARGETS=1 it raises an error.
    """
    if size_average is not None or reduce is not None:
        legacy: Any = torch.nn._reduction
        reduction = legacy.legacy_get_string(size_average, reduce)
    arguments.check_tensor(_NAME, "input", input)
    if input.ndim == 0:
        raise ArgumentError(_NAME, "input", "of no dimensions", "[V], [N, V] or [N, V, *]")
    checks.flag(_NAME, "return_lse", return_lse)
    checks.flag(_NAME, "inplace", inplace)
    classes = input.shape[0] if input.ndim == 1 else input.shape[1]
    leading = tuple(input.shape[:1] + input.shape[2:]) if input.ndim > 1 else ()
    several = arguments.check_target(_NAME, target, input, leading, tuple(input.shape))
    scaling = {"logit_scale": logit_scale, "softcap": softcap, "temperature": temperature}
    how: dict[str, Any] = {"ignored": ignore_index, "several": several, "weight": weight, **scaling}
    settings = arguments.check_settings(_NAME, input, input.dtype, leading, classes, **how)
    terms = (token_weights, reduction, label_smoothing, z_loss)
    settings = arguments.check_terms(settings, input, *terms)
    given = (input, target, weight, temperature, token_weights)
    asked = [x for x in (*scaling.values(), token_weights) if x is not None]
    is_plain = not (asked or settings.z_loss or return_lse or inplace)
    few = _SMALL
    if is_plain:  # in float64 torch's takes less time
        few = _PLAIN if input.dtype.itemsize < 8 else 2**63
    run = _find_way(settings, few if is_plain else 0, return_lse, inplace, *given)
    span = of_torch.find_span(settings, input, few)
    return Decision(None, run, given, _TENSORS, **span)


def _find_way(
    settings: Settings, few: int, returns_lse: bool, inplace: bool, *given: Any
) -> of_torch.Run:
    """What serves a call: torch's op of few logits, one op of ours, or several; or eager torch."""
    input, target, weight, temperature, token_weights = given
    trains = torch.is_grad_enabled()
    soft_trains = settings.several is None and trains and target.requires_grad
    refuses = soft_trains or why_not_now() is not None
    how = (refuses or _takes_eager(input), returns_lse, inplace)
    in_several = partial(_compute, settings._replace(leading=()), *how)
    if few and of_torch.may_serve(few, settings, *given):
        return of_torch.cross_entropy(settings, trains and input.requires_grad, in_several)
    terms = (token_weights, input, target, weight, temperature)
    if not (refuses or returns_lse or inplace) and fused.may_serve(settings, *terms):
        return _fuse(settings, input)
    return in_several


def _fuse(settings: Settings, input: torch.Tensor) -> of_torch.Run:
    """The function for calls like this one: one op, or a few launches."""
    dtype = torch.float32 if checks.autocasts(input.device.type) else input.dtype
    run = fused.make_run(settings, dtype, chunks.as_layer(_as_rows(input)))
    return partial(_run_rows, run)


def _run_rows(run: of_torch.Run, input: torch.Tensor, *terms: Any) -> Any:
    return run(_as_rows(input), None, None, *terms)


def _as_rows(logits: torch.Tensor) -> torch.Tensor:
    if logits.ndim == 2:
        return logits
    if logits.ndim == 1:
        return logits[None]
    moved = logits.movedim(1, -1)
    return moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])  # a size may be 0


def _takes_eager(logits: torch.Tensor) -> bool:
    """Whether plain torch serves few logits."""
    if choice.forced is not None or state.is_compiling():  # sizes may be unknown
        return False
    return logits.numel() < _SMALL and logits.dtype.itemsize > 2 and not logits.is_cuda


def _compute(
    settings: Settings, takes_eager: bool, returns_lse: bool, inplace: bool, *given: Any
) -> Any:
    input, target, weight, temperature, token_weights = given
    leading = tuple(input.shape[:1] + input.shape[2:]) if input.ndim > 1 else ()
    settings = settings._replace(leading=leading)
    if inplace and input.is_leaf and input.requires_grad:
        raise ArgumentError(_NAME, "inplace", "True for logits that are a leaf", "False")
    if input.ndim > 2 and settings.several is None:
        target = target.movedim(1, -1)
    logits = _as_rows(input)
    target, how = arguments.read_rows(settings, target, weight, temperature)
    factors, count = results.make_factors(settings, target, how, token_weights)
    asked = (target, how, factors.find_outputs())
    if takes_eager:
        rows = results.reference(logits, *asked)
    else:
        rows = again.find(chunks.as_layer(logits), *asked, inplace)
    made = results.reduce(settings, factors, rows, count)
    if not checks.autocasts(input.device.type):
        made = made.to(input.dtype)
    return (made, rows.lse.reshape(settings.leading)) if returns_lse else made
