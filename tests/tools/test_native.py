"""The libraries: instruction sets, behaviour without them, and system requirements."""

from __future__ import annotations

import functools
import importlib
import json
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fresh
from conftest import EMULATED
from torchweld.dispatch import native
from torchweld.dispatch.warm import direct
from torchweld.ops.quantize_8bit import _QUANTIZE as BARE
from torchweld.registry import BACKENDS, OPS, backends

LIBRARIES = sorted(native.DIRECTORY.glob("*.so"))
# A forward and a backward, printed exactly.
PROGRAM = """
import torch, torchweld
torch.manual_seed(0)
x, w, b = (torch.randn(*s, requires_grad=True) for s in ((3000, 200), (200,), (200,)))
y = torchweld.functional.layer_norm(x, (200,), w, b)
y.sum().backward()
print(torchweld.dispatch.native.cpu_isa, torchweld.explain("layer_norm", x, [200]).chosen)
print(f"{y.sum().item():.4f} {w.grad.norm().item():.4f}")
"""


def _run(program: str = PROGRAM, **environment: str) -> list[str]:
    """What the program prints in a fresh interpreter."""
    result = fresh.run(program, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@functools.cache
def _of_eager() -> list[str]:
    return _run(TORCHWELD_LIB="/nonexistent")


@pytest.mark.parametrize("isa", native.list_compiled_isas())
def test_every_instruction_set_can_be_forced(isa: str) -> None:
    """The library of that name serves, and numbers agree to rounding."""
    which, numbers = _run(TORCHWELD_CPU_ISA=isa)
    assert which == f"{isa} cpu"
    assert np.allclose(
        [float(n) for n in numbers.split()], [float(n) for n in _of_eager()[1].split()], rtol=1e-4
    )


def test_without_libraries_eager_serves() -> None:
    """torchweld can be imported, and records the reason."""
    assert _of_eager()[0] == "None eager"
    program = "import torchweld; print(torchweld.backends()['cpu'])"
    assert "does not exist" in _run(program, TORCHWELD_LIB="/nonexistent")[0]
    assert "'sse9'" in _run(program, TORCHWELD_CPU_ISA="sse9")[0]


@pytest.mark.skipif(native.BASELINE != "baseline", reason="x86 only")
def test_without_its_own_kernels_a_machine_takes_the_best_that_were_compiled(
    tmp_path: Path,
) -> None:
    """As in an image that was built on another processor. Those forced by name must be there."""
    for name in ("torchweld_cpu", "torchweld_cpu_baseline"):
        shutil.copy(native.DIRECTORY / f"lib{name}.so", tmp_path)
    which, _ = _run(TORCHWELD_LIB=str(tmp_path))
    assert which == "baseline cpu"
    for isa in native.list_supported_isas()[:-1]:
        program = "import torchweld; print(torchweld.backends()['cpu'])"
        (status,) = _run(program, TORCHWELD_LIB=str(tmp_path), TORCHWELD_CPU_ISA=isa)
        how = f"build from source with TORCHWELD_ISA={isa}"
        assert status == f"TORCHWELD_CPU_ISA is {isa!r}, which was not compiled: {how}"


def test_a_broken_library_is_recorded(tmp_path: Path) -> None:
    """Every library in turn is cut in half."""
    isa = native.list_compiled_isas()[0]
    for broken in LIBRARIES:
        for library in LIBRARIES:
            shutil.copy(library, tmp_path)
        content = (tmp_path / broken.name).read_bytes()
        (tmp_path / broken.name).write_bytes(content[: len(content) // 2])
        program = "import torchweld; print(torchweld.backends()['cpu'])"
        (status,) = _run(program, TORCHWELD_LIB=str(tmp_path), TORCHWELD_CPU_ISA=isa)
        concerns_cpu = broken.stem in (
            "libtorchweld_cpu",
            f"libtorchweld_cpu_{isa}",
            f"libtorchweld_cpu_{native.BASELINE}",
        )
        assert (status != "available") == concerns_cpu, (broken, status)


def test_no_library_holds_a_path_of_the_machine_that_built_it() -> None:
    """Neither in messages nor for debuggers: the wheel contains them unchanged."""
    root = Path(__file__).resolve().parents[2]
    paths = {str(path) for path in (root, Path(sys.prefix), Path(torch.__file__).parent)}
    for library in [*LIBRARIES, *([EMULATED] if EMULATED.exists() else [])]:
        content = library.read_bytes()
        assert not [path for path in paths if path.encode() in content], library


@pytest.mark.parametrize("names", ["gqu", "cpu,gqu"])
def test_an_unknown_backend_in_the_environment_is_named(names: str) -> None:
    program = """
import torch, torchweld
try:
    torchweld.functional.layer_norm(torch.ones(2, 4), [4])
except torchweld.ArgumentError as error:
    print(error)
"""
    (message,) = _run(program, TORCHWELD_BACKEND=names)
    assert message.startswith(f"TORCHWELD_BACKEND: the environment variable is '{names}'")


def _symbols(library: Path, *flags: str) -> str:
    command = ["nm", "-D", *flags, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.stem)
def test_what_the_libraries_need(library: Path) -> None:
    """glibc 2.28, gcc 8's libstdc++ and torch's stable C shims: none of torch's C++.

    Only what calls the bindings from Python needs CPython; test_direct.py has its list.
    """
    undefined = _symbols(library, "--undefined-only")
    for name, newest in (("GLIBC", (2, 28, 0)), ("GLIBCXX", (3, 4, 25)), ("CXXABI", (1, 3, 11))):
        for version in re.findall(rf"@{name}_([\d.]+)", undefined):
            assert tuple(int(part) for part in version.split(".")) <= newest, undefined
    python = "" if library.stem == f"lib{direct.LIBRARY}" else r"|Py[A-Z]\w*"
    assert not re.findall(rf"\b(_ZN\d*K?(?:c10|at|torch)\S*{python})", undefined)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.stem)
def test_what_the_libraries_export(library: Path) -> None:
    """Kernels by their plain names: no weak C++ symbol that another library could replace."""
    defined = [line.split()[-1] for line in _symbols(library, "--defined-only").splitlines()]
    assert not [name for name in defined if name.startswith("_Z")]
    if "cpu_" in library.stem:
        assert {"layer_norm_forward", "rms_norm_backward"} <= set(defined)


@pytest.mark.skipif(native.BASELINE != "baseline", reason="x86 only")
@pytest.mark.parametrize(
    ("variant", "forbidden"), [("baseline", r"%[yz]mm|\tv"), ("avx2", r"%zmm|%k[0-7]")]
)
def test_variants_stay_within_their_instruction_set(variant: str, forbidden: str) -> None:
    """The baseline holds no AVX, AVX2 holds no AVX-512."""
    library = native.DIRECTORY / f"libtorchweld_cpu_{variant}.so"
    if not library.exists():
        pytest.skip("not compiled: TORCHWELD_ISA=all, as in CI, compiles all")
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert len(code) > 10_000
    assert not re.search(forbidden, code)


def test_half_conversions_without_f16c_are_exact() -> None:
    """The baseline converts by hand: all 65536 halves through an identity of its kernel.

    A row of one element under RMSNorm with a huge eps and as large a weight keeps only the
    conversions: y = x * rstd * weight = x * 2^-12 * 2^12.
    """
    program = """
import torch, torchweld
x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16).reshape(-1, 1)
x = x[x.isfinite()].reshape(-1, 1)
weight = torch.full((1,), 2.0**12, dtype=torch.float32)
with torchweld.use_backend("cpu"):
    y = torchweld.functional.rms_norm(x, (1,), weight, 2.0**24)
# rstd is 2^-12 only where x^2 is absorbed by 2^24, and within a rounding of it elsewhere.
exact = (x.double() * 2.0**12 / (x.double() ** 2 + 2.0**24).sqrt())
print(torch.equal(y, exact.to(torch.float32).half()), (y != exact.half()).sum().item())
"""
    (line,) = _run(program, TORCHWELD_CPU_ISA=native.BASELINE)
    equal, different = line.split()
    assert int(different) <= 8 or equal == "True", line


def test_importing_leaves_the_compiler_alone() -> None:
    """Some of torch's modules take longer to import than torchweld and its command line.

    An interpreter that has imported nothing tells.
    """
    heavy = ["torch._dynamo", "sympy", "transformers", "torch.distributed.checkpoint"]
    heavier = [*heavy, "torch.distributed.tensor", "triton"]
    program = f"""
import sys, torchweld
print([module for module in {heavier} if module in sys.modules])
import torchweld.commands.cli
print([module for module in {heavy} if module in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["[]", "[]"]


def _fits(architectures: str, capability: str) -> bool:
    """CUDA's rules of compatibility, spelled out for existing capabilities."""
    same = {"8.0": {"8.0", "8.6", "8.9"}, "9.0": {"9.0"}, "10.0": {"10.0", "10.3"}}
    machine = {a: same.get(a, {a}) for a in GPUS} | {f"{a}a": {a} for a in GPUS}
    later = {f"{a}+PTX": set(GPUS[at:]) for at, a in enumerate(GPUS)}
    return any(capability in (machine | later)[name] for name in architectures.split(";"))


GPUS = ["7.0", "7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0"]
BUILDS = [
    *("8.0", "9.0", "9.0a", "10.0", "8.9", "12.0"),
    *("9.0+PTX", "8.0;9.0;10.0;12.0+PTX", "9.0;10.0a", "7.5;8.0+PTX"),
]


@pytest.mark.parametrize("capability", GPUS)
@pytest.mark.parametrize("architectures", BUILDS)
def test_a_library_without_the_gpus_code_says_so(
    architectures: str, capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "cuda_architectures", architectures)
    major, minor = map(int, capability.split("."))
    reason = BACKENDS["cuda"].why_unfit((major, minor))
    if _fits(architectures, capability):
        assert reason is None
    else:
        assert f"code for {architectures}, this GPU is {capability}" in str(reason)


@pytest.mark.parametrize(
    ("capability", "served"), [((7, 0), False), ((7, 5), False), ((8, 0), True)]
)
def test_an_op_asks_for_the_capability(
    capability: tuple[int, int], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a T4 or V100 eager serves with a reason, instead of "no kernel image"."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(native, "cuda_architectures", "8.0")
    backends._find_why_unfit.cache_clear()
    for backend in ("cuda", "triton"):
        monkeypatch.setattr(BACKENDS[backend], "why_missing", lambda: None)
    device = torch.device("cuda", 0)
    gpu = SimpleNamespace(device=device, dtype=torch.float32, is_cpu=False, is_nested=False)
    assert (OPS["softmax_dropout"].why_not("triton", [gpu]) is None) == served
    assert (BARE.why_not("cuda", [gpu]) is None) == served
    backends._find_why_unfit.cache_clear()


def test_a_gpu_at_hand_is_built_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the variable names others; without either, all of a wheel's architectures."""
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _architectures() == ["8.0", "9.0", "10.0", "12.0+PTX"]
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 9.0\necho 9.0\necho 8.6\n")
    tool.chmod(0o755)
    assert _architectures() == ["8.6", "9.0"]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a 10.0+PTX")
    assert _architectures() == ["9.0a", "10.0+PTX"]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "all")
    assert _architectures() == ["8.0", "9.0", "10.0", "12.0+PTX"]
    tool.write_text(
        "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library mismatch'\nexit 18\n"
    )
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    assert _architectures() == ["8.0", "9.0", "10.0", "12.0+PTX"]


def _architectures() -> list[str]:
    """The architectures that csrc/build.py finds; it is not in a package."""
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import build; print(*build.architectures())"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parents[2] / "csrc")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return result.stdout.split()


def test_the_toolkit_that_is_named_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the one that is on the PATH: a wheel for older drivers takes an older compiler."""
    for where in ("named/bin", "on_path"):
        (tmp_path / where).mkdir(parents=True)
        (tmp_path / where / "nvcc").touch(0o755)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "csrc"))
    module = importlib.import_module("build")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "on_path"))
    monkeypatch.setenv("TORCHWELD_CUDA", "1")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "absent"))
    assert module.nvcc() == str(tmp_path / "on_path" / "nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "named"))
    assert module.nvcc() == str(tmp_path / "named/bin/nvcc")
    monkeypatch.setenv("TORCHWELD_CUDA", "0")
    assert module.nvcc() is None


@pytest.fixture
def fresh_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """csrc/build.py as a module, in a checkout without builds."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "csrc"))
    module = importlib.import_module("build")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "run_ninja", lambda *_: pytest.fail("it compiles"))
    monkeypatch.setattr(module, "nvcc", lambda: "nvcc")
    monkeypatch.delenv("TORCHWELD_ISA", raising=False)
    return module


V3 = "fma avx f16c avx2 bmi1 bmi2"


@pytest.mark.skipif(native.BASELINE != "baseline", reason="x86 only")
@pytest.mark.parametrize(
    ("named", "flags", "isas"),
    [
        ("", "sse2 avx", ["baseline"]),
        ("", V3, ["baseline", "avx2"]),
        ("here", f"{V3} avx512f avx512dq avx512bw avx512vl", ["baseline", "avx512"]),
        ("", f"{V3} avx512f", ["baseline", "avx2"]),
        ("all", "sse2", ["baseline", "avx2", "avx512"]),
        ("avx512,avx2", "sse2", ["baseline", "avx2", "avx512"]),
        ("baseline", V3, ["baseline"]),
    ],
)
def test_a_build_is_for_this_machine_unless_it_is_told_otherwise(
    named: str, flags: str, isas: list[str], fresh_build: Any, tmp_path: Path
) -> None:
    """The kernels of all instruction sets took 7 of a newcomer's first 23 minutes."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\nbugs\t\t:\n")
    assert fresh_build.find_isas(named, cpuinfo) == isas


def test_an_unknown_instruction_set_is_named(fresh_build: Any) -> None:
    with pytest.raises(fresh_build.BuildError, match=r"is 'avx3': avx3 is none of here, all, "):
        fresh_build.find_isas("avx3")


@pytest.mark.skipif(native.BASELINE != "baseline", reason="x86 only")
def test_no_kernels_stay_that_a_build_left_out(
    fresh_build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of older sources would be called by newer bindings."""
    older = tmp_path / "libtorchweld_cpu_avx512.so"
    older.touch()
    monkeypatch.setattr(fresh_build, "run_ninja", lambda *_: None)
    monkeypatch.setenv("TORCHWELD_ISA", "avx2")
    fresh_build.build(tmp_path, cuda=False)
    assert not older.exists()


@pytest.mark.parametrize(
    ("changed", "wanted", "compiles"),
    [
        ({}, "9.0", False),
        ({}, "9.0a", False),
        ({}, "10.0", True),
        ({}, "8.0;9.0", True),
        ({"sources": "older"}, "9.0", True),
        ({"libraries": ["torchweld_cpu"]}, "9.0", True),
    ],
)
def test_libraries_built_elsewhere_serve(
    changed: dict[str, Any],
    wanted: str,
    compiles: bool,
    fresh_build: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is compiled if they have the same sources and suit the present GPU."""
    build = fresh_build
    names = [*build.cpu_names(build.find_isas("")), "torchweld_cuda"]
    for name in names:
        (tmp_path / f"lib{name}.so").touch()
    told = {"sources": build.sources_digest(), "architectures": ["9.0a"], "libraries": names}
    (tmp_path / build.STAMP).write_text(json.dumps(told | changed))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", wanted)
    if compiles:
        with pytest.raises(pytest.fail.Exception, match="it compiles"):
            build.build(tmp_path)
    else:
        build.build(tmp_path)


# --- The wheel ------------------------------------------------------------------------------------


def _pack(folder: Path, platform: str, *left_out: str) -> Path:
    """A wheel of this name with the libraries that are here, each in place of all kernels."""
    wheel = folder / f"torchweld-0.0-py3-none-{platform}.whl"
    kernels = native.DIRECTORY / f"libtorchweld_cpu_{native.BASELINE}.so"
    isas = ["neon"] if "aarch64" in platform else ["baseline", "avx2", "avx512"]
    libraries = {f"cpu_{isa}": kernels for isa in isas}
    libraries |= {name: native.DIRECTORY / f"libtorchweld_{name}.so" for name in ("cpu", "python")}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, path in libraries.items():
            if name not in left_out:
                archive.write(path, f"torchweld/lib/libtorchweld_{name}.so")
    return wheel


def _check(wheel: Path) -> tuple[int, str]:
    script = Path(__file__).parents[2] / ".ci/check_wheel.py"
    command = [sys.executable, str(script), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("tag", "left_out", "said"),
    [
        ("manylinux_2_28_{here}", (), "ok      libtorchweld_python exports"),
        ("manylinux_2_5_{here}", (), "FAILED  libtorchweld_cpu takes at most"),
        ("manylinux_2_28_{other}", (), "FAILED  libtorchweld_cpu is for"),
        ("manylinux_2_28_riscv64", (), "FAILED  machine: riscv64"),
        ("linux_{here}", (), "FAILED  wheel tag"),
        ("manylinux_2_28_{here}", ("python",), "FAILED  libraries"),
    ],
)
def test_a_wheel_that_a_system_could_not_load_fails_its_check(
    tag: str, left_out: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """A cross-compiler links symbols of its own glibc: dlsym of 2.34, pow and log of 2.29."""
    here = platform.machine()
    other = "x86_64" if here == "aarch64" else "aarch64"
    status, last = _check(_pack(tmp_path, tag.format(here=here, other=other), *left_out))
    assert last.startswith(said)
    assert status == ("FAILED" in said)


def test_the_compiler_says_which_machine_it_compiles_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CXX may name a cross-compiler: libraries and the wheel's tag are for its machine."""
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho aarch64-linux-gnu\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import build; from pathlib import Path; "
        "tag = build.glibc_tag('linux_x86_64', Path(sys.argv[2])); "
        "print(build.MACHINE, build.find_isas('all'), tag)"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parents[2] / "csrc")]
    command.append(str(native.DIRECTORY))
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found.split() == ["aarch64", "['neon']", "manylinux_2_28_aarch64"]
