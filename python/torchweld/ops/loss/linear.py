"""linear_cross_entropy and linear_logprobs: the logits exist only in chunks."""

from __future__ import annotations

import math
from typing import Any

import torch

from torchweld import checks
from torchweld.errors import ArgumentError
from torchweld.names import Accumulation, Reduction
from torchweld.ops.loss import arguments, chunks, cross_entropy, of_linear, sharded, small
from torchweld.ops.loss import reduction as reductions
from torchweld.ops.loss.chunks import Layer, Needs
from torchweld.ops.loss.results import RowResults, Wanted
from torchweld.ops.loss.rows import How
from torchweld.ops.loss.sharded import Classes
from torchweld.registry import why_not_now

_CROSS_ENTROPY, _LOGPROBS = "linear_cross_entropy", "linear_logprobs"
_ACCUMULATE = ("float32", "parameter", "grad")


def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    options: Any = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    temperature: float | torch.Tensor | None = None,
    token_weights: torch.Tensor | None = None,
    return_lse: bool = False,
    logits_dtype: torch.dtype | None = None,
    memory: int | None = None,
    accumulate: Accumulation = "float32",
    batch_invariant: bool = False,
) -> Any:
    """cross_entropy(linear(input, linear_weight, linear_bias), target), without all logits at once.

    The logits are computed in chunks of rows that take `memory` bytes. Ignored rows are dropped
    before the GEMM, and a frozen input or weight skips its GEMM. With "mean" and "sum" the
    gradients are computed together with the loss and kept. float16, "none" and `return_lse`
    compute the logits again in the backward pass.

    Args:
        input: [*, in_features]; float32, bfloat16, float16 (or float64).
        linear_weight: [V, in_features]. [V, *, in_features], as torch allows, is not chunked, and
            takes no argument about chunks: logits_dtype, memory, "grad" and batch_invariant.
        target: classes, [*], or probabilities, [*, V].
        linear_bias: [V].
        weight: of the classes, [V], as in cross_entropy; it gets no gradient.
        reduction: "mean", "sum" or "none".
        ignore_index: rows with this target have a loss and a gradient of 0; None is -100. It
            cannot be given with probabilities.
        label_smoothing: from 0 to 1.
        options: torch's LinearCrossEntropyOptions. Its acc_dtype or acc_policy chooses
            `accumulate`; the rest says how torch divides the rows, and has no effect.
        z_loss: factor of the square of the log-sum-exp.
        softcap: logits become softcap * tanh(logits / softcap).
        logit_scale: a factor of the logits, before the soft cap.
        temperature: a number, or one per row, after the soft cap; it gets no gradient.
        token_weights: a factor of each row's loss, of the rows' shape.
        return_lse: also return the log-sum-exp of each row, float32, 0 in ignored rows.
        logits_dtype: torch.float32 computes the GEMMs of a 16-bit input in float32.
        memory: bytes for a chunk: its logits, and copies of its rows. None is 2**28, or on a GPU a
            64th of its memory, but at most 2**31.
        accumulate: "float32" sums a 16-bit weight's gradient over several chunks in a float32
            buffer of the weight's size, in addition to `memory`. "parameter" sums in the weight's
            dtype. "grad" adds to an existing linear_weight.grad in the backward pass, in its dtype,
            and computes the logits again; the weight's hooks then see no gradient.
        batch_invariant: give a row the same bits whatever the other rows are, by GEMMs of one size.

    Returns:
        The loss in input's dtype, float32 under autocast; with `return_lse` a tuple.
    """
    name, accumulate = _CROSS_ENTROPY, _read_options(options, accumulate)
    ignored = -100 if ignore_index is None else ignore_index
    scaling: dict[str, Any] = {
        "softcap": softcap,
        "logit_scale": logit_scale,
        "temperature": temperature,
    }
    terms: dict[str, Any] = {
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "token_weights": token_weights,
    }
    chunking = (logits_dtype, memory, accumulate, batch_invariant)
    if isinstance(linear_weight, torch.Tensor) and linear_weight.ndim > 2:
        _refuse_chunks(*chunking)
        rest = {"weight": weight, "ignore_index": ignored, "return_lse": return_lse}
        rest |= scaling | terms
        return _run_on_dimensions(input, linear_weight, target, linear_bias, **rest)
    given = (*scaling.values(), token_weights, logits_dtype, memory)
    if accumulate in _ACCUMULATE[:2] and small.asks_no_more(
        z_loss, given, return_lse, batch_invariant
    ):
        plain = (weight, ignored, reduction, label_smoothing)
        of_torch = small.linear_cross_entropy(input, linear_weight, linear_bias, target, *plain)
        if of_torch is not None:
            return of_torch
    checks.flag(name, "return_lse", return_lse)
    soft = isinstance(target, torch.Tensor) and target.is_floating_point()
    if soft and ignore_index is not None:
        raise ArgumentError(name, "ignore_index", ignore_index, "None with probabilities")
    place, parts = sharded.find_place(name, input, linear_weight, linear_bias)
    input, shared = parts[0], place.classes
    target = place.take_target(target)
    terms["token_weights"] = place.take_rows("token_weights", token_weights)
    scaling["temperature"] = place.take_rows("temperature", temperature)
    layer = _make_layer(name, parts, *chunking, shared)
    leading, own = tuple(input.shape[:-1]), layer.weight.shape[0]
    classes = own if shared is None else shared.whole

    def flatten(q: torch.Tensor) -> torch.Tensor:
        return q.reshape(math.prod(leading), own)

    sizes = (leading, classes, ignored, flatten, (*leading, own))
    labels = reductions.read_target(name, target, input, *sizes)
    how = arguments.make_how(
        name,
        layer.input,
        classes,
        leading,
        weight=place.take_whole("weight", weight),
        probabilities=labels.probabilities,
        dtype=layer.logits_dtype,
        **scaling,
    )
    loss = reductions.check_loss(name, input, leading, **terms)
    factors, count = loss.make_factors(labels.classes, how)
    needs = _find_needs(layer)
    chunks.check_memory(name, layer, needs)
    count = place.add_up(count) if reduction == "mean" else count
    target, how = place.take_classes(labels.classes, how)
    kind = None if checks.autocasts(input.device.type) else input.dtype
    into_grad = accumulate == "grad"
    if not into_grad and _keeps_gradients(layer, loss, return_lse, how, needs, shared):
        if reduction == "mean":
            factors = factors.divide(count)
        made = place.add_up(of_linear.find_total(layer, target, how, factors, shared, needs))
        if reduction == "mean":
            made = torch.where(count == 0, torch.nan, made)
        return place.wrap(made.to(kind or made.dtype))
    rows = _find(layer, target, how, factors.find_wanted(), shared, into_grad)
    made = loss.reduce(rows, factors, count, place.add_up)
    made = made.reshape(leading) if reduction == "none" else made
    made = place.wrap(made.to(kind or made.dtype))
    return (made, place.wrap(rows.lse.reshape(leading))) if return_lse else made


