"""Offloaded activations: the same bits, bytes as in the formula, and failures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import offloading
import torchweld
from offloading import SimulatedTransfers, adamw
from torchweld import optim
from torchweld.optim.offload import _activations
from torchweld.optim.offload._policy import MARGIN

LAYERS, ROWS, WIDTH = 6, 64, 32
ONE = ROWS * WIDTH * 2  # bytes of one activation
SAVED = [ONE] * (2 * LAYERS + 1)  # the input of each linear layer and each GELU, and the last


class Deep(nn.Module):
    """Layers whose activations are larger than their parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.bfloat16()
        self.made: list[tuple[StorageWeakRef, int]] = []
        self.recomputes = self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.made = []
        for at, layer in enumerate(self.layers):
            if self.fails and at == 2:
                x.register_hook(_break)
            if self.recomputes:
                x = checkpoint(layer, x, use_reentrant=False)  # type: ignore[assignment]
            else:
                x = self._noted(layer(self._noted(x)))
            x = nn.functional.gelu(x)
        return self._noted(x).square().mean()

    def _noted(self, x: torch.Tensor) -> torch.Tensor:
        self.made.append((StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()))
        return x

    def alive(self) -> int:
        """The bytes of activations that the device holds, as torch's memory says."""
        return sum(nbytes for storage, nbytes in self.made if not storage.expired())


class _BrokenError(Exception):
    pass


def _break(_: Any) -> None:
    raise _BrokenError


