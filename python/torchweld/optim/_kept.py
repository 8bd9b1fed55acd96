"""A cache of a step's batches: the next step reuses them while all their inputs are unchanged.

A model steps the same parameters thousands of times, and gathering them takes longer than the step
of a few small tensors.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from torchweld import state
from torchweld.dispatch.warm.guards import INCOMPARABLE, make_guard
from torchweld.ops.optimizer.batch import Batch
from torchweld.optim._codecs import State
from torchweld.optim._params import Group

Work = list[tuple[Group, Batch]]
_CONSTANTS = (bool, int, float, str, type(None), tuple)


def _settings_of(group: Group) -> Group:
    """A group without its parameters and, if that is a number, without its learning rate."""
    lr = group["lr"]
    return {**group, "params": None, "lr": lr if isinstance(lr, torch.Tensor) else None}


def _list_entries(states: Mapping[Any, State]) -> Iterable[Any]:
    """All entries of all states; torch's optimizers keep other values as well."""
    return itertools.chain.from_iterable([s.values() for s in states.values() if type(s) is dict])


def _are(one: Collection[Any], other: Sequence[Any]) -> bool:
    """Whether both hold the same objects."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


class Kept:
    """The batches of a step, and what they depend on."""

    # The step as calls of kernels, one a batch; empty if it takes more, None if nobody has asked.
    ready: Sequence[Callable[..., None]] | None = None
    # What sums the squares of all gradients in one call; None if that takes more.
    sum_squares: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None

    def __init__(self, groups: Sequence[Group], work: Work, states: Mapping[Any, State]) -> None:
        self.work = work
        self._groups = [(group, _settings_of(group), list(group["params"])) for group in groups]
        self._params = [p for _, batch in work for p in batch.params]
        stepped = set(map(id, self._params))
        # The number of its group for each parameter.
        numbers = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        self._numbers = [[numbers[id(p)] for p in batch.params] for _, batch in work]
        self._in_order = [p for group in groups for p in group["params"] if id(p) in stepped]
        self._without = [p for group in groups for p in group["params"] if id(p) not in stepped]
        # The whole mapping: looking up a parameter would call its hash, a function in Python.
        self._states = [*states.values()]
        self._entries = [*_list_entries(states)]
        self._matches = make_guard([*self._params, *(g for _, batch in work for g in batch.grads)])

    @classmethod
    def make(cls, groups: Sequence[Group], work: Work, states: Mapping[Any, State]) -> Kept | None:
        """Keep the batches, if they hold plain parameters and states themselves."""
        if state.is_dynamo_compiling():  # it traces this by itself behind a break of its graph
            return None
        every = ({**group, "params": None, "lr": None}.values() for group in groups)
        constant = all(isinstance(value, _CONSTANTS) for values in every for value in values)
        if not constant:
            return None
        for _, batch in work:
            if batch.splits or batch.rounding_offsets or not _are(batch.params, batch.wholes):
                return None
        kept = cls(groups, work, states)
        return None if kept._matches is None else kept

    def refresh(
        self,
        groups: Sequence[Group],
        states: Mapping[Any, State],
        learning_rate: Callable[[Group], Any],
    ) -> bool:
        """Give the batches this step's gradients and rates, if all else is unchanged."""
        if len(groups) != len(self._groups):
            return False
        for group, (kept, settings, params) in zip(groups, self._groups, strict=True):
            same = group is kept and _are(group["params"], params)
            if not same or _settings_of(group) != settings:
                return False
        grads = [p.grad for p in self._params]
        try:
            if not self._matches(*self._params, *grads):  # type: ignore[misc]
                return False
        except INCOMPARABLE:
            return False
        if self._without and any(p.grad is not None for p in self._without):
            return False
        if not _are(states.values(), self._states):
            return False
        if not _are([*_list_entries(states)], self._entries):
            return False
        rates = [learning_rate(group) for group in groups]
        begin = 0
        for (_, batch), numbers in zip(self.work, self._numbers, strict=True):
            end = begin + len(numbers)
            batch.grads, begin = grads[begin:end], end  # type: ignore[assignment]
            own = [rates[i] for i in numbers] if len(rates) > 1 else rates
            same = len(own) == 1 or own.count(own[0]) == len(own)
            batch.lr = own[0] if same else own
        return True

    def repeat(self, find_numbers: Callable[[], Sequence[torch.Tensor | None]]) -> None:
        """Take the step again, with the gradients of `refresh`.

        `find_numbers` finds the gradients' factor, and the number of infinite ones.
        """
        try:
            numbers = find_numbers()
            for call in self.ready or ():
                call(*numbers)
        finally:
            self.drop_gradients()

    def list_gradients(self) -> list[torch.Tensor]:
        """This step's gradients in the order of their groups."""
        return [p.grad for p in self._in_order]  # type: ignore[misc]

    def drop_gradients(self) -> None:
        """Let the gradients' memory go with their parameters' `grad`."""
        for _, batch in self.work:
            batch.grads = []
