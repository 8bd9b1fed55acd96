"""What has been proven on a GPU, and what the automatic choice makes of it.

bench/evidence has what the package brings along, the user's cache what `torchweld tune` found here.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from torchweld.dispatch import cache
from torchweld.dispatch.constant import assume_constant_result
from torchweld.registry import OPS, Op
from torchweld.version import __version__

_UNPROVEN = "it has run on no GPU; ask for it by name, eager serves until it is proven"


@functools.cache
def records() -> dict[str, dict[str, Any]]:
    """GPU name -> its evidence file."""
    folder = resources.files("torchweld.bench") / "evidence"
    files = [f for f in folder.iterdir() if f.name.endswith(".json")] if folder.is_dir() else []
    loaded = [json.loads(f.read_text()) for f in files]
    return {record["gpu"]: record for record in loaded}


def file_name(gpu: str) -> str:
    """NVIDIA H200 -> nvidia-h200.json."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def own_path(gpu: str) -> Path:
    """The file that `torchweld tune` keeps of a GPU."""
    return cache.folder() / file_name(gpu)


@functools.cache
def own(gpu: str) -> dict[str, Any] | None:
    """What `torchweld tune` found on this GPU with this torch and torchweld."""
    found = cache.read(own_path(gpu))
    now = {"torch": torch.__version__, "torchweld": __version__}
    return found if found and now.items() <= found["versions"].items() else None


def _of(gpu: str) -> dict[str, Any] | None:
    """What is known of a GPU: what was found here counts for more than what came along."""
    known = [record for record in (records().get(gpu), own(gpu)) if record]
    return {"ops": {op: p for r in known for op, p in r["ops"].items()}} if known else None


def against(op: Any, backend: str, inputs: Sequence[Any]) -> str | None:
    """Why evidence does not let the automatic choice take a GPU backend; None if it does.

    Evidence from this GPU decides; without it, what won on another NVIDIA GPU is taken. A bare op
    goes by whether its kernel was right, whatever its speed: it replaces one of many passes.
    """
    x = inputs[0]
    gpu = x.device.index if x.device.type == "cuda" else None
    if not isinstance(op, Op):
        proven = op.proof is not None and is_proven(op.proof, backend, gpu)
        return None if proven else _UNPROVEN
    # A size in a compiled graph may be symbolic, and must not become a guard.
    size = None if torch.compiler.is_compiling() else max(x.numel(), 1).bit_length()
    rivals = tuple(name for name in op.sources if op.refused(name, inputs) is None)
    return _verdict_while_compiling(op.name, backend, rivals, gpu, x.dtype, size)


@assume_constant_result
def is_proven(op: str, backend: str, gpu_index: int | None) -> bool:
    """Whether all tests passed on this GPU, or, where it has not run, on another of NVIDIA's."""
    return _is_proven(op, backend, gpu_index)


@functools.cache
def _is_proven(op: str, backend: str, gpu_index: int | None) -> bool:
    known = _of(torch.cuda.get_device_name(gpu_index))
    sources = list(records().values()) if known is None else [known]
    proofs = [proof for r in sources if (proof := r["ops"].get(op, {}).get(backend))]
    return any(p["passed"] for p in proofs) and not any(p["failed"] for p in proofs)


@assume_constant_result
def _verdict_while_compiling(*constants: Any) -> str | None:
    """The verdict, which torch.compile takes for a constant instead of tracing how it is found."""
    return _verdict(*constants)


@functools.cache
def _verdict(
    op_name: str,
    backend: str,
    rivals: tuple[str, ...],
    gpu_index: int | None,
    dtype: torch.dtype,
    size: int | None,
) -> str | None:
    """The verdict for a shape class: a dtype and a power of two of elements; None: any."""
    op = OPS[op_name]
    gpu = "" if gpu_index is None else torch.cuda.get_device_name(gpu_index)
    known = _of(gpu) if gpu else None
    sources = list(records().values()) if known is None else [known]
    speed_ups = {
        name: ratio for name in rivals for ratio in _nearest(sources, op.name, name, dtype, size)
    }
    if backend not in speed_ups:
        return _UNPROVEN
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
