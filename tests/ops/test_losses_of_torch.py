"""The losses on torch's own samples, the memory they take, and properties of them."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
import types
import unittest
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

import torchweld
from conftest import running_at
from torchweld import functional, numerics
from torchweld.bench.measure.memory import LiveBytes
from torchweld.dispatch.proof import Judge
from torchweld.dispatch.warm import cache, plans
from torchweld.errors import ArgumentError
from torchweld.ops.loss import chunks, rows


@pytest.fixture(autouse=True, scope="module")
def _without_expecttest() -> Iterator[None]:
    """The samples are made without this package, which torch's module of them imports."""
    with pytest.MonkeyPatch.context() as patch:
        stub = types.ModuleType("expecttest")
        stub.__dict__.update(TestCase=unittest.TestCase, ACCEPT=False)
        patch.setitem(sys.modules, "expecttest", stub)
        yield


def _samples(name: str) -> list[Any]:
    opinfo = pytest.importorskip("torch.testing._internal.common_methods_invocations")
    # Its import forbids to set the flags of torch.backends, also to other tests.
    torch.backends.__dict__["__allow_nonbracketed_mutation_flag"] = True
    found = [
        op for op in opinfo.op_db if op.name.endswith(f"functional.{name}") and op.name[:2] == "nn"
    ]
    if not found:
        pytest.skip(f"this torch has no {name}")
    many = itertools.chain.from_iterable(
        op.sample_inputs("cpu", torch.float64, requires_grad=True) for op in found
    )
    return [*itertools.islice(many, 400)]


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_torchs_samples(name: str, backend: str) -> None:
    """Results and gradients of every sample are torch's."""
    ours, theirs = getattr(functional, name), getattr(F, name, None)
    count = 0
    for sample in _samples(name):
        tensors = [sample.input, *sample.args, *sample.kwargs.values()]
        wanted = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
        weight = sample.kwargs.get("weight")
        if weight is not None and weight.requires_grad:
            # torch gives class weights no gradient either; ours refuses what asks for one.
            sample.kwargs["weight"] = weight.detach()
            wanted = [t for t in wanted if t is not weight]
        with torchweld.use_backend(backend):
            found = ours(sample.input, *sample.args, **sample.kwargs)
        sample.kwargs.pop("options", None)
        true = theirs(sample.input, *sample.args, **sample.kwargs)
        torch.testing.assert_close(found, true, **numerics.CHAINED64, equal_nan=True)
        if not true.requires_grad:
            continue
        grad = torch.randn_like(true)
        pairs = zip(
            torch.autograd.grad(found, wanted, grad, allow_unused=True),
            torch.autograd.grad(true, wanted, grad, allow_unused=True),
            strict=True,
        )
        for got, exact in pairs:
            if exact is not None:
                torch.testing.assert_close(got, exact, **numerics.CHAINED64, equal_nan=True)
        count += 1
    assert count > 10


