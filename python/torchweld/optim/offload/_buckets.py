"""Buckets: parameters whose gradients are copied to the host and stepped there together."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from torchweld.collectives.runs import divide_into_runs
from torchweld.errors import ArgumentError
from torchweld.ops.optimizer.batch import Batch, Tensors, is_foreign_to_kernels
from torchweld.optim._base import FusedOptimizer, Group, Places
from torchweld.optim._codecs import State
from torchweld.optim._shards import is_dtensor, local_part, make_dtensor, shard_like
from torchweld.optim.offload._machine import Arrival, Transfers, allocate_pages

HOST, DEVICE = "cpu", "cuda"
ALIGNMENT = 64  # bytes: a vector of the widest instruction set
States = dict[torch.Tensor, State]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Stamp:
    """A record of a tensor that tells later whether it was written or its memory replaced."""

    def __init__(self, t: torch.Tensor) -> None:
        self._facts = _read_facts(t)
        # While this reference exists, no other storage gets the same number.
        self._storage = StorageWeakRef(local_part(t).untyped_storage()) if self._facts[2] else None

    def matches(self, t: torch.Tensor) -> bool:
        """Whether nothing has changed since."""
        return self._facts == _read_facts(t)


def _read_facts(t: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the versions, the storage and the address of a tensor.

    An operation on a DTensor counts up its own version; one on its local part counts up the part's.
    """
    part = local_part(t)
    if part.layout is not torch.strided or is_foreign_to_kernels(part):
        return t._version, part._version, 0, 0
    return t._version, part._version, part.untyped_storage()._cdata, part.data_ptr()


def sum_bits(t: torch.Tensor) -> torch.Tensor:
    """Sum the memory of a strided tensor, as integers that wrap around."""
    t = torch.view_as_real(t) if t.is_complex() else t
    if t.is_contiguous() and t.nbytes % 8 == 0 and t.data_ptr() % 8 == 0:
        return t.view(-1).view(torch.int64).sum()  # sums of other integers are slow
    return t.view(_INTEGERS[t.itemsize]).sum()


class Member:
    """A parameter of a bucket, its copy on the host, and the state of its gradient."""

    def __init__(self, param: torch.Tensor) -> None:
        part = local_part(param.detach())
        if is_foreign_to_kernels(part) or part.layout is not torch.strided:
            actual = f"a {type(part).__name__} of layout {part.layout}"
            raise ArgumentError("Offload", "a parameter", actual, "a dense torch.Tensor or DTensor")
        self.param = param
        self.twin = param  # the tensor that is stepped: the parameter, or its copy on the host
        self.landing = param  # the memory that receives the gradient
        # How often a gradient was accumulated before the last step, and since.
        self.expected = self.fired = 0
        self.sent: TensorWeakRef | None = None
        self.sent_stamp: Stamp | None = None
        self.sent_sum: torch.Tensor | None = None  # the checksum of a sent DTensor
        self.is_released = False  # whether the host has the only copy of the gradient
        self.stamp: Stamp | None = None  # of the parameter when it was last copied to its twin

    def forget(self) -> None:
        """Reset the gradient."""
        self.fired, self.sent, self.is_released = 0, None, False
        self.sent_sum = None
        if self.twin is not self.param:
            self.twin.grad = None

    def sum_sent(self) -> None:
        """Record the checksum of a gradient that is a DTensor.

        clip_grad_norm_ and clip_grad_value_ use torch's foreach operations, which do not count up
        the versions of DTensors.
        """
        grad = self.param.grad
        if grad is not None and is_dtensor(grad) and self.sent is not None:
            self.sent_sum = sum_bits(local_part(grad))

    def is_sent(self) -> bool:
        """Whether the host's gradient is up to date; also if there is none and none was sent."""
        grad = self.param.grad
        if self.is_released:
            return grad is None
        if grad is None or self.sent is None or self.sent_stamp is None:
            return grad is None and self.sent is None
        return self.sent() is grad and self.sent_stamp.matches(grad)

    def mark_copied(self) -> None:
        """Record that the twin has the parameter's current values."""
        self.stamp = Stamp(self.param)


