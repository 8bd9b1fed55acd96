"""Optimizer states and steps on the host, for training on a device."""

from torchweld.optim.offload._offload import Offload

__all__ = ["Offload"]
