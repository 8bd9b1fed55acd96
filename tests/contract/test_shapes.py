"""Contract 4 and 5: any memory layout, every element written, special values as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import selection
from conftest import PLACES, Target
from oracle import (
    assert_right,
    exact,
    is_floating,
    run,
    takes_several_trailing_dimensions,
)
from torchweld.bench.cases import CASES
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.ops import activation as activations
from torchweld.registry import materialize

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "every second": lambda t: torch.stack([t, torch.full_like(t, torch.nan)], -1)[..., 0],
    "padded rows": lambda t: torch.nn.functional.pad(t, (3, 5), value=torch.nan)[..., 3:-5],
    "expanded": lambda t: t[:1].expand_as(t),
    "offset by one element": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(target: Target, layout: str) -> None:
    """Each tensor argument, and the gradient, in each layout."""
    arguments = target.op.sized((2, 3), (31,))
    plain = materialize(arguments, torch.float32, target.device)
    integers = (torch.int32, torch.int64)  # a seed, or a layout's lists
    for position, value in enumerate(plain):
        if isinstance(value, torch.Tensor) and value.numel() > 1 and value.dtype not in integers:
            # The CPU has all layouts of each argument, other places every second one.
            at = position + [*LAYOUTS].index(layout) + [*PLACES].index(target.place)
            if target.place != "cpu" and at % 2 and not selection.WHOLE:
                continue
            inputs = list(plain)
            inputs[position] = LAYOUTS[layout](value)
            assert inputs[position].shape == value.shape
            assert_right(target.op, inputs)
    leaves = materialize(arguments, torch.float32, target.device, requires_grad=True)
    results = as_tuple(call(target.op, *leaves))
    grads = [LAYOUTS[layout](torch.randn_like(result)) for result in results]
    tensors = [v for v in leaves if isinstance(v, torch.Tensor) and v.requires_grad]
    found = torch.autograd.grad(results, tensors, grads, retain_graph=True)
    expected = torch.autograd.grad(results, tensors, [grad.contiguous() for grad in grads])
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.targets(
    *("layer_norm", "rms_norm", "dropout_add_layer_norm", "dropout_add_rms_norm"),
    *("normalize_act", "batch_norm_act", "linear_batch_norm_act"),
)
def test_16_bit_parameters_beside_float32(target: Target) -> None:
    """Results equal those with float32 parameters; the parameters' gradients are rounded once."""
    narrow = [d for d in (torch.bfloat16, torch.float16) if d in (*target.dtypes, torch.float16)]
    place = [*PLACES].index(target.place)
    for i, dtype in enumerate(narrow):
        samples = [s for s in CASES[target.op.name].samples if len(s[0].shape) == 2][:6]
        if len(narrow) > 1 and not selection.WHOLE:  # the others have the other dtype
            samples = samples[(i + place) % 2 :: 2]
        for arguments in samples:
            inputs = materialize(arguments, torch.float32, target.device)
            for at, spec in enumerate(arguments):
                if getattr(spec, "parameter", False):
                    inputs[at] = inputs[at].to(dtype)
            copies = ([t.clone() if is_floating(t) else t for t in inputs] for _ in range(2))
            narrowed, wide = (
                next(copies),
                [t.float() if is_floating(t) else t for t in next(copies)],
            )
            expected = run(target.op, wide)
            for name, value in run(target.op, narrowed).items():
                assert torch.equal(value, expected[name].to(value.dtype)), name


