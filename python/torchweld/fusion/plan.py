"""The plan of what to weld in a model, made before any change."""

from __future__ import annotations

import itertools
import re
import textwrap
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchweld.fusion import probe
from torchweld.fusion.patterns import PATTERNS, Pattern, concerns
from torchweld.fusion.settings import why_not_fixed
from torchweld.fusion.straight import why_not_straight
from torchweld.fusion.trial import measure_gain, why_not_same
from torchweld.fusion.twin import Twin
from torchweld.fusion.view import View, read_numbers
from torchweld.fusion.weld import (
    Change,
    Proposal,
    Skipped,
    Tried,
    Weld,
    find_welds,
    why_not_change,
)
from torchweld.table import Table

_WIDTH = 100  # of a printed line
Filter = Callable[[torch.nn.Module, str], bool]


@dataclass(frozen=True)
class Weldable:
    """A row of `explain_fusion`: one module of a model.

    Attributes:
        where: its name in the model.
        what: what it is.
        becomes: the torchweld function that runs in its place; "" if it is not changed.
        welded: whether it is welded already.
        gain: the factor by which its passes between GEMMs move fewer bytes, forward and backward;
            None if not measured.
        reason: why it is not changed; "" if it is welded.
    """

    where: str
    what: str
    becomes: str = ""
    welded: bool = False
    gain: float | None = None
    reason: str = ""


class WeldReport(tuple[Weldable, ...]):
    """A table of what fuse() changes in a model or has changed, and what it does not."""

    warning: str | None

    def __new__(cls, rows: Iterable[Weldable] = (), warning: str | None = None) -> WeldReport:
        report = super().__new__(cls, rows)
        report.warning = warning
        return report

    def table(self) -> Table:
        """Two lines for a group of modules that differ only in the numbers in their names."""
        table = Table(["module, and what it becomes"], numbers_from=99)
        groups: dict[Any, list[Weldable]] = {}
        for row in self:
            where = re.sub(r"\d+", "*", row.where)
            key = (where, row.what, row.becomes, row.welded, row.reason)
            groups.setdefault(key, []).append(row)
        for (_, what, becomes, welded, reason), rows in groups.items():
            where = _merge_names([row.where for row in rows]) or "(the model)"
            where += f" ({len(rows)}x)" if len(rows) > 1 else ""
            gain = rows[0].gain
            traffic = "" if gain is None or gain < 1.05 else f"traffic {gain:.1f}x less, "
            traffic = "traffic the same, " if gain is not None and not traffic else traffic
            welds = f"{becomes}, {traffic}{'welded' if welded else 'to be welded'}"
            note = f"not changed: {reason}" if reason else welds
            for text, indent in ((f"{where}: {what}", ""), (note, "    ")):
                for line in textwrap.wrap(
                    text, _WIDTH, initial_indent=indent, subsequent_indent=indent
                ):
                    table.add(line, style="dim" if reason else "")
        for line in textwrap.wrap(self.warning or "", _WIDTH):
            table.add(line)
        return table

    def __str__(self) -> str:
        if not self:
            return "torchweld has no fused kernel for any module of this model"
        return self.table().plain()

    def __repr__(self) -> str:
        return str(self)


def _merge_names(names: Sequence[str]) -> str:
    """Merge the names into one, with a star where their numbers differ."""
    parts = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def list_welds(model: torch.nn.Module) -> Iterator[Weldable]:
    """List existing welds, one row each."""
    for name, module in find_welds(model):
        if module.weld_becomes:
            yield Weldable(name, module.welded_from.__name__, module.weld_becomes, welded=True)


class Decided(NamedTuple):
    """A proposal that was accepted, with its row."""

    proposal: Proposal
    row: Weldable


def decide(
    model: torch.nn.Module,
    filter_fn: Filter | None,
    verify: bool,
    measure: bool,
    patterns: Sequence[Pattern] | None = None,
) -> tuple[list[Decided], list[Weldable]]:
    """Decide which changes to make, and list the modules that stay as they are. Changes nothing.

    `verify` tries changes of classes that are not torch's own, and `measure` tries all.
    `patterns` take the place of PATTERNS.
    """
    patterns = PATTERNS if patterns is None else patterns
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    with _one_at_a_time, probe.isolate(devices):
        return _decide(View(model), filter_fn, verify, measure, patterns)


# Trials change what threads share: the backend, functions in the files of models, and a flag of
# torch's dispatch modes, with which torch.compile does nothing.
_one_at_a_time = threading.RLock()


def _decide(
    view: View,
    filter_fn: Filter | None,
    verify: bool,
    measure: bool,
    patterns: Sequence[Pattern],
) -> tuple[list[Decided], list[Weldable]]:
    claims = _Claims(view.model)
    accepted: list[Decided] = []
    skipped = {id(module): row for module, row in _find_skipped(view)}
    left: list[Weldable] = [row for row in skipped.values() if row is not None]
    for pattern, module in itertools.product(patterns, list(view.modules.values())):
        # Inside a weld the order in which submodules run has changed.
        if isinstance(module, Weld) or id(module) in skipped or id(module) in claims.whole:
            continue
        if not concerns(pattern, module):
            continue
        entries = [entry for entry in pattern(module, view) if id(entry.module) not in claims.whole]
        for _, group in itertools.groupby(entries, key=lambda entry: id(entry.module)):
            choice = _choose_first(list(group), view, filter_fn, verify, measure, claims)
            if isinstance(choice, Decided):
                accepted.append(choice)
                claims.add(choice.proposal)
            elif choice is not None:
                left.append(choice)
    return accepted, left


