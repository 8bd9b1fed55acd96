"""memory_estimate: the bytes of each kind that a rank will need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal, get_args

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from torchweld import checks
from torchweld.dispatch.dtensor import is_dtensor
from torchweld.distributed.layers import find_blocks
from torchweld.errors import ArgumentError
from torchweld.optim._base import FusedOptimizer
from torchweld.optim._shards import local_part
from torchweld.table import Table

Strategy = Literal["ddp", "zero1", "zero1_rows", "zero2", "zero3", "tp", "pp"]
_MIB = 2**20


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    Attributes:
        parameters, gradients, states: bytes that the rank holds throughout a step.
        gathered: the peak of parameters that FSDP2 has gathered, besides its shards.
        activations: bytes saved for backward passes.
        exchanged: bytes of the buffer in which RowSharded gathers parameters after a step.
    """

    parameters: int
    gathered: int
    gradients: int
    states: int
    activations: int
    exchanged: int = 0

    @property
    def total(self) -> int:
        """The peak of a step, without the temporary memory of single ops."""
        # Activations are freed before parameters are gathered.
        return sum(astuple(self)) - min(self.activations, self.exchanged)

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
    versions: int = 0,
) -> Memory:
    """Estimate what one rank holds in a step.

    Args:
        model: the model before data parallelism wraps it. With "tp" its parameters must already
            be DTensors made by torch's parallelize_module; with "pp" it is this rank's stage.
            DTensors count as their local parts in all strategies.
        optimizer: an optimizer of this model's parameters, from any package; it is not stepped.
        strategy: "ddp", "zero1" (torch's ZeroRedundancyOptimizer), "zero1_rows" (RowSharded),
            "zero2" (FSDP2 that keeps parameters gathered until the backward pass), "zero3", "tp",
            "pp".
        world: the number of ranks that share the work.
        rank: the rank to estimate. The first one holds the most if sizes do not divide evenly.
        example: the model's arguments for a microbatch of one rank; None: no activations are
            counted. One forward pass runs on them, and its results are freed.
        loss_fn: a function of the model's result; its activations count too.
        in_flight: the number of microbatches whose activations are kept at a time; None: one, or
            with "pp" as many as 1F1B keeps: one for each stage from this one on. GPipe keeps all
            microbatches.
        accumulates: whether FSDP2 only adds up gradients until the last microbatch
            (`set_requires_gradient_sync(False)`): it then holds them unsharded too.
        versions: the number of copies of its parameters that a stage keeps for microbatches in
            flight, as in PipeDream.

    Returns:
        A Memory. Its activations do not include a selective checkpoint's own storage.
    """
    if strategy not in get_args(Strategy):
        accepted = ", ".join(get_args(Strategy))
        raise ArgumentError("memory_estimate", "strategy", repr(strategy), f"one of {accepted}")
    checks.count("memory_estimate", "world", world, 1)
    for name, value in (("rank", rank), ("in_flight", in_flight or 0), ("versions", versions)):
        checks.count("memory_estimate", name, value)
    if not 0 <= rank < world:
        raise ArgumentError("memory_estimate", "rank", str(rank), f"0 to {world - 1}")
    if strategy == "tp" and not any(map(is_dtensor, model.parameters())):
        accepted = "parallelised: torch's parallelize_module comes first"
        raise ArgumentError("memory_estimate", "model", "without DTensors", accepted)

    def get_share(p: torch.Tensor, *of: Strategy) -> float:
        return _get_row_share(p, world, rank) if strategy in of else 1.0

    unsharded = 1.0 if accumulates and strategy in ("zero2", "zero3") else 0.0
    params = [*model.parameters()]
    trained = [p for p in params if p.requires_grad]
    stepped = [
        (p, state)
        for group in optimizer.param_groups
        for p, state in _find_states(
            optimizer, group, _select_stepped(optimizer, group, strategy, world, rank)
        )
    ]
    if in_flight is None:
        in_flight = world - rank if strategy == "pp" else 1
    return Memory(
        parameters=(1 + versions)
        * round(sum(_count_local_bytes(p) * get_share(p, "zero2", "zero3") for p in params)),
        gathered=_count_gathered(model, strategy),
        gradients=round(
            sum(
                _count_local_bytes(p) * (get_share(p, "zero2", "zero3") + unsharded)
                for p in trained
            )
        ),
        states=round(
            sum(
                _count_entry_bytes(entry, p, get_share(p, "zero1_rows", "zero2", "zero3"))
                for p, state in stepped
                for entry in state
            )
        ),
        activations=0
        if example is None
        else in_flight * count_activations(model, example, loss_fn),
        exchanged=_count_exchanged(trained, world) if strategy == "zero1_rows" else 0,
    )


def _count_local_bytes(t: torch.Tensor) -> int:
    return local_part(t).nbytes


