"""Activations, and the linear layers and batch norms before them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion import probe
from torchweld.fusion.patterns.pairs import Pair, find_pair, propose_pair
from torchweld.fusion.rewrite import list_called
from torchweld.fusion.view import View
from torchweld.fusion.weld import (
    Change,
    Kind,
    Proposal,
    Skipped,
    Tried,
    Weld,
    forward_of,
    is_of_kind,
    kind_of,
    propose,
    why_not_change,
)
from torchweld.names import ActivationName, Approximation
from torchweld.nn.batch_norm import read_norm
from torchweld.ops.activation import ACTIVATIONS
from torchweld.ops.gemm import gemm
from torchweld.ops.gemm.linear_act import linear_as_torch

# Eager torch's kernels for these modules move no more bytes than ours.
_FAST_IN_EAGER = (torch.nn.ReLU, torch.nn.Sigmoid, torch.nn.Tanh, torch.nn.SiLU)
# The activation that a layer is asked to compute, and its approximation.
Asked = tuple[ActivationName, Approximation]
_NORMS = (torch.nn.BatchNorm1d.forward, torch.nn.SyncBatchNorm.forward)


class Activation(Tried):
    """An activation in one pass."""

    weld_activation: ActivationName
    weld_approximate: Approximation

    def weld_run(self, x: torch.Tensor) -> torch.Tensor:
        return functional.bias_act(
            x, activation=self.weld_activation, approximate=self.weld_approximate
        )


class LinearAct(Weld):
    """A linear layer that computes its activation too if the module around it asks it to."""

    weld_activation: ActivationName
    weld_approximate: Approximation
    weld_transposed: bool
    weld_kind: Kind | None = None  # of a layer whose forward is not torch's
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, *args: Any, weld_asked: Asked | None = None, **kwargs: Any) -> Any:
        is_of_the_kind = self.weld_kind is None or is_of_kind(self, self.weld_kind)
        if weld_asked is not None and not is_of_the_kind:
            return ACTIVATIONS[weld_asked].function(self.welded_from.forward(self, *args))
        # Not t(), which a DTensor does not have in inference mode.
        weight = self.weight.mT if self.weld_transposed else self.weight
        if weld_asked is None:
            is_plain = is_of_the_kind and len(args) == 1 and not kwargs
            if is_plain and gemm.is_converted(args[0], weight, self.bias):
                return linear_as_torch(args[0], weight, self.bias)
            return self.welded_from.forward(self, *args, **kwargs)
        return functional.linear_act(
            args[0],
            weight,
            self.bias,
            activation=weld_asked[0],
            approximate=weld_asked[1],
        )

    def extra_repr(self) -> str:
        inner = self.welded_from.extra_repr(self)
        return (
            f"{inner}, activation={self.weld_activation!r}, approximate={self.weld_approximate!r}"
        )


class BatchNormAct(Weld):
    """A batch norm that computes its activation too if the module around it asks it to.

    It does so for a matrix; other inputs take two steps.
    """

    def forward(self, input: torch.Tensor, weld_asked: Asked | None = None) -> torch.Tensor:
        norm: Any = self
        if weld_asked is None or input.ndim != 2:
            y: torch.Tensor = self.welded_from.forward(self, input)
            return y if weld_asked is None else ACTIVATIONS[weld_asked].function(y)
        activation, approximate = weld_asked
        return functional.batch_norm_act(
            input, *read_norm(norm), activation=activation, approximate=approximate
        )


def in_words(kind: tuple[str, str]) -> str:
    """An activation's name in tables."""
    return kind[0] if kind[1] == "none" else f"{kind[0]} by {kind[1]}"


