"""Runs optimizers on sharded parameters, and compares them with whole ones."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from comparing import whole_of
from optimizers import U
from torchweld import optim

# A row of 300 is two blocks, which column shards cut. 65 rows do not divide by two. Some dimensions
# are shorter than the number of processes.
SHAPES = ((65, 300), (64, 64), (300,), (1, 5000), (4, 40, 30), (4100, 1), (20, 3, 100), (1, 5, 6))
CODECS: tuple[dict[str, Any], ...] = (
    {},
    {"state_dtype": "8bit"},
    {"state_dtype": torch.bfloat16, "amsgrad": True},
    {"state_dtype": "8bit", "master_weights": "remainder"},
    {"master_weights": True},
    {"stochastic_rounding": True},
    {"stochastic_rounding": True, "state_dtype": "8bit"},
)


def drawn(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def dtype_of(settings: dict[str, Any]) -> torch.dtype:
    narrow = settings.keys() & {"master_weights", "stochastic_rounding"}
    return torch.bfloat16 if narrow else torch.float32


def run(
    settings: dict[str, Any],
    place: Callable[[torch.Tensor], torch.Tensor],
    steps: range,
    saved: Any = None,
    kind: Any = optim.AdamW,
) -> tuple[list[torch.Tensor], Any]:
    """Run all steps, or resume from a saved state. Returns parameters and optimizer."""
    dtype = dtype_of(settings)
    params: list[torch.Tensor] = [
        torch.nn.Parameter(place(v)) for v in (saved[0] if saved else drawn(0, dtype))
    ]
    optimizer = kind(params, 1e-2, **settings)
    if saved:
        optimizer.load_state_dict(saved[1])
    for seed in steps:
        for p, g in zip(params, drawn(seed, dtype), strict=True):
            p.grad = place(g * 0.1)
        optimizer.step()
    return params, optimizer


def assert_same(found: tuple[list[torch.Tensor], Any], expected: Any, without: str = "") -> None:
    """Compare parameters and states, without one of their entries, bit for bit."""
    for p, e in zip(found[0], expected[0], strict=True):
        assert torch.equal(whole_of(p.detach()), e)
        for name in expected[1].state[e].keys() - {without}:
            value = expected[1].state[e][name]
            whole = whole_of(found[1].state[p][name])
            assert whole.dtype == value.dtype
            assert torch.equal(whole, value), name


def placer(mesh: Any, *dims: int | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Shard tensors in these dimensions, or in the last one if they have fewer. None replicates."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def place(t: torch.Tensor) -> torch.Tensor:
        placements = [Replicate() if d is None else Shard(min(d, t.ndim - 1)) for d in dims]
        # Every rank has the whole tensor, so nothing need be sent.
        return distribute_tensor(t, mesh, placements, src_data_rank=None)

    return place


def go_on(folder: str, count: int, start: Any, draw: Any, check: Any) -> None:
    """Read a checkpoint of other processes, take two steps, and save again: on 4, 1 and 2 of them.

    `start(place, steps)` makes parameters and their optimizer, `draw(seed)` gradients, and `check`
    compares the results of two processes with one device's.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    first = {4: 1, 1: 3, 2: 5}[count]
    place = placer(init_device_mesh("cpu", (count,)), 1 if count == 4 else 0)
    params, optimizer = start(place, range(1, 2))  # a step makes states
    if first > 1:
        # Shapes and placements of what is read; a deep copy shares nothing with the optimizer.
        state = {"params": params, "optimizer": copy.deepcopy(optimizer.state_dict())}
        dcp.load(state, checkpoint_id=f"{folder}-{first}")
        optimizer.load_state_dict(state["optimizer"])
    for seed in range(max(first, 2), first + 2):
        for p, g in zip(params, draw(seed), strict=True):
            p.grad = place(g)
        optimizer.step()
    state = {"params": params, "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=f"{folder}-{first + 2}")
    if count == 2:
        check((params, optimizer), start(lambda t: t, range(1, 7)))


@contextlib.contextmanager
def reductions() -> Iterator[list[Any]]:
    """Record the operations of the all-reduces made inside."""
    made: list[Any] = []
    all_reduce = torch.distributed.all_reduce

    def record(t: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM, **given: Any) -> Any:
        made.append(op)
        return all_reduce(t, op, **given)

    torch.distributed.all_reduce = record  # type: ignore[assignment]  # of fewer arguments
    try:
        yield made
    finally:
        torch.distributed.all_reduce = all_reduce


FACTORED: tuple[tuple[Any, dict[str, Any]], ...] = (
    (optim.Adafactor, {"weight_decay": 0.1}),
    (optim.Adafactor, {"master_weights": True}),
    (optim.TransformersAdafactor, {"relative_step": False, "beta1": 0.9, "weight_decay": 0.1}),
)


def assert_near(found: tuple[list[torch.Tensor], Any], expected: Any) -> None:
    """Adafactor's results differ by the order of its float64 sums, which are rounded to float32.

    A step is at most lr times the root mean square of the parameter, times an element's direction
    relative to the mean one, which is less than 10 here. It takes about ten roundings.
    """
    for p, e in zip(found[0], expected[0], strict=True):
        state, given = found[1].state[p], expected[1].state[e]
        assert list(state) == list(given)
        steps, size = given["step"], 10 * 1e-2 * e.float().square().mean().sqrt()
        values = [(state[name], given[name]) for name in given if name != "master"]
        for value, whole in values:
            bound = 4 * steps * U * whole.abs() + (whole.dim() > 0) * steps * U * size
            assert ((whole_of(value) - whole).abs() <= bound).all()
        p, e = (s.get("master", t) for s, t in ((state, p), (given, e)))
        assert ((whole_of(p.detach()) - e).abs() <= 10 * steps * U * (e.abs() + size)).all()
