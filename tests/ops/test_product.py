"""Products of 16-bit matrices by float32 GEMMs, and all that multiplies by them.

On CPUs without 16-bit units torch multiplies in plain loops: a step of a small GPT under bfloat16
autocast took 31.6 s there, and 2.8 in float32. No test counted which products were torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from oracle import Pool
from torchweld import functional, numerics, optim
from torchweld.dispatch.warm import cache
from torchweld.ops.attention import converted
from torchweld.ops.gemm import gemm, product
from torchweld.registry import OPS, processor
from torchweld.registry.composite import Composite
from torchweld.sparse.by_length import DENSE

PRODUCT, MULTIPLY = torch.ops.torchweld.product.cpu, torch.ops.torchweld.multiply_.cpu
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
# Rows, terms, columns: around blocks' and panels' sizes.
SIZES = [
    *((1, 1, 1), (4, 1, 5), (17, 33, 65), (128, 129, 130), (257, 100, 300), (3, 5000, 40)),
    *((600, 2100, 260), (16, 40, 4100)),
]


@pytest.fixture(autouse=True)
def without_units(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take every CPU for one without 16-bit units."""
    monkeypatch.setattr(processor, "_find", lambda dtype: False)
    monkeypatch.setattr(product, "_SMALLEST", 0)
    for op in OPS.values():
        if isinstance(op, Composite):
            wide = tuple(x for x in op.dtypes_of_eager if x.itemsize > 2)
            monkeypatch.setattr(op, "dtypes_of_eager", wide)
    cache.forget()
    yield
    cache.forget()


