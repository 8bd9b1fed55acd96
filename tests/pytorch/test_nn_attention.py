"""Modules of sparse attention."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torchweld
from fusable import run
from torchweld import ArgumentError, numerics
from torchweld.sparse import BlockLayout

WINDOW = functools.partial(BlockLayout.sliding_window, num_sliding_window_blocks=3, block=16)
Multihead = torchweld.nn.BlockSparseMultiheadAttention


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 12, "vdim": 20}])
@pytest.mark.parametrize("batch_first", [False, True])
def test_multihead_attention_loads_torchs_weights(options: dict, batch_first: bool) -> None:
    """State dicts load both ways; results and gradients equal those with the layout's mask."""
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=batch_first, **options)
    ours = Multihead(32, 4, layout=WINDOW, batch_first=batch_first, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    sizes = (32, options.get("kdim", 32), options.get("vdim", 32))
    query, key, value = (
        torch.randn((2, n, size) if batch_first else (n, 2, size))
        for n, size in zip((70, 90, 90), sizes, strict=True)
    )
    padding = torch.zeros(2, 90, dtype=torch.bool)
    padding[0, 80:] = True
    hidden = ~WINDOW((70, 90)).to_mask()[0, 0]
    given: dict[str, Any] = {"key_padding_mask": padding}
    assert ours(query, key, value, **given)[1] is None
    y, *found = run(ours, query, key, value, **given)
    given |= {"attn_mask": hidden, "need_weights": False}
    expected, *wanted = run(theirs, query, key, value, **given)
    torch.testing.assert_close(y, expected, **numerics.SUMMED)
    torch.testing.assert_close(found, wanted, **numerics.CANCELLED)


def test_layers_with_layouts_of_one_length_do_not_mix() -> None:
    """Each module keeps its own, for every pair of lengths."""
    torch.manual_seed(0)
    wide = torchweld.nn.BlockSparseAttention(functools.partial(WINDOW, attention="unidirectional"))
    narrow = torchweld.nn.BlockSparseAttention(functools.partial(BlockLayout.block_local, block=16))
    for length in (64, 100, 64):
        q = torch.randn(1, 2, length, 8)
        source: Any
        for module, source in ((wide, wide.layouts.source), (narrow, narrow.layouts.source)):
            seen = source((length, length)).to_mask()
            expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=seen)
            torch.testing.assert_close(module(q, q, q), expected, **numerics.SUMMED)
    assert wide.layouts.of(q, q) is wide.layouts.of(q, q)


def test_arguments_arrive() -> None:
    """Scale, causal, soft cap and dropout; in eval() nothing is dropped."""
    q = torch.randn(1, 2, 50, 8)
    layout = WINDOW((50, 50))
    options: dict[str, Any] = {"scale": 0.3, "causal": True, "softcap": 2.0}
    module = torchweld.nn.BlockSparseAttention(layout, 0.5, **options)
    function = torchweld.functional.block_sparse_attention
    torch.manual_seed(3)
    found = module(q, q, q)
    torch.manual_seed(3)
    assert torch.equal(found, function(q, q, q, layout, dropout_p=0.5, **options))
    assert torch.equal(module.eval()(q, q, q), function(q, q, q, layout, **options))


def test_copies_and_pickles() -> None:
    module = Multihead(16, 2, layout=WINDOW)
    x = torch.randn(40, 1, 16)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(x, x, x)[0], module(x, x, x)[0])


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="num_heads"):
        Multihead(16, 3, layout=WINDOW)
    with pytest.raises(ArgumentError, match="layout"):
        torchweld.nn.BlockSparseAttention(None)  # type: ignore[arg-type]
    for argument in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ArgumentError, match=argument):
            Multihead(16, 2, layout=WINDOW, **{argument: True})
    module, x = Multihead(16, 2, layout=WINDOW), torch.randn(5, 1, 16)
    with pytest.raises(ArgumentError, match="query"):
        module(x[None], x[None], x[None])
    for argument, value in (
        *(("need_weights", True), ("is_causal", True)),
        ("key_padding_mask", torch.ones(1, 4)),
        ("attn_mask", torch.zeros(5, 4)),
        ("attn_mask", torch.zeros(3, 5, 5)),
        ("attn_mask", torch.zeros(5, 5, dtype=torch.int64)),
    ):
        with pytest.raises(ArgumentError, match=argument):
            module(x, x, x, **{argument: value})
    attention, q = torchweld.nn.BlockSparseAttention(WINDOW((50, 50))), torch.randn(1, 1, 40, 8)
    with pytest.raises(ArgumentError, match="50 x 50"):
        attention(q, q, q)


