"""Rotations as models write them, and what stands between them and their norms."""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchweld
from fusable import check_fused, run
from torchweld import numerics

_NUMBERS = itertools.count()
_HALVES = "first, second = x.chunk(2, -1); turned = torch.cat((-second, first), -1)"
_PAIRS = "turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)"
_BOTH = "return turn(q, cos, sin), turn(k, cos, sin)"
_HEADS = f"cos, sin = cos.unsqueeze(1), sin.unsqueeze(1); {_BOTH}"
_COLUMNS = "return x * cos + turned * sin"
_HALF = "cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, -1) for t in (cos, sin))"
_PART = "n = cos.shape[-1]; x, rest = x[..., :n], x[..., n:]"
_COMPLEX = (
    "return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * cos)"
    ".flatten(3).type_as(x)"
)
# The lines of a function that turns x and of the function that an attention calls, the number of
# angles of 16 columns, and how the attention gets them.
FORMS: dict[str, tuple[str, str, int, str]] = {
    "halves, as Llama": (f"{_HALVES}; {_COLUMNS}", _HEADS, 16, "batched"),
    "interleaved, as Cohere": (f"{_PAIRS}; {_COLUMNS}", _HEADS, 16, "batched"),
    "first half of the angles, as Helium": (
        f"{_HALF}; {_PAIRS}; {_COLUMNS}",
        _HEADS,
        16,
        "batched",
    ),
    "half of the columns, as GLM": (
        f"{_PART}; {_HALF}; {_PAIRS}; return torch.cat((x * cos + turned * sin, rest), -1)",
        *(_HEADS, 8, "batched"),
    ),
    "partial, as Phi": (f"{_HALVES}; {_COLUMNS}", _HEADS, 4, "sliced"),
    "an angle for a pair, as gpt-oss": (
        "a, b = x.chunk(2, -1); return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)",
        *(_HEADS, 8, "batched"),
    ),
    "complex, as DeepSeek-V2": (
        _COMPLEX,
        "return turn(q, cos.unsqueeze(1), 0), turn(k, cos.unsqueeze(1), 0)",
        *(8, "complex"),
    ),
    "the last tokens, as DINOv3": (
        f"n = x.shape[-2] - cos.shape[-2]; before, x = x[..., :n, :], x[..., n:, :]; {_HALVES};"
        " return torch.cat((before, x * cos + turned * sin), -2)",
        *(_BOTH, 16, "last"),
    ),
}
_MODULE = """
import torch

def turn(x, cos, sin):
    {turn}

def {function}(q, k, cos, sin=None, **more):
    {rotate}

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim, self.rotary_ndims = 16, {width}
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(32, 64) for _ in range(3))

    def forward(self, hidden_states, position_embeddings, attention_mask=None):
        shape = (*hidden_states.shape[:-1], 4, 16)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        n = self.rotary_ndims if {sliced} else 16
        angles = (position_embeddings,) if {is_complex} else position_embeddings
        turned_q, turned_k = {function}(q[..., :n], k[..., :n], *angles)
        q, k = torch.cat((turned_q, q[..., n:]), -1), torch.cat((turned_k, k[..., n:]), -1)
        return ((q @ k.mT / 4).softmax(-1) @ v).transpose(1, 2).flatten(2), None
"""


def _make(folder: Path, turn: str, rotate: str, width: int, given: str) -> Any:
    is_complex = given == "complex"
    function = "apply_rotary_emb" if is_complex else "apply_rotary_pos_emb"
    text = _MODULE.format(
        turn=turn.replace("; ", "\n    "),
        rotate=rotate.replace("; ", "\n    "),
        width=width,
        function=function,
        sliced=given == "sliced",
        is_complex=is_complex,
    )
    return nn.ModuleList([_make_attention(folder, text)])


def _make_attention(folder: Path, text: str) -> Any:
    """The attention of a file with this text."""
    file = folder / f"attention_{next(_NUMBERS)}.py"
    file.write_text(text)
    spec: Any = importlib.util.spec_from_file_location(file.stem, file)
    made = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = made  # where Dynamo looks for a function's file
    spec.loader.exec_module(made)
    torch.manual_seed(0)
    return made.Attention()


