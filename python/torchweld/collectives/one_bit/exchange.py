"""The mean of tensors over ranks from their signs, with errors that are carried over.

Every tensor is cut into one chunk per rank. As a worker, a rank quantises each tensor with one
scale and sends the bits of each chunk to its rank. As a server, it averages the chunks that it
receives, quantises the mean with a new scale, and sends it to all ranks. The result is bits and a
scale for each chunk, equal on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from torchweld.collectives.runs import divide_into_runs
from torchweld.collectives.wire import Pending, Status, Wire
from torchweld.ops.quantize_one_bit import (
    blocks_of,
    bytes_of,
    dequantize_one_bit,
    mean_into,
    quantize_into,
    whole,
)

BUCKET = 1 << 25  # elements that are exchanged together: 4 MiB of bits


class Errors(NamedTuple):
    """Quantisation errors of this rank's tensor, [elements], and of its chunk of the mean."""

    worker: torch.Tensor | None
    server: torch.Tensor | None

    def to(self, *where: Any) -> Errors:
        """Move or cast the errors that are there."""
        return Errors(*(e if e is None else e.to(*where) for e in self))


NONE = Errors(None, None)


class Packed(NamedTuple):
    """A tensor of `size` elements as bits, with a scale for each chunk, empty chunks included."""

    bits: torch.Tensor
    scale: torch.Tensor
    size: int

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Compute the elements, [size]."""
        block = chunk_of(self.size, len(self.scale))
        scale = self.scale[: blocks_of(self.size, block)]
        return dequantize_one_bit(self.bits, scale, self.size, block=block, dtype=dtype)


def chunk_of(size: int, ranks: int) -> int:
    """The number of elements that each rank averages: whole bytes of bits."""
    return max(8, 8 * -(-size // (8 * ranks)))


def count_of(size: int, wire: Wire) -> int:
    """The number of elements in this rank's chunk; the last chunks may be empty."""
    chunk = chunk_of(size, wire.size)
    return min(max(size - wire.rank * chunk, 0), chunk)


