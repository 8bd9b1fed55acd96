"""Checks wheels without loading them, as auditwheel does: python check_wheel.py torchweld-*.whl."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MACHINES = {"x86_64": "X86-64", "aarch64": "AArch64"}
KERNELS = {"x86_64": ("baseline", "avx2", "avx512"), "aarch64": ("neon",)}
# Torch's own libraries, and those that every system with the tag's glibc has.
NEEDED = r"libtorch_(cpu|cuda)\.so|lib(stdc\+\+|m|gcc_s|c|dl|rt|pthread)\.so\.\d|ld-linux-[\w.-]+"
# The newest versions of gcc 8, which belongs to manylinux_2_28.
NEWEST = {"GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}


def check(what: str, holds: bool, found: object) -> None:
    """Print what was found; stop at the first thing that does not hold."""
    print(f"{'ok' if holds else 'FAILED':7} {what}: {found}")
    if not holds:
        sys.exit(1)


def _read(library: Path, *what: str) -> str:
    command = ["readelf", "--wide", *what, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _as_numbers(version: str) -> tuple[float, ...]:
    """Private versions are newer than all others."""
    return tuple(int(part) if part.isdigit() else math.inf for part in version.split("."))


def find_newest(version_info: str) -> dict[str, str]:
    """The newest version of each name in lines such as "0x0010: Name: GLIBC_2.17"."""
    newest: dict[str, str] = {}
    for name, version in re.findall(r"Name: (\w+)_(\w[\w.]*) ", version_info):
        newest[name] = max(newest.get(name, "0"), version, key=_as_numbers)
    return newest


def check_library(library: Path, machine: str, glibc: tuple[int, ...]) -> None:
    """It is for the machine, and a system with that glibc has what it needs."""
    stem = library.stem
    (kind,) = re.findall(r"Machine:.*?(\S+)$", _read(library, "--file-header"), re.M)
    check(f"{stem} is for", kind == MACHINES[machine], kind)
    dynamic = _read(library, "--dynamic")
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    check(f"{stem} needs", all(re.fullmatch(NEEDED, n) for n in needed), ", ".join(needed))
    paths = re.findall(r"\((?:RPATH|RUNPATH)\).*", dynamic)
    check(f"{stem} searches in", not paths, paths or "the system's folders")
    (stack,) = re.findall(r"GNU_STACK.* ([RWE]+) ", _read(library, "--program-headers"))
    check(f"{stem} has a stack", "E" not in stack, stack)
    newest = find_newest(_read(library, "--version-info"))
    accepted = {"GLIBC": glibc, **NEWEST}
    told = ", ".join(f"{name}_{version}" for name, version in sorted(newest.items()))
    fits = all(_as_numbers(v) <= accepted.get(name, ()) for name, v in newest.items())
    check(f"{stem} takes at most", fits, told)
    symbols = _read(library, "--dyn-syms").splitlines()
    exported = [line.split()[-1] for line in symbols if re.search(r" (GLOBAL|WEAK) .* \d+ ", line)]
    mangled = [name for name in exported if name.startswith("_Z")]
    check(f"{stem} exports", not mangled, mangled[:5] or f"{len(exported)} plain names")


def check_wheel(wheel: Path) -> None:
    """One wheel for every Python, with all kernels of its machine."""
    python, abi, platform = wheel.stem.split("-")[2:]
    named = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", platform)
    tag = f"{python}-{abi}-{platform}"
    check("wheel tag", (python, abi) == ("py3", "none") and named is not None, tag)
    assert named is not None
    machine = named[3]
    check("machine", machine in MACHINES, machine)
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".so")]
            archive.extractall(folder, names)
        stems = {Path(n).stem.removeprefix("libtorchweld_") for n in names}
        expected = {"cpu", "python", *(f"cpu_{isa}" for isa in KERNELS[machine])}
        check("libraries", stems - {"cuda"} == expected, ", ".join(sorted(stems)))
        for name in sorted(names):
            check_library(Path(folder) / name, machine, (int(named[1]), int(named[2])))


if __name__ == "__main__":
    for given in sys.argv[1:]:
        print(f"\n{given}")
        check_wheel(Path(given))
