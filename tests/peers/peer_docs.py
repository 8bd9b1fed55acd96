"""The Python of the docs' pages that need transformers, accelerate and peft."""

from __future__ import annotations

from pathlib import Path

import pytest

import pages

NEEDED = ("transformers", "accelerate", "peft")
PAGES = [page for page in pages.with_python() if {n for n, _ in pages.blocks(page)} & {*NEEDED}]


@pytest.mark.filterwarnings("ignore")  # those packages' own
@pytest.mark.parametrize("page", PAGES)
def test_a_page_runs_whole(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert pages.run(page, *NEEDED) == len(pages.blocks(page))