def _draw(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


# --- The kernel -----------------------------------------------------------------------------------


def _lay_out(t: torch.Tensor) -> Iterator[torch.Tensor]:
    """The same matrix in several layouts."""
    yield t
    yield t.mT.contiguous().mT
    yield torch.cat([t, t], -1)[..., : t.shape[-1]]
    yield torch.stack([t, t], -1)[..., 0]


@every_dtype
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=str)
def test_sums_are_rounded_once(dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    """In every layout, with a start that is a row, or what is overwritten."""
    out_dtype = out_dtype or dtype
    ours, rounding = Pool(), Pool()
    for rows, terms, columns in SIZES:
        left, right = _draw(rows, terms, dtype=dtype), _draw(terms, columns, dtype=dtype)
        start, row = _draw(rows, columns, dtype=out_dtype), _draw(columns, dtype=dtype)
        bases = {None: torch.zeros(()), "out": start, "row": row}
        for a, b in zip(_lay_out(left), _lay_out(right), strict=True):
            for name, base in bases.items():
                alpha, beta = (1.0, 1.0) if name is None else (0.5, -2.0)
                out = start.clone()
                added = {None: None, "out": out, "row": row.expand(out.shape)}[name]
                MULTIPLY(out, a, b, added, alpha, beta)
                exact = alpha * (left.double() @ right.double()) + beta * base.double()
                ours.add(out - exact, exact)
                rounding.add(exact.to(out_dtype) - exact, exact)
    # float32 sums of up to 5000 terms; in 16 bits rounding the result is all that counts.
    most = 1.02 * rounding.rms if out_dtype is dtype else rounding.rms * 5000**0.5
    print(f"{ours.rms / rounding.rms:.3f} of what rounding costs")
    assert ours.rms <= most


@every_dtype
def test_bits(dtype: torch.dtype) -> None:
    """The same at every number of threads, and for a matrix with others or by itself."""
    threads = torch.get_num_threads()
    left, right = _draw(3, 300, 2100, dtype=dtype), _draw(3, 2100, 270, dtype=dtype)
    try:
        found = []
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            found.append(PRODUCT(left, right, None, 1.0, 1.0))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert torch.equal(found[0], other)
    for at in range(3):
        assert torch.equal(PRODUCT(left[at], right[at], None, 1.0, 1.0), found[0][at])


@every_dtype
def test_writes_only_its_own(dtype: torch.dtype) -> None:
    """Numbers around a result in a larger buffer stay."""
    for rows, terms, columns in SIZES:
        left, right = _draw(rows, terms, dtype=dtype), _draw(terms, columns, dtype=dtype)
        for turned in (False, True):
            buffer = torch.full((rows + 2, columns + 3), 7.0, dtype=dtype)
            if turned:
                buffer = buffer.t().contiguous().t()
            MULTIPLY(buffer[1:-1, 1:-2], left, right, None, 1.0, 1.0)
            assert torch.equal(buffer[1:-1, 1:-2], PRODUCT(left, right, None, 1.0, 1.0))
            buffer[1:-1, 1:-2] = 7
            assert bool((buffer == 7).all())


@every_dtype
def test_numbers_that_are_not_ordinary(dtype: torch.dtype) -> None:
    """NaN, infinities, huge and tiny numbers come out as torch's float32 product has them.

    Its product in bfloat16 is no measure: with AMX an infinity makes the row before it NaN.
    """
    info = torch.finfo(dtype)
    left, right = _draw(40, 70, dtype=dtype), _draw(70, 50, dtype=dtype)
    left[0, 3], left[1, 4], left[2, 5] = torch.nan, torch.inf, -torch.inf
    # Sums of the largest bfloat16 numbers overflow float32 or not, by their order.
    huge = 2.0**100 if dtype is torch.bfloat16 else info.max
    left[3], left[4], right[6] = huge, info.smallest_normal, 0
    right[:, 7] = huge
    expected, found = (left.float() @ right.float()).to(dtype), product.multiply(left, right)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    finite = expected.isfinite()
    exact = left.double() @ right.double()
    errors = [(each.double() - exact)[finite].abs().max() for each in (found, expected)]
    assert errors[0] <= errors[1]


@every_dtype
def test_nothing_to_add(dtype: torch.dtype) -> None:
    """No rows, no columns, and no terms, where a result is its bias."""
    bias = _draw(5, dtype=dtype)
    for rows, terms, columns in ((0, 3, 5), (4, 0, 5), (0, 0, 5)):
        x, weight = torch.empty(rows, terms, dtype=dtype), torch.empty(columns, terms, dtype=dtype)
        assert torch.equal(gemm.linear(x, weight, bias), bias.expand(rows, columns))
        assert torch.equal(product.multiply(x, weight.t()), torch.zeros(rows, columns, dtype=dtype))
        out = torch.full((rows, columns), torch.nan, dtype=dtype)
        MULTIPLY(out, x, weight.t(), None, 1.0, 1.0)
        assert torch.equal(out, torch.zeros(rows, columns, dtype=dtype))
    assert gemm.linear(torch.ones(4, 3, dtype=dtype), torch.ones(0, 3, dtype=dtype)).shape == (4, 0)


def test_says_what_it_takes() -> None:
    a, b = torch.ones(4, 3).bfloat16(), torch.ones(3, 5).bfloat16()
    for left, right, start, message in (
        (a, b.t(), None, "sizes of a product do not match"),
        (a.double(), b, None, "float64"),
        (a, b, torch.ones(5).bfloat16(), "start does not fit"),
        (a[0], b, None, "not matrices or batches"),
    ):
        with pytest.raises(RuntimeError, match=message):
            PRODUCT(left, right, start, 1.0, 1.0)
    with pytest.raises(RuntimeError, match="out, left and right are not all matrices"):
        MULTIPLY(torch.ones(1, 4, 5).bfloat16(), a, b, None, 1.0, 1.0)
    torch.library.opcheck(PRODUCT, (a, b, None, 1.0, 1.0))
    torch.library.opcheck(MULTIPLY, (torch.ones(4, 5).bfloat16(), a, b, None, 1.0, 1.0))


# --- Gradients ------------------------------------------------------------------------------------


def _run(function: Callable[..., torch.Tensor], *given: torch.Tensor) -> list[torch.Tensor]:
    given = tuple(t.detach().requires_grad_() for t in given)
    y = function(*given)
    grad = torch.linspace(-1, 1, y.numel()).view(y.shape).bfloat16().to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, given, grad)]


def _is_no_less_exact(ours: Any, torchs: Any, *given: torch.Tensor) -> None:
    exact = _run(torchs, *(t.double() for t in given))
    for found, expected, truth in zip(_run(ours, *given), _run(torchs, *given), exact, strict=True):
        assert found.dtype is expected.dtype
        assert found.shape == expected.shape
        # torch's errors vary with the CPU; ours are of rounding once, and of the saved result.
        once = (truth.to(found.dtype) - truth).norm()
        assert (found - truth).norm() <= max(1.02 * (expected - truth).norm(), 1.5 * once)


