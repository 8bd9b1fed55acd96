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
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torchweld import checks, optim
from torchweld.distributed.data.zero import RowSharded, unwrapped, zero2, zero3
from torchweld.distributed.tensor.plan import sequence_plan, tp_plan
from torchweld.errors import ArgumentError

DATA = ("ddp", "zero1", "zero2", "zero3")
# Schedules that update weights while microbatches are in flight.
STASHING = ("pipedream", "vertical", "2bw")
SCHEDULES = ("gpipe", "1f1b", "zbv", *STASHING)
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
MODES = ("1d", "2d", "2.5d", "3d")
# Optimizers that need no sums over a parameter's shards.
GRID_OPTIMIZERS = ("adam", "adamw", "lion", "sgd")
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

    def __post_init__(self) -> None:
        for name in ("pipeline", "tensor", "replicas", "ring", "depth"):
            checks.count("Parallel", name, getattr(self, name), 1)
        for name in ("accumulate", "sharers"):
            checks.count("Parallel", name, getattr(self, name))

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path, world: int) -> Parallel:
        """Parse a declaration for `world` processes; a size of 0 means all of them.

        The declaration is a mapping, a strategy's name, or a TOML file with a table `parallel`.
        """
        return cls(**parse(config, world))

    @property
    def stashes(self) -> bool:
        """Whether stages keep versions of their weights and step their own optimizers."""
        return self.pipeline > 1 and self.schedule in STASHING

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
                # An annex: only its modes load it.
                from torchweld.distributed.tensor.grids import grid

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


# --- Declarations ---------------------------------------------------------------------------------

_DEFAULTS = {
    **{"pipeline": 1, "schedule": "1f1b", "accumulate": 0},
    **{"tensor": 1, "mode": "1d", "depth": 1, "sequence": False},
    **{"data": "ddp", "shard": 0},
    **{"ring": 1, "checkpoint": "none", "offload": "none", "optimizer": "adamw"},
}
# Keys of a declaration that may be tables, and what each key of a table sets. A table's first key
# may stand for the table.
_TABLES: dict[str, dict[str, str]] = {
    "pipeline": {"size": "pipeline", "schedule": "schedule", "accumulate": "accumulate"},
    "tensor": {"size": "tensor", "mode": "mode", "depth": "depth", "sequence": "sequence"},
    "data": {"kind": "data", "shard": "shard"},
    "optimizer": {"name": "optimizer"},
}
_KEYS = {*_TABLES, "ring", "checkpoint", "offload"}
_CHOICES: dict[str, Collection[str]] = {
    "data": DATA,
    "mode": MODES,
    "schedule": SCHEDULES,
    "checkpoint": CHECKPOINTS,
    "offload": OFFLOADS,
    "optimizer": OPTIMIZERS,
}
_NUMBERS = ("pipeline", "tensor", "ring", "accumulate", "depth", "shard")


# Values that a pipeline with weight stashing keeps.
_KEPT = {"tensor": 1, "replicas": 1, "data": "ddp", "checkpoint": "none", "offload": "none"}


def _list_rules(d: Any) -> list[tuple[str, Any, str, str]]:
    """List what is refused: an argument, whether it is, how it is shown, and what is accepted."""
    name, shown, inner, whole = d.optimizer, repr(d.optimizer), d.inner > 1, d.data == "ddp"
    has_stages, is_grid = d.pipeline > 1, d.mode != "1d"
    exchanging = getattr(optim, OPTIMIZERS[name])._exchanges_gradients
    by_ddp, shared = d.data in ("ddp", "zero1"), f"{d.pipeline} x {d.ring} x {d.tensor}"
    others = d.pipeline * d.ring * d.replicas
    around = f"with {others} other processes, data {d.data!r} and sequence {d.sequence}"
    zbv = d.schedule == "zbv" and has_stages and d.checkpoint == "selective"
    stashes = d.schedule in STASHING and has_stages
    in_pipeline = "1 in a pipeline: its later stages do not know the positions of tokens"
    composed = "zero2 or zero3, which FSDP2 composes with tensors, rings and pipelines"
    in_rows = "another with zero1, whose optimizer steps rows: Muon needs whole matrices"
    whole_grid = "a grid of all processes, with data 'ddp' and without sequence"
    twice = "'none' or 'full' with zbv, which goes through a block's graph twice"
    exchanges = f"another: {name} exchanges whole gradients, as ddp does"
    in_step = f"'none' with {name}, which exchanges gradients in its step"
    divisor = f"with zero2 and zero3, a divisor of {d.replicas} replicas"
    on_grid = f"one of {', '.join(GRID_OPTIMIZERS)} in {d.mode}"
    wrong_shard = d.shard and (by_ddp or d.replicas % d.shard)
    wrong_depth = d.depth < 1 or (d.depth > 1 and d.mode != "2.5d")
    return [
        ("ring", d.ring > 1 and has_stages, str(d.ring), in_pipeline),
        ("config", d.world % d.inner, shared, f"sizes whose product divides {d.world} processes"),
        ("data", by_ddp and d.replicas > 1 and inner, repr(d.data), composed),
        ("shard", wrong_shard, f"{d.shard} with {d.data}", divisor),
        ("optimizer", exchanging and (inner or not whole), shown, exchanges),
        ("offload", exchanging and d.offload != "none", repr(d.offload), in_step),
        ("optimizer", name == "muon" and d.data == "zero1", shown, in_rows),
        ("depth", wrong_depth, str(d.depth), "1, and in mode 2.5d any number from 1 on"),
        (
            f"tensor in {d.mode}",
            is_grid and (others > 1 or not whole or d.sequence),
            around,
            whole_grid,
        ),
        ("optimizer", is_grid and name not in GRID_OPTIMIZERS, shown, on_grid),
        ("checkpoint", zbv, repr(d.checkpoint), twice),
        *(
            (
                key,
                stashes and vars(d)[key] != kept,
                repr(vars(d)[key]),
                f"{kept!r} with {d.schedule}, whose stages keep versions of weights",
            )
            for key, kept in _KEPT.items()
        ),
    ]


