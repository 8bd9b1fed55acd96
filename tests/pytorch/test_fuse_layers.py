"""Welds with their own dropout, and layers with masks, against torch's."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torchweld
from fusable import (
    Normalized,
    Output,
    PlainRMSNorm,
    Repeated,
    check_fused,
    run,
    small_inputs,  # noqa: F401
)
from torchweld import functional, numerics
from torchweld.fusion.weld import Weld
from torchweld.sparse.by_length import DENSE

WIDTH, LENGTH = 64, 24


@pytest.mark.usefixtures("own_graphs")
def test_dropout_is_that_of_the_modules_as_they_are_now() -> None:
    """The probability may change after fuse(), and one dropout may be in evaluation."""
    x, residual = torch.randn(64, WIDTH), torch.randn(64, WIDTH)
    block = torchweld.fuse(Output(0.5))
    assert isinstance(block, Weld)
    for p, training in ((0.5, True), (0.2, True), (0.2, False)):
        block.dropout.p = p
        block.dropout.train(training)
        torch.manual_seed(4)
        found = block(x, input_tensor=residual)
        torch.manual_seed(4)
        norm = block.LayerNorm
        expected = functional.dropout_add_layer_norm(
            block.dense(x), residual, norm.weight, norm.bias, p=p, training=training
        )
        assert torch.equal(found, expected)


@pytest.mark.usefixtures("own_graphs")
def test_a_layer_drops_with_its_own_probabilities() -> None:
    """Each of a layer's dropouts changes its result; without them it is always the same."""
    made = nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0)
    layer: Any = torchweld.fuse(made)
    assert isinstance(made, Weld)
    x = torch.randn(LENGTH, 2, WIDTH)
    first = layer(x)
    assert torch.equal(first, layer(x))
    for name in ("dropout", "dropout1", "dropout2"):
        dropout = getattr(layer, name)
        dropout.p = 0.5
        assert not torch.allclose(first, layer(x))
        dropout.eval()
        assert torch.equal(first, layer(x))


@pytest.mark.parametrize("kind", ["pair", "layer", "layer of a function"])
@pytest.mark.usefixtures("own_graphs")
def test_activations_are_those_of_now(kind: str) -> None:
    """A GELU of another approximation, and another function, also after fuse()."""
    if kind == "pair":
        model: Any = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU())
    else:
        function = "gelu" if kind == "layer of a function" else nn.GELU()
        model = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, function)
    x = torch.randn(3, 5, WIDTH, requires_grad=True)
    torchweld.fuse(model)
    run(model, x)  # captures
    assert torchweld.explain_fusion(model)[0].welded
    if kind == "pair":
        model[1] = nn.GELU("tanh")
    elif kind == "layer":
        model.activation.approximate = "tanh"
    else:
        model.activation = torch.nn.functional.silu
    fused = run(model, x)
    torch.testing.assert_close(fused, run(torchweld.unfuse(model), x), **numerics.SUMMED)


class ScaledMLP(nn.Module):
    """A gated MLP whose activation and factor are attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.function, self.factor = nn.functional.silu, 1.0

    def forward(self, x: torch.Tensor) -> Any:
        return self.factor * self.down(self.function(self.gate(x)) * self.up(x))


def _scaled(method: Any) -> Any:
    """A decorator that reads an attribute."""

    @functools.wraps(method)
    def scaled(self: Any, x: torch.Tensor) -> Any:
        return method(self, x) * self._outside

    return scaled


class Configured(ScaledMLP):
    """One whose forward reads attributes of many kinds; some may be missing."""

    adapter: Any
    share = of_type = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(scale=1.0)
        self._hidden, self.number, self.factors, self.more = 1.0, 1, [1.0], None
        self._outside, self.p = 1.0, 1.0

    @property
    def hidden(self) -> float:
        return self._hidden

    @_scaled
    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config.scale * self.factors[0] * getattr(self.config, "more", 1.0)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.scale(super().forward(x)) * (self.number * self.hidden * self.share)
        y = y * (self.p * type(self).of_type)
        y = y if self.more is None else self.more(y)
        return self.adapter(y) if hasattr(self, "adapter") else y * getattr(self, "gain", 1.0)


class HiddenAct(nn.Module):
    """QuickGELU with a private number."""

    def __init__(self) -> None:
        super().__init__()
        self._factor = 1.702

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self._factor * x)


class Weights(nn.Module):
    """A layer, a softmax and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.softmax, self.dropout = nn.Linear(WIDTH, 8), nn.Softmax(-1), nn.Dropout(0)

    def forward(self, x: torch.Tensor) -> Any:
        return self.dropout(self.softmax(self.layer(x)))


