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
from torchweld.optim._base import Group
from torchweld.optim._codecs import State
from torchweld.optim._shards import is_one, local
from torchweld.optim.adam import AdamW
from torchweld.optim.offload import _report
from torchweld.optim.offload._activations import Activations
from torchweld.optim.offload._arguments import (
    check,
    check_host_only,
    device_of,
    half_of_free,
    has_processes,
)
from torchweld.optim.offload._buckets import DEVICE, HOST, Bucket
from torchweld.optim.offload._ddp import Reductions
from torchweld.optim.offload._expectations import Expectations
from torchweld.optim.offload._store import Store
from torchweld.optim.offload._transfers import Transfers, transfers_of
from torchweld.optim.offload._worker import Worker, cores_beside, default_threads
from torchweld.optim.offload.policy import MARGIN, Tracer, resident

# Steps without delay before a delayed update, while gradients change fast.
_WARM_UP = 40


class Offload(torch.optim.Optimizer):
    """An optimizer of torchweld whose states, masters and steps are on the host.

    A step gives the bits that the optimizer would give on the device. Gradients leave in buckets
    during the backward, and a bucket steps as soon as it is complete. Whatever turns out otherwise
    before `step()` is undone, bit for bit: gradients that are clipped or written, another backward,
    an overflow, an exception.

    Args:
        params_or_optimizer: an optimizer of torchweld.optim, which this one takes over; or
            parameters, for AdamW with float32 masters.
        placement: where states are and step: "cpu"; "cuda", the device; "auto": on the device as
            far as it has room besides all else, which is measured at every step.
        clip_norm: the norm that gradients are clipped to, as max_grad_norm of the optimizer.
        delayed_update: step while the next forward and backward run, one step behind; True after 40
            steps without delay, a number after so many.
        pin_memory: whether the host's memory is page-locked, so that copies run beside the rest.
        threads: of the host's steps; by default this rank's share of the cores beside the device.
        bucket_bytes: of the parameters that leave and return together.
        undo_bytes: host memory for states before steps that may be undone. Buckets beyond it step
            after the backward. By default half of what is free.
        release_gradients: whether a gradient's memory on the device is free once it has left;
            p.grad is then None after the backward. This and delayed_update need placement="cpu".
        capacity: the bytes of the device that "auto" may use, by default all.
        transfers: what copies; for tests and other devices.
        arguments: AdamW's, where parameters are given.
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
        if clip_norm is not None:
            given.max_grad_norm = clip_norm
        self._is_made = False
        super().__init__(given.param_groups, given.defaults)
        # Schedulers of either set the same groups, and either has the same states.
        self._given, self.param_groups, self.state = given, given.param_groups, given.state
        self.placement, self._releases = placement, release_gradients
        self._delay = _WARM_UP if delayed_update is True else delayed_update
        self._delays = delayed_update is not False
        self._bucket_bytes, self._capacity = bucket_bytes, capacity
        device = device_of(given)
        self._transfers = transfers or transfers_of(device, pin_memory)
        cores = cores_beside(device)
        self._worker = Worker(threads or default_threads(cores), cores)
        weakref.finalize(self, self._worker.stop)  # which does not wait: it may be the caller
        undo_bytes = half_of_free() if undo_bytes is None else undo_bytes
        self._store = Store(given, self._transfers, undo_bytes)
        self._hooks: list[Any] = []
        self._lock = threading.Lock()  # devices have backward threads of their own
        self._expected = Expectations()
        self._steps = 0
        self._pending: list[Bucket] = []  # whose delayed step may still run
        self._tracer = Tracer()
        self._activations = Activations(self._transfers, device, bucket_bytes)
        if placement == DEVICE:
            self._activations.keep_all()
        self._timeline = _report.Timeline()
        # Gradients of plain parameters are other processes' as well once they are reduced.
        self._is_alone = not has_processes()
        self._reductions = Reductions()
        # Of the last step: buckets that stepped ahead of it, and steps that were undone.
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
        """Send gradients as DistributedDataParallel has reduced them, in place of its own hook.

        Without it, gradients of plain parameters leave after the backward where there are several
        processes: nothing tells whether a gradient is reduced already.
        """
        if self._releases:
            came, accepted = "with release_gradients", "without: DDP writes the gradients later"
            raise ArgumentError("Offload.overlap_with_ddp", "the optimizer", came, accepted)
        self._reductions.begin(ddp, self)

    def activations(self, least_bytes: int = 1 << 20) -> contextlib.AbstractContextManager[None]:
        """Place what autograd saves inside, as `placement` says: `with optimizer.activations():`.

        Put the forward and the loss into it, and the backward after it. "cpu": all memory of at
        least so many bytes leaves. "auto": the last of it stays as far as the device has room.
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
                return  # the step finds what was sent before to be out of date
            bucket.missing -= 1
            may_leave = self._is_alone or is_one(p)
            if bucket.missing == 0 and may_leave and not self._expected.of_edits():
                self._leave(bucket)

    def _reduced(self, params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """Take gradients from DDP's buckets, before it writes them to parameters."""
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
        """Send a complete bucket, and step it by what is expected."""
        if bucket.task is not None and not bucket.task.done():
            return  # a delayed step still reads the last gradients
        bucket.send(self._releases)
        factor = self._expected.factor(self._given.max_grad_norm is not None)
        if not self._delays and factor is not None:
            step = functools.partial(bucket.speculate, factor)
            bucket.task = self._worker.submit(step)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; steps that began ahead of `step()` are undone."""
        self._abandon()
        super().zero_grad(set_to_none)

    def _abandon(self) -> None:
        self._rewind()
        for bucket in self._store.on_host():
            bucket.forget()

    def _rewind(self) -> None:
        """Go back to before steps that `step()` has not asked for; gradients stay."""
        for bucket in self._store.on_host():
            if bucket not in self._pending:
                bucket.rewind()

    # --- The step -----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The step of all parameters with a gradient.

        `closure`, if there is one, computes the gradients and returns the loss.
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
        """Let the optimizer on the device know what GradScaler says of the gradients."""
        names = [name for name in ("grad_scale", "found_inf") if hasattr(self, name)]
        for name in names:
            setattr(self._given, name, getattr(self, name))
        try:
            yield
        finally:
            for name in names:
                delattr(self._given, name)

    def _advance(self) -> None:
        hosts = self._store.on_host()
        # GradScaler's unscale_ has written all gradients, which their versions do not show.
        unscaled = hasattr(self, "found_inf") and getattr(self, "grad_scale", None) is None
        edited = unscaled
        self.counts = dict.fromkeys(self.counts, 0)
        for bucket in hosts:
            bucket.settle()
            if unscaled or not bucket.is_sent():
                edited |= any(m.sent is not None or m.is_released for m in bucket.members)
                self.counts["undone"] += bucket.uncertain is not None
                bucket.undo()
                bucket.send(self._releases)
        numbers = self._factor(), getattr(self, "found_inf", None)
        devices = [bucket for bucket in self._store.buckets if bucket.home == DEVICE]
        for bucket in devices:
            bucket.freeze()
            bucket.prepare()
        # The host waits for the device here, unless it has nothing to step.
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
        # All that can fail comes before anything steps.
        for bucket in rest:
            self._worker.call(bucket.prepare)
        self._expected.learn(number, edited)
        alone = [bucket for bucket in rest if bucket.runs_alone()]
        for bucket in alone:
            bucket.task = self._worker.submit(functools.partial(bucket.run, factor, found_inf))
        for bucket in devices:
            bucket.run(*numbers)
            bucket.end()
        for bucket in rest:
            if bucket not in alone:
                bucket.run(factor, found_inf)
        if self._delays and self._steps >= self._delay:
            self._pending = hosts
            return
        for bucket in hosts:
            _return(bucket)
        self._transfers.join()

    def _factor(self) -> torch.Tensor | None:
        """What gradients are multiplied by, from the norm of all where it is clipped."""
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
        """Let parameters have the delayed step."""
        for bucket in self._pending:
            _return(bucket)
        if self._pending:
            self._transfers.join()
        self._pending = []

    def synchronize(self) -> None:
        """Let parameters have all steps: with delayed_update, before the model is saved."""
        self._finish_pending()

    # --- Placement ----------------------------------------------------------------------------

    def _place(self) -> None:
        """Keep activations on the device, then states, as far as it has room besides all else.

        Activations come first: for each byte of them that leaves, two are copied at each backward.
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
        for home in (HOST, DEVICE):  # room is made before it is taken
            for bucket, new in zip(self._store.buckets, homes, strict=True):
                if new == home:
                    bucket.move(home)

    def relieve(self) -> None:
        """Take everything to the host and begin to measure anew: after an OutOfMemoryError."""
        self.synchronize()
        self._rewind()
        self._tracer.forget()
        self._activations.keep(0)
        for bucket in self._store.buckets:
            bucket.move(HOST)

    def memory(self) -> dict[str, dict[str, int]]:
        """The bytes that are on the device and on the host now, by what they are."""
        return {"device": _report.on_device(self), "host": _report.on_host(self)}

    def report(self, plot: str | os.PathLike[str] | None = None) -> str:
        """Where every byte was over the last step; as a picture too if `plot` names a file."""
        return _report.report(self, plot)

    # --- State --------------------------------------------------------------------------------

    def state_dict(self) -> State:
        """That of the optimizer that was taken over."""
        self.synchronize()
        self._rewind()
        return self._given.state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        """As that of the optimizer that was taken over: states in any codec."""
        self.synchronize()
        self._rewind()
        self._store.load(state_dict)

    def refresh_masters(self) -> None:
        """Take parameters over as they are: to be called where something else has set them."""
        self.synchronize()
        self._rewind()
        self._store.refresh()
        self._store.whole().refresh_masters()

    def close(self) -> None:
        """Give all back to the optimizer that was taken over, with its states on the device."""
        self.synchronize()
        self._rewind()
        for hook in self._hooks:
            hook.remove()
        for bucket in self._store.buckets:
            bucket.move(DEVICE)
        self._hooks = []
        self._worker.stop()


def _return(bucket: Bucket) -> None:
    task, bucket.task = bucket.task, None
    if task is not None:
        task.result()
    bucket.give()


def _fire(owner: weakref.ref[Offload], p: torch.Tensor) -> None:
    offload = owner()
    if offload is not None:
        with torch.no_grad():
            offload._accumulated(p)
