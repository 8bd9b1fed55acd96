"""Activations offloaded to the host in the forward and prefetched for the backward."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchweld.optim.offload._chunks import Chunk, Chunks
from torchweld.optim.offload._transfers import Arrival, Transfers
from torchweld.optim.offload.policy import resident

# A tensor smaller than this fraction of its storage belongs to something larger, such as a batch
# of a dataset, which this step must not move.
_SMALLEST_PART = 1 / 8


class Piece:
    """Memory that the backward reads, of one tensor or of several that share it.

    It lives as long as the graph that saved it.
    """

    def __init__(
        self,
        owner: Activations,
        nbytes: int,
        line: list[weakref.ref[Piece]],
        chunk: Chunk | None = None,
    ) -> None:
        self._owner, self.nbytes = owner, nbytes
        self.line, self.at = line, len(line)  # offloaded in the same forward; how many before
        self.chunk = chunk  # None: it stays on the device
        self.host: torch.Tensor | None = None
        self.left: Arrival | None = None
        self.device: torch.Tensor | None = None  # the copy that has come back
        self.is_awaited = False  # whether the device waits for that copy

    def __del__(self) -> None:
        self._owner._forget(self)


class Activations:
    """The tensors that autograd saves in a forward; the last ones stay as far as there is room.

    The backward reads them in reverse order, so those saved first are used last.
    """

    def __init__(self, transfers: Transfers, device: torch.device, around: int) -> None:
        self._transfers, self._device, self._ahead = transfers, device, around
        self._chunks = Chunks(transfers, around)
        self._room, self._first = 0, 0  # bytes that may stay, and the first piece that stays
        self._least = 0
        self._known: weakref.WeakValueDictionary[tuple[StorageWeakRef, int], Piece]
        self._known = weakref.WeakValueDictionary()
        self._line: list[weakref.ref[Piece]] = []
        self._sizes: list[int] = []  # of the current forward, in the order of saving
        self._last: list[int] = []  # of the last forward
        self._last_left: list[int] = []
        self.kept = self.brought = 0  # bytes on the device now
        self._most = self._most_brought = 0

    @contextlib.contextmanager
    def saving(self, least: int) -> Iterator[None]:
        """Intercept saved tensors of at least so many bytes."""
        self._chunks.fit(self._last_left)
        self._least, self._line, self._sizes, self._last_left = least, [], [], []
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _call):
            yield
        self._last = self._sizes

    def keep(self, room: int) -> int:
        """Plan the next forwards with this room; return the bytes they use of it."""
        if sum(self._last) <= room:
            taken = sum(self._last)
            self._first, self._room = 0, taken
            return taken
        # Prefetched pieces need room, too.
        self._room = max(0, room - self._most_brought)
        stays = resident(self._last[::-1], self._room)
        self._first = len(self._last) - sum(stays)
        return sum(self._last[self._first :]) + self._most_brought

    def keep_all(self) -> None:
        """Let everything stay."""
        self._first, self._room = 0, 1 << 62

    def on_device(self) -> int:
        """The bytes at this place that wait for the backward."""
        return self.kept + self.brought

    def on_host(self) -> int:
        """The bytes of the chunks."""
        return self._chunks.nbytes()

    def take_most(self) -> int:
        """The most bytes on the device since the last call."""
        most, self._most = self._most, self.on_device()
        return most

    # --- The forward --------------------------------------------------------------------------

    def _pack(self, t: torch.Tensor) -> Callable[[], torch.Tensor]:
        if not self._is_ours(t):
            return functools.partial(_unchanged, t.detach(), t._version)
        storage = t.untyped_storage()
        key = StorageWeakRef(storage), t._version
        piece = self._known.get(key)
        if piece is None:
            piece = self._known[key] = self._new(storage)
        if piece.chunk is None:
            return functools.partial(self._read, piece, t.detach(), t._version)
        view = t.dtype, int(t.storage_offset()), t.size(), t.stride()
        return functools.partial(self._bring, piece, view)

    def _is_ours(self, t: torch.Tensor) -> bool:
        """Whether it may leave: not a parameter, not small, not a part of something larger."""
        base = t if t._base is None else t._base
        if type(t) is not torch.Tensor or isinstance(base, torch.nn.Parameter):
            return False
        if t.device != self._device or t.layout is not torch.strided or t.is_conj() or t.is_neg():
            return False
        whole = t.untyped_storage().nbytes()
        return max(self._least, 1) <= whole <= t.nbytes / _SMALLEST_PART

    def _new(self, storage: torch.UntypedStorage) -> Piece:
        nbytes, number = storage.nbytes(), len(self._sizes)
        self._sizes.append(nbytes)
        if number >= self._first and self.kept + nbytes <= self._room:
            self.kept += nbytes
            self._note_most()
            return Piece(self, nbytes, self._line)
        chunk, host = self._chunks.take(nbytes)
        piece = Piece(self, nbytes, self._line, chunk)
        piece.host = host
        piece.left = self._transfers.fetch([(_bytes_of(storage), host)])
        self._line.append(weakref.ref(piece))
        self._last_left.append(piece.nbytes)
        return piece

    # --- The backward -------------------------------------------------------------------------

    def _read(self, piece: Piece, t: torch.Tensor, version: int) -> torch.Tensor:
        """Return a tensor that stayed."""
        self._prefetch(piece)
        return _unchanged(t, version)

    def _bring(
        self, piece: Piece, view: tuple[torch.dtype, int, torch.Size, tuple[int, ...]]
    ) -> torch.Tensor:
        """Return a tensor that left, back on the device."""
        self._load(piece)
        if not piece.is_awaited:
            self._transfers.join()
            piece.is_awaited = True
        self._prefetch(piece)
        assert piece.device is not None
        dtype, offset, size, stride = view
        found = torch.empty(0, dtype=dtype, device=self._device)
        return found.set_(piece.device.untyped_storage(), offset, size, stride)

    def _prefetch(self, piece: Piece) -> None:
        """Prefetch the pieces that the backward reads next."""
        at, ahead = piece.at - 1, 0
        while at >= 0 and ahead < self._ahead:
            earlier = piece.line[at]()
            if earlier is not None:
                self._load(earlier)
                ahead += earlier.nbytes
            at -= 1

    def _load(self, piece: Piece) -> None:
        if piece.device is not None:
            return
        assert piece.host is not None
        assert piece.left is not None
        piece.left.synchronize()
        device = torch.empty(piece.nbytes, dtype=torch.uint8, device=self._device)
        self._transfers.give([(piece.host, device)])
        piece.device = device
        self.brought += piece.nbytes
        self._most_brought = max(self._most_brought, self.brought)
        self._note_most()

    def _note_most(self) -> None:
        self._most = max(self._most, self.on_device())

    def _forget(self, piece: Piece) -> None:
        if piece.chunk is None:
            self.kept -= piece.nbytes
            return
        piece.chunk.leave()
        if piece.device is not None:
            self.brought -= piece.nbytes


def _call(saved: Callable[[], torch.Tensor]) -> torch.Tensor:
    return saved()


def _unchanged(t: torch.Tensor, version: int) -> torch.Tensor:
    """The saved tensor; raises if it was written in place since."""
    if t._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(t.shape)} that the backward needs was written in place "
            f"after it was saved: it is at version {t._version}, expected version {version}"
        )
    return t


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
