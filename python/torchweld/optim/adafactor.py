"""Adafactor, in torch's and in transformers' version."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim._adafactor import adafactor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from torchweld import checks, state
from torchweld.ops.optimizer.batch import Batch, Task, Tensors
from torchweld.ops.optimizer.passes import Exchange, Part, Pass
from torchweld.ops.optimizer.reference import Read, number_of, read
from torchweld.ops.optimizer.rule import Rule, Updates
from torchweld.ops.optimizer.torchs import take_torchs_step
from torchweld.optim._base import FusedOptimizer, Group, OwnOptimizer
from torchweld.optim._codecs import SIGNED, STEP, Moment, Moments, State
from torchweld.optim._options import OwnStorageOptions, StorageOptions, takes
from torchweld.optim._shards import is_dtensor

Sums = list[tuple[torch.Tensor, tuple[int, ...]]]  # over these dimensions of the parameter
Update = Generator[Any, Tensors, None]
# The passes before the step, named for their sums: squares over rows and over columns; averages
# over columns; squares of parameters and of directions over all elements.
_MEASURES = ("_squares", "_averages", "_directions")


class AdafactorSettings(NamedTuple):
    """The fields of the struct in csrc/core/adafactor.h."""

    decay_rate: float
    eps_square: float = 0.0
    eps_floor: float = 0.0
    eps_scale: float = 1e-3
    clip: float = 1.0
    beta1: float = 0.0
    weight_decay: float = 0.0
    relative: bool = True
    warmup: bool = False
    scaled: bool = True
    scaled_decay: bool = False


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
        shapes = [torch.Size((1, 1, *whole.shape)) for whole in batch.wholes]
        # The rows, columns and elements of each whole parameter.
        task.whole_sizes = [n for shape in shapes for n in (*shape[-2:], shape.numel())]
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
        self._known: list[Any] = [None] * len(self._begun)  # the sums that updates wait for

    def next_sums(self) -> list[Sums]:
        """Each update's next sums; the previous ones must be summed over all devices by now."""
        every = zip(self._begun, self._known, strict=True)
        sums: list[Any] = [update.send(known) for (_, update), known in every]
        self._known = [[here for here, _ in of_one] for of_one in sums]  # devices add in place
        return sums

    def steps(self) -> Updates:
        """Each parameter before the step and after it, and its new moments."""
        for (of_parameter, update), known in zip(self._begun, self._known, strict=True):
            yield of_parameter()[0], *update.send(known)  # type: ignore[arg-type]


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

    count = shape.numel()
    rate, decay = _find_rates(s, t, lr, of_param / count, of_direction / count)
    p, _, moments = of_parameter()
    step = u * rate.to(p.dtype)
    if s.beta1 != 0:
        step = moments[-1] * s.beta1 + step * (1 - s.beta1)
        new.append(step)
    yield p * decay.to(p.dtype) - step, new


