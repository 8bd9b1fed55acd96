"""route: a router's choice of experts for each token, and its side losses.

    weights, indices = the k largest of softmax(logits) or sigmoid(logits), of each row

Read on in: csrc/core/route.h, csrc/cpu/route.cpp, csrc/bind/route.cpp,
triton_kernels/experts/route.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from torchweld import checks, state
from torchweld.dispatch import choice
from torchweld.dispatch.autograd import carrying_tangents, find_apply, wants_gradient
from torchweld.dispatch.bare import BareOp
from torchweld.dispatch.call import Decision
from torchweld.dispatch.warm.cache import short
from torchweld.dispatch.warm.guards import is_lazy
from torchweld.errors import ArgumentError
from torchweld.registry import EAGER, Op
from torchweld.state import why_not_now

_NAME = "route"
_SCORES = ("softmax", "sigmoid")


class Routes(NamedTuple):
    """The experts of each token, and the losses of the choice.

    Attributes:
        indices: [*, k], int64, the best first.
        weights: [*, k], float32 (float64 of float64).
        balance_loss: E * sum over the experts of (share of the choices) * (mean score), 1 if all
            experts are chosen and scored alike. The shares get no gradient.
        z_loss: the mean square of the logits' log-sum-exp.
    """

    indices: torch.Tensor
    weights: torch.Tensor
    balance_loss: torch.Tensor
    z_loss: torch.Tensor


@short()
def route(
    input: torch.Tensor,
    k: int,
    *,
    scores: str = "softmax",
    choice_bias: torch.Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    best_of_group: int = 2,
    renormalize: bool = False,
    scale: float = 1.0,
    token_mask: torch.Tensor | None = None,
) -> Routes:
    """Choose k experts for each token by a router's logits.

    Scores are computed in float32. Of equal ones the expert with the lower index is chosen, so that
    the choice is the same in every run, and in a trainer and a sampler with the same logits.

    Args:
        input: the logits, [*, E]; float32, bfloat16, float16 (or float64).
        k: experts per token.
        scores: "softmax" over the experts, or "sigmoid" of each logit.
        choice_bias: [E], added to the scores for the choice only, as in DeepSeek-V3; no gradient.
        groups: the number of groups, each of as many consecutive experts.
        top_groups: the number of groups whose experts may be chosen.
        best_of_group: the number of largest scores whose sum is a group's score: 2 in DeepSeek-V3,
            1 in DeepSeek-V2.
        renormalize: divide the weights by their sum.
        scale: a factor of the weights.
        token_mask: [*], True where a token counts in the losses; None: all do.

    Returns:
        The chosen experts, their weights, and two losses.
    """
    _check(input, k, scores, choice_bias, groups, top_groups, best_of_group, token_mask)
    checks.factor(_NAME, "scale", scale)
    checks.flag(_NAME, "renormalize", renormalize)
    how = (k, scores, groups, top_groups, best_of_group, renormalize, float(scale))
    backend = _find_backend(input, k, groups)
    run = partial(_compute_routes, how) if backend is None else _plan(backend, input, how)
    names = ("input", "choice_bias", "token_mask")
    return Decision(None, run, (input, choice_bias, token_mask), names)  # type: ignore[return-value]


def _compute_routes(how: tuple[Any, ...], logits: torch.Tensor, *rest: Any) -> Routes:
    with torch.autocast(logits.device.type, enabled=False):
        return Routes(*_compute(logits, *rest, *how)[:4])


def _compute(
    logits: torch.Tensor,
    choice_bias: torch.Tensor | None,
    token_mask: torch.Tensor | None,
    k: int,
    scores: str,
    groups: int,
    top_groups: int,
    best_of_group: int,
    renormalize: bool,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """The routes; and each expert's share of the choices, and after them the number of tokens."""
    logits = logits if logits.dtype is torch.float64 else logits.float()
    own = logits.softmax(-1) if scores == "softmax" else logits.sigmoid()
    choice = own.detach() if choice_bias is None else own.detach() + choice_bias.detach()
    if groups > 1:
        choice = _mask_groups(choice, groups, top_groups, best_of_group)
    indices = torch.sort(choice, dim=-1, descending=True, stable=True).indices[..., :k]
    weights = own.gather(-1, indices)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    shares = own if scores == "softmax" else own / (own.sum(-1, keepdim=True) + _TINY)
    return (indices, weights * scale, *_find_losses(logits, shares, indices, token_mask))


# Keeps a sum of zeros from dividing by zero; too small to change another sum's bits.
_TINY = 1e-20


