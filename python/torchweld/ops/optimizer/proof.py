"""Which backend steps a batch of parameters on a GPU: its class, and the sample to check."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

import torch

from torchweld.dispatch import proof
from torchweld.dispatch.choice import use_backend
from torchweld.dispatch.proof import Question, Results
from torchweld.ops.optimizer.batch import Batch, Task, Tensors, choose_few
from torchweld.ops.optimizer.passes import Pass, run
from torchweld.ops.optimizer.reference import read
from torchweld.registry import EAGER


class Checkable(Protocol):
    """The part of a rule that a question uses."""

    name: str
    signed: tuple[bool, ...]
    passes: tuple[Pass, ...]

    def backends(self, param: torch.Tensor) -> list[str]:
        """The backends with a kernel for this kind of parameter."""


def choose_on_gpu(rule: Checkable, task: Task) -> str:
    """The backend for a batch on this GPU; the first batch of its class makes the check."""
    device = task.batch.params[0].device
    call_class = (device.index, *_class_of(rule, task))
    return proof.pick(call_class, lambda: make_question(rule, task))[0]


def _class_of(rule: Checkable, task: Task) -> tuple[Any, ...]:
    """The key of an answer: the rule, the codec and the options in use."""
    batch = task.batch
    count, lists = len(batch.params), batch.lists()
    return (
        rule.name,
        *(some[0].dtype if some else None for some in lists),
        *(m.dtype for m in batch.moments[::count]),
        *(value is not None for value in (task.ratios_of, task.grad_factor, task.found_inf)),
        *(value if isinstance(value, bool) else value != 0 for value in task.settings),
    )


def make_question(rule: Checkable, task: Task) -> Question:
    """Make the question for a step: one step of clones of some parameters.

    Nothing is timed, since a kernel moves a fraction of the bytes that several passes move.
    """
    name, *how = _class_of(rule, task)
    draw_sample = functools.cache(lambda: clone(task, choose_few(task.batch.params)))

    def run_step(backend: str, sample: Task) -> Results:
        """Parameters, moments and counts after a step of clones."""
        stepped = clone(sample)
        with torch.no_grad(), use_backend(backend):
            run(rule.passes, [stepped], lambda *_: None)  # without an exchange with other devices
        return _read_state(stepped, rule.signed)

    return Question(
        kind={"op": name, "step": [str(word).removeprefix("torch.") for word in how]},
        device=task.batch.params[0].device,
        fallback=EAGER,
        candidates=rule.backends(task.batch.params[0]),
        run=lambda backend: run_step(backend, draw_sample()),
        trusted=lambda: run_step(EAGER, draw_sample()),
        exact=lambda: run_step(EAGER, _widen(draw_sample(), rule.signed)),
    )


def clone(task: Task, chosen: Sequence[int] | None = None) -> Task:
    """A separate task over clones of the chosen parameters, or of all parameters."""
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
    """The task's function of norms, for some parameters; it may hold the rates of all."""
    every, count = task.ratios_of, len(task.batch.params)
    assert every is not None

    def of_some(norms: torch.Tensor, of_steps: torch.Tensor) -> torch.Tensor:
        ones = norms.new_ones(count)
        at = torch.tensor(list(chosen), device=norms.device)
        return every(ones.index_put((at,), norms), ones.index_put((at,), of_steps))[at]

    return of_some


def _widen(task: Task, signed: Sequence[bool]) -> Task:
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


def _read_state(task: Task, signed: Sequence[bool]) -> Results:
    """Parameters, moments and counts after the step, each flattened into one tensor."""
    batch, count = task.batch, len(task.batch.params)
    every = [read(task, i, signed) for i in range(count)]
    by_name: dict[str, Tensors] = {"params": [p for p, _, _ in every]}
    for k in range(len(batch.moments) // count):
        by_name[f"moment {k + 1}"] = [moments[k] for _, _, moments in every]
    by_name["steps"] = batch.steps
    return {name: torch.cat([t.detach().flatten() for t in some]) for name, some in by_name.items()}
