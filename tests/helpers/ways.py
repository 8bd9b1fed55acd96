"""Tests of results of fuse() run by both of its ways."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchweld


@pytest.fixture(params=("trial", "graph"))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What `torchweld.fuse` goes by in a test."""
    if request.param == "graph":
        torch.compiler.reset()
        monkeypatch.setattr(torchweld, "fuse", functools.partial(torchweld.fuse, by="graph"))
    yield request.param
    if request.param == "graph":
        torch.compiler.reset()


def is_by_graph() -> bool:
    """Whether `torchweld.fuse` goes by graph in this test."""
    fuse: Any = torchweld.fuse
    return isinstance(fuse, functools.partial)