def linear_logprobs(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    temperature: float | torch.Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
    return_lse: bool = False,
    return_argmax: bool = False,
    logits_dtype: torch.dtype | None = None,
    memory: int | None = None,
    accumulate: Accumulation = "float32",
    batch_invariant: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Log-probabilities of selected classes, of a linear layer's logits that exist only in chunks.

    All results are differentiable but argmax. The backward pass computes the logits again, chunk by
    chunk. Rows without a target are dropped before the GEMM, and their results are 0.

    Args:
        input: [*, in_features]; float32, bfloat16, float16 (or float64).
        linear_weight: [V, in_features].
        target: classes, [*] or [*, K] for K log-probabilities per row.
        linear_bias: [V].
        temperature: a number, or one per row; it gets no gradient.
        logit_scale: a factor of the logits; the order is scale, soft cap, temperature.
        softcap: logits become softcap * tanh(logits / softcap).
        ignore_index: entries with this target have a log-probability and a gradient of 0.
        return_entropy: also return each row's entropy, in nats.
        return_lse: also return the log-sum-exp of each row.
        return_argmax: also return the class of the largest logit; the first of equals, and -1 in
            rows without a target.
        logits_dtype: torch.float32 computes the GEMMs of a 16-bit input in float32.
        memory: bytes for a chunk: its logits, and copies of its rows. None is 2**28, or on a GPU a
            64th of its memory, but at most 2**31.
        accumulate: "float32" sums a 16-bit weight's gradient over several chunks in a float32
            buffer of the weight's size, in addition to `memory`. "parameter" sums in the weight's
            dtype. "grad" adds to an existing linear_weight.grad in the backward pass, in its dtype,
            and computes the logits again; the weight's hooks then see no gradient.
        batch_invariant: give a row the same bits whatever the other rows are, by GEMMs of one size.

    Returns:
        The log-probabilities of target's shape, float32 (float64 of float64); or a tuple of them
        and of the further results, in the order entropy, log-sum-exp, argmax.
    """
    name = _LOGPROBS
    for flag, value in (
        ("return_entropy", return_entropy),
        ("return_lse", return_lse),
        ("return_argmax", return_argmax),
    ):
        checks.flag(name, flag, value)
    given = (softcap, logit_scale, temperature, logits_dtype, memory)
    flags = (return_entropy, return_lse, return_argmax, batch_invariant)
    if accumulate in _ACCUMULATE[:2] and small.asks_no_more(0.0, given, *flags):
        of_torch = small.linear_logprobs(input, linear_weight, linear_bias, target, ignore_index)
        if of_torch is not None:
            return of_torch
    place, parts = sharded.find_place(name, input, linear_weight, linear_bias)
    input, shared = parts[0], place.classes
    target = place.take_rows("target", target)
    chunking = (logits_dtype, memory, accumulate, batch_invariant)
    layer = _make_layer(name, parts, *chunking, shared)
    leading = tuple(input.shape[:-1])
    classes = layer.weight.shape[0] if shared is None else shared.whole
    arguments.check_indices(name, "target", target, input.device)
    if target.shape != leading and (target.ndim == 0 or target.shape[:-1] != leading):
        accepted = f"the rows' shape, {list(leading)}, or that and K"
        raise ArgumentError(name, "target", f"of shape {list(target.shape)}", accepted)
    if type(ignore_index) is not int:
        raise ArgumentError(name, "ignore_index", repr(ignore_index), "an integer")
    marked = arguments.mark_ignored(name, target, classes, ignore_index)
    several = target.shape[-1] if target.shape != leading else 1
    how = arguments.make_how(
        name,
        layer.input,
        classes,
        leading,
        logit_scale=logit_scale,
        softcap=softcap,
        temperature=place.take_rows("temperature", temperature),
        dtype=layer.logits_dtype,
    )
    chunks.check_memory(name, layer, _find_needs(layer))
    wanted = Wanted(entropy=return_entropy, argmax=return_argmax)
    marked, how = place.take_classes(marked.reshape(math.prod(leading), several), how)
    rows = _find(layer, marked, how, wanted, shared, accumulate == "grad")
    made = [rows.log_probabilities.reshape(target.shape)]
    beside = ((return_entropy, rows.entropy), (return_lse, rows.lse), (return_argmax, rows.argmax))
    made += [result.reshape(leading) for asked, result in beside if asked]
    made = [place.wrap(result) for result in made]
    return tuple(made) if len(made) > 1 else made[0]


# --- Arguments --------------------------------------------------------------------------------


def _make_layer(
    function: str,
    parts: Any,
    logits_dtype: torch.dtype | None,
    memory: int | None,
    accumulate: str,
    batch_invariant: bool,
    shared: Classes | None,
) -> Layer:
    input, weight, bias = parts
    arguments.check_tensor(function, "input", input)
    if input.ndim == 0:
        raise ArgumentError(function, "input", "of no dimensions", "[*, in_features]")
    device = input.device.type
    autocasts = checks.autocasts(device)
    dtypes: tuple[torch.dtype, ...] = arguments.FLOATS if autocasts else (input.dtype,)
    arguments.check_tensor(function, "linear_weight", weight, dtypes, "input")
    checks.like(function, "linear_weight", weight, input, "input")
    if weight.ndim != 2 or weight.shape[1] != input.shape[-1]:
        accepted = f"[V, {input.shape[-1]}], to go with input"
        raise ArgumentError(function, "linear_weight", f"of shape {list(weight.shape)}", accepted)
    if bias is not None:
        arguments.check_tensor(function, "linear_bias", bias, dtypes, "input")
        checks.like(function, "linear_bias", bias, input, "input")
        checks.shaped(function, "linear_bias", bias, weight.shape[:1], "one a class")
    original = weight
    if autocasts and input.dtype != torch.float64:
        kind = torch.get_autocast_dtype(device)
        input, weight = input.to(kind), weight.to(kind)
        bias = None if bias is None else bias.to(kind)
    arguments.check_choice(
        function, "logits_dtype", logits_dtype, (None, torch.float32, input.dtype)
    )
    if logits_dtype == torch.float32 and input.dtype == torch.float64:
        raise ArgumentError(function, "logits_dtype", logits_dtype, "None for float64")
    arguments.check_choice(function, "accumulate", accumulate, _ACCUMULATE)
    checks.flag(function, "batch_invariant", batch_invariant)
    if memory is None:
        memory = chunks.find_memory(input.device)
    elif type(memory) is not int:
        raise ArgumentError(function, "memory", repr(memory), "a number of bytes, an int, or None")
    flat = input.reshape(math.prod(input.shape[:-1]), input.shape[-1])
    if accumulate == "grad" and not (original is weight and original.is_leaf and _is_plain(shared)):
        accepted = (
            "'float32' or 'parameter' but for a plain weight that is a leaf, of the input's dtype, "
            "in code that is not compiled"
        )
        raise ArgumentError(function, "accumulate", "'grad'", accepted)
    widest = weight.shape[0] if shared is None else shared.most
    sums = accumulate == "float32"
    return Layer(
        flat, weight, bias, memory, logits_dtype or input.dtype, sums, batch_invariant, widest
    )


def _is_plain(shared: Classes | None) -> bool:
    return shared is None and not torch.compiler.is_compiling()


def _read_options(options: Any, accumulate: Accumulation) -> Accumulation:
    if options is None:
        return accumulate
    if type(options).__name__ != "LinearCrossEntropyOptions":
        accepted = "None or torch.nn.LinearCrossEntropyOptions"
        raise ArgumentError(_CROSS_ENTROPY, "options", f"a {type(options).__name__}", accepted)
    kind = getattr(options, "acc_dtype", None)
    if kind not in (None, torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise ArgumentError(_CROSS_ENTROPY, "options", f"acc_dtype={kind}", "a floating dtype")
    policy = getattr(options, "acc_policy", "auto")
    return "parameter" if policy == "compact" or kind in arguments.FLOATS[1:3] else accumulate


def _refuse_chunks(
    logits_dtype: torch.dtype | None, memory: int | None, accumulate: str, batch_invariant: bool
) -> None:
    """Refuse arguments that say how chunks are computed, where all logits are made at once."""
    refused = (
        ("logits_dtype", logits_dtype, logits_dtype is None),
        ("memory", memory, memory is None),
        ("accumulate", accumulate, accumulate in _ACCUMULATE[:2]),
        ("batch_invariant", batch_invariant, batch_invariant is False),
    )
    for name, value, fits in refused:
        if not fits:
            accepted = "its default for a linear_weight of more than two dimensions"
            raise ArgumentError(_CROSS_ENTROPY, name, repr(value), accepted)


def _run_on_dimensions(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    **others: Any,
) -> Any:
    """A weight [V, *, in_features] has one loss for each position: all logits at once."""
    arguments.check_tensor(_CROSS_ENTROPY, "input", input)
    shape = linear_weight.shape
    if input.ndim != 2 or input.shape[1] != shape[-1]:
        accepted = f"[N, {shape[-1]}], to go with linear_weight of shape {list(shape)}"
        raise ArgumentError(_CROSS_ENTROPY, "input", f"of shape {list(input.shape)}", accepted)
    if bias is not None:
        checks.shaped(_CROSS_ENTROPY, "linear_bias", bias, shape[:-1], "linear_weight's")
    flat = None if bias is None else bias.reshape(-1)
    logits = torch.nn.functional.linear(input, linear_weight.reshape(-1, shape[-1]), flat)
    return cross_entropy.cross_entropy(logits.view(-1, *shape[:-1]), target, **others)


def _find_needs(layer: Layer) -> Needs:
    if not torch.is_grad_enabled():
        return chunks.NO_GRADIENT
    return Needs(*(x is not None and x.requires_grad for x in layer[:3]))


def _keeps_gradients(
    layer: Layer,
    loss: reductions.Loss,
    return_lse: bool,
    how: How,
    needs: Needs,
    shared: Classes | None,
) -> bool:
    """Whether the gradients are computed with the loss: one number multiplies them later.

    In float16 that number is a loss scale, without which they would vanish. An exported graph
    needs no gradients, and the op that computes both does not exchange results of shared classes.
    """
    if loss.reduction == "none" or return_lse or layer.input.dtype == torch.float16:
        return False
    if not any(needs) or torch.compiler._is_exporting_flag or _takes_eager(how):
        return False
    if shared is not None and torch.compiler.is_compiling():
        return False
    weights = loss.token_weights
    return weights is None or not weights.requires_grad


def _takes_eager(how: How) -> bool:
    """Whether plain torch serves, with all logits: transforms, a gradient of the probabilities."""
    q = how.probabilities
    wants = q is not None and q.requires_grad and torch.is_grad_enabled()
    return wants or why_not_now() is not None


def _find(
    layer: Layer,
    target: torch.Tensor,
    how: How,
    wanted: Wanted,
    shared: Classes | None,
    into_grad: bool,
) -> RowResults:
    if not _takes_eager(how):
        return of_linear.find(layer, target, how, wanted, shared, into_grad)
    if shared is not None:
        accepted = "one that no transform sees: devices share its classes"
        raise ArgumentError(_CROSS_ENTROPY, "linear_weight", why_not_now(), accepted)
    return of_linear.find_by_reference(layer, target, how, wanted)
