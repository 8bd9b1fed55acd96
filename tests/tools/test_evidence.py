"""Evidence: the files that determine a kernel, and what a record says once they have changed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from torchweld.bench.measure import evidence
from torchweld.bench.measure.evidence import PROVEN
from torchweld.bench.measure.runner import Result
from torchweld.bench.show import report
from torchweld.registry import OPS, Composite, Op

ROOT = Path(__file__).resolve().parents[2]
KERNELS = [
    (name, backend, ROOT / files[0])
    for name, op in PROVEN.items()
    for backend, files in op.sources.items()
]
NATIVE = [kernel for kernel in KERNELS if kernel[2].suffix != ".py"]


@pytest.mark.parametrize(("name", "backend", "source"), NATIVE)
def test_headers_are_those_the_compiler_reads(name: str, backend: str, source: Path) -> None:
    """CUDA's sources are read with the emulator in CUDA's place."""
    emulator = ROOT / "tests" / "emulator" / "include"
    flags = ["-std=c++17", f"-I{ROOT / 'csrc'}", "-x", "c++"]
    flags += ["-DTW_EMULATED", f"-I{emulator}"] if source.suffix == ".cu" else ["-DTW_VARIANT=avx2"]
    flags += [f"-DTW_RULE={name}"] if source.stem == "rule" else []
    command = [os.environ.get("CXX", "g++"), "-MM", *flags, str(source)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    read = {
        Path(os.path.normpath(word)) for word in printed.partition(":")[2].split() if word != "\\"
    }
    wanted = {p for p in read if p.is_relative_to(ROOT / "csrc")}
    derived = set(evidence.find_sources(PROVEN[name], backend, ROOT))
    assert wanted <= derived


@pytest.mark.parametrize(("name", "backend"), [(n, b) for n, b, p in KERNELS if p.suffix != ".py"])
def test_the_binding_and_the_flags_are_among_them(name: str, backend: str) -> None:
    found = evidence.find_sources(PROVEN[name], backend, ROOT)
    assert ROOT / "csrc" / "flags.py" in found
    text = "".join(path.read_text() for path in found if path.parent.name == "bind")
    if not isinstance(PROVEN[name], Composite):
        overload = "TW_RULE_NAME" if ROOT / "csrc" / "bind" / "rule.cpp" in found else f'"{name}"'
        assert f"TW_OVERLOAD({overload})" in text


TRITON = [op for op in OPS.values() if "triton" in op.sources]


@pytest.mark.parametrize("declared", TRITON, ids=str)
def test_a_triton_kernel_names_its_functions(declared: Op) -> None:
    """Its file has the functions of the op's schemas, and what it imports comes along."""
    op = declared
    found = evidence.find_sources(op, "triton", ROOT)
    assert [path for path in found if path.suffix == ".py"] == found
    if not isinstance(op, Composite):
        text = (ROOT / op.sources["triton"][0]).read_text()
        assert f"def {op.name}(" in text
        assert f"def {op.name}_backward(" in text


