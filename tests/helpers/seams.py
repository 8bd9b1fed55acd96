"""Assertions about composites on every backend, and helpers for their tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode

import torchweld
from oracle import TORCH, exact, is_floating, run
from torchweld import functional
from torchweld.bench.cases import CASES
from torchweld.dispatch.autograd import split_backward
from torchweld.dispatch.call import call
from torchweld.registry import OPS, Composite, Made, Op, materialize

splits_backwards = pytest.mark.skipif(
    TORCH < (2, 13), reason="torch 2.11 does not split the backward of an autograd.Function"
)


def inputs_of(seam: Op, rows: int = 24, **kwargs: Any) -> list[Any]:
    """Inputs with the odd widths of the op's second sample."""
    x, *rest = CASES[seam.name].samples[1]
    kwargs = {"dtype": torch.float32, **kwargs}
    if any(isinstance(value, Made) for value in rest):  # they have rows, too
        return materialize(seam.sized((rows,), x.shape[1:]), **kwargs)
    return materialize([type(x)((rows, x.shape[-1]), x.kind), *rest], **kwargs)


class Counting(TorchDispatchMode):
    """Counts calls by the op's name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


def saved(function: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> list[list[int]]:
    """The shapes saved for the backward, without leaves and small vectors."""
    known = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    found: dict[int, list[int]] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        # Before torch 2.13 a checkpoint saves an empty tensor as a placeholder.
        if t.ndim > 1 and t.numel() and t.untyped_storage().data_ptr() not in known:
            found[t.untyped_storage().data_ptr()] = list(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = function()
    assert result.requires_grad
    return sorted(found.values())


# --- Assertions -----------------------------------------------------------------------------------


def assert_compiled_equals_eager(seam: Composite, compiler: str = "aot_eager") -> None:
    """Compiles to one graph with eager's bits. Inductor may use another library for a GEMM."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: call(seam, *given), fullgraph=True, backend=compiler)
    inputs = inputs_of(seam)
    eager = run(seam, inputs)
    for name, value in run(seam, inputs, compiled).items():
        if compiler == "aot_eager":
            assert torch.equal(value, eager[name]), name
        torch.testing.assert_close(value, eager[name])


