"""How long the way of a call is: a warm one's Python calls and files, and a cold one's returns."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import torchweld
from torchweld import functional, optim, state
from torchweld.dispatch.warm import cache
from torchweld.registry.processor import has_units
from torchweld.sparse import BlockLayout
from walking import find_returns

OURS = (str(Path(torchweld.__file__).parent), "<torchweld: the ", "<torchweld: a ready function")

# It takes as long as torch's own question, which no count has.
_ASKED = state.is_compiling.__code__


def _count(function: Callable[[], Any]) -> tuple[int, int]:
    """Python calls and files of a warm call; code that was written at run time counts as a file."""
    for _ in range(3):
        function()
    seen: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(OURS) and frame.f_code is not _ASKED:
            seen[name] += 1

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    assert seen
    return seen.total(), len(seen)


def _train(function: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Callable[[], Any]:
    """A forward and a backward pass; autograd runs both in this thread on a CPU."""

    def step() -> None:
        y = function(*leaves)
        torch.autograd.grad(y, leaves, torch.ones_like(y))

    return step


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


def _make_step(**options: Any) -> Callable[[], Any]:
    params = [torch.nn.Parameter(torch.randn(64, 64)) for _ in range(3)]
    for p in params:
        p.grad = torch.randn_like(p)
    return optim.AdamW(params, lr=1e-3, **options).step


X, WEIGHT, COLUMNS = _leaf(256, 512), _leaf(512, 512), _leaf(512)
CLASSES = torch.randint(0, 2048, (256,))
_LOGPROBS: Any = functional.linear_logprobs
_LOSS: Any = functional.linear_cross_entropy
_ATTEND: Any = functional.block_sparse_attention
_ADD_NORM: Any = functional.dropout_add_layer_norm
ENCODER_LAYER = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
LAYOUT = BlockLayout.sliding_window(128, 3, block=32)
_QKV = [_leaf(2, 2, 128, 32) for _ in range(3)]
_STREAM = [_leaf(1024, 1024), _leaf(1024, 1024), _leaf(1024), _leaf(1024)]
_HEAD = _leaf(2048, 512)
_NARROW = [t.detach().bfloat16().requires_grad_() for t in (X, _HEAD)]
_NARROW_LAYER = [t.detach().bfloat16().requires_grad_() for t in (X, WEIGHT, COLUMNS)]
_EXPERTS: Any = functional.experts_mlp
_ROUTE = functional.route(torch.randn(64, 8), 2)
_MIXTURE = [_leaf(64, 32), _leaf(8, 64, 32), _leaf(8, 32, 32), _ROUTE.indices, _ROUTE.weights]
# What is called, and the most calls and files.
WALKS: dict[str, tuple[Callable[[], Any], int, int]] = {
    "rms_norm": (_train(lambda x, w: functional.rms_norm(x, (512,), w), X, COLUMNS), 4, 3),
    "block_sparse_attention": (_train(lambda *q: _ATTEND(*q, LAYOUT), *_QKV), 5, 4),
    "dropout_add_layer_norm": (_train(lambda *x: _ADD_NORM(*x, p=0.1), *_STREAM), 5, 4),
    "AdamW.step": (_make_step(), 17, 4),
    "AdamW.step, clipped": (_make_step(max_grad_norm=1.0), 20, 4),
    "fuse, two layers": (
        lambda: torchweld.fuse(nn.Sequential(nn.Linear(64, 64), nn.RMSNorm(64))),
        *(35, 4),
    ),
    "fuse, an encoder": (
        lambda: torchweld.fuse(nn.TransformerEncoder(ENCODER_LAYER, 2)),
        *(135, 4),
    ),
    "linear_cross_entropy": (_train(lambda *x: _LOSS(*x, CLASSES), X, _HEAD), 14, 5),
    "linear_cross_entropy, bfloat16": (_train(lambda *x: _LOSS(*x, CLASSES), *_NARROW), 23, 6),
    "linear_logprobs": (_train(lambda *x: _LOGPROBS(*x, CLASSES), X, _HEAD), 15, 6),
    "linear_logprobs, bfloat16": (_train(lambda *x: _LOGPROBS(*x, CLASSES), *_NARROW), 24, 7),
    "experts_mlp": (lambda: _EXPERTS(*_MIXTURE), 18, 4),
    "linear_gelu": (_train(functional.linear_gelu, X, WEIGHT, COLUMNS), 5, 4),
    "linear_gelu, bfloat16": (_train(functional.linear_gelu, *_NARROW_LAYER), 22, 8),
    "mlp": (_train(functional.mlp, X, WEIGHT, COLUMNS, WEIGHT, COLUMNS), 6, 5),
    "gated_mlp": (_train(functional.gated_mlp, X, WEIGHT, WEIGHT, WEIGHT), 6, 5),
}


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_is_short(name: str) -> None:
    if "bfloat16" in name and has_units(torch.bfloat16):
        pytest.skip("oneDNN's GEMM serves here, which asks about each call")
    step, most_calls, most_files = WALKS[name]
    calls, files = _count(step)
    print(f"{name}: {calls} calls in {files} files")
    assert calls <= most_calls
    assert files <= most_files


# --- Cold calls -----------------------------------------------------------------------------------

_LEAVES = [_leaf(256, 512), _leaf(512, 512), _leaf(512), _leaf(2048, 512)]
COLD: dict[str, Callable[[], Callable[[], Any]]] = {
    "rms_norm": lambda: lambda: functional.rms_norm(_LEAVES[0], (512,), _LEAVES[2]),
    "linear_gelu": lambda: lambda: functional.linear_gelu(*_LEAVES[:3]),
    "block_sparse_attention": lambda: lambda: _ATTEND(*_QKV, LAYOUT),
    "linear_cross_entropy": lambda: lambda: _LOSS(_LEAVES[0], _LEAVES[3], CLASSES),
    "experts_mlp": lambda: lambda: _EXPERTS(*_MIXTURE),
    "AdamW.step": _make_step,
}


@pytest.mark.parametrize("name", COLD)
def test_a_cold_call_goes_from_file_to_file(name: str) -> None:
    """A reader who follows one came back to dispatch/warm/guards.py 54 times in attention, and in a
    loss 22 times to state.py: predicates of one argument were called from other files."""
    COLD[name]()()  # what the process does once
    cache.forget()
    assert find_returns(COLD[name]()) == {}
    cache.forget()
