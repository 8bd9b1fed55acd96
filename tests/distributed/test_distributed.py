"""Contract 9: inside DDP, FSDP2, sequence parallelism and a pipeline, on two real processes."""

# Parameters and results are DTensors, which torch's annotations do not say.
# mypy: disable-error-code="attr-defined"

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import torchweld
from oracle import TORCH
from processes import on, processes

WIDTH, ROWS = 256, 64


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


def _expected() -> list[torch.Tensor | None]:
    """Gradients of the whole batch in one process, with torch's own norms."""
    model = _model()
    for module, plain in ((model[1], torch.nn.LayerNorm), (model[3], torch.nn.RMSNorm)):
        module.__class__ = plain
    model(_batch()).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def _assert_gradients(gradients: Sequence[torch.Tensor | None]) -> None:
    for found, expected in zip(gradients, _expected(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def _ddp(rank: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(_model())
    model(_batch()[rank]).square().mean().backward()
    _assert_gradients([parameter.grad for parameter in model.parameters()])


def _fsdp2(rank: int) -> None:

    model = _model()
    for module in model:
        fully_shard(module)
    fully_shard(model)
    model(_batch()[rank]).square().mean().backward()
    _assert_gradients([parameter.grad.full_tensor() for parameter in model.parameters()])


def _sequence_parallel(rank: int) -> None:

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


def _pipeline(rank: int) -> None:

    model = _model()
    part = model[2 * rank : 2 * rank + 2]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 2, loss_fn=lambda y, _: y.square().mean())
    if rank == 0:
        schedule.step(_batch())
    else:
        schedule.step(target=_batch())
    expected = _expected()
    gradients = [parameter.grad for parameter in part.parameters()]
    here = expected[:4] if rank == 0 else expected[4:]
    assert len(here) == len(gradients)
    for found, wanted in zip(gradients, here, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def _dropout_on_shards(rank: int) -> None:
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


@pytest.mark.parametrize("backend", ["cpu", None])
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


def _residual_streams_on_shards(rank: int) -> None:
    """Sequence and tensor parallelism: one device's dropout, and gradients of shared parameters."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(size, generator=generator) for size in ((2, 6, 10), (2, 6, 10), 10, 10)]

    def run(given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x, residual, weight, bias = given
        torch.manual_seed(0)
        added = torchweld.functional.bias_dropout_add(x, bias, residual, p=0.4)
        y, z = torchweld.functional.dropout_add_layer_norm(
            x, added, weight, bias, p=0.3, return_residual=True
        )
        (y.square().sum() + z.square().sum()).backward()
        return y, z

    leaves = [value.clone().requires_grad_() for value in values]
    expected = run(leaves)
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        own = [placement, placement, Replicate(), Replicate()]
        shards = [
            distribute_tensor(v, mesh, [p]).requires_grad_()
            for v, p in zip(values, own, strict=True)
        ]
        for result, wanted in zip(run(shards), expected, strict=True):
            assert isinstance(result, DTensor)
            torch.testing.assert_close(result.full_tensor(), wanted)
        for shard, leaf in zip(shards, leaves, strict=True):
            torch.testing.assert_close(shard.grad.full_tensor(), leaf.grad)


SCENARIOS = (
    _ddp,
    _fsdp2,
    _sequence_parallel,
    _pipeline,
    _dropout_on_shards,
    _residual_streams_on_shards,
)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("backend", ["cpu", None])
def test_two_processes_equal_one(scenario: Callable[[int], None], backend: str | None) -> None:
    """On the CPU kernels and on the automatic choice."""
    with processes(2) as two:
        two.run(backend, scenario)
