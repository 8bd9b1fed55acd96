"""One-line errors for commands that cannot run here."""

from __future__ import annotations

import argparse
import importlib.util

import torch


class Refusal(Exception):  # noqa: N818
    """The command cannot run here. The message says why, in one line."""


def device_of(options: argparse.Namespace) -> str:
    """The device to measure on: the requested one, else a GPU if there is one."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise Refusal("--device cuda needs a GPU; torch sees none here")
    return device


def check_plot(options: argparse.Namespace) -> None:
    """Refuse a plot that cannot be drawn, before measuring anything."""
    wanted = [name for name in ("plot", "roofline", "scaling") if getattr(options, name, None)]
    if wanted and importlib.util.find_spec("matplotlib") is None:
        raise Refusal(f"--{wanted[0]} needs matplotlib: pip install torchweld[bench]")
