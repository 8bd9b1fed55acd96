"""A trial of a rule's kernels on the current GPU: one step of some parameters, on clones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

import torch

from torchweld.dispatch import evidence, proof
from torchweld.dispatch import trial as trials
from torchweld.dispatch.choice import use_backend
from torchweld.ops.optimizer.batch import Batch, Task, Tensors
from torchweld.ops.optimizer.passes import Pass, run
from torchweld.ops.optimizer.reference import read
from torchweld.registry import EAGER

# Limit of the elements in a trial.
MOST_ELEMENTS = 2**22
_served: dict[tuple[Any, ...], str] = {}


class Rule(Protocol):
    """What a trial needs of a rule."""

    name: str
    signed: tuple[bool, ...]
    passes: tuple[Pass, ...]

    def backends(self, param: torch.Tensor) -> list[str]:
        """The backends with a kernel for a parameter like this."""


def proven(rule: Rule, task: Task) -> str:
    """The backend that serves such a batch on this GPU, tried now if the batch is the first."""
    of = _class_of(rule, task)
    if (known := _served.get(of)) is not None:
        return known
    trial = StepTrial(rule, task)
    chosen = trials.checked(trial, task.batch.params[0].device.index)
    if trial.may_run():
        _served[of] = chosen
    return chosen


def _class_of(rule: Rule, task: Task) -> tuple[Any, ...]:
    """What a verdict holds for: the rule, the codec and the options in use."""
    batch = task.batch
    count, lists = len(batch.params), batch.lists()
    return (
        rule.name,
        batch.params[0].device.index,
        *(some[0].dtype if some else None for some in lists),
        *(m.dtype for m in batch.moments[::count]),
        *(value is not None for value in (task.ratios_of, task.grad_factor, task.found_inf)),
        *(value if isinstance(value, bool) else value != 0 for value in task.settings),
    )


class StepTrial(trials.OnGpu):
    """The trial of a step like this one."""

    def __init__(self, rule: Rule, task: Task) -> None:
        self._rule, self._task = rule, task
        self.backends = rule.backends(task.batch.params[0])
        self._judged: tuple[Task, proof.Judge] | None = None

    @property
    def key(self) -> str:
        """The class of steps in words."""
        name, _, *rest = _class_of(self._rule, self._task)
        return f"{name} step, {' '.join(str(word).removeprefix('torch.') for word in rest)}"

    def against(self, backend: str) -> str | None:
        """Why evidence does not take this backend."""
        gpu = self._task.batch.params[0].device.index
        return None if evidence.is_proven(self._rule.name, backend, gpu) else evidence.UNPROVEN

    def fault(self, backend: str) -> str | None:
        """The errors of a step of clones of some parameters."""
        if self._judged is None:
            some = clone(self._task, _chosen(self._task.batch))
            exact = self._results(EAGER, _wide(some, self._rule.signed))
            self._judged = (some, proof.Judge(exact, self._results(EAGER, some)))
        some, judge = self._judged
        return judge.fault_of(lambda: self._results(backend, some))

    def times(self, backends: Sequence[str]) -> Mapping[str, float]:
        """Never asked for: a kernel moves a fraction of the bytes of a step in several passes."""
        raise NotImplementedError

    def _results(self, backend: str, task: Task) -> proof.Results:
        """Parameters, moments and counts after a step of clones."""
        task = clone(task)
        with torch.no_grad(), use_backend(backend):
            run(self._rule.passes, [task], lambda *_: None)  # no exchange with other devices
        return _state(task, self._rule.signed)


def clone(task: Task, chosen: Sequence[int] | None = None) -> Task:
    """A separate task over clones of the chosen parameters or of all."""
    batch, count = task.batch, len(task.batch.params)
    chosen = range(count) if chosen is None else chosen
    lists: dict[str, Any] = {}
    for field in fields(Batch):
        value = getattr(batch, field.name)
        if not (isinstance(value, list) and value and isinstance(value[0], torch.Tensor)):
            continue
        picked = [value[at + i] for at in range(0, len(value), count) for i in chosen]
        lists[field.name] = [t.detach().clone() for t in picked]
    lists["splits"] = [batch.splits[i] for i in chosen] if batch.splits else []
    wholes = [batch.wholes[i] for i in chosen] if batch.is_sharded else lists["params"]
    lr = task.lr if task.lr.numel() == 1 else task.lr[list(chosen)]
    ratios = task.ratios if task.ratios is None else task.ratios[list(chosen)]
    ratios_of = task.ratios_of
    if ratios_of is not None:
        ratios_of, ratios = _ratios_of(task, chosen), None
    # A skipped step would prove nothing.
    found_inf = None if task.found_inf is None else torch.zeros_like(task.found_inf)
    copied = Batch(**lists | {"wholes": wholes, "is_sharded": batch.is_sharded})
    return replace(
        task,
        batch=copied,
        lr=lr,
        found_inf=found_inf,
        ratios=ratios,
        ratios_of=ratios_of,
        sums=None,
        handed_on=None,
    )


def _ratios_of(task: Task, chosen: Sequence[int]) -> Any:
    """The task's function of norms for some parameters; it may hold the rates of all."""
    every, count = task.ratios_of, len(task.batch.params)
    assert every is not None

    def of_some(norms: torch.Tensor, of_steps: torch.Tensor) -> torch.Tensor:
        ones = norms.new_ones(count)
        at = torch.tensor(list(chosen), device=norms.device)
        return every(ones.index_put((at,), norms), ones.index_put((at,), of_steps))[at]

    return of_some


def _chosen(batch: Batch) -> list[int]:
    """The smallest parameter, and others as long as they have few enough elements together."""
    sizes = [p.numel() for p in batch.params]
    by_size = sorted(range(len(sizes)), key=lambda i: (sizes[i] == 0, sizes[i]))
    found, elements = by_size[:1], sizes[by_size[0]]
    for i in reversed(by_size[1:]):
        if len(found) < 8 and elements + sizes[i] <= MOST_ELEMENTS:
            found.append(i)
            elements += sizes[i]
    return found


def _wide(task: Task, signed: Sequence[bool]) -> Task:
    """The same step in float64, without codecs."""
    batch, count = task.batch, len(task.batch.params)
    every = [read(replace(task, grad_factor=None), i, signed) for i in range(count)]
    wide = Batch(
        params=[p.double() for p, _, _ in every],
        grads=[g.double() for _, g, _ in every],
        moments=[m[k].double() for k in range(len(batch.moments) // count) for _, _, m in every],
        steps=[step.clone() for step in batch.steps],
        is_sharded=batch.is_sharded,
    )
    wide.wholes = batch.wholes if batch.is_sharded else wide.params
    return replace(task, batch=wide)


def _state(task: Task, signed: Sequence[bool]) -> proof.Results:
    """Parameters, moments and counts after the step, each flattened into one tensor."""
    batch, count = task.batch, len(task.batch.params)
    every = [read(task, i, signed) for i in range(count)]
    found: dict[str, Tensors] = {"params": [p for p, _, _ in every]}
    for k in range(len(batch.moments) // count):
        found[f"moment {k + 1}"] = [moments[k] for _, _, moments in every]
    found["steps"] = batch.steps
    return {name: torch.cat([t.detach().flatten() for t in some]) for name, some in found.items()}
