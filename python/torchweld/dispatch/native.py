"""Loads the native libraries. A library that fails to load is recorded with its reason."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from torchweld.registry import BACKENDS

T = TypeVar("T")
ISA_VARIABLE = "TORCHWELD_CPU_ISA"
DIRECTORY = Path(os.environ.get("TORCHWELD_LIB", Path(__file__).parent.parent / "lib"))

# Instruction sets with a kernel library, best first.
_X86 = {"avx512": "AVX512", "avx2": "AVX2", "baseline": ""}
_ARM = {"neon": ""}
ISAS = tuple(_ARM if platform.machine() in ("aarch64", "arm64") else _X86)
BASELINE = ISAS[-1]

# The reason why each library is not loaded; loaded libraries have no entry.
missing: dict[str, str] = {}
BACKENDS["cpu"].why_missing = lambda: missing.get("torchweld_cpu")
BACKENDS["cuda"].why_missing = lambda: missing.get("torchweld_cuda")
BACKENDS["cuda"].why_unfit = lambda capability: _why_without_code(capability)
cpu_isa: str | None = None
# Whether attention in bfloat16 multiplies in AMX's tile registers.
has_tiles = False
# The CUDA version that the CUDA library was built with, as 13000, and the drivers that it needs.
cuda_built_with: int | None = None
# The architectures that the CUDA library has code for, named as in TORCH_CUDA_ARCH_LIST.
cuda_architectures = ""
OLDEST_DRIVER = {12: 525, 13: 580}


def list_supported_isas() -> list[str]:
    """Instruction sets that this machine runs, best first."""
    capability = torch.backends.cpu.get_cpu_capability()
    levels = ["AVX512", "AVX2", ""]
    reached = next(i for i, level in enumerate(levels) if capability.startswith(level))
    return [isa for isa in ISAS if levels.index(_X86.get(isa, "")) >= reached]


def list_compiled_isas() -> list[str]:
    """Instruction sets that were compiled and that this machine runs, best first."""
    return [isa for isa in list_supported_isas() if _path(f"torchweld_cpu_{isa}").exists()]


def _path(library: str) -> Path:
    return DIRECTORY / f"lib{library}.so"


def how_to_compile(isa: str) -> str:
    """What to do for kernels of an instruction set."""
    return f"build from source with TORCHWELD_ISA={isa}"


def _load_cpu() -> str:
    """Load the CPU bindings and the kernels of one instruction set; returns its name."""
    global has_tiles
    supported, compiled = list_supported_isas(), list_compiled_isas()
    isa = os.environ.get(ISA_VARIABLE) or next(iter(compiled), BASELINE)
    if isa in supported and isa not in compiled:
        raise OSError(f"{ISA_VARIABLE} is {isa!r}, which was not compiled: {how_to_compile(isa)}")
    if isa not in supported:
        raise OSError(f"{ISA_VARIABLE} is {isa!r}; accepted on this machine: {compiled}")
    kernels, baseline = (open_library(f"torchweld_cpu_{name}") for name in (isa, BASELINE))
    open_library("torchweld_cpu")
    torch.ops.torchweld.use_cpu_kernels(kernels._handle, baseline._handle)
    kernels.block_sparse_has_tiles.restype = ctypes.c_bool
    has_tiles = kernels.block_sparse_has_tiles()
    return isa


def _is_whole(path: Path) -> bool:
    """Whether the file is complete: loading a truncated library kills the process."""
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return False
    (offset,), (size, count) = (
        struct.unpack_from("<Q", header, 40),
        struct.unpack_from("<HH", header, 58),
    )
    return path.stat().st_size >= offset + size * count


def open_library(library: str, kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """Open a library that exists; `kind` is PyDLL if its functions take Python's objects."""
    path = _path(library)
    if not _is_whole(path):
        raise OSError(f"{path} is truncated or not a library; reinstall torchweld")
    return kind(str(path))


def read_cuda_driver() -> int:
    """The CUDA version that the driver supports, 13000 for 13.0; 0 without a driver."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def _load_cuda() -> None:
    """Load the CUDA library, unless its kernels would fail under this driver."""
    global cuda_built_with, cuda_architectures
    library = open_library("torchweld_cuda")
    library.torchweld_cuda_architectures.restype = ctypes.c_char_p
    cuda_architectures = library.torchweld_cuda_architectures().decode()
    built_with: int = library.torchweld_cuda_version()
    cuda_built_with, driver = built_with, read_cuda_driver()
    if 0 < driver // 1000 < built_with // 1000:
        needed = OLDEST_DRIVER.get(built_with // 1000, "a newer one")
        raise OSError(
            f"it was built with CUDA {built_with // 1000} and needs driver >= {needed}, this"
            f" one is for CUDA {driver // 1000}: update it, or let Triton serve"
        )


def _why_without_code(capability: tuple[int, int]) -> str | None:
    """Why the CUDA library's kernels cannot run on a GPU, if they cannot."""
    if any(_runs(name, capability) for name in cuda_architectures.split(";")):
        return None
    own = ".".join(map(str, capability))
    return (
        f"its library has code for {cuda_architectures}, this GPU is {own}: build from source with"
        f" TORCH_CUDA_ARCH_LIST={own}, or let Triton serve"
    )


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether code for an architecture runs on a GPU of this capability.

    Machine code runs on later minor versions, PTX on everything later, and code for 9.0a only on
    9.0.
    """
    match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", architecture)
    if match is None:
        return False
    built_for = int(match[1]), int(match[2])
    if match[3] == "a":
        return built_for == capability
    same_major = built_for[0] == capability[0]
    return built_for <= capability and (same_major or (match[4] is not None and not match[3]))


def try_library(library: str, load: Callable[[], T], hint: str) -> T | None:
    """What `load` returns; None if it fails or the library does not exist, which is recorded."""
    if not _path(library).exists():
        missing[library] = f"{_path(library)} does not exist: {hint}"
        return None
    try:
        return load()
    except (OSError, RuntimeError, AttributeError) as error:
        missing[library] = f"{error}"
        return None


def load() -> None:
    """Load the libraries that exist."""
    global cpu_isa
    cpu_isa = try_library(
        "torchweld_cpu", _load_cpu, "it was built without a C++ compiler; install g++ and reinstall"
    )
    if torch.version.cuda is None:
        missing["torchweld_cuda"] = "this torch is a build without CUDA"
        return
    try_library(
        "torchweld_cuda",
        _load_cuda,
        "it was built without nvcc; install the CUDA toolkit and reinstall",
    )
