"""The plan of what to weld in a model, made before any change."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from torchweld.fuse import probe
from torchweld.fuse.patterns import PATTERNS
from torchweld.fuse.traffic import gain
from torchweld.fuse.twin import CannotCopyError, Twin
from torchweld.fuse.verify import why_different
from torchweld.fuse.view import Left, Proposal, View
from torchweld.fuse.weld import Weld, find_welds
from torchweld.table import Table

Filter = Callable[[torch.nn.Module, str], bool]


@dataclass(frozen=True)
class Weldable:
    """A row of `explain`: one module of a model.

    Attributes:
        where: its name in the model.
        what: what it is.
        becomes: the torchweld function that runs in its place; "" if it is left alone.
        welded: whether it is welded already.
        gain: the factor by which its passes between GEMMs move fewer bytes, forward and backward;
        None if not measured.
        reason: why it is left alone; "" if it is welded.
    """

    where: str
    what: str
    becomes: str = ""
    welded: bool = False
    gain: float | None = None
    reason: str = ""


class WeldReport(Sequence[Weldable]):
    """What fuse() changes in a model or has changed, and what it leaves alone: a table."""

    def __init__(self, rows: Iterable[Weldable]) -> None:
        self._rows = tuple(rows)

    @overload
    def __getitem__(self, at: int) -> Weldable: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Weldable]: ...

    def __getitem__(self, at: int | slice) -> Weldable | Sequence[Weldable]:
        return self._rows[at]

    def __len__(self) -> int:
        return len(self._rows)

    def table(self) -> Table:
        """One line per group of modules that differ only in the numbers in their names."""
        told = any(row.gain is not None for row in self._rows)
        headers = ["where", "what", "with", *(["traffic"] if told else []), ""]
        table = Table(headers, numbers_from=99)
        groups: dict[Any, list[Weldable]] = {}
        for row in self._rows:
            where = re.sub(r"\d+", "*", row.where)
            key = (where, row.what, row.becomes, row.welded, row.reason)
            groups.setdefault(key, []).append(row)
        for (_, what, becomes, welded, reason), rows in groups.items():
            where = _common([row.where for row in rows]) or "(the model)"
            where += f" ({len(rows)}x)" if len(rows) > 1 else ""
            note = f"left alone: {reason}" if reason else "welded" if welded else "to be welded"
            more = rows[0].gain
            less = "" if more is None else f"{more:.1f}x less" if more >= 1.05 else "the same"
            cells = [where, what, becomes, *([less] if told else []), note]
            table.add(*cells, style="dim" if reason else "")
        return table

    def __str__(self) -> str:
        if not self._rows:
            return "torchweld has a fused kernel for nothing in this model"
        return self.table().plain()

    def __repr__(self) -> str:
        return str(self)


def _common(names: Sequence[str]) -> str:
    """The names merged into one, with a star where their numbers differ."""
    parts = zip(*(re.split(r"(\d+)", name) for name in names), strict=True)
    return "".join(part[0] if len(set(part)) == 1 else "*" for part in parts)


def rows_of_welds(model: torch.nn.Module) -> Iterator[Weldable]:
    """One row per existing weld."""
    for name, module in find_welds(model):
        if module.weld_becomes:
            yield Weldable(name, module.welded_from.__name__, module.weld_becomes, welded=True)


@dataclass(frozen=True)
class Decided:
    """A proposal that was accepted, with its row."""

    proposal: Proposal
    row: Weldable


def decide(
    model: torch.nn.Module, filter_fn: Filter | None, verify: bool
) -> tuple[list[Decided], list[Weldable]]:
    """The changes to make, and rows for the modules left alone. Changes nothing."""
    with probe.isolated({tensor.device for tensor in (*model.parameters(), *model.buffers())}):
        return _decide(View(model), filter_fn, verify)


def _decide(
    view: View, filter_fn: Filter | None, verify: bool
) -> tuple[list[Decided], list[Weldable]]:
    claimed = {
        id(module.get_submodule(inner))
        for _, module in find_welds(view.model)
        for inner in module.weld_inner
    }
    accepted: list[Decided] = []
    unasked = {id(module): row for module, row in _unaskable(view)}
    left: list[Weldable] = [row for row in unasked.values() if row is not None]
    for pattern, module in itertools.product(PATTERNS, list(view.modules.values())):
        # Inside a weld the order in which submodules run has changed.
        if isinstance(module, Weld) or id(module) in unasked or id(module) in claimed:
            continue
        found = [entry for entry in pattern(module, view) if id(entry.module) not in claimed]
        for _, group in itertools.groupby(found, key=lambda entry: id(entry.module)):
            entries = list(group)
            answer = _first_that_fits(entries, view, filter_fn, verify, claimed)
            if isinstance(answer, Decided):
                proposal = answer.proposal
                accepted.append(answer)
                claimed |= {id(change.module) for change in proposal.changes}
                claimed |= {id(part) for part in proposal.inner}
            elif answer is not None:
                left.append(answer)
    return accepted, left


def _unaskable(view: View) -> Iterator[tuple[torch.nn.Module, Weldable | None]]:
    """Modules that recognisers skip, with a row for those that are not inside another one."""
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


def _first_that_fits(
    entries: Sequence[Proposal | Left],
    view: View,
    filter_fn: Filter | None,
    verify: bool,
    claimed: set[int],
) -> Decided | Weldable | None:
    row = None
    for entry in entries:
        where = view.names.get(id(entry.module), "")
        if isinstance(entry, Left):
            row = row or Weldable(where, entry.what, reason=entry.reason)
            continue
        changed = [change.module for change in entry.changes]
        if any(id(module) in claimed for module in (*changed, *entry.inner)):
            continue
        if filter_fn is not None and not all(
            filter_fn(module, view.names[id(module)]) for module in changed
        ):
            return Weldable(where, entry.what, reason="the filter leaves it out")
        reasons = (view.why_not_inner(part, part in changed) for part in entry.inner)
        reason = next(filter(None, reasons), None)
        less = None
        if reason is None and (verify or len(entries) > 1):
            reason, less = _tried(entry, view)
        if reason is None:
            return Decided(entry, Weldable(where, entry.what, entry.becomes, gain=less))
        row = row or Weldable(where, entry.what, reason=reason)
    return row


def _tried(entry: Proposal, view: View) -> tuple[str | None, float | None]:
    """Why it does not compute the same, and its gain in traffic. Tried once per configuration."""
    names = {id(part): name for name, part in entry.scope.named_modules()}
    changes = tuple(
        (names[id(change.module)], *change[1:-1], tuple(change.settings.items()))
        for change in entry.changes
    )
    question = f"tried {changes}"
    found: tuple[str | None, float | None] = view.once(
        question, entry.scope, lambda: _try(entry, view.device(entry.scope))
    )
    return found


def _try(entry: Proposal, device: torch.device) -> tuple[str | None, float | None]:
    try:
        inputs = entry.inputs
        if inputs is None:
            twin = Twin(entry.scope, device, torch.float32)
            searched = probe.fitting(twin.module, device)
            if isinstance(searched, str):
                return searched, None
            inputs = tuple(searched)
        changes = entry.changes
        reason = why_different(entry.scope, changes, inputs, device, drops=entry.drops)
        if reason is not None:
            return f"it computes something else: {reason}", None
        if entry.part is not None:
            fitting = probe.fitting(Twin(entry.part, device, torch.float32).module, device)
            inputs = () if isinstance(fitting, str) else tuple(fitting)
        return None, gain(entry.part or entry.scope, changes, inputs, device) if inputs else None
    except CannotCopyError as error:
        return str(error), None
    except Exception as error:
        return f"it could not be tried ({probe.in_words(error)})", None
