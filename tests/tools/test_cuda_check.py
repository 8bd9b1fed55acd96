"""`make cuda-check`: what is compiled, what is kept, and what fails. A script stands for nvcc."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
_NVCC = """#!/bin/sh
[ "$1" = --version ] && echo "release $(cat {folder}/version)" && exit
echo "$*" >> {folder}/calls
echo "ptxas info: Compiling entry function 'f' for 'sm_90'" >&2
echo "0 bytes stack frame, $(cat {folder}/spilled) bytes spill stores, 0 bytes spill loads" >&2
echo "ptxas info: Used $(cat {folder}/registers) registers" >&2
"""


class Tree:
    """A checkout with two CUDA files, and what the compiler finds in each."""

    def __init__(self, folder: Path, check: Any) -> None:
        self.folder, self._check = folder, check
        (folder / "csrc" / "cuda").mkdir(parents=True)
        self.write("csrc/cuda/a.cu", '#include "deep.h"\n')
        self.write("csrc/cuda/b.cu", "// b\n")
        self.write("csrc/deep.h", "// 1\n")
        self.write("nvcc", _NVCC.format(folder=folder))
        (folder / "nvcc").chmod(0o755)
        for name, value in (("version", "13"), ("spilled", "0"), ("registers", "40")):
            self.write(name, value)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def run(self, *arguments: str) -> tuple[int, set[str]]:
        """The exit status, and the compiled files."""
        calls = self.folder / "calls"
        calls.unlink(missing_ok=True)
        sys.argv = ["cuda_check.py", *arguments]
        with pytest.raises(SystemExit) as end:
            self._check.main()
        words = calls.read_text().split() if calls.exists() else []
        return int(end.value.code or 0), {Path(w).name for w in words if w.endswith(".cu")}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    monkeypatch.syspath_prepend(str(CSRC))
    monkeypatch.setattr(sys, "argv", sys.argv)
    build, check = (importlib.import_module(name) for name in ("build", "cuda_check"))
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "CSRC", tmp_path / "csrc")
    monkeypatch.setattr(build, "nvcc", lambda: str(tmp_path / "nvcc"))
    monkeypatch.setattr(check, "KEPT", tmp_path / "kept.tsv")
    return Tree(tmp_path, check)


def test_files_that_are_kept_are_not_compiled_again(tree: Tree) -> None:
    """The first of those with the fewest kernels is, so that a run compiles something."""
    assert tree.run() == (0, {"a.cu", "b.cu"})
    assert tree.run() == (0, {"a.cu", "b.cu"})  # nothing was stored
    assert tree.run("keep") == (0, {"a.cu", "b.cu"})
    assert tree.run() == (0, {"a.cu"})
    assert tree.run("all") == (0, {"a.cu", "b.cu"})


@pytest.mark.parametrize(
    ("name", "compiled"),
    [("csrc/deep.h", {"a.cu", "b.cu"}), ("csrc/cuda/b.cu", {"a.cu", "b.cu"})],
)
def test_files_that_changed_are_compiled(tree: Tree, name: str, compiled: set[str]) -> None:
    """After a change of a header that only a includes, b is the smallest of those that are kept."""
    tree.run("keep")
    tree.write(name, "// 2\n" if name.endswith(".h") else "// b, changed\n")
    assert tree.run() == (0, compiled)
    assert tree.run("keep") == (0, compiled)
    assert tree.run() == (0, {"a.cu"})


def test_another_compiler_compiles_all(tree: Tree) -> None:
    tree.run("keep")
    tree.write("version", "14")
    assert tree.run() == (0, {"a.cu", "b.cu"})


def test_a_spill_fails_and_is_not_kept(tree: Tree) -> None:
    tree.write("spilled", "8")
    assert tree.run("keep") == (1, {"a.cu", "b.cu"})
    assert not (tree.folder / "kept.tsv").exists()


def test_a_result_that_differs_from_the_kept_one_fails(
    tree: Tree, capsys: pytest.CaptureFixture[str]
) -> None:
    tree.run("keep")
    tree.write("registers", "41")
    assert tree.run() == (1, {"a.cu"})
    assert "kept.tsv has Kept(key=" in capsys.readouterr().out
