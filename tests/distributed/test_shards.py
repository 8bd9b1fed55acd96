"""Contract 9: every op serves its declared shards without a collective, exactly."""

# Parameters and results are DTensors, which torch's annotations do not say.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import torchweld
from comparing import shares_rows
from oracle import TORCH, is_floating
from processes import on
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.distributed import CountCollectives
from torchweld.registry import OPS, materialize

# Batch norms are left out: their documentation says what one of a shard computes.
# Tokens are routed all at once: experts_mlp gathers shards.
WHOLE = {"batch_norm_act", "linear_batch_norm_act", "experts_mlp"}
NAMES = sorted(OPS.keys() - WHOLE)
GEMMS = {"linear_act", "mlp", "gated_mlp"}


def _with_gradients(op: Any, inputs: list[Any], place: Any) -> tuple[Any, Any, tuple[Any, Any]]:
    """Results, gradients, and what both directions sent, of arguments that `place` places."""
    given = list(inputs)
    leaves = []
    for at, value in enumerate(inputs):
        name = op.forward_signature.arguments[at]
        if isinstance(value, torch.Tensor) and name != "seed":
            given[at] = place(value.detach())
            if is_floating(value) and name in op.differentiable:
                given[at] = given[at].requires_grad_()
                leaves.append(given[at])
    with CountCollectives() as forward:
        results = as_tuple(call(op, *given))
    parts = [r.to_local() if isinstance(r, DTensor) else r for r in results]
    total = sum(part.square().sum() for part in parts if part.requires_grad)
    with CountCollectives() as backward:
        gradients = torch.autograd.grad(total, leaves)
    return results, gradients, (forward, backward)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=shares_rows if n in GEMMS else ()) for n in NAMES]
)
@on(2)
def test_shards_need_no_collective(rank: int, name: str) -> None:
    mesh, op = init_device_mesh("cpu", (2,)), OPS[name]
    inputs = materialize(op.sized((4, 6), (16,)), torch.float64)
    if op.seed_at is not None:
        assert op.draws(inputs)
    x = inputs[0]
    rows = x.ndim - op.sharding.columns(*inputs)
    assert rows > 0
    expected, wanted, _ = _with_gradients(op, inputs, lambda value: value)
    for dim in range(rows):

        def place(value: torch.Tensor, dim: int = dim) -> Any:
            at = dim - (x.ndim - value.ndim)
            cut = at >= 0 and value.shape[at] == x.shape[dim]
            return distribute_tensor(value, mesh, [Shard(at) if cut else Replicate()])

        found, gradients, sent = _with_gradients(op, inputs, place)
        forward, backward = sent
        assert not forward.calls, f"dimension {dim}: {dict(forward.calls)}"
        # A replicated argument has a partial gradient; GEMMs inside an op leave reducing it to the
        # caller.
        sums = [g for g in gradients if g.placements != (Shard(dim),)]
        assert backward.calls.keys() <= {"all-reduce"}
        assert backward.calls["all-reduce"] <= len(sums)
        assert backward.bytes["all-reduce"] <= sum(8 * g.numel() for g in sums)
        for result, whole in zip(found, expected, strict=True):
            assert result.placements == (Shard(dim),)
            torch.testing.assert_close(result.full_tensor(), whole)
        for gradient, whole in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(gradient.full_tensor(), whole)


@on(2)
def test_parts_of_rows_are_gathered(rank: int) -> None:
    """Norms do not serve parts of a row: torch's own gathers them too."""
    mesh, op = init_device_mesh("cpu", (2,)), OPS["layer_norm"]
    inputs = materialize(op.sized((4, 6), (16,)), torch.float32)
    inputs[0] = distribute_tensor(inputs[0], mesh, [Shard(2)])
    with CountCollectives() as counted:
        y = as_tuple(call(op, *inputs))[0]
    assert y.placements == (Replicate(),)
    assert counted.calls == {"all-gather": 1}


# --- Options, and placements of torch's own -------------------------------------------------------