def _without_modes(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return module(x, x, x).sum()


def _in_inference(module: torch.nn.Module, x: torch.Tensor) -> None:
    with torch.inference_mode():
        _without_modes(module, x)


def _with_fakes(module: torch.nn.Module, x: torch.Tensor) -> None:
    with FakeTensorMode():
        _without_modes(module, torch.randn(x.shape))


def _on_meta(module: torch.nn.Module, x: torch.Tensor) -> None:
    _without_modes(module, x.to("meta").requires_grad_()).backward()


def _under_autocast(module: torch.nn.Module, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        _without_modes(module, x)


MODES: dict[str, Callable[[torch.nn.Module, torch.Tensor], Any]] = {
    "inference": _in_inference,
    "fake": _with_fakes,
    "meta": _on_meta,
    "autocast": _under_autocast,
    "grad": lambda m, x: torch.func.grad(functools.partial(_without_modes, m))(x),
    "jvp": lambda m, x: torch.func.jvp(functools.partial(_without_modes, m), (x,), (x,)),
    "vmap": lambda m, x: torch.vmap(functools.partial(_without_modes, m))(x[None]),
    "make_fx": lambda m, x: make_fx(functools.partial(_without_modes, m))(x),
}


@pytest.mark.parametrize("first", MODES)
def test_what_a_first_call_keeps_serves_training(first: str) -> None:
    """Its layouts are those that training would have made; and training's serve such a call."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 64, 8)
    gradients: list[Any] = []
    for calls in ((MODES[first],), (), (_without_modes, MODES[first])):
        module = torchweld.nn.BlockSparseAttention(WINDOW)
        for call in calls:
            call(module, x)
        leaf = x.clone().requires_grad_()
        gradients += torch.autograd.grad(_without_modes(module, leaf), leaf)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[2], gradients[1])


def test_a_layout_made_in_inference_mode_serves_training() -> None:
    with torch.inference_mode():
        layouts = [WINDOW((64, 64)), WINDOW((64, 64)).causal(), WINDOW((64, 64)).to("meta")]
    assert not any(t.is_inference() for layout in layouts for t in layout.lists or ())


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_multihead_attention_is_called_as_torchs_is(batch_first: bool, causal: bool) -> None:
    """With a dense layout: without a batch, with masks of numbers, and arguments by position."""
    torch.manual_seed(0)
    dense = functools.partial(BlockLayout.dense, block=16)
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=batch_first)
    ours = Multihead(32, 4, layout=dense, batch_first=batch_first, causal=causal)
    ours.load_state_dict(theirs.state_dict())
    later = torch.full((40, 40), -torch.inf).triu(1) if causal else None
    for leading in ((), (3,)):
        x = torch.randn(*leading, 40, 32)
        padding = torch.zeros(*leading, 40)
        padding[..., 33:] = -torch.inf
        x = x.transpose(0, 1) if leading and not batch_first else x
        for mask in (None, padding, padding < 0):
            same = later if later is None or mask is None else later.to(mask.dtype)
            expected = theirs(x, x, x, mask, False, same, True, causal and mask is None)[0]
            found, weights = ours(x, x, x, mask, False, None, True, causal)
            assert weights is None
            torch.testing.assert_close(found, expected, **numerics.SUMMED)


@pytest.mark.filterwarnings("ignore:Support for mismatched")  # torch still takes both
@pytest.mark.parametrize("kind", ["numbers", "booleans"])
@pytest.mark.parametrize("of_heads", [False, True])
@pytest.mark.parametrize("padding", [None, "numbers", "booleans"])
def test_masks_of_scores(kind: str, of_heads: bool, padding: str | None) -> None:
    """torch's score masks, with and without padding; numbers of both kinds get gradients."""
    torch.manual_seed(0)
    dense = functools.partial(BlockLayout.dense, block=16)
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    ours = Multihead(32, 4, layout=dense, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    x, y = torch.randn(3, 40, 32), torch.randn(3, 50, 32)
    mask = torch.randn((12, 40, 50) if of_heads else (40, 50))
    mask = mask.requires_grad_() if kind == "numbers" else mask > 1
    other = torch.randn(3, 50)
    given = {"numbers": other.requires_grad_(), "booleans": other > 1, None: None}[padding]
    results, masks = [], [m for m in (mask, given) if m is not None]
    for module in (ours, theirs):
        result = module(x, y, y, given, need_weights=False, attn_mask=mask)[0]
        leaves = [*module.parameters(), *(m for m in masks if m.requires_grad)]
        results.append([result, *torch.autograd.grad(result.sin().sum(), leaves)])
    # A key's bias shifts all scores of a query: its gradient is only rounding.
    torch.testing.assert_close(*results, **numerics.CHAINED_SMALL)
    # Without a batch a mask is of the heads.
    if not of_heads and padding is None:
        expected = theirs(x[0], y[0], y[0], need_weights=False, attn_mask=mask)[0]
        found = ours(x[0], y[0], y[0], attn_mask=mask)[0]
        torch.testing.assert_close(found, expected, **numerics.SUMMED)
