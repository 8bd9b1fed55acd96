"""Modules that fuse() knows, with a place in their code for a change, and changes for it."""

from __future__ import annotations

import itertools
import linecache
import sys
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

WIDTH = 32

# A class M, or a function of that name, which computes y from x; then the model that has it.
_CHANGE = "<the change>"
_HEAD = """
import os, random, threading, time, types
import numpy, torch
from torch import nn
from torch.nn import functional as F
W, SWITCH, TABLE, NUMBERS, LISTED = {width}, False, {{"on": False}}, types.SimpleNamespace(on=0), []

def helper(y):
    return y
"""
KINDS = {
    "rms_norm": """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(W) + 0.5), 1e-6

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        y = self.weight * wide.to(x.dtype)
        <the change>
        return y

make = M
""",
    "layer_norm": """
class M(nn.LayerNorm):
    def __init__(self):
        super().__init__(W)

    def forward(self, x):
        y = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        <the change>
        return y

make = M
""",
    "gated_act": """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(W, 48), nn.Linear(W, 48), nn.Linear(48, W)
        self.act = nn.SiLU()

    def forward(self, x):
        y = self.down(self.act(self.gate(x)) * self.up(x))
        <the change>
        return y

make = M
""",
    "dropout_add_layer_norm": """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm, self.dropout = nn.Linear(W, W), nn.LayerNorm(W), nn.Dropout(0.0)

    def forward(self, x, residual):
        y = self.norm(self.dropout(self.dense(x)) + residual)
        <the change>
        return y

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.output = M()

    def forward(self, x):
        return self.output(x, x)

make = Both
""",
    "bias_act": """
class M(nn.Module):
    def forward(self, x):
        y = 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))
        <the change>
        return y

make = M
""",
    "linear_act": """
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(W, 48), nn.GELU()

    def forward(self, x):
        y = self.act(self.fc(x))
        <the change>
        return y

make = M
""",
    "linear_act of an activation": """
class M(nn.Module):
    def forward(self, x):
        y = x * torch.sigmoid(x)
        <the change>
        return y

make = lambda: nn.Sequential(nn.Linear(W, 48), M())
""",
    "linear_act of a layer": """
class M(nn.Linear):
    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        <the change>
        return y

make = lambda: nn.Sequential(M(W, W), nn.GELU())
""",
    "gated_act of an activation": """
class M(nn.Module):
    def forward(self, x):
        y = F.gelu(x)
        <the change>
        return y

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.down, self.act = nn.Linear(W, 96), nn.Linear(48, W), M()

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(up * self.act(gate))

make = Gated
""",
    "dropout_add_layer_norm of a dropout": """
class M(nn.Dropout):
    def forward(self, x):
        y = F.dropout(x, self.p, self.training)
        <the change>
        return y

class Output(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.norm, self.dropout = nn.Linear(W, W), nn.LayerNorm(W), M(0.0)

    def forward(self, x, residual):
        return self.norm(self.dropout(self.dense(x)) + residual)

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.output = Output()

    def forward(self, x):
        return self.output(x, x)

make = Both
""",
    "an activation of torch's layer": """
def M(x):
    y = F.gelu(x)
    <the change>
    return y

make = lambda: nn.TransformerEncoderLayer(W, 2, 48, 0.0, M, batch_first=True)
""",
    "a rotation": """
def turn(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)

def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    x, (cos, sin) = q, (t.unsqueeze(unsqueeze_dim) for t in (cos, sin))
    y = q * cos + turn(q) * sin
    <the change>
    return y, k * cos + turn(k) * sin

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim, self.q, self.k = W, nn.Linear(W, 2 * W), nn.Linear(W, 2 * W)

    def forward(self, x, position_embeddings, attention_mask=None):
        q, k = (f(x).view(*x.shape[:-1], 2, W).transpose(1, 2) for f in (self.q, self.k))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        return torch.cat((q, k), 1).transpose(1, 2).flatten(2), None

class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        angles = torch.linspace(0, 3, x.shape[-2], device=x.device)[:, None] * torch.linspace(
            0, 1, W // 2, device=x.device
        )
        angles = torch.cat((angles, angles), -1).expand(len(x), -1, -1).to(x.dtype)
        return self.attention(x, (angles.cos(), angles.sin()))[0]

make = Turned
""",
    "experts_mlp of a mixture": """
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts, self.act_fn = 3, nn.SiLU()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 48, W) / 4)
        self.down_proj = nn.Parameter(torch.randn(3, W, 24) / 4)

    def forward(self, x, indices, weights):
        y = torch.zeros_like(x)
        for expert in indices.unique().tolist():
            if expert == self.num_experts:
                continue
            rows, place = torch.where(indices == expert)
            if rows.numel() == 0:
                continue
            gate, up = F.linear(x[rows], self.gate_up_proj[expert]).chunk(2, -1)
            made = F.linear(self.act_fn(gate) * up, self.down_proj[expert])
            y = y.index_add(0, rows, (made * weights[rows, place, None]).to(x.dtype))
        <the change>
        return y

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(W, 3), Experts()

    def forward(self, x):
        rows = x.reshape(-1, W)
        weights, indices = self.router(rows).softmax(-1).topk(2)
        return self.experts(rows, indices, weights).view_as(x)

make = Mixture
""",
}
# Kinds that are known without a module's own forward around them: `self` is what is changed.
FUNCTIONS = ("an activation of torch's layer", "a rotation")

