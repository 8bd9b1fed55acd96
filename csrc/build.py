"""Builds the native libraries with ninja; setup.py calls this module, which is also a command.

    python csrc/build.py                                   the libraries, into python/torchweld/lib
    TORCHWELD_ISA=all python csrc/build.py                 for every processor, not only this one
    CXX=aarch64-linux-gnu-g++ python csrc/build.py --out build/aarch64/lib   for another machine
    python csrc/build.py --sanitize address,undefined --out build/asan
    python csrc/build.py --emulator --out build/emulator   the CUDA kernels for tests/emulator

libtorchweld_cpu.so         bindings; registers the CPU ops with torch
libtorchweld_cpu_<isa>.so   CPU kernels, one library per instruction set
libtorchweld_python.so      calls the bindings and starts Triton's kernels from Python, if Python's
                            headers are found
libtorchweld_cuda.so        bindings and CUDA kernels, if nvcc 12.1 or newer is found

The build needs only torch's headers. At run time the stable ABI's symbols come from the loaded
torch, so the libraries are linked to empty stand-ins with the names of torch's libraries.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from flags import (
    CXX_FLAGS,
    KERNEL_FLAGS,
    MACHINE,
    NVCC_FLAGS,
    TORCH_FLAGS,
    VARIANTS,
    flags_of,
)

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
RULES = CSRC / "core" / "rules"
LIB = ROOT / "python" / "torchweld" / "lib"
EMULATOR = ROOT / "tests" / "emulator"
# The instruction sets to compile CPU kernels for: "all" for wheels, or names with commas.
ISA_VARIABLE, HERE = "TORCHWELD_ISA", "here"
BASELINE = next(iter(VARIANTS))
DEFAULT_ARCHITECTURES = "8.0;9.0;10.0;12.0+PTX"
CROSS = platform.machine() != MACHINE
# Measured on one core with nvcc 13.0.
MINUTES_PER_ARCHITECTURE = 2


class BuildError(RuntimeError):
    """The build failed. The message says what is missing and how to install it."""


@dataclass(frozen=True)
class Object:
    """An object file, and how ninja compiles it. `of` tells objects of one source apart."""

    source: Path
    command: str
    flags: str
    of: str = ""

    @property
    def path(self) -> Path:
        """Its path below the library's folder."""
        stem = "-".join(filter(None, [self.source.stem, self.of]))
        return self.source.relative_to(ROOT).with_name(f"{stem}.o")


@dataclass(frozen=True)
class Library:
    """One shared library: its objects, and the libraries it links."""

    name: str
    objects: tuple[Object, ...]
    link: str = ""
    linker: str = "link"


def torch_include() -> Path:
    """Torch's headers, found without importing torch.

    Under build isolation the environment's torch cannot be imported, but its headers are in their
    usual place.
    """
    spec = importlib.util.find_spec("torch")
    places = list(spec.submodule_search_locations or []) if spec else []
    places += [f"{sysconfig.get_path(name)}/torch" for name in ("purelib", "platlib")]
    for place in places:
        include = Path(place) / "include"
        if (include / "torch" / "csrc" / "stable" / "library.h").exists():
            return include
    raise BuildError("torch >= 2.10 with its headers was not found: pip install torch")


def hide_path(place: Path) -> str:
    """The flag that replaces a folder of this machine by "." in the libraries."""
    return f"-ffile-prefix-map={place}=."


def compiler_found() -> str | None:
    """The C++ compiler, if there is one."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def compiler() -> str:
    """The C++ compiler."""
    if path := compiler_found():
        return path
    raise BuildError("no C++ compiler was found: apt-get install g++ (or your system's)")


def ccache() -> str:
    """What precedes the compiler: ccache, if it is installed, finds what another clone compiled."""
    return "ccache " if shutil.which("ccache") else ""


def nvcc() -> str | None:
    """nvcc from CUDA_HOME, as torch's extensions do; then from the PATH or the package index.

    None for another machine: its CUDA runtime is not here.
    """
    if os.environ.get("TORCHWELD_CUDA") == "0" or CROSS:
        return None
    homes = [os.environ[v] for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ]
    candidates = [f"{home}/bin/nvcc" for home in homes]
    if on_path := shutil.which("nvcc"):
        candidates.append(on_path)
    candidates.append(f"{sysconfig.get_path('purelib')}/nvidia/cu13/bin/nvcc")
    return next((c for c in candidates if os.access(c, os.X_OK)), None)


def architectures() -> list[str]:
    """The architectures to compile for, from TORCH_CUDA_ARCH_LIST, as in torch's extensions.

    "all" means the architectures of a wheel. Without the variable it is the GPUs present, if any.
    """
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST") or ";".join(gpus_here()) or "all"
    listed = DEFAULT_ARCHITECTURES if listed == "all" else listed
    return [item for item in listed.replace(",", ";").replace(" ", ";").split(";") if item]


def gpus_here() -> list[str]:
    """The compute capabilities of this machine's GPUs, from the driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    told = subprocess.run(query, capture_output=True, text=True, check=False)
    return sorted(set(re.findall(r"^\d+\.\d+$", told.stdout, re.MULTILINE)))


