"""Releases of transformers that are newer than the tested one."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import types
from pathlib import Path

import pytest
import torch

import torchweld
from torchweld.commands import cli
from torchweld.fusion import peer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    """A model with a class of a module of transformers."""
    module = types.ModuleType("transformers.models.some")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    cls = type("SomeNorm", (torch.nn.LayerNorm,), {"__module__": module.__name__})
    return torch.nn.Sequential(cls(8))


@pytest.mark.parametrize(
    ("version", "warns"),
    [("4.56.0", False), ("5.24.3", False), ("5.25.0.dev0", True), ("6", True), ("10.0", True)],
)
def test_newer_releases_are_named(
    version: str,
    warns: bool,
    model: torch.nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    known = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: version if name == "transformers" else known(name),
    )
    said = f"transformers {version} is newer than 5.24"
    assert (said in str(torchweld.explain_fusion(model))) is warns
    assert "newer" not in str(torchweld.explain_fusion(torch.nn.Sequential(torch.nn.LayerNorm(8))))
    cli.main(["doctor"])
    assert (said in " ".join(capsys.readouterr().out.split())) is warns


def test_the_tested_release_is_the_one_of_the_peer_tests() -> None:
    pins = re.findall(r'"transformers==(\d+\.\d+)\.\d+"', (ROOT / "Makefile").read_text())
    floor = re.search(r"transformers>=(\d+\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert floor
    assert pins == [peer.TESTED, floor[1]]
