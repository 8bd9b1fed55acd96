"""keep_pages(): page faults counted by the kernel, each trial in a process of its own."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import pytest
import torch

import fresh
import torchweld
from torchweld import pages

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")

BLOCK = 64 * 2**20  # bytes, past the 32 MiB that glibc's own threshold grows to
FAULTS = f"""
import resource, sys, torch, torchweld

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones({BLOCK} // 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

torch.ones(1).add_(1)
faults()
found = [faults()]
with torchweld.keep_pages() as kept:
    assert kept, kept.reason
    for _ in range(20):  # a call may get another place in the heap until the holes have merged
        last = faults()
    found += [last, resident()]
print(*found, resident())
"""


@pytest.mark.skipif(pages.why_not() is not None, reason=str(pages.why_not()))
def test_large_blocks_stay_resident_and_are_given_back() -> None:
    done = fresh.run(FAULTS)
    assert done.returncode == 0, done.stderr
    before, kept, inside, outside = map(int, done.stdout.split())
    assert before >= BLOCK // 2**21  # a huge page is one fault
    assert kept <= before // 100
    assert inside - outside > 0.9 * BLOCK


@pytest.mark.parametrize("name", pages.OTHER_ALLOCATORS)
def test_other_allocators_are_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(pages.platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(pages, "_set", calls.append)
    monkeypatch.setattr(pages.Path, "read_text", lambda _: f"7f00 r-xp /usr/lib/lib{name}.so.2")
    with torchweld.keep_pages() as kept:
        assert not kept
        assert name in str(kept.reason)
    assert not calls


@pytest.mark.parametrize("name", ["jemalloc", "tcmalloc_minimal", "mimalloc"])
def test_a_preloaded_allocator_is_seen(name: str) -> None:
    """The real library, if the machine has it."""
    library = find_library(name)
    if library is None:
        pytest.skip(f"lib{name} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", "import torchweld; print(torchweld.keep_pages().reason)"],
        env={**os.environ, "LD_PRELOAD": library},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"{name.partition('_')[0]} serves malloc")


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages.platform, "libc_ver", lambda: ("", ""))
    kept = torchweld.keep_pages()
    assert not kept
    assert "glibc" in str(kept.reason)


def test_a_refused_threshold_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "why_not", lambda: None)
    monkeypatch.setattr(pages, "_set", lambda _: False)
    assert "refused" in str(torchweld.keep_pages().reason)


def _flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping with this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(not HUGE_PAGES.exists(), reason=f"{HUGE_PAGES} does not exist")
def test_large_results_ask_for_huge_pages() -> None:
    # Not from the heap, where a part may have been the result of an earlier test.
    x = torch.frombuffer(mmap.mmap(-1, BLOCK), dtype=torch.float32).view(64, -1).fill_(1)
    with torch.no_grad():
        y = torchweld.functional.bias_act(x, activation="relu")
    assert torch.equal(y, x)
    assert "hg" in _flags_of(y.data_ptr() + y.nbytes // 2)
    assert "hg" not in _flags_of(x.data_ptr() + x.nbytes // 2)
