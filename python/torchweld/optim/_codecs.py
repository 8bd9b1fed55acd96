"""Codecs: how the states of parameters are stored, and how saved states are converted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from torchweld import checks
from torchweld.errors import ArgumentError
from torchweld.names import StateName
from torchweld.ops.optimizer.reference import read_param, split_param
from torchweld.ops.quantize_8bit import keep_positive, scales_shape
from torchweld.optim import _sharded_blocks
from torchweld.optim._shards import find_placements, is_dtensor, local_part, make_zeros, shard_like

EIGHT_BIT: Final = "8bit"
REMAINDER, SHORT_REMAINDER = "remainder", "remainder8"
# Bits that complete a bfloat16 parameter: of int16, and of int8. A distributed checkpoint is read
# into existing tensors, which would truncate the others if both had one name.
REMAINDERS = (REMAINDER, SHORT_REMAINDER)
# Entries of a parameter's state; a moment in 8-bit blocks has two, codes and absmax.
STEP, MASTER, CODES, ABSMAX = "step", "master", "_codes", "_absmax"

State = dict[str, Any]


class Moment(NamedTuple):
    """A moment of past gradients: a number per element, or averages of another shape."""

    signed: bool
    shape: torch.Size | None = None
    # The parameter's dimension for each dimension of the averages; None: it is averaged over.
    dims: tuple[int | None, ...] = ()
    # No moment: it begins as the parameter, and has its shape and at least 32 bits.
    is_companion: bool = False


SIGNED, UNSIGNED = Moment(True), Moment(False)
COMPANION = Moment(True, is_companion=True)
Moments = Mapping[str, Moment]


class Entries(NamedTuple):
    """The entries of a parameter's state that a step uses."""

    master: str | None
    moments: tuple[str, ...]  # numbers or codes
    absmaxes: tuple[str, ...]  # of the codes
    companion: str | None = None

    def all(self) -> list[str]:
        """The names of all entries."""
        more = [name for name in (self.master, self.companion) if name]
        return [STEP, *more, *self.moments, *self.absmaxes]


