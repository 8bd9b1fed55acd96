"""Forwards that look like an op, and changes after the first call: fuse(by="graph") sees them all.

Each mutant computes with fuse() what it computes without. Before `by="graph"`, trials of `fuse` on
copies took many of these for the op: a trial sees no branch that it does not take.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

import torchweld
from torchweld.fusion.graph.regions import Region

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


def _with(base: type[nn.Module], **methods: Any) -> Callable[[], nn.Module]:
    """A class like another one, with other methods."""
    return type(f"Odd{base.__name__}", (base,), methods)


def _forward(base: type[nn.Module], forward: Callable[..., Any]) -> Callable[[], nn.Module]:
    return _with(base, forward=forward)


def _root(root: Callable[..., Any]) -> Callable[[], nn.Module]:
    return _with(Norm, root=root)


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


def _apply_norm(s: Any, x: torch.Tensor) -> torch.Tensor:
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
    return _apply_norm(s, x) * s.calls


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
    "noise": lambda s, x: _apply_norm(s, x + 0.1 * torch.randn_like(x)),
    "noise in training": lambda s, x: _apply_norm(
        s, x + (0.1 * torch.randn_like(x) if s.training else 0.0)
    ),
    "a branch on gradients": lambda s, x: _apply_norm(s, x) * (2 if torch.is_grad_enabled() else 1),
    "a branch on inference": lambda s, x: (
        _apply_norm(s, x) * (2 if torch.is_inference_mode_enabled() else 1)
    ),
    "a branch on the dtype": lambda s, x: _apply_norm(s, x) * (1 if x.dtype.itemsize == 4 else 2),
    "a branch on autocast": lambda s, x: (
        _apply_norm(s, x) * (2 if torch.is_autocast_enabled("cpu") else 1)
    ),
    "a branch on rows": lambda s, x: _apply_norm(s, x) * (2 if x.shape[0] > 2 else 1),
    "a branch on the length": lambda s, x: _apply_norm(s, x) * (2 if x.shape[1] > 20 else 1),
    "a branch on values": lambda s, x: _apply_norm(s, x) * (2 if x.abs().max() > 50 else 1),
    "a branch on strides": lambda s, x: _apply_norm(s, x) * (1 if x.is_contiguous() else 2),
    "a branch on the module": lambda s, x: _apply_norm(s, x) * (2 if s.training else 1),
    "the layer's number": lambda s, x: _apply_norm(s, x) / (s.number + 1),
    "a class's attribute": lambda s, x: _apply_norm(s, x) * s.scale * 0.5,
    "a table": lambda s, x: _apply_norm(s, x) * TABLE["norms"][x.shape[0] > 2],
    "an offset": lambda s, x: _apply_norm(s, x) + 0.25,
    "a clamp": lambda s, x: _apply_norm(s, x).clamp(-0.5, 0.5),
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
    "transposed": lambda s, x: _apply_norm(s, x.transpose(0, 1)).transpose(0, 1),
    "an expanded input": lambda s, x: _apply_norm(s, x[:1].expand(3, -1, -1)),
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

    return _forward(Rotation, forward)


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
    **{f"norm, {name}": _forward(Norm, forward) for name, forward in NORMS.items()},
    **{f"mlp, {name}": _forward(MLP, forward) for name, forward in MLPS.items()},
    **{f"rotation, {name}": _rotate_by(function) for name, function in ROTATIONS.items()},
    **{f"block, {name}": _forward(Block, forward) for name, forward in BLOCKS.items()},
    **{f"scores, {name}": _forward(Scores, forward) for name, forward in SCORES.items()},
    **{f"head, {name}": _forward(Head, forward) for name, forward in HEADS.items()},
}


class Model(nn.Module):
    """A model of one part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


def _make(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return Model(make())


def _values(rows: int, length: int) -> torch.Tensor:
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(rows))


def _step(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The result of a call and its gradients."""
    torch.manual_seed(1)
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.float().square().sum().backward()
    leaves = (x, *model.parameters())
    return [y.detach().clone(), *(p.grad.clone() for p in leaves if p.grad is not None)]


def _infer(model: Any, x: torch.Tensor, mode: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with mode:
        return [model(x).clone()]


def _compare(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        if b.dtype == torch.bfloat16:
            assert (a - b).float().norm() <= 3e-2 * b.float().norm()
            continue
        bound = 2e-5 * max([1.0, *b.abs().flatten().tolist()])
        torch.testing.assert_close(a, b, rtol=2e-5, atol=bound, equal_nan=True)


@pytest.fixture(autouse=True)
def _forget() -> Any:
    """Graphs of one test serve no other one."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:fuse. Model has")