def _find_rates(
    s: AdafactorSettings,
    t: torch.Tensor,
    lr: torch.Tensor,
    param_square: torch.Tensor,
    direction_square: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of the direction and of the parameter, whose mean squares are given."""
    rate = 1e-6 * t if s.warmup else lr
    if s.relative:
        rate = torch.minimum(rate, 1 / t.sqrt())
    scale = param_square.sqrt().clamp(min=s.eps_scale) if s.scaled else torch.ones_like(t)
    excess = (direction_square.sqrt() / s.clip).clamp(min=1.0)
    return rate * scale / excess, 1 - s.weight_decay * (rate * scale if s.scaled_decay else lr)


def _torchs(task: Task) -> bool:
    """Step as torch.optim.Adafactor does; False where torch has no such rule.

    torch's step waits for the GPU to read norms, which no graph can capture, and takes no
    found_inf. It divides by the number of elements.
    """
    s, batch = task.settings, task.batch
    assert isinstance(s, AdafactorSettings)
    of_torch = ("decay_rate", "eps_floor", "eps_scale", "clip", "weight_decay")
    rule = AdafactorSettings(**{name: getattr(s, name) for name in of_torch})
    captured = batch.params[0].is_cuda and state.is_capturing()
    waits = not (state.is_compiling() or captured)
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


ADAFACTOR = _Factored(
    "adafactor",
    AdafactorSettings,
    moments={"row": False, "column": False, "exp_avg": True},
    update=_update,
    torchs=_torchs,
)


def _make_average(p: torch.Tensor, *dims: int | None) -> Moment:
    """Make a moment of averages with these dimensions of p.

    None is a dimension that is averaged over and has size 1.
    """
    shape = [1 if dim is None else p.shape[dim] for dim in dims]
    return Moment(False, torch.Size(shape), dims)


class _AdafactorStep(FusedOptimizer):
    def __init__(self, params: Any, **kwargs: Any) -> None:
        asked = kwargs.get("state_dtype", torch.float32)
        accepted = "torch.float32: averages of rows and columns are small already"
        checks.fits(type(self).__name__, "state_dtype", asked, asked == torch.float32, accepted)
        super().__init__(params, **kwargs)

    _rule = ADAFACTOR
    _takes_complex = False


class Adafactor(_AdafactorStep, torch.optim.Adafactor):
    """torch.optim.Adafactor: second moments of matrices from averages of rows and columns.

    Args:
        params, lr, beta2_decay, eps, d, weight_decay, maximize: as in torch.optim.Adafactor;
            foreach is accepted and has no effect.
        master_weights, stochastic_rounding, max_grad_norm: as in Adam.
    """

    @takes(StorageOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        **options: Unpack[StorageOptions],
    ) -> None:
        """As in torch.optim."""

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        if p.ndim < 2:
            return {"variance": _make_average(p, *range(p.ndim))}
        *others, row, column = range(p.ndim)
        columns = _make_average(p, *others, None, column)
        return {"row_var": _make_average(p, *others, row, None), "col_var": columns}

    def _settings(self, group: Group, batch: Batch) -> AdafactorSettings:
        floor, scale = group["eps"]
        if floor is None:
            floor = torch.finfo(torch.float32 if batch.masters else batch.params[0].dtype).eps
        rate, decay = group["beta2_decay"], group["weight_decay"]
        own = {"decay_rate": rate, "clip": group["d"], "weight_decay": decay}
        return ADAFACTOR.read_settings({**own, "eps_floor": floor, "eps_scale": scale})


class TransformersAdafactor(_AdafactorStep, OwnOptimizer):
    """transformers.Adafactor: its arguments, its rule, its state.

    Args:
        params, lr, eps, clip_threshold, decay_rate, beta1, weight_decay, scale_parameter,
            relative_step, warmup_init: as in transformers.Adafactor.
        maximize, foreach, capturable, differentiable, fused: as in torch.optim.
        master_weights, stochastic_rounding, max_grad_norm: as in Adam.
    """

    @takes(OwnStorageOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        **options: Unpack[OwnStorageOptions],
    ) -> None:
        name = type(self).__name__
        accepted = "None with relative_step, a number without"
        checks.fits(name, "lr", lr, (lr is None) == relative_step, accepted)
        fits = relative_step or not warmup_init
        checks.fits(name, "warmup_init", warmup_init, fits, "False without relative_step")

    def _get_lr(self, group: Group, state: State) -> float:
        """Return the learning rate of a parameter's last step, for transformers' AdafactorSchedule.

        `state` belongs to the group's first parameter. Its root mean square, which scales the rate,
        is the current one; transformers keeps the one before the step.
        """
        step = max(float(state.get(STEP, 1)), 1.0)
        rate = float(group["lr"] or 0.0)
        if group["relative_step"]:
            rate = min(1e-6 * step if group["warmup_init"] else 1e-2, step**-0.5)
        if not group["scale_parameter"]:
            return rate
        p = group["params"][0]
        mean = p.detach().double().square().mean().nan_to_num()
        mean = mean.full_tensor() if is_dtensor(p) else mean
        return max(float(group["eps"][1]), float(mean.sqrt())) * rate

    def _learning_rate(self, group: Group) -> float | torch.Tensor:
        return 1e-2 if group["relative_step"] else group["lr"]

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        moments = {"exp_avg_sq": _make_average(p, *range(p.ndim))}
        if p.ndim > 1:
            *others, row, column = range(p.ndim)
            columns = _make_average(p, *others, column)
            moments = {"exp_avg_sq_row": _make_average(p, *others, row), "exp_avg_sq_col": columns}
        return moments | {"exp_avg": SIGNED} if group["beta1"] else moments

    def _settings(self, group: Group, batch: Batch) -> AdafactorSettings:
        square, scale = group["eps"]
        own = {
            "decay_rate": group["decay_rate"],
            "weight_decay": group["weight_decay"],
            "eps_square": square,
            "eps_scale": scale,
            "clip": group["clip_threshold"],
            "beta1": group["beta1"] or 0.0,
            "relative": group["relative_step"],
            "warmup": group["warmup_init"],
            "scaled": group["scale_parameter"],
            "scaled_decay": True,
        }
        return ADAFACTOR.read_settings(own)
