"""What processes exchange: once for several backwards, in 8 bits, by hand, and on slow links."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import selection
import torchweld
from by_hand import ring_all_gather, ring_all_reduce, ring_reduce_scatter, server_step
from comparing import NEAR, assert_grads, grads_of, has_neighbours, shares_rows, step_stages
from processes import on
from stack import MODELS
from stack_seams import keep
from torchweld import numerics, optim
from torchweld.commands import cli, link
from torchweld.commands.link import choices, verdict
from torchweld.distributed import (
    CountCollectives,
    LowPrecisionReduceScatter,
    no_sync,
    reduce_in_low_precision,
    ring_slice,
    sequence_plan,
    tp_plan,
    zero3,
)
from torchweld.distributed.one_bit.link import Link, measure_link
from torchweld.distributed.pipelines import stages
from torchweld.errors import ArgumentError
from transformer import PreNorm, Transformer, make_batch

SETTINGS = replace(MODELS["GPT"], layers=2, dropout=0.0)


def _model() -> Any:
    torch.manual_seed(0)
    return Transformer(SETTINGS).double()


def _sequence(model: Any) -> None:
    parallelize_module(model, init_device_mesh("cpu", (2,)), tp_plan(model, True))


def _ring(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, sequence_plan(model))
    return mesh.get_group(0)


def _tensor_ring(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "tensor"))
    parallelize_module(model, mesh, tp_plan(model, True, ring=True))
    return mesh.get_group("ring")


def _sharded(model: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], tp_plan(model, True))
    zero3(model, mesh["data"])


def _loss(model: Any, number: int, group: Any = None, blocks: bool = True) -> torch.Tensor:
    """The sum over this process's slice of a microbatch; its last one can leave out the blocks."""
    tokens, targets = make_batch(SETTINGS, 2, number)
    first = 0
    if group is not None:
        first = int(ring_slice(torch.arange(SETTINGS.length), 0, group)[0])
        tokens, targets = (ring_slice(x, 1, group) for x in (tokens, targets))
    logits = model(tokens, first) if blocks else model.head(model.norm(model.token(tokens)))
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )


ROWS = {_sequence: "TP + SP", _ring: "ring SP", _tensor_ring: "TP + SP x ring SP"}


@pytest.mark.parametrize(
    ("cut", "count", "reduces", "skips"),
    [
        (_sequence, 2, 1, False),
        (_sequence, 2, 1, True),
        pytest.param(_ring, 2, 1, False, marks=shares_rows),
        pytest.param(_ring, 2, 1, True, marks=shares_rows),
        pytest.param(_tensor_ring, 4, 2, False, marks=shares_rows),
    ],
)
@on("count")
def test_one_exchange(
    rank: int, cut: Callable[[Any], Any], count: int, reduces: int, skips: bool
) -> None:
    """The last of three backward passes exchanges; a fourth adds to what was exchanged."""
    one, many = _model(), _model()
    group = cut(many)
    counts, sizes = [], []
    for number in range(4):
        blocks = number != 2 or not skips
        _loss(one, number, blocks=blocks).backward()
        with no_sync(many) if number < 2 else nullcontext(), CountCollectives() as counted:
            _loss(many, number, group, blocks).backward()
        counts.append(counted.calls["all-reduce"])
        sizes.append(counted.bytes["all-reduce"])
        if number > 1:
            assert all(p.grad.placements == p.placements for p in many.parameters())
            assert_grads(many, one, **NEAR)
        if number == 2 and not skips:
            pairs = [
                (p.grad, q.grad) for p, q in zip(many.parameters(), one.parameters(), strict=True)
            ]
            keep(f"three microbatches, {ROWS[cut]}: the last one", pairs, sent=counted.bytes)
    if not skips:
        assert counts == [counts[0], counts[0], counts[0] + reduces, counts[0] + reduces]
        parts = [p for name, p in one.named_parameters() if group is not None or ".norm" in name]
        if cut in (_sequence, _ring):
            assert sizes[2] - sizes[1] == sum(p.nbytes for p in parts)


@on(4)
def test_under_fsdp(rank: int) -> None:
    """no_sync reaches FSDP2's modules too; replicas have the same microbatches."""
    one, many = _model(), _model()
    _sharded(many)
    for number in range(3):
        _loss(one, number).backward()
        with no_sync(many) if number < 2 else nullcontext(), CountCollectives() as counted:
            _loss(many, number).backward()
        of_streams = 4 * SETTINGS.layers
        of_gradients = SETTINGS.layers + 1 if number == 2 else 0
        assert counted.calls["reduce-scatter"] == of_streams + of_gradients
    assert_grads(many, one, **NEAR)


