"""Contract 9: every op serves its declared shards without a collective, exactly."""

# Parameters and results are DTensors, which torch's annotations do not say.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from oracle import TORCH, is_floating
from processes import on, processes
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.distributed import CountCollectives
from torchweld.registry import OPS, materialize

# Batch norms are left out: their documentation says what one of a shard computes.
# Tokens are routed all at once: experts_mlp gathers shards.
WHOLE = {"batch_norm_act", "linear_batch_norm_act", "experts_mlp"}
NAMES = sorted(OPS.keys() - WHOLE)
GEMMS = {"linear_act", "mlp", "gated_mlp"}


def _serves_its_shards(rank: int, name: str) -> None:
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


@pytest.mark.parametrize("name", NAMES)
def test_shards_need_no_collective(name: str) -> None:
    if TORCH < (2, 12) and name in GEMMS:
        pytest.skip("DTensor of torch < 2.12 refuses a linear layer of a shard of the sequence")
    with processes(2) as two:
        two.run("cpu", _serves_its_shards, name)


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
