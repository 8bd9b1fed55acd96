"""Each documented form of a call is warm from its second time on, keeps nothing and may vary.

A call that is never like an earlier one takes the whole path each time, which no result shows; one
that keeps an argument alive shows in memory only. Both are found by counts and by weak references.
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from torchweld import functional as fused
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.warm import cache
from torchweld.random import Shard
from torchweld.sparse import BlockLayout
from walking import find_returns

DOCS = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
WIDTH = 32
Given = dict[str, Any]


class Form(NamedTuple):
    """A form of a call: its function, its name in the docs, and its arguments of so many rows."""

    op: str
    words: str
    make: Callable[[int], Given]
    has_gradients: bool = True

    def __str__(self) -> str:
        return f"{self.op}: {self.words}"


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


def _w(count: int = WIDTH) -> torch.Tensor:
    return (torch.rand(count) + 0.5).requires_grad_()


def _row(rows: int, **more: Any) -> Given:
    return {"input": _x(rows, WIDTH), **more}


def _residual(rows: int, **more: Any) -> Given:
    return {"input": _x(rows, WIDTH), "residual": _x(rows, WIDTH), "weight": _w(), **more}


def _same(rows: int, first: str, second: str, **more: Any) -> Given:
    x = _x(rows, WIDTH)
    return {first: x, second: x, **more}


def _turn(tokens: int, *lead: int, **more: Any) -> Given:
    angles = torch.rand(*lead, tokens, WIDTH // 2)
    return {"x": _x(2, 3, tokens, WIDTH), "cos": angles.cos(), "sin": angles.sin(), **more}


def _turn_rows(tokens: int) -> Given:
    """Tokens before heads."""
    return _turn(tokens, 2) | {"x": _x(2, tokens, 3, WIDTH), "seq_dim": -3}


def _turn_documents(tokens: int) -> Given:
    return _turn(tokens, cu_seqlens=torch.tensor([0, 2, tokens])) | {"x": _x(3, tokens, WIDTH)}


def _turn_complex(tokens: int) -> Given:
    angles = torch.polar(torch.ones(tokens, WIDTH // 2), torch.rand(tokens, WIDTH // 2))
    return {"x": _x(2, 3, tokens, WIDTH), "cos": angles, "sin": None}


def _turn_both(tokens: int) -> Given:
    given = _turn(tokens, 2)
    q = given.pop("x")
    weights = {"q_norm_weight": _w(), "k_norm_weight": _w(), "norm_eps": 1e-6}
    return given | weights | {"q": q, "k": _x(2, 1, tokens, WIDTH)}


def _attend(tokens: int, heads: int = 4, key_heads: int = 4, **more: Any) -> Given:
    q, k, v = (_x(2, n, tokens, WIDTH) for n in (heads, key_heads, key_heads))
    layout = BlockLayout.sliding_window(tokens, 3, block=16)
    return {"q": q, "k": k, "v": v, "layout": layout, **more}


def _attend_documents(tokens: int) -> Given:
    layout = BlockLayout.documents(torch.tensor([0, 2, tokens]), block=16)
    return _attend(tokens) | {"layout": layout}


def _attend_same(tokens: int) -> Given:
    given = _attend(tokens)
    return given | {"v": given["k"]}


def _attend_key_heads(tokens: int) -> Given:
    layout = BlockLayout.random(tokens, 2, num_heads=2, different_layout_per_head=True, block=16)
    return _attend(tokens, 4, 2) | {"layout": layout}


def _decode(tokens: int) -> Given:
    given = _attend(tokens)
    layout = BlockLayout.dense((1, tokens), block=16)
    return given | {"q": _x(2, 4, 1, WIDTH), "layout": layout}


def _layer(rows: int, **more: Any) -> Given:
    return {"input": _x(rows, WIDTH), "weight": _x(WIDTH, WIDTH), "bias": _x(WIDTH), **more}


def _norm_columns(**more: Any) -> Given:
    running = {"running_mean": torch.zeros(WIDTH), "running_var": torch.ones(WIDTH)}
    return running | more


def _classes(rows: int, classes: int = WIDTH) -> torch.Tensor:
    return torch.arange(rows) % classes


def _of_logits(rows: int, **more: Any) -> Given:
    return {"input": _x(rows, WIDTH), "target": _classes(rows), **more}


def _of_layer(rows: int, classes: int = WIDTH, **more: Any) -> Given:
    layer = {"input": _x(rows, WIDTH), "linear_weight": _x(classes, WIDTH)}
    return layer | {"target": _classes(rows, classes)} | more


def _mix(rows: int) -> Given:
    weights = {"gate_up": _x(4, 2 * WIDTH, WIDTH), "down": _x(4, WIDTH, WIDTH)}
    indices = torch.stack([torch.arange(rows) % 4, (torch.arange(rows) + 1) % 4], 1)
    return {"input": _x(rows, WIDTH), **weights, "indices": indices, "weights": torch.rand(rows, 2)}


FORMS = [
    Form("layer_norm", "plain", lambda n: _row(n, normalized_shape=[WIDTH], weight=_w())),
    Form("rms_norm", "plain", lambda n: _row(n, normalized_shape=(WIDTH,), weight=_w())),
    Form("bias_act", "plain", lambda n: _row(n, bias=_w())),
    Form("gated_act", "two tensors", lambda n: {"gate": _x(n, WIDTH), "up": _x(n, WIDTH)}),
    Form("gated_act", "one tensor twice", lambda n: _same(n, "gate", "up")),
    Form(
        "bias_dropout_add",
        "a seed is drawn",
        lambda n: _row(n, bias=_w(), residual=_x(n, WIDTH), p=0.2),
    ),
    Form(
        "bias_dropout_add",
        "`seed=` an integer",
        lambda n: _row(n, bias=None, residual=_x(n, WIDTH), p=0.2, seed=n),
    ),
    Form(
        "bias_dropout_add",
        "`seed=` a tensor",
        lambda n: _row(n, bias=None, residual=_x(n, WIDTH), p=0.2, seed=torch.tensor(n)),
    ),
    Form(
        "bias_dropout_add",
        "the residual is the input",
        lambda n: _same(n, "input", "residual", bias=None),
    ),
    Form("dropout_add_layer_norm", "plain", lambda n: _residual(n, bias=_w(), p=0.1)),
    Form("dropout_add_layer_norm", "`residual=None`", lambda n: _residual(n) | {"residual": None}),
    Form(
        "dropout_add_rms_norm",
        "the residual is the input",
        lambda n: _same(n, "input", "residual", weight=_w()),
    ),
    Form("dropout_add_rms_norm", "`return_residual`", lambda n: _residual(n, return_residual=True)),
    Form(
        "dropout_add_rms_norm",
        "`shard`",
        lambda n: _residual(n, p=0.1, shard=Shard([4096, WIDTH], [8, 0])),
    ),
    Form("softmax_dropout", "`mask`", lambda n: _row(n, mask=torch.rand(n, WIDTH) > 0.5, p=0.1)),
    Form("softmax_dropout", "`causal`", lambda n: _row(n, causal=True)),
    Form("rotary_embedding", "cos [tokens, angles]", _turn),
    Form("rotary_embedding", "cos [batch, tokens, angles]", lambda n: _turn(n, 2)),
    Form(
        "rotary_embedding",
        "`position_ids`",
        lambda n: _turn(n, position_ids=torch.arange(n).expand(2, n)),
    ),
    Form("rotary_embedding", "`cu_seqlens`", _turn_documents),
    Form("rotary_embedding", "`seq_dim=-3`", _turn_rows),
    Form("rotary_embedding", "a complex cos", _turn_complex),
    Form("rotary_embedding", "a norm", lambda n: _turn(n, 2, norm_eps=1e-6, norm_weight=_w())),
    Form("rotary_embedding_qk", "with norms", _turn_both),
    Form("block_sparse_attention", "plain", _attend),
    Form("block_sparse_attention", "a layout of documents", _attend_documents),
    Form("block_sparse_attention", "`sinks`", lambda n: _attend(n, sinks=_w(4))),
    Form(
        "block_sparse_attention", "`alibi_slopes`", lambda n: _attend(n, alibi_slopes=torch.rand(4))
    ),
    Form(
        "block_sparse_attention",
        "`key_padding_mask`",
        lambda n: _attend(n, key_padding_mask=torch.rand(2, n) > 0.9),
    ),
    Form("block_sparse_attention", "a tensor as `bias`", lambda n: _attend(n, bias=_x(2, 4, n, n))),
    Form("block_sparse_attention", "k and v are one tensor", _attend_same),
    Form("block_sparse_attention", "a layout by key head", _attend_key_heads),
    Form("block_sparse_attention", "one query and a cache", _decode),
    Form(
        "block_sparse_attention",
        "dropout and `return_lse`",
        lambda n: _attend(n, dropout_p=0.1, return_lse=True),
    ),
    Form(
        "normalize_act",
        "plain",
        lambda n: _row(n, mean=torch.rand(WIDTH), var=torch.rand(WIDTH), weight=_w()),
    ),
    Form(
        "batch_norm_act", "evaluation", lambda n: _row(n, **_norm_columns(weight=_w(), bias=_w()))
    ),
    Form(
        "batch_norm_act", "training", lambda n: _row(n, **_norm_columns(weight=_w(), training=True))
    ),
    Form("linear_act", "plain", lambda n: _layer(n, activation="silu")),
    Form("linear_gelu", "plain", _layer),
    Form("linear_batch_norm_act", "evaluation", lambda n: _layer(n, **_norm_columns())),
    Form("linear_batch_norm_act", "training", lambda n: _layer(n, **_norm_columns(training=True))),
    Form(
        "mlp",
        "plain",
        lambda n: {
            "input": _x(n, WIDTH),
            "up_weight": _x(64, WIDTH),
            "up_bias": _x(64),
            "down_weight": _x(WIDTH, 64),
            "down_bias": None,
        },
    ),
    Form(
        "gated_mlp",
        "plain",
        lambda n: {
            "input": _x(n, WIDTH),
            "gate_weight": _x(64, WIDTH),
            "up_weight": _x(64, WIDTH),
            "down_weight": _x(WIDTH, 64),
        },
    ),
    Form("experts_mlp", "plain", _mix),
    Form("route", "plain", lambda n: _row(n, k=2)),
    Form(
        "route",
        "groups, `choice_bias`, `token_mask`",
        lambda n: _row(
            n,
            k=2,
            scores="sigmoid",
            groups=4,
            top_groups=2,
            choice_bias=torch.rand(WIDTH),
            token_mask=torch.rand(n) > 0.1,
        ),
    ),
    Form("cross_entropy", "plain", _of_logits),
    Form(
        "cross_entropy",
        "probabilities as target",
        lambda n: _row(n, target=torch.rand(n, WIDTH).softmax(-1)),
    ),
    Form(
        "cross_entropy",
        "`z_loss`, `weight`, `token_weights`",
        lambda n: _of_logits(n, z_loss=1e-3, weight=torch.rand(WIDTH), token_weights=torch.rand(n)),
    ),
    Form("cross_entropy", "`return_lse`", lambda n: _of_logits(n, return_lse=True)),
    Form("linear_cross_entropy", "plain", _of_layer),
    Form(
        "linear_cross_entropy",
        "many classes",
        lambda n: _of_layer(n, 2**12, temperature=torch.rand(n) + 0.5),
    ),
    Form("logprobs", "plain", _of_logits),
    Form("logprobs", "`return_entropy`", lambda n: _of_logits(n, return_entropy=True)),
    Form("linear_logprobs", "plain", _of_layer),
    Form("linear_logprobs", "many classes", lambda n: _of_layer(n, 2**12)),
]
# Those that decide by the number of rows itself, and so take the whole path at each.
OF_ONE_SIZE = {
    "cross_entropy: `return_lse`",
    "cross_entropy: probabilities as target",
}
# The sizes of the test are on both sides of its threshold.
CROSSING = {"linear_logprobs: many classes"}


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    cache.forget()
    yield
    cache.forget()


@pytest.fixture
def missed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The whole paths that calls of the form have taken."""
    seen: list[Any] = []
    scope = getattr(fused, request.node.callspec.params["form"].op).__globals__
    find = scope["_find"]
    monkeypatch.setitem(scope, "_find", lambda *given: seen.append(given[-1]) or find(*given))
    return seen


