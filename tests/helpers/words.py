"""A language model written by hand, for tests of fuse()."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import torchweld
from torchweld.fusion.graph.regions import Region

WIDTH, WORDS = 32, 50


class Norm(nn.Module):
    """Llama's norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.arange(WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Layer(nn.Module):
    """A gated MLP and its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up = Norm(), nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 48)
        self.down, self.p, self.scale = nn.Linear(48, WIDTH), 0.0, 1.0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        y = self.norm(x)
        y = self.down(functional.silu(self.gate(y)) * self.up(y))
        return x + functional.dropout(y, self.p, self.training) * scale


class Words(nn.Module):
    """A language model written by hand, whose parts are called as functions."""

    checkpointing: Any = None

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = Norm(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            if self.checkpointing is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, WORDS), ids.roll(-1, 1).view(-1)), logits


def make_ids(rows: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(rows))


def make_words(**more: Any) -> Any:
    torch.manual_seed(0)
    return Words(**more)


def step(model: Any, ids: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """The loss and all gradients of a training step."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(ids)[0]
    (loss * scale).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **{name: _whole(grad) for name, grad in grads.items()}}


def _whole(grad: Any) -> torch.Tensor:
    return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()


def compare(got: dict[str, Any], want: dict[str, Any], bound: float = 2e-5) -> None:
    assert got.keys() == want.keys()
    for name, b in want.items():
        a = got[name]
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        assert (a - b).norm() <= bound * b.norm() + 1e-7, name


def list_ops(model: Any) -> list[str]:
    """The welds that the captures of a model made."""
    kinds = {type(part) for part in model.modules() if isinstance(part, Region)}
    slots = [slot for kind in kinds for slot in kind.weld_captures.slots.values() if not slot.off]
    return [placed.op for slot in slots for placed in slot.placed if not placed.reason]


def fuse_two(model: Any, prepare: Callable[[Any], Any] = lambda model: model) -> tuple[Any, Any]:
    """A fused copy and the model, both prepared in the same way after `fuse`."""
    fused = torchweld.fuse(copy.deepcopy(model))
    return prepare(fused), prepare(model)
