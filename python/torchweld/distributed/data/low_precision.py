"""FSDP2's reduce-scatter in 8 bits, with the sum in float32.

Each rank quantises what it sends, with a scale per block, and sums what it receives in float32. A
sum inside the collective would round after every addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from torchweld import checks
from torchweld.collectives.wire import Wire
from torchweld.errors import ArgumentError

_NAME = "LowPrecisionReduceScatter"
_FP8 = torch.float8_e4m3fn
# A block is scaled so that its largest magnitude becomes this.
_LARGEST = {"int8": 127.0, "fp8": 448.0}


class LowPrecisionReduceScatter:
    """A collective for FSDPModule.set_custom_reduce_scatter; one per module.

    Args:
        format: "int8", or "fp8" for float8_e4m3fn.
        block: how many elements share a scale, a float32.
        rounding: "nearest", or "stochastic", which is unbiased.
        feedback: whether to add the rounding errors to the next gradients; this takes 4 bytes for
            each element of the module's gradients.
        seed: seed of stochastic rounding, which differs between ranks.

    The error of an element of the result is at most the sum of one term per rank. With int8 the
    term is the largest magnitude in the element's block / 254. With fp8 it is 1/16 of the element's
    magnitude, or the block's largest / 2^18.8 if that is more. Stochastic rounding doubles the
    terms. A block with a NaN or an infinity becomes NaN and does not change the errors.
    `bytes_sent` counts the bytes that this rank has sent.
    """

    def __init__(
        self,
        format: str = "int8",
        *,
        block: int = 256,
        rounding: str = "nearest",
        feedback: bool = False,
        seed: int = 0,
    ) -> None:
        for name, value, accepted in (
            ("format", format, ("int8", "fp8")),
            ("rounding", rounding, ("nearest", "stochastic")),
        ):
            if value not in accepted:
                raise ArgumentError(_NAME, name, repr(value), " or ".join(map(repr, accepted)))
        if not isinstance(block, int) or block < 1:
            raise ArgumentError(_NAME, "block", repr(block), "an int >= 1")
        checks.flag(_NAME, "feedback", feedback)
        self._format, self._block, self._feedback = format, block, feedback
        is_int = isinstance(seed, checks.INTEGER)
        checks.fits("LowPrecisionReduceScatter", "seed", seed, is_int, "an int")
        self._is_stochastic, self._seed = rounding == "stochastic", seed
        self._generator: torch.Generator | None = None
        self._error: torch.Tensor | None = None
        self._wires: dict[Any, Wire] = {}

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to others."""
        return sum(wire.bytes_sent for wire in self._wires.values())

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate a buffer for the reduction."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce row r of the input, [ranks, elements of a shard], to rank r's output."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            accepted = "SUM or AVG; model.set_force_sum_reduction_for_comms(True) gives SUM"
            raise ArgumentError(_NAME, "op", str(op), accepted)
        if group not in self._wires:
            self._wires[group] = Wire(_NAME, group)
        wire = self._wires[group]
        if output_tensor.numel() == 0:
            return
        value = input_tensor.view(wire.size, -1).float()
        if self._error is not None:
            if self._error.shape != value.shape:
                actual = f"of {input_tensor.numel()} elements"
                accepted = (
                    f"of {self._error.numel()}, as before: each module needs its own instance"
                )
                raise ArgumentError(_NAME, "input_tensor", actual, accepted)
            value = value + self._error
        message = self._encode(value, wire.rank)
        if self._feedback:
            error = value - self._decode(message, value.shape[1])
            kept = torch.zeros_like(value) if self._error is None else self._error
            self._error = torch.where(error.isfinite(), error, kept)
        received = wire.to_all(message).wait()
        total = torch.zeros_like(value[0])
        for row in received:
            total += self._decode(row.unsqueeze(0), value.shape[1])[0]
        if op == dist.ReduceOp.AVG:
            total /= wire.size
        output_tensor.copy_(total)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's errors, and the state of its rounding."""
        generator = None if self._generator is None else self._generator.get_state()
        return {"error": self._error, "generator": generator}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's state; a call rejects errors from another number of ranks."""
        self._error = state_dict["error"]
        if state_dict["generator"] is not None:
            device = "cpu" if self._error is None else self._error.device
            self._generator = torch.Generator(device)
            self._generator.set_state(state_dict["generator"])

    # --- The format -----------------------------------------------------------------------------

    def _count_blocks(self, width: int) -> int:
        return -(-width // self._block)

    def _encode(self, value: torch.Tensor, rank: int) -> torch.Tensor:
        """Encode each row as bytes: its scales, then its codes."""
        rows, width = value.shape
        fill = self._count_blocks(width) * self._block - width
        blocks = torch.nn.functional.pad(value, (0, fill)).view(rows, -1, self._block)
        largest = blocks.abs().amax(2)  # propagates NaN
        scale = largest / _LARGEST[self._format]
        divisor = torch.where(scale == 0, 1.0, scale).unsqueeze(2)
        fractions = (blocks / divisor).view(rows, -1)[:, :width]
        fractions = fractions.clamp(-_LARGEST[self._format], _LARGEST[self._format])
        if self._is_stochastic:
            fractions = self._round_stochastically(fractions, rank)
        if self._format == "int8":
            codes = fractions.nan_to_num(0.0).round().to(torch.int8)
        else:
            codes = fractions.to(_FP8)
        return torch.cat([scale.view(torch.uint8).view(rows, -1), codes.view(torch.uint8)], 1)

    def _decode(self, message: torch.Tensor, width: int) -> torch.Tensor:
        """Decode bytes to rows of float32."""
        bytes_of_scales = 4 * self._count_blocks(width)
        scales, codes = message.split([bytes_of_scales, width], 1)
        # Copy: a view as wider elements must be aligned to them.
        scale = scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
        values = codes.view(torch.int8 if self._format == "int8" else _FP8).float()
        # If codes have no NaN, the scale holds it.
        return values * scale.repeat_interleave(self._block, 1)[:, :width]

    def _round_stochastically(self, fractions: torch.Tensor, rank: int) -> torch.Tensor:
        """Round stochastically to numbers that the codes represent."""
        if self._generator is None:
            self._generator = torch.Generator(fractions.device)
            self._generator.manual_seed(self._seed * 65537 + rank)
        spacing: float | torch.Tensor = 1.0
        if self._format == "fp8":  # 3 bits of a mantissa, and subnormals below 2^-6
            exponent = torch.frexp(fractions).exponent - 1
            spacing = torch.ldexp(torch.ones_like(fractions), exponent.clamp(min=-6) - 3)
        noise = torch.rand(fractions.shape, generator=self._generator, device=fractions.device)
        largest = _LARGEST[self._format]
        return ((fractions / spacing + noise).floor() * spacing).clamp(-largest, largest)


def reduce_in_low_precision(
    model: torch.nn.Module, format: str = "int8", **arguments: Any
) -> list[LowPrecisionReduceScatter]:
    """Give every FSDPModule in a model a LowPrecisionReduceScatter, in the order of modules().

    Arguments go to LowPrecisionReduceScatter. Returns the instances, for their bytes and states.
    """
    from torch.distributed.fsdp import FSDPModule

    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        accepted = "one that fully_shard was called on"
        raise ArgumentError("reduce_in_low_precision", "model", "without an FSDPModule", accepted)
    collectives = []
    for number, module in enumerate(modules):
        collectives.append(LowPrecisionReduceScatter(format, **{"seed": number} | arguments))
        module.set_custom_reduce_scatter(collectives[-1])  # type: ignore[arg-type]
    return collectives
