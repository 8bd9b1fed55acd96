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
from torchweld.optim._base import FusedOptimizer, Group, read_scaler_number
from torchweld.optim._codecs import State
from torchweld.optim._ddp import Reductions
from torchweld.optim._one_bit import OneBitOptimizer
from torchweld.optim._shards import is_dtensor, local_part, sharing_key
from torchweld.optim.adam import AdamW
from torchweld.optim.offload import _report
from torchweld.optim.offload._activations import Activations
from torchweld.optim.offload._buckets import DEVICE, HOST, Bucket
from torchweld.optim.offload._machine import (
    Transfers,
    Worker,
    count_default_threads,
    find_cores,
    has_processes,
    make_transfers,
    untraced,
)
from torchweld.optim.offload._store import (
    Store,
    load_with_hooks,
    return_parameters,
    save_with_hooks,
    step_buckets,
)
from torchweld.optim.offload.policy import Placement, Seen

# Steps without delay before delayed updates begin, while gradients change fast.
_WARM_UP = 40
PLACEMENTS = (HOST, DEVICE, "auto")


class Offload(torch.optim.Optimizer):
    """An optimizer of torchweld whose states, masters and steps are on the host.

    The result is bit for bit that of the optimizer on the device. During the backward pass
    gradients are copied to the host in buckets. `step()` copies again what was written since,
    steps the buckets on the host, and copies the parameters of each to the device while the next
    one is stepped.

    Args:
        params_or_optimizer: an optimizer of torchweld.optim to take over; or parameters, for AdamW
            with float32 masters.
        placement: where states are kept and parameters are stepped. "cpu": on the host. "cuda": on
            the device. "auto": on the device as far as it has room, measured at every step.
        clip_norm: the norm to which gradients are clipped, like max_grad_norm of the optimizer.
        delayed_update: take the step during the next forward and backward pass, one step behind.
            True begins after 40 steps without delay, a number after that many. It needs
            placement="cpu".
        pin_memory: whether the host's memory is page-locked, so that copies run concurrently.
        threads: the number of threads of a step on the host; default: this rank's share of the
            cores near the device.
        bucket_bytes: the bytes of parameters in a bucket.
        release_gradients: whether to free a gradient on the device once it is on the host; p.grad
            is then None after the backward pass. With "auto" this applies only to buckets that are
            stepped on the host. Not with "cuda".
        capacity: the bytes of the device that "auto" may use; default: all.
        trust_versions: whether to rely on torch's version counters to notice when other code writes
            parameters or gradients. Writes through `.data`, numpy or a pointer do not count up a
            version. They are lost unless this is False; gradients and parameters are then copied
            to the host in `step()`.
        transfers: the implementation of copies; for tests and other devices.
        arguments: the arguments of AdamW, if parameters are given.
    """

    _step_supports_amp_scaling = True
    # The norm of all gradients before clipping; set by a step with clip_norm.
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
        release_gradients: bool = False,
        capacity: int | None = None,
        trust_versions: bool = True,
        transfers: Transfers | None = None,
        **arguments: Any,
    ) -> None:
        optimizer = params_or_optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            optimizer = AdamW(optimizer, **({"master_weights": True} | arguments))
        elif arguments:
            actual = f"an optimizer, with {', '.join(arguments)} besides"
            raise ArgumentError(
                "Offload", "params_or_optimizer", actual, "one that has them already"
            )
        _check_arguments(optimizer, placement, clip_norm, threads, bucket_bytes)
        _check_host_only(placement, release_gradients, delayed_update)
        _check_trust(trust_versions, release_gradients)
        if clip_norm is not None:
            optimizer.max_grad_norm = clip_norm
        self._is_made = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        # Both optimizers share their groups, so that schedulers of either work, and their states.
        self._optimizer, self.state = optimizer, optimizer.state
        self.param_groups = optimizer.param_groups
        self.placement, self._releases = placement, release_gradients
        self._delay = _WARM_UP if delayed_update is True else delayed_update
        self._delays = delayed_update is not False
        self._bucket_bytes, self._capacity = bucket_bytes, capacity
        self._trusts_versions = trust_versions
        self._device = device = _find_device(optimizer)
        self._transfers = transfers or make_transfers(device, pin_memory)
        cores = find_cores(device)
        self._worker = Worker(threads or count_default_threads(cores), cores)
        weakref.finalize(self, self._worker.stop)  # does not wait: its thread may be the caller
        self._store = Store(optimizer, self._transfers)
        self._hooks: list[Any] = []
        self._lock = threading.Lock()  # autograd has a thread per device
        self._edits, self._steps = Edits(), 0
        self._pending: list[Bucket] = []  # buckets whose delayed step may still run
        self._placement = Placement()
        self._activations = Activations(self._transfers, device, bucket_bytes)
        if placement == DEVICE:
            self._activations.keep_all()
        self._timeline = _report.Timeline()
        # In several processes, gradients of plain parameters may be reduced after the hooks.
        self._is_single_process = not has_processes()
        self._reductions = Reductions()
        for at in range(len(self.param_groups)):
            self._add_members(at)
        self._is_made = True

    # --- Parameters ---------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        if not self._is_made:
            return super().add_param_group(param_group)
        self.synchronize()
        self._optimizer.add_param_group(param_group)
        self._add_members(len(self.param_groups) - 1)
        return None

    def _add_members(self, at: int) -> None:
        for m in self._store.add(at, self._bucket_bytes, on_host=self.placement != DEVICE):
            if m.param.requires_grad:
                hook = functools.partial(_notify, weakref.ref(self))
                self._hooks.append(m.param.register_post_accumulate_grad_hook(hook))

    def overlap_with_ddp(self, ddp: Any) -> None:
        """Copy gradients to the host as soon as DistributedDataParallel has reduced them.

        This registers a communication hook. Without it, gradients of plain parameters in several
        processes are copied only after the backward pass, since nothing tells whether a gradient
        has been reduced.
        """
        if self._releases or not self._trusts_versions:
            actual = "with release_gradients" if self._releases else "with trust_versions=False"
            accepted = "without: DDP writes the gradients later"
            raise ArgumentError("Offload.overlap_with_ddp", "the optimizer", actual, accepted)
        self._reductions.begin(ddp, self)

    def activations(self, least_bytes: int = 1 << 20) -> contextlib.AbstractContextManager[None]:
        """Return a context that offloads the tensors that autograd saves, as `placement` says.

        Put the forward pass and the loss inside, and the backward pass after it. "cpu": all tensors
        of at least `least_bytes` are copied to the host. "auto": the last ones stay on the device
        as far as it has room.
        """
        if least_bytes < 1:
            actual = repr(least_bytes)
            raise ArgumentError("Offload.activations", "least_bytes", actual, "a number > 0")
        return self._activations.intercept(least_bytes)

    # --- During the backward pass -------------------------------------------------------------

    def _take_gradient(self, p: torch.Tensor) -> None:
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
                return  # `step()` will notice that the gradient on the host is out of date
            if p.grad is not None and sharing_key(p.grad) != sharing_key(p):
                return  # a partial gradient, which a plan sums after the backward pass
            bucket.missing -= 1
            may_send = self._trusts_versions and (self._is_single_process or is_dtensor(p))
            if bucket.missing == 0 and may_send and not self._edits.are_expected():
                self._send_bucket(bucket)

    def _take_reduced(self, params: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
        """Take gradients from DDP's buckets before DDP writes them to parameters."""
        with self._lock, torch.no_grad():
            ours = [self._store.members[p] for p in params if p in self._store.members]
            for p, grad in zip(params, grads, strict=True):
                if p in self._store.members:
                    self._store.members[p][1].reduced = grad
            for bucket in dict.fromkeys(bucket for bucket, _ in ours):
                waits = any(m.expected and m.reduced is None for m in bucket.members)
                is_complete = bucket.missing == 0 and not waits and bucket.home == HOST
                if is_complete and not self._edits.are_expected():
                    self._send_bucket(bucket)

    def _send_bucket(self, bucket: Bucket) -> None:
        """Copy the gradients of a complete bucket to the host."""
        if bucket.task is not None and not bucket.task.done():
            return  # a delayed step still reads the previous gradients
        bucket.send(self._releases)
        for m in bucket.members:
            m.sum_sent()

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as torch does, also those on the host."""
        for bucket in self._store.list_on_host():
            bucket.forget()
        super().zero_grad(set_to_none)

    # --- The step -----------------------------------------------------------------------------

    @untraced
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters with a gradient.

        `closure`, if given, computes the gradients and returns the loss. torch.compile does not
        trace the step, since it uses threads and hooks.
        """
        self._worker.check_process()
        if self._releases and hasattr(self, "found_inf"):
            actual, accepted = (
                "True with a GradScaler",
                "False: GradScaler looks for overflows on the device",
            )
            raise ArgumentError("Offload", "release_gradients", actual, accepted)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._timeline.end(_report.BACKWARD, self)
        self._finish_pending()
        with self._lend_scaler_numbers():
            self._advance()
            if not self._releases:
                self._optimizer._unscale()
        self._steps += 1
        for bucket in self._store.buckets:
            bucket.expect()
        self._store.share_states()
        self._timeline.end(_report.STEP, self)
        if self.placement == "auto":
            self._place()
        return loss

    @contextlib.contextmanager
    def _lend_scaler_numbers(self) -> Iterator[None]:
        """Pass the numbers that GradScaler has set to the original optimizer."""
        names = [name for name in ("grad_scale", "found_inf") if hasattr(self, name)]
        for name in names:
            setattr(self._optimizer, name, getattr(self, name))
        try:
            yield
        finally:
            for name in names:
                delattr(self._optimizer, name)

    def _advance(self) -> None:
        unfinished = [bucket for bucket in self._store.buckets if not bucket.is_finished()]
        devices = [bucket for bucket in unfinished if bucket.home == DEVICE]
        hosts = [bucket for bucket in reversed(unfinished) if bucket.home == HOST]
        edited = self._update_gradients(hosts)
        numbers = self._compute_factor(), read_scaler_number(self, "found_inf")
        # The host waits for the device here, unless no bucket is stepped on the host.
        factor, found_inf = (
            t.detach().to("cpu") if hosts and t is not None else None for t in numbers
        )
        # Everything that can fail is done before the first bucket is stepped.
        for bucket in (*devices, *hosts):
            bucket.adopt_settings()
        for bucket in devices:
            bucket.prepare()
        for bucket in hosts:
            self._worker.call(bucket.prepare)
        self._edits.learn(edited)
        delays = self._delays and self._steps >= self._delay
        step_buckets(self._worker, hosts, devices, (factor, found_inf), numbers, not delays)
        if delays:
            self._pending = hosts
        else:
            self._transfers.join()

    def _update_gradients(self, hosts: list[Bucket]) -> bool:
        """Copy what the host lacks to it; return whether a gradient that it had was written."""
        # GradScaler's unscale_ writes all gradients without changing their versions.
        edited = unscaled = hasattr(self, "found_inf") and getattr(self, "grad_scale", None) is None
        for bucket in hosts:
            if not self._trusts_versions:
                bucket.distrust()
            if unscaled or not bucket.is_sent():
                edited |= any(m.sent is not None or m.is_released for m in bucket.members)
                bucket.send(self._releases)
        return edited

    def _compute_factor(self) -> torch.Tensor | None:
        """Compute the factor of gradients, from the norm of all of them if it is clipped."""
        if not self._releases or self._optimizer.max_grad_norm is None:
            factor = self._optimizer._gradient_factor()
            self.grad_norm = self._optimizer.grad_norm
            return factor
        for bucket in self._store.list_on_host():
            bucket.wait_for_gradients()
        whole = self._store.make_whole()
        factor = whole._gradient_factor()
        self.grad_norm = whole.grad_norm
        return factor if factor is None else factor.to(self._device)

    def _finish_pending(self) -> None:
        """Finish the delayed step and copy its parameters to the device."""
        if any(bucket.task is not None and not bucket.task.done() for bucket in self._pending):
            self._worker.check_process()  # in a forked process a running task never ends
        for bucket in self._pending:
            return_parameters(bucket)
        if self._pending:
            self._transfers.join()
        self._pending = []

    @untraced
    def synchronize(self) -> None:
        """Finish all pending steps; with delayed_update, call it before you save the model."""
        self._finish_pending()

    # --- Placement ----------------------------------------------------------------------------

    def _place(self) -> None:
        """Apply placement="auto" after a step.

        Activations, then states, stay on the device as far as it has room.
        """
        buckets, releases = self._store.buckets, self._releases
        sizes = [bucket.state_bytes() for bucket in buckets]
        gradients = [bucket.gradient_bytes() for bucket in buckets]
        if releases:  # gradients stay where their bucket is stepped
            sizes = [sum(both) for both in zip(sizes, gradients, strict=True)]
        phases = {}
        for name, phase in self._timeline.phases.items():
            placed = phase.device["states"] + phase.device["activations"]
            placed += phase.gradients_that_stay if releases else 0
            may_come = 0 if releases else sum(gradients) - phase.device["gradients"]
            phases[name] = Seen(phase.peak, placed, may_come)
        capacity = min(self._transfers.capacity(), self._capacity or 1 << 62)
        chosen = self._placement.decide(phases, sizes, capacity, self._activations.keep)
        homes = [DEVICE if stays else HOST for stays in chosen]
        if homes == [bucket.home for bucket in buckets]:
            return
        self._finish_pending()
        for home in (HOST, DEVICE):  # free room before using it
            for bucket, new in zip(buckets, homes, strict=True):
                if new == home:
                    bucket.move(home)

    def relieve(self) -> None:
        """Move all states to the host and measure again; call it after an OutOfMemoryError."""
        self.synchronize()
        self._placement.forget()
        self._activations.keep(0)
        for bucket in self._store.buckets:
            bucket.move(HOST)

    def memory(self) -> dict[str, dict[str, int]]:
        """The current bytes on the device and on the host, by kind."""
        return {"device": _report.count_on_device(self), "host": _report.count_on_host(self)}

    def report(self, plot: str | os.PathLike[str] | None = None) -> str:
        """Describe where every byte was in the last step; `plot` names a file for a picture."""
        return _report.write_report(self, plot)

    # --- State --------------------------------------------------------------------------------

    def __getstate__(self) -> State:
        # The thread, the hooks and the pinned memory belong to this process and these parameters.
        raise ArgumentError("Offload", "self", "copied or pickled", "its state_dict()")

    @untraced
    def state_dict(self) -> State:
        """Return the state of the original optimizer.

        Hooks of both optimizers run, each with its own optimizer as argument.
        """
        self.synchronize()
        return save_with_hooks(self, self._optimizer.state_dict)

    @untraced
    def load_state_dict(self, state_dict: State) -> None:
        """Load a state as the original optimizer does, in any codec.

        Hooks of both optimizers run.
        """
        self.synchronize()
        with load_with_hooks(self, state_dict) as changed:
            self._store.load(changed)

    def refresh_masters(self) -> None:
        """Adopt the parameters' current values; call it after other code has set them."""
        self.synchronize()
        self._store.refresh()
        self._store.make_whole().refresh_masters()

    def close(self) -> None:
        """Give the states back to the original optimizer, on the device."""
        self.synchronize()
        for hook in self._hooks:
            hook.remove()
        for bucket in self._store.buckets:
            bucket.move(DEVICE)
        self._hooks = []
        self._worker.stop()


@untraced
def _notify(owner: weakref.ref[Offload], p: torch.Tensor) -> None:
    offload = owner()
    if offload is not None:
        offload._worker.check_process()  # before taking the lock, which may be held forever
        with torch.no_grad():
            offload._take_gradient(p)


class Edits:
    """Predicts whether gradients are written after the backward pass, as clip_grad_norm_ does.

    A gradient that is written is copied twice, so buckets are then sent less often.
    """

    def __init__(self) -> None:
        # How many steps to wait until buckets are sent again, and after the next edit.
        self._wait, self._patience = 0, 1

    def are_expected(self) -> bool:
        """Whether to copy gradients in `step()` only."""
        return self._wait > 0

    def learn(self, edited: bool) -> None:
        """Record a step."""
        if edited:
            self._wait, self._patience = self._patience, min(2 * self._patience, 64)
        elif self._wait > 0:
            self._wait -= 1
        else:
            self._patience = 1


def _check_arguments(
    optimizer: Any,
    placement: str,
    clip_norm: float | None,
    threads: int | None,
    bucket_bytes: int,
) -> None:
    """Check Offload's arguments."""

    def refuse(argument: str, actual: object, accepted: str) -> None:
        raise ArgumentError("Offload", argument, actual, accepted)

    if not isinstance(optimizer, FusedOptimizer):
        accepted = "parameters, or an optimizer of torchweld.optim"
        refuse("params_or_optimizer", f"a {type(optimizer).__name__}", accepted)
    if isinstance(optimizer, OneBitOptimizer):
        accepted = "an optimizer that does not communicate by itself"
        refuse("params_or_optimizer", f"a {type(optimizer).__name__}", accepted)
    if optimizer._companion() is not None:
        actual = f"{type(optimizer).__name__} with {optimizer._companion()}"
        refuse("params_or_optimizer", actual, "an optimizer without ema_decay or second iterates")
    if placement not in PLACEMENTS:
        refuse("placement", repr(placement), ", ".join(map(repr, PLACEMENTS)))
    if clip_norm is not None and not clip_norm > 0:
        refuse("clip_norm", repr(clip_norm), "a number > 0 or None")
    if threads is not None and threads < 1:
        refuse("threads", repr(threads), "a number > 0 or None")
    if bucket_bytes < 1:
        refuse("bucket_bytes", repr(bucket_bytes), "a number > 0")


def _check_host_only(placement: str, releases: bool, delayed: bool | int) -> None:
    """Check the arguments that need steps on the host."""
    asked: list[tuple[str, bool | int, tuple[str, ...]]] = [
        ("release_gradients", releases, (HOST, "auto")),
        ("delayed_update", delayed, (HOST,)),
    ]
    for argument, value, placements in asked:
        if value is not False and placement not in placements:
            actual = f"{value!r} with placement={placement!r}"
            accepted = "False, or placement=" + " or ".join(f'"{name}"' for name in placements)
            raise ArgumentError("Offload", argument, actual, accepted)
        if value < 0:
            raise ArgumentError("Offload", argument, repr(value), "True, False or a number >= 0")


def _check_trust(trust_versions: bool, release_gradients: bool) -> None:
    """Check that gradients may be copied in `step()`, as trust_versions=False asks."""
    if release_gradients and not trust_versions:
        accepted = "True with release_gradients, which copies gradients during the backward pass"
        raise ArgumentError("Offload", "trust_versions", "False", accepted)


def _find_device(optimizer: FusedOptimizer) -> torch.device:
    """Find the device of the parameters."""
    devices = {
        local_part(p.detach()).device for group in optimizer.param_groups for p in group["params"]
    }
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        actual = f"on {', '.join(sorted(map(str, devices)))}"
        raise ArgumentError("Offload", "a parameter", actual, "all on one GPU, or on the CPU")
    return devices.pop()
