"""TRL's log-probabilities and entropies, and a patch that lets its trainers use ours."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torchweld import functional
from torchweld.errors import ArgumentError

# Rows of logits in float32 at a time, where their mean is computed by torch.
_ROWS = 128
OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def selective_log_softmax(
    logits: torch.Tensor,
    index: torch.Tensor,
    temperature: float = 1.0,
    row_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probabilities of selected classes.

    Args:
        logits: [*, V].
        index: classes, [*], or [*, K] for K of each row.
        temperature: the logits are divided by it; above 0.
        row_mask: [*]; a row with 0 gets log-probabilities and gradients of 0.

    Returns:
        A tensor of index's shape, float32 (float64 of float64).
    """
    _check("selective_log_softmax", temperature)
    index = _mask("selective_log_softmax", logits, index, row_mask)
    return functional.logprobs(logits, index, temperature=temperature)  # type: ignore[return-value]


def entropy_from_logits(logits: torch.Tensor, chunk_size: int = _ROWS) -> torch.Tensor:
    """Each row's entropy in nats; `linear_logprobs` needs no logits for it.

    Args:
        logits: [*, V].
        chunk_size: has no effect, since no copy of the logits is made.

    Returns:
        A tensor [*], float32 (float64 of float64).
    """
    no_class = logits.new_empty((*logits.shape[:-1], 0), dtype=torch.int64)
    return functional.logprobs(logits, no_class, return_entropy=True)[1]


def selective_log_softmax_and_entropy(
    logits: torch.Tensor,
    index: torch.Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both of the functions above, in one pass; a row with row_mask 0 gets 0."""
    _check("selective_log_softmax_and_entropy", temperature)
    index = _mask("selective_log_softmax_and_entropy", logits, index, row_mask)
    log_p, entropy = functional.logprobs(
        logits, index, temperature=temperature, return_entropy=True
    )
    return log_p, entropy if entropy_requires_grad else entropy.detach()


class ChunkedLogProbFunction:
    """TRL's class of that name, whose `apply` is a function of ours."""

    @staticmethod
    def apply(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        chunk_size: int | None = None,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> tuple[Any, ...]:
        """Log-probability, entropy, log of the sum of squared probabilities, mean logit, top hit.

        The first two are differentiable. A result that `outputs` does not name is None.

        Args:
            hidden: [N, in_features].
            weight: [V, in_features].
            bias: [V], or None.
            targets: [N].
            temperature: the logits are divided by it; above 0.
            chunk_size: has no effect; chunks are of rows, by memory.
            final_logit_softcapping: logits become cap * tanh(logits / cap).
            logit_scale: a factor of the logits, before the soft cap.
            outputs: names of the further results, of OUTPUTS.
        """
        _check("ChunkedLogProbFunction", temperature)
        if unknown := set(outputs) - {*OUTPUTS, "log_probs"}:
            raise ArgumentError(
                "ChunkedLogProbFunction", "outputs", repr(min(unknown)), f"names of {OUTPUTS}"
            )
        dtype, device = hidden.dtype, hidden.device.type
        if weight.dtype != dtype and not torch.is_autocast_enabled(device):
            weight = weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        how: dict[str, Any] = {"linear_bias": bias, "softcap": final_logit_softcapping}
        how |= {"logit_scale": None if logit_scale == 1.0 else logit_scale}
        wanted = {name: name in outputs for name in OUTPUTS}
        squares = wanted["log_sum_sq_probs"]
        found = functional.linear_logprobs(
            *(hidden, weight, targets),
            temperature=temperature,
            return_entropy=wanted["entropy"],
            return_lse=squares,
            return_argmax=wanted["is_top1"],
            **how,
        )
        results = iter(found if isinstance(found, tuple) else (found,))
        log_p, entropy, lse = (
            next(results) if each else None for each in (True, wanted["entropy"], squares)
        )
        top = next(results) == targets if wanted["is_top1"] else None
        squared = mean = None
        with torch.no_grad():
            if squares and lse is not None:  # of p^2 is the softmax of twice the logits
                twice = functional.linear_logprobs(
                    hidden, weight, targets, temperature=temperature / 2, return_lse=True, **how
                )
                squared = twice[1] - 2 * lse
            if wanted["mean_logits"]:
                mean = _find_mean(hidden, weight, bias, final_logit_softcapping, logit_scale)
                mean = mean / temperature
        return log_p, entropy, squared, mean, top


def _find_mean(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    softcap: float | None,
    scale: float,
) -> torch.Tensor:
    """The mean of each row's logits; without a soft cap it is that of the weight's rows."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):
        if softcap is None:
            mean = hidden.to(wide) @ weight.mean(0, dtype=wide)
            return scale * (mean if bias is None else mean + bias.mean(dtype=wide))
        means = []
        for rows in hidden.split(_ROWS):
            logits = torch.nn.functional.linear(rows, weight.to(rows.dtype), bias).to(wide)
            means.append((softcap * torch.tanh(scale * logits / softcap)).mean(-1))
        return torch.cat(means) if means else hidden.new_zeros(0, dtype=wide)


# The release that was read; another may call its functions by other arguments.
_READ = "1.16"
_REPLACED = {
    "_ChunkedLogProbFunction": ChunkedLogProbFunction,
    "selective_log_softmax": selective_log_softmax,
    "entropy_from_logits": entropy_from_logits,
    "selective_log_softmax_and_entropy": selective_log_softmax_and_entropy,
}


@contextmanager
def patch() -> Iterator[list[str]]:
    """Let TRL's trainers call these functions, inside this context. Yields what was replaced.

    Trainers that imported a function by its name are changed, too. It warns in another release than
    1.16, and raises an error where one of the functions is missing.
    """
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"patch: trl is not installed; accepted: trl {_READ}") from None
    utils: Any = importlib.import_module("trl.trainer.utils")
    missing = [name for name in _REPLACED if not hasattr(utils, name)]
    if missing:
        message = f"patch: trl {version} has no {', '.join(missing)}; accepted: trl {_READ}"
        raise ImportError(message)
    if not version.startswith(f"{_READ}."):
        told = f"trl is {version}, and ours stand for the functions of {_READ}"
        warnings.warn(f"patch: {told}: compare the losses of some steps", stacklevel=3)
    owned = {name: getattr(utils, name) for name in _REPLACED}
    changed = []
    for module in [m for n, m in list(sys.modules.items()) if n.startswith("trl.") and m]:
        for name, own in owned.items():
            if vars(module).get(name) is own:
                changed.append((module, name))
                setattr(module, name, _REPLACED[name])
    try:
        yield [f"{module.__name__}.{name}" for module, name in changed]
    finally:
        for module, name in changed:
            setattr(module, name, owned[name])


def _mask(
    function: str, logits: torch.Tensor, index: torch.Tensor, row_mask: torch.Tensor | None
) -> torch.Tensor:
    """The classes, of which rows with 0 in their mask have none."""
    if row_mask is None:
        return index
    rows = logits.shape[:-1]
    if row_mask.shape != rows:
        actual, accepted = f"of shape {list(row_mask.shape)}", f"the rows' shape, {list(rows)}"
        raise ArgumentError(function, "row_mask", actual, accepted)
    ignored = row_mask == 0
    return torch.where(ignored if index.ndim == len(rows) else ignored.unsqueeze(-1), -100, index)


def _check(function: str, temperature: float) -> None:
    if not temperature > 0:
        raise ArgumentError(function, "temperature", repr(temperature), "a number above 0")
