"""memory_estimate: the bytes of each kind that a rank needs, before a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal, get_args

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from torchweld.dispatch.dtensor import is_one
from torchweld.errors import ArgumentError
from torchweld.optim._base import FusedOptimizer
from torchweld.table import Table

Strategy = Literal["ddp", "zero1", "zero1_rows", "zero2", "zero3", "tp", "pp"]
_MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    Attributes:
        parameters, gradients, states: held by the rank throughout a step.
        gathered: the peak of parameters that FSDP2 holds gathered besides its shards.
        activations: saved for pending backwards.
    """

    parameters: int
    gathered: int
    gradients: int
    states: int
    activations: int

    @property
    def total(self) -> int:
        """The peak of a step, except for temporary memory of single ops."""
        return sum(astuple(self))

    def show(self) -> None:
        """Print a table."""
        table = Table(("of one rank", "MiB", "share"), 1)
        rows = {**vars(self), "total": self.total}
        for name, size in rows.items():
            share = f"{size / max(self.total, 1):.1%}"
            table.add(name, f"{size / _MIB:.2f}", share, group=name == "total")
        table.show()


def memory_estimate(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    world: int,
    *,
    rank: int = 0,
    example: tuple[Any, ...] | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    in_flight: int | None = None,
    accumulates: bool = False,
) -> Memory:
    """What one rank holds in a step.

    Args:
        model: the model before data parallelism wraps it. With "tp" its parameters must already
            be DTensors made by torch's parallelize_module; with "pp" it is this rank's stage.
            DTensors count as their local parts in all strategies.
        optimizer: an optimizer of this model's parameters, from any package; it is not stepped.
        strategy: "ddp", "zero1" (torch's ZeroRedundancyOptimizer), "zero1_rows" (RowSharded),
            "zero2" (FSDP2 that keeps parameters gathered until the backward), "zero3", "tp", "pp".
        world: the number of ranks among which the strategy divides.
        rank: one of them. The first has most if something does not divide evenly.
        example: the model's arguments, a microbatch of one rank; None: no activations are counted.
            One forward runs on them, and nothing of it is kept.
        loss_fn: a function of the model's result, whose activations count too.
        in_flight: microbatches whose activations are kept at a time; None: one, or with "pp" those
            of 1F1B, one for each stage from this one on. GPipe keeps all microbatches.
        accumulates: whether FSDP2 only adds up gradients until the last microbatch
            (`set_requires_gradient_sync(False)`): it then holds them unsharded too.

    Returns:
        A Memory. Its activations do not include a selective checkpoint's own storage.
    """
    if strategy not in get_args(Strategy):
        accepted = ", ".join(get_args(Strategy))
        raise ArgumentError("memory_estimate", "strategy", repr(strategy), f"one of {accepted}")
    if not 0 <= rank < world:
        raise ArgumentError("memory_estimate", "rank", str(rank), f"0 to {world - 1}")
    if strategy == "tp" and not any(map(is_one, model.parameters())):
        came, accepted = "without DTensors", "parallelised: torch's parallelize_module comes first"
        raise ArgumentError("memory_estimate", "model", came, accepted)

    def part(p: torch.Tensor, *of: Strategy) -> float:
        return _rows(p, world, rank) if strategy in of else 1.0

    unsharded = 1.0 if accumulates and strategy in ("zero2", "zero3") else 0.0
    params = [*model.parameters()]
    trained = [p for p in params if p.requires_grad]
    stepped = [
        (p, state)
        for group in optimizer.param_groups
        for p, state in _states(optimizer, group, _owned(optimizer, group, strategy, world, rank))
    ]
    if in_flight is None:
        in_flight = world - rank if strategy == "pp" else 1
    return Memory(
        parameters=round(sum(_bytes(p) * part(p, "zero2", "zero3") for p in params)),
        gathered=_gathered(model, strategy),
        gradients=round(sum(_bytes(p) * (part(p, "zero2", "zero3") + unsharded) for p in trained)),
        states=round(
            sum(
                _shared(entry, p, part(p, "zero1_rows", "zero2", "zero3"))
                for p, state in stepped
                for entry in state
            )
        ),
        activations=0 if example is None else in_flight * activations(model, example, loss_fn),
    )


def _bytes(t: torch.Tensor) -> int:
    return (t.to_local() if is_one(t) else t).nbytes  # type: ignore[attr-defined]