@dataclass(frozen=True)
class Codec:
    """How a parameter group stores its states and parameters."""

    state_dtype: torch.dtype | StateName = torch.float32
    master_weights: bool | str = False
    min_quantized_size: int = 4096
    stochastic_rounding: bool = False

    def check(self, function: str) -> None:
        """Check the options."""
        fits, masters, size = checks.fits, self.master_weights, self.min_quantized_size
        dtype = self.state_dtype
        names = 'torch.float32, torch.bfloat16 or "8bit"'
        is_one = dtype in (torch.float32, torch.bfloat16, EIGHT_BIT)
        fits(function, "state_dtype", dtype, is_one, names)
        names = 'False, True, "remainder" or "remainder8"'
        is_one = masters in (False, True, *REMAINDERS)
        fits(function, "master_weights", masters, is_one, names)
        is_size = isinstance(size, int) and size >= 0
        fits(function, "min_quantized_size", size, is_size, "an int >= 0")
        checks.flag(function, "stochastic_rounding", self.stochastic_rounding)
        if self.stochastic_rounding and masters:
            actual = f"True with master_weights={masters!r}"
            raise ArgumentError(function, "stochastic_rounding", actual, "one of the two")

    def describe(self, p: torch.Tensor) -> list[str]:
        """List the options that have an effect on the entries of p's state."""
        options, entry = [], self.find_master_entry(p)
        if self.moment_dtype(p) != Codec().moment_dtype(p):
            options.append(f"state_dtype={self.state_dtype!r}")
        if entry is not None:
            options.append(f"master_weights={True if entry == MASTER else entry!r}")
        return options

    def moment_dtype(self, p: torch.Tensor) -> torch.dtype:
        """The dtype of this parameter's moments; uint8 stands for codes.

        Vectors, small tensors and complex ones keep float32; float64 parameters keep float64.
        """
        if p.dtype in (torch.float64, torch.complex64, torch.complex128):
            return p.dtype
        if self.state_dtype == EIGHT_BIT:
            large = p.ndim > 1 and p.numel() >= self.min_quantized_size
            return torch.uint8 if large else torch.float32
        assert isinstance(self.state_dtype, torch.dtype)
        return self.state_dtype

    def rounds(self, p: torch.Tensor) -> bool:
        """Whether the parameter is rounded stochastically."""
        return self.stochastic_rounding and p.dtype == torch.bfloat16

    def find_master_entry(self, p: torch.Tensor) -> str | None:
        """Find the entry that completes a 16-bit parameter to float32; None if it has none."""
        if self.master_weights is False or p.dtype not in (torch.bfloat16, torch.float16):
            return None
        if self.master_weights in REMAINDERS and p.dtype == torch.bfloat16:
            return str(self.master_weights)
        return MASTER

    def has(self, state: State, p: torch.Tensor, moments: Moments) -> bool:
        """Whether the state has all moments."""
        return all(name in state for name in self.entries(p, moments).moments)

    def entries(self, p: torch.Tensor, moments: Moments) -> Entries:
        """The entries that a state of p has."""
        own = {name: moment for name, moment in moments.items() if not moment.is_companion}
        blocks = [name for name, moment in own.items() if self.is_in_blocks(p, moment)]
        names = tuple(name + CODES if name in blocks else name for name in own)
        absmaxes = tuple(name + ABSMAX for name in blocks)
        companion = next((name for name in moments if name not in own), None)
        return Entries(self.find_master_entry(p), names, absmaxes, companion)

    def is_in_blocks(self, p: torch.Tensor, moment: Moment) -> bool:
        """Whether a moment is stored as codes; averages and companions never are."""
        own = moment.shape is None and not moment.is_companion
        return own and self.moment_dtype(p) == torch.uint8

    def new_state(self, p: torch.Tensor, moments: Moments) -> State:
        """Make a new state: no steps, zero moments, and the master or the remainder."""
        state: State = {STEP: torch.zeros((), dtype=torch.float32, device=p.device)}
        for name, moment in moments.items():
            if self.is_in_blocks(p, moment):
                state[name + CODES], state[name + ABSMAX] = _sharded_blocks.make_zeros(
                    p, moment.signed
                )
                continue
            if moment.is_companion:
                state[name] = p.detach().to(_companion_dtype(p), copy=True)
                continue
            dtype = self.moment_dtype(p)
            dtype = torch.float32 if dtype == torch.uint8 else dtype  # averages have no codes
            if moment.shape is None:
                state[name] = torch.zeros_like(p, dtype=dtype)
            else:
                state[name] = make_zeros(p, moment.shape, moment.dims, dtype)
        self._add_master(state, p, p.detach())
        return state

    def adopt(self, function: str, p: torch.Tensor, saved: State, moments: Moments) -> State:
        """Convert a saved state of any codec to this codec.

        Entries in the right form stay the same bit for bit. Raises ArgumentError if the state does
        not fit.
        """
        known, entries = {STEP, MASTER, *REMAINDERS}, saved.keys()
        saved = drop_missing(saved)
        if not saved:
            return {}
        entry = self.find_master_entry(p)
        if entry in entries and entry not in saved:
            # Another entry may have had the low bits, which the flat form does not show.
            actual = f"without {entry}, in torch's flat form"
            raise ArgumentError(function, "state_dict", actual, "with it, or in the nested form")
        # torch's SGD has a state after its first step, but no count. Other counts may be ints.
        state: State = {STEP: _to_step(saved.get(STEP, 1.0))}
        for name, moment in moments.items():
            if moment.is_companion:
                value = saved.get(name)
                if value is None:
                    value = _read_saved_param(function, p, saved)
                check_entry(function, name, value, p, p.shape)
                state[name] = value.to(p.device, _companion_dtype(p), copy=True)
                known.add(name)
                continue
            value = _read_saved_moment(function, p, saved, name, moment)
            known |= {name, name + CODES, name + ABSMAX}
            if self.is_in_blocks(p, moment) and name + CODES in saved:
                state[name + CODES] = saved[name + CODES].to(p.device)
                state[name + ABSMAX] = saved[name + ABSMAX].to(p.device)
            else:
                self._store(state, name, p, value.to(p.device), moment)
        self._add_master(state, p, _read_saved_param(function, p, saved))
        state |= {key: value for key, value in saved.items() if key not in known}
        return state

    def _store(
        self, state: State, name: str, p: torch.Tensor, value: torch.Tensor, moment: Moment
    ) -> None:
        if self.is_in_blocks(p, moment):
            codes, absmax = _sharded_blocks.quantize(p, local_part(value), moment.signed)
            if not moment.signed:
                codes = keep_positive(codes, local_part(value))
            state[name + CODES] = shard_like(p, codes)
            state[name + ABSMAX] = _sharded_blocks.wrap_absmax(p, absmax)
        else:
            state[name] = value.to(self.moment_dtype(p))

    def _add_master(self, state: State, p: torch.Tensor, value: torch.Tensor) -> None:
        """Add the master or the remainder; `value` is the parameter in full precision."""
        entry = self.find_master_entry(p)
        if entry == MASTER:
            state[MASTER] = value.to(p.device, torch.float32, copy=True)
        elif entry is not None:
            short = entry == SHORT_REMAINDER
            empty = torch.empty(0, dtype=torch.int8 if short else torch.int16, device="cpu")
            part = local_part(p.detach())
            high, low = split_param(local_part(value).float().to(p.device), p.dtype, empty)
            assert low is not None
            # At a tie a rounded master is the even neighbour, which may be the one below.
            limits = torch.iinfo(low.dtype)
            above = high.view(torch.int16).int() - part.view(torch.int16).int()
            is_below = (above == 1) & (low == limits.min)
            state[entry] = shard_like(p, low.masked_fill(is_below, limits.max))


