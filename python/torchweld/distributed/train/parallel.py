"""Parallel: how processes share the work, as a declaration.

parallel = dict(pipeline=2, tensor=dict(mode="1d", size=2), data="zero2")
parallel = dict(ring=2, tensor=dict(size=2), data="zero3", optimizer="adamw8bit")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torchweld import optim
from torchweld.distributed.data.zero import RowSharded, unwrapped, zero2, zero3
from torchweld.distributed.pipelines.stashing import RULES
from torchweld.distributed.tensor import grid
from torchweld.distributed.tensor.plan import sequence_plan, tp_plan
from torchweld.errors import ArgumentError

DATA = ("ddp", "zero1", "zero2", "zero3")
SCHEDULES = ("gpipe", "1f1b", "zbv", *RULES)
CHECKPOINTS = ("none", "full", "selective")
OFFLOADS = ("none", "optimizer", "auto")
OPTIMIZERS = {
    "adam": "Adam",
    "adamw": "AdamW",
    "adamw8bit": "AdamW8bit",
    "adafactor": "Adafactor",
    "lamb": "LAMB",
    "lars": "LARS",
    "lion": "Lion",
    "muon": "Muon",
    "one_bit_adam": "OneBitAdam",
    "one_bit_lamb": "OneBitLAMB",
    "sgd": "SGD",
}
MODES = ("1d", *grid.MODES)
# Optimizers that need no sums over a parameter's shards.
GRID_OPTIMIZERS = ("adam", "adamw", "lion", "sgd")
_KEYS = {"pipeline", "tensor", "data", "ring", "checkpoint", "offload", "optimizer"}
_TENSOR_KEYS = {"mode", "size", "depth", "sequence"}
_PIPELINE_KEYS = {"size", "schedule", "accumulate"}
_DATA_KEYS = {"kind", "shard"}
STRATEGIES: dict[str, dict[str, Any]] = {
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
        pipeline: processes of a pipeline.
        tensor: processes that share each matrix.
        replicas: processes of data parallelism.
        data: "ddp", "zero1" shards states, "zero2" also gradients, "zero3" also parameters.
        mode: how matrices are sharded; "1d" is Megatron's way, "2d", "2.5d" and "3d" are grids.
        sequence: whether processes that share matrices also shard the sequence between them.
        ring: processes of ring attention, each with a slice of the sequence.
        schedule: the pipeline's schedule: "gpipe", "1f1b" or "zbv"; or "pipedream", "vertical" or
            "2bw", which update weights while microbatches are in flight.
        checkpoint: activations that blocks recompute: "none", "full" (all but the block's input)
            or "selective" (cheap ones).
        offload: "optimizer" keeps states on the host, "auto" as far as the device lacks room.
        optimizer: the optimizer's name, and its arguments.
        accumulate: microbatches per update of "2bw"; 0: all microbatches of a step.
        depth: the layers of a grid of mode "2.5d".
        sharers: the number of replicas in a group that shares shards under "zero2" and "zero3"; all
            groups hold the same shards (HSDP). 0: one group of all replicas.
    """

    pipeline: int
    tensor: int
    replicas: int
    data: str = "ddp"
    mode: str = "1d"
    sequence: bool = False
    ring: int = 1
    schedule: str = "1f1b"
    checkpoint: str = "none"
    offload: str = "none"
    optimizer: tuple[str, tuple[tuple[str, Any], ...]] = ("adamw", ())
    accumulate: int = 0
    depth: int = 1
    sharers: int = 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path, world: int) -> Parallel:
        """Parse a declaration for `world` processes; a size of 0 means all of them.

        The declaration is a mapping, a strategy's name, or a TOML file with a table `parallel`.
        """
        config = read_config(config)
        _check_keys("config", config, _KEYS)
        tensor, staged = config.get("tensor", {"size": 1}), config.get("pipeline", 1)
        tensor = tensor if isinstance(tensor, Mapping) else {"size": tensor}
        staged = staged if isinstance(staged, Mapping) else {"size": staged}
        optimizer = config.get("optimizer", "adamw")
        optimizer = {"name": optimizer} if isinstance(optimizer, str) else optimizer
        _check_keys("tensor", tensor, _TENSOR_KEYS)
        _check_keys("pipeline", staged, _PIPELINE_KEYS)
        if not isinstance(optimizer, Mapping) or "name" not in optimizer:
            accepted = "a name, or a table with a name and the optimizer's arguments"
            raise ArgumentError("Parallel", "optimizer", repr(optimizer), accepted)
        sequence = tensor.get("sequence", False)
        if not isinstance(sequence, bool):
            raise ArgumentError("Parallel", "sequence", repr(sequence), "True or False")
        declared, mode = config.get("data", "ddp"), tensor.get("mode", "1d")
        declared = declared if isinstance(declared, Mapping) else {"kind": declared}
        _check_keys("data", declared, _DATA_KEYS)
        data: Any = declared.get("kind")
        shard = declared.get("shard", 0)
        schedule = staged.get("schedule", "1f1b")
        checkpoint, offload = config.get("checkpoint", "none"), config.get("offload", "none")
        _check_choice("data", data, DATA)
        _check_choice("mode", mode, MODES)
        _check_choice("schedule", schedule, SCHEDULES)
        _check_choice("checkpoint", checkpoint, CHECKPOINTS)
        _check_choice("offload", offload, OFFLOADS)
        _check_choice("optimizer", optimizer["name"], OPTIMIZERS)
        pipeline, size = staged.get("size", 1), tensor.get("size", 1)
        ring, accumulate = config.get("ring", 1), staged.get("accumulate", 0)
        numbers = {"pipeline": pipeline, "tensor": size, "ring": ring, "accumulate": accumulate}
        numbers |= {"depth": tensor.get("depth", 1), "shard": shard}
        depth = numbers["depth"]
        for name, value in numbers.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ArgumentError("Parallel", name, repr(value), "a number from 0 on")
        pipeline, size, ring = pipeline or world, size or world, ring or world
        if ring > 1 and pipeline > 1:
            accepted = "1 in a pipeline: its later stages do not know the positions of tokens"
            raise ArgumentError("Parallel", "ring", str(ring), accepted)
        inner = pipeline * size * ring
        if world % inner:
            accepted = f"sizes whose product divides {world} processes"
            raise ArgumentError("Parallel", "config", f"{pipeline} x {ring} x {size}", accepted)
        replicas = world // inner
        if data in ("ddp", "zero1") and replicas > 1 and inner > 1:
            accepted = "zero2 or zero3, which FSDP2 composes with tensors, rings and pipelines"
            raise ArgumentError("Parallel", "data", repr(data), accepted)
        if shard and (data in ("ddp", "zero1") or replicas % shard):
            accepted = f"with zero2 and zero3, a divisor of {replicas} replicas"
            raise ArgumentError("Parallel", "shard", f"{shard} with {data}", accepted)
        if (name := optimizer["name"]).startswith("one_bit"):
            if inner > 1 or data != "ddp":
                accepted = f"another: {name} exchanges whole gradients, as ddp does"
                raise ArgumentError("Parallel", "optimizer", repr(name), accepted)
            if offload != "none":
                accepted = f"'none' with {name}, which exchanges gradients in its step"
                raise ArgumentError("Parallel", "offload", repr(offload), accepted)
        if optimizer["name"] == "muon" and data == "zero1":
            accepted = "another with zero1, whose optimizer steps rows: Muon needs whole matrices"
            raise ArgumentError("Parallel", "optimizer", "'muon'", accepted)
        if mode != "1d":
            _check_grid(mode, size, depth, pipeline * ring * replicas, data, sequence, optimizer)
        elif depth != 1:
            raise ArgumentError("Parallel", "depth", str(depth), "1, but for mode 2.5d")
        if schedule == "zbv" and pipeline > 1 and checkpoint == "selective":
            accepted = "'none' or 'full' with zbv, which goes through a block's graph twice"
            raise ArgumentError("Parallel", "checkpoint", "'selective'", accepted)
        if schedule in RULES and pipeline > 1:
            others = {"tensor": size, "replicas": replicas, "data": data, "checkpoint": checkpoint}
            others["offload"] = offload
            kept = {"tensor": 1, "replicas": 1, "data": "ddp", "checkpoint": "none"}
            for name, value in (kept | {"offload": "none"}).items():
                if others[name] != value:
                    accepted = f"{value!r} with {schedule}, whose stages keep versions of weights"
                    raise ArgumentError("Parallel", name, repr(others[name]), accepted)
        settings = tuple(sorted((key, value) for key, value in optimizer.items() if key != "name"))
        _check_arguments(optimizer["name"], dict(settings))
        with_settings = (optimizer["name"], settings)
        return cls(
            *(pipeline, size, replicas, data, mode, sequence, ring),
            *(schedule, checkpoint, offload, with_settings, accumulate, depth, shard),
        )

    @property
    def stashes(self) -> bool:
        """Whether stages keep versions of their weights and step their own optimizers."""
        return self.pipeline > 1 and self.schedule in RULES

    @property
    def stages(self) -> int:
        """The number of a pipeline's stages: two in each process under ZBV."""
        return self.pipeline * (2 if self.schedule == "zbv" and self.pipeline > 1 else 1)

    def assign_stages(self, place: int) -> tuple[int, ...]:
        """Return the numbers of the stages of a process of the pipeline."""
        both = (place, 2 * self.pipeline - 1 - place)
        return both[: self.stages // self.pipeline]

    def mesh(self, device: str) -> DeviceMesh:
        """Make the mesh of processes, with dimensions pipeline, data, ring and tensor."""
        sizes = (self.pipeline, self.replicas, self.ring, self.tensor)
        return init_device_mesh(
            device, sizes, mesh_dim_names=("pipeline", "data", "ring", "tensor")
        )

    def shard(self, model: Any, mesh: DeviceMesh) -> Any:
        """Shard the matrices and the sequence of a model, or the matrices of a pipeline's stage."""
        if self.tensor > 1:
            if self.mode != "1d":
                device = mesh.device_type
                return grid.parallelize_on_grid(model, self.mode, device, self.tensor, self.depth)
            inner = mesh["ring", "tensor"] if self.ring > 1 else mesh["tensor"]
            plan = tp_plan(model, self.sequence, ring=self.ring > 1)
            return parallelize_module(model, inner, plan)
        if self.ring > 1:
            return parallelize_module(model, mesh["ring"], sequence_plan(model))
        return model

    def wrap(self, model: Any, mesh: DeviceMesh) -> Any:
        """Apply data parallelism to a model whose matrices are sharded.

        In a pipeline ZeRO-3 runs as ZeRO-2: otherwise every microbatch would gather parameters.
        """
        if self.data in ("zero2", "zero3"):
            recipe = zero3 if self.data == "zero3" and self.pipeline == 1 else zero2
            among = mesh["data"]
            if 0 < self.sharers < self.replicas:  # HSDP: neighbours share
                sizes = (self.replicas // self.sharers, self.sharers)
                among = among._unflatten(0, sizes, ("replicate", "shard"))
            return recipe(model, among)
        if self.replicas > 1:
            return DistributedDataParallel(
                model, process_group=mesh.get_group("data"), gradient_as_bucket_view=True
            )
        return model

    def make_optimizer(
        self, model: torch.nn.Module, mesh: DeviceMesh, matrices: Collection[str]
    ) -> Any:
        """Make the declared optimizer; ZeRO-1 shards its states by rows."""
        make = self.optimizer_factory()
        if self.data == "zero1" and self.replicas > 1:
            return RowSharded(model.parameters(), make, mesh["data"])
        return make(self.group_parameters(model, matrices))

    def optimizer_factory(self) -> Callable[[Any], Any]:
        """Return a function from parameters to the declared optimizer, without offload."""
        name, settings = self.optimizer
        return partial(getattr(optim, OPTIMIZERS[name]), **dict(settings))

    def find_matrices(self, model: torch.nn.Module) -> Collection[str]:
        """The hidden matrices that Muon steps, by name. A stage does not show what is a head."""
        if self.optimizer[0] != "muon":
            return ()
        groups = optim.muon_groups(model, verbose=False)
        return {name for g in groups if "rule" not in g for name, _ in g["params"]}

    def group_parameters(self, model: torch.nn.Module, matrices: Collection[str]) -> Any:
        """The optimizer's parameters: with Muon, AdamW steps all but `matrices`."""
        if self.optimizer[0] != "muon":
            return model.parameters()
        names = [name for name, _ in model.named_parameters()]
        hidden = [name for name in names if unwrapped(name) in matrices]
        rest = [name for name in names if name not in hidden]
        return optim.muon_groups(model, include=hidden, exclude=rest, verbose=False)


def _check_grid(
    mode: str, size: int, depth: int, others: int, data: str, sequence: bool, optimizer: Any
) -> None:
    """Check that a grid has a shape, and that nothing else divides its work."""
    if depth < 1 or (depth > 1 and mode != "2.5d"):
        raise ArgumentError("Parallel", "depth", str(depth), "1 from on, above it in mode 2.5d")
    grid.find_side(mode, size, depth)
    if others > 1 or data != "ddp" or sequence:
        actual = f"{others} other processes, data {data!r} and sequence {sequence}"
        accepted = "a grid of all processes, with data 'ddp' and without sequence"
        raise ArgumentError("Parallel", f"tensor in {mode}", f"with {actual}", accepted)
    if optimizer["name"] not in GRID_OPTIMIZERS:
        accepted = f"one of {', '.join(GRID_OPTIMIZERS)} in {mode}"
        raise ArgumentError("Parallel", "optimizer", repr(optimizer["name"]), accepted)


def _check_arguments(name: str, arguments: dict[str, Any]) -> None:
    """Check the names of an optimizer's arguments, before any process makes it."""
    try:
        inspect.signature(getattr(optim, OPTIMIZERS[name])).bind((), **arguments)
    except TypeError as error:
        actual = f"{name!r} with {arguments or 'no arguments'}"
        raise ArgumentError("Parallel", "optimizer", actual, f"its arguments: {error}") from None


def read_config(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Return a declaration from a mapping, a strategy's name or a TOML file."""
    if isinstance(config, str) and not config.endswith(".toml"):
        _check_choice("config", config, STRATEGIES)
        return STRATEGIES[config]
    if not isinstance(config, (str, Path)):
        return config
    try:
        import tomllib  # since Python 3.11

        return tomllib.loads(Path(config).read_text())["parallel"]  # type: ignore[no-any-return]
    except ImportError:
        raise ArgumentError("Parallel", "config", "a file", "a mapping below 3.11") from None
    except OSError as error:
        raise ArgumentError("Parallel", "config", str(error), "a file to read") from None
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError("Parallel", "config", f"{config}: {error}", "TOML") from None
    except KeyError:
        raise ArgumentError("Parallel", "config", str(config), "with a table [parallel]") from None


def _check_keys(name: str, value: Any, keys: set[str]) -> None:
    unknown = value.keys() - keys if isinstance(value, Mapping) else {repr(value)}
    if unknown:
        accepted = f"a mapping with {', '.join(sorted(keys))}"
        raise ArgumentError("Parallel", name, f"with {', '.join(sorted(unknown))}", accepted)


def _check_choice(name: str, value: Any, known: Any) -> None:
    if not isinstance(value, str) or value not in known:
        raise ArgumentError("Parallel", name, repr(value), f"one of {', '.join(known)}")