@pytest.mark.parametrize("accumulate", ["float32", "parameter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_memory(dtype: torch.dtype, accumulate: str) -> None:
    """The peak without inputs, results and gradients is at most what is stated."""
    count, classes, features = 700, 5000, 64
    x = torch.randn(count, features).to(dtype).requires_grad_()
    weight = torch.randn(classes, features).to(dtype).requires_grad_()
    target = torch.randint(0, classes, (count,))
    memory = 2**21
    with LiveBytes() as mode:
        loss = functional.linear_cross_entropy(
            x, weight, target, memory=memory, accumulate=accumulate
        )
        loss.backward()
    gradients = sum(t.numel() * t.element_size() for t in (x, weight))
    sums = 4 * weight.numel() if dtype == torch.bfloat16 and accumulate == "float32" else 0
    of_rows = count * 4 * 24  # statistics, coefficients and targets
    assert mode.peak > gradients + memory // 2  # the trace sees something
    assert mode.peak <= (memory + sums) * 1.01 + gradients + of_rows


_RESIDENT = """
import re, torch
from torch.nn import functional as F
from torchweld import functional

def measure(what):  # ru_maxrss would begin at that of the process that forked this one
    with open("/proc/self/status") as file:
        return int(re.search(what + r":\\s*(\\d+) kB", file.read())[1])

x = torch.randn(4, 512).bfloat16().requires_grad_()
weight = torch.full((128256, 512), 0.01, dtype=torch.bfloat16).requires_grad_()
target = torch.arange(4)
F.cross_entropy(F.linear(x[:2], weight.detach()[:100]), target[:2]).backward()

def print_memory(call, before):
    grads = torch.autograd.grad(call(), (x, weight))
    print((measure("VmHWM") - before) * 1024 - sum(grad.nbytes for grad in grads))

how = {"memory": 2**25, "accumulate": "parameter"}
ours = lambda: functional.linear_cross_entropy(x, weight, target, **how)
print_memory(ours, measure("VmHWM"))
options = torch.nn.LinearCrossEntropyOptions()
theirs = lambda: F.linear_cross_entropy(x, weight, target, options=options)
print_memory(theirs, measure("VmRSS"))  # the highest mark is ours
"""


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has none")
def test_resident_memory_is_a_tenth_of_torchs() -> None:
    """A 16-bit head has 128256 words. torch has a copy and a sum of it in float32."""
    command = [sys.executable, "-c", _RESIDENT]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    taken = [float(number) for number in printed.split()]
    assert taken[1] > 4 * 128256 * 512  # the trace sees at least one of them
    assert taken[0] <= 0.1 * taken[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("others", [{}, {"reduction": "none"}, {"label_smoothing": 0.1}], ids=str)
def test_a_weight_of_more_dimensions_is_torchs(dtype: torch.dtype, others: dict[str, Any]) -> None:
    """A loss at each of 3 x 2 positions; arguments about chunks are refused, not forgotten."""
    leaves = [torch.randn(s).to(dtype).requires_grad_() for s in ((6, 5), (7, 3, 2, 5), (7, 3, 2))]
    target = torch.randint(0, 7, (6, 3, 2))
    target[1, 2] = -100
    x, weight, bias = leaves

    def run(function: Any) -> list[torch.Tensor]:
        loss = function(x, weight, target, linear_bias=bias, **others)
        return [loss, *torch.autograd.grad(loss.sum(), leaves)]

    wide = [t.detach().double() for t in leaves]
    logits = F.linear(wide[0], wide[1].flatten(0, 2), wide[2].flatten()).view(6, 7, 3, 2)
    exact = F.cross_entropy(logits, target, **others)
    lce: Any = functional.linear_cross_entropy
    found = run(lce)
    # A logit is a sum of 6 terms below 10: off by 6 roundings of 60. A loss is of two logits.
    assert (found[0] - exact).abs().max() <= 2 * 6 * 60 * torch.finfo(dtype).eps / 2
    if hasattr(F, "linear_cross_entropy"):  # not in older versions
        torch.testing.assert_close(found, run(F.linear_cross_entropy))
    refused = {"logits_dtype": torch.float32, "memory": 2**20, "accumulate": "grad"}
    for name, value in (refused | {"batch_invariant": True}).items():
        with pytest.raises(ArgumentError, match=f"{name} is .* of more than two dimensions"):
            lce(x, weight, target, **{name: value})


@pytest.mark.parametrize("width", [1, 37, 5000])
@pytest.mark.parametrize("targets", [0, 1, 3])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_interpreter_equals_the_reference(width: int, targets: int, softcap: float) -> None:
    """Triton's kernels are the reference's equal, in the interpreter."""
    pytest.importorskip("triton")
    count = 4
    logits = torch.randn(count, width) * 3
    if width > 1:
        logits[0, ::2] = -torch.inf
    target = torch.randint(0, width, (count, targets))
    target[1] = -1
    target[2, :1] = width  # out of range
    target[3] = rows.ELSEWHERE
    weight, q = torch.rand(width) + 0.1, torch.rand(count, width) if targets != 1 else None
    how = (weight if targets else None, q, torch.rand(count) + 0.5, 0.7, softcap)
    forward, in_place = rows.FORWARD, rows.BOTH_IN_PLACE
    close = {**numerics.SUMMED, "equal_nan": True}
    # What is not asked for is as the reference has it too: a trial on a GPU compares all results.
    for asked in itertools.product((False, True), repeat=3):
        found = forward.overload("triton")(logits, target, *how, *asked)
        true = forward.reference(logits, target, *how, *asked)
        torch.testing.assert_close(found, true, **close)
    coefficients, picked = torch.randn(count, 5), torch.randn(count, targets)
    without = coefficients.clone()
    without[:, rows.ON_ENTROPY : rows.ON_SMOOTH + 1] = 0
    for each in (coefficients, without):  # kernels skip terms that no row has
        arguments = (logits, target, true[1], each, picked, *how)
        got = rows.BACKWARD.overload("triton")(*arguments)
        exact = rows.BACKWARD.reference(*arguments)
        torch.testing.assert_close(got, exact, **close)
    overlapping = torch.empty(4 * width).as_strided(logits.shape, (width - 1, 1))
    for refused in (logits.t().contiguous().t(), overlapping) if width > 1 else ():
        with pytest.raises(ValueError, match="adjacent columns, and rows that do not overlap"):
            in_place.overload("triton")(refused, target, coefficients, picked, *how, False, True)
    for smooth, each in ((False, without), (True, coefficients)):
        results = []
        for run in (in_place.overload("triton"), in_place.reference):
            over = logits.clone()
            results.append([over, *run(over, target, each, picked, *how, smooth, True)])
        torch.testing.assert_close(*results, **close)
    if softcap == 0:
        assert torch.equal(found[2], true[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 7, 197, 9001])
@pytest.mark.parametrize("targets", [0, 1, 3])
def test_padded_rows_have_the_bits_of_contiguous_ones_in_the_interpreter(
    width: int, targets: int, dtype: torch.dtype
) -> None:
    """No kernel reads or writes the padding, which is NaN and infinity here."""
    pytest.importorskip("triton")
    count = 4
    logits = (torch.randn(count, width) * 3).to(dtype)
    padding = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38]).to(dtype)
    base = padding.repeat(count, width // 4 + 16)
    padded = base[:, :width]
    before = base.clone()
    target = torch.randint(0, width, (count, targets))
    target[1] = -1
    target[2, 1:] = rows.ELSEWHERE
    q = torch.rand(count, width) if targets == 0 else None
    how = (torch.rand(width) + 0.1, q, torch.rand(count) + 0.5, 0.7, 4.0 if targets == 3 else 0.0)
    coefficients, picked = torch.randn(count, 5), torch.randn(count, targets)

    def run(place: torch.Tensor) -> list[torch.Tensor]:
        place.copy_(logits)
        forward = rows.FORWARD.overload("triton")(place, target, *how, True, True, True)
        saved = (target, forward[1], coefficients, picked, *how)
        made = [*forward, rows.BACKWARD.overload("triton")(place, *saved)]
        rows.BACKWARD_IN_PLACE.overload("triton")(place, *saved)
        made.append(place.clone())
        place.copy_(logits)
        given = (target, coefficients, picked, *how, True, True)
        return [*made, *rows.BOTH_IN_PLACE.overload("triton")(place, *given), place]

    for got, true in zip(run(padded), run(logits.clone()), strict=True):
        assert torch.equal(got.contiguous().view(torch.uint8), true.view(torch.uint8))
    beside = base[:, width:].contiguous()
    assert torch.equal(beside.view(torch.uint8), before[:, width:].contiguous().view(torch.uint8))


@pytest.mark.parametrize("where", ["interpreter", "eager"])
@pytest.mark.parametrize(
    "kw",
    [
        {},
        {"reduction": "none", "label_smoothing": 0.1},
        {"logits_dtype": torch.float32},
        {"batch_invariant": True},
    ],
    ids=["kept", "recomputed", "in blocks", "batch invariant"],
)
def test_padded_logits(where: str, kw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's logits have padded rows in all chunks. Padding of NaN is in no result."""
    if where == "interpreter":
        pytest.importorskip("triton")
    classes, features = 523, 24
    dtype = torch.float16 if "logits_dtype" in kw else torch.float32
    made = torch.Generator().manual_seed(0)
    given = [
        torch.randn(n, features, generator=made).to(dtype).requires_grad_() for n in (150, classes)
    ]
    target = torch.randint(0, classes, (150,), generator=made)
    target[::7] = -100
    kept, strides = chunks.Gemms.__init__, set()

    def poisoned(gemms: Any, *others: Any) -> None:
        kept(gemms, *others)
        whole = gemms._buffer.untyped_storage().nbytes() // gemms._buffer.element_size()
        gemms._buffer.as_strided((whole,), (1,)).fill_(torch.nan)
        strides.add(gemms._buffer.stride())

    results = []
    for pads in (False, True):
        cache.forget()  # the short way of calls without padding
        monkeypatch.setattr(chunks, "_pads_rows", lambda _, pads=pads: pads)
        monkeypatch.setattr(chunks.Gemms, "__init__", poisoned)
        with running_at(where, monkeypatch) if where != "eager" else torchweld.use_backend(where):
            settings: Any = {"memory": 300_000, **kw}
            loss = functional.linear_cross_entropy(given[0], given[1], target, **settings)
            results.append([loss, *torch.autograd.grad(loss.sum(), given)])
        assert strides == {(544 if pads else classes, 1)}  # 17 lines of 32 numbers
        strides.clear()
    cache.forget()
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(*results, rtol=16 * unit, atol=16 * unit)


@pytest.mark.parametrize(("classes", "dtype"), [(50257, torch.bfloat16), (3, torch.float32)])
def test_only_a_gpu_pads_logits(classes: int, dtype: torch.dtype) -> None:
    """To whole lines of 128 bytes, which the memory of a chunk counts."""
    each = 128 // dtype.itemsize
    with FakeTensorMode():
        for device, width in (("cpu", classes), ("cuda", -(-classes // each) * each)):
            x, weight = (torch.empty(n, 64, dtype=dtype, device=device) for n in (9000, classes))
            layer = chunks.Layer(x, weight, None, 2**28, x.dtype, True, False, classes)
            needs = chunks.Needs(True, False, False)
            taken = chunks.count_bytes_of_row(layer, False, needs)
            assert taken == width * dtype.itemsize
            plan = chunks.make_plan(layer, needs, rows.FORWARD.run)._replace(each=64)
            buffer = chunks.Gemms(layer, plan)._buffer
            assert buffer.shape == (64, classes)
            assert buffer.stride() == (width, 1)


def test_the_table_of_memory_is_current() -> None:
    """docs/losses.md says what the code computes."""
    page = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
    found = re.findall(r"\| (\d+) x (\d+), (\w+) \| (\d+) MiB \| (\d+) \| (\d+)", page)
    assert len(found) == 4
    for classes, features, name, *said in found:
        dtype = getattr(torch, name)
        x = torch.empty(16384, int(features), dtype=dtype, device="meta")
        weight = torch.empty(int(classes), int(features), dtype=dtype, device="meta")
        layer = chunks.Layer(x, weight, None, 2**28, x.dtype, True, False, int(classes))
        needs = (True, True, False)
        each = chunks.find_rows(layer, chunks.Needs(*needs))
        kept = chunks.keeps_sums(layer, chunks.Needs(*needs), each)
        mib = 16384 * int(classes) * dtype.itemsize / 2**20
        wanted = [mib, each, 4 * weight.numel() / 2**20 if kept else 0]
        assert [float(number) for number in said] == pytest.approx(wanted, abs=0.5)


def test_float32_sums_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch adds 16-bit products to a float32 sum, no chunk's part is rounded before."""
    x, weight = torch.randn(96, 32).bfloat16(), torch.randn(70, 32).bfloat16().requires_grad_()
    target = torch.randint(0, 70, (96,))
    settings: Any = {"memory": 12_000, "reduction": "sum"}

    def gradient() -> torch.Tensor:
        loss = functional.linear_cross_entropy(x, weight, target, **settings)
        return torch.autograd.grad(loss, weight)[0]  # type: ignore[arg-type]

    added = []

    def add(
        total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, has_begun: bool = True
    ) -> None:
        added.append(has_begun)
        product = left.float() @ right.float()
        total.copy_(total + product if has_begun else product)

    rounded = gradient()
    monkeypatch.setattr(chunks, "_adds_to_float32", lambda *_: True)
    monkeypatch.setattr(chunks, "_add_to_float32", add)
    found = gradient()
    assert added[0] is False
    assert len(added) > 1
    assert all(added[1:])
    wide = weight.detach().double().requires_grad_()
    loss = F.cross_entropy(F.linear(x.double(), wide), target, reduction="sum")
    (exact,) = torch.autograd.grad(loss, wide)
    assert (found - exact).norm() <= (rounded - exact).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.37, math.inf])
def test_kept_gradients_are_scaled_in_the_interpreter(dtype: torch.dtype, factor: float) -> None:
    """By a factor in float32, rounded once; several times as many blocks as programs."""
    scale = pytest.importorskip("torchweld.triton_kernels.loss.scale")
    count = 3 * scale._PROGRAMS * 4 * scale._BLOCK + 5
    x = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = x.clone()
    rows.SCALE.overload("triton")(found, torch.tensor(factor))
    exact = x.double() * float(torch.tensor(factor))
    kind = torch.finfo(dtype)
    near = (found.double() - exact).abs() <= kind.eps * exact.abs().clamp(min=kind.tiny)
    assert bool((near | (found == exact)).all())
    assert factor != 1 or torch.equal(found, x)
    question = rows.SCALE._make_question(x, (x[:99], torch.tensor(factor)))
    judge = Judge(question.exact(), question.trusted(), question.rounded)
    exact_in_interpreter = dtype != torch.bfloat16 or factor != 0.37  # which cuts off bfloat16
    assert (judge.find_fault(question.run("triton")) is None) == exact_in_interpreter
    for refused, by, message in (
        (x[::2], torch.tensor(1.0), "contiguous"),
        (x.double(), torch.tensor(1.0), "float64"),
        (x, torch.ones(2), "one number"),
    ):
        with pytest.raises(ValueError, match=message):
            rows.SCALE.overload("triton")(refused, by)


def test_a_cuda_graph_takes_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake tensor has no numbers to wait for, as little as a tensor of a graph."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with FakeTensorMode():
        assert chunks.find_counted(torch.empty(8, 1, dtype=torch.int64, device="cuda")) is None
    assert chunks.find_counted(torch.tensor([[1], [-1]])) is not None


def test_the_memory_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of GPUs with 8, 24 and 141 GB."""
    gpu, sizes = torch.device("cuda"), iter((8e9, 24e9, 141e9))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [chunks.find_memory(torch.device(name)) for name in ("cpu", "cuda")] == [2**28] * 2

    def read(device: torch.device) -> Any:
        assert device == gpu
        return SimpleNamespace(total_memory=int(next(sizes)))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", read)
    assert [chunks.find_memory(gpu) for _ in range(3)] == [2**28, 750_000_000, 2**32]


class _Launches(TorchDispatchMode):
    """Counts what a GPU would launch or wait for, up to the first GEMM."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[str] = []
        self.has_begun = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_begun |= func is torch.ops.aten.mm.out
        if not self.has_begun and func not in plans._ALLOCATIONS | plans._VIEWS:
            self.before.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("ignored", "most"), [(0, 3), (2, 5)])
def test_a_pass_begins_with_its_gemm(ignored: int, most: int) -> None:
    """A GPU waits for the host until then: only the rows that count are found before."""
    x, weight = (torch.randn(n, 16).requires_grad_() for n in (64, 300))
    target = torch.randint(0, 300, (64,))
    target[:ignored] = -100
    with torchweld.use_backend("cpu"), _Launches() as launches:
        functional.linear_cross_entropy(
            x,
            weight,
            target,
            label_smoothing=0.1,
            z_loss=1e-3,
            memory=2**28,  # in chunks
        )
    assert launches.has_begun
    assert len(launches.before) <= most, launches.before