def _mask_groups(
    choice: torch.Tensor, groups: int, top_groups: int, best_of_group: int
) -> torch.Tensor:
    """Make all experts outside the best groups the last choice."""
    each = choice.unflatten(-1, (groups, -1))
    counts = each.topk(min(best_of_group, each.shape[-1]), -1).values.sum(-1)
    best = torch.sort(counts, dim=-1, descending=True, stable=True).indices[..., :top_groups]
    is_best = torch.zeros_like(counts, dtype=torch.bool).scatter(-1, best, True)
    return torch.where(is_best[..., None], each, -torch.inf).flatten(-2)


def _find_losses(
    logits: torch.Tensor,
    shares: torch.Tensor,
    indices: torch.Tensor,
    token_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    experts = logits.shape[-1]
    counted = torch.ones_like(logits[..., 0]) if token_mask is None else token_mask.to(logits.dtype)
    tokens = counted.sum().clamp(min=1)
    # One pass for each choice: counting by atomics would add in any order.
    numbers = torch.arange(experts, device=logits.device)
    chosen = sum(
        ((indices[..., at, None] == numbers) * counted[..., None]).flatten(0, -2).sum(0)
        for at in range(indices.shape[-1])
    )
    means = (shares * counted[..., None]).flatten(0, -2).sum(0) / tokens
    chosen = chosen / (tokens * indices.shape[-1])
    squares = logits.logsumexp(-1).square() * counted
    counts = torch.cat([chosen, tokens[None]])
    return experts * (chosen * means).sum(), squares.sum() / tokens, counts


# --- One kernel for all of it ---------------------------------------------------------------------

_TENSORS = "Tensor input, Tensor? choice_bias, Tensor? token_mask"
_HOW = (
    "int k, str scores, int groups, int top_groups, int best_of_group, bool renormalize,"
    " float scale"
)
_TRITON = "triton_kernels/experts/route.py"
# A row and its scores are in registers.
_MOST_EXPERTS, _MOST_CHOSEN = 1024, 64
# Rows of the check at a kernel's first use.
_SAMPLED = 61


def _fake(logits: torch.Tensor, bias: Any, mask: Any, k: int, *_: Any) -> tuple[torch.Tensor, ...]:
    rows, experts = logits.shape
    kind = torch.promote_types(logits.dtype, torch.float32)
    weights = logits.new_empty((rows, k), dtype=kind)
    sums = [weights.new_empty(shape) for shape in ((), (), (experts + 1,))]
    return (weights.new_empty((rows, k), dtype=torch.int64), weights, *sums)


_FORWARD = BareOp(
    "route",
    f"({_TENSORS}, {_HOW}) -> (Tensor indices, Tensor weights, Tensor balance_loss,"
    " Tensor z_loss, Tensor counts)",
    _fake,
    triton=_TRITON,
    reference=_compute,
    sample=lambda logits, bias, mask, *how: (
        logits[:_SAMPLED],
        bias,
        None if mask is None else mask[:_SAMPLED],
        *how,
    ),
)


def _differentiate(
    grad_weights: torch.Tensor,
    grad_balance_loss: torch.Tensor,
    grad_z_loss: torch.Tensor,
    logits: torch.Tensor,
    choice_bias: torch.Tensor | None,
    token_mask: torch.Tensor | None,
    indices: torch.Tensor,
    counts: torch.Tensor,
    *how: Any,
) -> torch.Tensor:
    """The gradient of the logits in eager torch, differentiable if they are."""
    grads = (grad_weights, grad_balance_loss, grad_z_loss)
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        leaf = logits if again else logits.detach().requires_grad_()
        found = _compute(leaf, choice_bias, token_mask, *how)[1:4]
        return torch.autograd.grad(found, leaf, grads, create_graph=again)[0]


_BACKWARD = BareOp(
    "route_backward",
    "(Tensor grad_weights, Tensor grad_balance_loss, Tensor grad_z_loss,"
    f" {_TENSORS}, Tensor indices, Tensor counts, {_HOW}) -> Tensor",
    lambda *inputs: torch.empty_like(inputs[3], memory_format=torch.contiguous_format),
    triton=_TRITON,
    reference=_differentiate,
)


class _Routing(NamedTuple):
    """Both passes for calls that a short way has compared."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Routing | None, *inputs: Any) -> tuple[torch.Tensor, ...]:
        *found, counts = (_FORWARD.run if run is None else run.forward)(*inputs)
        ctx.save_for_backward(*inputs[:3], found[0], counts)
        ctx.run, ctx.how = run, inputs[3:]
        ctx.mark_non_differentiable(found[0])
        return tuple(found)

    @staticmethod
    @carrying_tangents
    def backward(ctx: Any, _: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        backward = _BACKWARD.run if ctx.run is None else ctx.run.backward
        is_compiling = state.is_compiling()
        if not is_compiling and (torch.is_grad_enabled() or not state.can_read(*grads)):
            backward = _differentiate
        made = backward(*grads, *ctx.saved_tensors, *ctx.how)
        return None, made, *[None] * (2 + len(ctx.how))


_apply = find_apply(_Route)


def _find_backend(logits: torch.Tensor, k: int, groups: int) -> str | None:
    """The backend whose kernel may serve, if it is found to be right; None for eager torch."""
    names = choice.forced or ("cpu", "triton")
    if EAGER in names or why_not_now() is not None or logits.numel() == 0:
        return None
    for name in names:
        if name in _FORWARD.backends and not _FORWARD.why_not(name, [logits]):
            return name if name != "triton" or _fits_triton(logits, k, groups) else None
    return None


def _fits_triton(logits: torch.Tensor, k: int, groups: int) -> bool:
    experts = logits.shape[-1]
    is_even = groups == 1 or experts & (experts - 1) == groups & (groups - 1) == 0
    fits = experts <= _MOST_EXPERTS and k <= _MOST_CHOSEN
    return fits and is_even and logits.dtype is not torch.float64


def _plan(backend: str, logits: torch.Tensor, how: tuple[Any, ...]) -> Callable[..., Any]:
    is_direct = backend == "cpu" and state.can_read(logits) and not state.has_modes()
    run = _Routing(_FORWARD.direct, _BACKWARD.direct) if is_direct and not is_lazy(logits) else None
    return partial(_run_kernel, run, wants_gradient(logits), how)


def _run_kernel(
    run: _Routing | None,
    trains: bool,
    how: tuple[Any, ...],
    logits: torch.Tensor,
    choice_bias: torch.Tensor | None,
    token_mask: torch.Tensor | None,
) -> Routes:
    is_flat = logits.ndim == 2
    mask = None if token_mask is None else token_mask.reshape(-1)
    bias = None if choice_bias is None else choice_bias.detach()
    rows = logits if is_flat else logits.reshape(-1, logits.shape[-1])
    given = (rows, bias, mask, *how)
    if run is None:
        indices, weights, *losses = _Route.apply(None, *given)  # type: ignore[no-untyped-call]
    elif trains:
        indices, weights, *losses = _apply(run, *given)
    else:
        indices, weights, *losses = run.forward(*given)[:4]
    if not is_flat:
        shape = (*logits.shape[:-1], how[0])
        indices, weights = indices.view(shape), weights.view(shape)
    return Routes(indices, weights, *losses)


def _check(
    logits: Any,
    k: Any,
    scores: Any,
    choice_bias: Any,
    groups: Any,
    top_groups: Any,
    best_of_group: Any,
    token_mask: Any,
) -> None:
    checks.dense(_NAME, "input", logits, Op.dtypes)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ArgumentError(_NAME, "input", f"of shape {list(logits.shape)}", "[*, E]")
    if scores not in _SCORES:
        raise ArgumentError(_NAME, "scores", repr(scores), " or ".join(_SCORES))
    experts = logits.shape[-1]
    _check_count("groups", groups, experts)
    if experts % groups:
        raise ArgumentError(_NAME, "groups", repr(groups), f"a divisor of {experts} experts")
    _check_count("top_groups", top_groups, groups)
    _check_count("best_of_group", best_of_group, None)
    _check_count("k", k, experts if groups == 1 else experts // groups * top_groups)
    if choice_bias is not None:
        checks.dense(_NAME, "choice_bias", choice_bias, Op.dtypes)
        checks.like(_NAME, "choice_bias", choice_bias, logits, "input")
        checks.shaped(_NAME, "choice_bias", choice_bias, (experts,), "one an expert")
    if token_mask is not None:
        checks.dense(_NAME, "token_mask", token_mask, (torch.bool,))
        checks.like(_NAME, "token_mask", token_mask, logits, "input")
        checks.shaped(_NAME, "token_mask", token_mask, logits.shape[:-1], "one a token")


def _check_count(name: str, value: Any, most: int | None) -> None:
    if type(value) is not int or value < 1 or (most is not None and value > most):
        accepted = "an integer >= 1" if most is None else f"an integer from 1 to {most}"
        raise ArgumentError(_NAME, name, repr(value), accepted)
