"""Rotary embeddings of transformers' models after fuse(): training, compiling, and refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_models import build, tokens

import torchweld

NAMES = ["llama", "qwen3", "gemma3"]


def _train(model: Any, steps: int = 20) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = model(**tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_losses_of_20_steps_are_eagers(name: str) -> None:
    model = build(name)
    fused = torchweld.fuse(copy.deepcopy(model))
    attention: Any = fused.model.layers[0].self_attn
    assert "rotary_embedding_qk" in attention.weld_becomes
    eager, ours = _train(model), _train(fused)
    assert eager[-1] < eager[0] - 0.5
    assert max(abs(a - b) for a, b in zip(eager, ours, strict=True)) <= 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_a_welded_attention_compiles_and_comes_back(name: str) -> None:
    model = build(name)
    attention = torchweld.fuse(model).model.layers[0].self_attn
    generator = torch.Generator().manual_seed(0)
    x, angles = (torch.randn(2, 8, width, generator=generator) for width in (64, 16))
    given: Any = {"position_embeddings": (angles, angles), "attention_mask": None}
    expected = attention(x, **given)[0]
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, **given)[0], expected)
    copied = copy.deepcopy(attention)
    assert torch.equal(copied(x, **given)[0], expected)
    torchweld.unfuse(model)
    assert "weld" not in str(type(attention).__mro__)
    torch.testing.assert_close(attention(x, **given)[0], expected)


def test_another_rotation_is_left_alone_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name says nothing: the trial decides."""
    from transformers.models.llama import modeling_llama

    def backwards(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return rotate(q, k, cos, -sin, unsqueeze_dim)

    rotate = modeling_llama.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", backwards)
    rows = torchweld.explain_fusion(build("llama"))
    (row,) = {row.reason for row in rows if row.what == "LlamaAttention"}
    assert "it computes something else" in row
