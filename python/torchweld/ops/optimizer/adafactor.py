"""The step of Adafactor, with the rules of torch and of transformers.

Second moments are averages: over rows and over columns for a matrix, one per element for any other
tensor. There is a first moment if beta1 is not 0. csrc/core/adafactor.h has the formulas.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim._adafactor import adafactor

from torchweld.ops.optimizer.batch import Batch, Task, Tensors
from torchweld.ops.optimizer.passes import Exchange, Part, Pass
from torchweld.ops.optimizer.reference import Read, number_of, read
from torchweld.ops.optimizer.rule import Rule, Updates
from torchweld.ops.optimizer.torchs import take_torchs_step

Sums = list[tuple[torch.Tensor, tuple[int, ...]]]  # over these dimensions of the parameter
Update = Generator[Any, Tensors, None]
# The passes before the step, named for their sums: squares over rows and over columns; averages
# over columns; squares of parameters and of directions over all elements.
_MEASURES = ("_squares", "_averages", "_directions")


class AdafactorSettings(NamedTuple):
    """The fields of the struct in csrc/core/adafactor.h."""

    decay_rate: float
    eps_square: float
    eps_floor: float
    eps_scale: float
    clip: float
    beta1: float
    weight_decay: float
    relative: bool
    warmup: bool
    scaled: bool
    scaled_decay: bool


class _Factored(Rule):
    """A rule whose step reduces over whole tensors, three times.

    For unsharded parameters one call makes all sums. For sharded parameters, devices exchange sums
    between passes: `sums` has the sums of all passes, and `whole_sizes` the rows, columns and
    elements of whole parameters. In eager torch, an update is a generator that yields the sums of
    each pass.
    """

    def kernel_files(self, folder: str, suffix: str) -> tuple[str, ...]:
        """Adafactor has kernels of its own."""
        return (f"csrc/{folder}/{self.name}.{suffix}",)

    def _passes(self) -> tuple[Pass, ...]:
        writes = ("sums", "moments")
        self._measure_ops = [self._define(suffix, writes) for suffix in _MEASURES]
        measures = [functools.partial(self._find_sums, number) for number in range(3)]
        return (
            *(Pass(find, Exchange.SUM, lambda task: task.batch.is_sharded) for find in measures),
            Pass(self._finish),
        )

    def _find_sums(self, number: int, task: Task) -> Iterable[Part]:
        batch = task.batch
        if number == 0:
            task.handed_on = self._make_room(task)
        if not isinstance(task.handed_on, _Updates):
            if self._serve(self._measure_ops[number], task):
                return task.handed_on[number]
            task.handed_on = _Updates(self._begin(task, i) for i in range(len(batch.params)))
        return [
            Part(here, p, dims)
            for of_one, p in zip(task.handed_on.next_sums(), batch.wholes, strict=True)
            for here, dims in of_one
        ]

    def _make_room(self, task: Task) -> list[list[Part]]:
        """A buffer for the sums of all passes, and each pass's parts of it."""
        batch = task.batch
        counts = [_counts(*of_one) for of_one in zip(batch.params, batch.wholes, strict=True)]
        sizes = [size for of_one in counts for of_pass in of_one for size, _ in of_pass]
        device = batch.params[0].device
        task.sums = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        task.whole_sizes = _whole_sizes(batch)
        room, parts_by_pass = iter(task.sums.split(sizes)), [[], [], []]  # type: ignore[var-annotated]
        for of_one, p in zip(counts, batch.wholes, strict=True):
            for parts, of_pass in zip(parts_by_pass, of_one, strict=True):
                parts += [Part(next(room), p, dims) for _, dims in of_pass]
        return parts_by_pass

    def _finish(self, task: Task) -> Iterable[Part]:
        self.step(task)
        return ()

    def step(self, task: Task) -> None:
        """Take the step, with exchanged sums or with sums of whole parameters."""
        if isinstance(task.handed_on, _Updates):
            self._reference(task)
            torch.autograd.graph.increment_version(task.batch.wholes)
        else:
            super().step(task)

    def _updates(self, task: Task) -> Updates:
        if isinstance(task.handed_on, _Updates):
            yield from task.handed_on.steps()
            return
        for i in range(len(task.batch.params)):  # one by one, to save memory
            update = _Updates([self._begin(task, i)])
            for _ in range(3):
                update.next_sums()
            yield from update.steps()

    def _begin(self, task: Task, i: int) -> tuple[Callable[[], Read], Update]:
        t = task.batch.step_number(i)
        of_parameter = functools.partial(read, task, i, self.signed)
        lr, shape = number_of(task.lr, i).to(t), task.batch.wholes[i].shape
        update: Any = self._update(of_parameter, shape, t, lr, task.settings)
        return of_parameter, update


