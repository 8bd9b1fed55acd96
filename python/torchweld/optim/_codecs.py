"""How a parameter's state is stored: its tensors, their dtypes, and conversions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from torchweld.errors import ArgumentError
from torchweld.ops.optimizer.reference import read_param, split_param
from torchweld.ops.quantize_8bit import keep_positive, scales_shape
from torchweld.optim import _sharded_blocks
from torchweld.optim._shards import is_one, like, local, placements, zeros_of

EIGHT_BIT = "8bit"
REMAINDER = "remainder"
# Entries of a parameter's state; a moment in blocks has two.
STEP, MASTER, CODES, ABSMAX = "step", "master", "_codes", "_absmax"

State = dict[str, Any]


class Moment(NamedTuple):
    """A moment of past gradients: a number per element, or averages of another shape."""

    signed: bool
    shape: torch.Size | None = None
    # For each dimension of the averages, the parameter's dimension; None: it is averaged over.
    dims: tuple[int | None, ...] = ()


SIGNED, UNSIGNED = Moment(True), Moment(False)
Moments = Mapping[str, Moment]


class Entries(NamedTuple):
    """The entries of a parameter's state that a step uses."""

    master: str | None
    moments: tuple[str, ...]  # numbers or codes
    absmaxes: tuple[str, ...]  # of the codes

    def all(self) -> list[str]:
        masters = [self.master] if self.master else []
        return [STEP, *masters, *self.moments, *self.absmaxes]


@dataclass(frozen=True)
class Codec:
    """How a parameter group stores its states and parameters."""

    state_dtype: torch.dtype | str = torch.float32
    master_weights: bool | str = False
    min_quantized_size: int = 4096
    stochastic_rounding: bool = False

    def check(self, function: str) -> None:
        accepted = (torch.float32, torch.bfloat16, EIGHT_BIT)
        if self.state_dtype not in accepted:
            names = 'torch.float32, torch.bfloat16 or "8bit"'
            raise ArgumentError(function, "state_dtype", repr(self.state_dtype), names)
        if self.master_weights not in (False, True, REMAINDER):
            names = 'False, True or "remainder"'
            raise ArgumentError(function, "master_weights", repr(self.master_weights), names)
        size = self.min_quantized_size
        if not isinstance(size, int) or size < 0:
            raise ArgumentError(function, "min_quantized_size", repr(size), "an int >= 0")
        rounding, masters = self.stochastic_rounding, self.master_weights
        if not isinstance(rounding, bool):
            raise ArgumentError(function, "stochastic_rounding", repr(rounding), "True or False")
        if rounding and masters:
            came = f"True with master_weights={masters!r}"
            raise ArgumentError(function, "stochastic_rounding", came, "one of the two")

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

    def master_entry(self, p: torch.Tensor) -> str | None:
        """The state's entry that completes a 16-bit parameter to float32, if any."""
        if self.master_weights is False or p.dtype not in (torch.bfloat16, torch.float16):
            return None
        if self.master_weights == REMAINDER and p.dtype == torch.bfloat16:
            return REMAINDER
        return MASTER

    def has(self, state: State, p: torch.Tensor, moments: Moments) -> bool:
        """Whether the state has all moments."""
        return all(name in state for name in self.entries(p, moments).moments)

    def entries(self, p: torch.Tensor, moments: Moments) -> Entries:
        """The entries that a state of p has."""
        blocks = [name for name, moment in moments.items() if self.in_blocks(p, moment)]
        names = tuple(name + CODES if name in blocks else name for name in moments)
        return Entries(self.master_entry(p), names, tuple(name + ABSMAX for name in blocks))

    def in_blocks(self, p: torch.Tensor, moment: Moment) -> bool:
        """Whether it is stored as codes; averages never are."""
        return moment.shape is None and self.moment_dtype(p) == torch.uint8

    def new_state(self, p: torch.Tensor, moments: Moments) -> State:
        """A new state: no steps, zero moments, and the master or the remainder."""
        state: State = {STEP: torch.zeros((), dtype=torch.float32, device=p.device)}
        for name, moment in moments.items():
            if self.in_blocks(p, moment):
                state[name + CODES], state[name + ABSMAX] = _sharded_blocks.zeros(p, moment.signed)
                continue
            dtype = self._wide(p)
            if moment.shape is None:
                state[name] = torch.zeros_like(p, dtype=dtype)
            else:
                state[name] = zeros_of(p, moment.shape, moment.dims, dtype)
        self._add_master(state, p, p.detach())
        return state

    def adopt(self, function: str, p: torch.Tensor, saved: State, moments: Moments) -> State:
        """Convert a saved state of any codec to this one.

        Entries in the right form are kept bit for bit. Raises ArgumentError if the state does not
        fit.
        """
        known, given = {STEP, MASTER, REMAINDER}, saved
        saved = present(given)
        if not saved:
            return {}
        entry = self.master_entry(p)
        if entry in given and entry not in saved:
            # Another entry may have had the low bits: the flat form does not show it.
            came = f"without {entry}, in torch's flat form"
            raise ArgumentError(function, "state_dict", came, "with it, or in the nested form")
        # torch's SGD has a state after its first step but no count; others count in ints.
        state: State = {STEP: _as_step(saved.get(STEP, 1.0))}
        for name, moment in moments.items():
            value = _saved_moment(function, p, saved, name, moment)
            known |= {name, name + CODES, name + ABSMAX}
            if self.in_blocks(p, moment) and name + CODES in saved:
                state[name + CODES] = saved[name + CODES].to(p.device)
                state[name + ABSMAX] = saved[name + ABSMAX].to(p.device)
            else:
                self._store(state, name, p, value.to(p.device), moment)
        self._add_master(state, p, _saved_param(function, p, saved))
        state |= {key: value for key, value in saved.items() if key not in known}
        return state

    def _wide(self, p: torch.Tensor) -> torch.dtype:
        dtype = self.moment_dtype(p)
        return torch.float32 if dtype == torch.uint8 else dtype

    def _store(
        self, state: State, name: str, p: torch.Tensor, value: torch.Tensor, moment: Moment
    ) -> None:
        if self.in_blocks(p, moment):
            codes, absmax = _sharded_blocks.quantize(p, local(value), moment.signed)
            if not moment.signed:
                codes = keep_positive(codes, local(value))
            state[name + CODES] = like(p, codes)
            state[name + ABSMAX] = _sharded_blocks.absmax_like(p, absmax)
        else:
            state[name] = value.to(self.moment_dtype(p))

    def _add_master(self, state: State, p: torch.Tensor, value: torch.Tensor) -> None:
        """Add the master or the remainder; `value` is the parameter in full precision."""
        entry = self.master_entry(p)
        if entry == MASTER:
            state[MASTER] = value.to(p.device, torch.float32, copy=True)
        elif entry == REMAINDER:
            empty = torch.empty(0, dtype=torch.int16, device="cpu")
            low = split_param(local(value).float().to(p.device), p.dtype, empty)[1]
            assert low is not None
            state[REMAINDER] = like(p, low)


