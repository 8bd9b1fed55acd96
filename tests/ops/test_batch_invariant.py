"""Which functions give a row the same bits by itself, among 7 rows and among 4096 (numerics.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchweld
from torchweld import functional as F  # noqa: N812
from torchweld.sparse import BlockLayout

WIDTH = 40
MANY = 4096


def _draw(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


WEIGHT, BIAS, HEAD = _draw(WIDTH), _draw(1, WIDTH)[0], _draw(77, WIDTH)
TARGET = torch.arange(MANY) % 77
ANGLES = _draw(1, WIDTH // 2)
LAYOUT = BlockLayout.dense(8)


def _attend(x: torch.Tensor) -> torch.Tensor:
    """Rows are batches here: each attends to its own 8 tokens."""
    q = x.reshape(-1, 1, 8, WIDTH // 8)
    y = F.block_sparse_attention(q, q, q, LAYOUT, causal=True)
    return y.reshape(x.shape)


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rms_norm": lambda x: F.rms_norm(x, [WIDTH], WEIGHT.to(x.dtype)),
    "layer_norm": lambda x: F.layer_norm(x, [WIDTH], WEIGHT.to(x.dtype), BIAS.to(x.dtype)),
    "dropout_add_rms_norm": lambda x: F.dropout_add_rms_norm(
        x, x.flip(-1), WEIGHT.to(x.dtype), training=False
    ),
    "bias_act": lambda x: F.bias_act(x, BIAS.to(x.dtype), activation="gelu"),
    "gated_act": lambda x: F.gated_act(x[:, :20], x[:, 20:], activation="silu"),
    "softmax_dropout": lambda x: F.softmax_dropout(x, p=0.0),
    "rotary_embedding": lambda x: F.rotary_embedding(
        x.reshape(-1, 1, 1, WIDTH), ANGLES.cos(), ANGLES.sin(), norm_eps=1e-6
    ).reshape(x.shape),
    "block_sparse_attention": _attend,
    "cross_entropy": lambda x: F.cross_entropy(x, TARGET[: len(x)] % WIDTH, reduction="none"),
    "linear_logprobs, batch_invariant=True": lambda x: F.linear_logprobs(
        x, HEAD.to(x.dtype), TARGET[: len(x)], batch_invariant=True
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_has_the_same_bits_among_any_others(name: str, dtype: torch.dtype) -> None:
    """On the CPU's kernels; forward, and the gradient of the rows."""
    x = _draw(MANY, WIDTH).to(dtype)
    found = []
    with torchweld.use_backend("cpu"):
        for rows in (1, 7, MANY):
            some = x[:rows].clone().requires_grad_()
            y = FUNCTIONS[name](some)
            (grad,) = torch.autograd.grad(y, some, torch.ones_like(y))
            found.append((y[:1], grad[:1]))
            if rows > 1:
                assert torch.equal(y[:7], FUNCTIONS[name](x)[:7])
    for y, grad in found[1:]:
        assert torch.equal(y, found[0][0])
        if "linear" not in name:  # its gradient is of a GEMM, of the rows that there are
            assert torch.equal(grad, found[0][1])
