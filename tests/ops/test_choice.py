"""The selected backend: its scope, and that a recomputation keeps it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchweld
from torchweld import functional, nn
from torchweld.dispatch import choice

X = torch.randn(48, 16)
RUNNING = (torch.zeros(16), torch.ones(16))


def _functions() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """All functions that recompute."""
    torch.manual_seed(0)
    w, up, b = torch.randn(16, 16), torch.randn(16, 16), torch.randn(16)
    mlp, gated = nn.MLP(16, 32, recompute=True), nn.GatedMLP(16, 32, recompute=True)
    linear = nn.LinearGELU(16, 8, recompute=True)
    norm = nn.LinearBatchNormAct(16, 8, recompute=True)
    again: dict[str, Any] = {"recompute": True}
    return {
        "linear_act": lambda x: functional.linear_act(x, w, b, **again),
        "linear_gelu": lambda x: functional.linear_gelu(x, w, b, **again),
        "mlp": lambda x: functional.mlp(x, w, b, up, b, **again),
        "gated_mlp": lambda x: functional.gated_mlp(x, w, up, w, **again),
        "linear_batch_norm_act": lambda x: functional.linear_batch_norm_act(
            x, w, b, *RUNNING, **again
        ),
        "MLP": mlp,
        "GatedMLP": gated,
        "LinearGELU": linear,
        "LinearBatchNormAct": norm,
    }


@pytest.mark.parametrize("name", [name for name in _functions() if name[0].islower()])
def test_nothing_is_saved_without_a_gradient(name: str) -> None:
    """Tensors of inference mode cannot be saved, but computed with."""
    with torch.inference_mode():
        x = X.clone()
    function = _functions()[name]
    assert torch.equal(function(x), function(X))


@pytest.mark.parametrize(("forward", "backward"), [("cpu", None), ("eager", "cpu"), (None, "cpu")])
@pytest.mark.parametrize("name", _functions())
def test_recomputing_keeps_to_the_choice(
    name: str, forward: str | None, backward: str | None
) -> None:
    """Twice, from a retained graph. The backend selected around the backward stays selected."""
    function = _functions()[name]
    x = X.clone().requires_grad_()
    with torchweld.use_backend(forward):
        y = function(x).square().sum()
        (expected,) = torch.autograd.grad(function(x).square().sum(), x)
    with torchweld.use_backend(backward):
        for _ in range(2):
            (found,) = torch.autograd.grad(y, x, retain_graph=True)
            assert torch.equal(found, expected)
        assert choice.forced == (None if backward is None else (backward,))
    assert choice.forced is None


def test_a_context_may_be_entered_again() -> None:
    eager = torchweld.use_backend("eager")
    with eager, torchweld.use_backend("cpu"), eager:
        assert choice.forced == ("eager",)
    assert choice.forced is None

    @torchweld.use_backend("cpu")
    def asked() -> tuple[str, ...] | None:
        return choice.forced

    assert (asked(), asked(), choice.forced) == (("cpu",), ("cpu",), None)


def test_contexts_end_in_any_order() -> None:
    """Contexts of several threads end in any order."""
    contexts = [torchweld.use_backend(*names) for names in (["cpu"], ["eager"], ["cpu", "eager"])]
    for order in itertools.permutations(range(3)):
        for context in contexts:
            context.__enter__()
        inside = [0, 1, 2]
        for at in order:
            contexts[at].__exit__(None, None, None)
            inside.remove(at)
            assert choice.forced == (contexts[inside[-1]].names if inside else None)


def test_the_choice_is_the_processs() -> None:
    """As its docstring says."""
    seen: list[tuple[str, ...] | None] = []
    with torchweld.use_backend("eager"):
        thread = threading.Thread(target=lambda: seen.append(choice.forced))
        thread.start()
        thread.join()
    assert seen == [("eager",)]
    documented = " ".join((torchweld.use_backend.__doc__ or "").split())
    assert "holds for the whole process" in documented


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [3.7, 300.0, 2e4])
def test_a_small_layer_norm_has_the_kernels_bits(dtype: torch.dtype, value: float) -> None:
    """Rows without spread, for which torch's result is up to 1, and others; with gradients."""
    rows = torch.full((4, 64), value)
    rows[2:] += value * torch.randn(2, 64, generator=torch.Generator().manual_seed(0)) / 8
    found = []
    for backend in (None, "cpu"):
        x, weight = rows.to(dtype).requires_grad_(), torch.ones(64, dtype=dtype).requires_grad_()
        with torchweld.use_backend(backend):
            y = functional.layer_norm(x, [64], weight)
            found.append((y, *torch.autograd.grad(y, (x, weight), y.detach() + 1)))
    assert not found[0][0][:2].any()
    for ours, kernels in zip(*found, strict=True):
        assert ours.isfinite().all()
        assert torch.equal(ours, kernels)