def data(seed: int, rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def offload_of(model: nn.Module, **arguments: Any) -> optim.Offload:
    settings = {"bucket_bytes": ONE, "threads": 1, "transfers": SimulatedTransfers()} | arguments
    return optim.Offload(adamw(model.parameters()), **settings)


def saving(optimizer: Any) -> Any:
    ours = isinstance(optimizer, optim.Offload)
    return optimizer.activations(least_bytes=ONE) if ours else contextlib.nullcontext()


def forward(model: nn.Module, optimizer: Any, seed: int, rows: int = ROWS) -> torch.Tensor:
    with saving(optimizer):
        return model(data(seed, rows))


def train(model: Deep, optimizer: Any, micro: int = 1) -> None:
    for step in range(6):
        for k in range(micro):
            # Sequences of varying lengths: the number of tensors that stay depends on the bytes.
            forward(model, optimizer, 10 * step + k, ROWS * (1 + step % 2)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_alike(go: Callable[[Any, Any], Any], clip: float | None = None, **arguments: Any) -> Any:
    """The same calls with the optimizer and with its offloaded version, which is returned."""

    def run(model: Any, optimizer: Any) -> Any:
        go(model, optimizer)
        return optimizer

    settings = {"bucket_bytes": ONE, "clip_norm": clip} | arguments
    return offloading.assert_alike(partial(adamw, max_grad_norm=clip), run, Deep, **settings)


def take_steps(model: Any, optimizer: Any, *seeds: int) -> None:
    for seed in seeds:
        forward(model, optimizer, seed).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("clip", [None, 1e-2])
@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("placement", ["cpu", "auto", "cuda"])
def test_the_same_bits(placement: str, micro: int, clip: float | None) -> None:
    """With "auto", the device has room for some of the activations."""
    transfers = SimulatedTransfers(capacity=120_000)
    go = partial(train, micro=micro)
    optimizer = assert_alike(go, clip, placement=placement, transfers=transfers)
    assert (optimizer.memory()["host"]["activations"] > 0) == (placement != "cuda")


def test_recomputed_activations() -> None:
    """Only the inputs of recomputed blocks leave."""

    def go(model: Deep, optimizer: Any) -> None:
        model.recomputes = True
        train(model, optimizer)

    assert assert_alike(go).memory()["host"]["activations"] > 0


@pytest.mark.parametrize("stay", [0, 3, len(SAVED)])
def test_bytes_of_activations(stay: int) -> None:
    """As torch's own memory has them: the last ones are on the device, the others on the host."""
    model = Deep()
    optimizer = offload_of(model, placement="auto")
    forward(model, optimizer, 0).backward()  # measures the sizes
    pair = 2 * ONE  # the piece that the backward reads, and the next one
    optimizer._activations.keep(stay * ONE + pair * (0 < stay < len(SAVED)))
    traffic = optimizer._transfers.fetched_bytes  # type: ignore[attr-defined]
    loss = forward(model, optimizer, 1)
    leaving = SAVED[stay:]
    assert optimizer._transfers.fetched_bytes - traffic == sum(leaving)  # type: ignore[attr-defined]
    # Nothing else references these tensors: the last one is the input of the square.
    assert model.alive() == optimizer.memory()["device"]["activations"] == stay * ONE
    alive = [not storage.expired() for storage, _ in model.made]
    assert alive == [False] * (len(SAVED) - stay) + [True] * stay
    assert optimizer.memory()["host"]["activations"] == sum(SAVED)  # as the first pass took
    loss.backward()
    del loss
    assert optimizer.memory()["device"]["activations"] == 0
    most = optimizer._activations.take_most()
    assert most == {0: pair, 3: (3 + 1) * ONE, len(SAVED): sum(SAVED)}[stay]
    with optimizer.activations():  # free memory is freed after a pass that took less than half
        pass
    kept = 0 if stay == len(SAVED) else sum(SAVED)
    assert optimizer.memory()["host"]["activations"] == kept


def test_activations_come_back_ahead_of_their_use() -> None:
    """When the backward reads one, the next one is being copied; each returns once."""
    model = Deep()
    optimizer = offload_of(model)
    order: list[tuple[str, int]] = []
    activations = optimizer._activations
    load, bring = activations._load, activations._bring

    def noted_load(piece: Any) -> None:
        if piece.device is None:
            order.append(("load", piece.at))
        load(piece)

    def noted_bring(piece: Any, *saved: Any) -> Any:
        order.append(("read", piece.at))
        return bring(piece, *saved)

    activations._load = noted_load  # type: ignore[method-assign]
    activations._bring = noted_bring  # type: ignore[assignment, method-assign]
    forward(model, optimizer, 0).backward()
    last = len(SAVED) - 1
    reads = list(dict.fromkeys(at for what, at in order if what == "read"))
    assert reads == list(range(last, -1, -1))
    assert [at for what, at in order if what == "load"] == list(range(last, -1, -1))
    for at in range(last):
        # Being copied before the backward finishes with the previous one.
        loads = order[: order.index(("read", at))].count(("load", at))
        between = order[order.index(("read", at + 1)) + 1 : order.index(("load", at))]
        assert loads == 1
        assert all(what == "load" for what, _ in between)


def test_auto_follows_the_pressure() -> None:
    """Others use all but what "cpu" needs, then less: no lack of memory, and bits are equal."""
    fixed = 2 * sum(p.nbytes for p in Deep().parameters())
    most = sum(SAVED)
    capacity = int((fixed + 2 * ONE + most) / MARGIN)
    others = [0]
    transfers = SimulatedTransfers(capacity, lambda: others[0])
    pressure = [most, *range(most, 0, -2 * ONE), 0, 0, 0, ONE, 2 * ONE, 4 * ONE, 6 * ONE, most]
    kept: list[int] = []

    def go(model: Deep, optimizer: Any) -> None:
        kept.clear()
        for step, others[0] in enumerate(pressure):
            if step == len(pressure) - 1 and isinstance(optimizer, optim.Offload):
                optimizer.relieve()  # it came at once
            loss = forward(model, optimizer, step)
            kept.append(model.alive())
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()

    assert_alike(go, placement="auto", transfers=transfers)
    assert kept[0] == kept[1] == 0
    assert max(kept) == most
    assert 0 < kept[-2] < most
    assert kept[-1] == 0


# --- What fails -----------------------------------------------------------------------------------


def test_an_exception_in_the_backward() -> None:
    """A failed backward frees its activations, and the next step is unaffected, bit for bit."""

    def go(model: Deep, optimizer: Any) -> None:
        take_steps(model, optimizer, 0, 1)
        model.fails = True
        loss = forward(model, optimizer, 8)
        with pytest.raises(_BrokenError):
            loss.backward()
        del loss
        model.fails = False
        optimizer.zero_grad()
        if isinstance(optimizer, optim.Offload):
            assert optimizer.memory()["device"]["activations"] == 0
            assert all(b.is_free for b in optimizer._activations.buffers._buffers)
        take_steps(model, optimizer, 9)

    assert_alike(go)


@pytest.mark.parametrize("fails", ["memory", "lock"])
def test_no_room_on_the_host(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward raises; nothing is lost, and it can be repeated."""

    class Full(SimulatedTransfers):
        is_full = False

        def pin(self, buffer: torch.Tensor) -> None:
            if self.is_full and len(self.pinned) > pinned + 3:
                raise MemoryError("locked")
            super().pin(buffer)

    def exhausted(*_: Any, **__: Any) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    transfers = Full()

    def go(model: Deep, optimizer: Any) -> None:
        if isinstance(optimizer, optim.Offload):
            fail(model, optimizer)
        take_steps(model, optimizer, 1)

    def fail(model: Deep, optimizer: optim.Offload) -> None:
        nonlocal pinned
        pinned = len(transfers.pinned)
        with monkeypatch.context() as patched:
            transfers.is_full = fails == "lock"
            if fails == "memory":
                patched.setattr(_activations.torch, "empty", exhausted)
            with pytest.raises(MemoryError, match=r"no room for activations \(\d+ bytes\)"):
                forward(model, optimizer, 0)
        transfers.is_full = False
        assert all(b.is_free for b in optimizer._activations.buffers._buffers)

    pinned = 0
    assert_alike(go, transfers=transfers)


@pytest.mark.parametrize("placement", ["cuda", "cpu"])
def test_writing_what_was_saved(placement: str) -> None:
    """It is an error, as in autograd, whether the tensor stayed or left; its memory is not kept."""
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    with offload_of(Deep(), placement=placement).activations(least_bytes=1):
        hidden = x * 2
        loss = hidden.square().sum()
    memory = StorageWeakRef(hidden.untyped_storage())
    hidden.detach()[0].zero_()
    del hidden
    assert memory.expired() == (placement == "cpu")
    with pytest.raises(RuntimeError, match=r"shape \(64, 32\) .* at version 1, expected version 0"):
        loss.backward()


@pytest.mark.parametrize("placement", ["none", "cuda", "cpu"])
def test_memory_that_is_saved_twice(placement: str) -> None:
    """Before and after it is written: only the later one may be read."""
    ours = contextlib.nullcontext()
    if placement != "none":
        ours = offload_of(Deep(), placement=placement).activations(least_bytes=1)  # type: ignore
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    with ours:
        hidden = x * 2
        before = hidden.square().sum()
        after = hidden.mul_(2).square().sum()
    after.backward(retain_graph=True)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 2 * 16))
    with pytest.raises(RuntimeError, match=r"at version 1.*expected version 0"):
        before.backward()


class Late(SimulatedTransfers):
    """Copies run when something waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self._gives: list[Any] = []
        self.waits: list[str] = []

    def _begin(self, way: str, copies: Any, after: Any) -> Any:
        waiting, waits = list(copies), self.waits

        class Arrival:
            def is_done(self) -> bool:
                return not waiting

            def _run(self) -> None:
                if after is not None:
                    after._run()
                while waiting:
                    source, target = waiting.pop()
                    target.copy_(source)

            def synchronize(self) -> None:
                waits.append(f"host, {way}")
                self._run()

            def join(self, *targets: torch.Tensor) -> None:
                waits.append(f"device, {way}")
                self._run()

        return Arrival()

    def fetch(self, copies: Any, after: Any = None) -> Any:
        return self._begin("fetch", copies, after)

    def give(self, copies: Any, after: Any = None) -> Any:
        self._gives.append(self._begin("give", copies, after))
        return self._gives[-1]

    def join(self) -> None:
        for arrival in self._gives:
            arrival._run()
        self._gives = []


def test_the_host_does_not_wait_in_the_backward() -> None:
    """Each reader waits on the device for its own piece; what was prefetched goes on."""
    transfers = Late()
    model = Deep()
    optimizer = offload_of(model, transfers=transfers)
    loss = forward(model, optimizer, 0)
    transfers.waits.clear()
    loss.backward(inputs=model.layers[LAYERS - 1].bias)
    # The square, the last GELU and the last linear layer read a piece each.
    assert transfers.waits == ["device, give"] * 3
    assert [arrival.is_done() for arrival in transfers._gives] == [True, True, True, False]


def test_copies_are_waited_for() -> None:
    assert_alike(train, transfers=Late())


def test_shared_memory_leaves_once() -> None:
    """Views of one tensor; parameters, small tensors and pieces of large ones stay."""
    transfers = SimulatedTransfers()
    model = Deep()
    optimizer = offload_of(model, transfers=transfers)
    x = torch.ones(ROWS, 3 * WIDTH, requires_grad=True)
    dataset = torch.ones(100, ROWS, WIDTH)
    before = transfers.fetched_bytes
    weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    with optimizer.activations(least_bytes=ROWS * WIDTH):
        a, b, c = (x * 1).chunk(3, 1)
        loss = (a * b * c).sum() + (a[0] * dataset[3]).sum() + (a @ weight.t()).sum()
    products = ROWS * WIDTH * 4  # a * b, which the product with c has saved
    assert transfers.fetched_bytes - before == x.nbytes + products
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad[:, 2 * WIDTH :], torch.ones(ROWS, WIDTH))


def test_the_argument_is_named() -> None:
    with pytest.raises(torchweld.ArgumentError, match="least_bytes is 0"):
        offload_of(Deep()).activations(least_bytes=0)
