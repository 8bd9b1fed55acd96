"""Modules that fuse() welds, and forwards that look like theirs and are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

WIDTH = 32
FACTOR = 1.0
TABLE: dict[str, Any] = {"factor": 1.0, "norms": [1.0, 1.0]}


def activate(x: torch.Tensor) -> torch.Tensor:
    return functional.silu(x)


def turn(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def rotate(q: Any, k: Any, cos: Any, sin: Any) -> Any:
    return q * cos + turn(q) * sin, k * cos + turn(k) * sin


class Norm(nn.Module):
    """Llama's norm, in parts that mutants replace."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.3 * torch.arange(WIDTH) / WIDTH)
        self.eps, self.calls, self.number = 1e-6, 0, 3
        self.options = {"factor": 1.0}
        self.register_buffer("gain", torch.ones(()))

    def root(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * self.root(wide)).to(x.dtype)


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 48, bias=False)
        self.up = nn.Linear(WIDTH, 48, bias=False)
        self.down = nn.Linear(48, WIDTH, bias=False)
        self.act, self.limit, self.factor = nn.SiLU(), 7.0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class MLPOfFunctions(MLP):
    """One whose activation is a function of this file."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(activate(self.gate(x)) * self.up(x))


class Rotation(nn.Module):
    """Queries and keys that are rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.factor = 1.0
        angles = torch.outer(torch.arange(24.0), 0.3 ** torch.arange(4))
        self.angles = nn.Buffer(torch.cat((angles, angles), -1))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], 4, 8).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = self.angles[: x.shape[1]][None, None]
        q, k = rotate(self.split(self.q(x)), self.split(self.k(x)), angles.cos(), angles.sin())
        return torch.softmax(q @ k.transpose(-1, -2), -1)


class Block(nn.Module):
    """A residual and its norm, and an activation after a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.p = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = x + self.fc(x)
        return z + self.out(functional.gelu(self.fc(self.norm(z))))


class Scores(nn.Module):
    """A masked softmax."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(x.shape[1], x.shape[1]).masked_fill_(_upper(x), -1e4)
        return torch.softmax(x @ x.transpose(-1, -2) * 0.25 + mask, -1)


