"""What has been proven on a GPU: bench/evidence, and what the automatic choice makes of it."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from importlib import resources
from typing import Any

import torch

from torchweld.registry import OPS, Op


@functools.cache
def records() -> dict[str, dict[str, Any]]:
    """GPU name -> its evidence file."""
    folder = resources.files("torchweld.bench") / "evidence"
    files = [f for f in folder.iterdir() if f.name.endswith(".json")] if folder.is_dir() else []
    loaded = [json.loads(f.read_text()) for f in files]
    return {record["gpu"]: record for record in loaded}


def against(op: Op, backend: str, x: torch.Tensor) -> str | None:
    """Why evidence does not let the automatic choice take a GPU backend; None if it does.

    Evidence from this GPU decides; without it, what won on another NVIDIA GPU is taken.
    """
    # A size in a compiled graph may be symbolic, and must not become a guard.
    size = None if torch.compiler.is_compiling() else max(x.numel(), 1).bit_length()
    gpu = x.device.index if x.device.type == "cuda" else None
    return _verdict_while_compiling(op.name, backend, gpu, x.dtype, size)


@torch.compiler.assume_constant_result
def _verdict_while_compiling(*constants: Any) -> str | None:
    """The verdict, which torch.compile takes for a constant instead of tracing how it is found."""
    return _verdict(*constants)


@functools.cache
def _verdict(
    op_name: str, backend: str, gpu_index: int | None, dtype: torch.dtype, size: int | None
) -> str | None:
    """The verdict for a shape class: a dtype and a power of two of elements; None: any."""
    op = OPS[op_name]
    gpu = "" if gpu_index is None else torch.cuda.get_device_name(gpu_index)
    sources = [records()[gpu]] if gpu in records() else list(records().values())
    speed_ups = {
        name: ratio
        for name in op.sources
        for ratio in _nearest(sources, op.name, name, dtype, size)
    }
    if backend not in speed_ups:
        return "it has run on no GPU; ask for it by name, eager serves until it is proven"
    if speed_ups[backend] < 1:
        return f"measured at {speed_ups[backend]:.2f}x eager's speed"
    best = max(speed_ups, key=lambda name: speed_ups[name])
    if best != backend:
        return (
            f"measured at {speed_ups[backend]:.2f}x eager's speed, {best} at {speed_ups[best]:.2f}x"
        )
    return None


def _nearest(
    sources: list[dict[str, Any]], op: str, backend: str, dtype: torch.dtype, size: int | None
) -> Iterator[float]:
    """Speed over eager, forward and backward, at the benchmarked shape nearest in size.

    Of any size: the least of all.
    """
    results = [
        result
        for record in sources
        if (proof := record["ops"].get(op, {}).get(backend))
        and proof["passed"]
        and not proof["failed"]
        for result in proof["results"]
        if result["direction"] == "full" and result["dtype"] == str(dtype).removeprefix("torch.")
    ]
    if size is not None and results:
        distances = [abs(math.log2(result["elements"]) - size) for result in results]
        results = [r for r, d in zip(results, distances, strict=True) if d == min(distances)]
    if results:
        yield min(result["eager_ms"] / result["ms"] for result in results)
