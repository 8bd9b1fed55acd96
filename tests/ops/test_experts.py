"""experts_mlp beyond the contract: forms with kinks, routings, and what it saves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torchweld
from oracle import assert_right, assert_same_bits_on_any_threads, incoming, run, saved_bytes
from torchweld import functional
from torchweld.bench.cases import CASES
from torchweld.ops.experts import grouped, mlp
from torchweld.registry import Made, materialize

OP = mlp.OP
# Numbers of a wave that has few rows.
WAVE = 16 * (2 * (24 + 10) + 10 + 12)


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    with torchweld.use_backend("cpu"):
        yield


def _inputs(
    indices: torch.Tensor, experts: int, form: Any = mlp.FORMS["gated"], **how: Any
) -> list[Any]:
    tokens, top = indices.shape
    sample = mlp.arguments((tokens,), top, experts, (10, 12, 10), form, biases=True)
    return materialize((*sample[:3], Made(lambda: indices), *sample[4:]), torch.float32, **how)


@pytest.mark.parametrize("form", mlp.FORMS)
def test_every_form(form: str) -> None:
    """Sizes at which float32 meets every kink, and rows for several chunks."""
    sample = mlp.arguments((300,), 3, 4, (24, 20, 28), mlp.FORMS[form], biases=True, skipped=True)
    assert_right(OP, materialize(sample, torch.float32))


def test_several_blocks_of_each_product() -> None:
    assert_right(
        OP, materialize(mlp.arguments((530,), 2, 1, (70, 1100, 1060), biases=True), torch.float32)
    )


def test_large_errors_are_kinks_of_the_limit() -> None:
    """A gradient of gpt-oss jumps where a gate is at the limit: float32 may be on the other side.

    Rows are moved to where some gate is the limit but for roundings. Against float64 their errors
    are up to the size of the jump, for eager as for the kernel; all others' are roundings.
    """
    sample = mlp.arguments((4000,), 1, 3, (24, 20, 28), mlp.FORMS["gpt_oss"], biases=True)
    names = OP.forward_signature.arguments
    given = dict(zip(names, materialize(sample, torch.float32), strict=True))
    experts, limit = given["indices"][:, 0], given["limit"]
    # Each row's gate of one column, [token, in_features], and its bias.
    column = given["gate_up"][..., 0][experts]
    bias = given["gate_up_bias"][:, 0][experts].double()
    moved = torch.arange(4000) < 200
    gate = (given["input"].double() * column.double()).sum(-1)
    scale = (limit - bias) / gate
    given["input"][moved] *= scale[moved, None].float()
    inputs = [given[name] for name in names]
    exact = [v.double() if torch.is_tensor(v) and v.is_floating_point() else v for v in inputs]
    with torchweld.use_backend("eager"):
        truth, eager = run(OP, exact)["grad_input"], run(OP, inputs)["grad_input"]
    terms = CASES[OP.name].terms(*exact, grad_y=incoming(truth.new_empty(4000, 28)))["grad_input"]
    for found in (run(OP, inputs)["grad_input"], eager):
        errors = ((found - truth).abs() / (2.0**-24 * terms)).amax(-1)
        jumps = errors > 1
        assert jumps.any()
        assert not jumps[~moved].any()


# How many rows each expert gets: none, one, about as many as a chunk has, and many.
counts = st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 40]), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(counts=counts, top=st.integers(1, 4), skipped=st.sampled_from([0, 3]), data=st.data())
def test_every_routing(counts: list[int], top: int, skipped: int, data: st.DataObject) -> None:
    """The rows of each expert in any order, duplicates within a token among them."""
    experts = len(counts)
    ids = [e for e, n in enumerate(counts) for _ in range(n)] + [experts] * skipped + [-1] * skipped
    ids += [0] * (-len(ids) % top)
    ids = data.draw(st.permutations(ids))
    form = data.draw(st.sampled_from([*mlp.FORMS.values()]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "_WAVE", WAVE)
        indices = torch.tensor(ids, dtype=torch.int64).view(-1, top)
        inputs = _inputs(indices, experts, form)
        inputs[4][(indices < 0) | (indices >= experts)] = torch.nan  # nothing reads their weights
        assert_right(OP, inputs)


@pytest.mark.parametrize("form", mlp.FORMS)
@pytest.mark.parametrize("at", [0, 1])
def test_the_same_bits_at_every_run_and_number_of_threads(at: int, form: str) -> None:
    sample = mlp.arguments(*SIZES[at], mlp.FORMS[form], biases=True)
    inputs = materialize(sample, torch.float32)
    assert_same_bits_on_any_threads(lambda: run(OP, inputs).values())


# Tokens, experts of each, experts and widths: one block for each product, and several.
SIZES = [((200,), 4, 6, (64, 48, 64)), ((1300,), 1, 1, (40, 280, 300))]


@pytest.mark.parametrize("size", SIZES)
def test_other_tokens_order_changes_no_bit(size: Any) -> None:
    inputs = materialize(mlp.arguments(*size), torch.float32)
    order = torch.randperm(len(inputs[0]), generator=torch.Generator().manual_seed(0))
    moved = [v[order] if at in (0, 3, 4) else v for at, v in enumerate(inputs)]
    assert torch.equal(
        functional.experts_mlp(*moved[:5]), functional.experts_mlp(*inputs[:5])[order]
    )


# --- Cost -----------------------------------------------------------------------------------------


def test_only_wanted_gradients_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen experts, as under LoRA on other layers, take the two GEMMs of the input's gradient."""
    inputs = materialize(mlp.arguments((32,), 2, 3, (16, 16, 16), biases=True), torch.float32)
    products, multiply, counted = 32 * 2 * 16 * 16, grouped._MULTIPLY, [0]

    def multiply_and_count(out: Any, left: Any, right: Any, *how: Any) -> None:
        if left.shape[-1] > 1 and right.shape[-1] > 1:  # not a bias
            counted[0] += len(left) * left.shape[-1] * right.shape[-1] // products
        multiply(out, left, right, *how)

    monkeypatch.setattr(grouped, "_MULTIPLY", multiply_and_count)

    def count(*names: str) -> int:
        for name, value in zip(OP.forward_signature.arguments, inputs, strict=True):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.requires_grad_(name in names)
        y = OP.plan("cpu", *inputs)(*inputs)
        counted[0] = 0
        y.sum().backward()
        for name, value in zip(OP.forward_signature.arguments, inputs, strict=True):
            if isinstance(value, torch.Tensor):
                assert (value.grad is not None) == (name in names), name
                value.grad = None
        return counted[0]

    assert count("input") == 3
    assert count("down") == 2
    assert count("gate_up") == 3
    assert count("input", "gate_up", "down") == 6


