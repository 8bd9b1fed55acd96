"""Contract 4: the size of a call changes neither what it accepts nor what it returns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import selection
import torchweld
from oracle import is_floating
from torchweld import functional, nn
from torchweld.bench.cases import CASES
from torchweld.dispatch import call as call_module
from torchweld.dispatch.autograd import as_tuple
from torchweld.random import Shard
from torchweld.registry import Op, TensorSpec, materialize

_OTHERS = (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64)


def _nested(t: torch.Tensor, layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor([t.detach()] * 2, layout=layout)


_LAST = torch.channels_last

KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda t: t,
    "nothing": lambda t: None,
    "a list": lambda t: t.tolist(),
    "an array": lambda t: t.detach().float().numpy(),
    **{str(d): lambda t, d=d: t.detach().to(d) for d in (torch.float32, *_OTHERS)},
    "sparse": lambda t: t.detach().to_sparse(),
    "compressed": lambda t: t.detach().to_sparse_csr(),
    "mkldnn": lambda t: t.detach().to_mkldnn(),
    "meta": lambda t: t.to("meta"),
    "jagged": lambda t: _nested(t, torch.jagged),
    "nested": lambda t: _nested(t, torch.strided),
    "too short": lambda t: t[..., :-1],
    "its first": lambda t: t[:1],
    "a dimension more": lambda t: t[None],
    "a scalar": lambda t: t.flatten()[0],
    "columns first": lambda t: t.detach().transpose(0, -1).contiguous().transpose(0, -1),
    "channels last": lambda t: t.detach().expand(2, 3, *t.shape).contiguous(memory_format=_LAST),
    "of no rows": lambda t: t[:0],
    "with a gradient": lambda t: t.detach().clone().requires_grad_(),
}
DTYPES = {
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bfloat16 with float32": (torch.bfloat16, torch.float32),
    "float32 with bfloat16": (torch.float32, torch.bfloat16),
}
# Arguments that no op accepts, and some that only a few accept.
REFUSED = ("a list", "an array", "sparse", "compressed", "mkldnn", "nested", "torch.complex64")


def _sizes(sample: tuple[Any, ...]) -> tuple[int, int]:
    """A sort key: the number of tensors, then their smallness."""
    specs = [v for v in sample if isinstance(v, TensorSpec)]
    return len(specs), -sum(math.prod(s.shape) for s in specs)


def _samples(op: Op) -> list[tuple[Any, ...]]:
    """The sample with the most arguments, for each setting of training and dropout."""
    found: dict[Any, tuple[Any, ...]] = {}
    for sample in CASES[op.name].samples:
        specs = [v for v in sample if isinstance(v, TensorSpec)]
        x, *_ = (s.shape for s in specs)
        if len(x) == 2 and min(x) >= 5 and 0 not in sum((s.shape for s in specs), ()):
            named = dict(zip(op.forward_signature.arguments, sample, strict=True))
            key = (named.get("training"), named.get("seed") is None)
            found[key] = max(found.get(key, sample), sample, key=_sizes)
    return list(found.values())


def _outcome(op: Op, inputs: list[Any], gradients: bool) -> tuple[Any, list[Any]]:
    """The outcome of a call, as words and as numbers."""
    try:
        results = list(as_tuple(call_module.call(op, *inputs)))
        leaves = [v for v in inputs if isinstance(v, torch.Tensor) and v.requires_grad]
        if gradients and leaves and not any(r.is_meta for r in results):
            loss = sum((r.values() if r.is_nested else r).float().square().sum() for r in results)
            results += torch.autograd.grad(loss, leaves, allow_unused=True)
    except torchweld.ArgumentError as error:
        return f"{error.argument} is refused", []
    kinds = [
        r if r is None else (r.dtype, r.layout, r.device, r.is_nested or (r.shape, r.stride()))
        for r in results
    ]
    return kinds, [r for r in results if r is not None and not r.is_meta]


def _drawn(op: Op, sample: tuple[Any, ...], dtypes: Any, gradients: bool) -> list[Any]:
    inputs = materialize(sample, dtypes[0], param_dtype=dtypes[1])
    for name, value in zip(op.forward_signature.arguments, inputs, strict=True):
        if gradients and name in op.differentiable and value is not None:
            value.requires_grad_()
    return inputs


# torch warns that these layouts are prototypes.
quiet = pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")


@quiet
@pytest.mark.targets(composites=True)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_size_decides_nothing(
    op: Op, dtype: str, gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace each argument by every kind, in a small call and in a large one."""
    too_small = call_module.is_too_small
    for sample in _samples(op):
        for at, spec in enumerate(sample):
            if not isinstance(spec, TensorSpec) or spec.kind == "seed":
                continue
            name = op.forward_signature.arguments[at]
            for i, (kind, make) in enumerate(KINDS.items()):
                # A kind has every second dtype with gradients, and the others without.
                turn = (i + [*DTYPES].index(dtype) + gradients) % 2
                if turn and kind != "itself" and not selection.WHOLE:
                    continue
                if kind in ("compressed", "channels last") and len(spec.shape) != 2:
                    continue  # the op takes a matrix
                if kind in ("mkldnn", "with a gradient") and spec.kind == "boolean":
                    continue  # the op has only such numbers
                outcomes = []
                for decide in (too_small, lambda *_: False):
                    monkeypatch.setattr(call_module, "is_too_small", decide)
                    inputs = _drawn(op, sample, DTYPES[dtype], gradients)
                    inputs[at] = make(inputs[at])
                    outcomes.append(_outcome(op, inputs, gradients))
                (small, first), (large, second) = outcomes
                assert small == large, f"{name}: {kind}"
                if kind == "itself" and isinstance(small, str):
                    break  # these dtypes cannot be combined
                if kind in REFUSED:
                    assert small == f"{name} is refused", kind
                for a, b in zip(first, second, strict=True):
                    _assert_alike(a, b, inputs, f"{name}: {kind}")


