"""LoRA by peft: layers that it may adapt stay right; others it refuses."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

import torchweld


def _adapted(block: torch.nn.Module, target: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(target_modules=[target], init_lora_weights=False)
    return get_peft_model(torch.nn.Sequential(block), config)


@pytest.mark.parametrize("layer", ["up_proj", "gate_proj", "down_proj"])
def test_the_layers_of_a_block_are_adapted(layer: str) -> None:
    """The block calls them as torch.nn.Linear, so it follows what peft makes of them."""
    block = torchweld.nn.GatedMLP(32, 64)
    x = torch.randn(2048, 32)
    with torchweld.use_backend("cpu"):
        before = block(x)
        after = _adapted(block, layer)(x)
    assert not torch.allclose(before, after)
    expected = block.down_proj(torch.nn.functional.silu(block.gate_proj(x)) * block.up_proj(x))
    torch.testing.assert_close(after, expected)


def test_a_linear_layer_with_its_activation_is_refused() -> None:
    """LoRA would add to the result of the activation."""
    with pytest.raises(ValueError, match="not supported"):
        _adapted(torchweld.nn.MLP(32, 64), "fc1")
    block = torchweld.nn.MLP(32, 64)
    x = torch.randn(2048, 32)
    adapted = _adapted(block, "fc2")
    torch.testing.assert_close(adapted(x), block.fc2(block.fc1(x)))
