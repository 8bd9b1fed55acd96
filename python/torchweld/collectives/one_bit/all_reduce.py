"""OneBitAllReduce: the mean of tensors over a group, with errors carried from call to call."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from torchweld import checks
from torchweld.collectives.one_bit.exchange import (
    NONE,
    Errors,
    OneBitExchange,
    gather_errors,
    take_own_errors,
)
from torchweld.collectives.runs import list_sizes
from torchweld.collectives.wire import Wire
from torchweld.errors import ArgumentError

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NAME = "OneBitAllReduce"


class OneBitAllReduce:
    """Average tensors over a process group from their signs: 32 times fewer bytes than float32.

    The error of a call is added to the next call's tensors. On every rank, all calls take tensors
    of the same number, sizes and order.

    Args:
        group: a process group of gloo or NCCL; None: the default group, or only this process.
        error_dtype: dtype of the errors: torch.float32 or torch.bfloat16.
        feedback: False drops the errors; only for comparisons, since training becomes worse.

    `bytes_sent` counts the bytes this rank has sent to others, scales and checks included.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        error_dtype: torch.dtype = torch.float32,
        feedback: bool = True,
    ) -> None:
        check_error_dtype(_NAME, error_dtype)
        checks.flag(_NAME, "feedback", feedback)
        self._wire = Wire(_NAME, group)
        self._error_dtype, self._feedback = error_dtype, feedback
        self._errors: dict[Hashable, Errors] = {}
        self._loaded: list[Errors] = []  # for keys that are not used yet, in order
        self._numbers: dict[Hashable, int] = {}  # of keys, in the order of their first calls
        self._under_way: OneBitWork | None = None

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to others."""
        return self._wire.bytes_sent

    def all_reduce(
        self, tensors: torch.Tensor | Sequence[torch.Tensor], *, async_op: bool = False
    ) -> OneBitWork | None:
        """Replace each tensor by the mean over all ranks: plus or minus the scale of a chunk.

        With async_op the bits are exchanged in the background. Tensors and errors change when every
        rank calls the result's wait() or the next reduction. Raises CollectiveError on every rank,
        and changes nothing, if tensors differ between ranks, are not finite, or a rank is gone.
        """
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return self.reduce_keyed(listed, range(len(listed)), async_op)

    def reduce_keyed(
        self, tensors: Sequence[torch.Tensor], keys: Sequence[Hashable], async_op: bool = False
    ) -> OneBitWork | None:
        """Reduce tensors whose errors are stored by key; calls may take different keys.

        A saved state lists errors in the order in which keys were first used.
        """
        for t in tensors:
            checks.dense(_NAME, "tensors", t, _FLOATS)
        if self._under_way is not None:  # its new errors enter this call
            self._under_way.wait()
        self._under_way = work = OneBitWork(self, tensors, keys)
        if async_op:
            return work
        work.wait()
        return None

    def _errors_of(self, key: Hashable, t: torch.Tensor) -> Errors:
        errors = self._errors.get(key)
        if errors is None:
            at = self._numbers.setdefault(key, len(self._numbers))
            errors = self._loaded[at] if at < len(self._loaded) else NONE
        if errors.worker is not None and errors.worker.numel() != t.numel():
            accepted = f"of {errors.worker.numel()} elements, as in the calls before"
            raise ArgumentError(_NAME, "tensors", f"with one of {t.numel()} elements", accepted)
        return errors.to(t.device)

    # --- State ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's errors, which every rank saves for itself.

        whole_state_dict() has the errors of all ranks.
        """
        rank, size = self._wire.rank, self._wire.size
        return {
            "rank": rank,
            "world_size": size,
            "errors": [e._asdict() for e in self._list_errors()],
        }

    def whole_state_dict(self) -> dict[str, Any]:
        """Return the errors of all ranks, for any number of ranks. It is a collective."""
        kept = self._list_errors()
        workers = [e.worker for e in kept if e.worker is not None]
        owed = gather_errors(self._wire, kept, list_sizes(workers))
        return {"rank": None, "world_size": None, "errors": [e._asdict() for e in owed]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's own errors, saved by as many ranks, or a whole state of any number."""
        saved = [Errors(**each) for each in state_dict["errors"]]
        rank, size = state_dict["rank"], state_dict["world_size"]
        check_rank(_NAME, self._wire, rank, size)
        if rank is None:
            saved = [take_own_errors(self._wire, each, self._error_dtype) for each in saved]
        self._errors, self._loaded = {}, [each.to(self._error_dtype) for each in saved]

    def _list_errors(self) -> list[Errors]:
        """List errors in the order of the first use of keys, then loaded errors without keys."""
        of_keys = (self._errors.get(key, NONE) for key in self._numbers)
        pairs = itertools.zip_longest(of_keys, self._loaded, fillvalue=NONE)
        kept = [loaded if own.worker is None else own for own, loaded in pairs]
        return [errors for errors in kept if errors.worker is not None]


class OneBitWork:
    """A reduction in progress."""

    def __init__(
        self,
        reducer: OneBitAllReduce,
        tensors: Sequence[torch.Tensor],
        keys: Sequence[Hashable],
    ) -> None:
        self._reducer, self._tensors, self._keys = reducer, tensors, keys
        errors = list(map(reducer._errors_of, keys, tensors))
        dtype = reducer._error_dtype
        self._exchange = OneBitExchange(reducer._wire, tensors, errors, error_dtype=dtype)
        self._is_done = False

    def wait(self) -> None:
        """Finish the reduction. All ranks call it, in the order in which reductions began."""
        if self._is_done:
            return
        self._is_done, self._reducer._under_way = True, None  # even if it fails
        packed, errors = self._exchange.finish()
        for t, one in zip(self._tensors, packed, strict=True):
            t.copy_(one.dequantize(t.dtype).view(t.shape))
        if self._reducer._feedback:
            self._reducer._errors |= dict(zip(self._keys, errors, strict=True))


def check_error_dtype(function: str, dtype: Any) -> None:
    """Check that errors can be stored in this dtype."""
    if dtype not in (torch.float32, torch.bfloat16):
        accepted = "torch.float32 or torch.bfloat16"
        raise ArgumentError(function, "error_dtype", repr(dtype), accepted)


def check_rank(function: str, wire: Wire, rank: int | None, size: int | None) -> None:
    """Check that saved errors belong to this rank or to all ranks."""
    if rank is not None and (rank, size) != (wire.rank, wire.size):
        actual = f"that of rank {rank} of {size}"
        accepted = f"rank {wire.rank}'s own of {wire.size}, or a whole_state_dict() of any number"
        raise ArgumentError(function, "state_dict", actual, accepted)
