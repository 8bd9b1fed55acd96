"""Conditions for CPU times, the same for every contender."""

from __future__ import annotations

import os
import platform
import sys

# By default glibc maps every large block anew, and its pages fault in one by one. That takes longer
# than a norm. A training process reuses its blocks.
RESIDENT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**28),
}
# If a thread shares a core with another of its team, both stall for a scheduler's slice.
BOUND = {"OMP_PROC_BIND": "true"}
# The tests fill new tensors with NaN, which takes time.
UNWANTED = "TORCHWELD_POISON"


def settle(*, default_allocator: bool) -> None:
    """Restart this command with the environment set: a process reads it only at its start."""
    wanted = BOUND | ({} if default_allocator else RESIDENT)
    here = {name: value for name, value in os.environ.items() if name != UNWANTED}
    settled = {**here, **wanted} if platform.libc_ver()[0] == "glibc" else here
    if settled != dict(os.environ):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], settled)


def describe() -> str:
    """The conditions in words."""
    bound = all(os.environ.get(name) == value for name, value in BOUND.items())
    resident = all(os.environ.get(name) == value for name, value in RESIDENT.items())
    blocks = "stay resident" if resident else "are the default allocator's"
    return f"threads {'bound to cores' if bound else 'not bound'}, large blocks {blocks}"
