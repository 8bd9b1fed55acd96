"""The tensors that step together and the numbers of their step, as all rules' ops take them.

An op takes lists with an entry for each parameter:

* `params`, `grads`: of one dtype;
* `masters`: float32 masters, int16 remainders that complete parameters to float32, int8 remainders
  that complete them to 24 bits, or none;
* `moments`: the rule's first moment of every parameter, then the second of every one, ...: float32,
  bfloat16, or codes of 8-bit blocks with their `absmaxes`, as quantize_8bit makes them;
* `steps`: the number of steps taken, on the parameter's device, which the step counts up;
* `edges`: for codes whose rows are split across devices, or none: where the local pieces of blocks
  begin and end in a row, as int64 numbers on the codes' device. `absmaxes`, [rows, pieces], then
  belong to the whole blocks, and so do `new_absmaxes`, the absmaxes after the step;
* `rounding_offsets`: for bfloat16 parameters that are rounded stochastically, or none; see
  rounding.py;
* `companions`: float32 numbers of the parameters' shapes, or none: averages of parameters, which
  move towards them by `average_rate`, or the second iterates of a rule that has them.

`lr` is one number, or float64 numbers on the CPU, one for each parameter. `grad_factor` multiplies
gradients before anything else. If `found_inf` is not zero, nothing changes. Numbers that change
from step to step are tensors, on the parameters' device or the CPU, and the host waits for none of
them. `settings_of_each`, on the CPU, has per-parameter rows of float64 settings in place of shared
settings. An adaptive rule takes `ratios`, a float64 number for each parameter. `sums` are float64
numbers that passes measure, and `whole_sizes` are sizes of whole parameters; each rule defines
which.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, get_type_hints

import torch

from torchweld import state

Tensor = torch.Tensor
Tensors = list[torch.Tensor]
Stepped = tuple[torch.Tensor, Tensors]  # what a rule's update and direction return
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STATE_DTYPES = {torch.float32, torch.bfloat16, torch.uint8}


class SplitRows(NamedTuple):
    """The blocks of rows split across devices. The local part of a block is a piece."""

    edges: torch.Tensor  # [pieces + 1]: where pieces begin and end in the local part of a row
    blocks: torch.Tensor  # [pieces]: the number of each piece's block in the whole row
    width: int  # of the local part of a row
    blocks_of_row: int

    def of_pieces(self, absmax: torch.Tensor) -> torch.Tensor:
        """[rows, pieces], from [rows, blocks]."""
        return absmax[:, self.blocks]

    def of_blocks(self, absmax: torch.Tensor) -> torch.Tensor:
        """[rows, blocks] from [rows, pieces], as ordered bits; 0 for blocks not held here."""
        bits = absmax.contiguous().view(torch.int32)
        zeros = bits.new_zeros(len(bits), self.blocks_of_row)
        return zeros.scatter_reduce(1, self.blocks.expand_as(bits), bits, "amax")


@dataclass
class Batch:
    """Parameters of one device, dtype and codec, with their gradients and states."""

    params: Tensors = field(default_factory=list)
    grads: Tensors = field(default_factory=list)
    masters: Tensors = field(default_factory=list)
    moments: Tensors = field(default_factory=list)
    absmaxes: Tensors = field(default_factory=list)
    new_absmaxes: Tensors = field(default_factory=list)
    steps: Tensors = field(default_factory=list)
    edges: Tensors = field(default_factory=list)
    rounding_offsets: Tensors = field(default_factory=list)
    companions: Tensors = field(default_factory=list)
    # How rows are split, and the absmax of whole blocks in the order of `absmaxes`.
    splits: list[SplitRows] = field(default_factory=list)
    block_absmaxes: Tensors = field(default_factory=list)
    # The parameters themselves: DTensors if `params` are their local parts.
    wholes: Tensors = field(default_factory=list)
    is_sharded: bool = False  # whether other devices hold parts of any parameter
    # The learning rate, or one per parameter.
    lr: torch.Tensor | float | list[float] | None = None
    lrs: list[float] = field(default_factory=list)
    # The groups of the parameters, if their settings may differ.
    groups: list[dict[str, Any]] = field(default_factory=list)

    def step_number(self, i: int) -> torch.Tensor:
        """The number of the step that parameter i is about to take, from 1."""
        return self.steps[i].to(self.params[i].device, torch.float64) + 1

    @functools.cached_property
    def has_kernel(self) -> bool:
        """Whether kernels are compiled for these dtypes."""
        first, grad = self.params[0], self.grads[0]  # all have the same dtypes
        states = {m.dtype for m in self.moments[:: len(self.params)]}
        fits = has_kernel_dtype(first) and first.dtype == grad.dtype
        fits = fits and all(c.dtype == torch.float32 for c in self.companions[:1])
        return fits and states <= _STATE_DTYPES and not is_foreign_to_kernels(first)

    def lists(self) -> tuple[Tensors, ...]:
        """The batch as the arguments of an op."""
        return tuple(getattr(self, name) for name in _LISTS)

    def list_written(self) -> Tensors:
        """Every tensor that a step writes; autograd counts their versions."""
        parts = itertools.compress(self.params, map(operator.is_not, self.params, self.wholes))
        states = (*self.masters, *self.moments, *self.absmaxes, *self.steps, *self.companions)
        return [*parts, *self.wholes, *states]


# The arguments of an op: all lists before the splits.
_LISTS = list(itertools.takewhile("splits".__ne__, Batch.__dataclass_fields__))


@dataclass
class Task:
    """A batch, the numbers of its step, and results that passes hand on."""

    batch: Batch
    settings: Sequence[Any]
    lr: torch.Tensor
    grad_factor: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None
    average_rate: torch.Tensor | None = None
    settings_of_each: torch.Tensor | None = None
    # Computes an adaptive rule's ratios from norms of parameters and of their steps; or None.
    ratios_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    ratios: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    whole_sizes: Sequence[int] = ()
    handed_on: Any = None  # specific to the rule


def make_rate(lr: torch.Tensor | float | list[float] | None) -> torch.Tensor:
    """The learning rates of a batch as an op takes them."""
    if not isinstance(lr, torch.Tensor):
        return torch.tensor(lr, dtype=torch.float64, device="cpu")
    return lr if lr.dtype in (torch.float32, torch.float64) else lr.double()


def schema(writes: Collection[str], settings: type[Any]) -> str:
    """The schema of a pass that writes to these arguments, for a rule with these settings."""

    arguments: list[str] = []

    def add(name: str, suffix: str) -> None:
        alias = f"({chr(ord('a') + len(arguments))}!)" if name in writes else ""
        arguments.append(f"Tensor{alias}{suffix} {name}")

    for name in _LISTS:
        add(name, "[]")
    add("lr", "")
    for name in ("ratios", "grad_factor", "found_inf", "average_rate", "sums", "settings_of_each"):
        add(name, "?")
    arguments.append("int[] whole_sizes")
    arguments += [f"{kind.__name__} {name}" for name, kind in get_type_hints(settings).items()]
    return f"({', '.join(arguments)}) -> ()"


def has_kernel_dtype(t: torch.Tensor) -> bool:
    """Whether kernels are compiled for parameters and gradients of this kind."""
    return t.dtype in _KERNEL_DTYPES


def is_foreign_to_kernels(t: torch.Tensor) -> bool:
    """Whether t is of a subclass that overrides ops and may hold several tensors."""
    handles = type(t).__torch_dispatch__
    return handles is not torch.Tensor.__torch_dispatch__ and not state.is_fake(t)


# The most elements of a sample.
MOST_SAMPLED = 2**22


def choose_few(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The smallest tensor, and others as long as they have few enough elements together."""
    sizes = [t.numel() for t in tensors]
    by_size = sorted(range(len(sizes)), key=lambda i: (sizes[i] == 0, sizes[i]))
    chosen, elements = by_size[:1], sizes[by_size[0]]
    for i in reversed(by_size[1:]):
        if len(chosen) < 8 and elements + sizes[i] <= MOST_SAMPLED:
            chosen.append(i)
            elements += sizes[i]
    return chosen
