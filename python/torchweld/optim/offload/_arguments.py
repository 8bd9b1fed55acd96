"""Checks of Offload's arguments, and facts about its environment."""

from __future__ import annotations

import os
from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.optim._base import FusedOptimizer
from torchweld.optim._one_bit import OneBitOptimizer
from torchweld.optim._shards import local
from torchweld.optim.offload._buckets import DEVICE, HOST

PLACEMENTS = (HOST, DEVICE, "auto")


def check(
    given: Any,
    placement: str,
    clip_norm: float | None,
    threads: int | None,
    bucket_bytes: int,
) -> None:
    """Check Offload's arguments."""

    def refuse(argument: str, came: object, accepted: str) -> None:
        raise ArgumentError("Offload", argument, came, accepted)

    if not isinstance(given, FusedOptimizer):
        accepted = "parameters, or an optimizer of torchweld.optim"
        refuse("params_or_optimizer", f"a {type(given).__name__}", accepted)
    if isinstance(given, OneBitOptimizer):
        accepted = "an optimizer that does not communicate by itself"
        refuse("params_or_optimizer", f"a {type(given).__name__}", accepted)
    if placement not in PLACEMENTS:
        refuse("placement", repr(placement), ", ".join(map(repr, PLACEMENTS)))
    if clip_norm is not None and not clip_norm > 0:
        refuse("clip_norm", repr(clip_norm), "a number > 0 or None")
    if threads is not None and threads < 1:
        refuse("threads", repr(threads), "a number > 0 or None")
    if bucket_bytes < 1:
        refuse("bucket_bytes", repr(bucket_bytes), "a number > 0")


def check_host_only(placement: str, **asked: bool | int) -> None:
    """Check arguments that need steps on the host."""
    for argument, value in asked.items():
        if value is not False and placement != HOST:
            came = f"{value!r} with placement={placement!r}"
            raise ArgumentError("Offload", argument, came, 'False, or placement="cpu"')
        if value < 0:
            raise ArgumentError("Offload", argument, repr(value), "True, False or a number >= 0")


def check_trust(trust_versions: bool, release_gradients: bool) -> None:
    """Check that gradients may leave as late as trust_versions=False asks."""
    if release_gradients and not trust_versions:
        accepted = "True with release_gradients, whose gradients leave during the backward"
        raise ArgumentError("Offload", "trust_versions", "False", accepted)


def device_of(given: FusedOptimizer) -> torch.device:
    """The device of the parameters."""
    devices = {local(p.detach()).device for group in given.param_groups for p in group["params"]}
    if len(devices) > 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        came = f"on {', '.join(sorted(map(str, devices)))}"
        raise ArgumentError("Offload", "a parameter", came, "all on one GPU, or on the CPU")
    return devices.pop()


def has_processes() -> bool:
    """Whether other processes train along."""
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def half_of_free() -> int:
    """Bytes of the host's memory."""
    if not hasattr(os, "sysconf") or "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return 0
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
