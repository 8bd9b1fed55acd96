"""Modules that fuse() welds, for its tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchweld

WIDTH = 64


@pytest.fixture(autouse=True)
def small_inputs() -> Iterator[None]:
    """The kernels serve small inputs too."""
    with torchweld.use_backend("cpu", "eager"):
        yield


def rms(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def run(model: Callable[..., Any], *leaves: Any, **named: Any) -> list[torch.Tensor]:
    """Results and gradients of a call; every call drops the same elements."""
    torch.manual_seed(1)
    results = model(*leaves, **named)
    results = results if isinstance(results, tuple) else (results,)
    results = [y for y in results if y is not None]
    heads = torch.Generator().manual_seed(3)
    total = sum((y * torch.randn(y.shape, generator=heads).to(y.dtype)).sum() for y in results)
    wanted = {id(x): x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad}
    wanted |= {id(p): p for p in getattr(model, "parameters", list)()}
    grads = total.requires_grad and torch.autograd.grad(
        total, list(wanted.values()), allow_unused=True
    )
    return [*(y.detach() for y in results), *(g for g in grads or () if g is not None)]


def check_fused(
    model: nn.Module, *calls: Callable[[], list[torch.Tensor]], rtol: float, atol: float
) -> list[str]:
    """Hold that fuse() changes no result of these calls; the rows of welds, in words."""
    before = [call() for call in calls]
    torchweld.fuse(model)
    for call, expected in zip(calls, before, strict=True):
        torch.testing.assert_close(call(), expected, rtol=rtol, atol=atol)
    return [row.becomes for row in torchweld.explain_fusion(model) if row.welded]


class PlainRMSNorm(nn.Module):
    """Llama's RMSNorm, or Gemma's with `offset`."""

    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.variance_epsilon, self.offset = 1e-6, offset

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        if self.offset:
            return (wide * (self.offset + self.weight.to(wide.dtype))).type_as(hidden_states)
        return self.weight * wide.to(hidden_states.dtype)


class CallsByName(nn.Module):
    """A norm whose input comes as a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = PlainRMSNorm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden_states=x)  # type: ignore[no-any-return]


class FreeNorm(nn.Module):
    """NanoChat's norm, which has no weight, or a LayerNorm of that kind."""

    def __init__(self, centered: bool = False) -> None:
        super().__init__()
        self.eps, self.centered = 1e-6, centered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.centered:
            wide = wide - wide.mean(-1, keepdim=True)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x)


class ParallelGated(nn.Module):
    """Attention and a gated MLP side by side, with functions, as in large vision transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner_norm = FreeNorm(), FreeNorm(centered=True)
        self.qkv, self.gate_up = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.act, self.out = nn.SiLU(), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = self.qkv(h).chunk(3, -1)
        gate, up = self.gate_up(h).chunk(2, -1)
        hidden = self.inner_norm(up * nn.functional.gelu(gate, approximate="tanh"))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(torch.cat((self.act(q) * y, hidden), -1))


class Gated(nn.Module):
    """A gated MLP with unusual names, and with dropout as in T5."""

    def __init__(self, activation: nn.Module, p: float | None = None, bias: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 128, bias=bias)
        self.gate = nn.Linear(WIDTH, 128, bias=bias)
        self.down = nn.Linear(128, WIDTH, bias=bias)
        self.activation = activation
        if p is not None:
            self.dropout = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.activation(self.gate(x)) * self.up(x)
        return self.down(self.dropout(hidden) if hasattr(self, "dropout") else hidden)


class Packed(nn.Module):
    """Gate and up in one layer, as in Phi3."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 256, bias=False), nn.Linear(128, WIDTH)
        self.act = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(up * self.act(gate))


class NewGELU(nn.Module):
    """gelu with tanh in eight passes, as in transformers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        inner = 0.7978845608028654 * (input + 0.044715 * torch.pow(input, 3.0))
        return 0.5 * input * (1.0 + torch.tanh(inner))


class FeedForward(nn.Module):
    """The activation is between two layers, next to a dropout."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH)
        self.act, self.drop = activation, nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class Attention(nn.Module):
    """Attention with softmax and dropout as modules."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.softmax, self.drop = nn.Softmax(dim=-1), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(self.drop(self.softmax(q @ k.mT / 8)) @ v)


class Output(nn.Module):
    """The end of BERT's block: linear, dropout, addition, norm."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.dense, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(p)
        self.LayerNorm = nn.LayerNorm(WIDTH)

    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)