@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_that_is_not_the_op(name: str) -> None:
    want = _make(FORWARDS[name])
    got = torchweld.fuse(copy.deepcopy(want), by="graph")
    for rows, length in ((2, 8), (3, 24), (3, 11), (2, 8)):
        _compare(_step(got, _values(rows, length)), _step(want, _values(rows, length)))
    want.eval(), got.eval()
    x = _values(2, 8) * 60
    _compare(_infer(got, x, torch.no_grad()), _infer(want, x, torch.no_grad()))
    _compare(_infer(got, x, torch.inference_mode()), _infer(want, x, torch.inference_mode()))
    x = _values(2, 8)
    (a,), (b,) = (_infer(each, x, torch.autocast("cpu", torch.bfloat16)) for each in (got, want))
    bound = 0.05 * float(b.detach().abs().max())
    torch.testing.assert_close(a, b, rtol=0.1, atol=bound, equal_nan=True)


def test_the_forwards_that_mutants_are_made_of_are_welded() -> None:
    """Else the others would show nothing."""
    ops = {
        Norm: "rms_norm",
        MLP: "gated_act",
        MLPOfFunctions: "gated_act",
        Rotation: "rotary_embedding_qk",
        Block: "dropout_add_layer_norm",
        Scores: "softmax_dropout",
        Head: "linear_cross_entropy",
    }
    for kind, op in ops.items():
        model = torchweld.fuse(_make(kind), by="graph")
        _step(model, _values(2, 8))
        assert op in _list_ops(model), kind


def _list_ops(model: Any) -> set[str]:
    captures = [type(part).weld_captures for part in model.modules() if isinstance(part, Region)]
    slots = [slot for each in captures for slot in each.slots.values()]
    return {placed.op for slot in slots for placed in slot.placed if not placed.reason}


# --- Changes after the first call -----------------------------------------------------------------


@dataclasses.dataclass
class Change:
    """What happens to a model between two calls, and what undoes it outside of the model."""

    make: Callable[[], nn.Module]
    change: Callable[[Any, Any], None]  # of the part and of monkeypatch
    again: Callable[[torch.Tensor], torch.Tensor] = lambda x: x