class _Updates:
    """Updates of parameters that advance from pass to pass together."""

    def __init__(self, begun: Iterable[tuple[Callable[[], Read], Update]]) -> None:
        self._begun = list(begun)
        self._sums: list[Sums] | None = None

    def next_sums(self) -> list[Sums]:
        """Each update's next sums; the previous ones must be summed over all devices by now."""
        self._sums = [update.send(known) for (_, update), known in self._with_known()]
        return self._sums

    def steps(self) -> Updates:
        """Each parameter before the step and after it, and its new moments."""
        for (of_parameter, update), known in self._with_known():
            yield of_parameter()[0], *update.send(known)  # type: ignore[arg-type]

    def _with_known(self) -> Iterator[tuple[tuple[Callable[[], Read], Update], Any]]:
        if self._sums is None:
            return ((one, None) for one in self._begun)
        known = ([here for here, _ in of_one] for of_one in self._sums)
        return zip(self._begun, known, strict=True)


def _whole_sizes(batch: Batch) -> list[int]:
    """The rows, columns and elements of each whole parameter."""
    shapes = [torch.Size((1, 1, *whole.shape)) for whole in batch.wholes]
    return [size for shape in shapes for size in (*shape[-2:], shape.numel())]


def _counts(
    part: torch.Tensor, whole: torch.Tensor
) -> tuple[list[tuple[int, tuple[int, ...]]], ...]:
    """For each pass: the number of sums per parameter, and the dimensions summed over."""
    every = tuple(range(part.ndim))
    of_all = [(2, every)]  # the parameter's squares, and its direction's
    if len(every) < 2:
        return [], [], of_all
    *others, height, width = part.shape
    matrices = math.prod(others) if whole.numel() > 0 else 0
    rows, columns = every[-1:], every[-2:-1]
    of_squares = [(matrices * height, rows), (matrices * width, columns)]
    return of_squares, [(matrices, columns)], of_all


def _square_sum(t: torch.Tensor, *dims: int) -> torch.Tensor:
    square = t.double().square()
    return square.sum(dims, keepdim=True) if dims else square.sum()


