"""The folders of checkpoints: each save in it is whole or absent, and found unchanged.

A folder has a subfolder for the data of each save, whose name has the step and a unique id, and
`.metadata`, which says where the data of the last finished save is:

    .metadata
    step-200-<id>/__0_0.distcp, __1_0.distcp, ...

`write` writes a new subfolder and replaces `.metadata` once all processes have written their parts.
So an interrupted save leaves the last checkpoint as it was, and the next save first deletes what it
wrote. `.metadata` has a checksum of each file, and of itself.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from torchweld.distributed.one_for_all import compute_once, fail_together, gather_objects
from torchweld.errors import ArgumentError, CollectiveError

_METADATA = ".metadata"
_NAME = re.compile(r"step-\d+-[0-9a-f]{32}")
_CHUNK = 1 << 22  # bytes that are read together
# The attribute of torch's metadata that has the files' checksums and the optimizers of parameters.
_OURS = "torchweld"
# The last bytes of `.metadata`: the checksum of the bytes before. Unpickling ignores them.
_SEAL = re.compile(rb"\ntorchweld ([0-9a-f]{8})\n\Z")


def check_folder(function: str, folder: str | Path) -> Path:
    """Check that a folder is one of a file system."""
    if "://" in str(folder):
        accepted = "a folder of a file system, where a file can be replaced in one step"
        raise ArgumentError(f"checkpoint.{function}", "folder", repr(folder), accepted)
    return Path(folder)


def write(folder: Path, content: dict[str, Any], step: int, optimizers: dict[str, str]) -> None:
    """Make a save the folder's checkpoint, with the optimizer of each parameter by name."""
    function, (rank, count) = "checkpoint.save", _place()
    name = _choose_name(step)
    compute_once(function, lambda: _delete_unfinished(folder))
    with _in_our_words(function):
        dcp.save(content, checkpoint_id=folder / name)
    with fail_together(function):
        files = sorted(_list_files(folder / name))[rank::count]
        sums = {f"{name}/{file}": _sum_file(folder / name / file) for file in files}
    ours: dict[str, dict[str, Any]] = {"checksums": {}, "optimizers": {}}
    for sums_of_one, optimizers_of_one in gather_objects((sums, optimizers)):
        ours["checksums"] |= sums_of_one
        ours["optimizers"] |= optimizers_of_one
    compute_once(function, lambda: _publish(folder, name, ours))


def read(folder: Path, content: dict[str, Any]) -> None:
    """Read these entries of the folder's checkpoint, in place, or into the mapping."""
    with _in_our_words("checkpoint.load"):
        dcp.load(content, checkpoint_id=folder)


def read_whole(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Read all files, each by one process, and compare their checksums with the save's.

    Returns:
        What is known of each entry, and the optimizer of each parameter, by their names. Saves of
        earlier versions have no checksums and no names of optimizers.
    """
    rank, count = _place()
    with fail_together("checkpoint.load"):
        _check_files(folder, rank, count)
    metadata = _read_metadata(folder)
    return metadata.state_dict_metadata, getattr(metadata, _OURS, {}).get("optimizers", {})


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@contextmanager
def _in_our_words(function: str) -> Iterator[None]:
    """Raise errors of torch's checkpoints as a RuntimeError; theirs is no Exception."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        why = f"rank {rank} raised an error. {type(cause).__name__}: {cause}"
        raise CollectiveError(function, why) from cause


def _choose_name(step: int) -> str:
    """Choose the name of a save, on the first process, and check that all save the same step."""
    names = gather_objects(f"step-{step}-{uuid.uuid4().hex}")
    steps = sorted({int(name.split("-")[1]) for name in names})
    if len(steps) > 1:
        actual = f"{', '.join(map(str, steps))} on different processes"
        raise ArgumentError("checkpoint.save", "step", actual, "the same on all")
    return names[0]


def _delete_unfinished(folder: Path) -> None:
    """Delete the data of interrupted saves, as of a full disk: later saves need its room."""
    if folder.is_dir():
        try:
            files = _list_files(folder)
        except FileNotFoundError:
            files = set()
        except ValueError:  # damaged: nobody knows what is data of the last save
            return
        _delete_saves(folder, {relative.split("/")[0] for relative in files})


def _delete_saves(folder: Path, kept: set[str]) -> None:
    for path in folder.iterdir():
        if _NAME.fullmatch(path.name) and path.name not in kept:
            shutil.rmtree(path)


def _publish(folder: Path, name: str, ours: dict[str, Any]) -> None:
    """Make a finished save the folder's checkpoint in one step, and delete the data of others."""
    metadata = _read_metadata(folder / name)
    for info in metadata.storage_data.values():
        info.relative_path = f"{name}/{info.relative_path}"
    setattr(metadata, _OURS, ours)
    try:
        old = _list_files(folder)
    except (FileNotFoundError, ValueError):  # none, or damaged
        old = set()
    new, data = folder / name / "published", pickle.dumps(metadata)
    with new.open("wb") as file:
        file.write(data + b"\ntorchweld %08x\n" % zlib.crc32(data))
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / _METADATA)
    _sync_folder(folder)  # before anything is deleted
    _delete_saves(folder, {name})
    for relative in old:  # data of torch's own saves, which is in the folder itself
        (folder / relative).unlink(missing_ok=True)


def _read_metadata(folder: Path) -> Any:
    """Read `.metadata`; a ValueError says that it is damaged."""
    data = (folder / _METADATA).read_bytes()
    seal = _SEAL.search(data)
    if seal and int(seal[1], 16) != zlib.crc32(data[: seal.start()]):
        raise ValueError("its bits have changed")
    try:
        metadata = pickle.loads(data)
        is_sealed = seal is not None or not hasattr(metadata, _OURS)
        metadata.storage_data.values()
    except Exception as error:  # bytes of any kind: unpickling raises any error
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if not is_sealed:
        raise ValueError("its last bits have changed")
    return metadata


def _list_files(folder: Path) -> set[str]:
    """The files of a finished save, as paths in the folder."""
    return {info.relative_path for info in _read_metadata(folder).storage_data.values()}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sum_file(path: Path) -> int:
    """Compute the checksum of a file; it finds any change of up to 32 bits in a row."""
    found = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found = zlib.crc32(chunk, found)
    return found


def _check_files(folder: Path, rank: int, count: int) -> None:
    """Check a process's share of files: they are there, not cut short, and unchanged."""

    def refuse(fault: str) -> ArgumentError:
        accepted = "the folder of a finished and complete save"
        return ArgumentError("checkpoint.load", "folder", f"{folder}, {fault}", accepted)

    try:
        metadata = _read_metadata(folder)
    except FileNotFoundError:
        raise refuse(f"which has no {_METADATA}: no save has finished") from None
    except ValueError as error:
        raise refuse(f"whose {_METADATA} cannot be read ({error})") from None
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        end = info.offset + info.length
        ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
    sums = getattr(metadata, _OURS, {}).get("checksums", {})
    for relative in sorted(ends)[rank::count]:
        path = folder / relative
        size = path.stat().st_size if path.exists() else 0
        if size < ends[relative]:
            raise refuse(f"whose {relative} has {size} of {ends[relative]} bytes")
        if relative in sums and sums[relative] != _sum_file(path):
            raise refuse(f"whose {relative} has changed since it was saved")
