"""Ten models as people write them by hand, with functions and with modules of their own.

Each takes a batch of `make_batch` and returns its loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

D, HEADS, WORDS, LENGTH = 32, 4, 40, 10


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def _merge(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)


class Norm(nn.Module):
    """A norm whose bias may be left out."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))
        self.bias = nn.Parameter(torch.zeros(D)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class RMSNorm(nn.Module):
    """In float32, cast before the weight."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(D))

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype is torch.float64 else x.float()
        return self._norm(wide).type_as(x) * self.weight


class CausalAttention(nn.Module):
    """Queries, keys and values of one layer; torch's attention, or a mask that is a buffer."""

    def __init__(self, by_torch: bool) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.by_torch = by_torch
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH))[None, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = self.qkv(x).split(D, dim=2)
        q, k, v = (z.view(b, t, HEADS, c // HEADS).transpose(1, 2) for z in (q, k, v))
        if self.by_torch:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.mask[:, :, :t, :t] == 0, float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        return self.proj(y.transpose(1, 2).contiguous().view(b, t, c))


class TanhGELU(nn.Module):
    """GELU by tanh, in eight passes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class SmallGPT(nn.Module):
    """A decoder with learnt positions and tied words."""

    def __init__(self, by_torch: bool) -> None:
        super().__init__()
        act = nn.GELU() if by_torch else TanhGELU()
        self.wte, self.wpe = nn.Embedding(WORDS, D), nn.Embedding(LENGTH, D)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_1": Norm(bias=not by_torch),
                    "attn": CausalAttention(by_torch),
                    "ln_2": Norm(bias=not by_torch),
                    "mlp": nn.Sequential(nn.Linear(D, 4 * D), act, nn.Linear(4 * D, D)),
                }
            )
            for _ in range(2)
        )
        self.ln_f, self.head = Norm(bias=True), nn.Linear(D, WORDS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = x + block["attn"](block["ln_1"](x))
            x = x + block["mlp"](block["ln_2"](x))
        logits = self.head(self.ln_f(x))[:, :-1]
        return F.cross_entropy(logits.reshape(-1, WORDS), ids[:, 1:].reshape(-1), ignore_index=-1)


class Complex(nn.Module):
    """A decoder with rotations by complex numbers, grouped keys and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, D)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    **{name: nn.Linear(D, D, bias=False) for name in ("wq", "wo")},
                    **{name: nn.Linear(D, D // 2, bias=False) for name in ("wk", "wv")},
                    **{name: nn.Linear(D, 2 * D, bias=False) for name in ("w1", "w3")},
                    "w2": nn.Linear(2 * D, D, bias=False),
                    "attention_norm": RMSNorm(),
                    "ffn_norm": RMSNorm(),
                }
            )
            for _ in range(2)
        )
        self.norm, self.output = RMSNorm(), nn.Linear(D, WORDS, bias=False)

    def _rotate(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        wide = x if x.dtype is torch.float64 else x.float()
        pairs = torch.view_as_complex(wide.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(x)

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        h, n = self.embed(ids), D // HEADS
        angles = torch.outer(torch.arange(ids.shape[1]), 100.0 ** -(torch.arange(0, n, 2) / n))
        turns = torch.polar(torch.ones_like(angles), angles).to(
            torch.complex128 if h.dtype is torch.float64 else torch.complex64
        )
        mask = torch.full((ids.shape[1],) * 2, float("-inf")).triu(1).type_as(h)
        for layer in self.layers:
            x = layer["attention_norm"](h)
            q, k, v = (layer[name](x).view(*x.shape[:2], -1, n) for name in ("wq", "wk", "wv"))
            q, k = self._rotate(q, turns), self._rotate(k, turns)
            k, v = (z.repeat_interleave(2, dim=2) for z in (k, v))
            q, k, v = (z.transpose(1, 2) for z in (q, k, v))
            scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(n) + mask
            y = torch.matmul(F.softmax(scores, dim=-1), v)
            h = h + layer["wo"](_merge(y))
            x = layer["ffn_norm"](h)
            h = h + layer["w2"](F.silu(layer["w1"](x)) * layer["w3"](x))
        logits = self.output(self.norm(h))
        return F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())


class Functions(nn.Module):
    """Norms without weights, rotations by halves, relu squared and capped logits, as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, D)
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D, bias=False) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(D, 4 * D, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * D, D, bias=False) for _ in range(2))
        self.head = nn.Linear(D, WORDS, bias=False)

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        def norm(x: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(x, (x.size(-1),))

        n = D // HEADS // 2
        angles = torch.outer(torch.arange(ids.shape[1]), 100.0 ** -(torch.arange(n) / n))
        x = norm(self.embed(ids))
        cos, sin = angles.cos()[None, :, None].to(x.dtype), angles.sin()[None, :, None].to(x.dtype)

        def rotate(x: torch.Tensor) -> torch.Tensor:
            a, b = x[..., :n], x[..., n:]
            return torch.cat([a * cos + b * sin, a * (-sin) + b * cos], 3)

        for qkv, out, up, down in zip(self.qkv, self.out, self.up, self.down, strict=True):
            q, k, v = qkv(norm(x)).view(*x.shape[:2], 3, HEADS, -1).unbind(2)
            q, k = norm(rotate(q)), norm(rotate(k))
            q, k, v = (z.transpose(1, 2) for z in (q, k, v))
            x = x + out(_merge(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
            x = x + down(F.relu(up(norm(x))).square())
        logits = 15 * torch.tanh(self.head(norm(x)) / 15)
        return F.cross_entropy(logits.view(-1, WORDS), ids.roll(-1, 1).view(-1))


class Masked(nn.Module):
    """An encoder with norms after its sums, segments, and a loss of some words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, D), nn.Embedding(LENGTH, D)
        self.norm, self.attention = (
            nn.LayerNorm(D),
            nn.ModuleList(CausalAttention(False) for _ in "ab"),
        )
        self.inner = nn.ModuleList(nn.Linear(D, 2 * D) for _ in "ab")
        self.outer = nn.ModuleList(nn.Linear(2 * D, D) for _ in "ab")
        self.norms = nn.ModuleList(nn.LayerNorm(D, eps=1e-12) for _ in "abcd")
        self.transform, self.bias = nn.Linear(D, D), nn.Parameter(torch.zeros(WORDS))

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(ids) + self.places.weight[: ids.shape[1]])
        for at in range(2):
            x = self.norms[2 * at](self.attention[at](x) + x)
            x = self.norms[2 * at + 1](self.outer[at](F.gelu(self.inner[at](x))) + x)
        x = F.layer_norm(F.gelu(self.transform(x)), (D,))
        logits = F.linear(x, self.words.weight, self.bias)
        labels = ids.masked_fill(ids % 3 != 0, -100)
        return nn.CrossEntropyLoss()(logits.view(-1, WORDS), labels.view(-1))


