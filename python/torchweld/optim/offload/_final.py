"""The final part of a step, after everything that can be checked."""

from __future__ import annotations

import functools
from typing import Any

from torchweld.optim.offload._buckets import Bucket
from torchweld.optim.offload._worker import Worker


def run_all(
    worker: Worker,
    hosts: list[Bucket],
    rest: list[Bucket],
    devices: list[Bucket],
    on_host: tuple[Any, Any],
    on_device: tuple[Any, Any],
    waits: bool,
) -> None:
    """Step the rest of the host's buckets and those on the device, and return the host's.

    If one fails, the others that have stepped are marked, so that a repeated step leaves them out.
    """
    tasks = {}
    for bucket in rest:
        if bucket.runs_alone():
            tasks[bucket] = bucket.task = worker.submit(functools.partial(bucket.run, *on_host))
    finished: list[Bucket] = []
    try:
        for bucket in devices:
            bucket.run(*on_device)
            finished.append(bucket)
            bucket.end()
        for bucket in rest:
            if bucket not in tasks:
                bucket.run(*on_host)
                finished.append(bucket)
        for bucket in hosts if waits else ():
            return_parameters(bucket)
            finished.append(bucket)
    except BaseException:
        finished += [bucket for bucket, task in tasks.items() if task.exception() is None]
        for bucket in finished:
            bucket.finish()
        raise


def return_parameters(bucket: Bucket) -> None:
    """Wait for the bucket's step, and copy its parameters back."""
    task, bucket.task = bucket.task, None
    if task is not None:
        task.result()
    bucket.give()
