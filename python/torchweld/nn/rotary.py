"""Rotary embeddings whose angles a module keeps."""

from __future__ import annotations

import math

import torch

from torchweld import checks, functional
from torchweld.errors import ArgumentError


class RotaryEmbedding(torch.nn.Module):
    """rotary_embedding with the angles position * base^(-2i / dim), in float32 in any model.

    The tables are made at the first call on a device and kept; they are in no state_dict, and a
    cast of the model does not round them.

    Args:
        dim: the number of columns that are rotated; even, at most the inputs' width.
        max_positions: rows of the tables.
        base: base of the frequencies.
        interleaved: True pairs columns 2i and 2i + 1, False i and i + dim / 2.
        seq_dim: the dimension of tokens, -2 or -3.
        attention_factor: a factor of cos and sin, as YaRN has one.
    """

    def __init__(
        self,
        dim: int,
        max_positions: int = 4096,
        base: float = 10000.0,
        *,
        interleaved: bool = False,
        seq_dim: int = -2,
        attention_factor: float = 1.0,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        is_even = isinstance(dim, checks.INTEGER) and dim > 0 and dim % 2 == 0
        checks.fits(name, "dim", dim, is_even, "an even number above 0")
        checks.count(name, "max_positions", max_positions)
        accepted = "a finite number > 0"
        checks.number(name, "base", base, lambda v: 0 < v < math.inf, accepted)
        checks.factor(name, "attention_factor", attention_factor)
        if seq_dim not in (-2, -3):
            raise ArgumentError("RotaryEmbedding", "seq_dim", repr(seq_dim), "-2 or -3")
        self.dim, self.max_positions, self.base = dim, max_positions, base
        self.interleaved, self.seq_dim = interleaved, seq_dim
        self.attention_factor = attention_factor
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [max_positions, dim / 2]."""
        if device not in self._tables:
            with torch.no_grad():
                exponents = torch.arange(0, self.dim, 2, dtype=torch.float64, device="cpu")
                positions = torch.arange(self.max_positions, dtype=torch.float64, device="cpu")
                angles = torch.outer(positions, self.base ** (-exponents / self.dim))
                factor = self.attention_factor
                cos, sin = ((factor * t).float().to(device) for t in (angles.cos(), angles.sin()))
            self._tables[device] = cos, sin
        return self._tables[device]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.tables(q.device)
        if position_ids is None:
            length = q.shape[self.seq_dim]
            if length > self.max_positions:
                accepted = f"at most max_positions, {self.max_positions}"
                raise ArgumentError("RotaryEmbedding", "q", f"of {length} tokens", accepted)
            cos, sin = cos[:length], sin[:length]
        if q.dtype == torch.float64:
            cos, sin = cos.double(), sin.double()
        return functional.rotary_embedding_qk(
            q,
            k,
            cos,
            sin,
            position_ids,
            interleaved=self.interleaved,
            rotary_dim=self.dim,
            seq_dim=self.seq_dim,
        )

    def extra_repr(self) -> str:
        """Its sizes, in the model's repr."""
        return f"{self.dim}, max_positions={self.max_positions}, base={self.base}"
