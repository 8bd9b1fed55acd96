"""experts_mlp: the feed-forward blocks of a mixture's experts, each on the rows routed to it.

    y = sum over a row's experts e of weight_e * down_e(act(gate_e(x)) * up_e(x))

Read on in: python/torchweld/ops/experts/grouped.py, csrc/cpu/experts.cpp,
triton_kernels/experts/grouped.py, triton_kernels/act.py, triton_kernels/experts/products.py,
bench/cases/experts.py.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from torchweld import checks, state
from torchweld.dispatch.autograd import (
    carrying_tangents,
    derive_from_reference,
    find_apply,
    is_one_of_several,
    leave_over,
    list_wanted,
    make_unaliased,
    take_left_over,
    tell_apart,
)
from torchweld.dispatch.call import call, decide
from torchweld.dispatch.dtensor import is_dtensor
from torchweld.dispatch.warm.cache import short
from torchweld.dispatch.warm.guards import are_comparable
from torchweld.errors import ArgumentError
from torchweld.names import ActivationName, Approximation
from torchweld.ops import activation as activations
from torchweld.ops.experts import grouped
from torchweld.ops.experts.grouped import Factors, Form
from torchweld.ops.experts.sharded import run_on_devices
from torchweld.ops.gemm import gemm
from torchweld.registry import (
    BACKENDS,
    WHOLE,
    Composite,
    Made,
    activation,
    residual,
    weight,
)
from torchweld.registry.cost import count_for_gemms


@short()
def experts_mlp(
    input: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: ActivationName = "silu",
    approximate: Approximation = "none",
    gated: bool = True,
    interleaved: bool = False,
    transposed: bool = False,
    weights_first: bool = False,
    limit: float | None = None,
    up_offset: float = 0.0,
    recompute: bool = False,
) -> torch.Tensor:
    """The weighted sum over each token's K experts of their feed-forward blocks.

    Expert e computes linear(activation(gate) * up, down[e], down_bias[e]), where gate and up are
    the halves of linear(x, gate_up[e], gate_up_bias[e]). Tokens are sorted by expert, and each
    expert takes its own in one GEMM. Saved are input, the first product and the order.

    Results and gradients are the same bits at every run and number of threads. A token's bits do
    not depend on the order of other tokens, nor on which they are, but on how many its experts
    have: a GEMM of another size may add in another order.

    Experts may be DTensors with Shard(0) along some dimensions of the mesh, and input, indices and
    weights with any placements. Each device computes its experts' part of the sums; the result is
    Partial along these dimensions.

    Args:
        input: [*, in_features]; float32, bfloat16, float16 (or float64).
        gate_up: [E, 2 * hidden_features, in_features]; [E, hidden_features, in_features] of
            experts without a gate.
        down: [E, out_features, hidden_features].
        indices: the experts of each token, [*, K], int64 or int32. Indices outside [0, E) are
            skipped: their result and their gradients are zero. One may occur twice.
        weights: the factors of their results, [*, K], of any floating dtype.
        gate_up_bias: [E, 2 * hidden_features], or [E, hidden_features].
        down_bias: [E, out_features].
        activation: "silu" (SwiGLU), "gelu" (GeGLU), "quick_gelu" (gate * sigmoid(1.702 gate)) or
            another of bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".
        gated: whether there is a gate; without one the hidden layer is activation(up).
        interleaved: whether gates and ups take turns in gate_up, in place of two halves.
        transposed: whether gate_up is [E, in_features, 2 * hidden_features], and down is
            [E, hidden_features, out_features].
        weights_first: whether the weights are factors of the experts' inputs, as in Llama 4, in
            place of their results.
        limit: clamps gate from above, and up on both sides.
        up_offset: added to up, after the limit; 1 in gpt-oss.
        recompute: save only input, and compute the first product again in the backward pass.

    Returns:
        A tensor [*, out_features] of input's dtype, summed over the experts in float32.
    """
    form = (activation, approximate, gated, interleaved, transposed, weights_first)
    more = (limit, up_offset, recompute)
    tensors = (input, gate_up, down, indices, weights, gate_up_bias, down_bias)

    def run(*tensors: torch.Tensor | None) -> torch.Tensor:
        return call(OP, *tensors, *form, *more)  # type: ignore[no-any-return]

    if any(map(is_dtensor, tensors)):
        return run_on_devices(run, tensors)
    return decide(OP, *tensors, *form, *more)  # type: ignore[no-any-return]


# --- The node -------------------------------------------------------------------------------------

Passes = tuple[Callable[..., Any], Callable[..., Any]]


class _ExpertsMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: Passes, *inputs: Any) -> torch.Tensor:
        *given, recompute = inputs
        forward, ctx.backward_pass = passes
        y, order, z = forward(*given, not recompute)
        ctx.save_for_backward(*given[:_TENSORS], order, z)
        ctx.kept, ctx.late = inputs[_TENSORS:], None
        return make_unaliased(y)

    @staticmethod
    @carrying_tangents
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, order, z = ctx.saved_tensors  # raises if one has changed
        is_one, wanted = is_one_of_several(ctx), ctx.needs_input_grad
        if is_one:
            if (late := take_left_over(ctx, (grad,))) is not None:
                return late
            wanted = list_wanted(ctx)
        needs = [wanted[1 + at] for at in _DIFFERENTIABLE]
        if torch.is_grad_enabled() and not state.is_compiling():
            made = _derive(grad, *tensors, *ctx.kept)
        else:
            made = ctx.backward_pass(grad, order, z, *tensors, *ctx.kept[:-1], *needs)
        found: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
        for at, need, one in zip(_DIFFERENTIABLE, needs, made, strict=True):
            found[1 + at] = one if need else None
        if is_one:
            leave_over(ctx, (grad,), found)
        return tuple(found)


_apply = find_apply(_ExpertsMLP)
_PASSES = {
    "cpu": (grouped.forward, grouped.backward),
    "triton": (grouped.TRITON_FORWARD, grouped.TRITON_BACKWARD),
}
# Those of calls whose numbers Python may read.
_READY = _PASSES | {"cpu": (grouped.run_forward, grouped.backward)}


def _plan(backend: str, *inputs: Any) -> Callable[..., torch.Tensor]:
    _check(*inputs)
    args = OP.Args(*inputs)
    dtype = gemm.find_dtype(args.input)
    cast = [t for name in _CAST if (t := getattr(args, name)) is not None]
    is_cast = any(t.dtype is not dtype for t in cast)
    if is_cast or not are_comparable(inputs):
        return partial(_run_cast, _PASSES[backend])
    return partial(_apply, _READY[backend])


# What autocast casts.
_CAST = ("input", *Factors._fields)


def _run_cast(passes: Passes, *inputs: Any) -> torch.Tensor:
    args = OP.Args(*inputs)
    x, dtype = args.input, gemm.find_dtype(args.input)
    factors = {name: getattr(args, name) for name in _CAST}
    cast = {name: None if t is None else t.to(dtype) for name, t in factors.items()}
    given = tell_apart(args._replace(**cast))
    made: torch.Tensor = _ExpertsMLP.apply(passes, *given)  # type: ignore[no-untyped-call]
    return made.to(x.dtype)


# --- The reference --------------------------------------------------------------------------------


def _reference(*inputs: Any) -> torch.Tensor:
    _check(*inputs)
    args = OP.Args(*inputs)
    x, indices, weights, experts = args.input, args.indices, args.weights, args.gate_up.shape[0]
    form = Form(*[getattr(args, name) for name in Form._fields])
    factors = Factors(*[getattr(args, name) for name in Factors._fields])
    flat, top = x.reshape(x.shape[:-1].numel(), x.shape[-1]), indices.shape[-1]
    kind = grouped.accumulate_type(x.dtype)
    ids, scales = indices.reshape(-1), weights.reshape(-1)

    def run(at: int, tokens: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """One expert's results of these tokens, with their weights."""
        given = flat[tokens]
        if form.weights_first:
            given = given * scale[:, None].to(x.dtype)
        made = _run_expert(form, factors, at, given).to(kind)
        return made if form.weights_first else made * scale[:, None].to(kind)

    if state.can_read(indices):
        rows = grouped.sort(indices, experts)
        spans = list(zip(rows.bounds, rows.bounds[1:], strict=False))
        present = [at for at, (first, end) in enumerate(spans) if end > first] or [0]
        places = [rows.order[slice(*spans[at])] for at in present]
        made = [run(at, p // top, scales[p]) for at, p in zip(present, places, strict=True)]
        tokens = torch.cat(places) // top
        results = torch.cat(made)
    else:  # a graph, or a batch of indices: every expert takes all rows
        tokens = torch.arange(ids.shape[0], device=x.device) // top
        zero = torch.zeros((), dtype=kind, device=x.device)
        results = sum(  # type: ignore[assignment]
            torch.where((ids == at)[:, None], run(at, tokens, scales), zero)
            for at in range(experts)
        )
    y = results.new_zeros((flat.shape[0], results.shape[-1])).index_add(0, tokens, results)
    return y.to(x.dtype).reshape(*x.shape[:-1], y.shape[-1])


def _run_expert(form: Form, factors: Factors, at: int, rows: torch.Tensor) -> torch.Tensor:
    gate_up, down, *biases = [None if f is None else f[at] for f in factors]
    if form.transposed:
        gate_up, down = gate_up.mT, down.mT  # type: ignore[union-attr]
    z = linear(rows, gate_up, biases[0])  # type: ignore[arg-type]
    if not form.gated:
        hidden = activations.activate(OP, z, form.activation, form.approximate)
        return linear(hidden, down, biases[1])  # type: ignore[arg-type]
    gate, up = (z[..., ::2], z[..., 1::2]) if form.interleaved else z.chunk(2, -1)
    if form.limit is not None:
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    gate = activations.activate(OP, gate, form.activation, form.approximate)
    return linear(gate * (up + form.up_offset), down, biases[1])  # type: ignore[arg-type]


# --- Checks ---------------------------------------------------------------------------------------


_FLAGS = ("gated", "interleaved", "transposed", "weights_first", "recompute")


def _check(*inputs: Any) -> None:
    name, given = OP.name, dict(zip(OP.forward_signature.arguments, inputs, strict=True))
    checks.flags(name, **{flag: given[flag] for flag in _FLAGS})
    x, limit, up_offset = given["input"], given["limit"], given["up_offset"]
    if limit is not None and not (isinstance(limit, checks.NUMBER) and limit > 0):
        raise ArgumentError(name, "limit", repr(limit), "a number > 0 or None")
    if not isinstance(up_offset, checks.NUMBER) or not abs(up_offset) < math.inf:
        raise ArgumentError(name, "up_offset", repr(up_offset), "a finite number")
    for of_gates in ("interleaved", "limit", "up_offset"):
        if given[of_gates] and not given["gated"]:
            accepted = "left out where gated is False"
            raise ArgumentError(name, of_gates, repr(given[of_gates]), accepted)
    activations.check(name, given["activation"], given["approximate"])
    checks.dense(name, "input", x, OP.dtypes)
    if x.ndim == 0:
        raise ArgumentError(name, "input", "0-dimensional", "[*, in_features]")
    _check_routing(x, given["indices"], given["weights"])
    _check_factors(**given)


def _check_routing(x: torch.Tensor, indices: Any, weights: Any) -> None:
    name = OP.name
    checks.companion(name, "indices", indices, (torch.int64, torch.int32), x, "input")
    if indices.ndim != x.ndim or indices.shape[:-1] != x.shape[:-1] or indices.shape[-1] == 0:
        accepted = f"{[*x.shape[:-1], 'K']}, to go with input"
        raise ArgumentError(name, "indices", f"of shape {list(indices.shape)}", accepted)
    how: dict[str, Any] = {"shape": indices.shape, "meaning": "one an index"}
    checks.companion(name, "weights", weights, OP.dtypes, x, "input", **how)


def _check_factors(
    input: torch.Tensor, gate_up: Any, down: Any, gated: bool, transposed: bool, **others: Any
) -> None:
    name, x = OP.name, input
    dtypes = OP.dtypes if checks.autocasts(x.device.type) else (x.dtype,)
    for of, factor in (("gate_up", gate_up), ("down", down)):
        checks.companion(name, of, factor, dtypes, x, "input")
    width, doubled = x.shape[-1], "2 * " if gated else ""
    out, at = (2, 1) if transposed else (1, 2)
    shape = f"[E, {width}, {doubled}hidden]" if transposed else f"[E, {doubled}hidden, {width}]"
    odd = gate_up.ndim != 3 or gate_up.shape[at] != width or gate_up.shape[0] == 0
    if odd or (gated and gate_up.shape[out] % 2):
        raise ArgumentError(name, "gate_up", f"of shape {list(gate_up.shape)}", shape)
    experts, hidden = gate_up.shape[0], gate_up.shape[out] // (2 if gated else 1)
    if down.ndim != 3 or down.shape[0] != experts or down.shape[at] != hidden:
        shape = f"[{experts}, {hidden}, out]" if transposed else f"[{experts}, out, {hidden}]"
        accepted = f"{shape}, to go with gate_up"
        raise ArgumentError(name, "down", f"of shape {list(down.shape)}", accepted)
    for of, size in (("gate_up_bias", gate_up.shape[out]), ("down_bias", down.shape[out])):
        if (bias := others[of]) is not None:
            how: dict[str, Any] = {"shape": (experts, size), "meaning": "a row an expert"}
            checks.companion(name, of, bias, dtypes, x, "input", **how)


# --- The declaration ------------------------------------------------------------------------------


def _flops(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, indices: torch.Tensor, *_: Any
) -> tuple[int, int]:
    """Operations if no index is skipped."""
    rows = indices.numel()
    return count_for_gemms(rows * gate_up[0].numel(), rows * down[0].numel())


# Experts of a sample.
_FEW = 8


def _has_many_rows(rows: int, experts: int) -> bool:
    """Whether an expert has so many rows that other tiles serve."""
    if BACKENDS["triton"].why_missing() is not None:
        return False
    kernels: Any = importlib.import_module("torchweld.triton_kernels.experts.grouped")
    return kernels.has_many_rows(rows, experts)  # type: ignore[no-any-return]


def _find_regime(args: Any) -> bool:
    return _has_many_rows(args.indices.numel(), args.gate_up.shape[0])


def _take_sample(args: Any, rows: int) -> tuple[Any, ...]:
    """The first tokens and experts: float64 copies of all experts might not fit the memory.

    They are so many that the same tiles serve.
    """
    indices, count = args.indices, args.gate_up.shape[0]
    top, tokens = indices.shape[-1], indices.shape[:-1].numel()
    tokens, few = min(tokens, rows), min(_FEW, count)
    if _find_regime(args):
        while few > 1 and not _has_many_rows(tokens * top, few):
            few -= 1
    else:
        while tokens > 1 and _has_many_rows(tokens * top, few):
            tokens -= 1
    of_tokens = ("input", "indices", "weights")
    made = {name: getattr(args, name).flatten(0, -2)[:tokens] for name in of_tokens}
    is_known = (made["indices"] >= 0) & (made["indices"] < count)
    made["indices"] = torch.where(is_known, made["indices"] % few, made["indices"])
    factors = {name: getattr(args, name) for name in Factors._fields}
    made |= {name: None if t is None else t[:few] for name, t in factors.items()}
    return args._replace(**made)  # type: ignore[no-any-return]


def _route(leading: tuple[int, ...], top: int, experts: int, skipped: bool = False) -> Made:
    """Indices, skewed to the first experts; `skipped` adds some outside [0, experts)."""

    def make() -> torch.Tensor:
        generator = torch.Generator().manual_seed(experts)
        drawn = torch.rand((*leading, top), generator=generator).square() * experts
        indices = drawn.long()
        if skipped:
            indices[torch.rand(indices.shape, generator=generator) < 0.2] = experts
        return indices

    return Made(make)


_FORM = ("silu", "none", True, False, False, False, None, 0.0, False)


def _vary(**fields: Any) -> tuple[Any, ...]:
    """The default form with other fields."""
    recompute = fields.pop("recompute", False)
    return (*Form(*_FORM[:-1])._replace(**fields), recompute)


# The forms that models have.
FORMS = {
    "gated": _FORM,
    "recomputed": _vary(recompute=True),
    "plain": _vary(activation="relu2", gated=False),
    "gelu": _vary(activation="gelu"),
    "tanh_gelu": _vary(activation="gelu", approximate="tanh"),
    "relu": _vary(activation="relu", gated=False),
    "transposed": _vary(transposed=True),
    "interleaved": _vary(interleaved=True, weights_first=True),
    "gpt_oss": _vary(
        activation="quick_gelu", interleaved=True, transposed=True, limit=0.7, up_offset=1.0
    ),
    "clamped": _vary(limit=0.7, recompute=True),
    "weights_first": _vary(weights_first=True, transposed=True, activation="gelu"),
}


def arguments(
    leading: tuple[int, ...],
    top: int,
    experts: int,
    sizes: tuple[int, int, int],
    form: tuple[Any, ...] = _FORM,
    *,
    biases: bool = False,
    skipped: bool = False,
) -> tuple[Any, ...]:
    """The arguments of a sample; sizes are in_features, hidden_features and out_features."""
    width, hidden, out = sizes
    how = Form(*form[:-1])
    first = (2 if how.gated else 1) * hidden
    shapes = ((width, first), (hidden, out)) if how.transposed else ((first, width), (out, hidden))
    factors = [weight(experts, *shape) for shape in shapes]
    own = [activation(experts, first), activation(experts, out)] if biases else [None, None]
    route = _route(leading, top, experts, skipped)
    return (activation(*leading, width), *factors, route, residual(*leading, top), *own, *form)


_RESULTS = ("y", *(f"grad_{name}" for name in grouped.ExpertNeeds._fields))
_ARGUMENTS = (
    "Tensor input, Tensor gate_up, Tensor down, Tensor indices, Tensor weights,"
    f" Tensor? gate_up_bias, Tensor? down_bias, {grouped.FORM}, bool recompute"
)

OP = Composite(
    name="experts_mlp",
    forward=f"({_ARGUMENTS}) -> (Tensor y)",
    backward=f"(Tensor grad_y, {_ARGUMENTS}) -> ("
    + ", ".join(f"Tensor {name}" for name in _RESULTS[1:])
    + ")",
    reference=_reference,
    plan=_plan,
    check=_check,
    fake=lambda x, gate_up, down, indices, weights, gate_up_bias, down_bias, *how: (
        x.new_empty((*x.shape[:-1], down.shape[2 if Form(*how[:-1]).transposed else 1])),
    ),
    sharding=WHOLE,
    sized=lambda leading, row: arguments(leading, 2, 3, (row[0],) * 3, biases=True),
    flops=_flops,
    sources={
        "cpu": ("csrc/cpu/experts.cpp",),
        "triton": (grouped.TRITON_SOURCE, *activations.SOURCES["triton"]),
    },
    made_of="torch's GEMMs, in blocks of all experts, on the GPU Triton's; among them {}",
    saves="input, the result of the first GEMMs and the order of the rows; with `recompute`, no"
    " result of a GEMM",
    sample=_take_sample,
    regime=_find_regime,
    eager_rounds=True,
)
_derive = derive_from_reference(OP)
# Tensors are the first arguments. Some get a gradient, in the order of `grouped.ExpertNeeds`.
_TENSORS = len(OP.tensors_at)
_DIFFERENTIABLE = tuple(map(OP.forward_signature.arguments.index, OP.differentiable))
