"""Compile the CUDA kernels for sm_80, sm_90 and sm_100 and report registers; a spill fails.

python csrc/cuda_check.py [keep | all]

To compile all files takes minutes, so tests/kept/cuda.tsv has those that were found without a
spill, each with a hash of all that its machine code depends on. Files that are not there are
compiled, and the one with the fewest kernels anyway, in least time. `keep` adds them to the list;
`all` compiles every file.

Exits with 3 if there is no nvcc.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import build

ARCHITECTURES = ("80", "90", "100")
KEPT = build.ROOT / "tests" / "kept" / "cuda.tsv"
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\S+)' for '(?P<arch>\S+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def _readable(names: list[str]) -> list[str]:
    """Demangle names, and drop namespaces and argument lists."""
    demangled = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    noise = r"\(anonymous namespace\)::|torchweld::|portable::|void "
    short = [re.sub(noise, "", name) for name in demangled]
    return [re.sub(r"\(\w+\)|\((?:[^()]|\([^()]*\))*\)$", "", name) for name in short]


class Kept(NamedTuple):
    """A file whose kernels do not spill."""

    key: str
    kernels: int
    registers: int  # of the kernel with the most


class Report(NamedTuple):
    """What one object takes; `found` is None if it does not compile or a kernel spills."""

    found: Kept | None
    text: str


def find_sources(source: Path) -> list[Path]:
    """A source and all files of csrc that it includes."""
    every, unread = {source}, [source]
    while unread:
        path = unread.pop()
        for name in INCLUDE.findall(path.read_text()):
            places = (path.parent / name, build.CSRC / name)
            included = next((place.resolve() for place in places if place.exists()), None)
            if included and included not in every:
                every.add(included)
                unread.append(included)
    return sorted(every)


def name_of(compiled: build.Object) -> str:
    return compiled.path.with_suffix(".cu").name


def flags_of(compiled: build.Object) -> list[str]:
    flags = compiled.flags.replace(str(build.ROOT), ".").split()
    return ["-std=c++17", "-O3", "-Xptxas=-v", "--threads=0", *flags]


def key_of(compiled: build.Object, version: str) -> str:
    """A hash of all that the machine code depends on."""
    digest = hashlib.sha256(" ".join([version, *ARCHITECTURES, *flags_of(compiled)]).encode())
    rule = [build.RULES / f"{compiled.of}.h"] if compiled.of else []  # its include is a macro
    for path in [*find_sources(compiled.source), *rule]:
        digest.update(f"{path.relative_to(build.CSRC)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def check(nvcc: str, version: str, compiled: build.Object) -> Report:
    """Compile one object."""
    name, flags = name_of(compiled), flags_of(compiled)
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [
                nvcc,
                *flags,
                *targets,
                f"-I{build.CSRC}",
                "-c",
                str(compiled.source),
                "-o",
                f"{folder}/o",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode:
        return Report(None, result.stderr)
    lines = []
    entries = [match.groupdict() for match in ENTRY.finditer(result.stderr)]
    for entry, kernel in zip(entries, _readable([e["name"] for e in entries]), strict=True):
        spilled = int(entry["stores"]) + int(entry["loads"])
        verdict = f"SPILLS {spilled} bytes" if spilled else "no spill"
        lines.append(
            f"{entry['arch']}  {entry['registers']:>3} registers  {entry['stack']:>3} stack  "
            f"{verdict}  {name}  {kernel}"
        )
        entry["spilled"] = spilled
    spilling = [entry for entry in entries if entry["spilled"]]
    lines.append(f"{name}: {len(entries)} kernels, {len(spilling)} spill")
    most = max((int(entry["registers"]) for entry in entries), default=0)
    found = None if spilling else Kept(key_of(compiled, version), len(entries), most)
    return Report(found, "\n".join(lines))


def read_kept() -> dict[str, Kept]:
    """The kept files, by name."""
    if not KEPT.exists():
        return {}
    rows = [line.split("\t") for line in KEPT.read_text().splitlines()[1:]]
    return {name: Kept(key, int(kernels), int(most)) for name, key, kernels, most in rows}


def write_kept(kept: dict[str, Kept]) -> None:
    rows = [("file", "key", "kernels", "most registers"), *((n, *kept[n]) for n in sorted(kept))]
    KEPT.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))


def main() -> None:
    """Check every object of csrc/cuda."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=("keep", "all"), help="see above")
    options = parser.parse_args()
    nvcc = build.nvcc()
    if not nvcc:
        print("torchweld: nvcc was not found: pip install -r requirements-cuda.txt")
        sys.exit(3)
    version = subprocess.check_output([nvcc, "--version"], text=True).strip().splitlines()[-1]
    sources = sorted(
        (build.CSRC / "cuda").glob("*.cu"), key=lambda s: (s.stem != "rule", -s.stat().st_size)
    )
    objects = {name_of(each): each for each in build.kernels(sources, "nvcc", "")}
    kept = {name: k for name, k in read_kept().items() if name in objects}
    current = {n: k for n, k in kept.items() if k.key == key_of(objects[n], version)}
    some = [name for name in current if current[name].kernels]
    smallest = min(some, key=lambda name: current[name].kernels, default=None)
    right, wanted = (
        True,
        [
            each
            for name, each in objects.items()
            if options.what == "all" or name not in current or name == smallest
        ],
    )
    # Three architectures do not fill two cores: a second file fills them.
    with ThreadPoolExecutor(2) as pool:
        reports = pool.map(functools.partial(check, nvcc, version), wanted)
        for compiled, report in zip(wanted, reports, strict=True):
            name, before = name_of(compiled), current.get(name_of(compiled))
            print(report.text, flush=True)
            right &= report.found is not None
            if report.found and before and report.found != before:
                print(f"{name}: {KEPT.name} has {before}")
                right = False
            if report.found:
                current[name] = report.found
    print(f"{len(objects) - len(wanted)} of {len(objects)} files are unchanged: no spill")
    if options.what == "keep" and right:
        write_kept(current)
    elif right and current != kept:
        print(f"{KEPT.name} lacks results: make cuda-check ARGS=keep")
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
