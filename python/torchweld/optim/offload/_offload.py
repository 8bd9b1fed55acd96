"""An optimizer whose states and steps are on the host."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.optim._base import Group, scaler_number
from torchweld.optim._codecs import State
from torchweld.optim._shards import is_one, local
from torchweld.optim.adam import AdamW
from torchweld.optim.offload import _report
from torchweld.optim.offload._activations import Activations
from torchweld.optim.offload._arguments import (
    check,
    check_host_only,
    check_trust,
    device_of,
    half_of_free,
    has_processes,
)
from torchweld.optim.offload._buckets import DEVICE, HOST, Bucket
from torchweld.optim.offload._ddp import Reductions
from torchweld.optim.offload._expectations import Expectations
from torchweld.optim.offload._final import return_parameters, run_all
from torchweld.optim.offload._store import Store
from torchweld.optim.offload._transfers import Transfers, transfers_of
from torchweld.optim.offload._worker import Worker, cores_beside, default_threads
from torchweld.optim.offload.policy import MARGIN, Tracer, resident

# Steps without delay before delayed updates begin, while gradients change fast.
_WARM_UP = 40


class Offload(torch.optim.Optimizer):
    """An optimizer of torchweld whose states, masters and steps are on the host.

    The result is bit for bit that of the optimizer on the device. Gradients leave in buckets during
    the backward, and a bucket steps as soon as it is complete. Such a step is undone, bit for bit,
    if its assumptions fail before `step()`: gradients are clipped or written, another backward
    runs, an overflow or an exception occurs.

    Args:
        params_or_optimizer: an optimizer of torchweld.optim to take over; or parameters, for AdamW
            with float32 masters.
        placement: where states are kept and stepped: "cpu"; "cuda", the device; "auto", the device
            as far as it has room, which is measured at every step.
        clip_norm: the norm to which gradients are clipped, like max_grad_norm of the optimizer.
        delayed_update: step while the next forward and backward run, one step behind. True begins
            after 40 steps without delay, a number after that many.
        pin_memory: whether the host's memory is page-locked, so that copies run concurrently.
        threads: threads of the host's steps; default: this rank's share of the cores near the
            device.
        bucket_bytes: bytes of the parameters that leave and return together.
        undo_bytes: host memory for copies of states that steps may have to restore. Buckets beyond
            it step after the backward. Default: half of the free memory.
        release_gradients: whether to free a gradient on the device once it has left; p.grad is then
            None after the backward. This and delayed_update need placement="cpu".
        capacity: the bytes of the device that "auto" may use; default: all.
        trust_versions: whether torch's version counters tell what else writes parameters and
            gradients. Writes through `.data`, numpy or their memory move no counter, and are lost
            unless this is False: gradients then leave in `step()`, and parameters with them.
        transfers: the implementation of copies; for tests and other devices.
        arguments: AdamW's, if parameters are given.
    """

    _step_supports_amp_scaling = True
    # The norm of all gradients before clipping, after a step with clip_norm.
    grad_norm: torch.Tensor | None = None

    def __init__(
        self,
        params_or_optimizer: Any,
        *,
        placement: str = HOST,
        clip_norm: float | None = None,
        delayed_update: bool | int = False,
        pin_memory: bool = True,
        threads: int | None = None,
        bucket_bytes: int = 32 << 20,
        undo_bytes: int | None = None,
        release_gradients: bool = False,
        capacity: int | None = None,
        trust_versions: bool = True,
        transfers: Transfers | None = None,
        **arguments: Any,
    ) -> None:
        given = params_or_optimizer
        if not isinstance(given, torch.optim.Optimizer):
            given = AdamW(given, **({"master_weights": True} | arguments))
        elif arguments:
            came = f"an optimizer, with {', '.join(arguments)} besides"
            raise ArgumentError("Offload", "params_or_optimizer", came, "one that has them already")
        check(given, placement, clip_norm, threads, bucket_bytes)
        check_host_only(
            placement, release_gradients=release_gradients, delayed_update=delayed_update
        )
        check_trust(trust_versions, release_gradients)
        if clip_norm is not None:
            given.max_grad_norm = clip_norm
        self._is_made = False
        super().__init__(given.param_groups, given.defaults)
        # Both optimizers share their groups, so that schedulers of either work, and their states.
        self._given, self.param_groups, self.state = given, given.param_groups, given.state
        self.placement, self._releases = placement, release_gradients
        self._delay = _WARM_UP if delayed_update is True else delayed_update
        self._delays = delayed_update is not False
        self._bucket_bytes, self._capacity = bucket_bytes, capacity
        self._trusts_versions = trust_versions
        device = device_of(given)
        self._transfers = transfers or transfers_of(device, pin_memory)
        cores = cores_beside(device)
        self._worker = Worker(threads or default_threads(cores), cores)
        weakref.finalize(self, self._worker.stop)  # without waiting: it may be the caller
        undo_bytes = half_of_free() if undo_bytes is None else undo_bytes
        self._store = Store(given, self._transfers, undo_bytes)
        self._hooks: list[Any] = []
        self._lock = threading.Lock()  # each device has its own backward thread
        self._expected = Expectations()
        self._steps = 0
        self._pending: list[Bucket] = []  # with delayed steps that may still run
        self._tracer = Tracer()
        self._activations = Activations(self._transfers, device, bucket_bytes)
        if placement == DEVICE:
            self._activations.keep_all()
        self._timeline = _report.Timeline()
        # With other processes, gradients of plain parameters may be reduced after the hooks.
        self._is_alone = not has_processes()
        self._reductions = Reductions()
        # Counts of the last step: buckets that stepped ahead of it, and steps that were undone.
        self.counts = {"ahead": 0, "undone": 0}
        for at in range(len(self.param_groups)):
            self._add_members(at)
        self._is_made = True

    # --- Parameters ---------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        if not self._is_made:
            return super().add_param_group(param_group)
        self.synchronize()
        self._given.add_param_group(param_group)
        self._add_members(len(self.param_groups) - 1)
        return None

    def _add_members(self, at: int) -> None:
        for m in self._store.add(at, self._bucket_bytes, on_host=self.placement != DEVICE):
            if m.param.requires_grad:
                hook = functools.partial(_fire, weakref.ref(self))
                self._hooks.append(m.param.register_post_accumulate_grad_hook(hook))

    def overlap_with_ddp(self, ddp: Any) -> None:
        """Send gradients as soon as DistributedDataParallel has reduced them, in its hook's place.

        Otherwise, with several processes, gradients of plain parameters leave only after the
        backward, since nothing tells whether a gradient has been reduced.
        """
        if self._releases or not self._trusts_versions:
            came = "with release_gradients" if self._releases else "with trust_versions=False"
            accepted = "without: DDP writes the gradients later"
            raise ArgumentError("Offload.overlap_with_ddp", "the optimizer", came, accepted)
        self._reductions.begin(ddp, self)

    def activations(self, least_bytes: int = 1 << 20) -> contextlib.AbstractContextManager[None]:
        """Place the tensors that autograd saves, as `placement` says, in a `with` statement.

        Put the forward and the loss inside, and the backward after it. "cpu": all tensors of at
        least `least_bytes` leave. "auto": the last ones stay as far as the device has room.
        """
        if least_bytes < 1:
            came = repr(least_bytes)
            raise ArgumentError("Offload.activations", "least_bytes", came, "a number > 0")
        return self._activations.saving(least_bytes)

    # --- During the backward ------------------------------------------------------------------

    def _accumulated(self, p: torch.Tensor) -> None:
        with self._lock:
            bucket, m = self._store.members[p]
            m.fired += 1
            self._timeline.first_gradient(self)
            self._reductions.await_end(m for _, m in self._store.members.values())
            if bucket.home == DEVICE:
                return
            if m.is_released:
                bucket.take_back(m)
            if m.fired > m.expected:
                return  # the step will find the sent gradient out of date
            bucket.missing -= 1
            may_leave = self._trusts_versions and (self._is_alone or is_one(p))
            if bucket.missing == 0 and may_leave and not self._expected.of_edits():
                self._leave(bucket)

    def _reduced(self, params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """Take gradients from DDP's buckets before DDP writes them to parameters."""
        with self._lock, torch.no_grad():
            found = [self._store.members[p] for p in params if p in self._store.members]
            for p, grad in zip(params, grads, strict=True):
                if p in self._store.members:
                    self._store.members[p][1].reduced = grad
            for bucket in dict.fromkeys(bucket for bucket, _ in found):
                waits = any(m.expected and m.reduced is None for m in bucket.members)
                complete = bucket.missing == 0 and not waits and bucket.home == HOST
                if complete and not self._expected.of_edits():
                    self._leave(bucket)

    def _leave(self, bucket: Bucket) -> None:
        """Send a complete bucket, and step it on expectations."""
        if bucket.task is not None and not bucket.task.done():
            return  # a delayed step still reads the last gradients
        bucket.send(self._releases)
        for m in bucket.members:
            m.sum_sent()
        factor = self._expected.factor(self._given.max_grad_norm is not None)
        if not self._delays and factor is not None:
            step = functools.partial(bucket.speculate, factor)
            bucket.task = self._worker.submit(step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as torch does; steps taken ahead of `step()` are undone."""
        self._abandon()
        super().zero_grad(set_to_none)

    def _abandon(self) -> None:
        self._rewind()
        for bucket in self._store.on_host():
            bucket.forget()

    def _rewind(self) -> None:
        """Undo steps taken ahead of `step()`; gradients stay."""
        for bucket in self._store.on_host():
            if bucket not in self._pending:
                bucket.rewind()

    # --- The step -----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters with a gradient.

        `closure`, if given, computes the gradients and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._timeline.end(_report.BACKWARD, self)
        self._finish_pending()
        try:
            with self._scaled():
                self._advance()
                if not self._releases:
                    self._given._unscale()
        except BaseException:
            self._rewind()  # so that the step can be tried again
            raise
        self._steps += 1
        for bucket in self._store.buckets:
            bucket.expect()
        self._store.share_states()
        self._timeline.end(_report.STEP, self)
        if self.placement == "auto":
            self._place()
        return loss

    @contextlib.contextmanager
    def _scaled(self) -> Iterator[None]:
        """Pass GradScaler's findings to the optimizer on the device."""
        names = [name for name in ("grad_scale", "found_inf") if hasattr(self, name)]
        for name in names:
            setattr(self._given, name, getattr(self, name))
        try:
            yield
        finally:
            for name in names:
                delattr(self._given, name)

    def _advance(self) -> None:
        hosts = [bucket for bucket in self._store.on_host() if not bucket.is_finished()]
        # GradScaler's unscale_ writes all gradients without changing their versions.
        unscaled = hasattr(self, "found_inf") and getattr(self, "grad_scale", None) is None
        edited = unscaled
        self.counts = dict.fromkeys(self.counts, 0)
        for bucket in hosts:
            bucket.settle()
            if not self._trusts_versions:
                bucket.distrust()
            if unscaled or not bucket.is_sent():
                edited |= any(m.sent is not None or m.is_released for m in bucket.members)
                self.counts["undone"] += bucket.uncertain is not None
                bucket.undo()
                bucket.send(self._releases)
        numbers = self._factor(), scaler_number(self, "found_inf")
        of_device = (bucket for bucket in self._store.buckets if bucket.home == DEVICE)
        devices = [bucket for bucket in of_device if not bucket.is_finished()]
        for bucket in devices:
            bucket.freeze()
            bucket.prepare()
        # The host waits for the device here, unless nothing steps on the host.
        factor, found_inf = (
            t.detach().to("cpu") if hosts and t is not None else None for t in numbers
        )
        number = 1.0 if factor is None else float(factor)
        overflows = found_inf is not None and bool(found_inf != 0)
        rest = []
        for bucket in hosts:
            settings = bucket.freeze()
            if bucket.uncertain is not None:
                if not overflows and bucket.holds(number, settings):
                    self.counts["ahead"] += 1
                    continue
                self.counts["undone"] += 1
                bucket.undo()
            rest.append(bucket)
        # Everything that can fail comes before anything steps.
        for bucket in rest:
            self._worker.call(bucket.prepare)
        self._expected.learn(number, edited)
        delays = self._delays and self._steps >= self._delay
        run_all(self._worker, hosts, rest, devices, (factor, found_inf), numbers, not delays)
        if delays:
            self._pending = hosts
        else:
            self._transfers.join()

    def _factor(self) -> torch.Tensor | None:
        """The factor of gradients, from the norm of all of them if it is clipped."""
        if not self._releases or self._given.max_grad_norm is None:
            factor = self._given._gradient_factor()
            self.grad_norm = self._given.grad_norm
            return factor
        for bucket in self._store.on_host():
            bucket.arrived()
        whole = self._store.whole()
        factor = whole._gradient_factor()
        self.grad_norm = whole.grad_norm
        return factor

    def _finish_pending(self) -> None:
        """Apply the delayed step to the parameters."""
        for bucket in self._pending:
            return_parameters(bucket)
        if self._pending:
            self._transfers.join()
        self._pending = []

    def synchronize(self) -> None:
        """Apply all pending steps; call it before saving the model with delayed_update."""
        self._finish_pending()

    # --- Placement ----------------------------------------------------------------------------

    def _place(self) -> None:
        """Keep activations, then states, on the device as far as it has room.

        Activations come first: each offloaded byte costs two copied bytes in every backward.
        """
        capacity = min(self._transfers.capacity(), self._capacity or 1 << 62)
        for name, phase in self._timeline.phases.items():
            self._tracer.add(name, phase.peak, sum(phase.device.values()))
        sizes = [bucket.state_bytes() for bucket in self._store.buckets]
        fixed = sum(local(p.detach()).nbytes for p in self._store.members)
        fixed *= 2  # with gradients
        room = int(MARGIN * capacity) - self._tracer.largest() - fixed
        chosen = resident(sizes, room - self._activations.keep(room))
        homes = [DEVICE if stays else HOST for stays in chosen]
        if homes == [bucket.home for bucket in self._store.buckets]:
            return
        self._finish_pending()
        for home in (HOST, DEVICE):  # free room before using it
            for bucket, new in zip(self._store.buckets, homes, strict=True):
                if new == home:
                    bucket.move(home)

    def relieve(self) -> None:
        """Move everything to the host and restart measuring, after an OutOfMemoryError."""
        self.synchronize()
        self._rewind()
        self._tracer.forget()
        self._activations.keep(0)
        for bucket in self._store.buckets:
            bucket.move(HOST)

    def memory(self) -> dict[str, dict[str, int]]:
        """The bytes on the device and on the host now, by kind."""
        return {"device": _report.on_device(self), "host": _report.on_host(self)}

    def report(self, plot: str | os.PathLike[str] | None = None) -> str:
        """Where every byte was over the last step; also as a picture if `plot` names a file."""
        return _report.report(self, plot)

    # --- State --------------------------------------------------------------------------------

    def __getstate__(self) -> State:
        # Its thread, hooks and pinned memory are of this process and of these parameters.
        raise ArgumentError("Offload", "self", "copied or pickled", "its state_dict()")

    def state_dict(self) -> State:
        """The state of the original optimizer."""
        self.synchronize()
        self._rewind()
        return self._given.state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        """Load a state as the original optimizer does, in any codec."""
        self.synchronize()
        self._rewind()
        self._store.load(state_dict)

    def refresh_masters(self) -> None:
        """Adopt the parameters' current values; call it after something else has set them."""
        self.synchronize()
        self._rewind()
        self._store.refresh()
        self._store.whole().refresh_masters()

    def close(self) -> None:
        """Return everything to the original optimizer, with its states on the device."""
        self.synchronize()
        self._rewind()
        for hook in self._hooks:
            hook.remove()
        for bucket in self._store.buckets:
            bucket.move(DEVICE)
        self._hooks = []
        self._worker.stop()


def _fire(owner: weakref.ref[Offload], p: torch.Tensor) -> None:
    offload = owner()
    if offload is not None:
        with torch.no_grad():
            offload._accumulated(p)