class _Claims:
    """Modules that accepted proposals change or skip.

    Proposals for pairs in one module share the forward of that module, but with no other proposal.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.whole = {
            id(module.get_submodule(inner))
            for _, module in find_welds(model)
            for inner in module.weld_inner
        }
        self._shared: set[int] = set()

    def add(self, proposal: Proposal) -> None:
        for change in proposal.changes:
            (self._shared if change.weld.weld_shares else self.whole).add(id(change.module))
        self.whole |= {id(part) for part in proposal.inner}

    def has(self, proposal: Proposal) -> bool:
        """Whether a module of a proposal is claimed by another one."""
        alone = [change.module for change in proposal.changes if not change.weld.weld_shares]
        parts = (*(change.module for change in proposal.changes), *proposal.inner)
        return any(id(part) in self.whole for part in parts) or any(
            id(module) in self._shared for module in alone
        )


def _find_skipped(view: View) -> Iterator[tuple[torch.nn.Module, Weldable | None]]:
    """Find the modules that recognisers skip, with a row unless one is inside another."""
    for name, module in view.modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            scripted = (
                isinstance(p, torch.jit.ScriptModule) for p in view.parents.get(id(module), [])
            )
            reason = "it is scripted: fuse before scripting"
            what = module.original_name
            yield module, None if any(scripted) else Weldable(name, what, reason=reason)
        elif any(map(torch.nn.parameter.is_lazy, module._parameters.values())):
            reason = "it is lazy: run the model once, then fuse"
            yield module, Weldable(name, type(module).__name__, reason=reason)


def _choose_first(
    entries: Sequence[Proposal | Skipped],
    view: View,
    filter_fn: Filter | None,
    verify: bool,
    measure: bool,
    claims: _Claims,
) -> Decided | Weldable | None:
    """Choose the first entry of one module that computes the same, or the reason for none."""
    row = None
    for entry in entries:
        where = view.names.get(id(entry.module), "")
        if isinstance(entry, Skipped):
            row = row or Weldable(where, entry.what, reason=entry.reason)
            continue
        changed = [change.module for change in entry.changes]
        if claims.has(entry):
            continue
        if filter_fn is not None and not all(
            filter_fn(module, view.names[id(module)]) for module in changed
        ):
            return Weldable(where, entry.what, reason="the filter leaves it out")
        skipped = [part for part in entry.inner if part not in changed]
        reasons = itertools.chain(
            (view.why_not_inner(part, part in changed) for part in entry.inner),
            [why_not_change(entry.module)],
            map(why_not_fixed, skipped),
            (why_not_fixed(each.module) for each in entry.changes if issubclass(each.weld, Tried)),
            (why_not_straight(part, compared=True) for part in skipped),
            () if entry.tried else map(_why_not_whole, entry.changes),
        )
        reason = next(filter(None, reasons), None)
        gain = None
        wanted = measure or (not entry.known and (verify or len(entries) > 1))
        if reason is None and not entry.tried and wanted:
            reason, gain = _try_once(entry, view)
        if reason is None:
            return Decided(entry, Weldable(where, entry.what, entry.becomes, gain=gain))
        row = row or Weldable(where, entry.what, reason=reason)
    return row


def _why_not_whole(change: Change) -> str | None:
    """Why a weld cannot take the place of a module's whole forward, or None if it does not."""
    if not issubclass(change.weld, Tried):
        return None
    takes = change.settings.get("takes", change.weld.weld_takes)
    return why_not_straight(change.module, takes, compared=True)


def _try_once(entry: Proposal, view: View) -> tuple[str | None, float | None]:
    """Why a proposal does not compute the same, or None, and its gain in traffic.

    Equal configurations are tried once.
    """
    names = {id(part): name for name, part in entry.scope.named_modules()}
    changes = tuple(
        (names[id(change.module)], *change[1:-1], tuple(change.settings.items()))
        for change in entry.list_changes(entry.scope)
    )
    # Code that no longer runs may have read its layer's number.
    tried = (change.module for change in entry.changes if issubclass(change.weld, Tried))
    question = (f"tried {changes}", *map(read_numbers, (*entry.inner, *tried)))
    result: tuple[str | None, float | None] = view.ask_once(
        question, entry.scope, lambda: _try_proposal(entry, view.device(entry.scope)), False
    )
    return result


def _try_proposal(entry: Proposal, device: torch.device) -> tuple[str | None, float | None]:
    try:
        inputs = entry.inputs
        if inputs is None:
            twin = Twin(entry.scope, device, torch.float32)
            inputs_or_reason = probe.find_inputs(twin.module, device)
            if isinstance(inputs_or_reason, str):
                return inputs_or_reason, None
            inputs = tuple(inputs_or_reason)
        changes = entry.list_changes(entry.scope)
        reason = why_not_same(entry.scope, changes, inputs, device, drops=entry.drops)
        if reason is not None:
            return reason, None
        if entry.part is not None:
            fitting = probe.find_inputs(Twin(entry.part, device, torch.float32).module, device)
            inputs = () if isinstance(fitting, str) else tuple(fitting)
        part = entry.part or entry.scope
        changes = entry.list_changes(part)
        return None, measure_gain(part, changes, inputs, device) if inputs else None
    except Exception as error:
        return probe.read_refusal(error), None
