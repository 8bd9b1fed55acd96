"""Trains small models with an optimizer and with its offloaded version, for comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchweld import optim
from torchweld.optim._shards import local_part
from torchweld.optim.offload._machine import Arrival, Transfers

Make = Callable[[list[torch.Tensor]], Any]


class SimulatedTransfers(Transfers):
    """A simulated device of `capacity` bytes that counts the bytes which are copied.

    `others` returns how many bytes of the device are used besides the bytes that Offload counts.
    """

    def __init__(self, capacity: int = 1 << 62, others: Callable[[], int] = lambda: 0) -> None:
        self._capacity, self._others = capacity, others
        self.fetched_bytes = self.given_bytes = 0
        self.pinned: dict[int, int] = {}

    def pin(self, buffer: torch.Tensor) -> None:
        self.pinned[buffer.data_ptr()] = buffer.nbytes

    def unpin(self, buffer: torch.Tensor) -> None:
        self.pinned.pop(buffer.data_ptr(), None)

    def fetch(self, copies: Any, after: Arrival | None = None) -> Arrival:
        copies = list(copies)
        self.fetched_bytes += sum(source.nbytes for source, _ in copies)
        return super().fetch(copies, after)

    def give(self, copies: Any, after: Arrival | None = None) -> Arrival:
        copies = list(copies)
        self.given_bytes += sum(source.nbytes for source, _ in copies)
        return super().fetch(copies, after)

    def capacity(self) -> int:
        return self._capacity

    def peak(self, held: int) -> int:
        in_use = held + self._others()
        if in_use > self._capacity:
            raise torch.OutOfMemoryError(
                f"the simulated device has {self._capacity} bytes, {in_use} are in use"
            )
        return in_use


BUCKET = 20000  # bytes: the model has four buckets


def small_model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A model with matrices, vectors, and a row that is not a multiple of a block."""
    torch.manual_seed(0)
    layers = nn.Linear(40, 300), nn.GELU(), nn.Linear(300, 64), nn.LayerNorm(64), nn.Linear(64, 90)
    return nn.Sequential(*layers).to(dtype)


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return model(x).float().square().mean()


def backward(model: nn.Module, step: int, micro: int = 1, scale: float = 1.0) -> None:
    for k in range(micro):
        (loss_of(model, 100 * step + k) * scale).backward()


def count_sent(optimizer: Any) -> int:
    """The buckets whose gradients reached the host during the backward pass."""
    buckets = optimizer._store.buckets if isinstance(optimizer, optim.Offload) else []
    return sum(any(m.sent is not None or m.is_released for m in b.members) for b in buckets)


def count_written(optimizer: Any) -> int:
    """Count the host's buckets with gradients or parameters written since."""
    buckets = optimizer._store.list_on_host() if isinstance(optimizer, optim.Offload) else []
    return sum(any(m.sent is not None for m in b.members) and not b.is_sent() for b in buckets)