def _update(
    of_parameter: Callable[[], Read],
    shape: torch.Size,
    t: torch.Tensor,
    lr: torch.Tensor,
    s: AdafactorSettings,
) -> Update:
    """Yield this device's sums and receive the whole tensor's, three times; then yield the step.

    `of_parameter` returns parameter, gradient and moments, which are not kept between passes.
    """
    if shape.numel() == 0:
        for _ in range(3):
            yield []
        p, _, moments = of_parameter()
        yield p, moments
        return
    every = tuple(range(len(shape)))
    factored = len(shape) > 1
    p, g, moments = of_parameter()
    sums = [(_square_sum(p), every)]
    if factored:
        sums += [(_square_sum(g, -1), every[-1:]), (_square_sum(g, -2), every[-2:-1])]
    del p, g, moments
    of_param, *of_squares = yield sums

    p, g, moments = of_parameter()
    taken = (t**s.decay_rate).to(p.dtype)
    if factored:
        rows, columns = moments[0].view(*g.shape[:-1], 1), moments[1].view(of_squares[1].shape)
        means = [
            (square / n + s.eps_square).to(p.dtype)
            for square, n in zip(of_squares, (shape[-1], shape[-2]), strict=True)
        ]
        rows, columns = rows + taken * (means[0] - rows), columns + taken * (means[1] - columns)
        new = [rows.view_as(moments[0]), columns.view_as(moments[1])]
        del p, g, moments
        (of_rows,) = yield [(rows.double().sum(-2, keepdim=True), every[-2:-1])]
        mean = (of_rows / shape[-2]).clamp(min=s.eps_floor)
        scales = (mean.sqrt() / rows.double().sqrt()) * (1 / columns.double().sqrt())
        u = (
            scales.clamp(max=1 / s.eps_floor if s.eps_floor else math.inf).to(rows.dtype)
            * of_parameter()[1]
        )
    else:
        square = g.double().square() + s.eps_square
        variance = moments[0] + (square.to(p.dtype) - moments[0]) * taken
        new = [variance]
        u = g / variance.clamp(min=s.eps_floor**2).double().sqrt().to(p.dtype)
        del p, g, moments
        yield []
    (of_direction,) = yield [(_square_sum(u), every)]

    rate = 1e-6 * t if s.warmup else lr
    if s.relative:
        rate = torch.minimum(rate, 1 / t.sqrt())
    count = shape.numel()
    scale = (of_param / count).sqrt().clamp(min=s.eps_scale) if s.scaled else torch.ones_like(t)
    excess = ((of_direction / count).sqrt() / s.clip).clamp(min=1.0)
    decay = 1 - s.weight_decay * (rate * scale if s.scaled_decay else lr)
    p, _, moments = of_parameter()
    step = u * (rate * scale / excess).to(p.dtype)
    if s.beta1 != 0:
        step = moments[-1] * s.beta1 + step * (1 - s.beta1)
        new.append(step)
    yield p * decay.to(p.dtype) - step, new


def _torchs(task: Task) -> bool:
    """Step as torch.optim.Adafactor does; False where torch has no such rule.

    torch's step waits for the GPU to read norms, which no graph can capture, and takes no
    found_inf. It divides by the number of elements.
    """
    s, batch = task.settings, task.batch
    assert isinstance(s, AdafactorSettings)
    rule = s._replace(
        eps_square=0.0, beta1=0.0, relative=True, warmup=False, scaled=True, scaled_decay=False
    )
    waits = not (torch.compiler.is_compiling() or _is_captured(batch.params[0]))
    whole = not batch.is_sharded and all(p.numel() for p in batch.params)
    if s != rule or task.found_inf is not None or not (waits and whole):
        return False

    def step(lists: Sequence[Tensors], lr: float, _: torch.Tensor | None) -> None:
        params, grads, first, *second, steps = lists
        none: list[torch.Tensor | None] = [None] * len(params)
        rows, columns = none, none
        squares: list[torch.Tensor | None] = list(first)
        if second:
            rows = [m.view(*p.shape[:-1], 1) for m, p in zip(first, params, strict=True)]
            lying = [(*p.shape[:-2], 1, p.shape[-1]) for p in params]
            columns = [m.view(shape) for m, shape in zip(second[0], lying, strict=True)]
            squares = none
        adafactor(
            list(params),
            list(grads),
            rows,
            columns,
            squares,
            list(torch._foreach_sub(steps, 1.0)),  # it counts itself
            foreach=True,
            d=s.clip,
            lr=lr,
            beta2_decay=s.decay_rate,
            weight_decay=s.weight_decay,
            eps1=s.eps_floor,
            eps2=s.eps_scale,
            maximize=False,
        )

    return take_torchs_step(task, step)


def _is_captured(p: torch.Tensor) -> bool:
    return p.is_cuda and torch.cuda.is_current_stream_capturing()


ADAFACTOR = _Factored(
    "adafactor",
    AdafactorSettings,
    signed=(False, False, True),
    update=_update,
    torchs=_torchs,
)
