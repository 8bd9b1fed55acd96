"""Processes that gloo connects. Tests share them, since starting them is slow.

They keep their meshes' groups: DTensor's caches are keyed by group, so a scenario reuses earlier
scenarios' plans. All groups share one gloo thread, since it wakes a hundred times a second: a
thread per group would take a quarter of a core.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import inspect
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import DTensorRedistributePlanner

import lean  # noqa: F401
import torchweld

SECONDS = 180  # timeout of a scenario


def starts() -> Any:
    """multiprocessing, with processes that fork from one that has imported what takes seconds."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            *("torchweld.distributed", "torch._inductor.compile_fx", "torch.distributed.fsdp"),
            *("pytest", "hypothesis"),
        ]
    )
    return context


class Processes:
    """A number of processes that all run the same scenarios."""

    def __init__(self, count: int) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._scenarios = 0
        context = starts()
        self._ends, theirs = zip(*[context.Pipe() for _ in range(count)], strict=True)
        self._started = [
            context.Process(target=_serve, args=(rank, count, end, self._stack(rank)), daemon=True)
            for rank, end in enumerate(theirs)
        ]
        for process, end in zip(self._started, theirs, strict=True):
            process.start()
            end.close()  # so that recv fails if the process dies

    def run(self, backend: str | None, scenario: Callable[..., None], *given: Any) -> None:
        """Run scenario(rank, *given) in every process, on this backend, and re-raise its error."""
        store = f"file://{Path(self._directory.name) / str(self._scenarios)}"
        self._scenarios += 1
        for end in self._ends:
            end.send((store, backend, scenario, given))
        at_work: dict[Any, int] = {end: rank for rank, end in enumerate(self._ends)}
        while at_work:
            answered: list[Any] = wait(list(at_work), SECONDS)
            if not answered:
                raise TimeoutError(
                    f"no end within {SECONDS} s:{self._find_stacks(at_work.values())}"
                )
            for end in answered:
                rank = at_work.pop(end)
                try:
                    failure = end.recv()
                except EOFError:
                    failure = "its process has ended"
                if failure:
                    raise AssertionError(f"rank {rank}: {failure}")

    def _stack(self, rank: int) -> Path:
        """The file where a process writes its threads' stacks."""
        return Path(self._directory.name) / f"stack-{rank}"

    def _find_stacks(self, ranks: Iterable[int]) -> str:
        for rank in ranks:
            os.kill(self._started[rank].pid, signal.SIGUSR1)
        time.sleep(1)
        return "".join(f"\nrank {rank}: {self._stack(rank).read_text()}" for rank in sorted(ranks))

    def stop(self) -> None:
        """Kill them: a process that waits for a failed one never ends."""
        for process in self._started:
            process.terminate()
            process.join()
        self._directory.cleanup()


def _serve(rank: int, count: int, end: Connection, stack: Path) -> None:
    faulthandler.register(signal.SIGUSR1, stack.open("w"))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.distributed_c10d.ProcessGroupGloo = _OnOneDevice  # type: ignore[misc]
    _keep_groups_of_meshes()
    _keep_next_states()
    _keep_shard_orders()
    gc.freeze()  # what has been imported need not be searched again
    while True:
        store, backend, scenario, given = end.recv()
        # All processes have ended the last scenario, so that none waits for its groups. DeepSpeed
        # goes on with the groups that it has seen first.
        if dist.is_initialized() and "deepspeed" not in sys.modules:
            _destroy_other_groups()
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
        failure = None
        torch._dynamo.reset()
        try:
            with torchweld.use_backend(backend):
                getattr(scenario, "scenario", scenario)(rank, *given)
        except BaseException:
            failure = traceback.format_exc()
        end.send(failure)


class _OnOneDevice(dist.ProcessGroupGloo):
    """A group on the device of all others, which has the thread."""

    _devices: ClassVar[list[Any]] = []

    def __init__(self, store: Any, rank: int, size: int, timeout: Any, **_: Any) -> None:
        gloo: Any = dist.ProcessGroupGloo
        if not self._devices:
            self._devices.append(gloo.create_default_device())
        options = gloo._Options()
        options._devices, options._timeout = self._devices, timeout
        super().__init__(store, rank, size, options)


