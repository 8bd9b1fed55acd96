"""Gradients of losses: second ones, in place, of frozen factors, compiled, added, by chunks."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch.nn import functional as F  # noqa: N812

import torchweld
from exact_losses import agree, make
from selection import WHOLE
from torchweld import functional, numerics
from torchweld.errors import ArgumentError
from torchweld.ops.loss import chunks

LINEAR: Any = functional.linear_cross_entropy
LOGITS: Any = functional.cross_entropy
LOGPROBS: Any = functional.linear_logprobs
OF_LOGITS: Any = functional.logprobs


def _derive(function: Any, *given: torch.Tensor) -> None:
    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(function, given)


def test_derivatives_in_float64() -> None:
    """First and second, of kept and of recomputed gradients."""
    x, weight, bias, target = make(5, 6, 3, torch.float64)
    given = [t.requires_grad_() for t in (x, weight, bias)]
    several = torch.tensor([[1, 1, -100]] * 3 + [[-100] * 3] + [[0, 5, 2]])
    with torchweld.use_backend("cpu"):
        for kw in (
            {"label_smoothing": 0.1, "z_loss": 0.1},
            {"reduction": "none", "softcap": 2.0, "weight": torch.rand(6).double()},
        ):
            _derive(lambda x, w, b, kw=kw: LINEAR(x, w, target, linear_bias=b, **kw), *given)
            _derive(
                lambda z, kw=kw: LOGITS(z, target, **kw), F.linear(*given).detach().requires_grad_()
            )
        every = {"return_entropy": True, "return_lse": True}
        for classes, more in ((target, {}), (several, every)):
            _derive(
                lambda z, classes=classes, more=more: OF_LOGITS(z, classes, softcap=2.0, **more),
                F.linear(*given).detach().requires_grad_(),
            )
        _derive(
            lambda x, w, b: LOGPROBS(
                x, w, several, linear_bias=b, temperature=0.7, return_entropy=True, return_lse=True
            ),
            *given,
        )


def test_kept_gradients_under_a_scale_and_twice() -> None:
    """A loss scale multiplies them; a retained graph gives them again."""
    x, weight, _, target = make(5, 60, 8, torch.float32)
    given = [x.requires_grad_(), weight.requires_grad_()]
    loss = LINEAR(given[0], given[1], target)
    wanted = torch.autograd.grad(F.cross_entropy(F.linear(*given), target), given)
    once = torch.autograd.grad(loss * 1024.0, given, retain_graph=True)
    twice = torch.autograd.grad(loss, given)
    agree([grad / 1024.0 for grad in once], wanted, torch.float32)
    agree(twice, wanted, torch.float32)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, given)


def test_a_frozen_factor_gets_no_gradient() -> None:
    x, weight, bias, target = make(5, 60, 8, torch.float32)
    for kept in (x, weight, bias):
        kept.requires_grad_()
        for reduction in ("mean", "none"):
            loss = LINEAR(x, weight, target, linear_bias=bias, reduction=reduction)
            (got,) = torch.autograd.grad(loss.sum(), kept)
            plain = F.cross_entropy(F.linear(x, weight, bias), target, reduction=reduction)
            (true,) = torch.autograd.grad(plain.sum(), kept)
            agree(got, true, torch.float32)
        kept.requires_grad_(False)


@pytest.mark.parametrize("further", [None, False, True])
def test_in_place(further: bool | None) -> None:
    """The gradient takes the logits' memory, and whoever else saved them is told."""

    def find_loss(logits: torch.Tensor) -> torch.Tensor:
        if further is None:
            return LOGITS(logits, target, inplace=True)
        found = OF_LOGITS(logits, target, inplace=True, return_lse=further)
        return -(found[0] if further else found).mean()

    base = torch.randn(40, 512, requires_grad=True)
    target = torch.randint(0, 512, (40,))
    logits = base * 1
    kept = logits.exp()
    pointer = logits.data_ptr()
    logits.retain_grad()
    loss = find_loss(logits)
    (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert grad.data_ptr() == pointer
    (true,) = torch.autograd.grad(F.cross_entropy(base, target), base)
    agree(grad, true, torch.float32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, logits)
    del kept
    with pytest.raises(ArgumentError, match="leaf"):
        find_loss(base)


COMPILED: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "smoothing": {"label_smoothing": 0.1, "z_loss": 0.1},
    "weights": {"weight": torch.arange(1.0, 301.0), "token_weights": torch.arange(70.0)},
    "none": {"reduction": "none"},
    "lse": {"return_lse": True},
    "float16": {},
}


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        (name, frozen)
        for at, name in enumerate(COMPILED)
        for frozen in (
            "nothing",
            *(("weight", "input") if WHOLE else [("weight", "input")[at % 2]]),
        )
    ],
)
def test_compiled_steps_compute_logits_once(
    name: str, frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For "mean" and "sum", in each chunk, with the bits that code has which is not compiled."""
    made = make(70, 300, 16, torch.float16 if name == "float16" else torch.float32)
    x, weight, bias, target = made
    target[:9] = -100
    given = [x, weight, bias]
    kept_out = {"weight": weight, "input": x}.get(frozen)
    wanted = [t.requires_grad_() for t in given if t is not kept_out]
    computed = []
    kept = chunks.Gemms.compute_logits
    monkeypatch.setattr(
        chunks.Gemms, "compute_logits", lambda gemms, x: computed.append(len(x)) or kept(gemms, x)
    )

    def run(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        loss = LINEAR(x, weight, target, linear_bias=bias, memory=40_000, **COMPILED[name])
        return 3 * (loss[0] if isinstance(loss, tuple) else loss).sum()

    torch._dynamo.reset()  # it compiles a function only so often
    results, counts = [], []
    calls: tuple[Any, ...] = (run, torch.compile(run, fullgraph=True, backend="aot_eager"))
    for call in calls:
        computed.clear()
        loss = call(*given)
        results.append([loss, *torch.autograd.grad(loss, wanted)])
        counts.append(sum(computed))
    counted = int((target != -100).sum())
    times = 2 if name in ("none", "lse", "float16") else 1
    assert counts == [times * counted, times * counted]
    torch.testing.assert_close(*results, **numerics.SAME)


@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False)])
def test_graphs_know_the_strides_of_results(needs: tuple[bool, ...]) -> None:
    """Also the gradients' strides, for a transposed input and weight."""
    x, weight = (torch.randn(16, n).t() for n in (70, 300))
    layer = (x, weight, torch.randn(300), 40_000, x.dtype, True, False, 300)
    how = (torch.arange(70)[:, None], None, None, None, 1.0, 0.0)
    grads = torch.randn(70, 5), torch.randn(70, 1)
    ops = torch.ops.torchweld
    forward = (ops.linear_rows.default, (*layer, *how, False, False, False))
    statistics = forward[0](*forward[1])[1]
    for op, inputs in (
        forward,
        (ops.linear_rows_backward.default, (*layer, *how, statistics, *grads, *needs)),
        (ops.linear_rows_both.default, (*layer, *how, *grads, False, *needs)),
    ):
        torch.library.opcheck(op, inputs, test_utils="test_faketensor")


def test_autocast_and_checkpoint() -> None:
    x, weight, _, target = make(70, 300, 16, torch.float32)
    given = [x.requires_grad_(), weight.requires_grad_()]

    def run(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return LINEAR(x, weight, target)

    plain = torch.autograd.grad(run(*given), given)
    again = torch.utils.checkpoint.checkpoint(run, *given, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again, given), plain, **numerics.SAME)
    with torch.autocast("cpu", torch.bfloat16):
        loss = run(*given)
        eager = F.cross_entropy(F.linear(*given), target)
    assert loss.dtype == eager.dtype == torch.float32
    for got, true in zip(torch.autograd.grad(loss, given), plain, strict=True):
        assert got.dtype == torch.float32
        agree(got, true, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_added_to_those_that_exist(dtype: torch.dtype) -> None:
    """The weight's gradient goes into its .grad, chunk by chunk, without a second gradient."""
    x, weight, _, target = make(60, 301, 16, dtype)
    given = [t.requires_grad_() for t in (x, weight)]
    given[1].grad = torch.ones_like(given[1])
    kept = given[1].grad
    exact: Any = [t.detach().double().requires_grad_() for t in given]
    loss = LINEAR(given[0], given[1], target, accumulate="grad", memory=40000, reduction="sum")
    (loss * 0.5).backward()
    (F.cross_entropy(F.linear(*exact), target, reduction="sum") * 0.5).backward()
    assert given[1].grad is kept
    # In 16 bits two chunks round once each.
    agree(kept, exact[1].grad + 1, dtype)
    given[1].grad = None  # the first step makes it
    LINEAR(given[0], given[1], target, accumulate="grad").backward()
    assert all(p.grad.any() for p in given)
    with pytest.raises(ArgumentError, match=r"accumulate is 'grad'; accepted: .* a leaf"):
        LINEAR(x, given[1] * 1, target, accumulate="grad")


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(data=strategies.data())
def test_chunks_change_nothing(data: strategies.DataObject) -> None:
    """Any options, ignored rows, K, width, -inf and chunk: equal to one chunk by plain torch."""
    count = data.draw(strategies.integers(0, 40))
    classes = data.draw(strategies.sampled_from([1, 2, 33, 2047, 2049]))
    several = data.draw(strategies.sampled_from([None, 1, 2, 5, 64]))  # None: a loss
    made = torch.Generator().manual_seed(data.draw(strategies.integers(0, 99)))
    x = torch.randn(count, 3, generator=made, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(classes, 3, generator=made, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, classes, (count, several or 1), generator=made)
    target[torch.rand(target.shape, generator=made) < data.draw(strategies.floats(0, 1))] = -100
    bias = torch.zeros(classes, dtype=torch.float64)
    draw = {
        "label_smoothing": strategies.sampled_from([0.0, 0.1, 1.0]),
        "softcap": strategies.sampled_from([None, 2.0]),
        "z_loss": strategies.sampled_from([0.0, 0.1]),
        "reduction": strategies.sampled_from(["mean", "sum", "none"]),
        "weight": strategies.sampled_from(
            [None, torch.rand(classes, generator=made).double() + 0.1]
        ),
    }
    kw = {name: data.draw(values) for name, values in draw.items() if several is None}
    if not kw.get("label_smoothing"):
        bias[1::3] = -torch.inf  # in a loss no target
    if several is None:
        target = torch.where(bias[target.clamp(0)] == 0, target, 0).squeeze(1)
    results = []
    least = (classes + 3 * 5) * 8
    for backend, rows in (("cpu", data.draw(strategies.integers(1, 12))), ("eager", 2**12)):
        given: dict[str, Any] = {"linear_bias": bias, "memory": least * rows}
        with torchweld.use_backend(backend):
            if several is None:
                values = [LINEAR(x, weight, target, **given, **kw)]
            else:
                values = [*LOGPROBS(x, weight, target, return_entropy=True, **given)]
            total = torch.zeros(()).double()
            for value in values:
                finite = torch.where(value == -torch.inf, 0, value)
                total = (
                    total + (finite * torch.arange(1, value.numel() + 1).view(value.shape)).sum()
                )
            grads = torch.autograd.grad(total, (x, weight))
        results.append([*values, *grads])
    torch.testing.assert_close(*results, **numerics.FLOAT64, equal_nan=True)
