"""An optimizer's rule: the passes of its step, each an op with kernels and a reference."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, get_type_hints

import torch

from torchweld.dispatch import choice
from torchweld.dispatch.bare import BareOp, find_agreed
from torchweld.dispatch.warm.direct import make_direct
from torchweld.ops.optimizer import proof
from torchweld.ops.optimizer.batch import (
    Batch,
    Task,
    Tensors,
    is_foreign_to_kernels,
    make_rate,
    schema,
)
from torchweld.ops.optimizer.passes import Exchange, Part, Pass, across_rows, over_all
from torchweld.ops.optimizer.reference import number_of, read, sound, sound_only, write
from torchweld.ops.quantize_8bit import absmax_reference

BACKENDS = ("cpu", "cuda")
Updates = Iterator[tuple[torch.Tensor, torch.Tensor, Tensors]]

RULES: dict[str, Rule] = {}


class Rule:
    """An optimizer's rule.

    `settings` is a NamedTuple of numbers and flags: the last arguments of the rule's ops, and the
    fields of its struct in csrc/core/rules. `moments` says for each moment whether it has a sign.
    `update(p, g, moments, t, lr, settings)` returns the new parameter and moments; t, the step, and
    lr are float64 tensors of one number. An adaptive rule's update takes its ratio before the
    settings. Its `direction` takes the same arguments without lr and ratio, and returns the step
    whose squares are measured, and the new moments. If `has_companion`, the companion is the last
    of the moments that update takes and returns. `torchs(task)` runs torch's own step instead
    of the reference, and returns whether it could: it serves GPUs on which no kernel is proven.
    """

    def __init__(
        self,
        name: str,
        settings: type[Any],
        moments: Mapping[str, bool],
        update: Callable[..., Any],
        direction: Callable[..., tuple[torch.Tensor, Tensors]] | None = None,
        torchs: Callable[[Task], bool] | None = None,
        has_companion: bool = False,
    ) -> None:
        RULES[name] = self
        self.has_companion = has_companion
        self.name = name
        self.settings = settings
        # With every rule, sum_of_squares serves to clip gradients by their norm.
        self.sources = {"cuda": (*self.kernel_files("cuda", "cu"), "csrc/cuda/sum_of_squares.cu")}
        self.moments, self.signed = moments, tuple(moments.values())
        self._fields = get_type_hints(settings)
        self._update = update
        self._direction = direction
        self._torchs = torchs
        written = ("params", "masters", "moments", "absmaxes", "steps", "companions")
        self._op = self._define("", written)
        self.passes = self._passes()

    def kernel_files(self, folder: str, suffix: str) -> tuple[str, ...]:
        """The source of its kernels in a folder of csrc, and the header it is compiled with."""
        return f"csrc/{folder}/rule.{suffix}", f"csrc/core/rules/{self.name}.h"

    def read_settings(self, group: Mapping[str, Any]) -> Any:
        """The settings in a group's options: betas by their number, others by their name."""
        betas = {f"beta{i}": beta for i, beta in enumerate(group.get("betas", ()), 1)}
        values = {**self.settings._field_defaults, **group, **betas}
        return self.settings(*[kind(values[name]) for name, kind in self._fields.items()])

    @property
    def is_adaptive(self) -> bool:
        """Whether ratios of norms can scale its steps."""
        return self._direction is not None

    def backends(self, param: torch.Tensor) -> list[str]:
        """The backends with a kernel for this kind of parameter."""
        return [b for b in self._op.backends if self._op.why_not(b, (param,)) is None]

    def choose_for(self, param: torch.Tensor) -> str:
        """The backend for a parameter; on a GPU the one that all stored answers agree on."""
        if choice.forced is None and choice.is_on_gpu(param):
            return find_agreed(self.name, param.device.index)
        return choice.choose(self._op, (param,))

    def _define(self, suffix: str, writes: Collection[str]) -> BareOp:
        """The op of a pass."""
        name, of_rule = self.name + suffix, schema(writes, self.settings)
        return BareOp(name, of_rule, backends=BACKENDS)

    def _passes(self) -> tuple[Pass, ...]:
        passes = [
            Pass(self._find_absmaxes, Exchange.LARGEST, lambda task: bool(task.batch.splits)),
            Pass(self._step),
        ]
        self._absmaxes_op = self._define("_absmaxes", ["new_absmaxes"])
        if self._direction is not None:
            self._squares_op = self._define("_squares", ["sums"])
            adaptive = [Pass(self._find_squares, Exchange.SUM, _is_adapted)]
            passes = [*adaptive, Pass(self._find_ratios, None, _is_adapted), *passes]
        return tuple(passes)

    # --- Passes -------------------------------------------------------------------------------

    def _find_squares(self, task: Task) -> Iterable[Part]:
        batch = task.batch
        self.measure(task)
        assert task.sums is not None
        return map(over_all, task.sums, batch.wholes) if batch.is_sharded else ()

    def _find_ratios(self, task: Task) -> Iterable[Part]:
        assert task.ratios_of is not None
        assert task.sums is not None
        norms = task.sums.sqrt()
        task.ratios, task.sums = task.ratios_of(norms[:, 0], norms[:, 1]), None
        return ()

    def _find_absmaxes(self, task: Task) -> Iterable[Part]:
        batch = task.batch
        self.find_absmaxes(task)
        of_each = zip(itertools.cycle(batch.splits), batch.new_absmaxes)
        task.handed_on = [split.of_blocks(absmax) for split, absmax in of_each]
        return map(across_rows, task.handed_on, itertools.cycle(batch.wholes))

    def _step(self, task: Task) -> Iterable[Part]:
        batch = task.batch
        blocks = [bits.view(torch.float32) for bits in task.handed_on or ()]
        for i, absmax in enumerate(blocks):
            split = batch.splits[i % len(batch.splits)]
            batch.new_absmaxes[i].copy_(split.of_pieces(absmax))
        self.step(task)
        for kept, absmax in zip(batch.block_absmaxes, blocks, strict=True):
            kept.copy_(absmax)
        return ()

    # --- On one device ------------------------------------------------------------------------

    def step(self, task: Task) -> None:
        """The step of the batch's parameters."""
        if self._serve(self._op, task, steps=True):
            return
        automatic = choice.forced is None
        if not (automatic and self._torchs is not None and self._torchs(task)):
            if automatic:
                _say_what_it_costs(self.name, task.batch)
            self._reference(task)
        torch.autograd.graph.increment_version(task.batch.wholes)

    def find_absmaxes(self, task: Task) -> None:
        """Compute the absmax of split rows' pieces after this step, into `new_absmaxes`."""
        if self._serve(self._absmaxes_op, task):
            return
        batch, count = task.batch, len(task.batch.params)
        for i, (_, _, moments) in enumerate(self._updates(task)):
            stored = moments[:-1] if self.has_companion else moments
            new = zip(batch.new_absmaxes[i::count], sound_only(stored), strict=True)
            for absmax, moment in new:
                value = absmax_reference(moment, batch.edges[i])
                skip = None if task.found_inf is None else task.found_inf != 0
                absmax.copy_(value if skip is None else torch.where(skip, absmax, value))

    def measure(self, task: Task) -> None:
        """Sum the squares of each parameter and of its step, for an adaptive rule.

        `sums` is [parameters, 2], float64, over the local parts.
        """
        batch = task.batch
        empty = batch.params[0].new_empty
        task.sums = empty((len(batch.params), 2), dtype=torch.float64)
        if not self._serve(self._squares_op, task):
            task.sums = torch.stack([self._squares(task, i) for i in range(len(batch.params))])

    def _squares(self, task: Task, i: int) -> torch.Tensor:
        assert self._direction is not None
        p, g, moments = read(task, i, self.signed)
        settings = self._settings_of(task, i)
        u, moments = self._direction(p, g, moments, task.batch.step_number(i), settings)
        if task.batch.absmaxes and moments:
            u = torch.where(sound(moments), u, 0.0)
        return torch.stack([p.double().square().sum(), u.double().square().sum()])

    def _serve(self, op: BareOp, task: Task, steps: bool = False) -> bool:
        """Run the op's kernel; False if the reference has to serve this batch."""
        batch = task.batch
        kernel = self._kernel(op, task) if batch.has_kernel else None
        if kernel is None:
            return False
        device = batch.params[0].device
        scalars = (task.lr, task.ratios, task.grad_factor, task.found_inf, task.average_rate)
        # Kernels read numbers on their device, or on the CPU.
        numbers = [t if t is None or t.is_cpu else t.to(device) for t in scalars]
        if steps:
            # Before the kernel, which evicts a thousand tensors from the cache.
            torch.autograd.graph.increment_version(batch.list_written())
        try:
            rest = (task.sums, task.settings_of_each, task.whole_sizes, *task.settings)
            kernel(*batch.lists(), *numbers, *rest)
        except RuntimeError:
            # torch resolves negated inputs but not negated outputs; nothing is written yet.
            if not any(map(torch.is_neg, [*batch.params, *batch.moments])):
                raise
            return False
        return True

    def keep_step(self, task: Task, ascends: bool) -> KeptStep | None:
        """The step as one call of a CPU kernel; None if it takes more than that."""
        batch = task.batch
        p = batch.params[0]
        is_one_pass = type(self)._passes is Rule._passes and not (task.ratios_of or batch.splits)
        if not (is_one_pass and p.is_cpu and batch.has_kernel and choice.forced is None):
            return None
        is_lazy = (t.is_neg() or t._is_zerotensor() for some in batch.lists() for t in some)
        if (
            isinstance(batch.lr, torch.Tensor)
            or any(is_lazy)
            or (overload := self._op.kernel(p)) is None
        ):
            return None
        return KeptStep(overload, task, ascends)

    def _kernel(self, op: BareOp, task: Task) -> Any:
        p = task.batch.params[0]
        if choice.forced is None and choice.is_tried(p):
            return op.overload(proof.choose_on_gpu(self, task))
        return op.kernel(p)

    def _updates(self, task: Task) -> Updates:
        """Each parameter before the step and after it, and its new moments, in eager torch."""
        for i in range(len(task.batch.params)):
            before, g, moments = read(task, i, self.signed)
            if self.has_companion:
                moments.append(task.batch.companions[i])
            t = task.batch.step_number(i)
            scalars = [number_of(task.lr, i).to(t)]
            if self._direction is not None:
                scalars.append(torch.ones_like(t) if task.ratios is None else task.ratios[i].to(t))
            settings = self._settings_of(task, i)
            yield before, *self._update(before, g, moments, t, *scalars, settings)

    def _settings_of(self, task: Task, i: int) -> Any:
        """The settings of parameter i."""
        if task.settings_of_each is None:
            return task.settings
        row = task.settings_of_each[i].tolist()
        return self.read_settings(dict(zip(self._fields, row, strict=True)))

    def _reference(self, task: Task) -> None:
        """A step in eager torch, one parameter after another, on any device."""
        for i, update in enumerate(self._updates(task)):
            write(task, i, *update, self.signed, self.has_companion)


