"""linear_cross_entropy and linear_logprobs: the logits exist only in chunks.

    loss = cross_entropy(x linear_weight^T + linear_bias, target)

This file checks the arguments. `find_way` of ways/find.py decides whether logits are kept, or
computed again in chunks of rows, and `find_rows` of chunks.py how many rows a chunk has.

Read on in: python/torchweld/ops/loss/ways/find.py, python/torchweld/ops/loss/ways/kind.py,
python/torchweld/ops/loss/chunks.py, python/torchweld/ops/loss/ways/kept.py,
python/torchweld/ops/loss/ways/again.py, python/torchweld/ops/loss/rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchweld import checks, state
from torchweld.dispatch.call import Decision
from torchweld.dispatch.warm.cache import short
from torchweld.errors import ArgumentError
from torchweld.names import Accumulation, Reduction
from torchweld.ops.loss import arguments, chunks, cross_entropy
from torchweld.ops.loss.chunks import Needs
from torchweld.ops.loss.results import Outputs
from torchweld.ops.loss.sharding import Classes, Sharding, find_sharding
from torchweld.ops.loss.ways.find import find_span, find_way
from torchweld.ops.loss.ways.kind import LossKind, make_layer
from torchweld.registry import why_not_now

_CROSS_ENTROPY, _LOGPROBS = "linear_cross_entropy", "linear_logprobs"
_ACCUMULATE = ("float32", "parameter", "grad")
_LAYER = ("input", "linear_weight", "linear_bias")
_SCALING = ("logit_scale", "softcap", "temperature")


@short()
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
            32nd of its memory, but at most 2**32.
        accumulate: "float32" sums a 16-bit weight's gradient over several chunks in a float32
            buffer of the weight's size, in addition to `memory`. "parameter" sums in the weight's
            dtype. "grad" adds to an existing linear_weight.grad in the backward pass, in its dtype,
            and computes the logits again; the weight's hooks then see no gradient.
        batch_invariant: give a row the same bits whatever the other rows are, by GEMMs of one size.

    Returns:
        The loss in input's dtype, float32 under autocast; with `return_lse` a tuple.
    """
    accumulate = _read_options(options, accumulate)
    chunking = (logits_dtype, memory, accumulate, batch_invariant)
    ignored = -100 if ignore_index is None else ignore_index
    scaling: dict[str, Any] = {"softcap": softcap, "logit_scale": logit_scale}
    terms: dict[str, Any] = {"reduction": reduction, "z_loss": z_loss}
    terms["label_smoothing"] = label_smoothing
    if isinstance(linear_weight, torch.Tensor) and linear_weight.ndim > 2:
        _refuse_chunks(*chunking)
        rest = {"weight": weight, "ignore_index": ignored, "return_lse": return_lse}
        rest |= {"temperature": temperature, "token_weights": token_weights} | scaling | terms
        return _run_on_dimensions(input, linear_weight, target, linear_bias, **rest)
    checks.flag(_CROSS_ENTROPY, "return_lse", return_lse)
    soft = isinstance(target, torch.Tensor) and target.is_floating_point()
    if soft and ignore_index is not None:
        raise ArgumentError(_CROSS_ENTROPY, "ignore_index", ignore_index, "None with probabilities")
    sharding, parts = find_sharding(_CROSS_ENTROPY, input, linear_weight, linear_bias)
    if sharding.mesh is not None:
        target = sharding.take_target(target)
        weight = sharding.take_whole("weight", weight)
        temperature = sharding.take_rows("temperature", temperature)
        token_weights = sharding.take_rows("token_weights", token_weights)
    scaling |= {"weight": weight, "temperature": temperature}
    kind = _prepare(_CROSS_ENTROPY, sharding, parts, chunking, target, ignored, **scaling)
    kind = _prepare_loss(kind, parts, token_weights, return_lse, **terms)
    given = (*parts, target, weight, temperature, token_weights)
    names = (*_LAYER, "target", "weight", "temperature", "token_weights")
    return _finish(kind, names, given)