class Parallel(nn.Module):
    """Two layers with activations, a softmax and a dropout in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act1 = nn.Linear(WIDTH, 96), nn.GELU()
        self.fc2, self.act2 = nn.Linear(96, WIDTH), nn.SiLU()
        self.softmax, self.drop = nn.Softmax(-1), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc1(x)
        hidden = self.act1(hidden)
        out = self.fc2(hidden)
        out = x + self.act2(out)
        weights = self.drop(self.softmax(out @ out.mT))
        return weights @ out

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """The first layer only."""
        return self.fc1(x)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """As in transformers."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """As in transformers."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class HeadNorm(PlainRMSNorm):
    """A norm of one head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16))


class RotaryAttention(nn.Module):
    """Qwen3's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 16
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = HeadNorm(), HeadNorm()

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any = None
    ) -> tuple[torch.Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        y = (q @ k.mT / 4).softmax(-1) @ v
        return self.o_proj(y.transpose(1, 2).flatten(2)), None


class Rotated(nn.Module):
    """An attention with its angles."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = RotaryAttention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[-2], dtype=x.dtype)[None, :, None]
        angles = places / 100 ** torch.linspace(0, 1, 8, dtype=x.dtype).repeat(2)
        return self.attention(x, position_embeddings=(angles.cos(), angles.sin()))[0]


class Normalized(nn.Module):
    """A batch norm between a linear layer and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.act = nn.Linear(WIDTH, 96), nn.BatchNorm1d(96), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.bn(self.fc(x.flatten(0, -2))))


class Repeated(nn.Module):
    """Calls a module with the same tensor for all its inputs."""

    def __init__(self, module: nn.Module, times: int, **named: Any) -> None:
        super().__init__()
        self.module, self.times, self.named = module, times, named

    def forward(self, x: torch.Tensor) -> Any:
        found = self.module(*[x] * self.times, **self.named)
        return found[0] + found[1].sum() if isinstance(found, tuple) else found


LAYER: dict[str, Any] = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 128, "dropout": 0.0}
MODELS = {
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "layer_norm_bare": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "rms_norm": lambda: nn.RMSNorm(WIDTH, eps=1e-6),
    "rms_norm_default": lambda: nn.RMSNorm(WIDTH),
    "llama_norm": PlainRMSNorm,
    "norm_by_name": CallsByName,
    "gemma_norm": lambda: PlainRMSNorm(1.0),
    "sequential": lambda: nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)),
    "sequences": lambda: nn.Sequential(
        nn.Linear(WIDTH, 96),
        nn.GELU(),
        nn.Sequential(nn.Linear(96, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.GELU("tanh")),
        nn.Softmax(-1),
        nn.Dropout(0.0),
    ),
    "parallel": Parallel,
    "rotary": Rotated,
    "feed_forward": lambda: FeedForward(nn.GELU("tanh")),
    "feed_forward_relu": lambda: FeedForward(nn.ReLU(inplace=True)),
    "new_gelu": lambda: FeedForward(NewGELU()),
    "gated_silu": lambda: Gated(nn.SiLU()),
    "gated_gelu": lambda: Gated(NewGELU(), 0.1, bias=True),
    "packed": Packed,
    "parallel_gated": ParallelGated,
    "free_norm": FreeNorm,
    "free_layer_norm": lambda: FreeNorm(centered=True),
    "activation": NewGELU,
    "attention": Attention,
    "output": lambda: Repeated(Output(), 2),
    "batch_norm": Normalized,
    "batch_norm_sequential": lambda: nn.Sequential(
        nn.Flatten(0, 1), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()
    ),
    "multihead": lambda: Repeated(nn.MultiheadAttention(WIDTH, 4, batch_first=True), 3),
    "multihead_averaged": lambda: Repeated(
        nn.MultiheadAttention(WIDTH, 4, bias=False), 3, average_attn_weights=False
    ),
    "encoder": lambda: nn.TransformerEncoderLayer(**LAYER),
    "encoder_pre_norm": lambda: nn.TransformerEncoderLayer(
        **LAYER, norm_first=True, activation="gelu", batch_first=True
    ),
    "encoder_module": lambda: nn.TransformerEncoderLayer(**LAYER, activation=nn.GELU()),
    "encoder_bare": lambda: nn.TransformerEncoderLayer(**LAYER, bias=False),
    "decoder": lambda: Repeated(nn.TransformerDecoderLayer(**LAYER), 2),
    "decoder_pre_norm": lambda: Repeated(
        nn.TransformerDecoderLayer(**LAYER, norm_first=True, batch_first=True), 2
    ),
}
