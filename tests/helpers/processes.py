"""Processes that gloo connects. Tests share them, since starting them is slow.

Each scenario has process groups of its own: gloo's threads wake a hundred times a second, so the
groups of a hundred earlier tests would take more time than the test.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.debug
import torch.multiprocessing

import torchweld

SECONDS = 300  # timeout of a scenario


def starts() -> Any:
    """multiprocessing, with processes that fork from one that has imported what takes seconds."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torchweld.distributed", "torch._dynamo", "torch.distributed.fsdp"]
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
            context.Process(target=_serve, args=(rank, count, end), daemon=True)
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
                    f"ranks {sorted(at_work.values())} did not finish within {SECONDS} s"
                )
            for end in answered:
                rank = at_work.pop(end)
                if failure := end.recv():
                    raise AssertionError(f"rank {rank}: {failure}")

    def stop(self) -> None:
        """Kill them: a process that waits for a failed one never ends."""
        for process in self._started:
            process.terminate()
            process.join()
        self._directory.cleanup()


def _serve(rank: int, count: int, end: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    gc.freeze()  # what has been imported need not be searched after each scenario
    while True:
        store, backend, scenario, given = end.recv()
        # All processes have ended the last scenario, so that none waits for its groups. DeepSpeed
        # goes on with the groups that it has seen first.
        if dist.is_initialized() and "deepspeed" not in sys.modules:
            _destroy_groups()
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count)
        failure = None
        torch._dynamo.reset()
        try:
            with torchweld.use_backend(backend):
                scenario(rank, *given)
        except BaseException:
            failure = traceback.format_exc()
        end.send(failure)


def _destroy_groups() -> None:
    """Destroy all groups, and DTensor's caches, which name them."""
    dist.destroy_process_group()
    for name in ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        getattr(torch.distributed.tensor.debug, name, lambda: None)()
    gc.collect()


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