class _Delta(torch.nn.Module):
    """A layer whose weight is a sum of two parameters, whose gradients are one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.delta = (torch.nn.Parameter(torch.eye(width).double()) for _ in "12")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight + self.delta)


@pytest.mark.parametrize("sequence", [False, True])
@on(2)
def test_gradients_are_tensors_of_their_own(rank: int, sequence: bool) -> None:
    one, many = _model(), _model()
    for model in (one, many):
        model.blocks["0"].norm1 = torch.nn.Sequential(_Delta(SETTINGS.width))
    parallelize_module(many, init_device_mesh("cpu", (2,)), tp_plan(many, sequence))
    for number in range(3):
        for model in (one, many):
            with no_sync(model) if number < 2 else nullcontext():
                _loss(model, number).backward()
    assert_grads(many, one, **NEAR)


@on(2)
def test_parts_are_not_stepped(rank: int) -> None:
    """A step inside no_sync is an error; offloaded ones wait for sums, also if gradients leave."""
    one, many = _model(), _model()
    _sequence(many)
    with no_sync(many):
        _loss(many, 0).backward()
    before = [p.detach().to_local().clone() for p in many.parameters()]
    with pytest.raises(ArgumentError, match="a gradient"):
        optim.AdamW(many.parameters()).step()
    assert all(map(torch.equal, (p.to_local() for p in many.parameters()), before))
    many.zero_grad()
    steps = [
        optim.SGD(one.parameters(), 0.1),
        optim.Offload(optim.SGD(many.parameters(), 0.1), release_gradients=True),
    ]
    for number in range(3):
        for model, optimizer in zip((one, many), steps, strict=True):
            _loss(model, number).div(100).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [p.full_tensor() for p in many.parameters()]
    torch.testing.assert_close(found, [*one.parameters()], **numerics.FLOAT64)


@pytest.mark.parametrize(
    # Stages of plain linear layers fail alike.
    "schedule",
    ["1f1b", pytest.param("zbvzerobubble", marks=has_neighbours)],
)
@on(4)
def test_a_pipeline_exchanges_once(rank: int, schedule: stages.Name) -> None:
    """One exchange for all microbatches of a step, and gradients of one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "tensor"))
    torch.manual_seed(0)
    blocks = [PreNorm(SETTINGS).double() for _ in range(4)]
    whole = copy.deepcopy(torch.nn.Sequential(*blocks))
    stream = torch.randn(8, SETTINGS.length, SETTINGS.width, dtype=torch.float64)
    (whole(stream).square().sum() / 4).backward()
    pipe = stages.pipeline(
        blocks,
        schedule,
        4,
        lambda y, _: y.square().sum(),
        (stream[:2],),
        costs=[1.0] * 4,
        wrap=lambda part: parallelize_module(part, mesh["tensor"], tp_plan(part, True)),
        group=mesh.get_group("pipe"),
    )
    with CountCollectives() as counted:
        step_stages(pipe, stream)
    wanted = grads_of(whole)
    part: Any
    for part in pipe.parts:
        assert all(p.grad.placements == p.placements for p in part.parameters())
        assert_grads(part, wanted, **NEAR)
    # A number that says whether the batch divides, and the gradients of each part.
    assert counted.calls["all-reduce"] == 1 + len(pipe.parts)


# --- FSDP2's reduce-scatter in 8 bits -------------------------------------------------------------


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


