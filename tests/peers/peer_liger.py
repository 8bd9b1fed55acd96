"""torchweld.compat.liger against Liger: its names, arguments, states and, where it runs, numbers.

Liger's losses and rotation run under Triton's interpreter; its norms and activations do not, and
are compared with torch in float64.
"""

from __future__ import annotations

import inspect
from typing import Any

import liger_kernel.transformers
import pytest
import torch
from liger_kernel.transformers import functional as liger_functional
from liger_kernel.transformers import rope
from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss
from liger_kernel.transformers.fused_add_rms_norm import LigerFusedAddRMSNorm
from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss
from liger_kernel.transformers.geglu import LigerGEGLUMLP
from liger_kernel.transformers.layer_norm import LigerLayerNorm
from liger_kernel.transformers.mlp import LigerMLP
from liger_kernel.transformers.relu_squared import LigerReLUSquared
from liger_kernel.transformers.rms_norm import LigerRMSNorm, LigerRMSNormForGemma
from liger_kernel.transformers.softmax import LigerSoftmax
from liger_kernel.transformers.swiglu import (
    LigerBlockSparseTop2MLP,
    LigerPhi3SwiGLUMLP,
    LigerQwen3MoeSwiGLUMLP,
    LigerSwiGLUMLP,
)
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from pages import ROOT
from torchweld import numerics
from torchweld.compat import liger