class Bucket:
    """A run of an optimizer's parameters that are copied and stepped together."""

    def __init__(self, params: list[torch.Tensor], states: States, transfers: Transfers) -> None:
        self._states, self._transfers = states, transfers
        self.members = [Member(p) for p in params]
        self.home = DEVICE
        self.missing = 0  # how many expected gradients are not ready
        self._state_bytes = (0, 0)  # the number of states, and their bytes
        self.buffers: list[torch.Tensor] = []
        # The prepared step: an optimizer of all parameters, and the batches of these.
        self._stepper: FusedOptimizer | None = None
        self._work: list[tuple[Group, Batch]] = []
        self._stepping: list[Member] = []
        self._fetched: Arrival | None = None
        self._given_back: Arrival | None = None

    # --- Home ---------------------------------------------------------------------------------

    def move(self, home: str) -> None:
        """Move the states to the host or to the device, and step the parameters there."""
        if home == self.home:
            return
        new = self._make_twins() if home == HOST else [(m.param, m.param) for m in self.members]
        device = new[0][0].device if home == HOST else None
        moved = {
            m: {name: _move_value(v, device or m.param.device) for name, v in state.items()}
            for m in self.members
            if (state := self._states.get(m.twin)) is not None
        }
        for m, (twin, landing) in zip(self.members, new, strict=True):
            if (state := self._states.pop(m.twin, None)) is not None:
                state.update(moved[m])  # in place: the original optimizer shares the dict
                self._states[twin] = state
            m.twin, m.landing = twin, landing
            m.mark_copied()
        if home == DEVICE:
            self._drop_buffers()
        self.home = home

    def _make_twins(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Allocate parameters and gradients on the host, in two buffers."""
        parts = [local_part(m.param.detach()) for m in self.members]
        sizes = [-(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in parts]
        with explain_memory_errors("parameters and gradients", 2 * sum(sizes)):
            self.buffers = [allocate_pages(sum(sizes)) for _ in range(2)]
        try:
            for buffer in self.buffers:
                self._transfers.pin(buffer)
        except MemoryError:
            self._drop_buffers()
            raise
        views: list[Tensors] = []
        for buffer in self.buffers:
            pieces = zip(buffer.split(sizes), parts, strict=True)
            views.append([_view_as(piece, part) for piece, part in pieces])
        self._transfers.fetch(zip(parts, views[0], strict=True)).synchronize()
        return [
            (
                torch.nn.Parameter(shard_like(m.param, twin), m.param.requires_grad),
                shard_like(m.param, landing),
            )
            for m, twin, landing in zip(self.members, *views, strict=True)
        ]

    def _drop_buffers(self) -> None:
        for buffer in self.buffers:
            self._transfers.unpin(buffer)
        self.buffers, self._stepper = [], None

    # --- Gradients ----------------------------------------------------------------------------

    def expect(self) -> None:
        """Expect as many gradients before the next step as there were before this one."""
        for m in self.members:
            m.expected = m.fired
        self.forget()

    def forget(self) -> None:
        """Reset the gradients."""
        for m in self.members:
            m.forget()
        self.missing = sum(m.expected for m in self.members)

    def is_sent(self) -> bool:
        """Whether the host's gradients and parameters are up to date."""
        is_sent = all(m.is_sent() for m in self.members) and not self._list_changed()
        return is_sent and self._has_sent_sums()

    def _has_sent_sums(self) -> bool:
        summed = [m for m in self.members if m.sent_sum is not None]
        if not summed:
            return True
        now = [sum_bits(local_part(m.param.grad)) for m in summed]  # type: ignore[arg-type]
        sent = [m.sent_sum for m in summed]
        return torch.equal(torch.stack(now), torch.stack(sent))  # type: ignore[arg-type]

    def _list_changed(self) -> list[Member]:
        """The members whose parameter was written since it was copied to its twin."""
        return [m for m in self.members if m.stamp is None or not m.stamp.matches(m.param)]

    def distrust(self) -> None:
        """Copy every parameter to the host at the next `send`, as if it had been written."""
        for m in self.members:
            m.stamp = None

    def send(self, release: bool) -> None:
        """Copy all gradients to the host, and the parameters that were written elsewhere."""
        copies = []
        for m in self.members:
            grad = m.param.grad
            if m.is_released and grad is None:
                continue
            m.sent, m.sent_sum, m.is_released = None, None, False
            if grad is None:
                m.twin.grad = None
                continue
            part = local_part(grad)
            if grad.layout is torch.strided and grad.dtype == m.landing.dtype:
                copies.append((part, local_part(m.landing)))
                m.twin.grad = m.landing
            else:
                m.twin.grad_dtype = None  # type: ignore[attr-defined]
                m.twin.grad = shard_like(m.param, part.to("cpu", copy=True))
            m.sent, m.sent_stamp = TensorWeakRef(grad), Stamp(grad)
        for m in self._list_changed():
            copies.append((local_part(m.param.detach()), local_part(m.twin.detach())))
            m.mark_copied()
        self._fetched = self._transfers.fetch(copies)
        self._stepper = None
        if release:
            for m in self.members:
                if m.sent is not None:
                    m.param.grad, m.sent, m.is_released = None, None, True

    def take_back(self, m: Member) -> None:
        """Add a released gradient to the new one, as if it had stayed on the device."""
        assert m.param.grad is not None
        self.wait_for_gradients()
        assert m.twin.grad is not None
        local_part(m.param.grad).add_(local_part(m.twin.grad).to(m.param.device))
        m.is_released = False

    def wait_for_gradients(self) -> None:
        """Wait until the gradients are on the host."""
        if self._fetched is not None:
            self._fetched.synchronize()

    # --- The step -----------------------------------------------------------------------------

    def prepare(self, stepper: FusedOptimizer, places: Places) -> None:
        """Check the next step and create missing states; change nothing else."""
        count = sum(local_part(m.param.detach()).numel() for m in self.members)
        twins = [m.twin for m in self.members]
        explained = explain_memory_errors(f"states of {count} parameters", None)
        with explained, stepper._only(twins, places):
            self._work = stepper._work()
        self._stepper = stepper
        self._stepping = [m for m in self.members if m.twin.grad is not None]

    def run(self, factor: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Take the prepared step."""
        self.wait_for_gradients()
        if self._given_back is not None:
            self._given_back.synchronize()  # the copy to the device may still read the parameters
        stepper = self._stepper
        assert stepper is not None
        tasks = [stepper._task(group, batch, factor) for group, batch in self._work]
        for task in tasks:
            task.found_inf = found_inf
        stepper._run(tasks)

    def needs_no_exchange(self) -> bool:
        """Whether the step needs no collectives, so that any thread may run it at any time.

        All ranks must order collectives alike, which only the training loop's thread ensures.
        """
        stepper = self._stepper
        assert stepper is not None
        if not any(is_dtensor(m.param) for m in self.members):
            return True
        return not any(
            each.exchange is not None and each.concerns(stepper._task(group, batch, None))
            for group, batch in self._work
            for each in stepper._passes()
            if batch.is_sharded
        )

    def give_back(self) -> None:
        """Copy the stepped parameters to the device."""
        pairs = [
            (local_part(m.twin.detach()), local_part(m.param.detach())) for m in self._stepping
        ]
        self._given_back = self._transfers.give(pairs)
        # The copies count up only the versions of the local parts of DTensors.
        torch.autograd.graph.increment_version([m.param for m in self._stepping])
        for m in self._stepping:
            m.mark_copied()
        self._stepper, self._work, self._stepping = None, [], []

    def refresh(self) -> None:
        """Copy the parameters to the host, in case something else has written them."""
        parts = [(local_part(m.param.detach()), local_part(m.twin.detach())) for m in self.members]
        self._transfers.fetch(parts).synchronize()
        for m in self.members:
            m.mark_copied()

    def state_bytes(self) -> int:
        """The bytes of all states, on the host or on the device."""
        states = [self._states[m.twin] for m in self.members if m.twin in self._states]
        if self._state_bytes[0] != len(states):
            tensors = (v for state in states for v in state.values() if isinstance(v, torch.Tensor))
            self._state_bytes = len(states), sum(local_part(t).nbytes for t in tensors)
        return self._state_bytes[1]

    def gradient_bytes(self) -> int:
        """The bytes of the gradients when every parameter has one."""
        trained = (m.param for m in self.members if m.param.requires_grad)
        return sum(local_part(p.detach()).nbytes for p in trained)


@contextlib.contextmanager
def explain_memory_errors(what: str, count: int | None) -> Iterator[None]:
    """Raise a MemoryError that names what did not fit into the host's memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            size = "" if count is None else f" ({count} bytes)"
            raise MemoryError(
                f"Offload: the host has no room for {what}{size}. Nothing was changed. Smaller "
                'states (state_dtype="8bit") or master_weights="remainder" take less'
            ) from error
        raise


def _view_as(piece: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A view of a buffer in the form of this part."""
    strides = torch.empty_like(part, device="meta").stride()
    return piece[: part.nbytes].view(part.dtype).as_strided(part.shape, strides)


def _move_value(value: Any, device: torch.device) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if is_dtensor(value):
        placements = value.placements  # type: ignore[attr-defined]
        return make_dtensor(value, local_part(value).to(device), placements, value.shape)
    return value.to(device)


def copy_to_host(value: Any) -> Any:
    """Copy a setting: learning rates may be tensors that change later."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


class BucketStore:
    """The buckets of an optimizer, in the order of its parameters.

    The original optimizer and the buckets' optimizers share the dicts of states.
    """

    def __init__(self, optimizer: FusedOptimizer, transfers: Transfers) -> None:
        self._optimizer, self._transfers = optimizer, transfers
        self._states: States = defaultdict(dict)
        self.buckets: list[Bucket] = []
        self.members: dict[torch.Tensor, tuple[Bucket, Member]] = {}

    def add(self, at: int, nbytes: int, on_host: bool) -> list[Member]:
        """Divide the parameters of group `at` into buckets of at most `nbytes`."""
        params = self._optimizer.param_groups[at]["params"]
        self._states |= {p: self._optimizer.state[p] for p in params if p in self._optimizer.state}
        runs = divide_into_runs(params, lambda p: local_part(p.detach()).nbytes, nbytes)
        new = [Bucket(run, self._states, self._transfers) for run in runs]
        try:
            for bucket in new:
                bucket.move(HOST if on_host else DEVICE)
        except BaseException:
            for bucket in new:
                bucket.move(DEVICE)
            raise
        self.buckets += new
        added = {m.param: (bucket, m) for bucket in new for m in bucket.members}
        self.members |= added
        return [m for _, m in added.values()]

    def list_on_host(self) -> list[Bucket]:
        """The buckets that are stepped on the host, last parameters first.

        Their gradients are ready first.
        """
        return [bucket for bucket in reversed(self.buckets) if bucket.home == HOST]

    def make_whole(self, settings_on_host: bool = False) -> FusedOptimizer:
        """Make an optimizer over all parameters, each where it is stepped, without hooks.

        On the device, the host does not wait for a learning rate there.
        """
        copy = copy_to_host if settings_on_host else lambda value: value
        whole = object.__new__(type(self._optimizer))
        whole.__dict__.update(self._optimizer.__dict__)
        whole.param_groups = [
            {k: copy(v) for k, v in group.items()}
            | {"params": [self.members[p][1].twin for p in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        every = self.members.items()
        whole._codecs_of = {m.twin: self._optimizer._codec_of(p) for p, (_, m) in every}
        whole.state = self._states  # type: ignore[assignment]
        return whole

    def share_states(self) -> None:
        """Share new states with the original optimizer."""
        for p, (_, m) in self.members.items():
            if m.twin in self._states and p not in self._optimizer.state:
                self._optimizer.state[p] = self._states[m.twin]

    def refresh(self) -> None:
        """Copy the parameters to the host, in case something else has written them."""
        for bucket in self.list_on_host():
            bucket.refresh()

    def load(self, state_dict: State) -> None:
        """Load a saved state, each entry to where its parameter is stepped."""
        self.refresh()
        whole = self.make_whole()
        whole.load_state_dict(state_dict)
        self._states.clear()
        self._states |= whole.state
        self._optimizer.state.clear()
        for group, loaded in zip(self._optimizer.param_groups, whole.param_groups, strict=True):
            params = group["params"]
            group.clear()
            group.update(loaded, params=params)
        self.share_states()
