"""Parallel: how processes share the work, as a declaration.

parallel = dict(pipeline=2, tensor=dict(mode="1d", size=2), data="zero2")
parallel = dict(ring=2, tensor=dict(size=2), data="zero3")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torchweld.distributed.plan import sequence_plan, tp_plan
from torchweld.distributed.zero import zero2, zero3
from torchweld.errors import ArgumentError

DATA = ("ddp", "zero1", "zero2", "zero3")
# Ways to shard matrices. Each takes a module, a mesh (tensor, or ring and tensor), and whether the
# devices along tensor also shard the sequence.
MODES: dict[str, Callable[[torch.nn.Module, DeviceMesh, bool], Any]] = {
    "1d": lambda model, mesh, sequence: parallelize_module(
        model, mesh, tp_plan(model, sequence, ring=mesh.ndim > 1)
    ),
}
_KEYS = {"pipeline", "tensor", "data", "ring"}
_TENSOR_KEYS = {"mode", "size", "sequence"}
_NAMES = {
    **{name: {"data": name} for name in DATA},
    "tp": {"tensor": {"size": 0}},
    "tp+sp": {"tensor": {"size": 0, "sequence": True}},
    "pp": {"pipeline": 0},
    "fsdp+tp": {"tensor": {"size": 2}, "data": "zero3"},
}


@dataclass(frozen=True)
class Parallel:
    """The sizes of a mesh's dimensions, and the kind of parallelism along each.

    Attributes:
        pipeline: the number of pipeline stages.
        tensor: processes that share each matrix.
        replicas: processes of data parallelism.
        data: "ddp", "zero1" (sharded states), "zero2" (and gradients), "zero3" (and parameters).
        mode: how matrices are sharded; "1d" is Megatron's way.
        sequence: whether processes that share matrices also shard the sequence in between.
        ring: processes that each have a slice of the sequence, for ring attention.
    """

    pipeline: int
    tensor: int
    replicas: int
    data: str = "ddp"
    mode: str = "1d"
    sequence: bool = False
    ring: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any] | str, world: int) -> Parallel:
        """Parse a declaration, or the name of one, for `world` processes; a size of 0 means all."""
        if isinstance(config, str):
            _one_of("config", config, _NAMES)
            config = _NAMES[config]  # type: ignore[assignment]
        assert not isinstance(config, str)
        _only("config", config, _KEYS)
        tensor = config.get("tensor", {"size": 1})
        _only("tensor", tensor, _TENSOR_KEYS)
        sequence = tensor.get("sequence", False)
        if not isinstance(sequence, bool):
            raise ArgumentError("Parallel", "sequence", repr(sequence), "True or False")
        data, mode = config.get("data", "ddp"), tensor.get("mode", "1d")
        _one_of("data", data, DATA)
        _one_of("mode", mode, MODES)
        pipeline, size = config.get("pipeline", 1), tensor.get("size", 1)
        ring = config.get("ring", 1)
        for name, value in (("pipeline", pipeline), ("tensor", size), ("ring", ring)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ArgumentError("Parallel", name, repr(value), "a number of processes")
        pipeline, size, ring = pipeline or world, size or world, ring or world
        if ring > 1 and pipeline > 1:
            accepted = "1 in a pipeline, whose later stages know no positions"
            raise ArgumentError("Parallel", "ring", str(ring), accepted)
        inner = pipeline * size * ring
        if world % inner:
            accepted = f"sizes whose product divides {world} processes"
            raise ArgumentError("Parallel", "config", f"{pipeline} x {ring} x {size}", accepted)
        replicas = world // inner
        if data in ("ddp", "zero1") and replicas > 1 and inner > 1:
            accepted = "zero2 or zero3, which FSDP2 composes with tensors, rings and pipelines"
            raise ArgumentError("Parallel", "data", repr(data), accepted)
        return cls(pipeline, size, replicas, data, mode, sequence, ring)

    def mesh(self, device: str) -> DeviceMesh:
        """The mesh of processes, with dimensions for pipeline, data, ring and tensor."""
        sizes = (self.pipeline, self.replicas, self.ring, self.tensor)
        return init_device_mesh(
            device, sizes, mesh_dim_names=("pipeline", "data", "ring", "tensor")
        )

    def cut(self, model: Any, mesh: DeviceMesh) -> Any:
        """Shard the matrices and the sequence of a model, or the matrices of a stage of one."""
        if self.tensor > 1:
            inner = mesh["ring", "tensor"] if self.ring > 1 else mesh["tensor"]
            return MODES[self.mode](model, inner, self.sequence)
        if self.ring > 1:
            return parallelize_module(model, mesh["ring"], sequence_plan(model))
        return model

    def wrap(self, model: Any, mesh: DeviceMesh) -> Any:
        """Apply data parallelism to a model whose matrices are sharded.

        In a pipeline ZeRO-3 runs as ZeRO-2: otherwise every microbatch would gather parameters.
        """
        if self.data in ("zero2", "zero3"):
            recipe = zero3 if self.data == "zero3" and self.pipeline == 1 else zero2
            return recipe(model, mesh["data"])
        if self.replicas > 1:
            return DistributedDataParallel(
                model, process_group=mesh.get_group("data"), gradient_as_bucket_view=True
            )
        return model

    def optimizer(self, model: torch.nn.Module, kind: Any, **settings: Any) -> Any:
        """An optimizer of this class; ZeRO-1 shards its states."""
        if self.data == "zero1" and self.replicas > 1:
            return ZeroRedundancyOptimizer(
                model.parameters(), kind, parameters_as_bucket_view=True, **settings
            )
        return kind(model.parameters(), **settings)


def _only(name: str, given: Any, keys: set[str]) -> None:
    unknown = given.keys() - keys if isinstance(given, Mapping) else {repr(given)}
    if unknown:
        accepted = f"a mapping with {', '.join(sorted(keys))}"
        raise ArgumentError("Parallel", name, f"with {', '.join(sorted(unknown))}", accepted)


def _one_of(name: str, value: Any, known: Any) -> None:
    if not isinstance(value, str) or value not in known:
        raise ArgumentError("Parallel", name, repr(value), f"one of {', '.join(known)}")