def drop_missing(saved: State) -> State:
    """Drop the entries that a saved state lacks: torch's flat checkpoints have {} for them."""
    return {
        key: v for key, v in saved.items() if not (v is None or (isinstance(v, dict) and not v))
    }


def find_remainder(state: State) -> str | None:
    """The name of a state's remainder, if it has one."""
    return next((name for name in REMAINDERS if name in state), None)


def _companion_dtype(p: torch.Tensor) -> torch.dtype:
    return torch.float32 if p.dtype in (torch.bfloat16, torch.float16) else p.dtype


def _to_step(step: Any) -> torch.Tensor:
    """Convert a number of steps to a dtype in which kernels count."""
    if not isinstance(step, torch.Tensor):
        return torch.tensor(float(step), dtype=torch.float32, device="cpu")
    return step if step.dtype in (torch.float32, torch.float64) else step.float()


def _read_saved_moment(
    function: str, p: torch.Tensor, saved: State, name: str, moment: Moment
) -> torch.Tensor:
    if name in saved:
        value = saved[name]
        if moment.shape is None:
            check_entry(function, name, value, p, p.shape)
        else:
            check_entry(function, name, value, p, moment.shape, dims=moment.dims)
        return value
    if name + CODES not in saved:
        raise ArgumentError(
            function, "state_dict", f"without {name}, of a {list(p.shape)} parameter", "with it"
        )
    codes: Any = saved[name + CODES]
    absmax: Any = saved.get(name + ABSMAX)
    check_entry(function, name + CODES, codes, p, p.shape, torch.uint8)
    shape = scales_shape(p.shape)
    check_entry(
        function, name + ABSMAX, absmax, p, shape, torch.float32, _sharded_blocks.ABSMAX_DIMS
    )
    return shard_like(
        p, _sharded_blocks.dequantize(p, local_part(codes), local_part(absmax), moment.signed)
    )


def _read_saved_param(function: str, p: torch.Tensor, saved: State) -> torch.Tensor:
    if MASTER in saved:
        check_entry(function, MASTER, saved[MASTER], p, p.shape)
        return saved[MASTER]
    name = find_remainder(saved)
    if name is None or p.dtype != torch.bfloat16:
        return p.detach()
    value = saved[name]
    # Earlier states have both kinds under the first name.
    short = name == SHORT_REMAINDER or getattr(value, "dtype", None) == torch.int8
    check_entry(function, name, value, p, p.shape, torch.int8 if short else torch.int16)
    return shard_like(p, read_param(local_part(p.detach()), local_part(value).to(p.device)))


def check_entry(
    function: str,
    key: str,
    value: Any,
    p: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    dims: Sequence[int | None] | None = None,
) -> None:
    """Check the shape, the dtype and the placements of an entry of a saved state of p."""
    accepted = f"a {dtype or 'floating-point'} tensor of shape {list(shape)}".replace("torch.", "")
    argument = f"{key} in state_dict"
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(function, argument, f"a {type(value).__name__}", accepted)
    if is_dtensor(value) != is_dtensor(p):
        names = ["a plain tensor", "a DTensor, as its parameter is"]
        raise ArgumentError(function, argument, names[is_dtensor(value)], names[is_dtensor(p)])
    fits = value.dtype == dtype if dtype else value.is_floating_point() or value.is_complex()
    if value.shape != torch.Size(shape) or not fits:
        actual = f"of {str(value.dtype).removeprefix('torch.')} and shape {list(value.shape)}"
        raise ArgumentError(function, argument, actual, accepted)
    if is_dtensor(p):
        expected = find_placements(p, range(p.ndim) if dims is None else dims)
        if value.placements != expected:  # type: ignore[attr-defined]
            actual = f"on {value.placements}"  # type: ignore[attr-defined]
            raise ArgumentError(function, argument, actual, f"{expected}, as its parameter is")
