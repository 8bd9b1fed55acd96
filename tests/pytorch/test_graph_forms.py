"""Forms of ops that models have, which once were no weld, each next to the plain model."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import torchweld
from refusing import refuses
from words import WIDTH, WORDS, Layer, Norm, Words, compare, list_ops, make_ids, make_words, step

pytestmark = pytest.mark.usefixtures("own_graphs")


class Conv(nn.Module):
    """GPT-2's layer, whose input autocast casts after the layer has shaped it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, 48)), nn.Parameter(torch.ones(48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return functional.gelu(y.view(*x.size()[:-1], 48), approximate="tanh")


def test_a_conv1d_under_autocast() -> None:
    """It was left, since a layer's view was looked for behind the cast only."""
    torch.manual_seed(0)
    plain, x = Conv(), torch.randn(4, 7, WIDTH)
    fused = torchweld.fuse(copy.deepcopy(plain))
    exact = plain.double()(x.double())
    plain.float()
    with torchweld.use_backend("cpu", "eager"), torch.autocast("cpu", torch.bfloat16):
        errors = [(model(x).double() - exact).norm() for model in (fused, plain)]
    assert list_ops(fused) == ["linear_act"]
    assert errors[0] <= 1.1 * errors[1]


class Turning(Layer):
    """A layer that turns its heads before it normalises them, as HunYuan's."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.RMSNorm(8, eps=1e-6)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        heads = x.view(*x.shape[:2], 4, 8).transpose(1, 2)
        angles = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
        cos, sin = (torch.cat((t, t), -1)[None, None] for t in (angles.cos(), angles.sin()))
        turned = torch.cat((-heads[..., 4:], heads[..., :4]), -1)
        heads = _normalize(heads * cos + turned * sin, self.heads.weight)
        return super().forward(heads.transpose(1, 2).reshape(x.shape), scale)


def _normalize(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Powered(Norm):
    """Gemma 3n's norm, which computes its root by a power, and casts its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.pow(wide.pow(2).mean(-1, keepdim=True) + 1e-6, -0.5)
        return (normed * self.weight.float()).type_as(x)


_TURNS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "classes first": lambda logits: logits.transpose(1, 2),
    "classes first, permuted": lambda logits: logits.permute(0, 2, 1),
    "classes first, in float32": lambda logits: logits.float().mT,
}


class Ending(Words):
    """A model whose last layer gets `way`'s view of what the others made."""

    way = ""

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if self.way == "a slice":  # CPM-Ant: torch multiplies one matrix for each row of the batch
            x, ids = x[:, 3:], ids[:, 3:]
        elif self.way == "a product":  # NeoMME
            x = x @ self.layers[0].up.weight.t() @ self.layers[0].down.weight.t()  # type: ignore[operator]
        elif self.way == "rows":
            x = x.view(-1, WIDTH)
        logits = self.head(x)
        rows = logits if self.way == "rows" else logits.view(-1, WORDS)
        if self.way in _TURNS:  # classes before tokens, as cross_entropy documents it
            return functional.cross_entropy(_TURNS[self.way](logits), ids), logits
        return functional.cross_entropy(rows, ids.reshape(-1)), logits


def _make_turning() -> Any:
    model = make_words(layers=2)
    model.layers = nn.ModuleList(Turning() for _ in model.layers)
    return model


def _make_ending(way: str) -> Any:
    torch.manual_seed(0)
    model = Ending(1)
    model.way = way
    return model


_LOSS = {"linear_cross_entropy": 1}
_MODELS: dict[str, tuple[Any, dict[str, int]]] = {
    # The norm took the rotation's sum for a residual.
    "a norm of what is turned": (_make_turning, {"rotary_embedding": 2, "rms_norm": 4}),
    **{
        f"a loss of {way}": (functools.partial(_make_ending, way), _LOSS)
        for way in ("a slice", "a product", "rows", *_TURNS)
    },
}


@pytest.mark.parametrize("name", _MODELS)
def test_a_form_is_welded(name: str) -> None:
    make, welds = _MODELS[name]
    plain = make()
    fused = torchweld.fuse(copy.deepcopy(plain))
    compare(step(fused, make_ids()), step(plain, make_ids()))
    counts = Counter(list_ops(fused))
    assert {op: counts[op] for op in welds} == welds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_root_by_a_power(dtype: torch.dtype) -> None:
    plain = Powered().to(dtype)
    fused = torchweld.fuse(copy.deepcopy(plain))
    x = torch.randn(4, 7, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = functional.rms_norm(x.double(), (WIDTH,), plain.weight.double(), 1e-6)
    errors = [(model(x) - exact).norm() for model in (fused, plain)]
    assert errors[0] <= 1.1 * errors[1]
    assert list_ops(fused) == ["rms_norm"]


class Rotation(nn.Module):
    """Queries turned by angles in float32, whatever the dtype of the queries."""

    def __init__(self, is_complex: bool) -> None:
        super().__init__()
        self.is_complex = is_complex

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[2])[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
        if self.is_complex:
            turns = torch.polar(torch.ones_like(angles), angles)[None, None]
            pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
            return torch.view_as_real(pairs * turns).flatten(3)
        cos, sin = (torch.cat((t, t), -1)[None, None] for t in (angles.cos(), angles.sin()))
        return x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin


@pytest.mark.parametrize("is_complex", [False, True])
def test_float64_by_angles_in_float32(is_complex: bool) -> None:
    """The weld stood in the graph, and its kernel raised an error: of float64 it takes float64.

    Fake tensors took another way than kernels do, on which nothing was checked.
    """
    plain, x = Rotation(is_complex), torch.randn(2, 4, 6, 8, dtype=torch.float64)
    fused = torchweld.fuse(copy.deepcopy(plain))
    with torchweld.use_backend("cpu", "eager"):
        torch.testing.assert_close(fused(x), plain(x))
    assert list_ops(fused) == ["rotary_embedding"]


def test_fake_arguments_are_checked() -> None:
    """As a kernel's are: so a graph gets no op whose kernel would refuse its inputs."""
    with FakeTensorMode():
        x, angles = torch.empty(2, 4, 6, 8, dtype=torch.float64), torch.empty(6, 8)
        refuses("float64, to go with x", torchweld.functional.rotary_embedding, x, angles, angles)


def test_two_lengths_have_rows_in_common() -> None:
    """explain_fusion told of the welds of each graph: of two lengths of text, twice as many."""
    fused = torchweld.fuse(make_words(layers=2))
    for length in (12, 7):
        fused(make_ids(length=length))
        rows = torchweld.explain_fusion(fused)
        assert [row.becomes for row in rows].count("gated_act") == 2


class Unread(nn.Module):
    """A layer that computes states for a next one, which does not exist."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = x + functional.dropout(self.linear(x), 0.1, self.training)
        normed = self.norm(states)
        states = states + functional.dropout(self.linear(normed), 0.1, self.training)
        return normed


def test_what_is_not_read_is_no_failed_weld() -> None:
    """The first weld takes the unread sum out; the second told of "a function of torch" there."""
    told = str(torchweld.explain_fusion(Unread(), torch.ones(2, 3, WIDTH)))
    assert "dropout_add_layer_norm" in told
    assert "bias_dropout_add" not in told
    assert "function of torch" not in told