def test_every_relative_import_is_a_source(tmp_path: Path) -> None:
    """`from . import attention_roles` was not one: its kernels could change, and the evidence of
    attention stayed current. The tests changed only files that were found."""
    imports = "from . import two\nfrom ..three import f\nfrom ..b.four import g\n"
    for name, text in {"a/one": imports, "a/two": "", "three": "", "b/four": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    found = evidence.find_used([tmp_path / "a" / "one.py"], tmp_path)
    names = [path.relative_to(tmp_path).as_posix() for path in found]
    assert names == ["a/one.py", "a/two.py", "b/four.py", "three.py"]


def _append(file: Path, python: str, other: str) -> None:
    """Append a line in the file's language."""
    with file.open("a") as opened:
        opened.write(f"\n{python if file.suffix == '.py' else other}\n")


def test_a_line_of_any_source_moves_the_hashes_of_what_it_is_part_of(tmp_path: Path) -> None:
    for folder in ("csrc", "triton_kernels"):
        shutil.copytree(ROOT / folder, tmp_path / folder)

    def found(key: tuple[str, str]) -> str:
        return evidence.sources_hash(PROVEN[key[0]], key[1], tmp_path)

    keys = [(name, backend) for name, op in PROVEN.items() for backend in op.sources]
    parts = {key: {*evidence.find_sources(PROVEN[key[0]], key[1], tmp_path)} for key in keys}
    before = {key: found(key) for key in keys}
    paths = sorted(set().union(*parts.values()))
    for path in paths:
        _append(path, "# one", "// one")
    assert {key: found(key) for key in keys} == before
    texts = {path: path.read_text() for path in paths}
    for path in paths:
        _append(path, "one = 1", "int one;")
        moved = {key for key, files in parts.items() if path in files}
        assert not [key for key in moved if found(key) == before[key]], path
        path.write_text(texts[path])
    # The other files move no hash, not even all of them together.
    for path in paths:
        _append(path, "one = 1", "int one;")
    for key, files in parts.items():
        for path in files:
            path.write_text(texts[path])
        assert found(key) == before[key]
        for path in files:
            _append(path, "one = 1", "int one;")


def test_only_what_a_kernel_computes_counts(tmp_path: Path) -> None:
    """Comments and docstrings go; strings that only look like them stay."""
    file = tmp_path / "kernel.py"
    file.write_text(
        '''"""A module,
of two lines."""  # and a comment

name = "# not a comment"  # a comment
def load(ptr,
         # between arguments
         default="""not a docstring"""):
    """A docstring."""
    value = ptr
    return (
        "not a docstring"
    )
'''
    )
    assert evidence.stripped(file).splitlines() == [
        'name = "# not a comment"',
        "def load(ptr,",
        '         default="""not a docstring"""):',
        "    value = ptr",
        "    return (",
        '        "not a docstring"',
        "    )",
    ]


def test_blocks_that_cudas_build_leaves_out_do_not_count_there(tmp_path: Path) -> None:
    file = tmp_path / "tensor.h"
    whole = "#if !defined(TW_CUDA)\nint cpu;\n#if defined(X)\nint x;\n#endif\n#endif\n"
    hashes = []
    for text in ("int both;\n", f"int both;\n{whole}", f"int more;\n{whole}"):
        file.write_text(text)
        hashes.append([evidence.hash_of([file], tmp_path, on_cuda=flag) for flag in (True, False)])
    (cuda, cpu), (same, other), (changed, _) = hashes
    assert cuda == same != changed
    assert cpu != other
    file.write_text("#if !defined(TW_CUDA)\nint cpu;\n#else\nint cuda;\n#endif\n")
    with pytest.raises(ValueError, match="has another branch"):
        evidence.hash_of([file], tmp_path, on_cuda=True)


CUDA = {
    "csrc/cuda/rule.cu": '#include "cuda/rule.cuh"\n\nvoid step() { launch<<<4, 128>>>(); }\n',
    "csrc/cuda/rule.cuh": "// A step.\n__global__ void launch() { x = fmaf(x, y, z); }\n",
    "csrc/core/rules/adam.h": "struct Adam {};\n",
    "csrc/cuda/sum_of_squares.cu": "",
    "csrc/bind/rule.cpp": "void bind() {}\n",
    "csrc/flags.py": 'NVCC_FLAGS = "-std=c++17 -O3"\nCXX_FLAGS = "-O3"\n',
}
STALE = {
    "an instruction": ("cuda/rule.cuh", "fmaf(x, y, z)", "fmaf(x, z, y)"),
    "a grid": ("cuda/rule.cu", "<<<4, 128>>>", "<<<8, 128>>>"),
    "an option": ("flags.py", 'NVCC_FLAGS = "-std=c++17 -O3', 'NVCC_FLAGS = "-std=c++17 -O2'),
    "the rule": ("core/rules/adam.h", "{}", "{ float rate; }"),
}
CURRENT = {
    "a comment": ("cuda/rule.cuh", "// A step.", "/* Two\n lines. */"),
    "an option of the CPU's": ("flags.py", 'CXX_FLAGS = "-O3"', 'CXX_FLAGS = "-O2"'),
    "the binding": ("bind/rule.cpp", "{}", "{ return; }"),
    "a block of the CPU's": (
        "cuda/rule.cuh",
        "__global__",
        "#if !defined(TW_CUDA)\nint cpu;\n#endif\n__global__",
    ),
}


@pytest.mark.parametrize("change", [*STALE, *CURRENT, "a renamed file"])
def test_what_nvcc_gets_counts(change: str, tmp_path: Path) -> None:
    """Rows of CUDA's kernels were stale by a comment's file, a binding or a renamed header."""
    for name, text in CUDA.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    rule = evidence.PROVEN["adam"]
    before = evidence.find_device_code(rule, tmp_path)
    if change == "a renamed file":
        text = CUDA["csrc/cuda/rule.cu"].replace("rule.cuh", "steps.cuh")
        (tmp_path / "csrc/cuda/rule.cu").write_text(text)
        (tmp_path / "csrc/cuda/rule.cuh").rename(tmp_path / "csrc/cuda/steps.cuh")
    else:
        name, old, new = {**STALE, **CURRENT}[change]
        path = tmp_path / "csrc" / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
    assert (evidence.find_device_code(rule, tmp_path) != before) == (change in STALE)


def test_what_looks_like_a_comment_in_a_string_stays(tmp_path: Path) -> None:
    file = tmp_path / "a.cu"
    text = 'auto a = "http://x"; auto b = "\\"/*"; char c = \'"\';'
    file.write_text(f"// one\n\n/* two\n lines */{text} // gone")
    assert evidence.stripped(file) == f" {text}"


SOFTMAX = OPS["softmax_dropout"]


def test_changed_sources_make_a_record_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state and its times say so; the fastest current time is the choice."""
    monkeypatch.setitem(SOFTMAX.sources, "cuda", ("csrc/cuda/softmax.cu",))
    for backend in ("cuda", "triton"):
        path = tmp_path / SOFTMAX.sources[backend][0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n" if backend == "triton" else "int x = 1;\n")
    proofs: dict[str, Any] = {}
    for backend, ms in (("cuda", 1.0), ("triton", 0.8)):
        result = Result(SOFTMAX.name, [8, 64], "bfloat16", "full", backend, 512, 2048)
        result.ms, result.eager_ms = ms, 2.0
        kept = {name: getattr(result, name) for name in evidence.KEPT}
        proofs[backend] = {
            "sources": evidence.sources_hash(SOFTMAX, backend, tmp_path),
            "outcomes": {"tested": {"passed": 2, "faults": ["test_it"]}},
            "results": [kept | {"rivals_ms": {"eager": 2.0, "compile": 1.5}}],
        }
    record = {"ops": {SOFTMAX.name: proofs, "left": proofs}}

    def read(folder: Path | None) -> dict[str, tuple[float | None, bool]]:
        found = evidence.list_results(record, folder)
        return {r.contender: (r.speed_up, r.automatic) for r in found}

    def describe() -> dict[tuple[str, ...], str]:
        lines = evidence.list_states(tmp_path, {"NVIDIA H200": record})
        return {line[:3]: line[3] for line in lines}

    counts = "(2 passed, 1 failed, 1 times)"
    assert describe()[SOFTMAX.name, "triton", "NVIDIA H200"] == f"current {counts}"
    assert describe()["layer_norm", "triton", "-"] == "never run on a GPU"
    assert read(tmp_path) == read(None) == {"cuda": (2.0, False), "triton": (2.5, True)}
    (tmp_path / SOFTMAX.sources["triton"][0]).write_text("x = 2\n")
    state = describe()[SOFTMAX.name, "triton", "NVIDIA H200"]
    assert state == f"stale: its sources changed since {counts}"
    assert read(tmp_path) == {"cuda": (2.0, False), "triton (stale)": (2.5, True)}
    assert "| triton (stale) | 2.50x |" in report.markdown(evidence.list_results(record, tmp_path))
    (rival, _) = evidence.list_rivals(record)
    assert (rival.contender, rival.ms) == ("compile", 1.5)