def architecture_flags() -> str:
    """The -gencode flags."""
    flags = []
    for item in architectures():
        number = item.removesuffix("+PTX").replace(".", "")
        flags.append(f"-gencode arch=compute_{number},code=sm_{number}")
        if item.endswith("+PTX"):
            flags.append(f"-gencode arch=compute_{number},code=compute_{number}")
    return " ".join(flags)


def rules() -> list[str]:
    """The optimizers' rules: each header in csrc/core/rules is one."""
    return sorted(path.stem for path in RULES.glob("*.h"))


def compiled(source: Path, command: str, flags: str) -> list[Object]:
    """A source's object, or one for each rule if the source is a template for rules."""
    if source.stem != "rule":
        return [Object(source, command, flags)]
    return [Object(source, command, f"{flags} -DTW_RULE={rule}", rule) for rule in rules()]


def _bindings(command: str, flags: str, folder: str = "bind") -> list[Object]:
    sources = sorted((CSRC / folder).glob("*.cpp"))
    if "-DTW_CUDA" in flags:  # only ops with a CUDA kernel; the others use Triton
        sources = [s for s in sources if (CSRC / "cuda" / s.name).with_suffix(".cu").exists()]
    sources += sorted((CSRC / "bind" / "compat").glob("*.cpp"))
    torch = torch_include()
    # Kernels do not know torch: with another one they are not compiled again.
    hidden = hide_path(torch.parents[1])
    if command == "nvcc_host":
        hidden = f"-Xcompiler {hidden}"
    include = f"{TORCH_FLAGS} -I{CSRC / 'bind' / 'compat'} -isystem {torch} {hidden} {flags}"
    return [object for source in sources for object in compiled(source, command, include)]


def find_isas(named: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The instruction sets to compile: the baseline, and those named or this machine's best."""
    if named not in ("", HERE):
        isas = [*VARIANTS] if named == "all" else [BASELINE, *named.split(",")]
        if unknown := ", ".join(sorted(set(isas) - set(VARIANTS))):
            accepted = ", ".join([HERE, "all", *VARIANTS])
            raise BuildError(f"{ISA_VARIABLE} is {named!r}: {unknown} is none of {accepted}")
        return [isa for isa in VARIANTS if isa in isas]
    told = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.M) if cpuinfo.exists() else None
    if told is None:
        return [*VARIANTS]
    # Linux and compilers call one of them by different names.
    has = set(told[1].replace("bmi1", "bmi").split())
    best = [isa for isa in VARIANTS if has.issuperset(VARIANTS[isa].replace("-m", "").split())][-1]
    return [BASELINE] if best == BASELINE else [BASELINE, best]


def cpu_libraries(isas: list[str], sanitize: str = "") -> list[Library]:
    """The CPU bindings, and the kernels of these instruction sets."""
    # With this, sanitized kernels compile in half the time, and tests take no longer.
    inlining = "-fno-inline" if sanitize else ""
    libraries = [Library("torchweld_cpu", tuple(_bindings("cxx", "")), "-ltorch_cpu")]
    for variant in isas:
        baseline = "-DTW_BASELINE" if variant == BASELINE else ""
        if sanitize and baseline and len(isas) == 2:  # tests run the other one
            baseline += " -DTW_DOUBLE_ONLY"
        flags = f"{KERNEL_FLAGS} {VARIANTS[variant]} -DTW_VARIANT={variant} {baseline} {inlining}"
        objects = kernels(sorted((CSRC / "cpu").glob("*.cpp")), "cxx", flags)
        libraries.append(Library(f"torchweld_cpu_{variant}", tuple(objects)))
    return libraries


