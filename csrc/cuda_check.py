"""Compile the CUDA kernels for sm_80, sm_90 and sm_100 and report registers; a spill fails.

Exits with 3 if there is no nvcc.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

import build

ARCHITECTURES = ("80", "90", "100")
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


def check(nvcc: str, compiled: build.Object) -> tuple[bool, str]:
    """Compile one object; return whether none of its kernels spills, and the kernels as lines."""
    source, name = compiled.source, compiled.path.with_suffix(".cu").name
    flags = [
        "-std=c++17",
        "-O3",
        "-Xptxas=-v",
        "--threads=0",
        *compiled.flags.split(),
    ]
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [nvcc, *flags, *targets, f"-I{build.CSRC}", "-c", str(source), "-o", f"{folder}/o"],
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode:
        return False, result.stderr
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
    return not spilling, "\n".join(lines)


def main() -> None:
    """Check every object of csrc/cuda."""
    nvcc = build.nvcc()
    if not nvcc:
        print("torchweld: nvcc was not found: pip install -r requirements-cuda.txt")
        sys.exit(3)
    sources = sorted(
        (build.CSRC / "cuda").glob("*.cu"), key=lambda s: (s.stem != "rule", -s.stat().st_size)
    )
    objects = build.kernels(sources, "nvcc", "")
    right = True
    # Three architectures do not fill two cores: a second file fills them.
    with ThreadPoolExecutor(2) as pool:
        for without_spill, report in pool.map(functools.partial(check, nvcc), objects):
            print(report, flush=True)
            right &= without_spill
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
