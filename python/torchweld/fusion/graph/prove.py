"""A proposal counts only if it is proven: its reference has the same operations as the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchweld import state
from torchweld.fusion import refusals
from torchweld.fusion.graph.normal import COMMUTE
from torchweld.fusion.graph.record import (
    Number,
    Record,
    Ref,
    Step,
    find_part,
    find_places,
    find_storage,
    read_casts,
    recording,
)


class Late(NamedTuple):
    """Inner tensors that the graph may return, which are computed only when they are read."""

    results: dict[int, Any]  # with the steps after the linear layer, as in `Deferred`
    hidden: int  # the linear layer's input, weight and bias
    weight: int | None  # None: devices share it, and no device can compute the logits alone
    bias: int | None
    row: int | None  # added to the layer's result


@dataclass
class Proposal:
    """Where an op may stand. A finder may propose too much: what counts is the proof.

    Attributes:
        op: the function of torchweld.functional that runs, in words.
        inputs: numbers of tensors in the record.
        outputs: numbers of the tensors that the op computes from them, in order.
        reference: computes the outputs from the inputs and the constants, in plain torch.
        run: computes the same by torchweld.
        constants: numbers and names, further arguments of both.
        late: inner tensors that the graph may return.
        unsaved: outputs that the op's node does not save, so that they may be written later.
    """

    op: str
    inputs: list[int]
    outputs: list[int]
    reference: Callable[..., Any]
    run: Callable[..., Any]
    constants: tuple[Any, ...] = ()
    late: Late | None = None
    unsaved: Collection[int] = ()


@dataclass
class Difference:
    """The first operation in which a proposal's reference and the graph differ."""

    proposal: Proposal
    same: int  # operations after it that are the same
    step: Step | None  # of the graph; None: a tensor from outside
    text: str


@dataclass
class _Reference:
    record: Record
    outputs: list[int]


class Prover:
    """Proves proposals of one record; references are recorded once for inputs of the same kind."""

    def __init__(self, record: Record, mode: Any) -> None:
        self.record, self.mode = record, mode
        self.casts: dict[int, Any] = {}  # of each epoch
        self._references: dict[Any, _Reference | str] = {}

    def prove(self, proposal: Proposal) -> set[int] | Difference:
        """The steps between inputs and outputs, if they are the reference's."""
        values = [self.record.values[number] for number in proposal.inputs]
        if not all(state.is_fake(find_part(x)) for x in values):
            return Difference(proposal, 0, None, "an input is a subclass of torch.Tensor")
        epoch = self.record.steps[self.record.made_by[proposal.outputs[-1]]].epoch
        reference = self._record(proposal, values, epoch)
        if isinstance(reference, str):
            return Difference(proposal, 0, None, reference)
        comparing = _Comparing(self.record, reference.record, proposal)
        for theirs, ours in zip(reference.outputs, proposal.outputs, strict=True):
            if not comparing.equal(theirs, ours):
                return comparing.difference()
        return comparing.region or Difference(proposal, 0, None, "nothing is computed")

    def _record(self, proposal: Proposal, values: list[Any], epoch: int) -> _Reference | str:
        casts = self.casts.get(epoch, read_casts())
        kinds = tuple(map(_describe, values))
        key = (proposal.reference, proposal.constants, kinds, casts)
        if key not in self._references:
            try:
                with autocast_as(casts):
                    self._references[key] = self._record_new(proposal, values)
            except Exception as error:  # sizes that do not fit: no match
                refusals.raise_others(error)
                self._references[key] = f"{type(error).__name__}: {str(error)[:200]}"
        return self._references[key]

    def _record_new(self, proposal: Proposal, values: list[Any]) -> _Reference:
        record = Record()
        with self.mode, torch.no_grad():
            fresh = [_renew(x) for x in values]
        for x in fresh:
            record.number(x)
        with self.mode, recording(record):
            out = proposal.reference(*fresh, *proposal.constants)
        outs = out if isinstance(out, tuple) else (out,)
        return _Reference(record, [record.number(x) for x in outs])


def _describe(x: torch.Tensor) -> Any:
    return str(tuple(x.shape)), str(x.stride()), x.dtype, x.device, find_places(x)