class Patches(nn.Module):
    """A vision transformer with a class token and scales of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, D, 4, 4), nn.Parameter(torch.zeros(1, 1, D))
        self.places = nn.Parameter(torch.randn(1, 5, D) / 8)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 3 * D, bias=False)),
                    nn.Linear(D, D),
                    nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D)),
                ]
            )
            for _ in range(2)
        )
        self.scales = nn.Parameter(torch.full((2, D), 0.5))
        self.head = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 7))

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1) + self.places
        layers: Any = zip(self.layers, self.scales, strict=True)
        for (qkv, out, mlp), scale in layers:
            q, k, v = map(_heads, qkv(x).chunk(3, dim=-1))
            dots = torch.matmul(q, k.transpose(-1, -2)) * (D // HEADS) ** -0.5
            x = out(_merge(torch.matmul(dots.softmax(dim=-1), v))) * scale + x
            x = mlp(x) * scale + x
        return F.cross_entropy(self.head(x[:, 0]), ids[:, 0] % 7)


class Biased(nn.Module):
    """An encoder with a learnt bias of distances, norms without means and gelu's gates."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bias = nn.Embedding(WORDS, D), nn.Embedding(2 * LENGTH, HEADS)
        self.norms = nn.ModuleList(RMSNorm(1e-6) for _ in range(3))
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.gate, self.up = nn.Linear(D, 48, bias=False), nn.Linear(D, 48, bias=False)
        self.down = nn.Linear(48, D, bias=False)

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        x, t = self.words(ids), ids.shape[1]
        distance = torch.arange(t)[None] - torch.arange(t)[:, None] + LENGTH
        bias = self.bias(distance).permute(2, 0, 1)[None]
        q, k, v = map(_heads, self.qkv(self.norms[0](x)).chunk(3, -1))
        scores = torch.matmul(q, k.mT) + bias
        x = x + self.out(_merge(torch.softmax(scores, -1).type_as(scores) @ v))
        y = self.norms[1](x)
        x = x + self.down(F.gelu(self.gate(y), approximate="tanh") * self.up(y))
        logits = F.linear(self.norms[2](x) * D**-0.5, self.words.weight)
        return F.cross_entropy(logits.transpose(1, 2), ids.roll(1, 1))