@short()
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
    chunk; few logits are kept instead. Rows without a target are dropped before the GEMM, and their
    results are 0.

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
            32nd of its memory, but at most 2**32.
        accumulate: "float32" sums a 16-bit weight's gradient over several chunks in a float32
            buffer of the weight's size, in addition to `memory`. "parameter" sums in the weight's
            dtype. "grad" adds to an existing linear_weight.grad in the backward pass, in its dtype,
            and computes the logits again; the weight's hooks then see no gradient.
        batch_invariant: give a row the same bits whatever the other rows are, by GEMMs of one size.

    Returns:
        The log-probabilities of target's shape, float32 (float64 of float64); or a tuple of them
        and of the further results, in the order entropy, log-sum-exp, argmax.
    """
    for flag, value in (
        ("return_entropy", return_entropy),
        ("return_lse", return_lse),
        ("return_argmax", return_argmax),
    ):
        checks.flag(_LOGPROBS, flag, value)
    sharding, parts = find_sharding(_LOGPROBS, input, linear_weight, linear_bias)
    target = sharding.take_rows("target", target)
    temperature = sharding.take_rows("temperature", temperature)
    chunking = (logits_dtype, memory, accumulate, batch_invariant)
    scaling: dict[str, Any] = {"softcap": softcap, "logit_scale": logit_scale}
    scaling["temperature"] = temperature
    kind = _prepare(_LOGPROBS, sharding, parts, chunking, target, ignore_index, **scaling)
    wanted = Outputs(entropy=return_entropy, argmax=return_argmax)
    is_plain = kind.is_plain and not (any(wanted) or return_lse)
    kind = kind._replace(wanted=wanted, returns_lse=return_lse, is_plain=is_plain)
    return _finish(kind, (*_LAYER, "target", "temperature"), (*parts, target, temperature))  # type: ignore[no-any-return]


def _finish(kind: LossKind, names: Sequence[str], given: Sequence[Any]) -> Any:
    """The decision, with the sizes for which it holds; results where it holds only once."""
    decision = Decision(None, find_way(kind, *given), given, names)
    if kind.sharding.mesh is not None:
        return kind.sharding.wrap(decision.run())
    if kind.into_grad:  # no guard sees whether a weight is a leaf
        return decision.run()
    return decision._replace(**find_span(kind, given[0]))


# --- What a kind of call is -------------------------------------------------------------------


def _prepare(
    function: str,
    sharding: Sharding,
    parts: Any,
    given: tuple[Any, ...],
    target: Any,
    ignored: Any,
    **options: Any,
) -> LossKind:
    """Check arguments that both functions have, and decide how such calls are computed.

    `given` are the arguments about chunks.
    """
    casts_to, dtype, chunking = _check_layer(function, parts, sharding.classes, *given)
    input, shared, own = parts[0], sharding.classes, parts[1].shape[0]
    leading, classes = tuple(input.shape[:-1]), own if shared is None else shared.whole
    check = arguments.check_picked if function == _LOGPROBS else arguments.check_target
    several = check(function, target, input, leading, (*leading, own))
    rest = {"ignored": ignored, "several": several, **options}
    settings = arguments.check_settings(function, input, chunking[1], leading, classes, **rest)
    trains = torch.is_grad_enabled()
    soft_trains = several is None and trains and target.requires_grad
    logits_dtype, memory, accumulate, batch_invariant = given
    is_free = logits_dtype is None and memory is None and not batch_invariant
    is_free = is_free and accumulate != "grad"
    is_plain = sharding.mesh is None and all(options[name] is None for name in _SCALING)
    kind = LossKind(
        settings,
        sharding,
        casts_to,
        dtype,
        chunking,
        into_grad=accumulate == "grad",
        needs=Needs(*[trains and x is not None and x.requires_grad for x in parts]),
        takes_eager=soft_trains or why_not_now() is not None,
        is_free=is_free,
        is_plain=is_plain and is_free,
    )
    chunks.check_memory(function, make_layer(kind, *parts), kind.needs)
    return kind


def _prepare_loss(
    kind: LossKind, parts: Any, token_weights: torch.Tensor | None, returns_lse: bool, **terms: Any
) -> LossKind:
    """Check the other arguments of a loss."""
    settings = arguments.check_terms(kind.settings, parts[0], token_weights, **terms)
    is_plain = kind.is_plain and not (returns_lse or settings.z_loss) and token_weights is None
    return kind._replace(settings=settings, returns_lse=returns_lse, is_plain=is_plain)


# --- Arguments --------------------------------------------------------------------------------


def _check_layer(
    function: str,
    parts: Any,
    shared: Classes | None,
    logits_dtype: torch.dtype | None,
    memory: int | None,
    accumulate: str,
    batch_invariant: bool,
) -> tuple[torch.dtype | None, torch.dtype | None, tuple[Any, ...]]:
    """The dtype that autocast casts to, a loss's, and the fields of a Layer after its tensors."""
    input, weight, bias = parts
    arguments.check_tensor(function, "input", input)
    if input.ndim == 0:
        raise ArgumentError(function, "input", "of no dimensions", "[*, in_features]")
    device = input.device.type
    autocasts = checks.autocasts(device)
    dtypes: tuple[torch.dtype, ...] = arguments.FLOATS if autocasts else (input.dtype,)
    arguments.check_companion(function, "linear_weight", weight, input, dtypes, "input")
    if weight.ndim != 2 or weight.shape[1] != input.shape[-1]:
        accepted = f"[V, {input.shape[-1]}], to go with input"
        raise ArgumentError(function, "linear_weight", f"of shape {list(weight.shape)}", accepted)
    if bias is not None:
        how: dict[str, Any] = {"shape": weight.shape[:1], "meaning": "one a class"}
        arguments.check_companion(function, "linear_bias", bias, input, dtypes, "input", **how)
    casts_to = None
    if autocasts and input.dtype != torch.float64:
        casts_to = torch.get_autocast_dtype(device)
    dtype = casts_to or input.dtype
    arguments.check_choice(function, "logits_dtype", logits_dtype, (None, torch.float32, dtype))
    if logits_dtype == torch.float32 and dtype == torch.float64:
        raise ArgumentError(function, "logits_dtype", logits_dtype, "None for float64")
    arguments.check_choice(function, "accumulate", accumulate, _ACCUMULATE)
    checks.flag(function, "batch_invariant", batch_invariant)
    if memory is None:
        memory = chunks.find_memory(input.device)
    elif type(memory) is not int:
        raise ArgumentError(function, "memory", repr(memory), "a number of bytes, an int, or None")
    casts = weight.dtype != dtype
    is_whole = shared is None and not state.is_compiling()
    if accumulate == "grad" and (casts or not weight.is_leaf or not is_whole):
        accepted = (
            "'float32' or 'parameter' but for a plain weight that is a leaf, of the input's dtype, "
            "in code that is not compiled"
        )
        raise ArgumentError(function, "accumulate", "'grad'", accepted)
    widest = weight.shape[0] if shared is None else shared.most
    sums = accumulate == "float32"
    chunking = (memory, logits_dtype or dtype, sums, batch_invariant, widest)
    return casts_to, None if autocasts else input.dtype, chunking


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