def python_library() -> Library | None:
    """What calls the bindings from Python, by an API that all Pythons with a GIL have."""
    headers = sysconfig.get_path("include")
    if not (Path(headers) / "Python.h").exists() or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    objects = _bindings("cxx", f"-isystem {headers} {hide_path(Path(headers))}", "python")
    return Library("torchweld_python", tuple(objects), "-ltorch_cpu")


def kernels(sources: list[Path], command: str, flags: str) -> list[Object]:
    """The sources' objects, each with its additional flags."""
    compiler = "nvcc" if command == "nvcc" else "g++"
    return [
        object
        for source in sources
        for object in compiled(source, command, f"{flags} {flags_of(source, compiler)}")
    ]


def cuda_library() -> Library:
    """CUDA kernels and bindings. cudart is static; torch's libraries are resolved at load time."""
    version = CSRC / "cuda" / "version.cu"
    told = f"""'-DTW_ARCHITECTURES="{";".join(architectures())}"'"""
    sources = sorted({*(CSRC / "cuda").glob("*.cu")} - {version})
    return Library(
        "torchweld_cuda",
        (
            *kernels(sources, "nvcc", ""),
            Object(version, "nvcc", told),
            *_bindings("nvcc_host", "-DTW_CUDA"),
        ),
        "-ltorch_cpu -ltorch_cuda",
        linker="nvcc_link",
    )


def _emulated(sources: list[Path], sanitize: str) -> list[Object]:
    """CUDA sources compiled for the host, with tests/emulator in place of CUDA."""
    # Compilers for GPUs fuse multiplications with additions.
    fused = "-mfma" if MACHINE == "x86_64" else ""
    flags = f"-I{EMULATOR / 'include'} -DTW_EMULATED {KERNEL_FLAGS} {fused} -g1"
    flags += " -Wno-unknown-pragmas"
    # Compile the scheduler without TSan: it switches between fibers, which TSan treats as threads.
    runtime = f"{flags} -fno-sanitize=thread -DTW_TSAN" if sanitize == "thread" else flags
    return [*kernels(sources, "cxx", flags), Object(EMULATOR / "runtime.cpp", "cxx", runtime)]


def emulated_cuda_library(sanitize: str) -> Library:
    """The unmodified CUDA kernels and their bindings. It has the same ops as the CUDA library."""
    sources = sorted((CSRC / "cuda").glob("*.cu"))
    return Library(
        "torchweld_emulated_cuda",
        (
            *_emulated(sources, sanitize),
            *_bindings("cxx", f"-DTW_CUDA -DTW_EMULATED -I{EMULATOR / 'include'}"),
        ),
        "-ltorch_cpu",
    )


def planted_library(sanitize: str) -> Library:
    """Kernels with faults, as a Python module, for the emulator's own tests."""
    import pybind11

    objects = _emulated([EMULATOR / "planted.cu"], sanitize)
    includes = f"-isystem {pybind11.get_include()} -isystem {sysconfig.get_path('include')}"
    return Library(
        "torchweld_planted",
        tuple(replace(object, flags=f"{object.flags} {includes}") for object in objects),
    )


