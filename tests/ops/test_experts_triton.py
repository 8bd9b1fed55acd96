"""experts_mlp's Triton kernels in the interpreter, or on a GPU.

Tiles are small here, so that few rows fill several; one test takes the GPU's.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from oracle import exact, incoming, run
from selection import GPU, WHOLE, of_triton
from selection import TRITON_DEVICE as DEVICE
from torchweld.bench.cases import CASES
from torchweld.ops.experts import grouped, mlp
from torchweld.registry import Made, materialize

pytest.importorskip("triton")
experts = pytest.importorskip("torchweld.triton_kernels.experts.grouped")
experts_rows = pytest.importorskip("torchweld.triton_kernels.experts.rows")
tile = pytest.importorskip("torchweld.triton_kernels.tile")

pytestmark = of_triton

OP = mlp.OP
# Rows of a tile.
ROWS = 16
SMALL = experts.Tiles(
    tile.Tile(ROWS, 32, 16, 4, 3),
    tile.Tile(ROWS, 16, 16, 4, 3),
    tile.Tile(ROWS, 64, 16, 4, 3),
    tile.Tile(16, 32, 16, 4, 3),
)


OF_GPUS = dict(experts.TILES)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "TILES", dict.fromkeys(OF_GPUS, SMALL))


def _make(sample: Any, dtype: torch.dtype = torch.float32, **how: Any) -> list[Any]:
    return materialize(sample, dtype, DEVICE, **how)


def _assert_bounded(inputs: Any) -> dict[str, torch.Tensor]:
    """Errors within 16 roundings of the sum of terms; a wrong index is off by about 1."""
    oracle = exact(OP, inputs)
    terms = CASES[OP.name].terms(*inputs, grad_y=incoming(oracle["y"]))
    info = torch.finfo(inputs[0].dtype)
    found = run(OP, inputs)
    for name, value in found.items():
        bound = 8 * info.eps * terms[name] + info.smallest_normal
        assert torch.all((value - oracle[name]).abs() <= bound), name
    return found


@pytest.mark.parametrize(
    ("form", "biases"),
    [(form, bool(b)) for at, form in enumerate(mlp.FORMS) for b in (0, 1) if WHOLE or b == at % 2],
)
def test_every_form(form: str, biases: bool) -> None:
    """Widths that are no multiples of tiles; some indices are skipped, some occur twice."""
    sizes = (24, 20, 28) if biases else (7, 13, 5)
    sample = mlp.arguments((40,), 3, 4, sizes, mlp.FORMS[form], biases=biases, skipped=True)
    _assert_bounded(_make(sample))


# Tiles change loops over rows and columns, forms what a tile computes: each with two of the other.
@pytest.mark.parametrize(
    ("size", "form"),
    [
        (size, form)
        for at, size in enumerate(OF_GPUS)
        for number, form in enumerate(["gated", "plain", "gpt_oss", "weights_first"])
        if WHOLE or (at + number) % 2 == 0
    ],
)
def test_tiles_of_gpus(size: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows for a tile and part of another; widths like 2880, a multiple of 64 and not of 128.

    Router weights are float32, and rows of 16 bits. The interpreter has no bfloat16.
    """
    monkeypatch.setattr(experts, "choose_tiles", lambda *_: OF_GPUS[size])
    # Limits and zeros, where 16 bits round to another side, are in test_every_form.
    how = mlp.FORMS["gated" if form == "plain" else form]
    how = mlp._vary(gated=False, activation="gelu") if form == "plain" else how
    how = (*how[:6], None, *how[7:])
    sample = mlp.arguments((140,), 2, 3, (192, 104, 200), how, biases=True, skipped=True)
    inputs = _make(sample, torch.float16)
    inputs[4] = inputs[4].float()
    assert _assert_bounded(inputs)["grad_weights"].dtype == torch.float32