def _assert_alike(a: torch.Tensor, b: torch.Tensor, inputs: list[Any], what: str) -> None:
    """Equal within a few roundings of the inputs; other tests check exactness."""
    a, b = (t.detach().values() if t.is_nested else t.detach() for t in (a, b))
    dtypes = {v.dtype for v in inputs if is_floating(v)}
    roundings = max(16 * 2**-8 if dtype.itemsize == 2 else 64 * 2**-24 for dtype in dtypes)
    off, scale = (a.double() - b.double()).norm(), b.double().norm()
    assert off <= roundings * scale + 1e-4, what


# The number of arguments that may be jagged, without dropout.
JAGGED = {
    **dict.fromkeys(("layer_norm", "rms_norm", "bias_act", "linear_act", "mlp", "gated_mlp"), 1),
    **dict.fromkeys(("gated_act", "dropout_add_layer_norm", "dropout_add_rms_norm"), 2),
    "bias_dropout_add": 2,
}


@quiet
@pytest.mark.targets(composites=True)
@pytest.mark.parametrize("small", [False, True])
def test_jagged_tensors_are_served_or_refused(
    op: Op, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager gives the numbers of packed rows; a kernel selected by name refuses."""
    monkeypatch.setattr(call_module, "is_too_small", lambda *_: small)
    for sample in _samples(op):
        plain = _drawn(op, sample, DTYPES["float32"], True)
        flowing = [
            at
            for at, spec in enumerate(sample)
            if isinstance(spec, TensorSpec) and spec.kind in ("activation", "residual")
            if spec.shape == sample[0].shape
        ]
        rows = sample[0].shape[0]
        jagged = list(plain)
        offsets = torch.tensor([0, 1, rows])
        for at in flowing:
            jagged[at] = torch.nested.nested_tensor_from_jagged(plain[at], offsets)
        draws = op.draws(plain)
        if op.name not in JAGGED or draws:
            with pytest.raises(torchweld.ArgumentError, match="jagged"):
                call_module.call(op, *jagged)
            continue
        assert len(flowing) == JAGGED[op.name]
        leaves = [v for v in plain if isinstance(v, torch.Tensor) and v.requires_grad]
        both = []
        for inputs in (jagged, plain):
            results = [
                r.values() if r.is_nested else r for r in as_tuple(call_module.call(op, *inputs))
            ]
            loss = torch.stack([r.square().sum() for r in results]).sum()
            both.append([*results, *torch.autograd.grad(loss, leaves)])
        for found, expected in zip(*both, strict=True):
            # Sums of terms as large as the largest result, in another order.
            atol = 16 * torch.finfo(torch.float32).eps * expected.abs().max().item()
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)
        with torchweld.use_backend("cpu"), pytest.raises(torchweld.BackendError, match="nested"):
            call_module.call(op, *jagged)


@pytest.mark.parametrize("backend", [None, "cpu", "eager"])
def test_numpys_numbers_are_numbers(backend: str | None) -> None:
    """They work like Python's, as probabilities, factors, seeds, epsilons and sizes."""
    x, ones = torch.randn(6, 8), torch.ones(8)
    half, seed, eight = numpy.float32(0.5), numpy.int64(3), numpy.int32(8)
    shard = Shard((numpy.int64(6), 8), (numpy.int64(0), 0))
    cases: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (
            partial(functional.softmax_dropout, x),
            {"p": half, "scale": numpy.float64(0.5), "seed": seed, "shard": shard},
        ),
        (
            partial(functional.bias_dropout_add, x, None, x),
            {"p": numpy.float16(0.5), "seed": numpy.uint64(3)},
        ),
        (partial(functional.layer_norm, x), {"normalized_shape": [eight], "eps": half}),
        (
            partial(functional.batch_norm_act, x, ones, ones, training=True),
            {"momentum": half, "eps": half},
        ),
        (
            lambda **how: nn.DropoutAddLayerNorm(**how).eval()(x, x),
            {"normalized_shape": eight, "p": half, "eps": half},
        ),
    ]
    with torchweld.use_backend(backend):
        for function, given in cases:
            python = tree_map_only(numpy.generic, lambda number: number.item(), given)
            assert torch.equal(function(**given), function(**python))


