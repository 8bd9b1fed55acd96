"""logprobs: log-probabilities of selected classes, of logits, in one pass forward and one backward.

    log_p[target], log_p = log_softmax(softcap(scale * logits) / temperature)

Read on in: python/torchweld/ops/loss/results.py, python/torchweld/ops/loss/rows.py,
python/torchweld/ops/loss/ways/again.py, csrc/core/loss_rows.h, csrc/cpu/loss_rows.cpp,
triton_kernels/loss/rows.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch.call import Decision
from torchweld.dispatch.warm.cache import short
from torchweld.errors import ArgumentError
from torchweld.ops.loss import arguments, chunks, results
from torchweld.ops.loss.arguments import Settings
from torchweld.ops.loss.results import Outputs
from torchweld.ops.loss.rows import as_matrix
from torchweld.ops.loss.sharding import Sharding, find_sharding_of_logits
from torchweld.ops.loss.ways import again, fused
from torchweld.ops.loss.ways import torch as of_torch
from torchweld.ops.loss.ways.kind import shape_logprobs
from torchweld.registry import why_not_now

_NAME = "logprobs"
_TENSORS = ("input", "target", "temperature")
_FEW = 2**16  # with fewer logits torch's ops take less time


@short()
def logprobs(
    input: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float | torch.Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_lse: bool = False,
    return_argmax: bool = False,
    inplace: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Log-probabilities of selected classes, with sums in float32 and no tensor of log-softmax.

    All results are differentiable but argmax, and one pass over the logits computes all of them.

    Args:
        input: logits, [*, V]; float32, bfloat16, float16 (or float64).
        target: classes, [*] or [*, K] for K log-probabilities per row.
        temperature: a number, or one per row; it gets no gradient.
        logit_scale: a factor of the logits; the order is scale, soft cap, temperature.
        softcap: logits become softcap * tanh(logits / softcap).
        ignore_index: entries with this target have a log-probability and a gradient of 0. Further
            results of rows without a target are 0.
        return_entropy: also return each row's entropy, in nats.
        return_lse: also return the log-sum-exp of each row.
        return_argmax: also return the class of the largest logit; the first of equals, and -1 in
            rows without a target.
        inplace: let the backward pass write the gradient over the logits, as in cross_entropy.

    Returns:
        The log-probabilities of target's shape, float32 (float64 of float64); or a tuple of them
        and of the further results, in the order entropy, log-sum-exp, argmax.
        A target out of range is treated as in cross_entropy.
    """
    flags = ("return_entropy", "return_lse", "return_argmax", "inplace")
    asked = (return_entropy, return_lse, return_argmax, inplace)
    for flag, value in zip(flags, asked, strict=True):
        checks.flag(_NAME, flag, value)
    checks.dense(_NAME, "input", input, arguments.FLOATS)
    if input.ndim == 0:
        raise ArgumentError(_NAME, "input", "of no dimensions", "[*, V]")
    classes, logits = input.shape[-1], input
    sharding, input = find_sharding_of_logits(_NAME, logits)
    target = sharding.take_rows("target", target)
    temperature = sharding.take_rows("temperature", temperature)
    leading = tuple(input.shape[:-1])
    several = arguments.check_picked(_NAME, target, input, leading)
    scaling: dict[str, Any] = {"logit_scale": logit_scale, "softcap": softcap}
    scaling |= {"temperature": temperature, "ignored": ignore_index, "several": several}
    settings = arguments.check_settings(_NAME, input, input.dtype, leading, classes, **scaling)
    wanted = Outputs(entropy=return_entropy, argmax=return_argmax)
    given = (input, target, temperature)
    of_any_size = settings._replace(leading=())
    how = (wanted, return_lse, inplace, why_not_now() is not None)
    in_general = partial(_compute, of_any_size, sharding, *how)
    if sharding.mesh is not None:
        _refuse_leaf(inplace, logits)
        return sharding.wrap(in_general(*given))  # type: ignore[no-any-return]
    if any(asked):
        return Decision(None, in_general, given, _TENSORS)  # type: ignore[return-value]
    few = 0 if any(x is not None for x in (temperature, logit_scale, softcap)) else _FEW
    run = _find_way(settings, few, in_general, *given)
    return Decision(None, run, given, _TENSORS, **of_torch.find_span(settings, input, few))  # type: ignore[return-value]


def _find_way(settings: Settings, few: int, in_general: of_torch.Run, *given: Any) -> of_torch.Run:
    """What serves log-probabilities only: torch's ops, one op of ours, or several."""
    input, target, temperature = given
    if few and of_torch.may_serve(few, settings, *given):
        return of_torch.logprobs(settings, in_general)
    if why_not_now() is None and fused.may_serve(settings, None, input, target, temperature):
        layer = chunks.as_layer(as_matrix(input))
        return partial(_run_fused, fused.make_run(settings, settings.kind, layer))
    return in_general


def _run_fused(run: of_torch.Run, input: torch.Tensor, *given: Any) -> torch.Tensor:
    return fused.negate(run, as_matrix(input), None, None, *given)


def _refuse_leaf(inplace: bool, logits: torch.Tensor) -> None:
    if inplace and logits.is_leaf and logits.requires_grad:
        raise ArgumentError(_NAME, "inplace", "True for logits that are a leaf", "False")


def _compute(
    settings: Settings,
    sharding: Sharding,
    wanted: Outputs,
    returns_lse: bool,
    inplace: bool,
    takes_eager: bool,
    *given: Any,
) -> Any:
    input, target, temperature = given
    settings = settings._replace(leading=tuple(input.shape[:-1]))
    _refuse_leaf(inplace, input)
    marked, how = arguments.read_rows(settings, target, None, temperature)
    marked, how = sharding.take_classes(marked, how)
    if takes_eager:
        sharding.refuse_transforms("input")
        found = results.reference(as_matrix(input), marked, how, wanted)
    else:
        found = again.find(
            chunks.as_layer(as_matrix(input)), marked, how, wanted, inplace, sharding.classes
        )
    return shape_logprobs(found, target, settings.leading, wanted, returns_lse)
