"""transformers, whose models are recognised by their source: a newer release may have another."""

from __future__ import annotations

import importlib.metadata
import re

import torch

TESTED = "5.24"  # as `make test-peers` installs it


def read_version() -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return None


def warn_of_newer() -> str | None:
    """What to look for if the installed version is newer than the tested one, or None."""
    version = read_version()
    if version is None or _read_release(version) <= _read_release(TESTED):
        return None
    return (
        f"transformers {version} is newer than {TESTED}, with which torchweld was tested: forwards"
        " that changed keep their own rotation and loss, and rows above say so"
    )


def is_from_transformers(model: torch.nn.Module) -> bool:
    """Whether a part of a model is of transformers."""
    return any(type(part).__module__.startswith("transformers.") for part in model.modules())


def _read_release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
