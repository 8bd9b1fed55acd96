"""Plans for modules that no recipe knows, and compiled blocks: as one process, or an error."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import torchweld
from comparing import assert_grads, shares_rows, whole_of
from processes import on
from refusing import refuses
from stack import MODELS
from stack_seams import keep
from torchweld.distributed import (
    CountCollectives,
    LayerSeeds,
    grad_norm,
    ring_slice,
    sequence_plan,
    tp_plan,
)
from torchweld.distributed.train.feasibility import check_matrices
from torchweld.errors import ArgumentError
from torchweld.sparse import BlockLayout
from transformer import Transformer, make_batch

WIDTH, HEADS, WORDS, LENGTH = 32, 4, 40, 32


class _Norm(nn.Module):
    """A norm of nobody's class, as Cohere's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.scale


class _Attention(nn.Module):
    def __init__(self, norm: Any, key_heads: int = HEADS, ours: bool = True) -> None:
        super().__init__()
        self.head_dim = WIDTH // HEADS
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, key_heads * self.head_dim) for _ in "kv")
        self.o_proj = nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = norm(self.head_dim), norm(self.head_dim)
        if ours:
            self.core = torchweld.nn.BlockSparseAttention(
                lambda keys: BlockLayout.dense(keys, block=16), causal=True
            )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (f(hidden_states).unflatten(-1, (-1, self.head_dim)) for f in layers)
        q, k, v = (x.transpose(1, 2) for x in (self.q_norm(q), self.k_norm(k), v))
        y = self.core(q, k, v) if hasattr(self, "core") else _attend(q, k, v)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class _Experts(nn.Module):
    """A router, and experts with the names that a plan knows."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList([torchweld.nn.GatedMLP(WIDTH, 24) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, WIDTH)
        weights = nn.functional.linear(rows, self.router.weight).softmax(-1)
        chosen = weights.argmax(-1)
        y = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero().squeeze(-1)
            y = y.index_add(0, at, expert(rows[at]) * weights[at, number, None])
        return y.view_as(x)


class _NormedMLP(nn.Module):
    """Names that a plan knows, and a norm between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(WIDTH, 48), _Norm(48), nn.Linear(48, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.norm(self.fc1(x)).relu())


class _MLP(torchweld.nn.MLP):
    def __init__(self) -> None:
        super().__init__(WIDTH, 48)