def _get_row_share(p: torch.Tensor, world: int, rank: int) -> float:
    """Return a rank's share of a parameter under FSDP2: rows, divided as by torch.chunk."""
    rows = p.shape[0] if p.ndim else 1
    if not rows:
        return 1.0
    each = math.ceil(rows / world)
    return max(0, min(each, rows - rank * each)) / rows


def _count_exchanged(params: Sequence[torch.Tensor], world: int) -> int:
    """Count the buffer in which RowSharded gathers the parameters of a dtype, the largest one."""
    totals: dict[torch.dtype, int] = {}
    for p in params:
        rows = p.shape[0] if p.ndim else 1
        whole = p.nbytes // max(rows, 1) * math.ceil(rows / world) * world  # padded to equal parts
        totals[p.dtype] = totals.get(p.dtype, 0) + whole
    return max(totals.values(), default=0)


def _count_gathered(model: torch.nn.Module, strategy: Strategy) -> int:
    """Count gathered parameters: all in ZeRO-2; in ZeRO-3 two layers, and all outside layers."""
    whole = sum(map(_count_local_bytes, model.parameters()))
    if strategy == "zero2":
        return whole
    if strategy != "zero3":
        return 0
    blocks = [sum(map(_count_local_bytes, block.parameters())) for block in find_blocks(model)]
    return whole - sum(blocks) + sum(sorted(blocks)[-2:])


# --- Optimizer states -----------------------------------------------------------------------------


def _select_stepped(
    optimizer: torch.optim.Optimizer, group: Any, strategy: Strategy, world: int, rank: int
) -> list[torch.Tensor]:
    """Select the parameters of a group that this rank steps: all of them except in ZeRO-1.

    ZeRO-1 assigns whole parameters, the largest first, to the rank with the fewest elements so far.
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


def _find_states(
    optimizer: torch.optim.Optimizer, group: Any, params: Iterable[torch.Tensor]
) -> list[tuple[torch.Tensor, Sequence[torch.Tensor]]]:
    """Pair each parameter with the state that the optimizer will keep for it."""
    states_by_shape: dict[Any, Sequence[torch.Tensor]] = {}
    pairs: list[tuple[torch.Tensor, Sequence[torch.Tensor]]] = []
    for p in params:
        if not p.requires_grad:
            continue
        if isinstance(optimizer, FusedOptimizer):
            bare = torch.empty(p.shape, dtype=p.dtype, device="meta")
            codec, moments = optimizer._codec_of(p), optimizer._moments(group, bare)
            pairs.append((p, [*codec.new_state(bare, moments).values()]))
            continue
        key = (p.shape, p.dtype)
        if key not in states_by_shape:
            states_by_shape[key] = _probe_state(type(optimizer), group, p)
        pairs.append((p, states_by_shape[key]))
    return pairs


def _probe_state(kind: Any, group: Any, p: torch.Tensor) -> Sequence[torch.Tensor]:
    """Make the state of another package's optimizer by a step on zeros of this shape."""
    zeros = torch.nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=p.device))
    zeros.grad = torch.zeros_like(zeros)
    settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    optimizer = kind([{"params": [zeros], **settings}], lr=settings["lr"])
    optimizer.step()
    values = optimizer.state[zeros].values()
    return [value.to("meta") for value in values if isinstance(value, torch.Tensor)]


def _count_entry_bytes(entry: torch.Tensor, p: torch.Tensor, part: float) -> float:
    """Count the bytes of a state's entry on a rank: sharded like its parameter, or replicated."""
    if is_dtensor(p):
        part *= _count_local_bytes(p) / max(p.nbytes, 1)
    return entry.nbytes * part if entry.ndim and entry.shape[0] != 1 else entry.nbytes


# --- Activations ----------------------------------------------------------------------------------


def count_activations(
    model: torch.nn.Module,
    example: tuple[Any, ...],
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
) -> int:
    """Count the bytes that a forward pass saves for its backward pass, besides the model's own.

    Saved tensors are released at once, so that measuring takes no more memory than an op needs.
    Generators do not change; statistics of batch norms do.
    """
    own = (*model.parameters(), *model.buffers())
    # References prevent the reuse of the numbers of freed storages.
    storages = [local_part(t).untyped_storage() for t in own]
    seen = {storage._cdata: StorageWeakRef(storage) for storage in storages}
    total = 0

    def count(t: torch.Tensor) -> None:
        nonlocal total
        storage = local_part(t).untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = StorageWeakRef(storage)
            total += storage.nbytes()

    def refuse(_: Any) -> torch.Tensor:
        raise RuntimeError("memory_estimate's forward pass has no backward pass")

    with torch.random.fork_rng(), torch.enable_grad():
        with torch.autograd.graph.saved_tensors_hooks(count, refuse):
            result = model(*example)
            if loss_fn is not None:
                result = loss_fn(result)
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                count(t)  # the caller holds the result
    return total
