"""A kernel launch as a value, so that the ahead-of-time tests compile exactly what runs."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """A kernel with everything that its run depends on."""

    kernel: Any
    grid: int
    args: tuple[Any, ...]
    options: dict[str, Any]  # the kernel's constexprs, and options of the compiler
    least_capability: int = 80  # of the GPUs that it is meant for


def launch(kernel: Any, grid: int, *args: Any, **options: Any) -> Launch:
    # The default of enable_fp_fusion differs between versions of Triton.
    return Launch(kernel, grid, args, {"enable_fp_fusion": True, **options})


def run(on: torch.Tensor, *launches: Launch) -> None:
    """Run the launches in order on the device of `on`, which need not be the current one."""
    with torch.cuda.device_of(on):
        for kernel, grid, args, options, _ in launches:
            if grid:
                kernel[(grid,)](*args, **options)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; elsewhere (interpreter, meta tensors) enough to divide work."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4