_SETTINGS: dict[str, tuple[Callable[[], nn.Module], str, str, Any]] = {
    "approximation": (nn.GELU, "", "approximate", "tanh"),
    "dimension": (Weights, "softmax", "dim", 1),
    "function": (ScaledMLP, "", "function", nn.functional.gelu),
    "factor": (ScaledMLP, "", "factor", 3.0),
    "epsilon": (PlainRMSNorm, "", "variance_epsilon", 0.5),
    "offset": (lambda: PlainRMSNorm(1.0), "", "offset", 3.0),
    "factor of a base class": (Configured, "", "factor", 3.0),
    "factor of a configuration": (Configured, "config", "scale", 3.0),
    "new in a configuration": (Configured, "config", "more", 3.0),
    "read by a decorator": (Configured, "", "_outside", 3.0),
    "rate of its own": (Configured, "", "p", 3.0),
    "private factor": (Configured, "", "_hidden", 3.0),
    "private factor of an activation": (
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), HiddenAct()),
        *("1", "_factor", 3.0),
    ),
    "integer": (Configured, "", "number", 3),
    "list": (Configured, "", "factors", [3.0]),
    "parameter": (Configured, "", "factor", nn.Parameter(torch.tensor(3.0))),
    "module": (Configured, "", "more", nn.Tanh()),
    "method": (Configured, "", "scale", torch.tanh),
    "attribute of the class": (Configured, "", "share", 3.0),
    "new module": (Configured, "", "adapter", nn.Tanh()),
    "new attribute": (Configured, "", "gain", 3.0),
    "partial": (
        Configured,
        *("", "function", functools.partial(nn.functional.gelu, approximate="tanh")),
    ),
}


def _get_part(model: Any, path: str) -> Any:
    return model.config if path == "config" else model.get_submodule(path)


@pytest.mark.parametrize("kind", _SETTINGS)
@pytest.mark.usefixtures("own_graphs")
def test_settings_are_those_of_now(kind: str) -> None:
    """An attribute that changes after fuse(), also in a copy."""
    make, part, name, value = _SETTINGS[kind]
    model, x = make(), torch.randn(3, 5, WIDTH, requires_grad=True)
    before = run(model, x)
    fused = torchweld.fuse(copy.deepcopy(model))
    run(fused, x)  # captures
    is_one_pass = kind in ("approximation", "dimension")
    assert is_one_pass or torchweld.explain_fusion(fused)[0].welded
    for one in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        torch.testing.assert_close(run(one, x), before, **numerics.SUMMED)
        setattr(_get_part(one, part), name, value)
        setattr(_get_part(model, part), name, value)
        expected = run(model, x)
        assert not torch.allclose(expected[0], before[0], **numerics.SUMMED)
        torch.testing.assert_close(run(one, x), expected, **numerics.SUMMED)