def _run(model: Any, width: int, given: str) -> list[torch.Tensor]:
    dtype = model[0].q_proj.weight.dtype
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 6, 32, generator=generator).to(dtype).requires_grad_()
    angles = torch.randn(3, 6, width, generator=generator).to(dtype)
    cos, sin = angles.cos(), angles.sin()
    tables: Any = (cos[0, 2:], sin[0, 2:]) if given == "last" else (cos, sin)
    tables = torch.complex(cos, sin) if given == "complex" else tables
    return run(model[0], x, position_embeddings=tables)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.usefixtures("own_graphs")
def test_each_form_is_welded(name: str, tmp_path: Path) -> None:
    """Results and gradients match the model's code, in float64."""
    turn, rotate, width, given = FORMS[name]
    model = _make(tmp_path, turn, rotate, width, given).double()
    call = functools.partial(_run, model, width, given)
    ops = check_fused(model, call, **numerics.CHAINED64)
    # Angles that are computed for each are not the same angles.
    is_apart = "repeat" in turn or given in ("last", "complex")
    qk = ["rotary_embedding"] * 2 if is_apart else ["rotary_embedding_qk"]
    assert ops == [*qk, "softmax_dropout"]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.usefixtures("own_graphs")
def test_a_rotation_backwards(name: str, tmp_path: Path) -> None:
    """Each form with the sine's sign changed."""
    turn, rotate, width, given = FORMS[name]
    back = "cos = cos.conj()" if given == "complex" else "sin = -sin"
    model = _make(tmp_path, f"{back}; {turn}", rotate, width, given).double()
    check_fused(model, functools.partial(_run, model, width, given), **numerics.CHAINED64)


# --- What happens between a norm and the rotation -------------------------------------------------

_NORMED = """
import torch

def turn(x, cos, sin):
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return x * cos + turned * sin

def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1, scale=1.0, **more):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return scale * turn(q, cos, sin), scale * turn(k, cos, sin)

class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.rand(16)), 1e-6

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim, self.factor, self.flag = 16, 1.0, True
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(32, 64) for _ in range(3))
        self.q_norm, self.k_norm = Norm(), Norm()

    def forward(self, x, position_embeddings, attention_mask=None, asked=True):
        cos, sin = position_embeddings
        q, k, v = (p(x).unflatten(-1, (4, 16)) for p in (self.q_proj, self.k_proj, self.v_proj))
        {norms}
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        {rotates}
        return ((q @ k.mT / 4).softmax(-1) @ v).transpose(1, 2).flatten(2), None
"""
_NORMS = "q = self.q_norm(q); k = self.k_norm(k)"
_ROTATES = "q, k = apply_rotary_pos_emb(q, k, cos, sin)"
# The lines of the norms and of the rotation, and what changes after fuse().
BETWEEN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a factor": (f"{_NORMS}; q = q * self.factor", _ROTATES, {"factor": 3.0}),
    "a factor in place": (f"{_NORMS}; q *= self.factor", _ROTATES, {"factor": 3.0}),
    "a factor of the call": (_NORMS, _ROTATES.replace("(q,", "(q * self.factor,"), {"factor": 3.0}),
    "a norm of choice": (f"if self.flag: {_NORMS}", _ROTATES, {"flag": False}),
    "a rotation of choice": (_NORMS, f"if self.flag: {_ROTATES}", {"flag": False}),
    "an argument": (_NORMS, f"{_ROTATES} if asked else (q, k)", {"asked": False}),
    "a function's argument": (
        _NORMS,
        _ROTATES.replace("sin)", "sin, scale=self.factor)"),
        {"factor": 3.0},
    ),
    "a function's argument by position": (
        _NORMS,
        _ROTATES.replace("sin)", "sin, 1, self.factor)"),
        {"factor": 3.0},
    ),
}


@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.usefixtures("own_graphs")
def test_what_happens_between_norm_and_rotation(name: str, tmp_path: Path) -> None:
    """After a change the results are the code's."""
    norms, rotates, change = BETWEEN[name]
    model = _make_attention(tmp_path, _NORMED.format(norms=norms, rotates=rotates)).double()
    fused = torchweld.fuse(copy.deepcopy(model))
    x, angles = (torch.randn(3, 6, n, dtype=torch.float64) for n in (32, 16))
    given: dict[str, Any] = {"position_embeddings": (angles.cos(), angles.sin())}
    for more in ({}, change):
        for each in (model, fused):
            vars(each).update({k: v for k, v in more.items() if k != "asked"})
        given |= {k: v for k, v in more.items() if k == "asked"}
        found, expected = (run(each, x, **given) for each in (fused, model))
        torch.testing.assert_close(found, expected, **numerics.SECOND64)