def train(
    make: Make, dtype: torch.dtype = torch.bfloat16, steps: int = 4, micro: int = 1
) -> tuple[nn.Module, Any, int]:
    """The model, its optimizer, and the number of buckets sent before step()."""
    model = small_model(dtype)
    optimizer = make(list(model.parameters()))
    sent = 0
    for step in range(steps):
        backward(model, step, micro)
        sent += count_sent(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, sent


def offloaded(make: Make, **arguments: Any) -> Make:
    settings = {"bucket_bytes": BUCKET, "threads": 1, "transfers": SimulatedTransfers()}
    settings |= arguments
    return lambda params: optim.Offload(make(params), **settings)


def take_steps(model: nn.Module, optimizer: Any, *seeds: int, micro: int = 1) -> None:
    for seed in seeds:
        backward(model, seed, micro)
        optimizer.step()
        optimizer.zero_grad()


ADAMW: dict[str, Any] = {"lr": 1e-2, "master_weights": True}


def adamw(params: Any, **settings: Any) -> Any:
    return optim.AdamW(params, **ADAMW, **settings)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same_run(found: tuple[nn.Module, Any], expected: tuple[nn.Module, Any]) -> None:
    """Compare parameters, and the keys, dtypes and bits of the state_dicts."""
    pairs = zip(found[0].parameters(), expected[0].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    a, b = found[1].state_dict(), expected[1].state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for key, state in b["state"].items():
        assert list(a["state"][key]) == list(state)
        for name, value in state.items():
            assert a["state"][key][name].dtype == value.dtype
            assert torch.equal(a["state"][key][name], value), (key, name)


def assert_alike(
    make: Make,
    go: Callable[[nn.Module, Any], Any],
    build: Callable[[], nn.Module] = small_model,
    **arguments: Any,
) -> Any:
    """Compare the same calls on an optimizer and on its offloaded version.

    Return what the calls returned with the latter.
    """
    runs = []
    for maker in (make, offloaded(make, **arguments)):
        model = build()
        optimizer = maker(list(model.parameters()))
        found = go(model, optimizer)
        runs.append((model, optimizer))
    assert_same_run(runs[1], runs[0])
    return found


# --- Writes by others -----------------------------------------------------------------------------

Write = Callable[[nn.Module], Any]


def each(model: nn.Module, write: Callable[[Any], Any]) -> None:
    """Write every parameter, without autograd."""
    with torch.no_grad():
        for p in model.parameters():
            write(p)


def _load(model: nn.Module) -> None:
    model.load_state_dict({name: v.detach() * 0.5 for name, v in model.state_dict().items()})


def _replace_twice(p: torch.Tensor) -> None:
    """Memory that is freed may serve again: the second time at the first address."""
    for _ in range(2):
        p.data = p.data * 0.7


WRITERS: dict[str, Write] = {
    "nothing": lambda model: None,
    "p.mul_": lambda model: each(model, lambda p: p.mul_(0.5)),
    "p.detach().mul_": lambda model: each(model, lambda p: p.detach().mul_(0.5)),
    "p.copy_": lambda model: each(model, lambda p: p.copy_(p * 0.5)),
    "init": lambda model: each(model, lambda p: torch.nn.init.constant_(p, 0.25)),
    "part of p": lambda model: each(model, lambda p: local_part(p).mul_(0.5)),
    "foreach": lambda model: torch._foreach_mul_([p.detach() for p in model.parameters()], 0.5),
    "load_state_dict": _load,
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-4),
    "p.grad.mul_": lambda model: each(model, lambda p: p.grad.mul_(0.5)),
    "part of p.grad": lambda model: each(model, lambda p: local_part(p.grad).mul_(0.5)),
    "p.grad.zero_": lambda model: each(model, lambda p: p.grad.zero_()),
    "p.grad =": lambda model: each(model, lambda p: setattr(p, "grad", p.grad * 0.5)),
    "a missing p.grad": lambda model: setattr(model[2].weight, "grad", None),
}

REPLACERS: dict[str, Write] = {
    "p.data =": lambda model: each(model, lambda p: setattr(p, "data", p.data * 0.5)),
    "p.data = twice": lambda model: each(model, _replace_twice),
    "p.grad.data =": lambda model: each(model, lambda p: setattr(p.grad, "data", p.grad * 0.5)),
}

# These move no version counter.
UNCOUNTED: dict[str, Write] = {
    "p.data.clamp_": lambda model: each(model, lambda p: local_part(p).data.clamp_(-0.01, 0.01)),
    "p.data.copy_": lambda model: each(
        model, lambda p: local_part(p).data.copy_(local_part(p) * 0.5)
    ),
    "numpy": lambda model: each(model, lambda p: local_part(p.detach()).numpy().fill(0.25)),
    "p.grad.data.clamp_": lambda model: each(
        model, lambda p: local_part(p.grad).data.clamp_(-1e-4, 1e-4)
    ),
    "p.grad, numpy": lambda model: each(model, lambda p: local_part(p.grad).numpy().fill(0.25)),
}


def run_with(
    write: Write, make: Make, shard: Callable[[nn.Module], Any] = lambda model: None
) -> tuple[nn.Module, Any, int]:
    """A run in which something writes before a step, and after another one."""
    model = small_model(torch.float32)
    shard(model)
    optimizer = make(list(model.parameters()))
    written = 0
    for step in range(6):
        backward(model, step)
        if step == 2:
            write(model)
        written += count_written(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            write_between(model, write)
    return model, optimizer, written


def write_between(model: nn.Module, write: Write) -> None:
    """Write after a step, where gradients are none any more."""
    kept = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    write(model)
    for p, grad in zip(model.parameters(), kept, strict=True):
        p.grad = grad