each = pytest.mark.parametrize("form", FORMS, ids=str)


def _run(form: Form, given: Given, flags: tuple[bool, bool] = (False, False)) -> list[torch.Tensor]:
    """The results, and the gradients of the leaves."""
    torch.manual_seed(5)
    torch.compiler._is_compiling_flag = flags[0]
    results = list(as_tuple(getattr(fused, form.op)(**given)))
    wanted = [y for y in results if y.requires_grad]
    leaves = {id(t): t for t in given.values() if isinstance(t, torch.Tensor) and t.requires_grad}
    generator = torch.Generator().manual_seed(6)
    grads = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in wanted]
    torch.compiler._is_compiling_flag = flags[1]
    if wanted:
        results += torch.autograd.grad(wanted, [*leaves.values()], grads, allow_unused=True)
    return [y for y in results if y is not None]


@each
@pytest.mark.parametrize("trains", [True, False])
def test_the_second_call_is_warm(form: Form, trains: bool, missed: list[Any]) -> None:
    """Rotations with angles of a batch, attention with sinks and others took the whole path each
    time: an argument was made by a view, or two were one tensor. No test counted."""
    given = form.make(48)
    with torch.set_grad_enabled(trains):
        _run(form, given)
        count = len(missed)
        _run(form, given)
        _run(form, form.make(48))
    assert len(missed) == count <= 1  # small inputs of layer_norm are torch's


