"""A small GPT or BERT made of torchweld.nn's modules, with dense or sparse attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import torchweld
from torchweld.sparse import BlockLayout


@dataclass(frozen=True)
class Settings:
    """The sizes and the kind of a Transformer."""

    vocabulary: int = 256
    length: int = 128
    width: int = 128
    heads: int = 4
    layers: int = 4
    dropout: float = 0.1
    attention_dropout: float | None = None  # None: the same as dropout
    # A GPT is causal and pre-norm; a BERT is neither.
    causal: bool = True
    sparse: bool = False
    block: int = 16
    window: int = 3  # blocks

    def layout(self) -> Callable[..., BlockLayout]:
        """The layout of attention: the whole sequence, or its first tokens and a window."""
        if not self.sparse:
            return partial(BlockLayout.dense, block=self.block)
        attention = "unidirectional" if self.causal else "bidirectional"
        return partial(
            BlockLayout.longformer,
            block=self.block,
            num_sliding_window_blocks=self.window,
            attention=attention,
        )


class Attention(nn.Module):
    """Attention to the blocks of a layout, with this device's heads."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(s.width, s.width) for _ in range(3))
        self.o_proj = nn.Linear(s.width, s.width)
        p = s.dropout if s.attention_dropout is None else s.attention_dropout
        self.attention = torchweld.nn.BlockSparseAttention(s.layout(), p, causal=s.causal)
        self.head_width = s.width // s.heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.attention(q, k, v).transpose(1, 2).flatten(2))


class PreNorm(nn.Module):
    """A block of a GPT; each dropout, addition and norm is one pass over memory."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(s), torchweld.nn.MLP(s.width, 4 * s.width)
        self.norm1 = torchweld.nn.LayerNorm(s.width)
        self.norm2 = torchweld.nn.DropoutAddLayerNorm(s.width, p=s.dropout, return_residual=True)
        self.add = torchweld.nn.BiasDropoutAdd(s.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, x = self.norm2(self.attention(self.norm1(x)), x)
        return self.add(self.mlp(y), None, x)


class PostNorm(nn.Module):
    """A block of a BERT."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(s), torchweld.nn.MLP(s.width, 4 * s.width)
        self.norm1 = torchweld.nn.DropoutAddLayerNorm(s.width, p=s.dropout)
        self.norm2 = torchweld.nn.DropoutAddLayerNorm(s.width, p=s.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(self.attention(x), x)
        return self.norm2(self.mlp(x), x)


class Transformer(nn.Module):
    """A model from tokens to logits, or one stage of it, which passes activations on."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.token: nn.Module | None = nn.Embedding(s.vocabulary, s.width)
        self.place: nn.Module | None = nn.Embedding(s.length, s.width)
        block = PreNorm if s.causal else PostNorm
        self.blocks = nn.ModuleDict({str(i): block(s) for i in range(s.layers)})
        self.norm: nn.Module | None = torchweld.nn.LayerNorm(s.width)
        self.head: nn.Module | None = nn.Linear(s.width, s.vocabulary, bias=False)

    def forward(self, x: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Compute logits; `first` is the position of the first token."""
        if self.token is not None and self.place is not None:
            places = torch.arange(first, first + x.shape[1], device=x.device)
            x = self.token(x) + self.place(places[None])
        for block in self.blocks.values():
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x

    def stage(self, index: int, count: int) -> Transformer:
        """Keep only the modules of a pipeline's stage, under the same names."""
        layers = len(self.blocks)
        first, last = index * layers // count, (index + 1) * layers // count
        for i in range(layers):
            if not first <= i < last:
                del self.blocks[str(i)]
        if index > 0:
            self.token = self.place = None
        if index < count - 1:
            self.norm = self.head = None
        return self


def compute_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute the mean cross-entropy over a batch's tokens."""
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def make_batch(s: Settings, rows: int, seed: int, device: Any = "cpu") -> tuple[torch.Tensor, ...]:
    """Make random tokens and their targets: the previous token plus one, which can be learnt."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(s.vocabulary, (rows, s.length), generator=generator)
    return tokens.to(device), ((tokens.roll(1, 1) + 1) % s.vocabulary).to(device)