def parse(config: Mapping[str, Any] | str | Path, world: int) -> dict[str, Any]:
    """Return the fields of a Parallel for a declaration, or raise an error that names its fault."""
    config = read_config(config)
    _check_keys("config", config, _KEYS)
    d, settings = SimpleNamespace(**_DEFAULTS, world=world), {}
    for key, given in config.items():
        sets = _TABLES.get(key, {key: key})
        first = next(iter(sets))
        given = given if isinstance(given, Mapping) and key in _TABLES else {first: given}
        if key == "optimizer":  # its other keys are the optimizer's own arguments
            settings = {name: value for name, value in given.items() if name != first}
            given = {name: given[name] for name in given.keys() - settings}
        _check_keys(key, given, sets.keys())
        if key in ("data", "optimizer") and not given.keys() & {first}:
            accepted = f"a {first}, or a table with a {first}"
            raise ArgumentError("Parallel", key, repr(config[key]), accepted)
        vars(d).update({sets[name]: value for name, value in given.items()})
    if not isinstance(d.sequence, bool):
        raise ArgumentError("Parallel", "sequence", repr(d.sequence), "True or False")
    for name, known in _CHOICES.items():
        _check_choice(name, vars(d)[name], known)
    for name in _NUMBERS:
        value = vars(d)[name]
        if type(value) is not int or value < 0:
            raise ArgumentError("Parallel", name, repr(value), "a number from 0 on")
    d.pipeline, d.tensor, d.ring = (n or world for n in (d.pipeline, d.tensor, d.ring))
    d.inner = d.pipeline * d.tensor * d.ring
    d.replicas = world // d.inner
    for argument, is_refused, actual, accepted in _list_rules(d):
        if is_refused:
            raise ArgumentError("Parallel", argument, actual, accepted)
    if d.mode != "1d":
        # An annex: only its modes load it.
        from torchweld.distributed.tensor.grids import grid

        grid.find_side(d.mode, d.tensor, d.depth)
    _check_arguments(d.optimizer, settings)
    fields = {name: value for name, value in vars(d).items() if name in Parallel.__match_args__}
    optimizer = (d.optimizer, tuple(sorted(settings.items())))
    return fields | {"sharers": d.shard, "optimizer": optimizer}


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
    except ValueError as error:  # no TOML, or no text
        raise ArgumentError("Parallel", "config", f"{config}: {error}", "TOML") from None
    except KeyError:
        raise ArgumentError("Parallel", "config", str(config), "with a table [parallel]") from None


def _check_keys(name: str, value: Any, keys: Collection[str]) -> None:
    unknown = value.keys() - {*keys} if isinstance(value, Mapping) else {repr(value)}
    if unknown:
        accepted = f"a mapping with {', '.join(sorted(keys))}"
        named = ", ".join(sorted(map(str, unknown)))
        raise ArgumentError("Parallel", name, f"with {named}", accepted)


def _check_choice(name: str, value: Any, known: Any) -> None:
    if not isinstance(value, str) or value not in known:
        raise ArgumentError("Parallel", name, repr(value), f"one of {', '.join(known)}")
