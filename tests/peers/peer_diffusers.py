"""fuse() of diffusion transformers of diffusers: what is welded, and float64's numbers.

The models are small and random. A fused model's result and gradients are held to those of the plain
model in float64, and to its own float32 error.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import pytest
import torch

import torchweld

pytestmark = pytest.mark.filterwarnings("ignore")
ADAPTIVE, GATED = "adaptive_layer_norm", "gated_residual"
BOTH = "gated_residual_layer_norm"


class Case(NamedTuple):
    """A small model, the arguments of a call, and the welds that it must get."""

    make: Callable[[], torch.nn.Module]
    arguments: dict[str, Any]
    welds: dict[str, int]  # of the ops of this family


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
_TIME = torch.tensor([3, 500])
CASES = {
    "DiT": Case(
        lambda: diffusers.DiTTransformer2DModel(
            **_HEADS, in_channels=4, sample_size=8, patch_size=2, num_embeds_ada_norm=1000
        ),
        {
            "hidden_states": _x(2, 4, 8, 8),
            "timestep": _TIME,
            "class_labels": torch.tensor([1, 2]),
        },
        {ADAPTIVE: 1, BOTH: 4},
    ),
    "PixArt": Case(
        lambda: diffusers.PixArtTransformer2DModel(
            **_HEADS,
            in_channels=4,
            sample_size=8,
            patch_size=2,
            cross_attention_dim=32,
            caption_channels=24,
            use_additional_conditions=False,
        ),
        {
            "hidden_states": _x(2, 4, 8, 8),
            "encoder_hidden_states": _x(2, 5, 24),
            "timestep": _TIME,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        {ADAPTIVE: 3, GATED: 2, BOTH: 2},
    ),
    "SD3": Case(
        lambda: diffusers.SD3Transformer2DModel(
            **_HEADS,
            in_channels=4,
            sample_size=8,
            patch_size=2,
            joint_attention_dim=24,
            caption_projection_dim=32,
            pooled_projection_dim=20,
            out_channels=4,
            pos_embed_max_size=8,
        ),
        {
            "hidden_states": _x(2, 4, 8, 8),
            "encoder_hidden_states": _x(2, 5, 24),
            "pooled_projections": _x(2, 20),
            "timestep": _TIME,
        },
        {ADAPTIVE: 2, BOTH: 6},
    ),
    "Flux": Case(
        lambda: diffusers.FluxTransformer2DModel(
            **_HEADS,
            in_channels=4,
            num_single_layers=2,
            joint_attention_dim=24,
            pooled_projection_dim=20,
            axes_dims_rope=(4, 4, 8),
        ),
        {
            "hidden_states": _x(2, 16, 4),
            "encoder_hidden_states": _x(2, 5, 24),
            "pooled_projections": _x(2, 20),
            "timestep": torch.tensor([0.3, 0.7]),
            "img_ids": _x(16, 3).round(),
            "txt_ids": torch.zeros(5, 3),
        },
        {ADAPTIVE: 5, GATED: 4, BOTH: 6},
    ),
    "Wan": Case(
        lambda: diffusers.WanTransformer3DModel(
            **_HEADS,
            patch_size=(1, 2, 2),
            in_channels=4,
            out_channels=4,
            text_dim=24,
            freq_dim=32,
            ffn_dim=64,
            rope_max_seq_len=32,
        ),
        {
            "hidden_states": _x(2, 4, 2, 8, 8),
            "encoder_hidden_states": _x(2, 5, 24),
            "timestep": _TIME,
        },
        {ADAPTIVE: 3, GATED: 2, BOTH: 2},
    ),
}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


def _run(model: torch.nn.Module, arguments: dict[str, Any], dtype: torch.dtype) -> list[Any]:
    """The result, and the gradients of all parameters."""
    given = {name: _cast(value, dtype) for name, value in arguments.items()}
    y = model(**given, return_dict=False)[0]
    y.square().mean().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_welded_and_exact(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    plain = case.make().eval()
    with torch.no_grad():  # zeros would hide the branches
        for p in plain.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    exact = _run(copy.deepcopy(plain).double(), case.arguments, torch.float64)
    eager = _run(copy.deepcopy(plain), case.arguments, torch.float32)
    report = torchweld.explain_fusion(plain, **case.arguments, return_dict=False)
    fused = _run(torchweld.fuse(plain), case.arguments, torch.float32)
    for found, off, true in zip(fused, eager, exact, strict=True):
        assert (found is None) == (true is None)
        if true is not None:
            scale = true.abs().max()
            bound = 2 * (off - true).abs().max() + 2**-20 * scale
            assert (found - true).abs().max() <= bound
    counted = Counter(row.becomes for row in report)
    assert {op: counted[op] for op in (ADAPTIVE, GATED, BOTH) if counted[op]} == case.welds
