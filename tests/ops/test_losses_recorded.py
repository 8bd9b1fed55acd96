"""Losses whose numbers cannot be read (exported, fake, recorded, batched), and mixed dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812

import torchweld
from selection import combine
from torchweld import functional, numerics
from torchweld.errors import ArgumentError

LINEAR, LOGITS = functional.linear_cross_entropy, functional.cross_entropy
ROWS, CLASSES, FEATURES = 24, 600, 16
MORE: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3}


def _logprobs(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    made = functional.linear_logprobs(x, weight, target, return_entropy=True, return_lse=True)
    return torch.stack([result.sum() for result in made]).sum()


def _logprobs_of_logits(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> Any:
    log_p, entropy = functional.logprobs(x @ weight.t(), target, return_entropy=True)
    return log_p.sum() + entropy.sum()


LOSSES: dict[str, Callable[..., Any]] = {
    "logits": lambda x, weight, target: LOGITS(x @ weight.t(), target),
    "logits, more": lambda x, weight, target: LOGITS(x @ weight.t(), target, **MORE),
    "in place": lambda x, weight, target: LOGITS(x @ weight.t(), target, inplace=True),
    "linear": LINEAR,
    "linear, more": lambda *inputs: LINEAR(*inputs, **MORE),
    "linear, none": lambda *inputs: LINEAR(*inputs, reduction="none").sum(),
    "logprobs": _logprobs,
    "logprobs of logits": _logprobs_of_logits,
    "logprobs of logits, plain": lambda x, weight, target: functional.logprobs(
        x @ weight.t(), target
    ).sum(),
}
EVERY = pytest.mark.parametrize("name", LOSSES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def _combine(name: str, values: list[Any]) -> Any:
    """Each pair of a loss, a dtype and one of these values."""
    cases = combine(LOSSES, [torch.float32, torch.bfloat16], values)
    return pytest.mark.parametrize(("name", "dtype", name), cases, ids=str)


# The same kernels on the same numbers; a batch may divide float32 sums otherwise.
CLOSE = numerics.SUMMED


def _make(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, FEATURES, generator=made).to(dtype)
    weight = torch.randn(CLASSES, FEATURES, generator=made).to(dtype)
    target = torch.randint(0, CLASSES, (rows,), generator=made)
    target[1::5] = -100
    return x, weight, target


class _Head(torch.nn.Module):
    def __init__(self, loss: Callable[..., torch.Tensor], weight: torch.Tensor) -> None:
        super().__init__()
        self.loss, self.weight = loss, torch.nn.Parameter(weight)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(x, self.weight, target)


@_combine("trains", [False, True])
def test_exported_for_any_number_of_rows(name: str, dtype: torch.dtype, trains: bool) -> None:
    """Also for training: the exported program has the loss's gradients."""
    x, weight, target = _make(ROWS, dtype)
    head = _Head(LOSSES[name], weight)
    sizes = {0: torch.export.Dim("rows", min=1, max=100000)}
    with torch.set_grad_enabled(trains):
        program = torch.export.export(head, (x, target), dynamic_shapes=(sizes, sizes)).module()
    for rows in (1, 8, 40):
        x, _, target = _make(rows, dtype)
        x.requires_grad_(trains)
        with torch.set_grad_enabled(trains):
            found, expected = program(x, target), head(x, target)
            torch.testing.assert_close(found, expected, **CLOSE)
            if trains:
                ours = torch.autograd.grad(found, [x, *program.parameters()])
                torch.testing.assert_close(
                    ours, torch.autograd.grad(expected, [x, head.weight]), **CLOSE
                )


@EVERY
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_fake_and_meta_tensors(name: str, backend: str) -> None:
    """They have shapes, and so have their gradients."""
    with torchweld.use_backend(backend), FakeTensorMode():
        x, weight, target = (torch.empty_like(t) for t in _make(ROWS))
        x.requires_grad_(), weight.requires_grad_()
        LOSSES[name](x, weight, target).backward()
        assert x.grad.shape == x.shape
        assert weight.grad.shape == weight.shape
    x, weight, target = (t.to("meta") for t in _make(ROWS))
    x.requires_grad_()
    LOSSES[name](x, weight, target).backward()
    assert x.grad.shape == x.shape