@each
def test_later_sizes_are_warm_and_have_the_bits_of_cold_calls(
    form: Form, missed: list[Any]
) -> None:
    """Each size of a batch or a cache took the whole path once, at up to 6.7 times torch's time."""
    for rows in (24, 40):
        _run(form, form.make(rows))
    count = len(missed)
    made = [form.make(rows) for rows in (56, 17, 3, 120, 31, 56, 64, 5, 121, 250)]
    copies = [{k: v.clone() if k.startswith("running") else v for k, v in g.items()} for g in made]
    found = [_run(form, given) for given in made]
    if str(form) not in OF_ONE_SIZE:
        assert len(missed) <= count + 2 * (str(form) in CROSSING)
    for given, results in zip(copies, found, strict=True):
        cache.forget()
        cold = _run(form, given)
        assert len(cold) == len(results)
        for one, other in zip(results, cold, strict=True):
            assert one.dtype is other.dtype
            assert one.stride() == other.stride()
            assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@each
def test_another_thread_that_compiles_changes_nothing(
    form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's flag of a compiler that traces is up in all threads. A loss whose forward saw it, and
    whose backward pass did not, failed."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", False)  # and sets it back
    for flags in ((True, False), (False, True), (True, True)):
        results = []
        for each_flags in ((False, False), flags):
            torch.manual_seed(1)
            results.append(_run(form, form.make(24), each_flags))
            cache.forget()
        for one, other in zip(*results, strict=True):
            assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@each
