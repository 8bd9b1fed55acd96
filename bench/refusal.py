"""One-line errors for commands that cannot run here."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch


class Refusal(Exception):  # noqa: N818
    """The command cannot run here. The message says why, in one line."""


def device_of(options: argparse.Namespace) -> str:
    """The device to measure on: the requested one, else a GPU if there is one."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise Refusal("--device cuda needs a GPU; torch sees none here")
    return device


PICTURES = (".png", ".pdf", ".svg", ".jpg")


def check_outputs(options: argparse.Namespace, *, pictures: Sequence[str] = ("plot",)) -> None:
    """Refuse a file that cannot be written or drawn, before measuring anything."""
    for name in (*pictures, "json", "csv", "markdown"):
        given = getattr(options, name, None)
        if given is None or str(given) == "-":
            continue
        if name in pictures:
            _check_picture(name, Path(given))
        folder = Path(given).absolute().parent
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        if Path(given).is_dir() or not existing.is_dir() or not os.access(existing, os.W_OK):
            raise Refusal(f"--{name}: {given} cannot be written")


def _check_picture(name: str, path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise Refusal(f"--{name} needs matplotlib: pip install torchweld[bench]")
    if path.suffix.lower() not in PICTURES:
        accepted = ", ".join(PICTURES)
        raise Refusal(f"--{name}: {path} is no picture's name; accepted endings: {accepted}")


def positive(text: str) -> float:
    """The type of an option that is a number above 0."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number