@pytest.mark.parametrize("name", ["forward", "scale", "of_type"])
@pytest.mark.usefixtures("own_graphs")
def test_methods_are_those_of_now(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody replaces in the class after fuse()."""
    x, fused = torch.randn(3, 5, WIDTH), torchweld.fuse(Configured())
    assert isinstance(fused, Weld)
    monkeypatch.setattr(Configured, name, 3.0 if name == "of_type" else lambda self, y: 3 * y)
    torch.testing.assert_close(fused(x), torchweld.unfuse(copy.deepcopy(fused))(x))


@pytest.mark.usefixtures("own_graphs")
def test_a_block_of_a_layer_may_be_set() -> None:
    layer: Any = nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0)
    x, fused = torch.randn(3, 5, WIDTH), torchweld.fuse(copy.deepcopy(layer))
    for each in (layer, fused):
        own = each._ff_block
        each._ff_block = lambda y, own=own: 3 * own(y)
    torch.testing.assert_close(fused(x), layer(x), **numerics.SUMMED)


class OtherAttention(nn.Module):
    """An attention whose arguments are in another order."""

    batch_first = False

    def forward(
        self, query: Any, key: Any, value: Any, *, attn_mask: Any, key_padding_mask: Any, **_: Any
    ) -> Any:
        assert attn_mask is not None
        assert key_padding_mask is None
        return query * attn_mask.sum(), None


@pytest.mark.usefixtures("own_graphs")
def test_another_attention_in_a_layer() -> None:
    model, mask = nn.TransformerDecoderLayer(WIDTH, 2, 32, 0.0), torch.ones(3, 3)
    fused = torchweld.fuse(copy.deepcopy(model))
    for one in (model, fused):
        one.self_attn = OtherAttention()  # type: ignore[assignment]
    x = torch.randn(3, 5, WIDTH)
    expected = model(x, x, tgt_mask=mask)
    torch.testing.assert_close(fused(x, x, tgt_mask=mask), expected, **numerics.SUMMED)


@pytest.mark.usefixtures("own_graphs")
def test_a_compiled_sequence_compiles_again_after_unfuse() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU()), torch.randn(3, WIDTH)
    expected = model(x)
    compiled = torch.compile(torchweld.fuse(model), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    torchweld.unfuse(model)
    torch.testing.assert_close(compiled(x), expected)


@pytest.mark.usefixtures("own_graphs")
def test_a_trace_has_fused_attention_as_a_leaf() -> None:
    model = Repeated(nn.MultiheadAttention(WIDTH, 4), 3)
    x = torch.randn(3, 5, WIDTH)
    expected = model.module(x, x, x)
    traced = torch.fx.symbolic_trace(torchweld.fuse(model))
    torch.testing.assert_close(traced(x), expected, **numerics.SUMMED)


@pytest.mark.filterwarnings("ignore")  # of torch's future
def test_torchs_quantisation_after_fuse() -> None:
    """torch.ao replaces layers of exact classes."""
    parts = (nn.Linear(WIDTH, 96), nn.GELU(), nn.Linear(96, WIDTH), nn.LayerNorm(WIDTH))
    model, x = nn.Sequential(nn.Sequential(*parts)), torch.randn(3, WIDTH)
    fused = torchweld.fuse(copy.deepcopy(model))
    quantize = torch.ao.quantization.quantize_dynamic
    expected, found = (quantize(each, {nn.Linear}) for each in (model, fused))
    assert [type(part) for part in found[0]][:2] == [type(part) for part in expected[0]][:2]
    torch.testing.assert_close(found(x), expected(x))
    assert isinstance(fused, Weld)


def _layer(activation: nn.Module) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.0, activation)


_MOVED: dict[str, tuple[Callable[[Any], nn.Module], str]] = {
    "pair": (lambda activation: nn.Sequential(nn.Linear(WIDTH, 32), activation), "0"),
    "layer": (_layer, "linear1"),
    "norm": (lambda activation: nn.Sequential(nn.BatchNorm1d(WIDTH), activation), "0"),
}


@pytest.mark.parametrize("kind", _MOVED)
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.usefixtures("own_graphs")
def test_layers_that_move_after_fuse(kind: str, shares: bool) -> None:
    """Two blocks of other activations exchange their layers, or share one."""
    make, name = _MOVED[kind]
    blocks = nn.ModuleList([make(nn.GELU()), make(nn.SiLU())]).eval()
    fused = torchweld.fuse(copy.deepcopy(blocks))
    x = torch.randn(9, WIDTH, requires_grad=True)
    for each in fused:  # captures
        run(each, x)
    assert all(row.welded for row in torchweld.explain_fusion(fused))
    found: list[list[torch.Tensor]] = []
    for first, second in (blocks, fused):
        layers = getattr(first, name), getattr(second, name)
        setattr(first, name, layers[1])
        setattr(second, name, layers[1 if shares else 0])
        found.append([*run(first, x), *run(second, x)])
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, **numerics.SUMMED)


@pytest.mark.filterwarnings("ignore")  # of torch.jit, which is deprecated, and of sizes it keeps
@pytest.mark.usefixtures("own_graphs")
def test_a_layer_is_traced_by_jit() -> None:
    """With gradients, where our attention serves; the trace takes other lengths."""
    layer = torchweld.fuse(nn.TransformerEncoderLayer(WIDTH, 4, 128, 0.0, batch_first=True))
    traced: Any = torch.jit.trace(layer, torch.randn(2, 9, WIDTH), check_trace=False)
    for length in (9, 13):
        x = torch.randn(2, length, WIDTH)
        torch.testing.assert_close(traced(x), layer(x), **numerics.SUMMED)


@pytest.mark.parametrize("kind", ["pair", "layer"])
@pytest.mark.usefixtures("own_graphs")
def test_global_hooks_see_every_module(kind: str) -> None:
    """register_module_forward_hook after fuse(): the results of modules that a weld would skip."""
    pair = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, nn.GELU())
    model: Any = pair if kind == "pair" else layer
    x = torch.randn(3, 5, WIDTH, requires_grad=True)
    seen: list[list[tuple[str, Any]]] = []
    for change in (torchweld.unfuse, torchweld.fuse):
        change(model)
        seen.append([])
        hook = nn.modules.module.register_module_forward_hook(
            lambda module, _, y: seen[-1].append((type(module).__name__, y))
        )
        model(x)
        hook.remove()
    assert [name for name, _ in seen[0]] == [name for name, _ in seen[1]]
    for (_, theirs), (_, mine) in zip(*seen, strict=True):
        if isinstance(mine, torch.Tensor):
            torch.testing.assert_close(mine, theirs, **numerics.SUMMED)


def _masks(batch: int, heads: int) -> dict[str, dict[str, torch.Tensor]]:
    padding = torch.zeros(batch, LENGTH, dtype=torch.bool)
    padding[0, -7:] = True
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "boolean": {"attn_mask": causal},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
        "added": {"attn_mask": torch.randn(LENGTH, LENGTH)},
        "added_to_each_head": {"attn_mask": torch.randn(batch * heads, LENGTH, LENGTH)},
        "added_and_padding": {
            "attn_mask": torch.randn(LENGTH, LENGTH),
            "key_padding_mask": torch.randn(batch, LENGTH),
        },
    }


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", _masks(1, 1))
@pytest.mark.usefixtures("own_graphs")
def test_attention_with_masks(name: str, batch_first: bool) -> None:
    """Results, weights and gradients equal torch's, in self and cross attention."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, 4, batch_first=batch_first)
    shape = (2, LENGTH, WIDTH) if batch_first else (LENGTH, 2, WIDTH)
    x, memory = (torch.randn(shape, requires_grad=True) for _ in range(2))
    masks = _masks(2, 4)[name]
    calls = [lambda: run(attention, x, x, x, **masks)]
    calls.append(lambda: run(attention, x, memory, memory, **masks))
    check_fused(attention, *calls, **numerics.CHAINED_SMALL)


@pytest.mark.parametrize("masked", ["nothing", "causal", "padded", "both", "else"])
@pytest.mark.usefixtures("own_graphs")
def test_attention_without_weights(masked: str) -> None:
    """Results and gradients equal torch's."""
    torch.manual_seed(0)
    length = 96
    attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    x = torch.randn(4, length, WIDTH, requires_grad=True)
    padding = torch.zeros(4, length, dtype=torch.bool)
    padding[1, 40:] = True
    given: dict[str, Any] = {"need_weights": False}
    if masked in ("causal", "both"):
        given["attn_mask"] = torch.ones(length, length, dtype=torch.bool).triu(1)
        given["is_causal"] = True
    if masked in ("padded", "both"):
        given["key_padding_mask"] = padding
    if masked == "else":
        given["attn_mask"] = torch.randn(length, length)
    check_fused(attention, lambda: run(attention, x, x, x, **given), **numerics.CHAINED_SMALL)


class Scaled(nn.Module):
    """Torch's attention, with a dropout in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (4, -1)).transpose(1, 2)
        p = 0.5 * self.training
        return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=p, is_causal=True)


class ByHand(nn.MultiheadAttention):
    """Torch's attention of one input, by our ops."""

    def forward(self, x: torch.Tensor, need_weights: bool) -> tuple[torch.Tensor, Any]:  # type: ignore[override]
        made = nn.functional.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in made)
        weights = None
        if need_weights:
            scores = functional.softmax_dropout(q @ k.mT, scale=self.head_dim**-0.5, p=self.dropout)
            y, weights = scores @ v, scores.mean(1)
        else:
            y = functional.block_sparse_attention(q, k, v, DENSE.of(q, k), dropout_p=self.dropout)
        return self.out_proj(y.transpose(1, 2).flatten(2)), weights


