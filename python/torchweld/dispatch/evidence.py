"""What has been proven on a GPU, and what the automatic choice makes of it.

bench/evidence has what the package brings along, the user's cache what `torchweld tune` found here.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from torchweld.dispatch import cache
from torchweld.registry import Op
from torchweld.registry.constant import assume_constant_result
from torchweld.version import __version__

UNPROVEN = "it has run on no GPU; ask for it by name, eager serves until it is proven"


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
    """What is known of a GPU. Evidence recorded on this machine comes before packaged evidence.

    Packaged evidence stays in force for each backend that has none of this machine's.
    """
    known = [record for record in (records().get(gpu), own(gpu)) if record]
    ops: dict[str, dict[str, Any]] = {}
    for record in known:
        for op, proofs in record["ops"].items():
            told = {name: p for name, p in proofs.items() if passed(p) or faults(p)}
            ops[op] = ops.get(op, {}) | told
    return {"ops": ops} if known else None


def passed(proof: dict[str, Any]) -> int:
    """How many tests and cases a kernel passed."""
    return sum(counted["passed"] for counted in proof["outcomes"].values())


def faults(proof: dict[str, Any]) -> list[dict[str, Any]]:
    """What was found wrong with a kernel, each with the dtype that it concerns; None: with all."""
    return [fault for counted in proof["outcomes"].values() for fault in counted["faults"]]


def against(op: Any, backend: str, inputs: Sequence[Any]) -> str | None:
    """Why evidence does not let the automatic choice take a GPU backend; None if it does.

    Evidence from this GPU decides; without it, what won on another GPU of its capability. A bare op
    goes by whether its kernel was right, whatever its speed: it replaces one of many passes.
    """
    x = inputs[0]
    gpu = x.device.index if x.device.type == "cuda" else None
    if not isinstance(op, Op):
        proven = op.proof is not None and is_proven(op.proof, backend, gpu)
        return None if proven else UNPROVEN
    rivals = tuple(name for name in op.sources if op.refused(name, inputs) is None)
    # A size in a compiled graph may be symbolic, and must not become a guard.
    compiling = torch.compiler.is_compiling()
    width, size = (None, None) if compiling else (_width(x.shape), _size(x.numel()))
    return _verdict_while_compiling(
        op.name, backend, rivals, gpu, x.dtype, direction(inputs), width, size
    )


def direction(inputs: Sequence[Any]) -> str:
    """Which of the benchmark's directions a call with these inputs begins: "fwd" or "full"."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return "full" if wanted else "fwd"


def _width(shape: Sequence[int]) -> int:
    """Elements of the innermost dimension."""
    return max(shape[-1], 1) if len(shape) else 1


def _size(elements: int) -> int:
    """The power of two that is not above it."""
    return max(elements, 1).bit_length() - 1


@assume_constant_result
def is_proven(op: str, backend: str, gpu_index: int | None) -> bool:
    """Whether all tests passed on this GPU, or, where it has not run, on another of NVIDIA's."""
    return _is_proven(op, backend, gpu_index)


@functools.cache
def _is_proven(op: str, backend: str, gpu_index: int | None) -> bool:
    known = _of(torch.cuda.get_device_name(gpu_index))
    sources = list(records().values()) if known is None else [known]
    proofs = [proof for r in sources if (proof := r["ops"].get(op, {}).get(backend))]
    return any(map(passed, proofs)) and not any(map(faults, proofs))


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
    direction: str,
    width: int | None,
    size: int | None,
) -> str | None:
    """The verdict for a class of calls; a width or a size of None: any."""
    sources = _sources(gpu_index)
    found = {
        name: _speed_up(_measured(sources, op_name, name, dtype, direction), width, size)
        for name in rivals
    }
    speed_ups = {name: ratio for name, ratio in found.items() if ratio is not None}
    if backend not in speed_ups:
        return UNPROVEN
    if speed_ups[backend] < 1:
        return f"measured at {speed_ups[backend]:.2f}x eager's speed"
    best = max(speed_ups, key=lambda name: speed_ups[name])
    if best != backend:
        return (
            f"measured at {speed_ups[backend]:.2f}x eager's speed, {best} at {speed_ups[best]:.2f}x"
        )
    return None


def _sources(gpu_index: int | None) -> list[dict[str, Any]]:
    """The evidence that counts on a GPU: its own, or else that of others of its capability."""
    if gpu_index is None:
        return list(records().values())
    known = _of(torch.cuda.get_device_name(gpu_index))
    if known is not None:
        return [known]
    capability = ".".join(map(str, torch.cuda.get_device_capability(gpu_index)))
    return [record for record in records().values() if record["capability"] == capability]


def _measured(
    sources: list[dict[str, Any]], op: str, backend: str, dtype: torch.dtype, direction: str
) -> list[dict[str, Any]]:
    """The times of a kernel that passed all tests, in this dtype and direction."""
    wanted = (str(dtype).removeprefix("torch."), direction)
    return [
        result
        for record in sources
        if (proof := record["ops"].get(op, {}).get(backend))
        and passed(proof)
        and not any(fault["dtype"] in (None, wanted[0]) for fault in faults(proof))
        for result in proof["results"]
        if (result["dtype"], result["direction"]) == wanted
    ]


def _speed_up(results: list[dict[str, Any]], width: int | None, size: int | None) -> float | None:
    """Speed over eager at the benchmarked shapes nearest in width, then in size.

    The least, where several are as near, or where any width and size is asked for.
    """
    if width is not None and size is not None and results:
        distances = [
            (abs(math.log2(_width(r["shape"]) / width)), abs(_size(r["elements"]) - size))
            for r in results
        ]
        results = [r for r, d in zip(results, distances, strict=True) if d == min(distances)]
    return min((r["eager_ms"] / r["ms"] for r in results), default=None)