# The groups' names of every mesh that a scenario has made.
_of_meshes: dict[Any, list[Any]] = {}


def _keep_groups_of_meshes() -> None:
    """Give equal meshes the same groups. To DTensor's caches they are one mesh anyway."""
    mesh: Any = DeviceMesh
    make = mesh._init_process_groups

    def find(layout: Any, ranks: torch.Tensor, *rest: Any) -> list[Any]:
        key = layout, tuple(ranks.flatten().tolist()), *rest
        if key not in _of_meshes:
            _of_meshes[key] = make(layout, ranks, *rest)
        return _of_meshes[key].copy()

    mesh._init_process_groups = staticmethod(find)


def _keep_next_states() -> None:
    """Let DTensor find the placements next to one only once, for each mesh and shape.

    On a mesh of two dimensions this search for ways of a redistribution, whose costs decide on an
    op's placements, takes nearly all of an op's first call.
    """
    planner: Any = DTensorRedistributePlanner
    find = planner.get_next_state

    def get_next_state(self: Any, *state: Any) -> Any:
        # What the search depends on besides the mesh and the shape, which are the planner's own.
        seen = [v for v in vars(self).values() if isinstance(v, set)]
        key = (*state, *map(frozenset, seen))
        known = vars(self).setdefault("_next_states", {})
        if key not in known:
            known[key] = find(self, *state)
        return known[key]

    planner.get_next_state = get_next_state


def _keep_shard_orders() -> None:
    """Let DTensor derive and check the order of shards only once for the same placements.

    It does so for each argument of each way to place an op: 34,000 times in a test on 2 x 2 x 2.
    """
    spec: Any = DTensorSpec
    make = spec.__init__
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def init(self: Any, mesh: Any, placements: Any, tensor_meta: Any = None, **order: Any) -> None:
        if type(placements) is not tuple or any(value is not None for value in order.values()):
            make(self, mesh, placements, tensor_meta, **order)
            return
        if placements not in known:
            make(self, mesh, placements)
            known[placements] = vars(self).copy()
        vars(self).update(known[placements], mesh=mesh, tensor_meta=tensor_meta)

    spec.__init__ = init


def _destroy_other_groups() -> None:
    """Destroy the groups that are no mesh's."""
    kept = {dist.group.WORLD.group_name, *[name for names in _of_meshes.values() for name in names]}
    for group in list(dist.distributed_c10d._world.pg_map):
        if group.group_name not in kept:
            dist.destroy_process_group(group)
    gc.collect()
    gc.freeze()  # nor what is left: caches, and what was imported since


_kept: dict[tuple[int, str], Processes] = {}


@contextmanager
def processes(count: int, package: str = "") -> Iterator[Processes]:
    """The processes of the last test, or new ones after a failure.

    A package that changes torch for all of a process, as DeepSpeed does, has its own.
    """
    key = count, package
    if key not in _kept:
        _kept[key] = Processes(count)
    try:
        yield _kept[key]
    except BaseException:
        _kept.pop(key).stop()
        raise


def on(count: int | str, backend: str | None = "cpu") -> Callable[[Any], Any]:
    """Make a test of a scenario, which processes run, each with its rank and the fixtures.

    The count may be the name of a parameter. A parameter `backend` names the backend.
    """

    def make_test(scenario: Callable[..., None]) -> Any:
        _, *rest = inspect.signature(scenario).parameters.values()

        @functools.wraps(scenario)
        def test(**given: Any) -> None:
            with processes(given[count] if isinstance(count, str) else count) as some:
                some.run(given.get("backend", backend), test, *(given[p.name] for p in rest))

        made: Any = test
        made.scenario, made.__signature__ = scenario, inspect.Signature(rest)
        return made

    return make_test