class Mixer(nn.Module):
    """Layers that mix tokens, then channels, and one convolution with its norm of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.depth = nn.Conv2d(3, D, 2, 2), nn.Conv2d(D, D, 3, padding=1, groups=D)
        self.norm = nn.LayerNorm(D, eps=1e-6)
        self.pw1, self.pw2 = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        self.gamma = nn.Parameter(1e-1 * torch.ones(D))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in "abc")
        self.tokens = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
        self.channels = nn.Sequential(nn.Linear(D, 48), nn.GELU(), nn.Linear(48, D))
        self.head = nn.Linear(D, 7)

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        y = self.gamma * self.pw2(F.gelu(self.pw1(y)))
        x = (x + y.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norms[1](x))
        return F.cross_entropy(self.head(self.norms[2](x).mean(1)), ids[:, 0] % 7)


class Diffusion(nn.Module):
    """A diffusion transformer: scales, shifts and gates are made from a time."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.time = nn.Linear(48, D), nn.Sequential(nn.Linear(16, D), nn.SiLU())
        self.norms = nn.ModuleList(
            nn.LayerNorm(D, elementwise_affine=False, eps=1e-6) for _ in "abc"
        )
        self.modulation, self.final = nn.Linear(D, 6 * D), nn.Linear(D, 2 * D)
        self.attention = nn.MultiheadAttention(D, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(D, 64), nn.GELU(approximate="tanh"), nn.Linear(64, D))
        self.out = nn.Linear(D, 48)

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        patches = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3)
        patches = patches.flatten(1, 2)
        steps = 50.0 ** -(torch.arange(8) / 8).to(images.dtype)
        angles = ids[:, :1] * steps
        c = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        x = self.patches(patches)
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(c).chunk(6, dim=1)
        y = self.norms[0](x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
        x = x + gate.unsqueeze(1) * self.attention(y, y, y, need_weights=False)[0]
        y = self.norms[1](x) * (1 + scale2.unsqueeze(1)) + shift2.unsqueeze(1)
        x = x + gate2.unsqueeze(1) * self.mlp(y)
        shift, scale = self.final(c).chunk(2, dim=1)
        x = self.norms[2](x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
        return F.mse_loss(self.out(x), patches)


class Loop(nn.Module):
    """A mixture of experts, each a module, that are called in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.router = nn.Embedding(WORDS, D), nn.Linear(D, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(D, D, bias=False) for n in ("w1", "w2", "w3")})
            for _ in range(4)
        )
        self.norm, self.head = RMSNorm(), nn.Linear(D, WORDS, bias=False)

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        x = self.words(ids).view(-1, D)
        weights, chosen = torch.topk(self.router(x), 2)
        weights = F.softmax(weights, dim=1)
        results = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            rows, nth = torch.where(chosen == at)
            y = expert["w2"](F.silu(expert["w1"](x[rows])) * expert["w3"](x[rows]))
            results[rows] += weights[rows, nth, None] * y
        logits = self.head(self.norm(x + results))
        return F.cross_entropy(logits, ids.roll(-1, 1).flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a GPT by torch's attention": lambda: SmallGPT(True),
    "a GPT with a mask": lambda: SmallGPT(False),
    "complex rotations": Complex,
    "functions": Functions,
    "masked words": Masked,
    "a vision transformer": Patches,
    "a bias of distances": Biased,
    "a mixer": Mixer,
    "a diffusion transformer": Diffusion,
    "a loop over experts": Loop,
}


def make_batch(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Tokens and images."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, WORDS, (3, LENGTH), generator=generator)
    return {"ids": ids, "images": torch.randn(3, 3, 8, 8, generator=generator).to(dtype)}
