"""A small transformer, its text, and its gradients, for the tests against peers."""

from __future__ import annotations

import functools

import torch
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 12


def llama(hidden_size: int = 64, intermediate_size: int = 128) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, (STEPS * 4, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


@functools.lru_cache(maxsize=1)
def training() -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Parameters, and the gradients of 50 steps of torch's AdamW from them.

    Rows are multiples of 256 elements, where blocks of 8-bit states are bitsandbytes'. Embeddings
    are left out: most of their gradients are zero.
    """
    model = llama(256, 256)
    model.model.embed_tokens.requires_grad_(False)
    params = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in params]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    of_steps = []
    for step in range(50):
        optimizer.zero_grad()
        rows = batches()[4 * step % 48 : 4 * step % 48 + 4]
        tokens = torch.stack([row["input_ids"] for row in rows])
        model(input_ids=tokens, labels=tokens).loss.backward()
        of_steps.append([p.grad.clone() for p in params])
        optimizer.step()
    return start, of_steps
