"""FSDP2's reduce-scatter in 8 bits: its error bound, its bytes, and training against bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import selection
import torchweld
from processes import on
from torchweld.distributed import LowPrecisionReduceScatter, reduce_in_low_precision

CASES = [(f, r) for f in ("int8", "fp8") for r in ("nearest", "stochastic")]


def _drawn(rank: int, ranks: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(ranks, width, generator=generator)
    return x * torch.rand(ranks, width, generator=generator).pow(9)


def _bound(x: torch.Tensor, format: str, rounding: str) -> torch.Tensor:
    """The error bound of one rank's message, from the blocks of its row."""
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % 256)).view(len(x), -1, 256)
    largest = blocks.abs().amax(2).repeat_interleave(256, 1)[:, : x.shape[1]]
    bound = largest / 254
    if format == "fp8":
        bound = torch.maximum(x.abs() / 16, largest / 448 * 2**-10)
    return bound * (2 if rounding == "stochastic" else 1) + largest * 2**-22


@pytest.mark.parametrize("ranks", [2, 4])
@on("ranks", None)
def test_sums_are_within_the_bound(rank: int, ranks: int) -> None:
    for width in (0, 1, 255, 256, 257, 1000):
        given = [_drawn(r, ranks, width) for r in range(ranks)]
        exact = torch.stack([x[rank].double() for x in given]).sum(0)
        for format, rounding in CASES:
            reduce = LowPrecisionReduceScatter(format, rounding=rounding)
            bound = sum(_bound(x, format, rounding)[rank] for x in given)
            for op, share in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, ranks)):
                out = torch.full((width,), torch.nan)
                reduce(out, given[rank].flatten(), dist.group.WORLD, op)
                assert ((out * share - exact).abs() <= bound).all(), (width, format, rounding)
            row = width + 4 * -(-width // 256)
            assert reduce.bytes_sent == 2 * (ranks - 1) * row
    _marks_what_is_not_finite(rank, ranks)
    _is_right_on_average(rank, ranks)
    _feeds_back(rank, ranks)


def _marks_what_is_not_finite(rank: int, ranks: int) -> None:
    for format in ("int8", "fp8"):
        for bad in (torch.nan, torch.inf):
            x, out = torch.ones(ranks, 600), torch.empty(600)
            x[:, 300] = bad if rank == 0 else 1.0
            reduce = LowPrecisionReduceScatter(format, feedback=True)
            reduce(out, x.flatten(), dist.group.WORLD, dist.ReduceOp.SUM)
            assert not out[256:512].isfinite().any()
            assert torch.equal(out[:256], torch.full((256,), float(ranks)))
            assert reduce.state_dict()["error"].isfinite().all()


def _is_right_on_average(rank: int, ranks: int) -> None:
    for format in ("int8", "fp8"):
        x, draws = _drawn(rank, ranks, 256), 100
        reduce = LowPrecisionReduceScatter(format, rounding="stochastic", seed=3)
        exact = torch.stack([_drawn(r, ranks, 256)[rank] for r in range(ranks)]).sum(0)
        total, out = torch.zeros(256, dtype=torch.float64), torch.empty(256)
        for _ in range(draws):
            reduce(out, x.flatten(), dist.group.WORLD, dist.ReduceOp.SUM)
            total += out
        bounds = [_bound(_drawn(r, ranks, 256), format, "stochastic")[rank] for r in range(ranks)]
        # A sum of that many zero-mean errors within these bounds stays within 6 deviations.
        deviation = torch.stack(bounds).square().sum(0).sqrt() / draws**0.5
        assert ((total / draws - exact).abs() <= 6 * deviation).all()


def _feeds_back(rank: int, ranks: int) -> None:
    """The inputs' sum equals the results plus the errors of all ranks."""
    for format, rounding in CASES:
        reduce = LowPrecisionReduceScatter(format, rounding=rounding, feedback=True)
        came, went, out = torch.zeros(300).double(), torch.zeros(300).double(), torch.empty(300)
        for step in range(10):
            reduce(
                out, _drawn(rank, ranks, 300, step).flatten(), dist.group.WORLD, dist.ReduceOp.SUM
            )
            came += torch.stack([_drawn(r, ranks, 300, step)[rank] for r in range(ranks)]).sum(0)
            went += out
        owed = reduce.state_dict()["error"].clone()
        dist.all_reduce(owed)
        torch.testing.assert_close(went + owed[rank], came, rtol=0, atol=1e-5)
        again = LowPrecisionReduceScatter(format, rounding=rounding, feedback=True)
        again.load_state_dict(reduce.state_dict())
        results = []
        for one in (reduce, again):
            one(out, _drawn(rank, ranks, 300, 11).flatten(), dist.group.WORLD, dist.ReduceOp.SUM)
            results.append(out.clone())
        if rounding == "nearest":
            assert torch.equal(*results)
        with pytest.raises(torchweld.ArgumentError, match="its own instance"):
            reduce(out[:8], torch.ones(ranks * 8), dist.group.WORLD, dist.ReduceOp.SUM)


def _model() -> torch.nn.Module:
    """Layers of uneven rows, with none on some ranks."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(9, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3), torch.nn.Tanh(),
        torch.nn.Linear(3, 1),
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4] if selection.WHOLE else [2])
@on("ranks", None)
def test_training_beside_bfloat16(rank: int, ranks: int) -> None:

    losses = {}
    for name in ("bfloat16", *CASES):
        model: Any = _model()
        policy = MixedPrecisionPolicy(
            reduce_dtype=torch.bfloat16 if name == "bfloat16" else torch.float32
        )
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        if name != "bfloat16":
            made = reduce_in_low_precision(model, name[0], rounding=name[1], feedback=True)
        optimizer = torchweld.optim.AdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(30):
            x = torch.randn(32, 9, generator=generator)
            loss = (model(x) - x.sum(1, keepdim=True).sin()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses[name] = mean.item() / ranks
        if name != "bfloat16":
            assert sum(one.bytes_sent for one in made) > 0
    for name in CASES:
        assert abs(losses[name] - losses["bfloat16"]) < 0.1 * losses["bfloat16"], losses


# Sums of four ranks are bounded above.


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [({"format": "int4"}, "format"), ({"rounding": "up"}, "rounding"), ({"block": 0}, "block")],
)
def test_arguments_are_named(arguments: dict[str, object], argument: str) -> None:
    with pytest.raises(torchweld.ArgumentError) as caught:
        LowPrecisionReduceScatter(**arguments)
    assert caught.value.argument == argument
    with pytest.raises(torchweld.ArgumentError, match="fully_shard"):
        reduce_in_low_precision(torch.nn.Linear(2, 2))