class Head(nn.Module):
    """A last layer and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.cap = nn.Linear(WIDTH, 50, bias=False), 30.0

    def target(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.arange(x[..., 0].numel()) * 7 % 50).view(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(x).view(-1, 50), self.target(x))


def _upper(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)


def make_odd(base: type[nn.Module], **methods: Any) -> Callable[[], nn.Module]:
    """A class like another one, with other methods."""
    return type(f"Odd{base.__name__}", (base,), methods)


def with_forward(base: type[nn.Module], forward: Callable[..., Any]) -> Callable[[], nn.Module]:
    return make_odd(base, forward=forward)


def _root(root: Callable[..., Any]) -> Callable[[], nn.Module]:
    return make_odd(Norm, root=root)


# --- Forwards that are not the op -----------------------------------------------------------------

_EPS = 1e-6
ROOTS: dict[str, Callable[..., Any]] = {
    "another power": lambda s, x: torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + _EPS),
    "absolute values": lambda s, x: torch.rsqrt(x.abs().mean(-1, keepdim=True) + _EPS),
    "a sum": lambda s, x: torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _EPS),
    "another dimension": lambda s, x: torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + _EPS),
    "all dimensions": lambda s, x: torch.rsqrt(x.pow(2).mean() + _EPS),
    "the largest": lambda s, x: torch.rsqrt(x.pow(2).amax(-1, keepdim=True) + _EPS),
    "a factor in the root": lambda s, x: torch.rsqrt(2 * x.pow(2).mean(-1, keepdim=True) + _EPS),
    "a clamp in the root": lambda s, x: torch.rsqrt(
        x.pow(2).mean(-1, keepdim=True).clamp(min=0.5) + _EPS
    ),
    "no epsilon": lambda s, x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
    "epsilon inside": lambda s, x: torch.rsqrt((x + 0.1).pow(2).mean(-1, keepdim=True) + _EPS),
    "epsilon of a tensor": lambda s, x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + s.gain),
    "a detached root": lambda s, x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPS).detach(),
    "a centred root": lambda s, x: torch.rsqrt(
        (x - x.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True) + _EPS
    ),
    "other rows": lambda s, x: torch.rsqrt(x.flip(1).pow(2).mean(-1, keepdim=True) + _EPS),
    "half of the width": lambda s, x: torch.rsqrt(x[..., :16].pow(2).mean(-1, keepdim=True) + _EPS),
    "noise in the root": lambda s, x: torch.rsqrt(
        x.pow(2).mean(-1, keepdim=True) + _EPS + torch.rand_like(x[..., :1])
    ),
    "a root without gradients": lambda s, x: _no_grad(
        lambda: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPS)
    ),
}


def _no_grad(function: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return function()


def apply_norm(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.weight * (x * s.root(x))


def _drop_by_hand(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.rand_like(x) > 0.3) / 0.7


def _write(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    return x


def _twice(s: Any, x: torch.Tensor) -> torch.Tensor:
    inner = x * s.root(x)
    return s.weight * inner + inner.tanh()


def _read_root(s: Any, x: torch.Tensor) -> torch.Tensor:
    root = s.root(x)
    return s.weight * (x * root) + root


def _count(s: Any, x: torch.Tensor) -> torch.Tensor:
    s.calls += 1
    return apply_norm(s, x) * s.calls


def _write_between(s: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.detach() * 1.0
    root = s.root(x)
    x.mul_(2)
    return s.weight * (x * root)


def _write_later(s: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 1.0
    y = s.weight * (x.double() * s.root(x.double())).float()
    x.mul_(2)
    return x + y


def _write_to_view(s: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.detach() * 1.0
    root = s.root(x)
    x[0].fill_(1.0)
    return s.weight * (x * root)


def _hooked(s: Any, x: torch.Tensor) -> torch.Tensor:
    inner = x * s.root(x)
    if inner.requires_grad:
        inner.register_hook(lambda g: g * 3)
    return s.weight * inner


NORMS: dict[str, Callable[..., Any]] = {
    "noise": lambda s, x: apply_norm(s, x + 0.1 * torch.randn_like(x)),
    "noise in training": lambda s, x: apply_norm(
        s, x + (0.1 * torch.randn_like(x) if s.training else 0.0)
    ),
    "a branch on gradients": lambda s, x: apply_norm(s, x) * (2 if torch.is_grad_enabled() else 1),
    "a branch on inference": lambda s, x: (
        apply_norm(s, x) * (2 if torch.is_inference_mode_enabled() else 1)
    ),
    "a branch on the dtype": lambda s, x: apply_norm(s, x) * (1 if x.dtype.itemsize == 4 else 2),
    "a branch on autocast": lambda s, x: (
        apply_norm(s, x) * (2 if torch.is_autocast_enabled("cpu") else 1)
    ),
    "a branch on rows": lambda s, x: apply_norm(s, x) * (2 if x.shape[0] > 2 else 1),
    "a branch on the length": lambda s, x: apply_norm(s, x) * (2 if x.shape[1] > 20 else 1),
    "a branch on values": lambda s, x: apply_norm(s, x) * (2 if x.abs().max() > 50 else 1),
    "a branch on strides": lambda s, x: apply_norm(s, x) * (1 if x.is_contiguous() else 2),
    "a branch on the module": lambda s, x: apply_norm(s, x) * (2 if s.training else 1),
    "the layer's number": lambda s, x: apply_norm(s, x) / (s.number + 1),
    "a class's attribute": lambda s, x: apply_norm(s, x) * s.scale * 0.5,
    "a table": lambda s, x: apply_norm(s, x) * TABLE["norms"][x.shape[0] > 2],
    "an offset": lambda s, x: apply_norm(s, x) + 0.25,
    "a clamp": lambda s, x: apply_norm(s, x).clamp(-0.5, 0.5),
    "a weight of another sign": lambda s, x: -s.weight * (x * s.root(x)),
    "a weight plus two": lambda s, x: (2.0 + s.weight) * (x * s.root(x)),
    "a squared weight": lambda s, x: s.weight * s.weight * (x * s.root(x)),
    "another input": lambda s, x: s.weight * ((x + 1) * s.root(x)),
    "an inner value read twice": _twice,
    "the root read twice": _read_root,
    "a counter": _count,
    "a write between": _write_between,
    "a write later": _write_later,
    "a write to a view": _write_to_view,
    "a hook inside": _hooked,
    "rounding inside": lambda s, x: s.weight * (x * s.root(x)).bfloat16().float(),
    "detached": lambda s, x: s.weight * (x.detach() * s.root(x)),
    "transposed": lambda s, x: apply_norm(s, x.transpose(0, 1)).transpose(0, 1),
    "an expanded input": lambda s, x: apply_norm(s, x[:1].expand(3, -1, -1)),
}
MLPS: dict[str, Callable[..., Any]] = {
    "a factor": lambda s, x: s.down(0.5 * s.act(s.gate(x)) * s.up(x)),
    "a factor of the gate": lambda s, x: s.down(s.act(1.5 * s.gate(x)) * s.up(x)),
    "a clamp of the gate": lambda s, x: s.down(s.act(s.gate(x).clamp(max=0.1)) * s.up(x)),
    "a clamp of both": lambda s, x: s.down(
        s.act(s.gate(x).clamp(max=0.1)) * s.up(x).clamp(-0.1, 0.1)
    ),
    "up plus one": lambda s, x: s.down(s.act(s.gate(x)) * (s.up(x) + 1)),
    "a sum": lambda s, x: s.down(s.act(s.gate(x)) + s.up(x)),
    "the gate read twice": lambda s, x: s.down((gate := s.act(s.gate(x))) * s.up(x) + gate),
    "dropout by hand": lambda s, x: s.down(_drop_by_hand(s.act(s.gate(x))) * s.up(x)),
    "noise on the gate": lambda s, x: s.down(
        s.act(s.gate(x) + torch.randn_like(s.gate(x))) * s.up(x)
    ),
    "another activation": lambda s, x: s.down(functional.hardswish(s.gate(x)) * s.up(x)),
    "a broadcast gate": lambda s, x: s.down(s.act(s.gate(x))[:, :1] * s.up(x)),
    "a detached gate": lambda s, x: s.down(s.act(s.gate(x)).detach() * s.up(x)),
    "in place": lambda s, x: s.down(functional.silu(s.gate(x), inplace=True) * s.up(x)),
    "a write to up": lambda s, x: s.down(_write(s.up(x), torch.ones(())) * s.act(s.gate(x))),
}
ROTATIONS: dict[str, Callable[..., Any]] = {
    "a sign": lambda q, k, c, s: (q * c - turn(q) * s, k * c + turn(k) * s),
    "other halves": lambda q, k, c, s: (q * c + q.roll(4, -1) * s, k * c + turn(k) * s),
    "a factor of keys": lambda q, k, c, s: (q * c + turn(q) * s, (k * c + turn(k) * s) * 3),
    "a factor of queries": lambda q, k, c, s: (q * c * 2 + turn(q) * s, k * c + turn(k) * s),
    "other angles": lambda q, k, c, s: (q * c + turn(q) * s, k * s + turn(k) * c),
    "queries only": lambda q, k, c, s: (q * c + turn(q) * s, k),
    "keys of queries": lambda q, k, c, s: (
        (a := q * c + turn(q) * s),
        k * c + turn(k) * s + 0.1 * a,
    ),
    "noise on keys": lambda q, k, c, s: (
        q * c + turn(q) * s,
        k * c + turn(k + torch.randn_like(k)) * s,
    ),
}


def _rotate_by(function: Callable[..., Any]) -> Callable[[], nn.Module]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        angles = self.angles[: x.shape[1]][None, None]
        q, k = self.split(self.q(x)), self.split(self.k(x))
        q, k = function(q, k, angles.cos(), angles.sin())
        return torch.softmax(q @ k.transpose(-1, -2), -1)

    return with_forward(Rotation, forward)


BLOCKS: dict[str, Callable[..., Any]] = {
    "a scaled residual": lambda s, x: s.norm(0.5 * x + s.fc(x)),
    "a residual of another shape": lambda s, x: s.norm(x[:, :1] + s.fc(x)),
    "alpha of the sum": lambda s, x: s.norm(torch.add(x, s.fc(x), alpha=2)),
    "two residuals": lambda s, x: s.norm(x + s.fc(x) + x.flip(1)),
    "dropout in evaluation": lambda s, x: x + functional.dropout(s.fc(x), 0.0, True),
    "dropout by hand": lambda s, x: x + _drop_by_hand(s.fc(x)),
    "an activation read twice": lambda s, x: (y := functional.gelu(s.fc(x))) + s.out(y),
    "a pre-activation read twice": lambda s, x: (y := s.fc(x)) + functional.gelu(y),
    "a linear layer that is scaled": lambda s, x: functional.gelu(2 * s.fc(x)),
    "a norm by hand": lambda s, x: s.norm(x - x.mean(-1, keepdim=True)),
    "a write to the sum": lambda s, x: _write(x + s.fc(x), s.norm(x + s.fc(x))),
}
SCORES: dict[str, Callable[..., Any]] = {
    "a masked softmax of another dimension": lambda s, x: torch.softmax(
        x @ x.transpose(-1, -2) * 0.25, 1
    ),
    "a mask that is scaled": lambda s, x: torch.softmax(
        (x @ x.transpose(-1, -2) + _upper(x) * -1e4) * 0.25, -1
    ),
    "a cap": lambda s, x: torch.softmax(
        torch.tanh(x @ x.transpose(-1, -2) * 0.25) * 5 + _upper(x) * -1e4, -1
    ),
    "a sink": lambda s, x: torch.softmax(
        functional.pad(x @ x.transpose(-1, -2) * 0.25, (0, 1)), -1
    )[..., :-1],
    "dropout by hand": lambda s, x: _drop_by_hand(
        torch.softmax(x @ x.transpose(-1, -2) * 0.25, -1)
    ),
}
HEADS: dict[str, Callable[..., Any]] = {
    "label smoothing": lambda s, x: functional.cross_entropy(
        s.head(x).view(-1, 50), s.target(x), label_smoothing=0.1
    ),
    "weights of classes": lambda s, x: functional.cross_entropy(
        s.head(x).view(-1, 50), s.target(x), torch.arange(50.0)
    ),
    "an offset of logits": lambda s, x: functional.cross_entropy(
        (s.head(x) + torch.arange(50.0) * 0.1).view(-1, 50), s.target(x)
    ),
    "a cap of another form": lambda s, x: functional.cross_entropy(
        (s.cap * torch.sin(s.head(x) / s.cap)).view(-1, 50), s.target(x)
    ),
    "a cap": lambda s, x: functional.cross_entropy(
        (0.5 * torch.tanh(s.head(x) / 0.5)).view(-1, 50), s.target(x)
    ),
    "a z-loss": lambda s, x: (
        functional.cross_entropy((z := s.head(x)).view(-1, 50), s.target(x))
        + z.logsumexp(-1).mean()
    ),
    "a temperature": lambda s, x: functional.cross_entropy(
        s.head(x).view(-1, 50) / x.abs().mean().detach(), s.target(x)
    ),
    "a part of the classes": lambda s, x: functional.cross_entropy(
        s.head(x).view(-1, 50)[:, :40], s.target(x) % 40
    ),
    "ignored classes": lambda s, x: functional.cross_entropy(
        s.head(x).view(-1, 50), s.target(x), ignore_index=7
    ),
    "a sum": lambda s, x: functional.cross_entropy(
        s.head(x).view(-1, 50), s.target(x), reduction="sum"
    ),
    "no reduction": lambda s, x: functional.cross_entropy(
        s.head(x).view(-1, 50), s.target(x), reduction="none"
    ),
    "a shared loss": lambda s, x: functional.cross_entropy(
        s.head(x * x.mean()).view(-1, 50), s.target(x)
    ),
}

FORWARDS: dict[str, Callable[[], nn.Module]] = {
    **{f"norm, {name}": _root(root) for name, root in ROOTS.items()},
    **{f"norm, {name}": with_forward(Norm, forward) for name, forward in NORMS.items()},
    **{f"mlp, {name}": with_forward(MLP, forward) for name, forward in MLPS.items()},
    **{f"rotation, {name}": _rotate_by(function) for name, function in ROTATIONS.items()},
    **{f"block, {name}": with_forward(Block, forward) for name, forward in BLOCKS.items()},
    **{f"scores, {name}": with_forward(Scores, forward) for name, forward in SCORES.items()},
    **{f"head, {name}": with_forward(Head, forward) for name, forward in HEADS.items()},
}