def _renew(x: Any) -> torch.Tensor:
    """Another tensor of the same metadata."""
    part = find_part(x)
    new = torch.empty_strided(part.shape, part.stride(), dtype=x.dtype, device=x.device)
    if part is x:
        return new
    mesh, *places = find_places(x)
    return type(x).from_local(new, mesh, places, shape=x.shape, stride=x.stride())  # type: ignore[attr-defined, no-any-return]


@contextlib.contextmanager
def autocast_as(casts: tuple[Any, ...]) -> Iterator[None]:
    """Set autocast to a state that `read_casts` returned."""
    with contextlib.ExitStack() as stack:
        for kind, enabled, dtype in casts:
            if (enabled, dtype) != (
                torch.is_autocast_enabled(kind),
                torch.get_autocast_dtype(kind),
            ):
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
        yield


class _Comparing:
    """Compares a reference's steps with the graph's, from the outputs to the inputs."""

    def __init__(self, record: Record, reference: Record, proposal: Proposal) -> None:
        self.ours, self.theirs, self.proposal = record, reference, proposal
        self.same = dict(enumerate(proposal.inputs))  # numbers of the reference's: the graph's
        self._outside = {find_storage(record.values[number]) for number in proposal.inputs}
        self.region: set[int] = set()
        self._depth = 0
        self._furthest: tuple[int, Step | None, str] = (-1, None, "")

    def difference(self) -> Difference:
        same, step, text = self._furthest
        return Difference(self.proposal, max(same, 0), step, text)

    def _differ(self, step: Step | None, text: str) -> bool:
        if self._depth > self._furthest[0]:
            self._furthest = self._depth, step, text
        return False

    def equal(self, theirs: int, ours: int) -> bool:
        """Whether two tensors are the same function of the inputs."""
        if theirs in self.same:
            if self.same[theirs] == ours:
                return True
            made = self.ours.made_by.get(ours)
            step = None if made is None else self.ours.steps[made]
            return self._differ(step, _tell(step, None))
        a, b = self.theirs.made_by.get(theirs), self.ours.made_by.get(ours)
        one = None if a is None else self.theirs.steps[a]
        two = None if b is None else self.ours.steps[b]
        if one is None or two is None or b is None:
            return self._differ(two, _tell(two, one))
        if one.func != two.func or len(one.outs) != len(two.outs):
            return self._differ(two, _tell(two, one))
        # What is recorded whole writes what its op writes.
        writes = () if isinstance(two.func, str) else two.writes
        if not self._outside.isdisjoint(writes):
            return self._differ(two, f"{two.name} writes in place")
        if one.outs.index(theirs) != two.outs.index(ours):
            return self._differ(two, _tell(two, one))
        if one.is_random and not isinstance(one.func, str):  # of those our stream decides
            return self._differ(two, f"{two.name} draws random numbers")
        if not self._alike(one, two):
            return self._differ(two, f"{_tell(two, one)} of other arguments")
        for x, y in zip(one.outs, two.outs, strict=True):
            self.same[x] = y
        self.region.add(b)
        return True

    def _alike(self, one: Step, two: Step) -> bool:
        """Whether two steps of one operation have the same arguments."""
        orders = [two.args]
        if one.func in COMMUTE and len(two.args) == 2:
            orders.append(two.args[::-1])
        for args in orders:
            before = dict(self.same), set(self.region)
            self._depth += 1
            is_same = self._match(one.args, args) and self._match(one.kwargs, two.kwargs)
            self._depth -= 1
            if is_same:
                return True
            self.same, self.region = before
        return False

    def _match(self, a: Any, b: Any) -> bool:
        if isinstance(a, Ref):
            return isinstance(b, Ref) and self.equal(a.at, b.at)
        if isinstance(a, tuple):
            return isinstance(b, tuple) and len(a) == len(b) and all(map(self._match, a, b))
        return type(a) is type(b) and a == b


def _tell(ours: Step | None, theirs: Step | None) -> str:
    found = "a tensor from outside" if ours is None else _show(ours)
    return f"{found} stands where {'an input' if theirs is None else _show(theirs)} is expected"


def _show(step: Step) -> str:
    numbers = [each.text for each in step.args if isinstance(each, Number)]
    return step.name + (f" by {', '.join(numbers)}" if numbers else "")
