"""Plans that hang on a cached call and its autograd node, which compare no argument again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch

import planning
from planning import DEVICE, assert_equal, kernels, lay_beside, make_norm, make_plan
from torchweld import functional, numerics
from torchweld.dispatch.autograd import Ready
from torchweld.dispatch.warm import plans as warm_plans
from torchweld.registry import OPS
from torchweld.sparse import BlockLayout

plans = planning.plans


def _leaves(rows: int = 6, width: int = 32) -> list[torch.Tensor]:
    x, _, weight, bias, _ = make_norm(rows, width)
    return [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]


def _normalize(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    x, weight, bias = leaves
    return functional.layer_norm(x, x.shape[-1:], weight, bias)


def _expect(leaves: Sequence[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """The result and the gradients by the kernel itself, without plans."""
    x, weight, bias = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    y = OPS["layer_norm"].kernels["triton"](x, [*x.shape[-1:]], weight, bias, 1e-5)
    return [y, *torch.autograd.grad(y, (x, weight, bias), grad)]


@kernels
def test_a_warm_call_compares_its_arguments_once(
    plans: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has compared them; Triton's plan did so again, and so did its backward pass."""
    for turn in range(5):
        if turn == 3:
            monkeypatch.setattr(warm_plans.Planned, "__call__", None)
        leaves, grad = _leaves(), torch.randn(6, 32, device=DEVICE)
        y = _normalize(leaves)
        assert_equal([y, *torch.autograd.grad(y, leaves, grad)], _expect(leaves, grad))
        with torch.no_grad():
            assert_equal([_normalize(leaves)], [y])
    assert len(plans) == 3 * 3


@kernels
def test_calls_of_several_sizes_have_plans_of_their_own(plans: list[Any]) -> None:
    """A way of any sizes serves them all; each size's plan has its own allocations and grid."""
    for size in (6, 8, 10, 12, 10, 12, 10, 6, 12, 12):
        leaves, grad = _leaves(size), torch.randn(size, 32, device=DEVICE)
        y = _normalize(leaves)
        assert_equal([y, *torch.autograd.grad(y, leaves, grad)], _expect(leaves, grad))
    assert len(plans) >= 8


