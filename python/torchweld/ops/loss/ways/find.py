"""The ways of a linear layer's loss, in order of preference: `find_way` names the one that serves.

- torch: its own ops, of few logits on a CPU.
- fused: the logits are kept, and the loss is one op.
- kept: in chunks of rows; their gradients are computed with the loss, and kept.
- again: in chunks; the backward pass computes the logits again.
- eager: plain torch with all logits, for transforms and for targets that need a gradient.

`find_rows` of ../chunks.py says how many rows a chunk has.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from torchweld.ops.loss.ways import again, eager, fused, kept, torch
from torchweld.ops.loss.ways.kind import LossKind, make_layer, run_logprobs, run_loss
from torchweld.ops.loss.ways.torch import Run

# With fewer logits torch's own ops are faster.
_FEW = 2**18


def find_way(kind: LossKind, *given: Any, in_chunks: bool = False) -> Run:
    """What serves a call: the first way that can, of all or of those in chunks.

    It is a function of the call's tensors: the layer's three, the target, and what a loss is made
    of: weights of classes, temperatures, and weights of rows; of log-probabilities temperatures.
    """
    parts, is_loss = given[:3], kind.wanted is None
    if not in_chunks and kind.is_plain and torch.may_serve(_FEW, kind.settings, *given):
        of_any_size = kind._replace(settings=kind.settings._replace(leading=()))
        refused = partial(_run_in_chunks, of_any_size)
        if is_loss:
            return torch.linear_cross_entropy(kind.settings, any(kind.needs), parts, refused)
        return torch.linear_logprobs(kind.settings, parts, refused)
    if not in_chunks and (run := fused.find(kind, *given)) is not None:
        return run if is_loss else partial(fused.negate, run)
    layer = make_layer(kind, *parts)
    if is_loss and kept.may_serve(kind, layer, given[-1]):
        return partial(kept.run, kind, kept.make_plan(kind, layer, given[-1]))
    run_rows = partial(run_loss if is_loss else run_logprobs, kind)
    if not kind.takes_eager:
        return partial(run_rows, partial(again.compute, kind, again.make_plans(kind, layer)))
    return partial(run_rows, partial(eager.compute, kind))


def find_span(kind: LossKind, x: Tensor) -> dict[str, Any]:
    """The numbers of the input's elements for which the same way serves."""
    limits = (_FEW, fused.KEPT) if kind.is_plain else (fused.KEPT,)
    return torch.find_span(kind.settings, x, *limits)


def _run_in_chunks(kind: LossKind, *given: Any) -> Any:
    """A call that torch refused, of any number of rows."""
    settings = kind.settings._replace(leading=tuple(given[0].shape[:-1]))
    return find_way(kind._replace(settings=settings), *given, in_chunks=True)(*given)
