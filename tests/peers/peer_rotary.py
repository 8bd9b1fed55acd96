"""Rotary embeddings of transformers' models after fuse(): training, compiling, and refusals."""

from __future__ import annotations

import copy
from typing import Any

import named_models
import pytest
import torch
import transformers
from small_models import _GROUPED, IS_TESTED_RELEASE, build, tokens

import torchweld
from torchweld.fusion.patterns.rotary import RotaryAttention

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


OTHER_FORMS = [
    *("Glm", "Glm4", "Ernie4_5", "Helium", "Cohere"),  # interleaved
    *("Phi", "StableLm", "Persimmon", "GPTNeoX"),  # some of the columns
    *("GptOss", "Falcon"),  # an angle for a pair; a forward with an argument of its own
    *("DeepseekV2", "Llama4", "DINOv3"),  # complex; the last tokens
]


def _build(name: str) -> Any:
    torch.manual_seed(0)
    if name == "Llama4":
        sizes = {**_GROUPED, "intermediate_size_mlp": 64, "num_local_experts": 2, "head_dim": 16}
        return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes))
    if name == "DINOv3":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        config = transformers.DINOv3ViTConfig(
            **sizes, num_hidden_layers=2, image_size=32, patch_size=8, num_register_tokens=2
        )
        return transformers.DINOv3ViTModel(config)
    return named_models.build(name)


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_other_forms(name: str) -> None:
    """Results, gradients and what is generated are eager's; some compute angles in float32."""
    model = _build(name).eval()
    fused = torchweld.fuse(copy.deepcopy(model))
    found = [m.weld_becomes for m in fused.modules() if isinstance(m, RotaryAttention)]
    assert found == ["rotary_embedding_qk"] * 2 or not IS_TESTED_RELEASE
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)).double()
    images = name == "DINOv3"
    given = {"pixel_values": pixels} if images else {"input_ids": tokens()["input_ids"]}
    results = []
    for each in (copy.deepcopy(fused).double(), copy.deepcopy(model).double()):
        y = each(**given)[0]
        parameters = list(each.parameters())
        grads = torch.autograd.grad(y.square().mean(), parameters, allow_unused=True)
        flat = [grad.flatten() for grad in grads if grad is not None]
        results.append((y, torch.cat(flat)))
    for mine, theirs in zip(*results, strict=True):
        assert (mine - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    if not images:
        how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        prompt = given["input_ids"][:2, :9]
        assert torch.equal(fused.generate(prompt, **how), model.generate(prompt, **how))


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