def test_a_cold_call_goes_from_file_to_file(form: Form) -> None:
    """As in tests/tools/test_walks.py, of every form."""
    function = getattr(fused, form.op)
    function(**form.make(48))  # what the process does once
    given = form.make(48)
    cache.forget()
    assert find_returns(lambda: function(**given)) == {}


def test_nothing_of_a_call_is_kept() -> None:
    """The cache kept each layout of 300 batches of documents, up to 4096, on the GPU in its memory;
    the tests of memory had one layout only. One collection of garbage serves all forms."""
    alive: list[tuple[str, weakref.ref[Any]]] = []

    def call(form: Form, rows: int) -> None:
        given = form.make(rows)
        for _ in range(2):
            _run(form, given)
        values = [
            v
            for v in given.values()
            if hasattr(type(v), "__weakref__") or isinstance(v, torch.Tensor)
        ]
        values += [t for v in values if isinstance(v, BlockLayout) for t in v.lists or ()]
        alive.extend((str(form), weakref.ref(v)) for v in values)

    for form in FORMS:
        for rows in (24, 40, 56, 64):
            call(form, rows)
    gc.collect()
    assert {name for name, _ in alive} == {str(form) for form in FORMS}
    assert {name for name, reference in alive if reference() is not None} == set()


def test_the_docs_list_the_forms() -> None:
    table = DOCS.read_text().split("## Call forms")[1].split("\n## ")[0]
    listed = {
        f"{op}: {words.strip()}"
        for op, cell in re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)
        for words in cell.split(";")
    }
    assert listed == {str(form) for form in FORMS}


