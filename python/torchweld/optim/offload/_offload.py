"""An optimizer whose states and steps are on the host."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from torchweld import checks
from torchweld.errors import ArgumentError
from torchweld.optim._base import FusedOptimizer, Group
from torchweld.optim._codecs import State
from torchweld.optim._numbers import read_scaler_number
from torchweld.optim._shards import is_dtensor, local_part, sharing_key
from torchweld.optim.adam import AdamW
from torchweld.optim.offload._activations import Activations
from torchweld.optim.offload._buckets import DEVICE, HOST, Bucket, BucketStore, copy_to_host
from torchweld.optim.offload._machine import (
    CudaTransfers,
    Transfers,
    Worker,
    count_default_threads,
    has_processes,
    untraced,
)
from torchweld.optim.offload._policy import Placement, Seen

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
        pin_memory: whether the host's memory is page-locked, so that copies run concurrently.
        threads: the number of threads of a step on the host; default: this rank's share of the
            cores.
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
        _check_optimizer(optimizer)
        _check_arguments(placement, clip_norm, threads, bucket_bytes, capacity)
        _check_release(release_gradients, placement, trust_versions)
        if clip_norm is not None:
            optimizer.max_grad_norm = clip_norm
        self._is_made = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        # Both optimizers share their groups, so that schedulers of either work, and their states.
        self._optimizer, self.state = optimizer, optimizer.state
        self.param_groups = optimizer.param_groups
        self.placement, self._releases = placement, release_gradients
        self._bucket_bytes, self._capacity = bucket_bytes, capacity
        self._trusts_versions = trust_versions
        self._device = device = _find_device(optimizer)
        if transfers is None:
            is_simulated = device.type != "cuda"
            transfers = Transfers() if is_simulated else CudaTransfers(device, pin_memory)
        self._transfers = transfers
        self._worker = Worker(threads or count_default_threads())
        weakref.finalize(self, self._worker.stop)  # does not wait: its thread may be the caller
        self._store = BucketStore(optimizer, self._transfers)
        self._hooks: list[Any] = []
        self._lock = threading.Lock()  # autograd has a thread per device
        # Gradients that are written after the backward pass, as by clip_grad_norm_, would be copied
        # twice. How many steps to wait until buckets are sent again, and after the next edit.
        self._wait, self._patience = 0, 1
        self._placement = Placement()
        self._activations = Activations(self._transfers, device, bucket_bytes)
        if placement == DEVICE:
            self._activations.keep_all()
        self._phases: dict[str, Seen] = {}  # of the last step
        # In several processes, gradients of plain parameters may be reduced after the hooks.
        self._is_single_process = not has_processes()
        for at in range(len(self.param_groups)):
            self._add_members(at)
        self._is_made = True

    # --- Parameters ---------------------------------------------------------------------------

    def add_param_group(self, param_group: Group) -> None:
        if not self._is_made:
            return super().add_param_group(param_group)
        self._optimizer.add_param_group(param_group)
        self._add_members(len(self.param_groups) - 1)
        return None

    def _add_members(self, at: int) -> None:
        for m in self._store.add(at, self._bucket_bytes, on_host=self.placement != DEVICE):
            if m.param.requires_grad:
                hook = functools.partial(_notify, weakref.ref(self))
                self._hooks.append(m.param.register_post_accumulate_grad_hook(hook))

    def activations(self, least_bytes: int = 1 << 20) -> contextlib.AbstractContextManager[None]:
        """Return a context that offloads the tensors that autograd saves, as `placement` says.

        Put the forward pass and the loss inside, and the backward pass after it. "cpu": all tensors
        of at least `least_bytes` are copied to the host. "auto": the last ones stay on the device
        as far as it has room.
        """
        checks.count("Offload.activations", "least_bytes", least_bytes, 1)
        return self._activations.intercept(least_bytes)

    # --- During the backward pass -------------------------------------------------------------

    def _take_gradient(self, p: torch.Tensor) -> None:
        with self._lock:
            bucket, m = self._store.members[p]
            m.fired += 1
            if "forward" not in self._phases:
                self._end_phase("forward")
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
            if bucket.missing == 0 and may_send and self._wait == 0:
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
        self._end_phase("backward")
        with self._lend_scaler_numbers():
            self._advance()
            if not self._releases:
                self._optimizer._unscale()
        for bucket in self._store.buckets:
            bucket.expect()
        self._store.share_states()
        self._end_phase("step")
        if self.placement == "auto":
            self._place()
        self._phases = {}
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
        buckets = self._store.buckets
        devices = [bucket for bucket in buckets if bucket.home == DEVICE]
        hosts = self._store.list_on_host()
        edited = self._update_gradients(hosts)
        factor, found_inf = self._compute_factor(), read_scaler_number(self, "found_inf")
        # Everything that can fail is done before the first bucket is stepped.
        whole = self._store.make_whole(settings_on_host=bool(hosts))
        places = whole._find_places()
        for bucket in devices:
            bucket.prepare(whole, places)
        for bucket in hosts:
            self._worker.call(functools.partial(bucket.prepare, whole, places))
        self._learn(edited)
        # The host waits for the device here, unless no bucket is stepped on the host.
        numbers = [copy_to_host(t) if hosts else None for t in (factor, found_inf)]
        tasks = {
            bucket: self._worker.submit(functools.partial(bucket.run, *numbers))
            for bucket in hosts
            if bucket.needs_no_exchange()
        }
        failures = []
        try:
            for bucket in devices:
                bucket.run(factor, found_inf)
            for bucket in hosts:
                if bucket not in tasks:
                    bucket.run(*numbers)
        finally:
            # A bucket's parameters are copied to the device while the host steps the next one.
            for bucket in hosts:
                failure = tasks[bucket].exception() if bucket in tasks else None
                if failure is None:
                    bucket.give_back()
                else:
                    failures.append(failure)
            self._transfers.join()
        if failures:
            raise failures[0]

    def _learn(self, edited: bool) -> None:
        """Record whether gradients were written after they had been sent."""
        if edited:
            self._wait, self._patience = self._patience, min(2 * self._patience, 64)
        elif self._wait > 0:
            self._wait -= 1
        else:
            self._patience = 1

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

    # --- Placement ----------------------------------------------------------------------------

    def _place(self) -> None:
        """Apply placement="auto" after a step.

        Activations, then states, stay on the device as far as it has room.
        """
        buckets = self._store.buckets
        sizes = [bucket.state_bytes() for bucket in buckets]
        if self._releases:  # gradients stay where their bucket is stepped
            gradients = [bucket.gradient_bytes() for bucket in buckets]
            sizes = [sum(both) for both in zip(sizes, gradients, strict=True)]
        capacity = min(self._transfers.capacity(), self._capacity or 1 << 62)
        chosen = self._placement.decide(self._phases, sizes, capacity, self._activations.keep)
        homes = [DEVICE if stays else HOST for stays in chosen]
        if homes == [bucket.home for bucket in buckets]:
            return
        for home in (HOST, DEVICE):  # free room before using it
            for bucket, new in zip(buckets, homes, strict=True):
                if new == home:
                    bucket.move(home)

    def relieve(self) -> None:
        """Move all states to the host and measure again; call it after an OutOfMemoryError."""
        self._placement.forget()
        self._activations.keep(0)
        for bucket in self._store.buckets:
            bucket.move(HOST)

    def memory(self) -> dict[str, dict[str, int]]:
        """The current bytes on the device and on the host, by kind."""
        buckets = self._store.buckets
        on_device = {
            "parameters": sum(local_part(p.detach()).nbytes for p in self._store.members),
            "gradients": _count_gradients(self._store.members),
            "states": sum(b.state_bytes() for b in buckets if b.home == DEVICE),
            "activations": self._activations.device_bytes(),
        }
        on_host = {
            "parameters and gradients": sum(t.nbytes for b in buckets for t in b.buffers),
            "states": sum(b.state_bytes() for b in buckets if b.home == HOST),
            "activations": self._activations.buffers.nbytes(),
        }
        return {"device": on_device, "host": on_host}

    def _end_phase(self, name: str) -> None:
        """Record the memory of a phase of a step, for "auto"; reading the peak resets it."""
        if self.placement != "auto":
            return
        device = self.memory()["device"] | {"activations": self._activations.take_most()}
        placed, may_come = device["states"] + device["activations"], 0
        buckets = self._store.buckets
        if self._releases:
            members = (m for b in buckets if b.home == DEVICE for m in b.members)
            placed += _count_gradients(m.param for m in members)
        else:
            may_come = sum(b.gradient_bytes() for b in buckets) - device["gradients"]
        peak = self._transfers.peak(sum(device.values()))
        self._phases[name] = Seen(peak, placed, may_come)

    # --- State --------------------------------------------------------------------------------

    def __getstate__(self) -> State:
        # The thread, the hooks and the pinned memory belong to this process and these parameters.
        raise ArgumentError("Offload", "self", "copied or pickled", "its state_dict()")

    @untraced
    def state_dict(self) -> State:
        """Return the state of the original optimizer.

        Hooks of both optimizers run, each with its own optimizer as argument.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict = self._optimizer.state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    @untraced
    def load_state_dict(self, state_dict: State) -> None:
        """Load a state as the original optimizer does, in any codec.

        Hooks of both optimizers run.
        """
        state_dict = state_dict.copy()  # hooks may change it
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._store.load(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @property
    def extra_entries(self) -> frozenset[str]:
        """As of the original optimizer."""
        return self._optimizer.extra_entries

    def make_state(self, group: Group, p: torch.Tensor) -> State:
        """Make a new state of p where its states are, as it is with these settings of its group."""
        _, member = self._store.members[p]
        return self._optimizer.make_state(group, p, member.twin)

    def describe(self, p: torch.Tensor) -> str:
        """Describe the original optimizer, as it does."""
        return self._optimizer.describe(p)

    def refresh_masters(self) -> None:
        """Adopt the parameters' current values; call it after other code has set them."""
        self._store.refresh()
        self._store.make_whole().refresh_masters()

    def close(self) -> None:
        """Give the states back to the original optimizer, on the device."""
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


def _check_arguments(
    placement: str,
    clip_norm: float | None,
    threads: int | None,
    bucket_bytes: int,
    capacity: int | None,
) -> None:
    fits = functools.partial(checks.fits, "Offload")
    fits("placement", placement, placement in PLACEMENTS, ", ".join(map(repr, PLACEMENTS)))
    if clip_norm is not None:
        checks.number("Offload", "clip_norm", clip_norm, lambda v: v > 0, "a number > 0 or None")
    for name, value in (("threads", threads), ("bucket_bytes", bucket_bytes)):
        if value is not None:
            checks.count("Offload", name, value, 1)
    if capacity is not None:
        checks.count("Offload", "capacity", capacity)


def _check_release(releases: bool, placement: str, trust_versions: bool) -> None:
    fits, on_host = functools.partial(checks.fits, "Offload"), placement != DEVICE
    accepted = 'False, or placement="cpu" or "auto"'
    fits("release_gradients", releases, on_host or not releases, accepted)
    accepted = "True with release_gradients, which copies gradients during the backward pass"
    fits("trust_versions", trust_versions, trust_versions or not releases, accepted)


def _check_optimizer(optimizer: Any) -> None:
    kind, argument = type(optimizer).__name__, "params_or_optimizer"
    if not isinstance(optimizer, FusedOptimizer):
        accepted = "parameters, or an optimizer of torchweld.optim"
        raise ArgumentError("Offload", argument, f"a {kind}", accepted)
    if optimizer._exchanges_gradients:
        accepted = "an optimizer that does not communicate by itself"
        raise ArgumentError("Offload", argument, f"a {kind}", accepted)
    if companion := optimizer._companion():
        accepted = "an optimizer without ema_decay or second iterates"
        raise ArgumentError("Offload", argument, f"{kind} with {companion}", accepted)


def _count_gradients(params: Iterable[torch.Tensor]) -> int:
    return sum(_count_bytes(local_part(p.grad)) for p in params if p.grad is not None)


def _count_bytes(grad: torch.Tensor) -> int:
    if grad.layout is torch.strided:
        return grad.nbytes
    return grad._values().nbytes + grad._indices().nbytes


def _find_device(optimizer: FusedOptimizer) -> torch.device:
    """Find the device of the parameters."""
    devices = {
        local_part(p.detach()).device for group in optimizer.param_groups for p in group["params"]
    }
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        actual = f"on {', '.join(sorted(map(str, devices)))}"
        raise ArgumentError("Offload", "a parameter", actual, "all on one GPU, or on the CPU")
    return devices.pop()