def present(saved: State) -> State:
    """The entries that a saved state has: torch's flat checkpoints have {} for one they lack."""
    return {
        key: v for key, v in saved.items() if not (v is None or (isinstance(v, dict) and not v))
    }


def _as_step(step: Any) -> torch.Tensor:
    """A number of steps, in the dtype in which kernels count."""
    if not isinstance(step, torch.Tensor):
        return torch.tensor(float(step), dtype=torch.float32, device="cpu")
    return step if step.dtype in (torch.float32, torch.float64) else step.float()


def _saved_moment(
    function: str, p: torch.Tensor, saved: State, name: str, moment: Moment
) -> torch.Tensor:
    if name in saved:
        value = saved[name]
        if moment.shape is None:
            _check(function, name, value, p, p.shape)
        else:
            _check(function, name, value, p, moment.shape, dims=moment.dims)
        return value
    if name + CODES not in saved:
        raise ArgumentError(
            function, "state_dict", f"without {name}, of a {list(p.shape)} parameter", "with it"
        )
    codes: Any = saved[name + CODES]
    absmax: Any = saved.get(name + ABSMAX)
    _check(function, name + CODES, codes, p, p.shape, torch.uint8)
    shape = scales_shape(p.shape)
    _check(function, name + ABSMAX, absmax, p, shape, torch.float32, _sharded_blocks.ABSMAX_DIMS)
    return like(p, _sharded_blocks.dequantize(p, local(codes), local(absmax), moment.signed))


def _saved_param(function: str, p: torch.Tensor, saved: State) -> torch.Tensor:
    if MASTER in saved:
        _check(function, MASTER, saved[MASTER], p, p.shape)
        return saved[MASTER]
    if REMAINDER in saved and p.dtype == torch.bfloat16:
        _check(function, REMAINDER, saved[REMAINDER], p, p.shape, torch.int16)
        return like(p, read_param(local(p.detach()), local(saved[REMAINDER]).to(p.device)))
    return p.detach()


def _check(
    function: str,
    key: str,
    value: Any,
    p: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
    dims: Sequence[int | None] | None = None,
) -> None:
    accepted = f"a {dtype or 'floating-point'} tensor of shape {list(shape)}".replace("torch.", "")
    argument = f"{key} in state_dict"
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(function, argument, f"a {type(value).__name__}", accepted)
    if is_one(value) != is_one(p):
        names = ["a plain tensor", "a DTensor, as its parameter is"]
        raise ArgumentError(function, argument, names[is_one(value)], names[is_one(p)])
    fits = value.dtype == dtype if dtype else value.is_floating_point() or value.is_complex()
    if value.shape != torch.Size(shape) or not fits:
        came = f"of {str(value.dtype).removeprefix('torch.')} and shape {list(value.shape)}"
        raise ArgumentError(function, argument, came, accepted)
    if is_one(p):
        expected = placements(p, range(p.ndim) if dims is None else dims)
        if value.placements != expected:  # type: ignore[attr-defined]
            came = f"on {value.placements}"  # type: ignore[attr-defined]
            raise ArgumentError(function, argument, came, f"{expected}, as its parameter is")
