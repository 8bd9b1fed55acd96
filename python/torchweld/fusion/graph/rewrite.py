"""Puts proven welds into a graph of Dynamo."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchweld.fusion import refusals
from torchweld.fusion.graph.prove import Difference, Late, Proposal, Prover, autocast_as
from torchweld.fusion.graph.record import Ref, Step, find_places, find_storage, list_refs
from torchweld.fusion.graph.trace import CannotTraceError, Trace, list_bodies

Finder = Callable[[Any, int], Iterable[Proposal]]


@dataclass(frozen=True)
class Placed:
    """A weld, or one that was not made, and where its model computes that."""

    op: str
    module: str  # the path of the module
    line: str  # file and line
    reason: str = ""  # "" if it is welded


@dataclass(frozen=True)
class Lazy:
    """A result of the graph that is computed when it is read."""

    at: int
    classes: int
    steps: tuple[Any, ...]  # after the linear layer
    weight: int | None  # places among the graph's inputs; None: devices share the weight
    bias: int | None
    row: int | None  # is added to the layer's result


@dataclass
class Rewritten:
    """What became of a graph."""

    placed: list[Placed] = field(default_factory=list)
    lazy: list[Lazy] = field(default_factory=list)

    def count(self) -> int:
        return sum(not each.reason for each in self.placed)


def rewrite(
    module: torch.fx.GraphModule,
    finders: Iterable[Finder],
    leaves_out: Callable[[torch.fx.Node], bool] = lambda node: False,
) -> Rewritten:
    """Put ops of torchweld into a graph where they are proven; else leave it as it is.

    `leaves_out` says of a node that it stays as it is.
    """
    made = Rewritten()
    for body in list_bodies(module):
        inner = rewrite(body, finders, leaves_out)
        made.placed += inner.placed
    before = copy.deepcopy(module.graph)
    try:
        trace = Trace.of(module)
    except Exception as error:
        refusals.raise_others(error)
        what = str(error).split("\n")[0]
        if not isinstance(error, CannotTraceError):
            what = f"{type(error).__name__}: {what}"
        made.placed.append(Placed("", "", "", f"the graph cannot be read: {what}"))
        return made
    wanted = trace.describe_results()
    for keep_strides in (False, True):
        writing = _Writing(module, trace, leaves_out, keep_strides)
        writing.place_all(list(finders))
        if not writing.welded:
            break
        if not writing.relays or writing.is_like(wanted):
            made.placed += writing.placed
            made.lazy += writing.lazy
            return made
        module.graph = copy.deepcopy(before)
        module.recompile()
        trace = Trace.of(module)
    made.placed += [each for each in writing.placed if each.reason]
    return made


class _Writing:
    """One attempt to put welds into a graph."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        trace: Trace,
        leaves_out: Callable[[torch.fx.Node], bool],
        keep_strides: bool,
    ) -> None:
        self.module, self.trace, self.record = module, trace, trace.record
        self.leaves_out, self.keep_strides = leaves_out, keep_strides
        self.prover = Prover(trace.record, trace.mode)
        self.prover.casts = trace.casts
        self.placed: list[Placed] = []
        self.lazy: list[Lazy] = []
        self.welded = 0
        self.relays = False  # whether a result has other strides or shares other memory than before
        self._added: set[torch.fx.Node] = set()
        self._claimed: set[int] = set()
        self._steps: dict[torch.fx.Node, list[int]] = {}
        self._oldest: dict[int, int] = {}  # the first step that makes a tensor in this memory
        for number, x in enumerate(self.record.values):
            if number in self.record.made_by or number in trace.maker:  # not within one step
                at, memory = self.record.made_by.get(number, -1), find_storage(x)
                self._oldest[memory] = min(at, self._oldest.get(memory, at))
        for at, step in enumerate(self.record.steps):
            self._steps.setdefault(trace.nodes[step.node], []).append(at)

    def place_all(self, finders: list[Finder]) -> None:
        with self.trace.quietly():
            for find in finders:
                for at, step in enumerate(self.record.steps):
                    is_gone = self.trace.nodes[step.node]._erased  # with a weld, as it is not read
                    if at not in self._claimed and not is_gone:
                        self._place_one(find(self.record, at))
        if self.welded:
            self.module.graph.lint()
            self.module.recompile()

    def _place_one(self, proposals: Iterable[Proposal]) -> None:
        """Place the first proposal that is proven; else keep the one that was proven the most."""
        closest: Difference | None = None
        for proposal in proposals:
            region = self.prover.prove(proposal)
            if isinstance(region, set):
                if region & self._claimed:
                    continue
                reason = self._put(proposal, region)
                if reason is None:
                    self._claimed |= region
                    self.welded += 1
                    self._note(proposal, max(region), "")
                    return
                region = Difference(proposal, len(region), self.record.steps[max(region)], reason)
            if closest is None or region.same > closest.same:
                closest = region  # the one that differs the latest
        if closest is not None:
            proposal = closest.proposal
            made = self.record.made_by.get(proposal.outputs[-1])
            at = made if closest.step is None else self.record.steps.index(closest.step)
            if at not in self._claimed:
                self._note(proposal, at, closest.text)

    def _note(self, proposal: Proposal, at: int | None, reason: str) -> None:
        node = None if at is None else self.trace.nodes[self.record.steps[at].node]
        path, line = ("", "") if node is None else (read_path(node), _read_line(node))
        self.placed.append(Placed(proposal.op, path, line, reason))

    # --- One weld

    def _put(self, proposal: Proposal, region: set[int]) -> str | None:
        """Put a proven op into the graph, or say why not."""
        steps = [self.record.steps[at] for at in sorted(region)]
        nodes = {self.trace.nodes[step.node] for step in steps}
        if len({step.epoch for step in steps}) > 1:
            return "the state of autocast or of gradients changes in it"
        if any(map(self.leaves_out, nodes)):
            return "the filter leaves it out"
        producers = [self.trace.list_returning(number) for number in proposal.outputs]
        inputs = [self.trace.maker.get(number) for number in proposal.inputs]
        if not all(producers) or not all(inputs):
            return "a tensor between it and the rest is inside of a function of torch"
        anchor = self._find_anchor([n for group in producers for n in group], inputs)
        if anchor is None:
            return "an input is computed after a result is used"
        if self._is_written(proposal, region, anchor):
            return "an operation writes to one of its tensors in place"
        dead = self._list_dead(proposal, region, nodes, {n for each in producers for n in each})
        if dead is None:
            return "another operation reads an inner value"
        results = self._try(proposal, steps[-1], min(region))
        if isinstance(results, str):
            return results
        if (late := proposal.late) is not None:
            if not producers[0][0].meta["example_value"].requires_grad:
                return "no gradient is needed"
            if self.record.values[late.hidden].is_meta:
                return "there is nothing to compute on the meta device"
            if self._find_inputs((late.weight, late.bias, late.row)) is None:
                return "the weight of the last layer is computed"
            row = None if late.row is None else self.trace.maker[late.row]
            if row is not None and row.meta["example_value"].requires_grad:
                return "what is added to the logits needs a gradient"
        self._insert(proposal, results, producers, inputs, anchor)
        if late is not None:
            self._make_lazy(late)
        for node in sorted(dead, key=self.trace.place.__getitem__, reverse=True):
            self._erase(node)
        return None

    def _find_anchor(self, producers: list[Any], inputs: list[Any]) -> torch.fx.Node | None:
        """The node before which the op runs: after its inputs, before who reads its results."""
        place = self.trace.place
        at = max(min(place[n] for n in producers), *(place[n] + 1 for n in inputs))
        while self.trace.nodes[at]._erased:
            at += 1
        anchor = self.trace.nodes[at]
        for node in producers:
            for user in node.users:
                if user in producers:
                    continue
                if place[user] < place[anchor] or (
                    user in self._added and place[user] == place[anchor]
                ):
                    return None
        if any(n in self._added and place[n] == place[anchor] for n in inputs):
            # It was added before the same node, and so comes first.
            return anchor
        return anchor

    def _is_written(self, proposal: Proposal, region: set[int], anchor: torch.fx.Node) -> bool:
        """Whether something writes between its steps, or later to what its node may save."""
        first, last, place = min(region), max(region), self.trace.place[anchor]
        saved = {*proposal.inputs, *proposal.outputs} - {*proposal.unsaved}
        values = (self.record.values[n] for n in saved)
        storages = {find_storage(x) for x in values}
        for at, step in enumerate(self.record.steps[first:], first):
            between = at <= last or step.node <= place
            own = at in region  # to memory that it makes
            if step.writes and not own and (between or not storages.isdisjoint(step.writes)):
                return True
        return False

    def _list_dead(
        self, proposal: Proposal, region: set[int], nodes: set[Any], producers: set[Any]
    ) -> set[torch.fx.Node] | None:
        """The nodes that nobody reads once the op has taken their place; None if one is needed."""
        dead: set[torch.fx.Node] = set()
        output = self.trace.nodes[-1]
        leaks = () if proposal.late is None else proposal.late.results
        leaking = {n for number in leaks for n in self.trace.list_returning(number)}
        # Casts that do nothing and questions about sizes have no steps, and of some views nothing
        # is read. One may read another one.
        idle: set[torch.fx.Node] = set()
        waiting = list(nodes)
        while waiting:
            for user in waiting.pop().users:
                is_idle = user.op != "output" and user not in idle and self._does_nothing(user)
                if is_idle and user not in self.trace.effects:
                    idle.add(user)
                    waiting.append(user)
        idle -= self._added
        for node in sorted(nodes | producers | idle, key=self.trace.place.__getitem__)[::-1]:
            users = set(node.users) - ({output} if node in leaking else set())
            needed = node not in producers and not users <= (dead | leaking)
            rest = [at for at in self._steps.get(node, ()) if at not in region]
            rest_acts = any(
                self.record.steps[at].writes or self.record.steps[at].is_random for at in rest
            )
            if not needed and not rest_acts:
                dead.add(node)
            elif node in nodes and not self._is_view_of_inputs(proposal, node, region):
                return None
        return dead

    def _does_nothing(self, node: torch.fx.Node) -> bool:
        """Whether a node computes nothing, or nothing that is read."""
        steps = [self.record.steps[at] for at in self._steps.get(node, ())]
        return not steps or not (node.users or any(s.writes or s.is_random for s in steps))

    def _is_view_of_inputs(self, proposal: Proposal, node: Any, region: set[int]) -> bool:
        """Whether a node only looks at the inputs in another shape."""
        known = set(proposal.inputs)
        for at in sorted(region):
            step = self.record.steps[at]
            if step.is_view and set(list_refs(step.args)) <= known:
                known |= set(step.outs)
        inside = [self.record.steps[at] for at in self._steps.get(node, ()) if at in region]
        return all(step.is_view and set(step.outs) <= known for step in inside)

    def _try(self, proposal: Proposal, step: Step, first: int) -> list[Any] | str:
        """What the op returns for fake tensors, or why it cannot stand there."""
        given = [self.record.values[number] for number in proposal.inputs]
        try:
            with torch.no_grad(), autocast_as(self.trace.casts[step.epoch]):
                made = proposal.run(*given, *proposal.constants)
        except Exception as error:
            refusals.raise_others(error)
            return f"torchweld refuses it: {type(error).__name__}: {str(error)[:160]}"
        results = list(made) if isinstance(made, tuple) else [made]
        memory = {find_storage(x) for x in given}
        for x, number in zip(results, proposal.outputs, strict=True):
            y = self.record.values[number]
            if (x.shape, x.dtype, x.device) != (y.shape, y.dtype, y.device):
                return f"it would return {_show(x)} in place of {_show(y)}"
            if find_places(x) != find_places(y):
                return "devices would have other parts of its result"
            is_laid_alike = str(x.stride()) == str(y.stride())
            if self.keep_strides and not is_laid_alike:
                return "its result would have other strides"
            is_own = self._oldest[find_storage(y)] >= first and find_storage(x) not in memory
            is_at_start = str(x.storage_offset()) == str(y.storage_offset())
            self.relays |= not (is_laid_alike and is_at_start and is_own)
        return results

    def _insert(
        self,
        proposal: Proposal,
        made: list[Any],
        producers: list[list[Any]],
        inputs: list[Any],
        anchor: torch.fx.Node,
    ) -> None:
        graph = self.module.graph
        with graph.inserting_before(anchor):
            new = graph.call_function(_bind(proposal.run, proposal.constants), tuple(inputs))
            new.meta["example_value"] = tuple(made) if len(made) > 1 else made[0]
            results = [new]
            if len(made) > 1:
                results = [
                    graph.call_function(operator.getitem, (new, i)) for i in range(len(made))
                ]
        for key in ("nn_module_stack", "stack_trace"):
            if key in producers[-1][0].meta:
                new.meta[key] = producers[-1][0].meta[key]
        for node in {new, *results}:
            self._added.add(node)
            self.trace.place[node] = self.trace.place[anchor]
        for group, result, x, number in zip(
            producers, results, made, proposal.outputs, strict=True
        ):
            result.meta["example_value"] = x
            for old in group:
                old.replace_all_uses_with(result)
                self.trace.forget(old)
            self.trace.maker[number] = result
            self.trace.note(result, Ref(number))

    def _erase(self, node: torch.fx.Node) -> None:
        if node.op in ("placeholder", "get_attr") or node.users:
            return
        self.trace.erase(node)

    # --- Results that are computed when they are read

    def _find_inputs(self, numbers: Iterable[int | None]) -> list[int | None] | None:
        """The places of tensors among the graph's inputs."""
        holders = [node for node in self.trace.nodes if node.op == "placeholder"]
        places: list[int | None] = []
        for number in numbers:
            maker = None if number is None else self.trace.maker.get(number)
            if number is not None and maker not in holders:
                return None
            places.append(None if maker is None else holders.index(maker))
        return places

    def _make_lazy(self, late: Late) -> None:
        """Return the last layer's input in the place of logits."""
        places = self._find_inputs((late.weight, late.bias, late.row))
        assert places is not None
        output = self.trace.nodes[-1]
        results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        for at, node in enumerate(results):
            ref = self.trace.value.get(node) if isinstance(node, torch.fx.Node) else None
            if isinstance(ref, Ref) and ref.at in late.results:
                results[at] = self.trace.maker[late.hidden]
                classes = int(self.record.values[ref.at].shape[-1])
                self.lazy.append(Lazy(at, classes, late.results[ref.at], *places))
        output.args = (tuple(results),)

    def is_like(self, wanted: list[Any]) -> bool:
        """Whether the graph runs with the welds, and returns what it returned without them."""
        try:
            got = Trace.of(self.module).describe_results()
        except Exception as error:
            refusals.raise_others(error)
            return False
        lazy = {each.at for each in self.lazy}
        pairs = enumerate(zip(got, wanted, strict=True))
        return all(at in lazy or a == b for at, (a, b) in pairs)


