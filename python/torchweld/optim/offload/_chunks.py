"""Host memory for activations: page-locked chunks, reused from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchweld.optim.offload._buckets import ALIGNMENT, host_memory
from torchweld.optim.offload._transfers import Transfers
from torchweld.optim.offload.policy import search_chunk_size


class Chunk:
    """A buffer that tensors fill in order; it is reset when the last of them is released."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer, self.used, self.tenants = buffer, 0, 0

    def has_room(self, nbytes: int) -> bool:
        """Whether so many bytes are free after the last tensor."""
        return self.buffer.nbytes - self.used >= nbytes

    def leave(self) -> None:
        """Release a tensor; called once for each."""
        self.tenants -= 1
        if self.tenants == 0:
            self.used = 0


class Chunks:
    """All chunks. Until the first `fit`, each tensor has a chunk of its own."""

    def __init__(self, transfers: Transfers, around: int) -> None:
        self._transfers, self._around = transfers, max(around, ALIGNMENT)
        self._size = 0
        self._fitted = 0  # total bytes for which the size was chosen
        self._chunks: list[Chunk] = []
        self._open: Chunk | None = None

    def nbytes(self) -> int:
        """The bytes of all chunks, used or not."""
        return sum(chunk.buffer.nbytes for chunk in self._chunks)

    def take(self, nbytes: int) -> tuple[Chunk, torch.Tensor]:
        """Allocate so many bytes of a chunk."""
        rounded = _rounded(nbytes)
        chunk = self._open
        if chunk is None or not chunk.has_room(rounded):
            empty = [c for c in self._chunks if c.tenants == 0 and c.has_room(rounded)]
            chunk = min(empty, key=lambda c: c.buffer.nbytes) if empty else self._new(rounded)
            self._open = chunk
        piece = chunk.buffer[chunk.used : chunk.used + nbytes]
        chunk.used += rounded
        chunk.tenants += 1
        return chunk, piece

    def _new(self, nbytes: int) -> Chunk:
        nbytes = max(nbytes, self._size)
        with host_memory("activations", nbytes):
            buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            self._transfers.pin(buffer)
        self._chunks.append(Chunk(buffer))
        return self._chunks[-1]

    def fit(self, sizes: Sequence[int]) -> None:
        """Choose the chunk size that wastes least for these tensors, and free empty chunks.

        Keep the chunks if the total fits and is more than half of the one they were chosen for:
        locking memory takes long, and sequence lengths may vary from step to step.
        """
        rounded = [_rounded(size) for size in sizes]
        if self._fitted // 2 < sum(rounded) <= self._fitted or not rounded:
            return
        self._fitted = sum(rounded)
        least, step = max(self._around // 2, 1), max(self._around // 16, 1)
        self._size = search_chunk_size(rounded, least, 2 * self._around, step).size
        for chunk in self._chunks:
            if chunk.tenants == 0:
                self._transfers.unpin(chunk.buffer)
        self._chunks = [chunk for chunk in self._chunks if chunk.tenants > 0]
        self._open = None


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
