"""A BatchNorm1d whose result only an activation module reads, as after a linear layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion.modules import forward_of
from torchweld.fusion.patterns.edges import Pair, find_pair, propose_with_activation
from torchweld.fusion.proposals import Left, Proposal
from torchweld.fusion.view import View
from torchweld.fusion.weld import Weld
from torchweld.names import ActivationName, Approximation
from torchweld.nn.batch_norm import count_momentum
from torchweld.ops.activation import ACTIVATIONS

_NORMS = (torch.nn.BatchNorm1d.forward, torch.nn.SyncBatchNorm.forward)


class BatchNormAct(Weld):
    """A batch norm that computes its activation too if the module around it asks it to.

    It does so for a matrix; other inputs take two steps.
    """

    weld_activation: ActivationName
    weld_approximate: Approximation

    def forward(self, input: torch.Tensor, weld_asked: bool = False) -> torch.Tensor:
        norm: Any = self
        if not weld_asked or input.ndim != 2:
            y: torch.Tensor = self.welded_from.forward(self, input)
            act = ACTIVATIONS[self.weld_activation, self.weld_approximate].function
            return act(y) if weld_asked else y
        tracked = norm.track_running_stats or not norm.training
        return functional.batch_norm_act(
            input,
            norm.running_mean if tracked else None,
            norm.running_var if tracked else None,
            norm.weight,
            norm.bias,
            norm.training or norm.running_mean is None,
            count_momentum(norm),
            norm.eps,
            activation=self.weld_activation,
            approximate=self.weld_approximate,
        )


def find_batch_norm_act(module: torch.nn.Module, view: View) -> Iterator[Proposal | Left]:
    """The activations among a module's children, with the preceding batch norms."""
    if not any(forward_of(part) in _NORMS for part in module.modules()):
        return
    for consumer in module.children():
        kind = view.activation(consumer)
        if kind is None:
            continue
        pair = find_pair(consumer, module, view)
        if not isinstance(pair, Pair) or forward_of(pair.first) not in _NORMS:
            continue
        producer = pair.first
        what = f"{type(producer).__name__} + {type(consumer).__name__}"
        if isinstance(producer, torch.nn.SyncBatchNorm):
            reason = "its statistics span several processes; LinearBatchNormAct supports that"
            yield Left(producer, what, reason)
            continue
        yield propose_with_activation(pair, module, what, BatchNormAct, "batch_norm_act", kind)