def _rows(p: torch.Tensor, world: int, rank: int) -> float:
    """The part of a parameter that FSDP2 gives a rank: rows, divided as by torch.chunk."""
    rows = p.shape[0] if p.ndim else 1
    if not rows:
        return 1.0
    each = math.ceil(rows / world)
    return max(0, min(each, rows - rank * each)) / rows


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a model: the items of its outermost lists and dicts of modules."""
    found: list[torch.nn.Module] = []
    for child in model.children():
        if isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            found += child.children()
        else:
            found += blocks_of(child)
    return found


def _gathered(model: torch.nn.Module, strategy: Strategy) -> int:
    """With FSDP2 on each layer: all parameters; or the rest, a layer, and the next layer."""
    whole = sum(map(_bytes, model.parameters()))
    if strategy == "zero2":
        return whole
    if strategy != "zero3":
        return 0
    blocks = [sum(map(_bytes, block.parameters())) for block in blocks_of(model)]
    return whole - sum(blocks) + sum(sorted(blocks)[-2:])


# --- Optimizer states -----------------------------------------------------------------------------


def _owned(
    optimizer: torch.optim.Optimizer, group: Any, strategy: Strategy, world: int, rank: int
) -> list[torch.Tensor]:
    """The parameters of a group that this rank steps; all of them except in ZeRO-1.

    ZeRO-1 assigns whole parameters, the largest first, to the rank that has least so far.
    """
    if strategy != "zero1":
        return group["params"]
    sizes, owned = [0] * world, []
    for other in optimizer.param_groups:
        for p in sorted(other["params"], key=lambda p: p.numel(), reverse=True):
            least = sizes.index(min(sizes))
            sizes[least] += p.numel()
            if other is group and least == rank:
                owned.append(p)
    return owned


def _states(
    optimizer: torch.optim.Optimizer, group: Any, params: Iterable[torch.Tensor]
) -> list[tuple[torch.Tensor, Sequence[torch.Tensor]]]:
    """Each parameter with the state that the optimizer will keep for it."""
    kept: dict[Any, Sequence[torch.Tensor]] = {}
    found: list[tuple[torch.Tensor, Sequence[torch.Tensor]]] = []
    for p in params:
        if not p.requires_grad:
            continue
        if isinstance(optimizer, FusedOptimizer):
            bare = torch.empty(p.shape, dtype=p.dtype, device="meta")
            codec, moments = optimizer._codec_of(p), optimizer._moments(group, bare)
            found.append((p, [*codec.new_state(bare, moments).values()]))
            continue
        key = (p.shape, p.dtype)
        if key not in kept:
            kept[key] = _after_a_step(type(optimizer), group, p)
        found.append((p, kept[key]))
    return found


def _after_a_step(kind: Any, group: Any, p: torch.Tensor) -> Sequence[torch.Tensor]:
    """The state of another package's optimizer, found by a step on zeros of that shape."""
    zeros = torch.nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=p.device))
    zeros.grad = torch.zeros_like(zeros)
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    optimizer = kind([{"params": [zeros], **settings}], lr=settings["lr"])
    optimizer.step()
    values = optimizer.state[zeros].values()
    return [value.to("meta") for value in values if isinstance(value, torch.Tensor)]


def _shared(entry: torch.Tensor, p: torch.Tensor, part: float) -> float:
    """Bytes of a state's entry on a rank: divided as its parameter, or replicated."""
    if is_one(p):
        part *= _bytes(p) / max(p.nbytes, 1)
    return entry.nbytes * part if entry.ndim and entry.shape[0] != 1 else entry.nbytes


# --- Activations ----------------------------------------------------------------------------------


def activations(
    model: torch.nn.Module,
    example: tuple[Any, ...],
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
) -> int:
    """Bytes that a forward saves for its backward, besides parameters and buffers.

    Saved tensors are released at once, so that measuring takes no more memory than an op needs.
    Generators do not change; statistics of batch norms do.
    """
    own = (*model.parameters(), *model.buffers())
    # References keep the keys of freed storages from being reused.
    seen = {_name(t): StorageWeakRef(_storage(t)) for t in own}
    total = 0

    def count(t: torch.Tensor) -> None:
        nonlocal total
        name, storage = _name(t), _storage(t)
        if name not in seen:
            seen[name] = StorageWeakRef(storage)
            total += storage.nbytes()

    def never(_: Any) -> torch.Tensor:
        raise RuntimeError("memory_estimate's forward has no backward")

    with torch.random.fork_rng(), torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(count, never):
            result = model(*example)
            if loss_fn is not None:
                result = loss_fn(result)
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                count(t)  # held by the caller
    return total


def _storage(t: torch.Tensor) -> Any:
    return (t.to_local() if is_one(t) else t).untyped_storage()  # type: ignore[attr-defined]


def _name(t: torch.Tensor) -> int:
    return _storage(t)._cdata
