"""A transformers model computes the same after its norms are replaced."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import torchweld


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config)


def _replace_norms(model: torch.nn.Module) -> int:
    """Replace every LlamaRMSNorm by torchweld.nn.RMSNorm with its weight; return how many."""
    replaced = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LlamaRMSNorm):
                norm = torchweld.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.load_state_dict(child.state_dict())
                setattr(parent, name, norm)
                replaced += 1
    return replaced


def test_llama_with_our_norms_gives_the_same_loss_and_gradients() -> None:
    tokens = torch.randint(0, 128, (2, 128))
    plain, ours = _llama(), _llama()
    assert _replace_norms(ours) == 5
    assert list(plain.state_dict()) == list(ours.state_dict())
    losses = [model(tokens, labels=tokens).loss for model in (plain, ours)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    for loss in losses:
        loss.backward()
    expected = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        scale = expected[name].grad.abs().max()
        error = (parameter.grad - expected[name].grad).abs().max()
        assert error <= 1e-4 * scale, name
