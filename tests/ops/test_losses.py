"""Losses of logits and of linear layers, and log-probabilities, against torch in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import torchweld
from conftest import PLACES, running_at
from exact_losses import UNIT, agree, exact_loss, make, options, soften
from selection import combine
from torchweld import functional
from torchweld.errors import ArgumentError

LINEAR: Any = functional.linear_cross_entropy
LOGITS: Any = functional.cross_entropy
LOGPROBS: Any = functional.linear_logprobs
OF_LOGITS: Any = functional.logprobs
_, _, missing = PLACES["interpreter"]
TRITON = pytest.param("triton", marks=pytest.mark.skipif(missing is not None, reason=str(missing)))
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "eager", TRITON])
# None: torch's ops, if few
CHOICES = pytest.mark.parametrize("backend", ["cpu", "eager", TRITON, None])


@pytest.fixture(autouse=True)
def _interpreted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton runs on these tensors, too."""
    if "triton" not in request.node.name:
        yield
        return
    if "float64" in request.node.name:
        pytest.skip("float64 has no kernel in Triton")
    with running_at("interpreter", monkeypatch):
        yield


NAMES = [*options(1, 1)]


@BACKENDS
@pytest.mark.parametrize("dtype", [*UNIT], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("soft", [False, True])
def test_cross_entropy(backend: str, dtype: torch.dtype, name: str, soft: bool) -> None:
    """Logits of 2100 columns take more than one block of the kernel."""
    rows, classes = 6, 2100
    kw = options(rows, classes)[name]
    target = soften(rows, classes).to(dtype) if soft else make(rows, classes, 1, dtype)[3]
    made = torch.Generator().manual_seed(3)
    logits = (torch.randn(rows, classes, generator=made, dtype=torch.float64) * 3).to(dtype)
    ours, exact = (t.clone().requires_grad_() for t in (logits, logits.double()))
    with torchweld.use_backend(backend):
        loss = LOGITS(ours, target, **kw)
        grad = torch.randn(loss.shape, generator=made, dtype=torch.float64).to(dtype)
        loss.backward(grad)
    wanted = exact_loss(exact, target, kw)
    wanted.backward(grad.double())
    assert loss.dtype == dtype
    agree([loss, ours.grad], [wanted, exact.grad], dtype)


def _list_cases() -> list[Any]:
    """Every combination, but of Triton's each pair of values: its interpreter takes long."""
    every = itertools.product(["cpu", "eager"], UNIT, NAMES, [False, True])
    narrow = [dtype for dtype in UNIT if dtype != torch.float64]
    of_triton = combine(["triton"], narrow, NAMES, [False, True])
    return [*every, *(pytest.param(*case, marks=TRITON.marks) for case in of_triton)]


@pytest.mark.parametrize(("backend", "dtype", "name", "soft"), _list_cases(), ids=str)
def test_linear(backend: str, dtype: torch.dtype, name: str, soft: bool) -> None:
    """In one chunk and in several that do not divide the rows, with every gradient."""
    rows, classes, features = 23, 130, 11
    x, weight, bias, target = make(rows, classes, features, dtype)
    kw = options(rows, classes)[name]
    target = soften(rows, classes).to(dtype) if soft else target
    sources = [t.double().requires_grad_() for t in (x, weight, bias)]
    wanted = exact_loss(F.linear(*sources), target, kw)
    made = torch.Generator().manual_seed(3)
    grad = torch.randn(wanted.shape, generator=made, dtype=torch.float64).to(dtype)
    if grad.ndim:
        grad[::3] = 0  # a row that nothing depends on
    exact = torch.autograd.grad(wanted, sources, grad.double())
    # Without a limit torch's ops serve few logits on a CPU, and Triton all at once.
    for memory in (2**20, 9000 if dtype != torch.float64 else 16000, None):
        given = [t.clone().requires_grad_() for t in (x, weight, bias)]
        with torchweld.use_backend(backend):
            loss = LINEAR(given[0], given[1], target, linear_bias=given[2], memory=memory, **kw)
            found = torch.autograd.grad(loss, given, grad)
        agree([loss, *found], [wanted, *exact], dtype)


@BACKENDS
@pytest.mark.parametrize("targets", [None, 1, 3, 64])
@pytest.mark.parametrize("dtype", [*UNIT], ids=str)
def test_logprobs(backend: str, dtype: torch.dtype, targets: int | None) -> None:
    """K targets, duplicates among them, ignored entries and rows; any gradient into any result."""
    rows, classes, features = 19, 40, 7
    x, weight, bias, target = make(rows, classes, features, dtype)
    if targets is not None:
        target = torch.randint(0, classes, (rows, targets))
        target[3] = target[7, : targets // 2] = -100
    sources = [t.double().requires_grad_() for t in (x, weight, bias)]
    temperature = torch.rand(rows) + 0.5
    u = 4 * torch.tanh(F.linear(*sources) * 0.5 / 4) / temperature.double()[:, None]
    log_p = u.log_softmax(1)
    flat = target.reshape(rows, -1)
    kept = flat != -100
    row = kept.any(1)
    picked = torch.where(kept, log_p.gather(1, flat.clamp(0)), 0).reshape(target.shape)
    entropy = torch.where(row, -(log_p.exp() * log_p).sum(1), 0)
    wanted = [picked, entropy, torch.where(row, u.logsumexp(1), 0)]
    grads = [torch.randn(t.shape) for t in wanted]
    exact = torch.autograd.grad(wanted, sources, [g.double() for g in grads])
    for memory in (2**20, 4096):
        given = [t.clone().requires_grad_() for t in (x, weight, bias)]
        with torchweld.use_backend(backend):
            *found, argmax = LOGPROBS(
                given[0],
                given[1],
                target,
                linear_bias=given[2],
                temperature=temperature,
                logit_scale=0.5,
                softcap=4.0,
                return_entropy=True,
                return_lse=True,
                return_argmax=True,
                memory=memory,
            )
            kind = found[0].dtype
            made = torch.autograd.grad(found, given, [g.to(kind) for g in grads])
        agree([*found, *made], [*wanted, *exact], dtype)
        assert (argmax == torch.where(row, u.argmax(1), -1)).float().mean() > 0.9
        if dtype != torch.bfloat16:
            assert torch.equal(argmax, torch.where(row, u.argmax(1), -1))


@CHOICES
@pytest.mark.parametrize("targets", [None, 0, 1, 3])
@pytest.mark.parametrize("asked", ["plain", "scaled", "all"])
@pytest.mark.parametrize("dtype", [*UNIT], ids=str)
def test_logprobs_of_logits(
    backend: str | None, dtype: torch.dtype, asked: str, targets: int | None
) -> None:
    """Rows in two dimensions, more columns than a block; without a target only further results."""
    made = torch.Generator().manual_seed(5)
    logits = (torch.randn(2, 3, 2100, generator=made, dtype=torch.float64) * 3).to(dtype)
    size = () if targets is None else (targets,)
    target = torch.randint(0, 2100, (2, 3, *size), generator=made)
    if targets != 1:  # without an ignored row torch's ops may serve
        target[0, 1] = -100
    temperature = torch.rand(2, 3, generator=made) + 0.5
    more: dict[str, Any] = {}
    source = logits.double().requires_grad_()
    u, further = source, asked == "all"
    if further:
        more |= dict.fromkeys(("return_entropy", "return_lse", "return_argmax"), True)
    if asked != "plain":
        more |= {"logit_scale": 0.5, "softcap": 4.0, "temperature": temperature}
        u = 4 * torch.tanh(u * 0.5 / 4) / temperature.double()[..., None]
    log_p, columns = u.log_softmax(-1), target.view(2, 3, -1)
    picked = torch.where(columns == -100, 0, log_p.gather(-1, columns.clamp(0)))
    ignored = (columns == -100).all(-1) & (columns.shape[-1] > 0)
    wanted = [picked.reshape(target.shape)]
    if further:
        entropy = -(log_p.exp() * log_p).sum(-1)
        wanted += [torch.where(ignored, 0, each) for each in (entropy, u.logsumexp(-1))]
    ours = logits.clone().requires_grad_()
    with torchweld.use_backend(backend):
        found = OF_LOGITS(ours, target, **more)
        *found, argmax = found if further else (found, None)
        grads = [torch.randn(t.shape, generator=made, dtype=torch.float64) for t in wanted]
        rounded = [g.to(y.dtype) for g, y in zip(grads, found, strict=True)]
        (grad,) = torch.autograd.grad(found, ours, rounded)
    (exact,) = torch.autograd.grad(wanted, source, grads)
    agree([*found, grad], [*wanted, exact], dtype)
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    assert {y.dtype for y in found} == {kind}
    if argmax is not None:
        assert torch.equal(argmax == -1, ignored)
        best = u.gather(-1, argmax.clamp(0).unsqueeze(-1)).squeeze(-1)
        agree(best[~ignored], u.amax(-1)[~ignored], dtype)


def test_a_float32_head_of_16_bits() -> None:
    """Products of bfloat16 are exact in float32, as in a sampler's head."""
    x, weight, bias, target = make(9, 300, 16, torch.bfloat16)
    sources = [t.double().requires_grad_() for t in (x, weight, bias)]
    wanted = -F.cross_entropy(F.linear(*sources), target, reduction="none")
    exact = torch.autograd.grad(wanted.sum(), sources)
    given = [t.clone().requires_grad_() for t in (x, weight, bias)]
    kw: dict[str, Any] = {"logits_dtype": torch.float32, "memory": 20000}
    found = LOGPROBS(given[0], given[1], target, linear_bias=given[2], **kw)
    agree(found, wanted, torch.float32)
    agree(torch.autograd.grad(found.sum(), given), exact, torch.bfloat16)


@CHOICES
def test_what_is_out_of_range_is_named(backend: str | None) -> None:
    x, weight, _, target = make(7, 20, 3, torch.float32)
    target[4], target[5] = 20, -3
    message = r"target\[4\] is 20; accepted: 0 to 19, or ignore_index, -100"
    with torchweld.use_backend(backend):
        for call in (LINEAR, LOGPROBS):
            with pytest.raises(ArgumentError, match=message):
                call(x, weight, target)
        with pytest.raises(ArgumentError, match=message):
            LOGITS(F.linear(x, weight), target)
        for further in (False, True):
            with pytest.raises(ArgumentError, match=message):
                OF_LOGITS(F.linear(x, weight), target, return_entropy=further)
        with pytest.raises(ArgumentError, match=r"target\[4, 0\] is 20"):
            LOGPROBS(x, weight, target[:, None])


@CHOICES
def test_all_ignored(backend: str | None) -> None:
    """The loss is eager's, the gradients are zero, also of rows with NaN."""
    x, weight, _, target = make(7, 20, 3, torch.float32)
    x[2] = torch.nan
    target[:] = -100
    with torchweld.use_backend(backend):
        for reduction in ("mean", "sum", "none"):
            logits = F.linear(x, weight).requires_grad_()
            wanted = F.cross_entropy(logits, target, reduction=reduction)
            for linear in (True, False):
                given = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
                if linear:
                    loss = LINEAR(given[0], given[1], target, reduction=reduction)
                else:
                    given = [logits]
                    loss = LOGITS(logits, target, reduction=reduction)
                assert torch.equal(loss.nan_to_num(7.0), wanted.nan_to_num(7.0))
                for grad in torch.autograd.grad(loss.sum(), given):
                    assert torch.equal(grad, torch.zeros_like(grad))


@BACKENDS
def test_infinite_logits(backend: str) -> None:
    """-inf gives finite gradients, also of entropy; NaN stays in its row."""
    logits = torch.randn(5, 2100, dtype=torch.float32)
    logits[0, 5:2000] = -torch.inf
    logits[1, 3] = torch.nan
    logits[2, 1:] = -torch.inf
    target = torch.tensor([1, 1, 0, 4, -100])
    ours, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    with torchweld.use_backend(backend):
        loss = LOGITS(ours, target, reduction="none", z_loss=0.1)
        loss.sum().backward()
    wanted = exact_loss(exact, target, {"reduction": "none", "z_loss": 0.1})
    wanted.sum().backward()
    assert loss.isnan().tolist() == [False, True, False, False, False]
    whole = [0, 2, 3, 4]
    found = [loss[whole], ours.grad[whole]]
    agree(found, [wanted[whole], exact.grad[whole]], torch.float32)
    ours.grad = None
    with torchweld.use_backend(backend):
        log_p, entropy = OF_LOGITS(ours, target, return_entropy=True)
        (entropy.sum() - log_p.sum()).backward()
    assert entropy.isnan().tolist() == [False, True, False, False, False]
    assert ours.grad[whole].isfinite().all()
    assert ours.grad[0, 5:2000].abs().max() == entropy[2] == 0
    x = torch.eye(3).requires_grad_()
    bias = torch.tensor([0.0, -torch.inf, 1.0, -torch.inf])
    entropy = LOGPROBS(
        x, torch.randn(4, 3), torch.tensor([0, 2, 0]), linear_bias=bias, return_entropy=True
    )[1]
    entropy.sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() > 0


@pytest.mark.parametrize("options", [{}, {"softcap": 300.0}, {"temperature": 0.7}], ids=str)
def test_no_gradient_on_the_cpu_is_subnormal(options: dict[str, Any]) -> None:
    """A GEMM that reads such numbers takes many times as long."""
    logits = torch.linspace(-120, 0, 48_000).repeat(2, 1).requires_grad_()
    target = torch.tensor([47_999, 5])
    with torchweld.use_backend("cpu"):
        (grad,) = torch.autograd.grad(LOGITS(logits, target, **options), logits)
    tiny = torch.finfo(torch.float32).tiny
    assert torch.all((grad == 0) | (grad.abs() >= tiny))
    (exact,) = torch.autograd.grad(exact_loss(logits.double(), target, options), logits)
    # A logit of up to 171 rounds three times by at most 2^-17.
    assert ((grad - exact).abs() <= tiny + 2**-15 * exact.abs()).all()


@BACKENDS
def test_an_entropy_that_nothing_depends_on(backend: str) -> None:
    """A row without a possible class has an entropy of NaN, and no gradient from it."""
    x, weight = torch.randn(2, 3).requires_grad_(), torch.randn(5, 3).requires_grad_()
    bias = torch.full((5,), -torch.inf)
    with torchweld.use_backend(backend):
        log_p, entropy = LOGPROBS(
            x, weight, torch.tensor([0, 1]), linear_bias=bias, return_entropy=True
        )
        assert entropy.isnan().all()
        torch.autograd.backward((log_p, entropy), (torch.zeros(2), torch.zeros(2)))
    for leaf in (x, weight):
        assert (leaf.grad == 0).all()


def test_memory_below_a_row_is_refused() -> None:
    x, weight, _, target = make(7, 50, 8, torch.float32)
    with pytest.raises(ArgumentError, match=r"memory is 100; accepted: at least (\d+)") as caught:
        LINEAR(x, weight, target, memory=100)
    least = int(str(caught.value).split("at least ")[1].split(",")[0])
    assert torch.isclose(LINEAR(x, weight, target, memory=least), LINEAR(x, weight, target))
    with pytest.raises(ArgumentError, match="memory"):
        LINEAR(x, weight, target, memory=least - 1)


@BACKENDS
@pytest.mark.parametrize("classes", [1, 2047, 2048, 2049, 4097])
def test_the_last_tile_counts_only_its_classes(backend: str, classes: int) -> None:
    """No log-probability is above 0, and the probabilities of all classes sum to 1."""
    x, weight, *_ = make(1, classes, 8, torch.float32)
    every = torch.arange(classes).expand(1, -1)
    with torchweld.use_backend(backend):
        log_p = LOGPROBS(x, weight, every)
    assert (log_p <= 0).all()
    agree(log_p.exp().sum(1), torch.ones(1), torch.float32)


@BACKENDS
def test_float16_under_a_loss_scale(backend: str) -> None:
    """Gradients of 2**-26 vanish in float16. With a scale of 2**15 before them they are there."""
    x, weight, _, target = make(1000, 300, 16, torch.float32)
    given = [t.half().requires_grad_() for t in (x, weight)]
    exact: Any = [t.detach().double().requires_grad_() for t in given]
    with torchweld.use_backend(backend):
        loss = LINEAR(given[0], given[1], target)
        (loss * 2**-16 * 2.0**15).backward()
    (F.cross_entropy(F.linear(*exact), target) / 2).backward()
    for mine, true in zip(given, exact, strict=True):
        assert mine.grad.dtype == torch.float16
        error = (mine.grad.double() - true.grad).square().mean().sqrt()
        # Two roundings of 2**-11, of the logits' gradient and of the product.
        assert error <= 2 * 2**-11 * true.grad.square().mean().sqrt() + 2**-24