@pytest.mark.usefixtures("own_graphs")
def test_attention_with_a_dropout() -> None:
    """Torch's keeps all scores there, also within its multi-head attention, which is one node."""
    x = torch.randn(2, LENGTH, WIDTH, requires_grad=True)
    model = torchweld.fuse(Scaled())
    q = x.unflatten(-1, (4, -1)).transpose(1, 2)
    ours = functional.block_sparse_attention
    expected = run(lambda x: ours(q, q, q, DENSE.of(q, q), causal=True, dropout_p=0.5), x)
    torch.testing.assert_close(run(model, x), expected, **numerics.SUMMED)
    heads = nn.MultiheadAttention(WIDTH, 4, dropout=0.5, batch_first=True)
    by_hand = ByHand(WIDTH, 4, dropout=0.5, batch_first=True)
    by_hand.load_state_dict(heads.state_dict())
    fused = torchweld.fuse(copy.deepcopy(heads))
    for weights in (False, True):
        found = run(fused, x, x, x, need_weights=weights)
        torch.testing.assert_close(found, run(by_hand, x, weights), **numerics.SUMMED)
    ops = [row.becomes for row in torchweld.explain_fusion(fused)]
    assert ops == ["multihead_attention"]
    plain, fused = copy.deepcopy(heads).eval(), fused.eval()
    torch.testing.assert_close(run(fused, x, x, x), run(plain, x, x, x), **numerics.SUMMED)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's nested tensors
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.usefixtures("own_graphs")
def test_a_transformer_with_masks(norm_first: bool) -> None:
    """torch.nn.Transformer, causal and padded, in training and in evaluation without gradients."""
    torch.manual_seed(0)
    model = nn.Transformer(
        WIDTH, 4, 2, 2, 128, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    source, target = torch.randn(2, LENGTH, WIDTH), torch.randn(2, LENGTH, WIDTH)
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[0, -5:] = True
    masks = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(LENGTH),
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
        "tgt_is_causal": True,
    }

    def run_without_gradients() -> list[torch.Tensor]:
        with torch.no_grad():
            return [model.train(training)(source, target, **masks) for training in (True, False)]

    train = functools.partial(run, model, source, target, **masks)
    check_fused(model, train, run_without_gradients, **numerics.CHAINED)
    assert isinstance(model.encoder.layers[0], Weld)


@pytest.mark.usefixtures("own_graphs")
def test_synchronised_batch_norms() -> None:
    """A batch norm of a fused model may be converted."""
    model = Normalized().eval()
    x = torch.randn(32, WIDTH)
    expected = model(x)
    torchweld.fuse(model)
    torch.testing.assert_close(model(x), expected)
    nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(model.bn) is nn.SyncBatchNorm
    torch.testing.assert_close(model(x), expected)


@pytest.mark.usefixtures("own_graphs")
def test_running_statistics() -> None:
    """A fused batch norm's: after batches, in evaluation, and recomputed by swa_utils."""
    torch.manual_seed(0)
    plain, batches = Normalized(), [torch.randn(32, WIDTH) + i for i in range(3)]
    model = torchweld.fuse(copy.deepcopy(plain))
    for found in (plain, model):
        for x in batches:
            found(x)
    for _ in range(2):
        torch.testing.assert_close([*model.buffers()], [*plain.buffers()])
        torch.testing.assert_close(model.eval()(batches[0]), plain.eval()(batches[0]))
        for found in (plain, model):
            torch.optim.swa_utils.update_bn(batches, found)
    images = torch.randn(4, 96, 5)
    torch.testing.assert_close(model.bn(images), plain.bn(images))
