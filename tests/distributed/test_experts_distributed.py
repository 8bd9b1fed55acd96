"""Experts on several processes: the numbers of one process."""

# Parameters and results are DTensors, which torch's annotations do not say.
# mypy: disable-error-code="attr-defined, union-attr"

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import torchweld
from comparing import NEAR, assert_grads, assert_whole, whole_of
from processes import on
from refusing import refuses
from torchweld import functional, optim
from torchweld.distributed import CountCollectives, memory_estimate, tp_plan
from torchweld.ops.experts import mlp
from torchweld.registry import materialize
from transformer import PreNorm, Settings

NAMES = mlp.OP.forward_signature.arguments
FACTORS = ("gate_up", "down", "gate_up_bias", "down_bias")
E, H, F, LENGTH = 4, 8, 6, 10


# --- The op ---------------------------------------------------------------------------------------


def _arguments(form: str, experts: int) -> dict[str, Any]:
    """The arguments of a call for twelve tokens, with indices out of range among theirs."""
    sample = mlp.arguments((12,), 3, experts, (6, 5, 7), mlp.FORMS[form], biases=True, skipped=True)
    arguments = dict(zip(NAMES, materialize(sample, torch.float64), strict=True))
    arguments["weights"][arguments["indices"] >= experts] = torch.nan  # nobody reads them
    return arguments