pytestmark = pytest.mark.filterwarnings("ignore")
NORMS = (LigerRMSNorm, LigerLayerNorm, LigerRMSNormForGemma, LigerFusedAddRMSNorm)
MLPS = (
    *(LigerSwiGLUMLP, LigerGEGLUMLP, LigerMLP, LigerPhi3SwiGLUMLP),
    *(LigerQwen3MoeSwiGLUMLP, LigerBlockSparseTop2MLP),
)
LOSSES = LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
CLASSES = (*NORMS, *MLPS, *LOSSES, LigerReLUSquared, LigerSoftmax)
FUNCTIONS = [
    getattr(liger_functional, name)
    for name in vars(liger_functional)
    if name.startswith("liger_") and hasattr(liger, name)
]
CONFIG = LlamaConfig(hidden_size=32, intermediate_size=48)
IGNORED = {"impl", "mode", "backend"}  # choose among Liger's implementations


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _differentiate(y: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return [y, *torch.autograd.grad(y.square().sum(), inputs)]


def test_every_name_is_here_or_in_the_table() -> None:
    """docs/migrating.md says of each name that has no alias what takes its place."""
    page = (ROOT / "docs/migrating.md").read_text()
    names = {*dir(liger_kernel.transformers), *vars(liger_functional)}
    names = {n for n in names if n.startswith(("Liger", "liger_")) and not n.endswith("Function")}
    assert len(names) > 40
    assert not sorted(n for n in names if not hasattr(liger, n) and f"`{n}`" not in page)
    ours = {*vars(liger)} & names
    assert not sorted(name for name in ours if f"`{name}" not in page)


@pytest.mark.parametrize("theirs", [*CLASSES, *FUNCTIONS, rope.liger_rotary_pos_emb])
def test_arguments_have_the_names_and_the_order(theirs: Any) -> None:
    mine = inspect.signature(getattr(liger, theirs.__name__)).parameters
    expected = {n: p for n, p in inspect.signature(theirs).parameters.items() if n not in IGNORED}
    named = [n for n, p in mine.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    assert named == list(expected)[: len(named)]
    assert len(named) == len(expected) or len(named) < len(mine)
    assert all(mine[name].default == expected[name].default for name in named)


@pytest.mark.parametrize("theirs", [*NORMS, *MLPS])
def test_states_are_the_same(theirs: Any) -> None:
    given = CONFIG if "MLP" in theirs.__name__ else 32
    mine = getattr(liger, theirs.__name__)(given)
    mine.load_state_dict(theirs(given).state_dict())


def _compare(found: Any, expected: Any, x: torch.Tensor, exact: torch.Tensor) -> None:
    """A result and its gradient, with those in float64."""
    true = _differentiate(expected, exact)
    for a, b in zip(_differentiate(found, x), true, strict=True):
        torch.testing.assert_close(a.double(), b, **numerics.SUMMED)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(offset: float) -> None:
    x, norm = _draw(6, 32), liger.LigerRMSNorm(32, 1e-5, offset)
    exact = x.detach().double().requires_grad_()
    weight = norm.weight.double() + offset
    expected = functional.rms_norm(exact, (32,), weight, 1e-5)
    _compare(norm(x), expected, x, exact)
    added, residual = liger.LigerFusedAddRMSNorm(32, 1e-5, offset), _draw(6, 32, seed=1)
    y, total = added(x, residual)
    wide = exact + residual.double()
    _compare(y, functional.rms_norm(wide, (32,), weight, 1e-5), x, exact)
    assert torch.equal(total, x + residual)
    gemma = liger.LigerRMSNormForGemma(32)
    torch.testing.assert_close(gemma(x), functional.rms_norm(x, (32,), eps=1e-6))
    _compare(liger.LigerReLUSquared()(x), exact.relu().square(), x, exact)
    _compare(liger.LigerSoftmax()(x), exact.softmax(-1), x, exact)
    layer = liger.LigerLayerNorm(32, bias=True)
    expected = functional.layer_norm(exact, (32,), layer.weight.double(), layer.bias.double(), 1e-6)
    torch.testing.assert_close(layer(x).double(), expected, **numerics.SUMMED)
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


def test_mlps_of_other_layers() -> None:
    """Of the same weights: one layer for gate and up, and Mixtral's names."""
    x = _draw(6, 32)
    mlp, joined, expert = (
        getattr(liger, f"Liger{name}MLP")(CONFIG)
        for name in ("SwiGLU", "Phi3SwiGLU", "BlockSparseTop2")
    )
    weights = [layer.weight for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    joined.load_state_dict(
        {"gate_up_proj.weight": torch.cat(weights[:2]), "down_proj.weight": weights[2]}
    )
    expert.load_state_dict({f"w{at}.weight": w for at, w in zip((1, 3, 2), weights, strict=True)})
    for other in (joined, expert):
        torch.testing.assert_close(_differentiate(other(x), x), _differentiate(mlp(x), x))


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
    torch.testing.assert_close(*results, **numerics.CHAINED_SMALL)


def test_loss_modules_are_those_of_liger() -> None:
    x, w, target = _draw(6, 32), _draw(50, 32, seed=1), torch.arange(6)
    how: dict[str, Any] = {"ignore_index": 3, "lse_square_scale": 1e-3}
    mine, theirs = (m(**how)(x @ w.t(), target) for m in (liger.LigerCrossEntropyLoss, LOSSES[0]))
    torch.testing.assert_close(mine, theirs)
    mine, theirs = (
        m(**how)(w, x, target) for m in (liger.LigerFusedLinearCrossEntropyLoss, LOSSES[1])
    )
    torch.testing.assert_close(mine, theirs)


def test_five_steps_lose_the_same() -> None:
    """A model of Liger's names, and one of torch's layers with Liger's rotation and loss."""

    def train(package: Any, norm: Any, mlp: Any) -> list[float]:
        torch.manual_seed(0)
        layers = torch.nn.ModuleList([torch.nn.Embedding(50, 32), norm, mlp])
        head = torch.nn.Linear(32, 50, bias=False)
        optimizer = torch.optim.AdamW([*layers.parameters(), *head.parameters()], lr=1e-2)
        tokens, angles = torch.arange(12).view(2, 6) % 5, torch.linspace(0, 3, 12).view(1, 6, 2)
        losses = []
        for _ in range(5):
            x = layers[0](tokens)
            q = x.view(2, 6, 8, 4).transpose(1, 2).clone()
            cos, sin = (torch.cat((t, t), -1) for t in (angles.cos(), angles.sin()))
            q, _k = package["rotate"](q, q.detach().clone(), cos, sin)
            x = x + layers[2](layers[1](q.transpose(1, 2).reshape(2, 6, 32)))
            loss = package["loss"](head.weight, x.view(-1, 32), tokens.view(-1).roll(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    torch.manual_seed(1)
    theirs = LigerSwiGLUMLP(CONFIG)  # its state; its forward does not run here
    plain: Any = LlamaMLP(CONFIG)
    plain.load_state_dict(theirs.state_dict())
    mine = liger.LigerSwiGLUMLP(CONFIG)
    mine.load_state_dict(theirs.state_dict())
    package = {"rotate": rope.liger_rotary_pos_emb, "loss": LigerFusedLinearCrossEntropyLoss()}
    expected = train(package, torch.nn.RMSNorm(32, 1e-6), plain)
    package = {
        "rotate": liger.liger_rotary_pos_emb,
        "loss": liger.LigerFusedLinearCrossEntropyLoss(),
    }
    found = train(package, liger.LigerRMSNorm(32), mine)
    assert expected[-1] < expected[0]
    assert found == pytest.approx(expected, rel=1e-5)


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
