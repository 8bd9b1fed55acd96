"""What a command cannot do here, said in one line."""

from __future__ import annotations

import argparse
import importlib.util

import torch


class Refusal(Exception):  # noqa: N818
    """What was asked for cannot be done here. The message says why, in one line."""


def device_of(options: argparse.Namespace) -> str:
    """The device to measure on: the one that was asked for, else a GPU if there is one."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise Refusal("--device cuda needs a GPU; torch sees none here")
    return device


def check_plot(options: argparse.Namespace) -> None:
    """Refuse a plot that could not be drawn, before anything is measured."""
    wanted = [name for name in ("plot", "roofline", "scaling") if getattr(options, name, None)]
    if wanted and importlib.util.find_spec("matplotlib") is None:
        raise Refusal(f"--{wanted[0]} needs matplotlib: pip install torchweld[bench]")
