"""All parameters of an optimizer, in buckets, and their states."""

from __future__ import annotations

from collections import defaultdict

import torch

from torchweld.optim._base import FusedOptimizer
from torchweld.optim._codecs import State
from torchweld.optim._shards import local
from torchweld.optim.offload._buckets import DEVICE, HOST, Bucket, States, Undo, stepper
from torchweld.optim.offload._members import Member
from torchweld.optim.offload._transfers import Transfers


class Store:
    """The buckets of an optimizer, in the order of its parameters.

    The given optimizer and the buckets' stepping parameters share the same dicts of states.
    """

    def __init__(self, given: FusedOptimizer, transfers: Transfers, undo_bytes: int) -> None:
        self._given, self._transfers = given, transfers
        self._undo = Undo(undo_bytes)
        self._states: States = defaultdict(dict)
        self.buckets: list[Bucket] = []
        self.members: dict[torch.Tensor, tuple[Bucket, Member]] = {}

    def add(self, at: int, nbytes: int, on_host: bool) -> list[Member]:
        """Divide the parameters of a group into buckets of at most so many bytes."""
        new = []
        number = len(self.members)
        for run in _runs(self._given.param_groups[at]["params"], nbytes):
            where = self._states, self._transfers, self._undo
            new.append(Bucket(self._given, [(at, run)], number, *where))
            number += len(run)
            self._states |= {p: self._given.state[p] for p in run if p in self._given.state}
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

    def on_host(self) -> list[Bucket]:
        """The buckets that step there, last parameters first, as their gradients come first."""
        return [bucket for bucket in reversed(self.buckets) if bucket.home == HOST]

    def whole(self) -> FusedOptimizer:
        """An optimizer over all parameters where they step."""
        groups = [
            {**group, "params": [self.members[p][1].twin for p in group["params"]]}
            for group in self._given.param_groups
        ]
        codecs = {m.twin: self._given._codec_of(p) for p, (_, m) in self.members.items()}
        return stepper(self._given, groups, 0, self._states, codecs)

    def share_states(self) -> None:
        """Share new states with the given optimizer."""
        for p, (_, m) in self.members.items():
            if m.twin in self._states and p not in self._given.state:
                self._given.state[p] = self._states[m.twin]

    def refresh(self) -> None:
        """Adopt parameters that something else may have written."""
        for bucket in self.on_host():
            bucket.refresh()

    def load(self, state_dict: State) -> None:
        """Load a saved state, each entry where its parameter steps."""
        self.refresh()
        whole = self.whole()
        whole.load_state_dict(state_dict)
        self._states.clear()
        self._states |= whole.state
        self._given.state.clear()
        for group, loaded in zip(self._given.param_groups, whole.param_groups, strict=True):
            params = group["params"]
            group.clear()
            group.update(loaded, params=params)
        self.share_states()


def _runs(params: list[torch.Tensor], nbytes: int) -> list[list[torch.Tensor]]:
    """Runs of parameters, each of at most so many bytes or a single parameter."""
    found: list[list[torch.Tensor]] = []
    size = 0
    for p in params:
        of_this = local(p.detach()).nbytes
        if not found or size + of_this > nbytes:
            found.append([])
            size = 0
        found[-1].append(p)
        size += of_this
    return found
