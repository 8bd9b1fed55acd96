"""Parameters that leave, step and return together, with their buffers on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from torchweld.ops.optimizer import passes
from torchweld.ops.optimizer.batch import Batch, Tensors
from torchweld.optim._base import FusedOptimizer, Group
from torchweld.optim._codecs import State
from torchweld.optim._shards import from_part, is_one, like, local
from torchweld.optim.offload._members import Member, checksum
from torchweld.optim.offload._transfers import Arrival, Transfers

HOST, DEVICE = "cpu", "cuda"
ALIGNMENT = 64  # bytes: a vector of the widest instruction set
States = dict[torch.Tensor, State]


class Undo:
    """The host memory for copies of states that may be restored, over all buckets."""

    def __init__(self, limit: int) -> None:
        self._limit, self._used = limit, 0

    def exchange(self, old: int, new: int) -> bool:
        """Exchange these bytes for others; False, taking none, if that is too many."""
        self._used -= old
        fits = self._used + new <= self._limit
        self._used += new * fits
        return fits


class Bucket:
    """A range of an optimizer's parameters, in its order."""

    def __init__(
        self,
        given: FusedOptimizer,
        ranges: list[tuple[int, list[torch.Tensor]]],
        first_number: int,
        states: States,
        transfers: Transfers,
        undo: Undo,
    ) -> None:
        self._given, self._states = given, states
        self._transfers, self._undo = transfers, undo
        self._first_number = first_number
        self._ranges = [(at, [Member(p) for p in params]) for at, params in ranges]
        self.members = [m for _, members in self._ranges for m in members]
        self.home = DEVICE
        self._is_finished = False  # in a step in which another bucket failed
        self.missing = 0  # expected gradients still to come
        self.task: Future[None] | None = None
        # The factor and settings of a step that may still be undone.
        self.uncertain: tuple[float, list[Group]] | None = None
        self._state_bytes = (0, 0)  # number of parameters, number of bytes
        self._buffers: list[torch.Tensor] = []
        self._journal: Tensors = []
        self._written: Tensors = []
        self._works: list[tuple[Group, Batch]] | None = None
        self._stepping: list[Member] = []
        self._fetched: Arrival | None = None
        self._given_back: Arrival | None = None
        self._stepper = self._new_stepper()

    # --- Home ---------------------------------------------------------------------------------

    def move(self, home: str) -> None:
        """Move the stepping parameters and their states to the host or to the device."""
        if home == self.home:
            return
        new = self._twins() if home == HOST else [(m.param, m.param) for m in self.members]
        device = new[0][0].device if home == HOST else None
        moved = {
            m: {name: _moved(v, device or m.param.device) for name, v in state.items()}
            for m in self.members
            if (state := self._states.get(m.twin)) is not None
        }
        for m, (twin, landing) in zip(self.members, new, strict=True):
            if (state := self._states.pop(m.twin, None)) is not None:
                state.update(moved[m])  # in place: the given optimizer shares the dict
                self._states[twin] = state
            m.twin, m.landing = twin, landing
            m.mark_copied()
        if home == DEVICE:
            self._drop_buffers()
        self.home = home
        self._stepper = self._new_stepper()

    def _twins(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters and gradients on the host, in two buffers."""
        parts = [local(m.param.detach()) for m in self.members]
        sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
        with host_memory("parameters and gradients", 2 * sum(sizes)):
            self._buffers = [
                torch.empty(sum(sizes), dtype=torch.uint8, device="cpu") for _ in range(2)
            ]
        try:
            for buffer in self._buffers:
                self._transfers.pin(buffer)
        except MemoryError:
            self._drop_buffers()
            raise
        views: list[Tensors] = []
        for buffer in self._buffers:
            pieces = zip(buffer.split(sizes), parts, strict=True)
            views.append([_view(piece, part) for piece, part in pieces])
        self._transfers.fetch(zip(parts, views[0], strict=True)).synchronize()
        return [
            (torch.nn.Parameter(like(m.param, twin), m.param.requires_grad), like(m.param, landing))
            for m, twin, landing in zip(self.members, *views, strict=True)
        ]

    def _drop_buffers(self) -> None:
        for buffer in self._buffers:
            self._transfers.unpin(buffer)
        self._undo.exchange(self.undo_bytes(), 0)
        self._buffers, self._journal, self._written = [], [], []
        self._works = None

    def _new_stepper(self) -> FusedOptimizer:
        groups = [{"params": [m.twin for m in members]} for _, members in self._ranges]
        codecs = {m.twin: self._given._codec_of(m.param) for m in self.members}
        return stepper(self._given, groups, self._first_number, self._states, codecs)

    # --- Gradients ----------------------------------------------------------------------------

    def expect(self) -> None:
        """Expect as many gradients as came before this step."""
        for m in self.members:
            m.expected = m.fired
        self.forget()

    def forget(self) -> None:
        """Reset the gradients."""
        self._is_finished = False
        for m in self.members:
            m.forget()
        self.missing = sum(m.expected for m in self.members)

    def is_sent(self) -> bool:
        """Whether the host's gradients and parameters are up to date."""
        is_sent = all(m.is_sent() for m in self.members) and not self._changed()
        return is_sent and self._has_sent_sums()

    def _has_sent_sums(self) -> bool:
        summed = [m for m in self.members if m.sent_sum is not None]
        if not summed:
            return True
        now = [checksum(local(m.param.grad)) for m in summed]  # type: ignore[arg-type]
        sent = [m.sent_sum for m in summed]
        return torch.equal(torch.stack(now), torch.stack(sent))  # type: ignore[arg-type]

    def _changed(self) -> list[Member]:
        return [m for m in self.members if m.is_changed()]

    def distrust(self) -> None:
        """Take every parameter for one that something else has written."""
        for m in self.members:
            m.stamp = None

    def send(self, release: bool) -> None:
        """Fetch all gradients, and parameters that something else wrote."""
        copies = []
        for m in self.members:
            grad = m.param.grad if m.reduced is None else m.reduced
            m.was_reduced = m.reduced is not None
            if m.is_released and grad is None:
                continue
            m.sent, m.sent_sum, m.is_released = None, None, False
            if grad is None:
                m.twin.grad = None
                continue
            part = local(grad)
            if grad.layout is torch.strided and grad.dtype == m.landing.dtype:
                copies.append((part, local(m.landing)))
                m.twin.grad = m.landing
            else:
                m.twin.grad_dtype = None  # type: ignore[attr-defined]
                m.twin.grad = like(m.param, part.to("cpu", copy=True))
            m.note_sent(grad)
        for m in self._changed():
            copies.append((local(m.param.detach()), local(m.twin.detach())))
            m.mark_copied()
        self._fetched = self._transfers.fetch(copies)
        self._works = None
        if release:
            for m in self.members:
                if m.sent is not None:
                    m.param.grad, m.sent, m.is_released = None, None, True

    def take_back(self, m: Member) -> None:
        """Add a released gradient to the next one, as if it had stayed on the device."""
        assert m.param.grad is not None
        self.arrived()
        assert m.twin.grad is not None
        local(m.param.grad).add_(local(m.twin.grad).to(m.param.device))
        m.is_released = False

    def arrived(self) -> None:
        """Wait for the gradients."""
        if self._fetched is not None:
            self._fetched.synchronize()

    # --- The step -----------------------------------------------------------------------------

    def freeze(self) -> list[Group]:
        """Adopt the current settings of the groups."""
        groups = self._stepper.param_groups
        before = [_settings(group) for group in groups]
        for group, (at, _) in zip(groups, self._ranges, strict=True):
            found = _settings(self._given.param_groups[at])
            if self.home == HOST:  # on the device, do not wait for a learning rate there
                found = {key: _frozen(value) for key, value in found.items()}
            params = group["params"]
            group.clear()
            group.update(found, params=params)
        now = [_settings(group) for group in groups]
        if self.home == DEVICE or not same_settings(now, before):
            self._works = None
        return now

    def prepare(self) -> None:
        """Check everything and create missing states; change nothing else."""
        if self._works is not None:
            return
        count = sum(local(m.param.detach()).numel() for m in self.members)
        with host_memory(f"states of {count} parameters", None):
            self._works = self._stepper._work()
        self._stepping = [m for m in self.members if m.twin.grad is not None]

    def run(self, factor: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Step everything that is prepared."""
        self.prepare()
        self.arrived()
        if self._given_back is not None:
            self._given_back.synchronize()  # a copy may still read the parameters
        assert self._works is not None
        stepper = self._stepper
        stepper.found_inf = found_inf  # type: ignore[attr-defined]
        tasks = [stepper._task(group, batch, factor) for group, batch in self._works]
        passes.run(stepper._passes(), tasks, stepper._exchange)

    def runs_alone(self) -> bool:
        """Whether the step needs no collectives, so that any thread may run it at any time.

        All ranks must order collectives alike, and only the training loop's thread can.
        """
        if not any(is_one(m.param) for m in self.members):
            return True
        return not any(
            each.exchange is not None and each.concerns(self._stepper._task(group, batch, None))
            for group, batch in self._works or self._stepper._work()
            for each in self._stepper._passes()
            if batch.is_sharded
        )

    def speculate(self, factor: float) -> None:
        """Step on expectations, keeping copies to undo it; or do nothing."""
        if any(not self._states.get(m.twin) for m in self.members if m.expected):
            return
        settings = self.freeze()
        self.prepare()
        if not self.runs_alone() or not self._keep():
            return
        try:
            self.run(torch.tensor(factor, dtype=torch.float32, device="cpu"), None)
        except BaseException:
            self._restore()
            raise
        self.uncertain = (factor, settings)

    def holds(self, factor: float, settings: list[Group]) -> bool:
        """Whether the speculative step used these values."""
        assert self.uncertain is not None
        return self.uncertain[0] == factor and same_settings(self.uncertain[1], settings)

    def undo(self) -> None:
        """Undo a speculative step, bit for bit."""
        if self.uncertain is not None:
            self._restore()

    def _keep(self) -> bool:
        """Copy what the step will overwrite; False if the limit has no room for it."""
        assert self._works is not None
        self._written = [t for _, batch in self._works for t in _written(batch)]
        like_before = [(t.shape, t.dtype) for t in self._written]
        if like_before != [(t.shape, t.dtype) for t in self._journal]:
            old, self._journal = self.undo_bytes(), []
            needed = sum(t.nbytes for t in self._written)
            if not self._undo.exchange(old, needed):
                return False
            try:
                self._journal = [torch.empty_like(t) for t in self._written]
            except (RuntimeError, MemoryError):
                self._undo.exchange(needed, 0)
                return False
        torch._foreach_copy_(self._journal, self._written)
        return True

    def _restore(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._written, self._journal)
        self.uncertain = None

    def undo_bytes(self) -> int:
        return sum(t.nbytes for t in self._journal)

    def settle(self) -> None:
        """Wait for a running step; cancel a queued one. A failed step has been undone."""
        if self.task is not None and not self.task.cancel():
            self.task.exception()
        self.task = None

    def rewind(self) -> None:
        """Undo a step that `step()` has not confirmed."""
        self.settle()
        self.undo()
        self._works = None

    def give(self) -> None:
        """Copy the stepped parameters back; the step is final."""
        self.uncertain = None
        pairs = [(local(m.twin.detach()), local(m.param.detach())) for m in self._stepping]
        self._given_back = self._transfers.give(pairs)
        # The copies have moved the counters of the parts of DTensors only.
        torch.autograd.graph.increment_version([m.param for m in self._stepping])
        for m in self._stepping:
            m.mark_copied()
        self._works, self._stepping = None, []

    def end(self) -> None:
        """Finish a step on the device."""
        self._works, self._stepping = None, []

    def finish(self) -> None:
        """Make the step final, though another bucket has failed: a repeated step leaves it out."""
        if self.home == HOST:
            self.give()
        self._is_finished = True
        for m in self.members:
            if m.param.grad is not None:
                m.note_sent(m.param.grad)

    def is_finished(self) -> bool:
        """Whether the step has been taken with these gradients in an attempt that failed."""
        self._is_finished = self._is_finished and all(m.is_sent() for m in self.members)
        return self._is_finished

    def refresh(self) -> None:
        """Adopt parameters that something else may have written."""
        parts = [(local(m.param.detach()), local(m.twin.detach())) for m in self.members]
        self._transfers.fetch(parts).synchronize()
        for m in self.members:
            m.mark_copied()

    def state_bytes(self) -> int:
        """The bytes of all states, wherever they are."""
        states = [self._states[m.twin] for m in self.members if m.twin in self._states]
        if self._state_bytes[0] != len(states):
            tensors = (v for state in states for v in state.values() if isinstance(v, torch.Tensor))
            self._state_bytes = len(states), sum(local(t).nbytes for t in tensors)
        return self._state_bytes[1]

    def host_buffers(self) -> int:
        """The bytes of parameters and gradients on the host."""
        return sum(buffer.nbytes for buffer in self._buffers)


def stepper(
    given: FusedOptimizer,
    groups: list[Group],
    first_number: int,
    states: States,
    codecs: dict[torch.Tensor, Any],
) -> FusedOptimizer:
    """An optimizer like this one for other parameters, without checks and hooks."""
    new = object.__new__(type(given))
    new.__dict__.update(given.__dict__)
    new.param_groups, new._first_number, new._codecs_of = groups, first_number, codecs
    new.state = states  # type: ignore[assignment]
    return new


@contextlib.contextmanager
def host_memory(what: str, count: int | None) -> Iterator[None]:
    """Raise a MemoryError that names what did not fit."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            size = "" if count is None else f" ({count} bytes)"
            raise MemoryError(
                f"Offload: the host has no room for {what}{size}. Nothing has stepped. Smaller "
                'states (state_dtype="8bit"), master_weights="remainder" or undo_bytes=0 take less'
            ) from error
        raise


def _written(batch: Batch) -> Iterable[torch.Tensor]:
    for tensors in (batch.params, batch.masters, batch.moments, batch.absmaxes, batch.steps):
        yield from tensors


def _view(piece: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A tensor like this part, within a buffer."""
    strides = torch.empty_like(part, device="meta").stride()
    return piece[: part.nbytes].view(part.dtype).as_strided(part.shape, strides)


def _moved(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if is_one(value):
        placements = value.placements  # type: ignore[attr-defined]
        return from_part(value, local(value).to(device), placements, value.shape)
    return value.to(device)


def _settings(group: Group) -> Group:
    return {key: value for key, value in group.items() if key != "params"}


def _frozen(value: Any) -> Any:
    """A copy of a setting: learning rates may be tensors that change later."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def same_settings(a: list[Group], b: list[Group]) -> bool:
    """Whether two frozen lists of groups are the same."""

    def same(x: Any, y: Any) -> bool:
        if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
            return type(x) is type(y) and torch.equal(x, y)
        return bool(x == y)

    return all(
        x.keys() == y.keys() and all(same(x[k], y[k]) for k in x) for x, y in zip(a, b, strict=True)
    )