# The CPU kernels, and the automatic choice.
BACKENDS = pytest.mark.parametrize("backend", ["cpu", None])
WIDTH, ROWS = 256, 64


@BACKENDS
@on(2)
def test_dropout_on_shards(rank: int, backend: str | None) -> None:
    """Sharded by heads, queries or batches, dropout equals one device's, also if causal."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(2, 4, 7, 9, generator=torch.Generator().manual_seed(1))
    mask = torch.rand(2, 1, 1, 9, generator=torch.Generator().manual_seed(2)) > 0.2
    bias = torch.randn(4, 1, 9, generator=torch.Generator().manual_seed(3))

    def run(scores: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        biased = torchweld.functional.softmax_dropout(scores, bias, causal=True, p=0.4)
        return biased + torchweld.functional.softmax_dropout(scores, mask, scale=0.5, p=0.3)

    scores = whole.clone().requires_grad_()
    expected = run(scores, mask, bias)
    expected.square().sum().backward()
    for placement in (Shard(0), Shard(1), Shard(2), Shard(3), Replicate()):
        shards = distribute_tensor(whole, mesh, [placement]).requires_grad_()
        y = run(shards, mask, bias)
        assert y.placements == ((Replicate(),) if placement == Shard(3) else (placement,))
        torch.testing.assert_close(y.full_tensor(), expected)
        y.square().sum().backward()
        torch.testing.assert_close(shards.grad.full_tensor(), scores.grad)


@BACKENDS
@on(4)
def test_strided_shards_equal_one_process(rank: int, backend: str | None) -> None:
    """As made by FSDP2 over tensor parallelism, and with gaps; norms too."""
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(1))

    def run(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        dropped = torchweld.functional.softmax_dropout(x, p=0.4)
        return torchweld.functional.layer_norm(dropped, [16])

    leaf = whole.clone().requires_grad_()
    expected = run(leaf)
    expected.square().sum().backward()
    strided = _StridedShard(0, split_factor=2)
    layouts = [[strided, Shard(0)]]
    if TORCH >= (2, 13):  # older ones cannot redistribute shards with gaps
        layouts += [[strided, Replicate()], [strided, Shard(1)]]
    for placements in layouts:
        shards = distribute_tensor(whole, mesh, placements).requires_grad_()
        y = run(shards)
        cut = [getattr(placement, "dim", None) for placement in y.placements]
        assert cut == [getattr(placement, "dim", None) for placement in placements]
        torch.testing.assert_close(y.full_tensor(), expected)
        y.square().sum().backward()
        torch.testing.assert_close(shards.grad.full_tensor(), leaf.grad)


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH),
        torchweld.nn.LayerNorm(WIDTH),
        torch.nn.Linear(WIDTH, WIDTH),
        torchweld.nn.RMSNorm(WIDTH),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05).add_(0.1)
    return model


def _batch() -> torch.Tensor:
    return torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


@BACKENDS
@on(2)
def test_norms_of_a_sharded_sequence(rank: int, backend: str | None) -> None:

    mesh = init_device_mesh("cpu", (2,))
    model = _model()
    plan = {"1": SequenceParallel(), "3": SequenceParallel()}
    norms = parallelize_module(model, mesh, plan)
    x = model[0](_batch())
    y = norms[1](DTensor.from_local(x.chunk(2, 1)[rank], mesh, [Shard(1)]))
    assert y.placements == (Shard(1),)
    z = norms[3](DTensor.from_local(model[2](y.full_tensor()).chunk(2, 1)[rank], mesh, [Shard(1)]))
    assert z.placements == (Shard(1),)
    expected = _model()
    reference = expected(_batch())
    torch.testing.assert_close(z.full_tensor(), reference, rtol=1e-5, atol=1e-5)
    # The last norm's gradient is a sum over shards.
    z.full_tensor().square().mean().backward()
    reference.square().mean().backward()
    gradient = norms[3].weight.grad.full_tensor()
    torch.testing.assert_close(gradient, expected[3].weight.grad, rtol=1e-4, atol=1e-6)