def _swap(x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x.data = change(x.detach())


def _transpose(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous().t()


def _unpack(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    hooks = torch.autograd.graph.saved_tensors_hooks
    return hooks(lambda t: t, lambda t: change(t) if t.ndim == 2 else t)


# What a backward pass finds, where the plan's found something else: gradient, input, saved tensors.
UNLIKE: dict[str, tuple[Any, Any, Any]] = {
    "an expanded gradient": (lambda g: g[:1].expand_as(g), None, None),
    "a transposed gradient": (_transpose, None, None),
    "a misaligned gradient": (lay_beside, None, None),
    "a negative view": (lambda g: torch._neg_view(g), None, None),
    "an input in other memory, misaligned": (None, lay_beside, None),
    "an input in other memory, transposed": (None, _transpose, None),
    "saved tensors, misaligned": (None, None, lay_beside),
    "saved tensors, transposed": (None, None, _transpose),
}


@kernels
@pytest.mark.parametrize("what", UNLIKE)
def test_a_backward_pass_that_differs(what: str, plans: list[Any]) -> None:
    """It has its call's bits, and the plan that hangs on the node does not serve it."""
    change, swap, unpack = UNLIKE[what]
    alike = None
    for turn in range(7):
        leaves, grad = _leaves(), torch.randn(6, 32, device=DEVICE)
        wanted = _expect(leaves, grad)
        is_unlike = turn % 2 == 0 and turn > 0
        if is_unlike and change is not None:
            grad = change(grad)
            wanted = _expect(leaves, grad)
        with _unpack(unpack) if is_unlike and unpack else contextlib.nullcontext():
            y = _normalize(leaves)
            if is_unlike and swap is not None:
                _swap(leaves[0], swap)
            before = len(plans)
            found = torch.autograd.grad(y, leaves, grad)
        assert_equal([y, *found], wanted)
        if turn > 2:
            is_planned = len(plans) > before
            assert is_planned or is_unlike
            assert not (is_unlike and is_planned and plans[-1] is alike)
        if not is_unlike and len(plans) > before:
            alike = plans[-1]


@kernels
def test_saved_tensors_that_were_freed(plans: list[Any]) -> None:
    """As FSDP leaves a parameter that it has resharded too early."""
    for turn in range(5):
        leaves, grad = _leaves(), torch.randn(6, 32, device=DEVICE)
        y = _normalize(leaves)
        if turn < 3:
            torch.autograd.grad(y, leaves, grad)
            continue
        leaves[turn - 3].untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match="data is not allocated"):
            torch.autograd.grad(y, leaves, grad)


@kernels
def test_a_backward_pass_that_stops_early(plans: list[Any]) -> None:
    """While the graph is retained, only gradients that go on are made; the plan makes no others."""
    for turn in range(6):
        leaves, grad = _leaves(), torch.randn(6, 32, device=DEVICE)
        made = [leaf * 1 for leaf in leaves]
        y = _normalize(made)
        wanted = leaves if turn >= 3 else leaves[:1]
        found = torch.autograd.grad(y, wanted, grad, retain_graph=turn < 3)
        assert_equal([y, *found], _expect(leaves, grad)[: 1 + len(wanted)])
    assert plans


@kernels
def test_modes_see_a_backward_pass(plans: list[Any]) -> None:
    """A mode that begins after the forward pass, which had its plan."""

    class Seen(_python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    for _ in range(4):
        names: list[str] = []
        leaves, grad = _leaves(), torch.randn(6, 32, device=DEVICE)
        y = _normalize(leaves)
        torch.autograd.grad(y, leaves, grad, retain_graph=True)
        before = len(plans)
        with Seen():
            found = torch.autograd.grad(y, leaves, grad)
        assert_equal([y, *found], _expect(leaves, grad))
        assert "torchweld.layer_norm_backward.triton" in names
        assert len(plans) == before


@kernels
def test_layouts_of_one_form_have_lists_of_other_lengths(
    plans: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache compares a layout's form, which leaves lengths out, so that plans compare again."""
    compared, run_planned = [], warm_plans.Planned.__call__
    monkeypatch.setattr(
        warm_plans.Planned, "__call__", lambda *all: (compared.append(1), run_planned(*all))[1]
    )
    q, k, v = (torch.randn(1, 1, 64, 16, device=DEVICE) for _ in range(3))
    layouts = [BlockLayout.sliding_window(64, window, block=16) for window in (3, 40, 20)]
    assert len({layout.to_mask().sum() for layout in layouts}) == 3
    for turn in range(9):
        layout = layouts[turn % 3].to(DEVICE)
        mask = layout.to_mask().to(DEVICE)
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        found = functional.block_sparse_attention(q, k, v, layout)
        torch.testing.assert_close(found, wanted, **numerics.CHAINED)
    assert len(compared) >= 8  # all but the first


def _repeat(function: Callable[..., Any]) -> warm_plans.Repeated:
    planned = make_plan(function)
    return warm_plans.Repeated(Ready(planned, planned))


def test_a_seed_that_moved_has_no_plan(plans: list[Any]) -> None:
    """Seeds are drawn on the host, but a graph's are in the GPU's memory, for calls alike."""
    calls: list[str] = []

    def function(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        calls.append(seed.device.type)
        return torch.empty_like(x)

    steps, x, seed = _repeat(function), torch.randn(4), torch.ones(1, dtype=torch.int64)
    for _ in range(3):
        steps.forward(x, seed)
    assert (calls, len(plans)) == (["cpu"], 2)
    for _ in range(3):
        steps.forward(x, seed.to("meta"))
    assert (calls, len(plans)) == (["cpu", *["meta"] * 3], 2)


def test_plans_ask_for_the_current_device(
    plans: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [0]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    planned = make_plan(lambda x: torch.empty_like(x))
    x = torch.randn(4)
    tried = planned.record([x])
    assert tried is not None
    plan: Any = tried[1]
    refused: list[Any] = []
    for matches in (None, lambda *_: True):
        run = plan._replace(device=1).bind(lambda *inputs: refused.append(inputs), matches)
        current[0] = 1
        assert run(x).shape == x.shape
        assert not refused
        current[0] = 0
        run(x)
        assert refused.pop() == (x,)


def test_functions_without_a_plan_are_asked_for_once(plans: list[Any]) -> None:
    """Their overload serves without another attempt; arguments nothing can recognise wait."""
    steps, x = _repeat(lambda a: a + 1), torch.randn(4)
    steps.forward(torch._neg_view(x))
    for _ in range(3):
        assert torch.equal(steps.forward(x), x + 1)
        assert torch.equal(steps.backward(x), x + 1)
    assert not plans
    assert steps.forward is steps._steps.forward.overload