@given(
    leading=st.lists(st.integers(0, 5), max_size=3),
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=2),
    wide=st.integers(0, 3000),
    seed=st.integers(0, 2**16),
)
def test_random_shapes(
    target: Target, leading: list[int], shape: list[int], wide: int, seed: int
) -> None:
    """Property: right at any shape."""
    if not takes_several_trailing_dimensions(target.op):
        shape = shape[-1:]
    shape = [*shape[:-1], shape[-1] + (wide if len(leading) < 2 else 0)]
    arguments = target.sized(tuple(leading), tuple(shape))
    assert_right(target.op, materialize(arguments, torch.float32, target.device, seed=seed))


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_special_values_come_out_as_eagers(
    target: Target, dtype: torch.dtype, special: float
) -> None:
    """NaN and infinity spread to exactly the elements that they reach in eager torch.

    Eager runs in float64: in float32 its gelu(inf) is NaN in whole vectors but inf in the row's
    remainder.
    """
    arguments = target.op.sized((33,), (64,))
    inputs = materialize(arguments, dtype, target.device)
    inputs[0][3, 17] = special
    inputs[0][32, 63] = special
    ours, eager = run(target.op, inputs), exact(target.op, inputs)
    for name, value in eager.items():
        assert torch.equal(ours[name].isnan(), value.isnan()), name
        assert torch.equal(ours[name].isinf(), value.isinf()), name


@pytest.mark.parametrize("kind", activations.KINDS, ids="-".join)
@pytest.mark.targets("normalize_act", "bias_act")
def test_special_values_of_every_activation(target: Target, kind: tuple[str, str]) -> None:
    """With given statistics a row's infinity reaches no gradient but where the formula has it."""
    *inputs, _, _ = materialize(target.op.sized((33,), (64,)), torch.float32, target.device)
    for column, special in enumerate((torch.nan, torch.inf, -torch.inf)):
        inputs[0][3, 5 * column] = special
    inputs += kind
    ours, eager = run(target.op, inputs), exact(target.op, inputs)
    for name, value in eager.items():
        assert torch.equal(ours[name].isnan(), value.isnan()), name


def test_unwritten_memory_would_show(target: Target) -> None:
    """New tensors are filled with NaN, and an op on zero columns leaves NaN in its statistics."""
    if target.backend == "triton":
        pytest.skip("torch.empty allocates: see watched.py")
    if len(target.op.forward_signature.results) == 1:
        pytest.skip("without statistics, zero columns leave nothing to check")
    if target.op.name == "block_sparse_attention":
        pytest.skip("with zero columns it still writes its log-sum-exp")
    inputs = materialize(target.op.sized((3,), (0,)), torch.float32, target.device)
    statistics = target.op.kernels[target.backend].forward(*inputs)[-1]
    assert statistics.isnan().all()


@pytest.mark.usefixtures("alone_on_the_gpu")
def test_more_elements_than_31_bits_count(target: Target) -> None:
    """A repeated block of rows: every copy has the first one's results, and sums are multiples.

    Without a GPU there are too few rows to exceed 31 bits; then the run only checks the test
    itself.
    """
    if target.op.name == "block_sparse_attention":
        pytest.skip("its rows depend on each other: its own tests have many heads")
    (rows, width), copies = ((4096, 1024), 513) if target.device == "cuda" else ((8, 32), 5)
    dtype = torch.bfloat16 if torch.bfloat16 in target.dtypes else torch.float32
    names = target.op.forward_signature.arguments
    arguments = dict(zip(names, target.op.sized((rows,), (width,)), strict=True))
    arguments |= {name: off for name, off in (("p", 0.0), ("seed", None)) if name in names}
    block = dict(zip(names, materialize(arguments.values(), dtype, target.device), strict=True))
    tiled = {
        name: v.repeat(copies, 1) if isinstance(v, torch.Tensor) and v.ndim == 2 else v
        for name, v in block.items()
    }

    def both_ways(inputs: dict[str, Any]) -> list[torch.Tensor]:
        """Run forward and backward; return results and gradients."""
        wanted = [inputs[name].requires_grad_() for name in target.op.differentiable]
        results = as_tuple(call(target.op, *inputs.values()))
        grads = torch.autograd.grad(results, wanted, [r.detach() for r in results])
        return [*[r.detach() for r in results], *grads]

    for one, many in zip(both_ways(block), both_ways(tiled), strict=True):
        if one.ndim == 2:
            assert target.device != "cuda" or many.numel() > 2**31
            assert torch.equal(many.view(copies, rows, width), one.expand(copies, rows, width))
        else:
            largest = one.double().abs().max().item() * copies
            off = (many.double() - one.double() * copies).abs().max().item()
            assert off <= 2 * torch.finfo(dtype).eps * largest