@pytest.mark.parametrize("rows", [0, 1])
def test_sizes_of_0_and_1_are_never_taken_for_others(rows: int) -> None:
    """They broadcast, and an op may decide otherwise."""
    for n in (24, 40, 56):
        fused.softmax_dropout(torch.randn(2, n, n), torch.rand(n, n) > 0.5)
    x = torch.randn(2, rows, 24)
    warm = fused.softmax_dropout(x, torch.ones(rows, 24, dtype=torch.bool))
    torch.testing.assert_close(warm, x.softmax(-1))


def test_sizes_that_were_equal_stay_equal() -> None:
    for n in (24, 40, 56):
        fused.gated_act(torch.randn(n, WIDTH), torch.randn(n, WIDTH))
    with pytest.raises(ValueError, match="up is of shape"):
        fused.gated_act(torch.randn(30, WIDTH), torch.randn(31, WIDTH))


@pytest.mark.parametrize("n", [48, 30])
def test_strides_are_not_taken_for_others(n: int) -> None:
    for rows in (24, 40, 56):
        fused.rms_norm(torch.randn(2, rows, 3, WIDTH), [WIDTH])
    x = torch.randn(2, WIDTH, n, 3).permute(0, 2, 3, 1)
    found = fused.rms_norm(x, [WIDTH])
    cache.forget()
    assert torch.equal(found, fused.rms_norm(x, [WIDTH]))
    assert found.stride() == fused.rms_norm(x, [WIDTH]).stride()


@pytest.mark.parametrize("name", ["layer_norm", "cross_entropy", "linear_cross_entropy"])
def test_thresholds_hold_for_sizes_that_vary(name: str) -> None:
    """What falls back to torch's op below a threshold does not above it, and vice versa."""
    width = 256
    make: dict[str, Callable[[int], tuple[Any, ...]]] = {
        "layer_norm": lambda n: (torch.randn(n, width), [width]),
        "cross_entropy": lambda n: (torch.randn(n, width), _classes(n, width)),
        "linear_cross_entropy": lambda n: (
            torch.randn(n, 32),
            torch.randn(width, 32),
            _classes(n, width),
        ),
    }
    sizes = (500, 510, 600, 520, 505, 1030, 70, 60, 61, 65, 63, 64, 2000, 4200, 4300, 1020, 1024)
    given = [make[name](n) for n in sizes]
    found = [getattr(fused, name)(*each) for each in given]
    for one, each_given in zip(found, given, strict=True):
        cache.forget()
        assert torch.equal(one, getattr(fused, name)(*each_given))