class OneBitExchange:
    """One reduction. The constructor starts it, and finish() returns the means and new errors."""

    def __init__(
        self,
        wire: Wire,
        tensors: Sequence[torch.Tensor],
        errors: Sequence[Errors],
        phase: Sequence[object] = (),
        error_dtype: torch.dtype = torch.float32,
        status: Status = Status.READY,
    ) -> None:
        self._wire, self._errors, self._error_dtype = wire, errors, error_dtype
        self._sizes = [t.numel() for t in tensors]
        self._packed: list[Packed] = []
        self._worker: list[torch.Tensor] = []
        for t, error in zip(tensors, errors, strict=True):
            rest = torch.empty(t.numel(), dtype=error_dtype, device=t.device)
            bits, scale = quantize_into(t.reshape(-1), error.worker, rest, whole(t.numel()))
            self._packed.append(Packed(bits, scale, t.numel()))
            self._worker.append(rest)
        if status is Status.READY and tensors and not self._is_finite():
            status = Status.NOT_FINITE
        self.status = wire.agree(tensors, status, "1 bit", *phase)
        if self.status is not Status.READY or wire.size == 1:
            return
        every = range(len(self._sizes))
        self._buckets = divide_into_runs(every, self._sizes.__getitem__, BUCKET)
        self._under_way = [wire.to_all(self._pack_for_servers(bucket)) for bucket in self._buckets]

    def finish(self) -> tuple[list[Packed], list[Errors]]:
        """Wait for the means; return them and the new errors."""
        if self._wire.size == 1:  # the mean is the tensor itself, and the server has no error
            return self._packed, [Errors(worker, None) for worker in self._worker]
        server: list[torch.Tensor] = []
        gathers: list[Pending] = []
        for bucket, pending in zip(self._buckets, self._under_way, strict=True):
            rests, message = self._serve(bucket, pending.wait())
            server += rests
            gathers.append(self._wire.gather(message))
        pairs = zip(self._buckets, gathers, strict=True)
        self._packed = [one for b, pending in pairs for one in self._unpack(b, pending.wait())]
        if self._packed and not self._is_finite():  # all ranks agree: each has all scales
            self._wire._refuse("the mean's scale overflows")
        return self._packed, list(map(Errors, self._worker, server))

    def _is_finite(self) -> bool:
        scales = torch.cat([packed.scale for packed in self._packed])
        return bool(scales.isfinite().all())

    def _chunk_bytes(self, i: int) -> int:
        return chunk_of(self._sizes[i], self._wire.size) // 8

    def _pack_for_servers(self, bucket: Sequence[int]) -> torch.Tensor:
        """Make a row for each rank: the scales of all tensors, and the bits of its chunks."""
        ranks = self._wire.size
        scales = torch.cat([self._packed[i].scale for i in bucket]).view(torch.uint8)
        rows = [scales.expand(ranks, -1)]
        for i in bucket:
            fill = ranks * self._chunk_bytes(i) - len(self._packed[i].bits)
            rows.append(torch.nn.functional.pad(self._packed[i].bits, (0, fill)).view(ranks, -1))
        return torch.cat(rows, 1)

    def _serve(
        self, bucket: Sequence[int], received: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Average this rank's chunks; return the new errors, and a message for all ranks."""
        scales, of_tensors = self._split(bucket, received)
        rests, scales_of_means, bits = [], [], []
        for at, (i, votes) in enumerate(zip(bucket, of_tensors, strict=True)):
            count = count_of(self._sizes[i], self._wire)
            rest = torch.empty(count, dtype=self._error_dtype, device=votes.device)
            votes = votes[:, : bytes_of(count)].contiguous()
            scale = scales[:, at : at + 1].contiguous()
            of_mean, its_scale = mean_into(
                votes, scale, self._errors[i].server, rest, count, whole(count)
            )
            rests.append(rest)
            scales_of_means.append(its_scale)
            fill = self._chunk_bytes(i) - len(of_mean)
            bits.append(torch.nn.functional.pad(of_mean, (0, fill)))
        return rests, torch.cat([torch.cat(scales_of_means).view(torch.uint8), *bits])

    def _unpack(self, bucket: Sequence[int], received: torch.Tensor) -> Iterable[Packed]:
        scales, of_tensors = self._split(bucket, received)
        for at, (i, bits) in enumerate(zip(bucket, of_tensors, strict=True)):
            size = self._sizes[i]
            yield Packed(bits.reshape(-1)[: bytes_of(size)].clone(), scales[:, at].clone(), size)

    def _split(
        self, bucket: Sequence[int], received: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Split a message into scales, [ranks, tensors], and each tensor's bits, [ranks, bytes]."""
        scales = received[:, : 4 * len(bucket)].contiguous().view(torch.float32)
        sizes = [self._chunk_bytes(i) for i in bucket]
        return scales, received[:, 4 * len(bucket) :].split(sizes, 1)


# --- Errors, independent of the number of ranks --------------------------------------------------


def gather_errors(wire: Wire, errors: Sequence[Errors], sizes: Sequence[int]) -> list[Errors]:
    """Gather the errors of all ranks: a collective.

    The result is the mean of the workers' errors, and the servers' errors of all chunks, both
    float32, [elements].
    """
    owed = []
    for error, size in zip(errors, sizes, strict=True):
        assert error.worker is not None
        worker = wire.average(error.worker.float().clone()).wait()
        server = torch.zeros(chunk_of(size, wire.size), dtype=torch.float32, device=worker.device)
        if error.server is not None:
            server[: len(error.server)] = error.server
        of_all = wire.gather(server).wait().view(-1)
        owed.append(Errors(worker, torch.nn.functional.pad(of_all, (0, size))[:size].clone()))
    return owed


def take_own_errors(wire: Wire, owed: Errors, dtype: torch.dtype) -> Errors:
    """Take this rank's share of gathered errors: the workers' mean, and the error of its chunk.

    A single process has no server error: it takes the sum of both.
    """
    assert owed.worker is not None
    assert owed.server is not None
    if wire.size == 1:
        return Errors((owed.worker + owed.server).to(dtype), None)
    size = owed.worker.numel()
    begin = wire.rank * chunk_of(size, wire.size)
    server = owed.server[begin : begin + count_of(size, wire)]
    return Errors(owed.worker.to(dtype, copy=True), server.to(dtype, copy=True))