def _set(name: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda part, patch: setattr(part, name, value)


def _set_inside(path: str, value: Any) -> Callable[[Any, Any], None]:
    def change(part: Any, patch: Any) -> None:
        *inner, name = path.split(".")
        setattr(part.get_submodule(".".join(inner)), name, value)

    return change


def _patch_class(name: str, value: Any, cls: Any = None) -> Callable[[Any, Any], None]:
    return lambda part, patch: patch.setattr(cls or type(part), name, value)


def _patch_global(name: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda part, patch: patch.setitem(globals(), name, value)


def _double(module: Any, inputs: Any, output: Any) -> Any:
    return output * 2


def _double_input(module: Any, inputs: Any) -> Any:
    return (inputs[0] * 2,)


def _double_all_norms(part: Any, patch: Any) -> None:
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, i, o: o * 2 if isinstance(module, Norm) else None
    )
    patch.setattr(part, "undo", handle, raising=False)
    GLOBAL_HOOKS.append(handle)


GLOBAL_HOOKS: list[Any] = []


@pytest.fixture
def _no_global_hooks() -> Any:
    yield
    while GLOBAL_HOOKS:
        GLOBAL_HOOKS.pop().remove()


def _scale_by(read: Callable[[Any], float]) -> Callable[[], nn.Module]:
    return _forward(Norm, lambda s, x: _apply_norm(s, x) * read(s))


class Plain(Norm):
    """A class that a part gets later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Low(nn.Module):
    """A linear layer with an adapter."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.a = base, nn.Linear(WIDTH, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.a(x)


def _adapt(part: Any, patch: Any) -> None:
    torch.manual_seed(5)
    part.up = Low(part.up)


def _helped(s: Any, x: torch.Tensor) -> torch.Tensor:
    return s.weight * (x * s.root(x))


CHANGES: dict[str, Change] = {
    "epsilon": Change(Norm, _set("eps", 1.0)),
    "weight": Change(Norm, lambda p, _: setattr(p, "weight", nn.Parameter(p.weight * 3))),
    "weight's data": Change(Norm, lambda p, _: setattr(p.weight, "data", p.weight.data * 3)),
    "weight in place": Change(Norm, lambda p, _: p.weight.data.mul_(3)),
    "weight of another shape": Change(
        Norm, lambda p, _: setattr(p, "weight", nn.Parameter(torch.full((1,), 2.0)))
    ),
    "frozen weight": Change(Norm, lambda p, _: p.weight.requires_grad_(False)),
    "buffer's number": Change(_scale_by(lambda s: s.gain), lambda p, _: p.gain.fill_(2)),
    "buffer": Change(_scale_by(lambda s: s.gain), _set("gain", torch.tensor(2.0))),
    "class's attribute": Change(_scale_by(lambda s: s.scale), _patch_class("scale", 2.0)),
    "attribute over the class's": Change(_scale_by(lambda s: s.scale), _set("scale", 2.0)),
    "number": Change(_scale_by(lambda s: s.number), _set("number", 7)),
    "dictionary": Change(
        _scale_by(lambda s: s.options["factor"]), lambda p, _: p.options.update(factor=2.0)
    ),
    "global": Change(_scale_by(lambda s: FACTOR), _patch_global("FACTOR", 2.0)),
    "global table": Change(
        _scale_by(lambda s: TABLE["factor"]),
        lambda p, patch: patch.setitem(TABLE, "factor", 2.0),
    ),
    "function of a module": Change(
        _scale_by(lambda s: math.sqrt(4)),
        lambda p, patch: patch.setattr(math, "sqrt", lambda x: 3.0),
    ),
    "evaluation": Change(_scale_by(lambda s: 2.0 if s.training else 1.0), lambda p, _: p.eval()),
    "class of the part": Change(Norm, _set("__class__", Plain)),
    "forward of the class": Change(
        _with(Norm), _patch_class("forward", lambda s, x: x * s.weight)
    ),
    "forward of the base": Change(
        _with(Norm), _patch_class("forward", lambda s, x: x * s.weight, Norm)
    ),
    "method of the class": Change(_with(Norm), _patch_class("root", lambda s, x: x * 0 + 1)),
    "method of the base": Change(_with(Norm), _patch_class("root", lambda s, x: x * 0 + 1, Norm)),
    "method of the instance": Change(Norm, _set("root", lambda x: x * 0 + 1)),
    "forward of the instance": Change(Norm, _set("forward", lambda x: x * 5)),
    "forward of torch's class": Change(
        MLP, _patch_class("forward", lambda s, x: functional.relu(x), nn.SiLU)
    ),
    "forward hook": Change(Norm, lambda p, _: p.register_forward_hook(_double)),
    "forward pre-hook": Change(Norm, lambda p, _: p.register_forward_pre_hook(_double_input)),
    "hook on an activation": Change(MLP, lambda p, _: p.act.register_forward_hook(_double)),
    "hook on a linear layer": Change(
        MLP, lambda p, _: p.up.register_forward_pre_hook(_double_input)
    ),
    "backward hook": Change(
        MLP, lambda p, _: p.act.register_full_backward_hook(lambda m, i, o: (i[0] * 2,))
    ),
    "hook on a parameter": Change(Norm, lambda p, _: p.weight.register_hook(lambda g: g * 2)),
    "global hook": Change(Norm, _double_all_norms),
    "activation": Change(MLP, _set("act", nn.ReLU())),
    "option of the activation": Change(
        _with(Block, forward=lambda s, x: s.act(s.fc(x)), act=nn.GELU()),
        lambda p, _: setattr(p.act, "approximate", "tanh"),
    ),
    "adapter": Change(MLP, _adapt),
    "parametrization": Change(
        MLP, lambda p, _: nn.utils.parametrizations.weight_norm(p.up)
    ),
    "pruned weight": Change(
        MLP, lambda p, _: prune.l1_unstructured(p.up, "weight", 0.5)
    ),
    "function of the file": Change(MLPOfFunctions, _patch_global("activate", functional.relu)),
    "rotation of the file": Change(
        Rotation, _patch_global("rotate", lambda q, k, c, s: (q * 2, k))
    ),
    "half of a rotation": Change(Rotation, _patch_global("turn", lambda x: x)),
    "angles": Change(Rotation, lambda p, _: p.angles.mul_(2)),
    "rate of a dropout": Change(
        _forward(Block, lambda s, x: x + functional.dropout(s.fc(x), s.p, s.training)),
        lambda p, _: setattr(p.eval(), "p", 0.5),
    ),
    "shape of a norm": Change(Block, lambda p, _: setattr(p, "norm", nn.LayerNorm((8, WIDTH)))),
    "epsilon of torch's norm": Change(Block, lambda p, _: setattr(p.norm, "eps", 1.0)),
    "no weight of torch's norm": Change(
        Block, lambda p, _: setattr(p, "norm", nn.LayerNorm(WIDTH, elementwise_affine=False))
    ),
    "cast": Change(Norm, lambda p, _: p.bfloat16(), torch.Tensor.bfloat16),
    "cast to double": Change(Norm, lambda p, _: p.double(), torch.Tensor.double),
    "length": Change(_forward(Norm, NORMS["a branch on the length"]), lambda p, _: None,
                     lambda x: torch.cat((x, x, x), 1)),
    "transposed input": Change(Norm, lambda p, _: None,
                               lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)),
    "two dimensions": Change(Norm, lambda p, _: None, lambda x: x[0]),
    "no rows": Change(Norm, lambda p, _: None, lambda x: x[:0]),
    "cap of logits": Change(
        _forward(Head, HEADS["a cap"]), lambda p, _: setattr(p.head, "weight", nn.Parameter(
            p.head.weight.detach() * 4))
    ),
    "bias of a head": Change(
        Head, lambda p, _: setattr(p.head, "bias", nn.Parameter(torch.arange(50.0)))
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:fuse. Model has")
@pytest.mark.usefixtures("_no_global_hooks")
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_the_first_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CHANGES[name]
    want = _make(case.make)
    got = torchweld.fuse(copy.deepcopy(want), by="graph")
    x = _values(2, 8)
    _compare(_step(got, x), _step(want, x))
    for model in (want, got):
        case.change(model.part, monkeypatch)
    x = case.again(x)
    results = [_step(model, x) for model in (got, want)]
    _compare(*results)