def test_the_default_device_changes_nothing() -> None:
    inputs = materialize(mlp.arguments((32,), 2, 3, (16, 24, 16)), torch.float32)[:5]
    expected = functional.experts_mlp(*inputs)
    with torch.device("meta"):
        assert torch.equal(functional.experts_mlp(*inputs), expected)


def test_what_is_saved() -> None:
    """The first product and the order; with recompute the order only."""
    inputs = materialize(
        mlp.arguments((32,), 2, 3, (16, 24, 16)), torch.float32, requires_grad=True
    )[:5]
    given = sum(v.numel() * v.itemsize for v in inputs)
    order, z = 64 * 8, 64 * 48 * 4
    assert saved_bytes(lambda: functional.experts_mlp(*inputs)) == given + order + z
    again = saved_bytes(lambda: functional.experts_mlp(*inputs, recompute=True))
    assert again == given + order


# --- torch's machinery ----------------------------------------------------------------------------


def test_other_routings_do_not_recompile() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(functional.experts_mlp, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        indices = torch.randint(seed, 4, (40, 2), generator=torch.Generator().manual_seed(seed))
        inputs = _inputs(indices, 4, requires_grad=True)[:5]
        with torch._dynamo.config.patch(error_on_recompile=seed > 0):
            found = compiled(*inputs)
        assert torch.equal(found, functional.experts_mlp(*inputs))
        leaves = [v for v in inputs if v.requires_grad]
        expected = torch.autograd.grad(functional.experts_mlp(*inputs).square().sum(), leaves)
        for a, b in zip(torch.autograd.grad(found.square().sum(), leaves), expected, strict=True):
            assert torch.equal(a, b)


def test_a_batch_of_indices_takes_the_reference() -> None:
    indices = torch.stack([torch.tensor([[0, 1], [2, 2]]), torch.tensor([[1, 3], [0, 2]])])
    inputs = _inputs(indices[0], 3)[:5]

    def function(indices: torch.Tensor) -> torch.Tensor:
        return functional.experts_mlp(*inputs[:3], indices, inputs[4])

    with torchweld.use_backend(None):
        found = torch.func.vmap(function)(indices)
        torch.testing.assert_close(found, torch.stack([function(i) for i in indices]))


def test_checkpoints() -> None:
    inputs = _inputs(torch.tensor([[0, 1], [2, 2]]), 3, requires_grad=True)[:5]
    expected = torch.autograd.grad(functional.experts_mlp(*inputs).sum(), inputs[0])
    y = torch.utils.checkpoint.checkpoint(functional.experts_mlp, *inputs, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(y.sum(), inputs[0])[0], expected[0])
