"""What the steps of all optimizers have in common: arguments, codecs, and the eager reference.

A step takes lists with an entry for each parameter, and writes to all of them but `grads`:

* `params`, `grads`: of one dtype;
* `completions`: what completes parameters to float32: float32 masters, int16 remainders, or none;
* `moments`: the rule's first moment of every parameter, then the second of every one, ...: float32,
  bfloat16, or codes of 8-bit blocks with their `absmaxes`, as quantize_8bit makes them;
* `steps`: the number of steps taken, on the parameter's device, which this one counts up;
* `edges`: of codes whose rows other devices have a part of, or none: where the pieces of blocks
  that are here begin and end in a row, as int64 numbers beside them. Their `absmaxes` are [2, rows,
  pieces]: of the whole blocks as they were, and as they become, which a call with `only_absmaxes`
  finds of what is here, leaving all else, and all devices' largest have to be put there;
* `places`: of bfloat16 parameters that are rounded stochastically, or none: as _rounding has them.

`lr` is one number, or float64 numbers on the CPU, one for each parameter. `grad_factor` multiplies
gradients before anything else. Where `found_inf` is not zero, nothing
changes. Numbers that change from step to step are tensors, on the parameters' device or the CPU;
the host waits for none of them. An adaptive rule takes `ratios`, a float64 number for each
parameter, which the optimizer makes of the squares that a measure finds.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torchweld.dispatch.bare import BareOp
from torchweld.dispatch.choice import choose
from torchweld.ops.optimizer.rounding import rounded_at
from torchweld.ops.quantize_8bit import (
    absmax_reference,
    dequantize_reference,
    keep_positive,
    quantize_reference,
)

Tensors = list[torch.Tensor]
Sums = list[tuple[torch.Tensor, tuple[int, ...]]]
Number = torch.Tensor | None
Updates = Iterator[tuple[torch.Tensor, torch.Tensor, Tensors]]
_LISTS = (
    "Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] completions, Tensor(c!)[] moments,"
    " Tensor(d!)[] absmaxes, Tensor(e!)[] steps, Tensor[] edges, Tensor[] places"
)
_READ_LISTS = re.sub(r"\(.!\)", "", _LISTS)
_BACKENDS = ("cpu", "cuda")
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STATE_DTYPES = {torch.float32, torch.bfloat16, torch.uint8}


@dataclass
class Batch:
    """Parameters of one device, dtype and codec, and what belongs to them."""

    params: Tensors = field(default_factory=list)
    grads: Tensors = field(default_factory=list)
    completions: Tensors = field(default_factory=list)
    moments: Tensors = field(default_factory=list)
    absmaxes: Tensors = field(default_factory=list)
    steps: Tensors = field(default_factory=list)
    edges: Tensors = field(default_factory=list)
    places: Tensors = field(default_factory=list)
    # Where there are edges: of whole blocks, in the order of `absmaxes`.
    whole_absmaxes: Tensors = field(default_factory=list)
    # The parameters themselves: DTensors where `params` are this device's parts of them.
    wholes: Tensors = field(default_factory=list)
    # The learning rate, or each parameter's.
    lr: torch.Tensor | float | list[float] | None = None
    lrs: list[float] = field(default_factory=list)
    # Of a rule that needs sums over whole tensors: makes them of what each parameter has here, sums
    # over some of its dimensions, where any is sharded.
    add_up: Callable[[list[Sums]], list[Tensors]] | None = None

    def number(self, i: int) -> torch.Tensor:
        """Of the step that a parameter is about to take, from 1."""
        return self.steps[i].to(self.params[i].device, torch.float64) + 1

    def served_by_kernel(self) -> bool:
        """Whether the dtypes are those that kernels are compiled for."""
        first, grad = self.params[0], self.grads[0]  # of one as of all
        states = {m.dtype for m in self.moments[:: len(self.params)]}
        fits = first.dtype in _KERNEL_DTYPES and first.dtype == grad.dtype
        return fits and states <= _STATE_DTYPES and not is_foreign_to_kernels(first)

    def lists(self) -> tuple[Tensors, ...]:
        """As an op takes them."""
        return (self.params, self.grads, *self._states(), self.edges, self.places)

    def count_versions(self) -> None:
        """Of all that is written, for autograd."""
        parts = itertools.compress(self.params, map(operator.is_not, self.params, self.wholes))
        for tensors in (parts, self.wholes, *self._states()):
            torch.autograd.graph.increment_version(tensors)

    def _states(self) -> tuple[Tensors, ...]:
        return (self.completions, self.moments, self.absmaxes, self.steps)


RULES: dict[str, Rule] = {}


class Rule:
    """An optimizer's rule, as an op with a kernel for each backend, and in eager torch.

    `signed` says of each moment whether it has a sign. `update(p, g, moments, t, lr, *settings)`
    returns the new parameter and moments; t, the step, and lr are float64 tensors of one number.
    An adaptive rule's update takes its ratio before the settings, and `direction`, of the same
    arguments but lr and ratio, returns what its measure squares, and the new moments.
    """

    # What the ops of a kind of rules take besides, and the file with their GPU kernels.
    _more = ""
    _cuda_source = "csrc/cuda/optim.cu"

    def __init__(
        self,
        name: str,
        settings: str,
        signed: Sequence[bool],
        update: Callable[..., Any],
        direction: Callable[..., tuple[torch.Tensor, Tensors]] | None = None,
    ) -> None:
        scalars = "Tensor lr" if direction is None else "Tensor lr, Tensor? ratios"
        tail = f"{settings}, Tensor? grad_factor"
        RULES[name] = self
        self.name = name
        self.sources = {"cuda": (self._cuda_source,)}
        self.signed = tuple(signed)
        self._update = update
        self._direction = direction
        self._op = BareOp(
            name,
            f"({_LISTS}, {scalars}, {tail}, Tensor? found_inf, bool only_absmaxes"
            f"{self._more}) -> ()",
            backends=_BACKENDS,
            proof=name,
        )
        if direction is not None:
            self._measure = BareOp(
                f"{name}_squares",
                f"({_READ_LISTS}, {tail}) -> Tensor",
                lambda params, *_: params[0].new_empty((len(params), 2), dtype=torch.float64),
                _BACKENDS,
                proof=name,
            )

    def backends(self, param: torch.Tensor) -> list[str]:
        """Those that have a kernel for a parameter like this."""
        return [b for b in self._op.backends if self._op.why_not(b, (param,)) is None]

    def automatic(self, param: torch.Tensor) -> str:
        """The backend that steps a parameter like this."""
        return choose(self._op, (param,))

    def step(
        self,
        batch: Batch,
        lr: torch.Tensor,
        settings: Sequence[Any],
        grad_factor: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        ratios: torch.Tensor | None = None,
        only_absmaxes: bool = False,
    ) -> None:
        """One step of the batch's parameters."""
        kernel = self._kernel(self._op, batch)
        if kernel is None:
            given = (lr, settings, grad_factor, found_inf, ratios, only_absmaxes)
            self._reference(batch, *given)
            if not only_absmaxes:
                torch.autograd.graph.increment_version(batch.wholes)
            return
        device = batch.params[0].device
        first = (lr,) if self._direction is None else (lr, ratios)
        scalars = [_readable(t, device) for t in (*first, grad_factor, found_inf)]
        if not only_absmaxes:
            # Before the kernel, after which a thousand tensors are no longer in the cache.
            batch.count_versions()
        try:
            kernel(*batch.lists(), *scalars[:-2], *settings, *scalars[-2:], only_absmaxes)
        except RuntimeError:
            # torch negates before it calls, but not what is written; nothing is yet.
            if not any(map(torch.is_neg, [*batch.params, *batch.moments])):
                raise
            self._reference(batch, lr, settings, grad_factor, found_inf, ratios, only_absmaxes)

    def squares(
        self, batch: Batch, settings: Sequence[Any], grad_factor: torch.Tensor | None
    ) -> torch.Tensor:
        """Of an adaptive rule: sums of squares, of each parameter and of what its step would be.

        [parameters, 2], float64. Of the parts that are here. Nothing is written.
        """
        assert self._direction is not None
        kernel = self._kernel(self._measure, batch)
        if kernel is not None:
            factor = _readable(grad_factor, batch.params[0].device)
            return kernel(*batch.lists(), *settings, factor)
        rows = []
        for i in range(len(batch.params)):
            p, g, moments = self._read(batch, i, grad_factor)
            t = batch.number(i)
            u, moments = self._direction(p, g, moments, t, *settings)
            if batch.absmaxes and moments:
                u = torch.where(_sound(moments), u, 0.0)
            rows.append(torch.stack([p.double().square().sum(), u.double().square().sum()]))
        return torch.stack(rows)

    def _kernel(self, op: BareOp, batch: Batch) -> Any:
        if not batch.served_by_kernel():
            return None
        return op.kernel(batch.params[0])

    def _read(
        self, batch: Batch, i: int, factor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
        """A parameter, its gradient and its moments, as they are computed with."""
        p, count = batch.params[i], len(batch.params)
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        completion = batch.completions[i] if batch.completions else None
        scales = batch.absmaxes[i::count]
        edges = batch.edges[i] if batch.edges else None
        if edges is not None:
            scales = [of_pieces[0] for of_pieces in scales]
        moments = [
            m.to(wide)
            if not scales
            else dequantize_reference(m, scales[k], self.signed[k], wide, edges)
            for k, m in enumerate(batch.moments[i::count])
        ]
        g = batch.grads[i].to(wide)
        if factor is not None:
            g = g * factor.to(p.device, wide)
        return read_param(p, completion).to(wide), g, moments

    def _updates(
        self, batch: Batch, factor: Number, lr: torch.Tensor, settings: Any, ratios: Number
    ) -> Updates:
        """Of each parameter: it before the step and after it, and its new moments."""
        for i in range(len(batch.params)):
            before, g, moments = self._read(batch, i, factor)
            t = batch.number(i)
            scalars = [number_of(lr, i).to(t)]
            if self._direction is not None:
                scalars.append(torch.ones_like(t) if ratios is None else ratios[i].to(t))
            yield before, *self._update(before, g, moments, t, *scalars, *settings)

    def _reference(
        self,
        batch: Batch,
        lr: torch.Tensor,
        settings: Sequence[Any],
        factor: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        ratios: torch.Tensor | None,
        only_absmaxes: bool,
    ) -> None:
        """A step in eager torch, one parameter after another, on any device."""
        skip = None if found_inf is None else found_inf != 0
        count = len(batch.params)

        def write(target: torch.Tensor, value: torch.Tensor) -> None:
            value = value.to(target.dtype)
            target.copy_(value if skip is None else torch.where(skip, target, value))

        updates = self._updates(batch, factor, lr, settings, ratios)
        for i, (p, (before, after, moments)) in enumerate(zip(batch.params, updates, strict=True)):
            completion = batch.completions[i] if batch.completions else None
            stored, scales = batch.moments[i::count], batch.absmaxes[i::count]
            if scales:
                sound = _sound(moments)
                after = torch.where(sound, after, before)
                moments = [torch.where(sound, m, 0.0) for m in moments]
            edges = batch.edges[i] if batch.edges else None
            if only_absmaxes:
                for scale, value in zip(scales, moments, strict=True):
                    write(scale[1], absmax_reference(value, edges))
                continue
            number = batch.number(i)
            write(batch.steps[i], batch.steps[i] + 1)
            for k, value in enumerate(moments):
                if scales:
                    whole = None if edges is None else scales[k][1]
                    codes, absmax = quantize_reference(value, self.signed[k], edges, whole)
                    write(stored[k], codes if self.signed[k] else keep_positive(codes, value))
                    if whole is None:
                        write(scales[k], absmax)
                else:
                    write(stored[k], value)
            if batch.places:
                write(p, rounded_at(after, batch.places[i], number))
                continue
            rounded, rest = split_param(after, p.dtype, completion)
            write(p, rounded)
            if completion is not None and rest is not None:
                write(completion, rest)


def number_of(t: torch.Tensor, i: int) -> torch.Tensor:
    """Parameter i's, of a number for each of them; or the one for all."""
    return t if t.numel() == 1 else t[i]


def is_foreign_to_kernels(t: torch.Tensor) -> bool:
    """Whether it is a subclass that says itself what an op does, which may hold several tensors."""
    handles = type(t).__torch_dispatch__
    return handles is not torch.Tensor.__torch_dispatch__ and not isinstance(t, FakeTensor)


def _sound(moments: Tensors) -> torch.Tensor:
    return torch.stack([m.isfinite() for m in moments]).all(0)


def _readable(t: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """A number where a kernel on this device can have it: there, or on the CPU."""
    return t if t is None or t.device.type == "cpu" else t.to(device)


# --- Parameter codecs -------------------------------------------------------------------------


def read_param(p: torch.Tensor, completion: torch.Tensor | None) -> torch.Tensor:
    """The parameter as it is computed with."""
    if completion is None:
        return p
    if completion.dtype != torch.int16:
        return completion
    bits = (p.view(torch.int16).int() << 16) + completion.int()
    return bits.view(torch.float32)


def split_param(
    value: torch.Tensor, dtype: torch.dtype, completion: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A computed parameter as it is stored: rounded to dtype, and what completes that."""
    if completion is None or completion.dtype != torch.int16:
        return value.to(dtype), value
    bits = torch.where(value.isnan(), torch.nan, value).view(torch.int32)
    low = (bits << 16) >> 16  # with its sign
    high = (bits - low) >> 16
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


# --- Norm -------------------------------------------------------------------------------------


_SQUARES = BareOp(
    "sum_of_squares",
    "(Tensor[] grads) -> Tensor",
    lambda grads: grads[0].new_empty((), dtype=torch.float64),
    _BACKENDS,
    proof="adam",
)


def sum_of_squares(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the squares of all elements, as a float64 tensor; gradients of one device."""
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device)
    for dtype in dict.fromkeys(g.dtype for g in grads):
        same = [g for g in grads if g.dtype == dtype]
        serves = dtype in _KERNEL_DTYPES and not any(map(is_foreign_to_kernels, same))
        kernel = _SQUARES.kernel(same[0]) if serves else None
        if kernel is None:
            total = total + sum(g.double().square().sum() for g in same)
        else:
            total = total + kernel(same)
    return total
