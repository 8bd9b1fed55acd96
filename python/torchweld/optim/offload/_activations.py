"""Copies activations to the host in the forward pass and prefetches them in the backward pass."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchweld.optim.offload._buckets import explain_memory_errors
from torchweld.optim.offload._machine import Arrival, Transfers, allocate_pages
from torchweld.optim.offload._policy import choose_resident

# A tensor that takes less than this fraction of its storage is part of something larger, such as a
# batch of a dataset, which stays on the device.
_SMALLEST_PART = 1 / 8


class Buffer:
    """Host memory for one saved tensor, which is free while nothing holds it."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.is_free = memory, False
        self.returned: Arrival | None = None  # the last copy from it to the device


class Buffers:
    """Page-locked host memory for activations, reused from step to step."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._buffers: list[Buffer] = []

    def nbytes(self) -> int:
        """The bytes of all buffers, also of free ones."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def take(self, nbytes: int) -> Buffer:
        """Return the smallest free buffer that fits, of at most twice the size."""
        fits = [b for b in self._buffers if b.is_free and nbytes <= b.memory.nbytes <= 2 * nbytes]
        if not fits:
            with explain_memory_errors("activations", nbytes):
                memory = allocate_pages(nbytes)
                self._transfers.pin(memory)
            fits = [Buffer(memory)]
            self._buffers += fits
        buffer = min(fits, key=lambda b: b.memory.nbytes)
        buffer.is_free = False
        return buffer

    def trim(self, nbytes: int) -> None:
        """Free unused memory if there is more than twice what the last forward pass took.

        Page-locking takes long, and the lengths of sequences vary from step to step.
        """
        if self.nbytes() > 2 * nbytes:
            for buffer in self._buffers:
                if buffer.is_free:
                    self._transfers.unpin(buffer.memory)
            self._buffers = [buffer for buffer in self._buffers if not buffer.is_free]


class SavedStorage:
    """A storage that autograd saved for the backward pass, for one tensor or several.

    It lives as long as the graph that saved it.
    """

    def __init__(
        self,
        owner: Activations,
        nbytes: int,
        line: list[weakref.ref[SavedStorage]],
        buffer: Buffer | None = None,
    ) -> None:
        self._owner, self.nbytes = owner, nbytes
        # The pieces offloaded in the same forward pass, and the number of earlier ones.
        self.line, self.at = line, len(line)
        self.buffer = buffer  # None: the storage stays on the device
        self.offloaded: Arrival | None = None
        self.device: torch.Tensor | None = None  # the copy back on the device
        self.returned: Arrival | None = None

    def __del__(self) -> None:
        self._owner._forget(self)