@every_dtype
def test_gradients(dtype: torch.dtype) -> None:
    """At most torch's errors, or about one rounding: layers, products of batches, attention."""
    x, weight, bias = (_draw(*n, dtype=dtype) for n in ((6, 20, 48), (72, 48), (72,)))
    linear = torch.nn.functional.linear
    _is_no_less_exact(gemm.linear, linear, x, weight, bias)
    _is_no_less_exact(product.multiply, torch.matmul, x, weight.t())
    heads = [_draw(2, 3, n, 16, dtype=dtype) for n in (30, 40, 41)]
    _is_no_less_exact(product.multiply, torch.matmul, heads[0], heads[1].mT)
    attention = torch.nn.functional.scaled_dot_product_attention
    q, k, v = heads[0], heads[1], heads[1].flip(-1)
    _is_no_less_exact(converted.attention, attention, q, k, v)
    mask, seen = _draw(2, 1, 30, 40, dtype=dtype), torch.rand(30, 40) > 0.5
    for how in ({"attn_mask": seen}, {"is_causal": True}, {"scale": 0.3}):
        _is_no_less_exact(
            lambda *t, how=how: converted.attention(*t, **how),
            lambda *t, how=how: attention(*t, **how),
            *(q, k, v),
        )
    found = _run(lambda *t: converted.attention(*t, attn_mask=mask), q, k, v)
    exact = _run(
        lambda *t: attention(*t, attn_mask=mask.double()), *(t.double() for t in (q, k, v))
    )
    for one, truth in zip(found, exact, strict=True):
        assert (one - truth).norm() <= 1e-2 * truth.norm()
    grouped = (_draw(2, 6, 30, 16, dtype=dtype), k, v)
    _is_no_less_exact(
        lambda *t: converted.attention(*t, enable_gqa=True),
        lambda *t: attention(*t, enable_gqa=True),
        *grouped,
    )


@pytest.mark.parametrize("numbers", [1, 2**21], ids=["entries", "all"])
def test_attention_in_parts(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    """Parts of a batch with their parts of a mask; torch's own steps where there is dropout."""
    monkeypatch.setattr(converted, "_NUMBERS", numbers)
    q, k, v = (_draw(3, 2, n, 16, dtype=torch.bfloat16) for n in (30, 40, 40))
    attention = torch.nn.functional.scaled_dot_product_attention
    for mask in (torch.rand(3, 1, 30, 40) > 0.5, torch.rand(1, 2, 30, 40) > 0.5, None):
        _is_no_less_exact(
            lambda *t, m=mask: converted.attention(*t, attn_mask=m),
            lambda *t, m=mask: attention(*t, attn_mask=m),
            *(q, k, v),
        )
    dropped = converted.attention(q, k, v, dropout_p=0.5)
    assert dropped.dtype is torch.bfloat16
    assert not torch.equal(dropped, converted.attention(q, k, v))


@every_dtype
def test_autocast_and_second_derivatives(dtype: torch.dtype) -> None:
    x, weight, bias = (_draw(*n, dtype=torch.float32) for n in ((40, 48), (72, 48), (72,)))
    linear = torch.nn.functional.linear
    with torch.autocast("cpu", dtype):
        found, expected = (_run(f, x, weight, bias) for f in (gemm.linear, linear))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, **numerics.BFLOAT16)
    given = [t.to(dtype).requires_grad_() for t in (x, weight)]

    def differentiate_twice(function: Any) -> torch.Tensor:
        y = function(*given).float().square().sum()
        (first,) = torch.autograd.grad(y, given[:1], create_graph=True)
        return torch.autograd.grad(first.float().square().sum(), given[1])[0]

    torch.testing.assert_close(
        *map(differentiate_twice, (gemm.linear, linear)), rtol=5e-2, atol=5e-1 * 48
    )


# --- All that multiplies --------------------------------------------------------------------------

_ATEN = torch.ops.aten
_TORCHS = {
    *(_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm, _ATEN.addmm_, _ATEN.mv, _ATEN.addmv),
    *(_ATEN._scaled_dot_product_flash_attention_for_cpu, _ATEN.linear, _ATEN.matmul),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward,
}


class _Watch(TorchDispatchMode):
    """Lists torch's products of 16 bits, and counts ours."""

    def __init__(self) -> None:
        super().__init__()
        self.torchs: list[str] = []
        self.ours = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [t for t in args if isinstance(t, torch.Tensor)]
        if func.overloadpacket in _TORCHS and any(t.dtype.itemsize == 2 for t in tensors):
            self.torchs.append(str(func))
        self.ours += func in (PRODUCT, MULTIPLY)
        return func(*args, **kwargs or {})