def write_ninja(build_dir: Path, out: Path, libraries: list[Library], sanitize: str) -> Path:
    """Write build.ninja for these libraries and return its path."""
    flags = f"{CXX_FLAGS} -I{CSRC} {hide_path(ROOT)}"
    if sanitize:
        # Allocate registers by function, not by loop: this compiles in a sixth less time.
        flags += " -O1 -g1 -fira-region=one -fno-omit-frame-pointer"
        flags += f" -fsanitize={sanitize} -fno-sanitize-recover=all"
    host = ",".join([*CXX_FLAGS.split()[2:4], hide_path(ROOT)])
    nvcc_flags = f"{NVCC_FLAGS} -Xcompiler {host} -I{CSRC}"
    exports = f"--version-script={CSRC / 'exports.map'}"
    link = f"-shared -Wl,--no-as-needed -Wl,-z,now -Wl,{exports} -L$stubs $in -o $out"
    nvcc_path = nvcc() or "nvcc"
    sanitizer = f"-fsanitize={sanitize}" if sanitize else ""
    lines = [
        "ninja_required_version = 1.5",
        f"builddir = {build_dir}",
        f"stubs = {build_dir / 'stubs'}",
        "rule cxx",
        f"  command = {ccache()}{compiler()} {flags} $flags -x c++ -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = c++ $what",
        "rule nvcc",
        f"  command = {nvcc_path} {nvcc_flags} {architecture_flags()} -Xptxas=-warn-spills $flags "
        "-MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = nvcc $what",
        "rule nvcc_host",
        f"  command = {nvcc_path} {nvcc_flags} $flags -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = c++ $what",
        "rule link",
        f"  command = {compiler()} {sanitizer} {link} $libs",
        "  description = link $what",
        "rule nvcc_link",
        f"  command = {nvcc_path} -cudart static -Xlinker --no-as-needed -Xlinker {exports}"
        " -shared -L$stubs $in -o $out $libs",
        "  description = link $what",
        "rule stub",
        f"  command = {compiler()} -shared -Wl,-soname,$soname -x c++ /dev/null -o $out",
        "  description = stand-in for $soname",
    ]
    for name in ("torch_cpu", "torch_cuda"):
        lines += [f"build {build_dir}/stubs/lib{name}.so: stub", f"  soname = lib{name}.so"]
    for library in libraries:
        objects = []
        for object in library.objects:
            target = build_dir / library.name / object.path
            objects.append(str(target))
            lines += [
                f"build {target}: {object.command} {object.source}",
                f"  flags = {object.flags}",
                f"  what = {object.path.with_suffix(object.source.suffix)} -> {library.name}",
            ]
        stubs = [f"{build_dir}/stubs/lib{w[2:]}.so" for w in library.link.split()]
        lines += [
            f"build {out}/lib{library.name}.so: {library.linker} {' '.join(objects)}"
            f" | {' '.join(stubs)}",
            f"  libs = {library.link}",
            f"  what = lib{library.name}.so",
        ]
    build_dir.mkdir(parents=True, exist_ok=True)
    path = build_dir / "build.ninja"
    text = "\n".join(lines) + "\n"
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


def glibc_tag(platform_tag: str, tree: Path) -> str:
    """The wheel's platform tag: the oldest glibc that can load the libraries under `tree`.

    It is never older than 2.28, torch's own minimum.
    """
    libraries = [str(path) for path in tree.rglob("*.so")]
    if not libraries or not platform_tag.startswith("linux"):
        return platform_tag
    # objdump reads its own machine's libraries only.
    command = ["readelf", "--wide", "--version-info", *libraries]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True)
    versions = re.findall(r"GLIBC_(\d+)\.(\d+)", symbols.stdout)
    major, minor = max((2, 28), *((int(a), int(b)) for a, b in versions))
    return f"manylinux_{major}_{minor}_{MACHINE}"


def ninja_command() -> list[str]:
    """Ninja from its Python package, or from the PATH."""
    if importlib.util.find_spec("ninja"):
        return [sys.executable, "-m", "ninja"]
    if path := shutil.which("ninja"):
        return [path]
    raise BuildError("ninja was not found: pip install ninja")