class Activations:
    """The tensors that autograd saves in a forward pass.

    The last ones stay on the device as far as there is room: the backward pass reads them first.
    """

    def __init__(self, transfers: Transfers, device: torch.device, around: int) -> None:
        self._transfers, self._device, self._ahead = transfers, device, around
        self.buffers = Buffers(transfers)
        # The bytes that may stay on the device, and the number of the first tensor that stays.
        self._room, self._first = 0, 0
        self._least = 0
        self._known: weakref.WeakValueDictionary[tuple[StorageWeakRef, int], SavedStorage]
        self._known = weakref.WeakValueDictionary()
        self._line: list[weakref.ref[SavedStorage]] = []
        # Sizes in the order of saving, of the current forward pass and of the last one; and the
        # bytes that were copied to the host.
        self._sizes: list[int] = []
        self._last: list[int] = []
        self._offloaded = 0
        self.kept = self.brought = 0  # bytes on the device now
        self._most = self._most_brought = 0

    @contextlib.contextmanager
    def intercept(self, least: int) -> Iterator[None]:
        """Intercept saved tensors of at least `least` bytes."""
        self.buffers.trim(self._offloaded)
        self._least, self._line, self._sizes, self._offloaded = least, [], [], 0
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _call_saved):
            yield
        self._last = self._sizes

    def keep(self, room: int) -> int:
        """Plan the next forward passes with this room; return the bytes that they use of it."""
        if sum(self._last) <= room:
            taken = sum(self._last)
            self._first, self._room = 0, taken
            return taken
        # Prefetched pieces need room as well.
        self._room = max(0, room - self._most_brought)
        stays = choose_resident(self._last[::-1], self._room)
        self._first = len(self._last) - sum(stays)
        return sum(self._last[self._first :]) + self._most_brought

    def keep_all(self) -> None:
        """Keep every tensor on the device from now on."""
        self._first, self._room = 0, 1 << 62

    def device_bytes(self) -> int:
        """The bytes on the device that wait for the backward pass."""
        return self.kept + self.brought

    def take_most(self) -> int:
        """The most bytes on the device since the last call."""
        most, self._most = self._most, self.device_bytes()
        return most

    # --- The forward pass ---------------------------------------------------------------------

    def _pack(self, t: torch.Tensor) -> Callable[[], torch.Tensor]:
        if not self._may_offload(t):
            return functools.partial(_return_unchanged, t.detach(), t._version)
        storage = t.untyped_storage()
        key = StorageWeakRef(storage), t._version
        piece = self._known.get(key)
        if piece is None:
            piece = self._known[key] = self._new_piece(storage)
        if piece.buffer is None:
            return functools.partial(self._read, piece, t.detach(), t._version)
        view = t.dtype, int(t.storage_offset()), t.size(), t.stride()
        return functools.partial(self._bring, piece, view, _keep_counter(t), t._version)

    def _may_offload(self, t: torch.Tensor) -> bool:
        """Whether t may be offloaded: no parameter, not small, no part of something larger."""
        base = t if t._base is None else t._base
        if type(t) is not torch.Tensor or isinstance(base, torch.nn.Parameter):
            return False
        if t.device != self._device or t.layout is not torch.strided or t.is_conj() or t.is_neg():
            return False
        whole = t.untyped_storage().nbytes()
        return max(self._least, 1) <= whole <= t.nbytes / _SMALLEST_PART

    def _new_piece(self, storage: torch.UntypedStorage) -> SavedStorage:
        nbytes, number = storage.nbytes(), len(self._sizes)
        self._sizes.append(nbytes)
        if number >= self._first and self.kept + nbytes <= self._room:
            self.kept += nbytes
            self._note_most()
            return SavedStorage(self, nbytes, self._line)
        buffer = self.buffers.take(nbytes)
        piece = SavedStorage(self, nbytes, self._line, buffer)
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        copies = [(source, buffer.memory[:nbytes])]
        piece.offloaded = self._transfers.fetch(copies, buffer.returned)
        self._line.append(weakref.ref(piece))
        self._offloaded += nbytes
        return piece

    # --- The backward pass --------------------------------------------------------------------

    def _read(self, piece: SavedStorage, t: torch.Tensor, version: int) -> torch.Tensor:
        """Return a tensor that stayed on the device."""
        self._prefetch(piece)
        return _return_unchanged(t, version)

    def _bring(
        self,
        piece: SavedStorage,
        view: tuple[torch.dtype, int, torch.Size, tuple[int, ...]],
        counter: torch.Tensor,
        version: int,
    ) -> torch.Tensor:
        """Return an offloaded tensor, back on the device."""
        dtype, offset, size, stride = view
        _check_version(size, counter._version, version)
        self._load(piece)
        assert piece.device is not None
        assert piece.returned is not None
        # Each reader waits, as each may run on another stream.
        piece.returned.join(piece.device)
        self._prefetch(piece)
        t = torch.empty(0, dtype=dtype, device=self._device)
        return t.set_(piece.device.untyped_storage(), offset, size, stride)

    def _prefetch(self, piece: SavedStorage) -> None:
        """Prefetch the pieces that the backward pass reads next."""
        at, ahead = piece.at - 1, 0
        while at >= 0 and ahead < self._ahead:
            earlier = piece.line[at]()
            if earlier is not None:
                self._load(earlier)
                ahead += earlier.nbytes
            at -= 1

    def _load(self, piece: SavedStorage) -> None:
        if piece.device is not None:
            return
        assert piece.buffer is not None
        device = torch.empty(piece.nbytes, dtype=torch.uint8, device=self._device)
        host = piece.buffer.memory[: piece.nbytes]
        piece.returned = self._transfers.give([(host, device)], piece.offloaded)
        piece.buffer.returned = piece.returned
        piece.device = device
        self.brought += piece.nbytes
        self._most_brought = max(self._most_brought, self.brought)
        self._note_most()

    def _note_most(self) -> None:
        self._most = max(self._most, self.device_bytes())

    def _forget(self, piece: SavedStorage) -> None:
        if piece.buffer is None:
            self.kept -= piece.nbytes
            return
        piece.buffer.is_free = True
        if piece.device is not None:
            self.brought -= piece.nbytes


def _call_saved(saved: Callable[[], torch.Tensor]) -> torch.Tensor:
    return saved()


def _keep_counter(t: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor with the version counter of `t`, which does not hold its memory."""
    counter = t.detach()
    counter.data = torch.empty(0, dtype=t.dtype, device=t.device)
    return counter


def _return_unchanged(t: torch.Tensor, version: int) -> torch.Tensor:
    """Return a saved tensor that stayed on the device."""
    _check_version(t.shape, t._version, version)
    return t


def _check_version(shape: torch.Size, version: int, expected: int) -> None:
    """Raise an error if a saved tensor was written in place since."""
    if version != expected:
        raise RuntimeError(
            f"a tensor of shape {tuple(shape)} that the backward pass needs was written in place "
            f"after it was saved: it is at version {version}, expected version {expected}"
        )
