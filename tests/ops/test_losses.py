"""Losses of logits and of linear layers, and log-probabilities, against torch in float64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch.nn import functional as F  # noqa: N812

import torchweld
from conftest import PLACES, running_at
from selection import WHOLE, combine
from torchweld import functional, numerics
from torchweld.errors import ArgumentError
from torchweld.ops.loss import chunks

LINEAR: Any = functional.linear_cross_entropy
LOGITS: Any = functional.cross_entropy
LOGPROBS: Any = functional.linear_logprobs
OF_LOGITS: Any = functional.logprobs
_, _, missing = PLACES["interpreter"]
TRITON = pytest.param("triton", marks=pytest.mark.skipif(missing is not None, reason=str(missing)))
BACKENDS = pytest.mark.parametrize("backend", ["cpu", "eager", TRITON])
# None: torch's ops, if few
CHOICES = pytest.mark.parametrize("backend", ["cpu", "eager", TRITON, None])
UNIT = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}
# How many of them a result may be off, in the largest element. A probability's relative error is
# the error of its exponent: three roundings of half a unit (scale, cap, temperature) of at most 12,
# the largest logit here. Sums, logarithm and products add 8. In 16 bits only what is stored is
# rounded. What float64 is compared with makes the same roundings, and sums 2100 terms in up to 20.
ROUNDINGS = {torch.float64: 72, torch.float32: 26, torch.bfloat16: 8}


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


def agree(got: Any, exact: Any, dtype: torch.dtype) -> None:
    """Hold a tensor to its exact value, or each of several."""
    if not isinstance(got, torch.Tensor):
        for pair in zip(got, exact, strict=True):
            agree(*pair, dtype)
        return
    assert got.shape == exact.shape
    exact = exact.detach().double()
    largest = max(exact.abs().max().item(), 2.0**-30) if exact.numel() else 1.0
    off = (got.detach().double() - exact).abs().max().item() if exact.numel() else 0.0
    assert off <= ROUNDINGS[dtype] * UNIT[dtype] * largest, (off / largest, UNIT[dtype])


def exact_loss(u: torch.Tensor, target: torch.Tensor, kw: dict[str, Any]) -> torch.Tensor:
    """The documented formula in float64, of logits u in whichever options remain."""
    kw = dict(kw)
    u = u * kw.pop("logit_scale", 1.0)
    if cap := kw.pop("softcap", None):
        u = cap * torch.tanh(u / cap)
    temperature = kw.pop("temperature", 1.0)
    u = u / (temperature.double()[:, None] if torch.is_tensor(temperature) else temperature)
    z, tokens = kw.pop("z_loss", 0.0), kw.pop("token_weights", None)
    reduction = kw.pop("reduction", "mean")
    weight = kw.get("weight")
    if weight is not None:
        kw["weight"] = weight.double()
    soft = target.is_floating_point()
    target = target.double() if soft else target
    loss = F.cross_entropy(u, target, reduction="none", **kw)
    counted = torch.ones(len(u)).double() if soft else (target != -100).double()
    loss = loss + z * counted * u.logsumexp(1) ** 2
    each = counted
    if weight is not None and not soft:
        each = counted * weight.double()[target.clamp(0)]
    if tokens is not None:
        loss, each = loss * tokens.double(), each * tokens.double()
    if reduction == "none":
        return loss
    return loss.sum() / each.sum() if reduction == "mean" else loss.sum()


def options(rows: int, classes: int) -> dict[str, dict[str, Any]]:
    made = torch.Generator().manual_seed(1)
    weight = torch.rand(classes, generator=made) + 0.1
    tokens = torch.rand(rows, generator=made)
    temperature = torch.rand(rows, generator=made) + 0.5
    return {
        "plain": {},
        "sum": {"reduction": "sum"},
        "none": {"reduction": "none"},
        "smoothing": {"label_smoothing": 0.1},
        "all smooth": {"label_smoothing": 1.0, "weight": weight},
        "weights": {"weight": weight, "label_smoothing": 0.2},
        "z": {"z_loss": 1e-2, "token_weights": tokens},
        "caps": {"softcap": 4.0, "logit_scale": 0.5, "temperature": 0.7},
        "temperatures": {"softcap": 4.0, "temperature": temperature, "reduction": "none"},
    }


NAMES = [*options(1, 1)]


def make(rows: int, classes: int, features: int, dtype: torch.dtype) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(rows, features, generator=made, dtype=torch.float64)
    weight = torch.randn(classes, features, generator=made, dtype=torch.float64)
    bias = torch.randn(classes, generator=made, dtype=torch.float64)
    weight *= 3 * features**-0.5
    target = torch.randint(0, classes, (rows,), generator=made)
    target[1::5] = -100
    return [x.to(dtype), weight.to(dtype), bias.to(dtype), target]


def soften(rows: int, classes: int) -> torch.Tensor:
    """Probabilities that need not sum to 1."""
    made = torch.Generator().manual_seed(2)
    mass = torch.rand(rows, 1, generator=made) + 0.5
    return torch.rand(rows, classes, generator=made).softmax(1) * mass


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
