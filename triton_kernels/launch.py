"""A kernel launch as a value, so that the ahead-of-time tests compile exactly what runs."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from .tensors import is_aligned


class Launch(NamedTuple):
    """A kernel with everything that its run depends on."""

    kernel: Any
    grid: int
    args: tuple[Any, ...]
    options: dict[str, Any]  # the kernel's constexprs, and options of the compiler
    least_capability: int = 80  # of the GPUs that it is meant for
    spreads: bool = False  # over twice the warps, where a view is not aligned

    def unaligned_options(self) -> dict[str, Any]:
        """The options where Triton does not know a view to be aligned.

        It then loads one element at a time, and the addresses take registers. A limit of registers
        that suits half as many warps may be more than a multiprocessor has.
        """
        if not self.spreads:
            return self.options
        options = {name: value for name, value in self.options.items() if name != "maxnreg"}
        return options | {"num_warps": min(32, 2 * options["num_warps"])}


def launch(kernel: Any, grid: int, *args: Any, spreads: bool = False, **options: Any) -> Launch:
    # The default of enable_fp_fusion differs between versions of Triton.
    return Launch(kernel, grid, args, {"enable_fp_fusion": True, **options}, spreads=spreads)


def run(on: torch.Tensor, *launches: Launch) -> None:
    """Run the launches in order on the device of `on`, which need not be the current one."""
    with torch.cuda.device_of(on):
        for each in launches:
            if not each.grid:
                continue
            tensors = (value for value in each.args if isinstance(value, torch.Tensor))
            unaligned = each.spreads and not all(map(is_aligned, tensors))
            options = each.unaligned_options() if unaligned else each.options
            each.kernel[(each.grid,)](*each.args, **options)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; elsewhere (interpreter, meta tensors) enough to divide work."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 4
