"""torchweld.compat.liger against Liger: its names, arguments, states and, where it runs, numbers.

Liger's losses and rotation run under Triton's interpreter; its norms and activations do not, and
are compared with torch in float64.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from liger_kernel.transformers import functional as liger_functional
from liger_kernel.transformers import rope
from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss
from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
from liger_kernel.transformers.geglu import LigerGEGLUMLP
from liger_kernel.transformers.layer_norm import LigerLayerNorm
from liger_kernel.transformers.rms_norm import LigerRMSNorm
from liger_kernel.transformers.swiglu import LigerSwiGLUMLP
from torch.nn import functional
from transformers import LlamaConfig

from torchweld.compat import liger

pytestmark = pytest.mark.filterwarnings("ignore")
CLASSES = (
    *(LigerRMSNorm, LigerLayerNorm, LigerSwiGLUMLP, LigerGEGLUMLP),
    *(LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss),
)
CONFIG = LlamaConfig(hidden_size=32, intermediate_size=48)
IGNORED = {"impl", "mode", "backend"}  # choose among Liger's implementations


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _differentiate(y: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return [y, *torch.autograd.grad(y.square().sum(), inputs)]


@pytest.mark.parametrize("theirs", [*CLASSES, rope.liger_rotary_pos_emb])
def test_arguments_have_the_names_and_the_order(theirs: Any) -> None:
    mine = inspect.signature(getattr(liger, theirs.__name__)).parameters
    expected = {n: p for n, p in inspect.signature(theirs).parameters.items() if n not in IGNORED}
    named = [name for name, p in mine.items() if p.kind is not p.VAR_KEYWORD]
    assert named == list(expected)[: len(named)]
    assert len(named) == len(expected) or len(named) < len(mine)
    assert all(mine[name].default == expected[name].default for name in named)


@pytest.mark.parametrize("theirs", CLASSES[:4])
def test_states_are_the_same(theirs: Any) -> None:
    given = CONFIG if "MLP" in theirs.__name__ else 32
    mine = getattr(liger, theirs.__name__)(given)
    mine.load_state_dict(theirs(given).state_dict())


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(offset: float) -> None:
    x, norm = _draw(6, 32), liger.LigerRMSNorm(32, 1e-5, offset)
    exact = x.detach().double().requires_grad_()
    expected = functional.rms_norm(exact, (32,), norm.weight.double() + offset, 1e-5)
    found = _differentiate(norm(x), x)
    for mine, true in zip(found, _differentiate(expected, exact), strict=True):
        torch.testing.assert_close(mine.double(), true, rtol=1e-5, atol=1e-5)
    layer = liger.LigerLayerNorm(32, bias=True)
    expected = functional.layer_norm(exact, (32,), layer.weight.double(), layer.bias.double(), 1e-6)
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
    bare = liger.LigerRMSNorm(32, elementwise_affine=False)
    torch.testing.assert_close(bare(x), functional.rms_norm(x, (32,), eps=1e-6))


@pytest.mark.parametrize(
    ("kind", "act"),
    [
        (liger.LigerSwiGLUMLP, functional.silu),
        (liger.LigerGEGLUMLP, lambda x: functional.gelu(x, approximate="tanh")),
    ],
)
def test_gated_mlps(kind: Any, act: Any) -> None:
    mlp, x = kind(CONFIG).double(), _draw(6, 32).double()
    expected = mlp.down_proj(act(mlp.gate_proj(x)) * mlp.up_proj(x))
    weights = list(mlp.parameters())
    torch.testing.assert_close(_differentiate(mlp(x), *weights), _differentiate(expected, *weights))


HOW: list[dict[str, Any]] = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"lse_square_scale": 1e-3},  # its soft cap does not run under the interpreter
    {"ignore_index": 3},
]


@pytest.mark.parametrize("how", HOW)
def test_losses_are_those_of_liger(how: dict[str, Any]) -> None:
    x, w, b, target = _draw(6, 32), _draw(50, 32, seed=1), _draw(50, seed=2), torch.arange(6)
    results = []
    for package in (liger, liger_functional):
        logits = (x @ w.t()).clone()
        loss = package.liger_cross_entropy(logits, target, **how)
        fused = package.liger_fused_linear_cross_entropy(x, w, target, b, **how)
        results.append([*_differentiate(loss, x, w), *_differentiate(fused, x, w, b)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_loss_modules_are_those_of_liger() -> None:
    x, w, target = _draw(6, 32), _draw(50, 32, seed=1), torch.arange(6)
    how: dict[str, Any] = {"ignore_index": 3, "lse_square_scale": 1e-3}
    mine, theirs = (m(**how)(x @ w.t(), target) for m in (liger.LigerCrossEntropyLoss, CLASSES[4]))
    torch.testing.assert_close(mine, theirs)
    mine, theirs = (
        m(**how)(w, x, target) for m in (liger.LigerFusedLinearCrossEntropyLoss, CLASSES[5])
    )
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("few", [False, True])
def test_rotation_is_that_of_liger(few: bool) -> None:
    """Liger writes over its inputs, so that it gets clones."""
    q, k, angles = _draw(2, 4, 5, 16), _draw(2, 2, 5, 16), _draw(2, 5, 8).detach()
    cos, sin = (t if few else torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
    how = {"rotary_dim": 16} if few else {}
    results = []
    for function in (liger.liger_rotary_pos_emb, rope.liger_rotary_pos_emb):
        y = function(q.clone(), k.clone(), cos, sin, **how)
        results.append([*y, *torch.autograd.grad(y[0].square().sum() + y[1].sum(), (q, k))])
    torch.testing.assert_close(*results)