def find_activation(module: torch.nn.Module, view: View) -> Iterator[Proposal | Skipped]:
    """A module that computes one of torchweld's activations in any way."""
    kind = None if type(module) in _FAST_IN_EAGER else view.activation(module)
    if kind is None or kind[0] in ("relu", "sigmoid", "tanh"):
        return
    if getattr(module, "inplace", False):
        reason = "it works in place, and torchweld's would need another tensor"
        yield Skipped(module, type(module).__name__, reason)
    else:
        settings = {"activation": kind[0], "approximate": kind[1]}
        inputs = (probe.values((4, 5, 48), view.device(module)),)
        becomes = f"bias_act ({in_words(kind)})"
        yield propose(module, Activation, becomes, settings, inputs=inputs)


def _propose_both(
    pair: Pair, parent: torch.nn.Module, weld: type[Weld], op: str, view: View, **settings: Any
) -> Proposal | Skipped:
    """Propose that the first module computes its activation, the second one, too."""
    kind = view.activation(pair.second)
    assert kind is not None
    settings |= {"activation": kind[0], "approximate": kind[1]}
    change = Change(pair.first, weld, f"{op} ({in_words(kind)})", settings)
    return propose_pair(pair, parent, change, kind)


def find_batch_norm_act(module: torch.nn.Module, view: View) -> Iterator[Proposal | Skipped]:
    """The activations among a module's children, with the preceding batch norms."""
    if not any(forward_of(part) in _NORMS for part in module.modules()):
        return
    for consumer in filter(view.activation, module.children()):
        pair = find_pair(consumer, module, view)
        if not isinstance(pair, Pair) or forward_of(pair.first) not in _NORMS:
            continue
        if isinstance(pair.first, torch.nn.SyncBatchNorm):
            reason = "its statistics span several processes; LinearBatchNormAct supports that"
            yield Skipped(pair.first, pair.what, reason)
        else:
            yield _propose_both(pair, module, BatchNormAct, "batch_norm_act", view)


def find_linear_act(module: torch.nn.Module, view: View) -> Iterator[Proposal | Skipped]:
    """The activations among a module's children, with the preceding linear layers."""
    activations = [child for child in module.children() if view.activation(child)]
    for consumer in activations:
        pair = find_pair(consumer, module, view)
        if isinstance(pair, Skipped):
            yield pair
        elif pair is not None and (form := view.linear(pair.first)):
            is_torchs = forward_of(pair.first) is torch.nn.Linear.forward
            own: dict[str, Any] = {"transposed": form == "transposed"}
            own |= {} if is_torchs else {"kind": kind_of(pair.first)}
            yield _propose_both(pair, module, LinearAct, "linear_act", view, **own)
        elif pair is not None and isinstance(pair.first, torch.nn.Linear):
            reason = why_not_change(pair.first) or "it is another kind of linear layer"
            yield Skipped(pair.first, pair.what, reason)
    for consumer in filter(view.is_unknown_activation, module.children()):
        pair = find_pair(consumer, module, view)
        if isinstance(pair, Pair) and view.linear(pair.first):
            yield Skipped(pair.first, pair.what, "its activation is none of torchweld's")
    if type(module) is torch.nn.Sequential:  # it calls no functions
        return
    if module is view.model or any(view.linear(child) for child in module.children()):
        yield from _find_functions(module, view)


def _find_functions(module: torch.nn.Module, view: View) -> Iterator[Skipped]:
    """Find activations of a linear layer, softmax and dropout that a module calls as functions.

    Only the module's own linear layers count. The source of one that does not run by itself is
    read, such as that of a model of words.
    """
    if not module._modules:
        return
    scope = view.watch(module)
    if isinstance(scope, str):
        edges, own = [], list_called(forward_of(module), probe.FUNCTIONS)
    else:
        edges = scope.edges
        own = [str(consumer) for producer, consumer in edges if producer is module]
    if own:
        what = " + ".join(dict.fromkeys(own))
        yield Skipped(
            module, what, "functions, which fuse() cannot replace: call torchweld.functional"
        )
    for producer, consumer in edges:
        if isinstance(consumer, str) and view.linear(producer):
            what = f"{type(producer).__name__} + {consumer}"
            yield Skipped(
                producer, what, "its activation is a function: there is no module to change"
            )
