"""The step of Adafactor, by the rules of torch and of transformers.

Moments are averages: of a matrix its rows' and its columns', otherwise that of each element; and a
first moment where beta1 is not 0. csrc/core/adafactor.h has the formulas.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator
from typing import Any

import torch

from torchweld.dispatch.bare import BareOp
from torchweld.ops.optimizer.rule import Batch, Number, Rule, Sums, Tensors, Updates, number_of

Read = Callable[[], tuple[torch.Tensor, torch.Tensor, Tensors]]
Update = Generator[Any, Tensors, None]


class _Factored(Rule):
    """Its updates are generators, which need sums over whole tensors in between.

    So does its op of sharded parameters: it is called for each of its passes then, with the sums of
    all devices, among which it writes its own. `wholes` are parameters' rows, columns, elements.
    """

    _more = ", Tensor(f!)? sums=None, int[] wholes=[], int passed=0"
    _cuda_source = "csrc/cuda/adafactor.cu"

    def _kernel(self, op: BareOp, batch: Batch) -> Any:
        kernel = super()._kernel(op, batch)
        if kernel is None or batch.add_up is None:
            return kernel
        return functools.partial(_call_in_passes, kernel, batch)

    def _updates(
        self, batch: Batch, factor: Number, lr: torch.Tensor, settings: Any, ratios: Number
    ) -> Updates:
        def begin(i: int) -> tuple[Read, Update]:
            read, t = functools.partial(self._read, batch, i, factor), batch.number(i)
            update: Any = self._update(
                read, batch.wholes[i].shape, t, number_of(lr, i).to(t), *settings
            )
            return read, update

        # Those of sharded parameters go from sum to sum together, for few reductions; others one
        # by one, for little memory.
        every = range(len(batch.params))
        for numbers in [every] if batch.add_up else [[i] for i in every]:
            reads, updates = zip(*(begin(i) for i in numbers), strict=True)
            sums = [next(update) for update in updates]
            for _ in range(2):
                of_wholes = _add_up(batch, sums)
                sums = [u.send(s) for u, s in zip(updates, of_wholes, strict=True)]
            of_wholes = _add_up(batch, sums)
            for read, update, of_whole in zip(reads, updates, of_wholes, strict=True):
                yield read()[0], *update.send(of_whole)


def _call_in_passes(kernel: Any, batch: Batch, *arguments: Any) -> None:
    """A step whose sums are added up over devices between its passes."""
    counts = [_sums(*of_one) for of_one in zip(batch.params, batch.wholes, strict=True)]
    sizes = [size for of_one in counts for of_pass in of_one for size, _ in of_pass]
    sums = torch.zeros(sum(sizes), dtype=torch.float64, device=batch.params[0].device)
    parts = iter(sums.split(sizes))
    shapes = [torch.Size((1, 1, *whole.shape)) for whole in batch.wholes]
    wholes = [size for shape in shapes for size in (*shape[-2:], shape.numel())]
    taken = [[[(next(parts), dims) for _, dims in some] for some in of_one] for of_one in counts]
    for passed in range(3):
        kernel(*arguments, sums, wholes, passed)
        _add_up(batch, [of_one[passed] for of_one in taken])
    kernel(*arguments, sums, wholes, 3)


def _sums(part: torch.Tensor, whole: torch.Tensor) -> tuple[list[tuple[int, tuple[int, ...]]], ...]:
    """For each pass: how many it makes of a parameter, and the dimensions that they are over."""
    every = tuple(range(part.ndim))
    of_all = [(2, every)]  # the parameter's squares, and its direction's
    if len(every) < 2:
        return [], [], of_all
    *others, height, width = part.shape
    matrices = math.prod(others) if whole.numel() > 0 else 0
    rows, columns = every[-1:], every[-2:-1]
    of_squares = [(matrices * height, rows), (matrices * width, columns)]
    return of_squares, [(matrices, columns)], of_all


def _add_up(batch: Batch, sums: list[Sums]) -> list[Tensors]:
    if batch.add_up:
        return batch.add_up(sums)
    return [[part for part, _ in of_one] for of_one in sums]


def _square_sum(t: torch.Tensor, *dims: int) -> torch.Tensor:
    square = t.double().square()
    return square.sum(dims, keepdim=True) if dims else square.sum()


def _update(
    read: Read,
    shape: torch.Size,
    t: torch.Tensor,
    lr: torch.Tensor,
    decay_rate: float,
    eps_square: float,
    eps_floor: float,
    eps_scale: float,
    clip: float,
    beta1: float,
    weight_decay: float,
    relative: bool,
    warmup: bool,
    scaled: bool,
    scaled_decay: bool,
) -> Update:
    """Yields sums of this device's part three times, is sent those of the whole, yields the step.

    `read` gives the parameter, its gradient and its moments; they are not kept between sums.
    """
    if shape.numel() == 0:
        for _ in range(3):
            yield []
        p, _, moments = read()
        yield p, moments
        return
    every = tuple(range(len(shape)))
    factored = len(shape) > 1
    p, g, moments = read()
    sums = [(_square_sum(p), every)]
    if factored:
        sums += [(_square_sum(g, -1), every[-1:]), (_square_sum(g, -2), every[-2:-1])]
    del p, g, moments
    of_param, *of_squares = yield sums

    p, g, moments = read()
    taken = (t**decay_rate).to(p.dtype)
    if factored:
        rows, columns = moments[0].view(*g.shape[:-1], 1), moments[1].view(of_squares[1].shape)
        means = [
            (s / n + eps_square).to(p.dtype)
            for s, n in zip(of_squares, (shape[-1], shape[-2]), strict=True)
        ]
        rows, columns = rows + taken * (means[0] - rows), columns + taken * (means[1] - columns)
        new = [rows.view_as(moments[0]), columns.view_as(moments[1])]
        del p, g, moments
        (of_rows,) = yield [(rows.double().sum(-2, keepdim=True), every[-2:-1])]
        mean = (of_rows / shape[-2]).clamp(min=eps_floor)
        scales = (mean.sqrt() / rows.double().sqrt()) * (1 / columns.double().sqrt())
        u = scales.clamp(max=1 / eps_floor if eps_floor else math.inf).to(rows.dtype) * read()[1]
    else:
        square = g.double().square() + eps_square
        variance = moments[0] + (square.to(p.dtype) - moments[0]) * taken
        new = [variance]
        u = g / variance.clamp(min=eps_floor**2).double().sqrt().to(p.dtype)
        del p, g, moments
        yield []
    (of_direction,) = yield [(_square_sum(u), every)]

    rate = 1e-6 * t if warmup else lr
    if relative:
        rate = torch.minimum(rate, 1 / t.sqrt())
    count = shape.numel()
    scale = (of_param / count).sqrt().clamp(min=eps_scale) if scaled else torch.ones_like(t)
    excess = ((of_direction / count).sqrt() / clip).clamp(min=1.0)
    decay = 1 - weight_decay * (rate * scale if scaled_decay else lr)
    p, _, moments = read()
    step = u * (rate * scale / excess).to(p.dtype)
    if beta1 != 0:
        step = moments[-1] * beta1 + step * (1 - beta1)
        new.append(step)
    yield p * decay.to(p.dtype) - step, new


ADAFACTOR = _Factored(
    "adafactor",
    "float decay_rate, float eps_square, float eps_floor, float eps_scale, float clip,"
    " float beta1, float weight_decay, bool relative, bool warmup, bool scaled, bool scaled_decay",
    signed=(False, False, True),
    update=_update,
)