def _reduce(reducer: Any, x: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """This rank's row of the sum of all ranks' x."""
    out = torch.full((x.shape[1],), torch.nan)
    reducer(out, x.flatten(), dist.group.WORLD, op)
    return out


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
                off = _reduce(reduce, given[rank], op) * share - exact
                assert (off.abs() <= bound).all(), (width, format, rounding)
            row = width + 4 * -(-width // 256)
            assert reduce.bytes_sent == 2 * (ranks - 1) * row
    _marks_what_is_not_finite(rank, ranks)
    _is_right_on_average(rank, ranks)
    _feeds_back(rank, ranks)


def _marks_what_is_not_finite(rank: int, ranks: int) -> None:
    for format in ("int8", "fp8"):
        for bad in (torch.nan, torch.inf):
            x = torch.ones(ranks, 600)
            x[:, 300] = bad if rank == 0 else 1.0
            reduce = LowPrecisionReduceScatter(format, feedback=True)
            out = _reduce(reduce, x)
            assert not out[256:512].isfinite().any()
            assert torch.equal(out[:256], torch.full((256,), float(ranks)))
            assert reduce.state_dict()["error"].isfinite().all()


def _is_right_on_average(rank: int, ranks: int) -> None:
    for format in ("int8", "fp8"):
        x, draws = _drawn(rank, ranks, 256), 100
        reduce = LowPrecisionReduceScatter(format, rounding="stochastic", seed=3)
        exact = torch.stack([_drawn(r, ranks, 256)[rank] for r in range(ranks)]).sum(0)
        total = sum(_reduce(reduce, x).double() for _ in range(draws))
        bounds = [_bound(_drawn(r, ranks, 256), format, "stochastic")[rank] for r in range(ranks)]
        # A sum of that many zero-mean errors within these bounds stays within 6 deviations.
        deviation = torch.stack(bounds).square().sum(0).sqrt() / draws**0.5
        assert ((total / draws - exact).abs() <= 6 * deviation).all()


def _feeds_back(rank: int, ranks: int) -> None:
    """The inputs' sum equals the results plus the errors of all ranks."""
    for format, rounding in CASES:
        reduce = LowPrecisionReduceScatter(format, rounding=rounding, feedback=True)
        came, went = torch.zeros(300).double(), torch.zeros(300).double()
        for step in range(10):
            came += torch.stack([_drawn(r, ranks, 300, step)[rank] for r in range(ranks)]).sum(0)
            went += _reduce(reduce, _drawn(rank, ranks, 300, step))
        owed = reduce.state_dict()["error"].clone()
        dist.all_reduce(owed)
        torch.testing.assert_close(went + owed[rank], came, rtol=0, atol=1e-5)
        again = LowPrecisionReduceScatter(format, rounding=rounding, feedback=True)
        again.load_state_dict(reduce.state_dict())
        results = [_reduce(one, _drawn(rank, ranks, 300, 11)) for one in (reduce, again)]
        if rounding == "nearest":
            assert torch.equal(*results)
        with pytest.raises(torchweld.ArgumentError, match="its own instance"):
            _reduce(reduce, torch.ones(ranks, 8))


def _uneven_model() -> torch.nn.Module:
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
        model: Any = _uneven_model()
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


# --- A ring and a parameter server from sends -----------------------------------------------------


COUNT = 4


@on(COUNT)
def test_rings(rank: int) -> None:
    """Whole numbers, whose sums have no rounding."""
    for shape in ((8, 16), (5, 3), (1,), (0, 4)):
        x = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) * (rank + 1)
        wanted = x.clone()
        dist.all_reduce(wanted)
        with CountCollectives() as counted:
            found = ring_all_reduce(x)
        assert torch.equal(found, wanted)
        each = 4 * -(-x.numel() // COUNT)
        assert counted.calls == {"send": 2 * (COUNT - 1)}
        assert counted.bytes == {"send": 2 * (COUNT - 1) * each}
    x = torch.full((8,), float(rank))
    with CountCollectives() as first:
        part = ring_reduce_scatter(x)
    with CountCollectives() as second:
        ring_all_gather(part)
    assert first.bytes == second.bytes == {"send": (COUNT - 1) * x.nbytes // COUNT}


@on(COUNT)
def test_a_server(rank: int) -> None:
    torch.manual_seed(0)
    layer, other = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    other.load_state_dict(layer.state_dict())
    optimizer = optim.AdamW(layer.parameters()) if rank == 0 else None
    alone = optim.AdamW(other.parameters())
    size = 4 * sum(p.numel() for p in layer.parameters())
    for step in range(3):
        x = torch.full((2, 8), float(rank + step))
        for module in (layer, other):
            module.zero_grad()
            module(x).sum().backward()
        with CountCollectives() as counted:
            server_step([*layer.parameters()], optimizer)
        for p in other.parameters():
            dist.all_reduce(p.grad)
            assert p.grad is not None
            p.grad /= COUNT
        alone.step()
        torch.testing.assert_close([*layer.parameters()], [*other.parameters()], **numerics.SAME)
        # The server sends to all others. A ring's process would send 2 (n - 1) / n of the size.
        assert counted.bytes == {"send": (COUNT - 1) * size if rank == 0 else size}
    wrong = None if rank == 0 else alone
    with pytest.raises(ArgumentError, match=r"optimizer is .*; accepted: one in process 0"):
        server_step([*layer.parameters()], wrong)


# --- What is counted of torch's own ---------------------------------------------------------------


def _waited(result: Any) -> Any:
    """What an asynchronous collective returns is annotated as a plain tensor."""
    return result.wait()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@on(2)
def test_each_kind_is_counted(rank: int) -> None:
    x, pair = torch.ones(8), [torch.ones(4), torch.ones(4)]  # 32 bytes
    group, whole = dist.group.WORLD, torch.ones(16)
    root = rank == 0
    of_root = 64 if root else 32
    cases = [
        ("all-reduce", 64, lambda: dist.all_reduce_coalesced([x, x.clone()])),
        ("all-gather", 64, lambda: dist.all_gather([x.clone(), x.clone()], x)),
        ("all-gather", 64, lambda: _waited(functional.all_gather_tensor(x, 0, group))),
        ("reduce-scatter", 32, lambda: dist.reduce_scatter(pair[0].clone(), pair)),
        ("all-to-all", 32, lambda: dist.all_to_all_single(x.clone(), x)),
        ("all-to-all", 32, lambda: _waited(functional.all_to_all_single(x, None, None, group))),
        ("reduce", 32, lambda: dist.reduce(x.clone(), 0)),
        ("gather", of_root, lambda: dist.gather(x, [x.clone(), x.clone()] * root or None)),
        ("scatter", of_root, lambda: dist.scatter(x.clone(), [*whole.chunk(2)] * root or None)),
        ("broadcast", 32, lambda: dist.broadcast(x.clone(), 0)),
    ]
    for kind, size, collective in cases:
        with CountCollectives() as counted:
            collective()
        assert (dict(counted.calls), dict(counted.bytes)) == ({kind: 1}, {kind: size}), kind


# --- `torchweld link` -----------------------------------------------------------------------------


PAGE = (Path(__file__).parents[2] / "docs" / "one-bit.md").read_text()
# A row of the page -> its link, parameters and seconds of computation.
EXAMPLES = {
    "8 GPUs, NVLink, 1 G parameters": (Link(8, 300e9, 20e-6, 2e-12), 1e9, 0.5),
    "8 machines, 25 Gbit/s, 1 G parameters": (Link(8, 25e9 / 8, 100e-6, 2e-12), 1e9, 0.5),
    "4 machines, 1 Gbit/s, 350 M parameters": (Link(4, 1e9 / 8, 300e-6, 2e-12), 350e6, 0.4),
    "2 machines, 200 Mbit/s, 30 M parameters": (Link(2, 200e6 / 8, 1e-3, 2e-12), 30e6, 0.3),
}


def test_the_formula() -> None:
    """Two ranks, 25 MB/s, 1 ms, 30 M parameters and 0.3 s, worked out by hand."""
    found = {c.name.partition(":")[0]: c for c in choices(*EXAMPLES[list(EXAMPLES)[-1]])}
    plain = 0.002 + 120e6 / 25e6
    assert found["float32"].sent == 120e6
    assert found["float32"].step == pytest.approx(0.3 + plain - 0.2)
    frozen = 0.3 + 0.003 + 3.75e6 / 25e6 + 30e6 * 2e-12
    assert found["1 bit"].sent == 3.75e6
    assert found["1 bit"].step == pytest.approx(0.2 * (0.3 + plain) + 0.8 * frozen)
    # Where computation hides the exchange.
    fast = choices(Link(8, 300e9, 20e-6), 1e9, 0.5)
    assert fast[0].step == 0.5
    assert "None pays" in verdict(fast)
    assert "OneBitAdam pays: a run takes 4.05" in verdict(choices(*EXAMPLES[list(EXAMPLES)[2]]))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_has_the_formulas_figures(name: str) -> None:
    found = [c for c in choices(*EXAMPLES[name]) if c.is_adam]
    steps = " | ".join(f"{c.step:.3g}" for c in found)
    assert f"| {name} | {EXAMPLES[name][2]} | {steps} |" in PAGE


@on(2, None)
def test_the_page_has_the_codes_bytes_and_a_group_is_measured(rank: int) -> None:
    rows = re.findall(r"\| (OneBit\w+) \| (\w+) \| ([\d.]+) \| ([\d.]+) \|", PAGE)
    assert len(rows) == 4
    for name, dtype, *expected in rows:
        p = torch.randn(1024, 1024).requires_grad_()
        made = getattr(torchweld.optim, name)
        optimizer = made([p], freeze_step=1, error_dtype=getattr(torch, dtype))
        for bytes_each in expected:
            p.grad = torch.randn(1024, 1024)
            optimizer.step()
            assert f"{sum(optimizer.bytes_per_parameter().values()):.3f}" == bytes_each
    found = measure_link()
    assert found.ranks == 2
    assert 1e5 < found.bandwidth < 1e12
    assert 0 < found.latency < 1
    assert 0 < found.quantising < 1e-5


def test_the_command_says_how_it_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["link", "--parameters", "1e6", "--step-ms", "10"]) == 2
    assert "torchrun --nproc-per-node 2 -m torchweld link" in capsys.readouterr().out
    link.show(*EXAMPLES[list(EXAMPLES)[-1]], 8)
    shown = capsys.readouterr().out
    assert "2 ranks, 0.2 Gbit/s from each, latency 1 ms" in shown
    assert shown.endswith("float32.\n")