def _layer(rows: int, inner: int, out: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    sizes = ((rows, inner), (out, inner), (out,))
    return tuple(_draw(*size, dtype=dtype).requires_grad_() for size in sizes)


def _list_calls(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    x, up, bias = _layer(64, 48, 96, dtype)
    down, target = _layer(1, 96, 48, dtype)[1], torch.arange(64) % 96
    hidden = torch.randn(2, 64, 96, dtype=dtype).requires_grad_()
    columns = [torch.zeros(96), torch.ones(96), None, None]
    q, k, v = (torch.randn(1, 2, 64, 16, dtype=dtype).requires_grad_() for _ in range(3))
    del hidden
    classes: dict[str, Any] = {"linear_bias": bias}
    return {
        "linear_act": lambda: functional.linear_act(x, up, bias, activation="gelu"),
        "identity": lambda: functional.linear_act(x, up, bias, activation="identity"),
        "linear_gelu": lambda: functional.linear_gelu(x, up, bias, recompute=True),
        "mlp": lambda: functional.mlp(x, up, bias, down, None),
        "mlp again": lambda: functional.mlp(x, up, bias, down, None, recompute=True),
        "gated_mlp": lambda: functional.gated_mlp(x, up, up, down),
        "batch norm": lambda: functional.linear_batch_norm_act(
            x, up, bias, *columns, training=True, activation="gelu"
        ),
        "loss": lambda: functional.linear_cross_entropy(x, up, target, **classes),
        "loss in chunks": lambda: functional.linear_cross_entropy(
            x, up, target, memory=2**15, **classes
        ),
        "losses": lambda: functional.linear_cross_entropy(x, up, target, reduction="none"),
        "logprobs": lambda: functional.linear_logprobs(x, up, target),
        "attention": lambda: functional.block_sparse_attention(q, k, v, DENSE.of(q, k)),
    }


_NAMES = list(_list_calls(torch.float32))


@every_dtype
@pytest.mark.parametrize("name", _NAMES)
def test_no_product_is_torchs(dtype: torch.dtype, name: str) -> None:
    """In both directions, and without gradients; also where autocast chooses the dtype."""
    for casts in (False, True):
        call = _list_calls(torch.float32 if casts else dtype)[name]
        for trains in (True, False):
            with (
                _Watch() as watch,
                torch.set_grad_enabled(trains),
                torch.autocast("cpu", dtype, enabled=casts),
            ):
                y = call()
            with watch:
                if trains:
                    y.float().sum().backward()
            assert not watch.torchs
            assert watch.ours or name == "attention"


def test_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it iterates in float32 without units, in bfloat16 with them, or as asked."""
    start = _draw(40, 60, dtype=torch.float32)

    def step(**how: Any) -> tuple[torch.Tensor, _Watch]:
        p = start.clone().requires_grad_()
        p.grad = start.roll(1)
        with _Watch() as watch:
            optim.Muon([p], lr=0.1, **how).step()
        return p.detach(), watch

    default, watch = step()
    assert not watch.ours
    assert torch.equal(default, step(ns_dtype=torch.float32)[0])
    asked, watch = step(ns_dtype=torch.bfloat16)
    assert watch.ours
    assert not watch.torchs
    assert not torch.equal(default, asked)
    monkeypatch.setattr(processor, "_find", lambda dtype: True)
    p = start.clone().requires_grad_()
    p.grad = start.roll(1)
    with _Watch() as watch:
        optim.Muon([p], lr=0.1).step()
    assert watch.torchs
    assert not watch.ours
    saved = optim.Muon([start.clone().requires_grad_()], ns_dtype=None).state_dict()
    assert "ns_dtype" not in saved["param_groups"][0]


def test_compiled() -> None:
    """A graph without a break holds the op, for any number of rows."""
    x, weight, bias = _layer(64, 48, 96, torch.bfloat16)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.linear_act(x, weight, bias, activation="gelu")

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    for rows in (64, 20, 8):
        given = x.detach()[:rows].clone().requires_grad_()
        y = compiled(given)
        y.float().sum().backward()
        torch.testing.assert_close(y, function(given), **numerics.BFLOAT16)
    assert len(graphs) == 2
    targets = [node.target for graph in graphs for node in graph.graph.nodes]
    assert targets.count(PRODUCT) == 3
    assert not any(getattr(target, "overloadpacket", None) in _TORCHS for target in targets)