@pytest.mark.parametrize("backend", [None, "cpu", "eager"])
def test_a_scale_for_float64_may_be_larger(backend: str | None) -> None:
    x = torch.randn(4, 8, dtype=torch.float64) * 1e-39
    with torchweld.use_backend(backend):
        torch.testing.assert_close(
            functional.softmax_dropout(x, scale=1e39), torch.softmax(x * 1e39, -1)
        )


@pytest.mark.parametrize("rows", [8, 4096])
@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7)], ids=str)
def test_rms_norm_keeps_channels_last_as_torchs_does(rows: int, shape: tuple[int, ...]) -> None:
    kept = {2: torch.channels_last, 3: torch.channels_last_3d}[len(shape)]
    x = torch.randn(rows, 3, *shape).contiguous(memory_format=kept)
    theirs = torch.nn.functional.rms_norm(x, shape[-1:])
    ours = functional.rms_norm(x, shape[-1:])
    assert ours.stride() == theirs.stride()
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rows", [8, 65536])
def test_other_results_are_contiguous(rows: int) -> None:
    x = torch.randn(31, rows).t()
    calls: dict[str, Callable[[], Any]] = {
        "bias_act": lambda: functional.bias_act(x),
        "gated_act": lambda: functional.gated_act(x, x),
        "bias_dropout_add": lambda: functional.bias_dropout_add(x, None, x),
        "layer_norm": lambda: functional.layer_norm(x, [31]),
        "rms_norm": lambda: functional.rms_norm(x, [31]),
        "softmax_dropout": lambda: functional.softmax_dropout(x),
    }
    for name, function in calls.items():
        for backend in (None, "eager"):
            with torchweld.use_backend(backend):
                assert function().is_contiguous(), name


EMPTY = [(0, 1), (0, 5), (3, 0), (2, 3, 0, 1), (2, 0, 3, 5)]


@pytest.mark.parametrize("backend", [None, "cpu"])
@pytest.mark.parametrize("shape", [*EMPTY, (6, 8)], ids=str)
def test_fakes_agree(op: Op, shape: tuple[int, ...], backend: str | None) -> None:
    """For a transposed tensor, and for empty ones, to which eager torch gives special strides."""
    arguments = materialize(op.sized(shape[:-1], shape[-1:]), torch.float32)
    if arguments[0].numel():
        arguments[0] = arguments[0].transpose(0, -1).contiguous().transpose(0, -1)
    with torchweld.use_backend(backend):
        results = as_tuple(call_module.call(op, *arguments))
        with FakeTensorMode() as mode:
            imagined = [
                mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in arguments
            ]
            fakes = as_tuple(call_module.call(op, *imagined))
    for fake, real in zip(fakes, results, strict=True):
        assert fake.shape == real.shape
        assert fake.stride() == real.stride()
        assert fake.dtype == real.dtype


_PAIRS = list(itertools.product([torch.float32, torch.bfloat16], repeat=3))


@pytest.mark.parametrize(("x_dtype", "statistics", "learnt"), _PAIRS, ids=str)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("linear", [False, True])
def test_batch_norms_columns_mix(
    linear: bool,
    training: bool,
    x_dtype: torch.dtype,
    statistics: torch.dtype,
    learnt: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Running statistics of one dtype and parameters of another; either may be None."""
    x = torch.randn(64, 16).to(x_dtype)
    factors = ((torch.randn(16, 16) / 4).to(x_dtype), torch.randn(16).to(x_dtype))
    for weight, bias in itertools.product([None, torch.rand(16) + 1], [None, torch.randn(16)]):
        columns = [None if t is None else t.to(learnt) for t in (weight, bias)]
        found = []
        for small in (True, False):
            monkeypatch.setattr(call_module, "is_too_small", lambda *_, small=small: small)
            running = [torch.zeros(16, dtype=statistics), torch.ones(16, dtype=statistics)]
            if linear:
                given = (*factors, *running, *columns, training)
                y = functional.linear_batch_norm_act(x, *given)
            else:
                y = functional.batch_norm_act(x, *running, *columns, training)
            found.append([y, *running])
        for a, b in zip(*found, strict=True):
            assert a.dtype == b.dtype
            _assert_alike(a, b, [x, *running, *columns], "")