def _run(arguments: dict[str, Any], head: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    named = (*FACTORS, "input", "weights")
    leaves = {name: arguments[name].detach().requires_grad_() for name in named}
    y = functional.experts_mlp(**arguments | leaves)
    return y, [*torch.autograd.grad(y, [*leaves.values()], head)]


@pytest.mark.parametrize(
    ("form", "experts", "shape", "count"),
    [
        *[(form, 4, (2,), 2) for form in mlp.FORMS],
        ("gated", 3, (2,), 2),
        ("gpt_oss", 1, (2,), 2),  # one process has none
        ("clamped", 2, (2, 2), 4),
    ],
)
@on("count")
def test_each_process_computes_its_experts(
    rank: int, form: str, experts: int, shape: tuple[int, ...], count: int
) -> None:
    """Experts along the mesh's last dimension, and tokens in every way that torch shards rows."""
    mesh = init_device_mesh("cpu", shape)
    arguments = _arguments(form, experts)
    head = torch.randn(12, 7, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    expected, wanted = _run(arguments, head)
    others = [Replicate()] * (mesh.ndim - 1)
    everywhere, cut = [*others, Replicate()], [Shard(0)] * mesh.ndim
    for rows in (everywhere, cut, [Shard(0), *everywhere[1:]]):

        def place(name: str, value: torch.Tensor, rows: Any = rows) -> DTensor:
            where = [*others, Shard(0)] if name in FACTORS else rows
            return distribute_tensor(value, mesh, where)

        own = {name: place(name, t) for name, t in arguments.items() if torch.is_tensor(t)}
        y, grads = _run(arguments | own, place("y", head))
        assert y.placements[-1] == Partial()
        assert_whole([y, *grads], [expected, *wanted], **NEAR)


@on(2)
def test_what_travels(rank: int) -> None:
    """Nothing forward but the sum of the result; backward the gradients of tokens and weights."""
    mesh, arguments = init_device_mesh("cpu", (2,)), _arguments("gated", 4)
    for name, value in arguments.items():
        if torch.is_tensor(value):
            placement = Shard(0) if name in FACTORS else Replicate()
            arguments[name] = distribute_tensor(value, mesh, [placement])
            arguments[name].requires_grad_(value.is_floating_point())
    with CountCollectives() as forward:
        y = functional.experts_mlp(**arguments)
    with CountCollectives() as summed:
        whole = y.redistribute(mesh, [Replicate()]).to_local()
    with CountCollectives() as backward:
        whole.sum().backward()
        grads = [arguments[name].grad.full_tensor() for name in ("input", "weights")]
    assert not forward.calls
    assert (summed.calls, summed.bytes) == ({"all-reduce": 1}, {"all-reduce": whole.nbytes})
    assert backward.calls == {"all-reduce": 2}
    assert backward.bytes == {"all-reduce": sum(grad.nbytes for grad in grads)}


@on(2)
def test_placements_that_are_refused(rank: int) -> None:
    mesh, arguments = init_device_mesh("cpu", (2,)), _arguments("plain", 4)
    del arguments["gate_up_bias"], arguments["down_bias"]
    x, gate_up = arguments["input"], arguments["gate_up"]
    whole = distribute_tensor(x, mesh, [Replicate()])
    cut = distribute_tensor(gate_up, mesh, [Shard(0)])
    for changed, message in (
        ({"gate_up": cut}, r"input is a plain tensor; .* \[Shard\(0\)\] where each has its own"),
        (
            {"input": whole, "gate_up": distribute_tensor(gate_up, mesh, [Shard(1)])},
            r"gate_up is a DTensor placed S\(1\); accepted: Shard\(0\) or Replicate\(\)",
        ),
        (
            {"input": whole, "gate_up": cut, "down": arguments["down"].requires_grad_()},
            "down is a plain tensor that requires grad",
        ),
    ):
        refuses(message, functional.experts_mlp, **arguments | changed)


# --- Models ---------------------------------------------------------------------------------------


class _Mixture(torch.nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = torch.nn.Linear(H, experts, bias=False)
        self.experts = torchweld.nn.ExpertsMLP(experts, H, F)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        routes = functional.route(self.router(x), 2, renormalize=True)
        return self.experts(x, routes.indices, routes.weights)


class _Model(torch.nn.Module):
    def __init__(self, experts: int = E) -> None:
        super().__init__()
        settings = Settings(length=LENGTH, width=H, heads=2, dropout=0.0)
        self.blocks: Any = torch.nn.ModuleList(PreNorm(settings) for _ in range(2))
        for block in self.blocks:
            block.mlp = _Mixture(experts)
            # The gradient of a bias of keys is only rounding errors.
            block.attention.k_proj = torch.nn.Linear(H, H, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _build(experts: int = E) -> _Model:
    torch.manual_seed(0)
    return _Model(experts).double()


def _batch(number: int, rows: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, LENGTH, H, generator=generator, dtype=torch.float64)


def _fsdp(model: Any) -> Any:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def _fsdp_of_experts(model: Any) -> Any:
    """The experts by themselves, sharded over two of four processes; the rest over all four."""
    apart = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "experts"))
    every = init_device_mesh("cpu", (4,))
    for block in model.blocks:
        fully_shard(block.mlp.experts, mesh=apart)
        fully_shard(block, mesh=every)
    return fully_shard(model, mesh=every)


def _fsdp_over_devices_experts(model: Any) -> Any:
    """Two processes share the experts, and FSDP2 shards what each has over the other two."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    parallelize_module(model, grid["experts"], tp_plan(model))
    for block in model.blocks:
        fully_shard(block, mesh=grid["data"])
    return fully_shard(model, mesh=grid["data"])


def _planned(model: Any) -> Any:
    return parallelize_module(model, init_device_mesh("cpu", (2,)), tp_plan(model))


def _planned_by_sequence(model: Any) -> Any:
    return parallelize_module(model, init_device_mesh("cpu", (2,)), tp_plan(model, True))


# How a model is divided, over how many processes, and how many batches they have at a time.
WAYS: dict[str, tuple[Callable[[Any], Any], int, int]] = {
    "FSDP2": (_fsdp, 2, 2),
    "FSDP2, two meshes": (_fsdp_of_experts, 4, 4),
    "plan": (_planned, 2, 1),
    "plan, sequence": (_planned_by_sequence, 2, 1),
    "FSDP2 over a plan": (_fsdp_over_devices_experts, 4, 2),
}


@pytest.mark.parametrize(("way", "count"), [(way, WAYS[way][1]) for way in WAYS])
@on("count")
def test_a_mixture_trains_as_in_one_process(rank: int, way: str, count: int) -> None:
    """Three steps of AdamW, with the loss averaged over the batches of a step."""
    divide, _, batches = WAYS[way]
    alone = _build()
    model = divide(copy.deepcopy(alone))
    own = rank * batches // count
    optimizers = [optim.AdamW(each.parameters(), lr=0.01) for each in (alone, model)]
    for step in range(3):
        for number in range(batches):
            (alone(_batch(10 * step + number)).square().mean() / batches).backward()
        model(_batch(10 * step + own)).square().mean().backward()
        assert_grads(model, alone, rtol=1e-9, atol=1e-11)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(whole_of(p), q, rtol=1e-8, atol=1e-10)


@on(2)
def test_a_plan_divides_experts(rank: int) -> None:
    """Each process has a part of the experts, computes it, and sends the sums of both halves."""
    whole, model = _build(), _planned(_build())
    experts = model.blocks[0].mlp.experts
    assert experts.gate_up.placements == (Shard(0),)
    assert experts.gate_up.to_local().shape == (E // 2, 2 * F, H)
    with CountCollectives() as counted:
        model(_batch(0))
    assert counted.calls == {"all-reduce": 2 * 2}
    estimates = [
        memory_estimate(each, optim.AdamW8bit(each.parameters(), lr=0.1), strategy, 2)
        for each, strategy in ((model, "tp"), (whole, "ddp"))
    ]
    halved = sum(p.nbytes for p in whole.parameters() if p.ndim == 3)
    in_part = [n for n, _ in whole.named_parameters() if "_proj" in n and "o_proj.bias" not in n]
    halved += sum(whole.get_parameter(name).nbytes for name in in_part)
    assert estimates[1].parameters - estimates[0].parameters == halved // 2
    odd = _build(3)
    refuses(r"3 experts in blocks.0.mlp.experts; .* are 2 or 4", _planned, odd)
    assert not any(isinstance(p, DTensor) for p in odd.parameters())