_numbers = itertools.count()


class Mutant(NamedTuple):
    """A model with a change, and the names of its file."""

    model: nn.Module
    names: dict[str, Any]


def make(kind: str, change: str) -> Mutant:
    """A model of this kind whose code has these lines too; its numbers depend on nothing else."""
    indent = 4 if kind in FUNCTIONS else 8
    lines = change.strip().splitlines() or ["pass"]
    text = _HEAD.format(width=WIDTH)
    text += KINDS[kind].replace(_CHANGE, ("\n" + " " * indent).join(lines))
    module = ModuleType(f"mutant_{next(_numbers)}")
    file = f"{module.__name__}, {kind}"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    sys.modules[module.__name__] = module  # where torch.compile looks for it
    exec(compile(text, file, "exec"), vars(module))
    torch.manual_seed(0)
    return Mutant(module.make(), vars(module))


def draw(*shape: int) -> torch.Tensor:
    """An input."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*(shape or (4, 6)), WIDTH, generator=generator, dtype=torch.float32)
    return x.requires_grad_()


NOISES = {
    "added": "y = y + {k} * torch.randn_like(y)",
    "multiplied": "y = y * (1 + {k} * torch.randn_like(y))",
    "dropout by hand": "y = y * (torch.rand_like(y) > 0.5 * {k}) / (1 - 0.5 * {k})",
    "dropout as a function": "y = F.dropout(y, 0.5 * {k}, True)",
    "in place": "y = y + {k} * torch.empty_like(y).normal_()",
    "of one number": "y = y + {k} * torch.rand(())",
    "rarely": "y = y * (1 + (torch.rand(()) < 0.5 * {k}))",
    "bernoulli": "y = y * torch.full_like(y, 1 - 0.5 * {k}).bernoulli()",
    "NumPy's": "y = y * (1 + {k} * float(numpy.random.rand()))",
    "Python's": "y = y * (1 + {k} * random.random())",
    "in training": "y = y + {k} * torch.randn_like(y) if self.training else y",
    "times zero": "y = y + 0 * torch.randn_like(y)",
}


class Cast(NamedTuple):
    """A condition that is true in a model of this dtype, or under autocast to it."""

    test: str
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None


CASTS = {
    "bfloat16": Cast("x.dtype == torch.bfloat16", torch.bfloat16),
    "float16": Cast("x.dtype == torch.float16", torch.float16),
    "float64": Cast("x.dtype == torch.float64", torch.float64),
    "two bytes": Cast("x.element_size() == 2", torch.bfloat16),
    "a width": Cast("x.dtype.itemsize < 4", torch.float16),
    "the largest number": Cast("torch.finfo(y.dtype).max < 1e38", torch.float16),
    "a list": Cast("x.dtype in (torch.float16, torch.bfloat16)", torch.bfloat16),
    "autocast": Cast('torch.is_autocast_enabled("cpu")', autocast=torch.bfloat16),
    "autocast in an expression": Cast(
        'torch.get_autocast_dtype("cpu") is torch.bfloat16 and torch.is_autocast_enabled("cpu")',
        autocast=torch.bfloat16,
    ),
}