def _bind(run: Callable[..., Any], constants: tuple[Any, ...]) -> Callable[..., Any]:
    """A function of tensors only, with a name for the graph's code."""

    def call(*tensors: Any) -> Any:
        return run(*tensors, *constants)

    call.__name__ = call.__qualname__ = run.__name__
    call.__module__ = run.__module__
    return call


def _show(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}"


_START = re.compile(r"^L\['\w+'\](\.__self__)?\.?")
_PART = re.compile(r"(?:\._modules)?\[['\"]?(\w+)['\"]?\]")


def read_path(node: torch.fx.Node) -> str:
    """The name of the module that a node belongs to, as in `named_modules`."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return read_name(stack[-1][0]) if stack else ""


def read_name(path: str) -> str:
    """The name of a module, as in `named_modules`, that Dynamo knows by this path."""
    return _PART.sub(r".\1", _START.sub("", path)).removeprefix(".")


def leaving_out(names: Collection[str]) -> Callable[[torch.fx.Node], bool]:
    """Whether a node belongs to one of these modules, by their names or texts of their ids."""
    return lambda node: any(name in names for name in _list_modules(node))


def _list_modules(node: torch.fx.Node) -> Iterator[str]:
    """Names of the modules around a node, and the texts by which Dynamo knows them."""
    stack = node.meta.get("nn_module_stack") or {}
    yield from stack
    for path, *_ in stack.values():
        yield read_name(path)
    if not stack:
        yield ""


_FRAME = re.compile(r'File "(.+?)", line (\d+), in ')
_OURS = str(Path(__file__).parent)


def _read_line(node: torch.fx.Node) -> str:
    """The file and line of the model's code that a node is of."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [frame for frame in frames if not frame[0].startswith(_OURS)]
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""
