"""Functions made of several ops, as modules: by torch's ops, and by ours after `switch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

from torchweld import functional

HEADS = 8
WORDS = 8192


class Switched(nn.Module):
    """A module that calls `function`, until `switch` puts `ours` in its place."""

    def __init__(self, function: Callable[..., Any], ours: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.ours = function, ours


def switch(module: nn.Module) -> nn.Module:
    """The module with our function."""
    assert isinstance(module, Switched)
    module.function = module.ours
    return module


class GivenLogits(Switched):
    """A loss of logits, [batch, tokens, words], or their log-probabilities."""

    def forward(self, logits: torch.Tensor) -> Any:
        return self.function(logits.flatten(0, 1), _draw_targets(logits, logits.shape[-1]))


def make_loss_of_logits(_: int) -> GivenLogits:
    """cross_entropy."""
    return GivenLogits(cross_entropy, functional.cross_entropy)


def make_logprobs_of_logits(_: int) -> GivenLogits:
    """logprobs."""
    return GivenLogits(_find_logprobs, functional.logprobs)


def _find_logprobs(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, target[:, None])[:, 0]


class Head(Switched):
    """A loss, or log-probabilities, of a linear layer's logits."""

    def __init__(self, function: Callable[..., Any], ours: Callable[..., Any], width: int) -> None:
        super().__init__(function, ours)
        self.weight = nn.Parameter(torch.randn(WORDS, width) * width**-0.5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x.flatten(0, 1), self.weight, _draw_targets(x, WORDS))


def _draw_targets(x: torch.Tensor, words: int) -> torch.Tensor:
    return torch.arange(x.shape[:-1].numel(), device=x.device) * 7919 % words


def make_loss(width: int) -> Head:
    """linear_cross_entropy."""

    def by_torch(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(linear(x, weight), target)

    return Head(by_torch, functional.linear_cross_entropy, width)


def make_logprobs(width: int) -> Head:
    """linear_logprobs."""

    def by_torch(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return _find_logprobs(linear(x, weight), target)

    return Head(by_torch, functional.linear_logprobs, width)


class Rotary(Switched):
    """Rotates the queries and keys of a projection, and puts them side by side again."""

    def __init__(self, _: int) -> None:
        super().__init__(_rotate, functional.rotary_embedding_qk)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = x.unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        angles = torch.arange(q.shape[-2], device=x.device, dtype=x.dtype)[:, None]
        angles = angles * 1e4 ** -torch.linspace(0, 1, q.shape[-1] // 2, device=x.device)
        angles = torch.cat([angles, angles], -1)
        return torch.cat(self.function(q, k, angles.cos().to(x.dtype), angles.sin().to(x.dtype)))


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As models of transformers do."""

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    return rotate(q), rotate(k)
