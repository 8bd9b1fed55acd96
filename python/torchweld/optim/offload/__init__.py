"""Optimizer states and steps on the host, beside a device that trains."""

from torchweld.optim.offload._offload import Offload

__all__ = ["Offload"]