class KeptStep:
    """A step that is one call of a kernel, for later steps with other gradients and rates."""

    def __init__(self, overload: Any, task: Task, ascends: bool) -> None:
        batch = task.batch
        self._kernel = make_direct(overload, overload)
        self._batch, self._rate = batch, batch.lr
        self._written = batch.list_written()
        self._ascends = ascends
        factor = -torch.ones((), dtype=torch.float32, device="cpu") if ascends else None
        others = None, factor, None, task.average_rate, None, task.settings_of_each, ()
        self._arguments: list[Any] = [*batch.lists(), task.lr, *others, *task.settings]
        names = [argument.name for argument in overload._schema.arguments]
        # Where in the arguments are those that change.
        wanted = ("grads", "found_inf", "grad_factor", "lr")
        self._grads, self._found_inf, self._factor, self._lr = map(names.index, wanted)
        self._arguments[self._grads] = None  # each step has its own, and lets them go

    def __call__(
        self, factor: torch.Tensor | None = None, found_inf: torch.Tensor | None = None
    ) -> None:
        """Step with a factor of the gradients; if `found_inf` is not 0, nothing changes."""
        batch, arguments, usual = self._batch, self._arguments, self._arguments[self._factor]
        arguments[self._grads], arguments[self._found_inf] = batch.grads, found_inf
        if factor is not None:
            arguments[self._factor] = -factor if self._ascends else factor
        if batch.lr != self._rate:
            self._rate, arguments[self._lr] = batch.lr, make_rate(batch.lr)
        torch.autograd.graph.increment_version(self._written)
        try:
            self._kernel(*arguments)
        finally:
            arguments[self._grads], arguments[self._found_inf] = None, None
            arguments[self._factor] = usual


def _is_adapted(task: Task) -> bool:
    return task.ratios_of is not None


@functools.cache
def _say_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def _say_what_it_costs(rule: str, batch: Batch) -> None:
    """Warn about a step in eager torch on a GPU, where users expect a kernel."""
    first = batch.params[0]
    if first.device.type != "cuda" or is_foreign_to_kernels(first):
        return
    stored = sorted({str(m.dtype).removeprefix("torch.") for m in batch.moments})
    largest = (
        max(p.numel() for p in batch.params) * 4 * (2 + len(batch.moments) // len(batch.params))
    )
    _say_once(
        f"torchweld: no kernel is proven for {rule} with {', '.join(stored) or 'no'} states on"
        f" {first.device}; eager torch takes tens of launches a parameter and up to"
        f" {largest / 2**20:.0f} MB of temporaries. `torchweld doctor` says why"
    )