@_combine("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_gradients(name: str, dtype: torch.dtype, mode: str) -> None:
    """The graph serves other targets: it does not keep which rows were ignored."""

    def differentiate(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> Any:
        sources = [t.detach().requires_grad_() for t in (x, weight)]
        return torch.autograd.grad(LOSSES[name](*sources, target), sources)

    x, weight, target = _make(ROWS, dtype)
    recorded = make_fx(differentiate, tracing_mode=mode)(x, weight, target)
    other = target.roll(1)
    other[0] = -100
    found, expected = recorded(x, weight, other), differentiate(x, weight, other)
    torch.testing.assert_close(found, expected, **CLOSE)


@EVERY
def test_compiled_whole(name: str) -> None:
    """As code that is not compiled, and for other targets, too."""
    compiled: Any = torch.compile(LOSSES[name], fullgraph=True, backend="aot_eager")
    x, weight, target = _make(ROWS)
    sources = [t.requires_grad_() for t in (x, weight)]
    for _ in range(2):
        values = [run(*sources, target) for run in (LOSSES[name], compiled)]
        found, expected = ([one, *torch.autograd.grad(one, sources)] for one in values)
        torch.testing.assert_close(found, expected, **CLOSE)
        target = target.roll(1)
        target[: ROWS // 2] = -100


# torch.func.linearize scripts its graph, which torch 2.13 warns of; constant folding warns too.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Attempted to insert a get_attr")
@EVERY
def test_linearize(name: str) -> None:
    x, weight, target = _make(ROWS)
    sources = [t.clone().requires_grad_() for t in (x, weight)]
    grads = torch.autograd.grad(LOSSES[name](*sources, target), sources)
    _, pushed = torch.func.linearize(lambda *given: LOSSES[name](*given, target), x, weight)
    found = pushed(torch.ones_like(x), torch.ones_like(weight))
    torch.testing.assert_close(found, sum(g.sum() for g in grads), **numerics.CHAINED)


# vmap warns that it loops over an op without a rule.
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@_combine("by", ["is_grads_batched", "vmap"])
def test_gradients_in_batches(name: str, dtype: torch.dtype, by: str) -> None:
    x, weight, target = _make(ROWS, dtype)
    sources = [t.requires_grad_() for t in (x, weight)]
    loss = LOSSES[name](*sources, target)
    scales = torch.tensor([1.0, -2.0, 4.0], dtype=loss.dtype)
    if by == "vmap":
        found = torch.func.vmap(
            lambda scale: torch.autograd.grad(loss, sources, scale, retain_graph=True)
        )(scales)
    else:
        found = torch.autograd.grad(loss, sources, scales, is_grads_batched=True, retain_graph=True)
    expected = torch.autograd.grad(loss, sources)
    for ours, one in zip(found, expected, strict=True):
        # Powers of two scale every rounding with the number.
        torch.testing.assert_close(ours, torch.stack([one * s for s in scales]), **CLOSE)


@EVERY
def test_vmap_over_targets(name: str) -> None:
    x, weight, target = _make(ROWS)
    several = torch.stack([target, target.roll(1)])
    found = torch.func.vmap(lambda t: LOSSES[name](x, weight, t))(several)
    expected = torch.stack([LOSSES[name](x, weight, t) for t in several])
    torch.testing.assert_close(found, expected, **CLOSE)
    several[1, 3] = CLASSES
    with pytest.raises(ArgumentError, match=r"target\[1, 3\]"):
        torch.func.vmap(lambda t: LOSSES[name](x, weight, t))(several)


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("companion", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("logits_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_companions_of_any_dtype(
    backend: str, logits_dtype: torch.dtype | None, dtype: torch.dtype, companion: torch.dtype
) -> None:
    """Probabilities, weights and temperatures become what the kernel takes, whatever came."""
    if dtype == torch.float64 and logits_dtype is not None:
        return  # refused
    x, head, target = _make(ROWS, dtype)
    made = torch.Generator().manual_seed(0)
    q = torch.rand(ROWS, CLASSES, generator=made).softmax(1).to(companion)
    weight = torch.rand(CLASSES, generator=made).to(companion)
    beside: dict[str, Any] = {
        "temperature": (torch.rand(ROWS, generator=made) + 0.5).to(companion),
        "token_weights": torch.rand(ROWS, generator=made).to(companion),
    }
    with torchweld.use_backend(backend):
        found = LINEAR(
            x, head, q, weight=weight, reduction="sum", logits_dtype=logits_dtype, **beside
        )
        hard = LINEAR(x, head, target, weight=weight, logits_dtype=logits_dtype, **beside)
        of_logits = LOGITS(x @ head.t(), q, weight, reduction="sum", **beside)
    u = (x.double() @ head.double().t()) / beside["temperature"].double()[:, None]
    tokens = beside["token_weights"].double()
    rows = F.cross_entropy(u, q.double(), weight.double(), reduction="none")
    exact = (rows * tokens).sum()
    rows = F.cross_entropy(u, target, weight.double(), reduction="none") * tokens
    counted = weight.double()[target.clamp(0)] * tokens * (target != -100)
    # Logits of up to 40 are rounded once to their dtype, and the loss once to the input's.
    unit = torch.finfo(dtype).eps
    for ours, true in ((found, exact), (of_logits, exact), (hard, rows.sum() / counted.sum())):
        assert abs(ours.double() - true) <= (4 * unit + 2.0**-20 * (unit > 2.0**-40)) * true.abs()
