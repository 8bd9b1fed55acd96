"""Tests of results of fuse() run by both of its ways."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import torchweld


@pytest.fixture(params=("trial", "graph"))
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """What `torchweld.fuse` goes by in a test."""
    with _going_by_graph() if request.param == "graph" else contextlib.nullcontext():
        yield request.param


@pytest.fixture
def by_graph() -> Iterator[None]:
    """`torchweld.fuse` goes by graph in a test."""
    with _going_by_graph():
        yield


@contextlib.contextmanager
def _going_by_graph() -> Iterator[None]:
    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patches:
        for name in ("fuse", "explain_fusion"):
            given = functools.partial(getattr(torchweld, name), by="graph")
            patches.setattr(torchweld, name, given)
        yield
    torch.compiler.reset()


def is_by_graph() -> bool:
    """Whether `torchweld.fuse` goes by graph in this test."""
    fuse: Any = torchweld.fuse
    return isinstance(fuse, functools.partial)