def run_ninja(name: str, out: Path, libraries: list[Library], sanitize: str = "") -> None:
    """Build the libraries into `out`. Only changed sources are compiled."""
    build_dir = ROOT / "build" / "-".join(filter(None, [name, *sanitize.split(",")]))
    ninja_file = write_ninja(build_dir, out.resolve(), libraries, sanitize)
    # Equal sources in two clones are one entry of ccache: their paths are relative in its keys.
    shared = {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1"}
    result = subprocess.run(
        [*ninja_command(), "-f", str(ninja_file)], env={**shared, **os.environ}, check=False
    )
    if result.returncode:
        raise BuildError(f"ninja failed with exit code {result.returncode}; see above")


# Record the libraries' sources in a file, in case they are copied to another machine.
STAMP = "built.json"


def sources_digest() -> str:
    """A hash of all sources of the libraries in csrc."""
    digest = hashlib.sha256()
    for path in sorted(CSRC.rglob("*")):
        if path.suffix in (".h", ".cpp", ".cu", ".cuh", ".map", ".py"):
            digest.update(f"{path.relative_to(CSRC)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def carried(out: Path) -> list[str]:
    """The libraries in `out` that were built elsewhere from the same sources.

    A CUDA library must have been built for the requested GPUs.
    """
    stamp = out / STAMP
    if not stamp.exists() or (ROOT / "build" / "native").exists():
        return []
    told = json.loads(stamp.read_text())
    if told["sources"] != sources_digest():
        return []
    here = [name for name in told["libraries"] if (out / f"lib{name}.so").exists()]
    fits = all(_serves(told["architectures"], wanted) for wanted in architectures())
    return [name for name in here if fits or name != "torchweld_cuda"]


def _serves(built: list[str], wanted: str) -> bool:
    """Whether code for one of the GPUs runs on the requested one: 9.0a on 9.0."""
    return re.findall(r"\d+\.\d+", wanted)[0] in re.findall(r"\d+\.\d+", " ".join(built))


def _stamp(out: Path, libraries: list[Library]) -> None:
    names = [library.name for library in libraries]
    told = {
        "sources": sources_digest(),
        "architectures": architectures() if "torchweld_cuda" in names else [],
        "libraries": names,
    }
    (out / STAMP).write_text(json.dumps(told) + "\n")


def build(out: Path = LIB, *, sanitize: str = "", cuda: bool = True, isa: str = "") -> None:
    """Build the package's libraries. `isa` takes the place of TORCHWELD_ISA."""
    isas = find_isas(isa or os.environ.get(ISA_VARIABLE, HERE))
    if not sanitize and (there := carried(out)):
        wanted = cpu_names(isas) + (["torchweld_cuda"] if cuda and nvcc() else [])
        if set(wanted) <= set(there):
            print(f"torchweld: {', '.join(there)} were built elsewhere from the same sources")
            return
    libraries = [*cpu_libraries(isas, sanitize), *filter(None, [python_library()])]
    if cuda and nvcc():
        libraries.append(cuda_library())
        _say_how_long()
    elif cuda:
        print(
            "torchweld: no nvcc, so no CUDA library; eager and Triton serve CUDA tensors. "
            "Install the CUDA toolkit and build again to add it."
        )
    if len(isas) < len(VARIANTS):
        told = f"{ISA_VARIABLE}=all compiles for all processors"
        print(f"torchweld: CPU kernels for {' and '.join(isas)}; {told}", flush=True)
    run_ninja(f"native-{MACHINE}" if CROSS else "native", out, libraries, sanitize)
    # Kernels of other instruction sets may be older than the bindings that would call them.
    for name in set(cpu_names([*VARIANTS])) - set(cpu_names(isas)):
        (out / f"lib{name}.so").unlink(missing_ok=True)
    if not sanitize:
        _stamp(out, libraries)


def cpu_names(isas: list[str]) -> list[str]:
    """The CPU's libraries for these instruction sets."""
    return ["torchweld_cpu", *(f"torchweld_cpu_{isa}" for isa in isas)]


def _say_how_long() -> None:
    """Announce how long the compilation takes."""
    wanted = architectures()
    cores = os.cpu_count() or 1
    minutes = math.ceil(MINUTES_PER_ARCHITECTURE * len(wanted) / cores)
    print(
        f"torchweld: CUDA kernels for {';'.join(wanted)} (TORCH_CUDA_ARCH_LIST names others): with"
        f" {cores} cores at most {minutes} min, if all are to be compiled",
        flush=True,
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=LIB)
    parser.add_argument("--sanitize", default="", help="address,undefined or thread")
    parser.add_argument("--emulator", action="store_true", help="the CUDA kernels on the CPU")
    parser.add_argument("--planted", action="store_true", help="the emulator's own test kernels")
    parser.add_argument("--no-cuda", action="store_true", help="CPU libraries only")
    parser.add_argument("--isa", default="", help=f"instruction sets, in place of {ISA_VARIABLE}")
    options = parser.parse_args()
    try:
        if options.emulator:
            run_ninja(
                "emulator", options.out, [emulated_cuda_library(options.sanitize)], options.sanitize
            )
        elif options.planted:
            run_ninja("planted", options.out, [planted_library(options.sanitize)], options.sanitize)
        else:
            build(options.out, sanitize=options.sanitize, cuda=not options.no_cuda, isa=options.isa)
    except BuildError as error:
        sys.exit(f"torchweld: {error}")


if __name__ == "__main__":
    main()
