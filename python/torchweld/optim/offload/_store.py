"""All parameters of an optimizer, in buckets, and their states."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchweld.optim._base import FusedOptimizer
from torchweld.optim._codecs import State
from torchweld.optim._shards import local_part
from torchweld.optim.offload._buckets import (
    DEVICE,
    HOST,
    Bucket,
    Member,
    States,
    make_stepper,
)
from torchweld.optim.offload._machine import Transfers, Worker


class Store:
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
        new = []
        number = len(self.members)
        for run in _split_into_runs(self._optimizer.param_groups[at]["params"], nbytes):
            where = self._states, self._transfers
            new.append(Bucket(self._optimizer, at, run, number, *where))
            number += len(run)
            self._states |= {p: self._optimizer.state[p] for p in run if p in self._optimizer.state}
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

    def make_whole(self) -> FusedOptimizer:
        """Make an optimizer over all parameters, each where it is stepped."""
        groups = [
            {**group, "params": [self.members[p][1].twin for p in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        codecs = {m.twin: self._optimizer._codec_of(p) for p, (_, m) in self.members.items()}
        return make_stepper(self._optimizer, groups, 0, self._states, codecs)

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


def _split_into_runs(params: list[torch.Tensor], nbytes: int) -> list[list[torch.Tensor]]:
    """Split parameters into runs of at most `nbytes`; a larger parameter is its own run."""
    runs: list[list[torch.Tensor]] = []
    size = 0
    for p in params:
        nbytes_of_p = local_part(p.detach()).nbytes
        if not runs or size + nbytes_of_p > nbytes:
            runs.append([])
            size = 0
        runs[-1].append(p)
        size += nbytes_of_p
    return runs


def step_buckets(
    worker: Worker,
    hosts: list[Bucket],
    devices: list[Bucket],
    on_host: tuple[Any, Any],
    on_device: tuple[Any, Any],
    waits: bool,
) -> None:
    """Take the final part of a step, after everything that can be checked.

    If `waits`, the parameters of each bucket of the host are copied to the device while the host
    steps the next one. If one bucket fails, a repeated step skips those that were already stepped.
    """
    tasks = {}
    for bucket in hosts:
        if bucket.needs_no_exchange():
            tasks[bucket] = bucket.task = worker.submit(functools.partial(bucket.run, *on_host))
    finished: list[Bucket] = []
    try:
        for bucket in devices:
            bucket.run(*on_device)
            finished.append(bucket)
            bucket.end()
        for bucket in hosts:
            if bucket not in tasks:
                bucket.run(*on_host)
                finished.append(bucket)
        for bucket in hosts if waits else ():
            return_parameters(bucket)
            finished.append(bucket)
    except BaseException:
        finished += [bucket for bucket, task in tasks.items() if task.exception() is None]
        for bucket in finished:
            bucket.finish()
        raise


def return_parameters(bucket: Bucket) -> None:
    """Wait for the bucket's step, and copy its parameters to the device."""
    task, bucket.task = bucket.task, None
    if task is not None:
        task.result()
    bucket.give_back()


def save_with_hooks(optimizer: Any, state_of: Callable[[], State]) -> State:
    """Return a state, after running the hooks of `state_dict` as torch does."""
    for before in optimizer._optimizer_state_dict_pre_hooks.values():
        before(optimizer)
    state_dict = state_of()
    for after in optimizer._optimizer_state_dict_post_hooks.values():
        changed = after(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


@contextlib.contextmanager
def load_with_hooks(optimizer: Any, state_dict: State) -> Iterator[State]:
    """Yield the state to load, between the hooks of `load_state_dict`."""
    state_dict = state_dict.copy()  # hooks may change it
    for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = before(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    yield state_dict
    for after in optimizer._optimizer_load_state_dict_post_hooks.values():
        after(optimizer)