def assert_compiled_once(seam: Composite) -> None:
    """One dynamic graph serves any number of rows."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *given: call(seam, *given), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for position, rows in enumerate((4, 6, 9)):
        with torch._dynamo.config.patch(error_on_recompile=position > 0):
            compiled(*inputs_of(seam, rows, requires_grad=True)).sum().backward()


def assert_autocast_as_eager(seam: Composite, dtype: torch.dtype = torch.float16) -> None:
    """Autocast gives eager's dtypes, and errors no larger than eager's."""
    sample = next(s for s in CASES[seam.name].samples if s[0].shape[:1] == (256,))
    inputs = materialize(sample, torch.float32)
    oracle = exact(seam, inputs)
    with torch.autocast("cpu", dtype):
        ours, eager = run(seam, inputs), run(seam, inputs, seam.reference)
    for name, value in eager.items():
        assert ours[name].dtype == value.dtype
        error, theirs = ((v.double() - oracle[name]).square().mean() for v in (ours[name], value))
        assert error <= 1.1**2 * theirs, name


def assert_transposed_is_equal(seam: Composite) -> None:
    """x and the weights may each be transposed."""
    inputs = inputs_of(seam)
    plain = run(seam, inputs)
    for at, matrix in enumerate(inputs):
        if isinstance(matrix, torch.Tensor) and matrix.ndim == 2:
            given = [*inputs[:at], matrix.t().contiguous().t(), *inputs[at + 1 :]]
            for name, value in run(seam, given).items():
                torch.testing.assert_close(value, plain[name])


def assert_recomputed_is_equal(seam: Composite) -> None:
    """Recomputing does not change a bit of results or gradients."""
    inputs = inputs_of(seam, requires_grad=True)
    leaves = [v for v in inputs if is_floating(v)]
    named = dict(zip(seam.forward_signature.arguments, inputs, strict=True))
    function = getattr(functional, seam.name)
    plain, again = (function(**named | {"recompute": r}) for r in (False, True))
    assert torch.equal(plain, again)
    expected, found = (torch.autograd.grad(y.square().sum(), leaves) for y in (plain, again))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def assert_saves_no_more() -> None:
    """Saves x and the pre-activation (gated: gate, up and their product), or only x."""
    leaves = inputs_of(OPS["linear_act"], requires_grad=True)[:3]
    hidden = [24, 7]
    assert saved(lambda: functional.linear_gelu(*leaves), leaves) == [hidden]
    assert saved(lambda: functional.linear_gelu(*leaves, recompute=True), leaves) == []
    leaves = inputs_of(OPS["mlp"], requires_grad=True)[:5]
    assert saved(lambda: functional.mlp(*leaves), leaves) == [hidden, hidden]
    assert saved(lambda: functional.mlp(*leaves, recompute=True), leaves) == []
    leaves = inputs_of(OPS["gated_mlp"], requires_grad=True)[:4]
    assert saved(lambda: functional.gated_mlp(*leaves), leaves) == [hidden, hidden, hidden]
    with torchweld.use_backend("eager"):
        assert len(saved(lambda: functional.gated_mlp(*leaves), leaves)) == 4
    assert saved(lambda: functional.gated_mlp(*leaves, recompute=True), leaves) == []


_OURS = (
    *("bias_act", "bias_act_backward", "bias_act_backward_", "act_backward", "gated_act_backward"),
    *("normalize_act", "normalize_act_backward", "batch_norm_act_grad_x", "act_linear_backward"),
)


def assert_split(seam: Op, inputs: list[Any]) -> None:
    """A backward pass in two parts, as in zero-bubble schedules, is the whole one.

    The first run computes activation gradients, the second run parameter gradients. In a schedule
    that says which part runs, as our stages do, the two compute nothing twice.
    """
    leaves = [v for v in inputs if is_floating(v)]
    with Counting() as whole:
        expected = torch.autograd.grad(call(seam, *inputs).square().sum(), leaves)
    for says in (False, True):
        for leaf in leaves:
            leaf.grad = None
        with Counting() as split:
            loss = call(seam, *inputs).square().sum()
            with split_backward("inputs") if says else nullcontext():
                (grad_x,), groups = stage_backward_input([loss], None, inputs[:1], iter(leaves[1:]))
            gemms = split.calls["mm"] + split.calls["addmm"]
            with split_backward("weights") if says else nullcontext():
                stage_backward_weight(iter(leaves[1:]), groups)
        if gemms and seam.name != "experts_mlp":  # its node computes all gradients at once
            assert gemms < whole.calls["mm"] + whole.calls["addmm"]
        for name in ("mm", "addmm", *_OURS) if says else ():
            assert split.calls[name] == whole.calls[name], name
        for found, wanted in zip([grad_x, *[w.grad for w in leaves[1:]]], expected, strict=True):
            assert torch.equal(found, wanted)


def assert_kept(y: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    """A retained graph gives every gradient again, also after a run for only some of them."""
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    for wanted in ((0,), (2,), (0, 2), (1,), (0, 1, 2), (2,)):
        some = [leaves[i] for i in wanted]
        found = torch.autograd.grad(y, some, grad, retain_graph=True)
        assert all(torch.equal(f, expected[i]) for f, i in zip(found, wanted, strict=True))
    (other,) = torch.autograd.grad(y, leaves[2], 2 * grad, retain_graph=True)
    assert torch.equal(other, 2 * expected[2])
    torch.autograd.grad(y, leaves[2], grad, retain_graph=True)
    (other,) = torch.autograd.grad(y, leaves[0], grad.mul_(2), retain_graph=True)
    assert torch.equal(other, 2 * expected[0])
    torch.autograd.grad(y, leaves[2], grad, retain_graph=True)
    with torch.no_grad():
        leaves[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, leaves[0], grad)


def assert_graphs_can_be_kept() -> None:
    """The graphs of linear_act, and of an mlp that recomputes."""
    x, weight, bias = inputs_of(OPS["linear_act"], requires_grad=True)[:3]
    assert_kept(functional.linear_gelu(x, weight, bias), [x, weight, bias])
    leaves = inputs_of(OPS["mlp"], requires_grad=True)[:5]
    assert_kept(call(OPS["mlp"], *leaves, "gelu", "none", True), leaves[::2])
