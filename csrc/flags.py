"""The compilers' flags. They affect results, so a kernel's evidence records them."""

import os
import platform
import re
import subprocess
from pathlib import Path

_ARM = ("aarch64", "arm64")


def find_machine() -> str:
    """The kind of machine to compile for: a compiler named by CXX may be a cross-compiler."""
    if cxx := os.environ.get("CXX"):
        command = [*cxx.split(), "-dumpmachine"]
        named = subprocess.run(command, capture_output=True, text=True, check=True)
        return named.stdout.partition("-")[0]
    return platform.machine()


MACHINE = find_machine()

# Instruction sets, the baseline first. Never -march=native: wheels also run on other machines.
X86_VARIANTS = {
    "baseline": "",
    "avx2": "-mavx2 -mfma -mf16c -mbmi -mbmi2",
    "avx512": "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -mbmi -mbmi2",
}
ARM_VARIANTS = {"neon": ""}
VARIANTS = ARM_VARIANTS if MACHINE in _ARM else X86_VARIANTS

# gcc 12 warns inside its own AVX-512 headers.
WARNINGS = "-Wall -Wextra -Wno-uninitialized -Wno-maybe-uninitialized"
CXX_FLAGS = f"-std=c++17 -O3 -fPIC -fvisibility=hidden {WARNINGS}"
# Errno and traps would keep loops from being vectorised. NaN and infinity keep their meaning.
KERNEL_FLAGS = "-fno-math-errno -fno-trapping-math"
# Optimizers give the same bits as eager, on every instruction set and at every position of an
# element: no multiplication is fused with an addition. A file that includes one of these headers
# belongs to an optimizer.
_OPTIMIZER = re.compile(r'^#include "(cpu/optim\.h|cuda/optim\.cuh|cuda/rule\.cuh)"', re.MULTILINE)
# TORCH_TARGET_VERSION 2.10 is the oldest torch that the libraries run under. The other flags avoid
# symbols introduced after gcc 8 and glibc 2.28.
TORCH_FLAGS = "-DTORCH_TARGET_VERSION=0x020a000000000000"
# Without -lineinfo, which would keep the paths of the machine that builds.
NVCC_FLAGS = "-std=c++17 -O3"


def flags_of(source: Path, compiler: str) -> str:
    """Additional flags for a kernel's file, for g++ or nvcc."""
    unfused = {"g++": "-ffp-contract=off", "nvcc": "-fmad=false"}
    return unfused[compiler] if _OPTIMIZER.search(source.read_text()) else ""