class _Block(nn.Module):
    def __init__(self, norm: Any, mlp: Any) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention, self.mlp = (
            norm(WIDTH),
            _Norm(WIDTH),
            _Attention(norm),
            mlp(),
        )
        self.layer_scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.layer_scale * self.attention(hidden_states=self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _Model(nn.Module):
    """A GPT whose embedding is its head too, with a pooler and learnt positions."""

    def __init__(self, norm: Any = torchweld.nn.RMSNorm, mlp: Any = _Experts) -> None:
        super().__init__()
        self.token, self.places = (
            nn.Embedding(WORDS, WIDTH),
            nn.Parameter(torch.rand(LENGTH, WIDTH)),
        )
        self.blocks = nn.ModuleList([_Block(norm, mlp), _Block(norm, _MLP)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.pooler = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head.weight = self.token.weight

    def forward(self, x: torch.Tensor, first: int = 0, pool: bool = True) -> torch.Tensor:
        x = self.token(x) + self.places[first : first + x.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x + self.pooler(x, x, x)[0] if pool else x)


def _model(*kinds: Any) -> _Model:
    torch.manual_seed(0)
    return _Model(*kinds).double()


def _losses(model: Any, x: torch.Tensor, **how: Any) -> torch.Tensor:
    return model(x, **how).log_softmax(-1).gather(-1, ((x + 1) % WORDS)[..., None])


def _tokens() -> torch.Tensor:
    return torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(1))


KINDS = {
    "experts": (torchweld.nn.RMSNorm, _Experts),
    "own norms": (_Norm, _NormedMLP),
    "ours": (nn.LayerNorm, _MLP),
}


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("sequence", [False, True])
@on(2)
def test_trains_as_one_process(rank: int, sequence: bool, kinds: tuple[Any, ...]) -> None:
    """Two steps with clipped gradients and scaled losses; embedding and head stay one tensor."""
    one, many = _model(*kinds), _model(*kinds)
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(many, mesh, tp_plan(many, sequence))
    assert many.head.weight is many.token.weight
    assert all(isinstance(p, DTensor) for p in many.parameters())
    optimizers = [torchweld.optim.SGD(m.parameters(), lr=0.1) for m in (one, many)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in "12"]
    for _ in range(2):
        norms = []
        for model, optimizer, scaler in zip((one, many), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(-_losses(model, _tokens()).mean()).backward()
            scaler.unscale_(optimizer)
            norms.append(whole_of(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            torch.testing.assert_close(
                grad_norm(model.parameters()).double(),
                torch.tensor(0.5).double(),
                rtol=1e-5,
                atol=0,
            )
            scaler.step(optimizer)
            scaler.update()
        torch.testing.assert_close(*norms)
        wanted = dict(one.named_parameters())
        assert_grads(many, one)
        for name, p in many.named_parameters():
            torch.testing.assert_close(whole_of(p), wanted[name])
    for row, is_of in (("norms on heads", _of_heads), ("parameters no recipe knows", _unknown)):
        grads = [(p.grad, wanted[n].grad) for n, p in many.named_parameters() if is_of(n)]
        assert grads
        keep(f"{row}, TP{' + SP' * sequence}", grads)


def _of_heads(name: str) -> bool:
    return "q_norm" in name or "k_norm" in name


def _unknown(name: str) -> bool:
    own = ("layer_scale", "scale", "router", "experts", "places", "pooler", "token")
    return not _of_heads(name) and any(part in name for part in own)


@pytest.mark.parametrize("count", [2, 4])
@shares_rows
@on("count")
def test_ring_as_one_process(rank: int, count: int) -> None:
    """Along a ring, and along ring and tensor: each process has a slice of the sequence."""
    one, many = _model(*KINDS["own norms"]), _model(*KINDS["own norms"])
    tensor = count // 2
    del one.pooler, many.pooler
    mesh = init_device_mesh("cpu", (2, tensor), mesh_dim_names=("ring", "tensor"))
    ring = mesh.get_group("ring")
    if tensor > 1:
        parallelize_module(many, mesh, tp_plan(many, ring=True))
    else:
        parallelize_module(many, mesh["ring"], sequence_plan(many))
    tokens = _tokens()
    wanted = _losses(one, tokens, pool=False)
    wanted.sum().backward()
    first = int(ring_slice(torch.arange(LENGTH), 0, ring)[0])
    found = _losses(many, ring_slice(tokens, 1, ring), first=first, pool=False)
    torch.testing.assert_close(found, ring_slice(wanted, 1, ring))
    found.sum().backward()
    assert_grads(many, one)


# --- What is refused ------------------------------------------------------------------------------


@on(2)
def test_sizes_that_do_not_divide(rank: int) -> None:
    """Sizes that devices do not divide: an error on every rank, and nothing has changed."""
    mesh = init_device_mesh("cpu", (2,))
    for name, layer, came in (
        ("k_proj", nn.Linear(WIDTH, WIDTH // HEADS), "1 heads"),
        ("q_proj", nn.Linear(WIDTH, 3 * WIDTH // HEADS), "3 heads"),
    ):
        model = _model(_Norm, _MLP)
        setattr(model.blocks[1].attention, name, layer)
        with pytest.raises(ArgumentError, match=f"{came} in blocks.1.attention.{name}"):
            parallelize_module(model, mesh, tp_plan(model))
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    model = _model(_Norm, _MLP)
    model.blocks[1].mlp = torchweld.nn.GatedMLP(WIDTH, 47)
    with pytest.raises(ArgumentError, match=r"47 features in blocks.1.mlp.gate_proj"):
        parallelize_module(model, mesh, tp_plan(model))
    model = _model(_Norm, _MLP)
    parallelize_module(model, mesh, tp_plan(model, True))
    with pytest.raises(ArgumentError, match="31 tokens") as raised:
        model(_tokens()[:, :31])
    keep("a length that devices do not divide, TP + SP", error=str(raised.value))


def _with(**parts: Any) -> nn.Module:
    """A model whose first attention has these parts in place of its own, or besides."""
    model = _model(_Norm, _MLP)
    for name, part in parts.items():
        setattr(model.blocks[0].attention, name, part)
    return model


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"o_proj": nn.Identity()}, "output layer in blocks.0.attention"),
        ({"q_norm": nn.LayerNorm(WIDTH)}, "blocks.0.attention.q_norm"),
        ({"norms": nn.ModuleList([nn.LayerNorm(8)])}, "blocks.0.attention.norms.0"),
        ({"sinks": nn.Parameter(torch.zeros(HEADS))}, "in attention: blocks.0.attention"),
        ({"gate": nn.Linear(WIDTH, HEADS)}, "blocks.0.attention.gate"),
    ],
)
def test_attention_known_by_half(parts: dict[str, Any], message: str) -> None:
    refuses(message, tp_plan, _with(**parts))


def test_attention_of_others_does_not_ring() -> None:
    """Each process would attend within its own slice."""
    model = _model(_Norm, _MLP)
    refuses("pooler has none", sequence_plan, model)
    del model.pooler
    sequence_plan(model)
    model.blocks[1].attention = _Attention(_Norm, ours=False)
    for plan in (sequence_plan, lambda model: tp_plan(model, ring=True)):
        refuses(r"blocks.1.attention has none", plan, model)


def test_other_tokens_are_elsewhere() -> None:
    """A convolution in a block would see a part of the sequence; a layer is no model."""
    refuses("model", tp_plan, nn.Linear(2, 2))
    model = _model(_Norm, _MLP)
    tp_plan(model, True)
    model.blocks[0].shift = nn.Conv1d(WIDTH, WIDTH, 3)
    tp_plan(model)
    refuses(r"Conv1d, blocks.0.shift", tp_plan, model, True)


# --- Trials on fake tensors -----------------------------------------------------------------------


class _Reader(torch.nn.Module):
    """An attention whose code reads the whole width."""

    def __init__(self, reads_width: bool) -> None:
        super().__init__()
        self.head_dim, self.reads_width = 8, reads_width
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            torch.nn.Linear(32, 32) for _ in range(4)
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(hidden_states) for f in (self.q_proj, self.k_proj, self.v_proj))
        heads = (x.unflatten(-1, (-1, 8)).transpose(1, 2) for x in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)
        y = y.reshape(*y.shape[:2], 32) if self.reads_width else y.flatten(2)
        return self.o_proj(y)  # type: ignore[no-any-return]


class _Named(torch.nn.Module):
    """A model that names its inputs, as transformers' models do."""

    main_input_name, config = "input_ids", None

    def __init__(self, reads_width: bool = False, chooses: bool = False) -> None:
        super().__init__()
        self.chooses = chooses
        self.embed = torch.nn.Embedding(20, 32)
        self.layers = torch.nn.ModuleList([_Reader(reads_width)])

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        if self.chooses:
            x = x[:, attention_mask[0].nonzero().flatten()]
        return self.layers[0](x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_plan_is_tried_on_fake_tensors(device: str, sequence: bool) -> None:
    """A module that needs all features is named; the trial changes neither model nor torch."""
    with torch.device(device):
        model, good = _Named(True), _Named()
        chooses = _Named(True, chooses=True)
    before, state = copy.deepcopy(model), torch.get_rng_state()
    refuses(r"whose layers\.0 fails on 2 devices \(shape", check_matrices, model, 2, sequence)
    check_matrices(good, 2, sequence)
    check_matrices(chooses, 2, sequence)  # its code depends on values, so that nothing is known
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.distributed.is_initialized()
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        assert type(new) is torch.nn.Parameter
        assert new.device == old.device
        assert device == "meta" or torch.equal(old, new)
    assert model(*[torch.zeros((1, 4), dtype=torch.int64, device=device)] * 2).shape == (1, 4, 32)


def test_positions_are_no_tokens() -> None:
    """Even if there are more of them than words."""
    model: Any = _Named()
    model.positions = torch.nn.Embedding(50, 32)
    by_size = tp_plan(model)
    model.get_input_embeddings = lambda: model.embed
    named = tp_plan(model)
    assert type(named["embed"]) is type(by_size["positions"])
    assert type(named["positions"]) is type(by_size["embed"]) is not type(named["embed"])


@on(2)
def test_a_failed_trial_changes_nothing(rank: int) -> None:
    model = _Named(True)
    with pytest.raises(ArgumentError, match=r"whose layers\.0 fails on 2 devices"):
        parallelize_module(model, init_device_mesh("cpu", (2,)), tp_plan(model))
    assert {type(p) for p in model.parameters()} == {torch.nn.Parameter}
    good = _Named()
    whole = copy.deepcopy(good)
    parallelize_module(good, init_device_mesh("cpu", (2,)), tp_plan(good))
    given = [torch.arange(8).view(2, 4)] * 2
    torch.testing.assert_close(good(*given), whole(*given))


# --- Compiled blocks ------------------------------------------------------------------------------


SETTINGS = {name: replace(s, layers=2) for name, s in MODELS.items()}


def _logits(model: Any, tokens: torch.Tensor, has_places: bool) -> torch.Tensor:
    """Without places the embedding's result enters the first block, as with rotary positions."""
    if has_places:
        return model(tokens)  # type: ignore[no-any-return]
    x = model.token(tokens)
    for block in model.blocks.values():
        x = block(x)
    return model.head(model.norm(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "sequence", "has_places", "compiler"),
    [
        ("BERT", False, False, "aot_eager"),
        ("BERT", True, False, "inductor"),
        ("GPT", True, True, "aot_eager"),
        ("sparse GPT", False, True, "aot_eager"),
    ],
)
@on(2)
def test_a_planned_block_compiles(
    rank: int, name: str, sequence: bool, has_places: bool, compiler: str
) -> None:
    """Two steps: gradients of one process, and the collectives of blocks that are not compiled."""
    tokens, targets = make_batch(SETTINGS[name], 2, 1)
    runs, models = [], []
    torch.compiler.reset()  # processes go from one test to the next
    for compiled in (None, False, True):
        torch.manual_seed(0)
        model: Any = Transformer(SETTINGS[name]).double()
        if compiled is not None:
            parallelize_module(model, init_device_mesh("cpu", (2,)), tp_plan(model, sequence))
        with torch.no_grad():
            model(tokens)  # makes the layout
        for key, block in model.blocks.items() if compiled else ():
            model.blocks[key] = torch.compile(block, fullgraph=True, backend=compiler)
        seeds = LayerSeeds(model.blocks.items())
        for step in range(2):
            seeds.begin(step)
            with CountCollectives() as counted:
                logits = _logits(model, tokens, has_places)
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), targets.flatten()
                ).backward()
        models.append([whole_of(p.grad) for p in model.parameters() if p.grad is not None])
        runs.append((dict(counted.calls), dict(counted.bytes)))
    assert runs[1] == runs[2]
    for parallel in models[1:]:
        assert len(parallel) == len(models[0])
        torch.testing.assert_close([*parallel], [*models[0]], rtol=1e-11, atol=1e-13)
