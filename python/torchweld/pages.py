"""Keep the pages of large CPU tensors, so that training steps do not fault them in again."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path
from types import TracebackType

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
# Blocks of up to 1 GiB come from the heap. The heap grows by 256 MiB at a time, and returns its end
# to the system when 2 GiB of it are free.
KEPT = {M_MMAP_THRESHOLD: 2**30, M_TRIM_THRESHOLD: 2**31 - 1, M_TOP_PAD: 2**28}
# The largest values of glibc's dynamic thresholds. Setting a threshold stops its adjustment.
GLIBC = {M_MMAP_THRESHOLD: 2**25, M_TRIM_THRESHOLD: 2**26, M_TOP_PAD: 2**17}
OTHER_ALLOCATORS = ("jemalloc", "tcmalloc", "mimalloc")


class KeptPages:
    """The result of `keep_pages`: `reason` is None, or says why nothing was changed."""

    def __init__(self, reason: str | None) -> None:
        self.reason = reason

    def __bool__(self) -> bool:
        return self.reason is None

    def __enter__(self) -> KeptPages:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self:
            _set(GLIBC)
            ctypes.CDLL(None).malloc_trim(0)

    def __repr__(self) -> str:
        return "KeptPages()" if self else f"KeptPages(reason={self.reason!r})"


def keep_pages() -> KeptPages:
    """Have the C library keep freed blocks of CPU memory instead of unmapping them.

    By default glibc maps every block larger than 32 MiB again, and each page of the block faults at
    the first write. In a training step on the CPU these faults take longer than many kernels,
    including torch's. Call this once at the top of a script, or use it as a context:

        torchweld.keep_pages()

        with torchweld.keep_pages():
            train()

    The process then keeps about as much memory as its peak use: up to 2 GiB at the end of the heap,
    and everything below a block that is still in use. Leaving the context returns free memory.

    With another C library, or under jemalloc, tcmalloc or mimalloc, nothing changes: the result is
    false, and its `reason` says why.
    """
    reason = why_not()
    if reason is None and not _set(KEPT):
        reason = f"glibc {platform.libc_ver()[1]} refused the thresholds"
    return KeptPages(reason)


def why_not() -> str | None:
    """Why the pages cannot be kept here, or None."""
    if platform.libc_ver()[0] != "glibc":
        return "the C library is not glibc; keep_pages() changes only malloc of glibc"
    if other := _other_allocator():
        return f"{other} replaces malloc, and has its own rules for freed blocks"
    return None


def _other_allocator() -> str | None:
    maps = Path("/proc/self/maps")
    loaded = maps.read_text() if maps.exists() else ""
    return next((name for name in OTHER_ALLOCATORS if f"lib{name}" in loaded), None)


def _set(thresholds: dict[int, int]) -> bool:
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(name, value) == 1 for name, value in thresholds.items())