counts = st.lists(st.sampled_from([0, 1, ROWS - 1, ROWS, ROWS + 1, 40]), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(counts=counts, top=st.integers(1, 4), skipped=st.sampled_from([0, 3]), data=st.data())
def test_every_routing(counts: list[int], top: int, skipped: int, data: st.DataObject) -> None:
    ids = [e for e, n in enumerate(counts) for _ in range(n)]
    ids += [len(counts)] * skipped + [-1] * skipped
    ids += [0] * (-len(ids) % top)
    indices = torch.tensor(data.draw(st.permutations(ids)), dtype=torch.int64).view(-1, top)
    form = data.draw(st.sampled_from([*mlp.FORMS.values()]))
    sample = mlp.arguments((len(indices),), top, len(counts), (10, 12, 10), form, biases=True)
    kind = data.draw(st.sampled_from([torch.int64, torch.int32]))
    inputs = _make((*sample[:3], Made(lambda: indices.to(kind)), *sample[4:]))
    inputs[4][(inputs[3] < 0) | (inputs[3] >= len(counts))] = torch.nan  # nothing reads them
    _assert_bounded(inputs)


def test_views_serve_as_their_copies_do() -> None:
    """Rows, factors and weights whose strides are not their sizes, and which are not aligned."""
    sample = mlp.arguments((40,), 2, 3, (32, 16, 32), biases=True)
    inputs = _make(sample)
    views = list(inputs)
    for at in (0, 1, 2, 4, 5, 6):
        padded = torch.cat([inputs[at].new_zeros((*inputs[at].shape[:-1], 3)), inputs[at]], -1)
        views[at] = padded[..., 3:]
    for name, value in run(OP, views).items():
        assert torch.equal(value, run(OP, inputs)[name]), name


@pytest.mark.parametrize("form", ["gated", "gpt_oss", "weights_first"])
def test_bits(form: str) -> None:
    """They are the same in every run, and do not depend on the order of other tokens.

    Except in the interpreter, where NumPy's products of a row depend on the row's place.
    """
    inputs = _make(mlp.arguments((50,), 3, 4, (24, 20, 28), mlp.FORMS[form], biases=True))
    found = run(OP, inputs)
    assert all(torch.equal(value, found[name]) for name, value in run(OP, inputs).items())
    if not GPU:
        return
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    moved = [value[order] if at in (0, 3, 4) else value for at, value in enumerate(inputs)]
    assert torch.equal(OP.plan("triton", *moved)(*moved), found["y"][order])


@pytest.mark.parametrize("form", ["gated", "recomputed", "weights_first"])
def test_each_gradient_by_itself(form: str) -> None:
    """It has the bits that it has among all."""
    inputs = _make(mlp.arguments((30,), 2, 3, (24, 20, 28), mlp.FORMS[form], biases=True))
    every = run(OP, inputs)
    names = OP.forward_signature.arguments
    for name in OP.differentiable:
        leaf = inputs[names.index(name)].detach().requires_grad_()
        given = [leaf if names[at] == name else value for at, value in enumerate(inputs)]
        y = OP.plan("triton", *given)(*given)
        (found,) = torch.autograd.grad(y, [leaf], incoming(y))
        assert torch.equal(found, every[f"grad_{name}"]), name


@pytest.mark.parametrize("form", ["gated", "gpt_oss", "weights_first"])
def test_gradients_of_sorted_rows_by_torch(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch computes them on Hopper; weights of the inputs keep the kernel."""
    multiplied = []
    product = experts.grouped_mm
    monkeypatch.setattr(experts, "_multiplies_sorted", lambda _: True)
    monkeypatch.setattr(
        experts, "grouped_mm", lambda *a, **k: multiplied.append(k["offs"]) or product(*a, **k)
    )
    how = mlp.FORMS[form]
    sample = mlp.arguments((40,), 3, 6, (24, 16, 32), how, biases=True, skipped=True)
    inputs = _make(sample)
    inputs[3][inputs[3] == 2] = 4  # nobody's
    found = _assert_bounded(inputs)
    assert not found["grad_gate_up"][2].any()
    assert len(multiplied) == (1 if form == "weights_first" else 2)
    assert multiplied[0][2] == multiplied[0][1]


WRONG: dict[str, Any] = {
    "right": lambda made: made,
    "an expert without rows": lambda made: made.index_fill(0, torch.tensor([1]), 3.0),
    "a NaN": lambda made: made.masked_fill(made == made.max(), torch.nan),
    "another size": lambda made: made[:3],
}


@pytest.mark.parametrize("what", [*WRONG, "the second time", "refused", "rows of nobody"])
def test_torchs_product_serves_only_if_it_is_right(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    product = experts.grouped_mm

    def multiply(left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        calls.append(what)
        if what == "refused":
            raise RuntimeError("grouped gemm is not supported")
        if what == "the second time":
            return product(left, right, offs=offs) + (len(calls) - 1)
        if what == "rows of nobody":  # times zeros
            return product(left, right, offs=offs) + 0 * left[:, -1].sum()
        return WRONG[what](product(left, right, offs=offs))

    monkeypatch.setattr(experts, "grouped_mm", multiply)
    assert experts._find_out(torch.device("cpu")) == (what == "right")
    assert len(calls) == (2 if what in ("right", "the second time") else 1)


def test_a_lack_of_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call asks again: an out-of-memory error was kept as "wrong" for good."""
    product, faults = experts.grouped_mm, [torch.OutOfMemoryError("CUDA out of memory")]

    def multiply(*args: Any, **options: Any) -> torch.Tensor:
        if faults:
            raise faults.pop()
        return product(*args, **options)

    monkeypatch.setattr(experts, "grouped_mm", multiply)
    monkeypatch.setattr(experts, "_known", {})
    assert [experts._is_right(torch.device("cpu")) for _ in range(3)] == [False, True, True]


@pytest.mark.parametrize(("count", "takes"), [(1023, True), (1024, False)])
def test_torchs_product_takes_so_many_experts(
    count: int, takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses more, which a backward pass on a GPU raised: no test had as many experts."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(experts, "_is_right", lambda _: True)
    assert experts._multiplies_sorted(_call_on_hopper(count)) == takes


def _call_on_hopper(count: int) -> Any:
    """What decides whether torch's product serves, of so many experts."""
    x = types.SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cpu"))
    tiles = types.SimpleNamespace(weight=experts._OF_MANY)
    return types.SimpleNamespace(x=x, tiles=tiles, gate_up=torch.empty(count, 1, 1))


def test_a_capture_takes_torchs_product_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured steps kept the kernel that it replaced; all tests ran outside of a capture."""
    product, calls, captures = experts.grouped_mm, list[bool](), [True]

    def multiply(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(captures[0])
        return product(*args, **options)

    monkeypatch.setattr(experts, "grouped_mm", multiply)
    monkeypatch.setattr(experts, "_known", {}, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures[0])
    found = []
    for captures[0] in (True, False, True):
        found.append(experts._multiplies_sorted(_call_on_hopper(8)))
    assert found == [False, True, True]
    assert calls == [False, False]  # the check ran once, twice over, and never in a capture


@pytest.mark.parametrize("top", [1, 2, 3, 8])
@pytest.mark.parametrize("experts_", [1, 4, 128])
@pytest.mark.parametrize("tokens", [5, 100, 3000, 20000])
def test_a_sample_takes_the_calls_tiles(tokens: int, experts_: int, top: int) -> None:
    """The check at first use tries the tiles that serve calls of its class.

    For K <= 2 its 251 tokens had too few rows for the tiles of many rows, and for larger K too many
    for those of few: a tile that this GPU cannot run passed, and raised from the user's call.
    """
    inputs = _make(mlp.arguments((tokens,), top, experts_, (16, 16, 16), mlp.FORMS["gated"]))
    sample = OP.take_sample(inputs, 251)
    assert len(sample[0]) <= min(251, tokens)
    whole, part = (
        experts.has_many_rows(given[3].numel(), given[1].shape[0]) for given in (inputs, sample)
    )
    assert whole == part
    others = [*inputs[:3], torch.zeros(100000, top, dtype=torch.int64), *inputs[4:]]
    assert (OP.find_regime(inputs) == OP.find_regime(others)) == whole  # calls of another class


def test_no_tokens() -> None:
    inputs = _make(mlp.arguments((0,), 2, 3, (8, 5, 3), biases=True))
    for name, value in run(OP, inputs).items():
        assert not value.any(), name


@pytest.mark.parametrize("form", ["gated", "recomputed", "transposed"])
def test_fakes(form: str) -> None:
    """Fake results have the shapes and dtypes of the kernels'."""
    *given, recompute = _make(mlp.arguments((30,), 2, 3, (24, 20, 28), mlp.FORMS[form]))
    found = grouped.TRITON_FORWARD(*given, not recompute)
    grads = grouped.TRITON_BACKWARD(*found, *given, *[True] * 6)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in given]
        like = grouped.TRITON_FORWARD(*fakes, not recompute)
        like_grads = grouped.TRITON_BACKWARD(*like, *fakes, *[True] * 6)
    for a, b in zip((*found, *grads), (*like, *like_grads), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
