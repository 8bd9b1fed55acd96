"""The Python of the docs' pages that need other packages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pages

NEEDED = ("transformers", "accelerate", "peft", "kernels", "lightning", "trl")
PAGES = [page for page in pages.with_python() if {n for n, _ in pages.blocks(page)} & {*NEEDED}]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_whole(page: str, tmp_path: Path) -> None:
    """In a process of its own: accelerate keeps its state for the whole process."""
    script = f"import pages; assert pages.run({page!r}, *{NEEDED}) == {len(pages.blocks(page))}"
    command = [sys.executable, "-W", "ignore", "-c", script]
    path = os.pathsep.join([str(Path(pages.__file__).parent), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
