"""Checkpoints of one strategy resumed in another, bit for bit; and after a killed process."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import stack_cells
from comparing import whole_of
from processes import processes, starts
from stack import STEPS, Cell, adamw
from torchweld.distributed import checkpoint, tp_plan, zero3

TIMEOUT = 20.0  # seconds


def _content(cell: Cell, optimizer: Any) -> dict[str, torch.Tensor]:
    """Whole parameters and states by name."""
    found = {}
    for name, parameter in cell.model.named_parameters():
        found[name] = whole_of(parameter.detach())
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = whole_of(value)
    return found


def _go_on(rank: int, strategy: str, steps: tuple[int, int], folder: str) -> None:
    """Take these steps with a strategy, from a checkpoint if any, and save the next one."""
    cell, count = Cell("GPT", torch.float32), dist.get_world_size()
    mesh = init_device_mesh("cpu", (count,))
    data = 1
    if strategy == "FSDP2":
        zero3(cell.model, mesh)
        data = count
    elif strategy == "TP":
        parallelize_module(cell.model, mesh, tp_plan(cell.model, True))
    optimizer = adamw(cell.model)
    cell.seed(cell.model)
    first, last = steps
    if first:
        assert checkpoint.load(f"{folder}/{first}", cell.model, optimizer) == first
        found, saved = _content(cell, optimizer), torch.load(f"{folder}/{first}.pt")
        assert found.keys() == saved.keys()
        for name, value in found.items():
            assert torch.equal(value, saved[name]), name
    for step in range(first, last):
        cell.accumulate(cell.model, step, rank if data > 1 else 0, data)
        optimizer.step()
        optimizer.zero_grad()
    content = _content(cell, optimizer)
    if rank == 0:
        torch.save(content, f"{folder}/{last}.pt")
    checkpoint.save(f"{folder}/{last}", cell.model, optimizer, last)


def test_four_to_two_to_one(tmp_path: Path) -> None:
    """FSDP2 on four, tensor parallelism on two, one process: the steps of one run."""
    last = STEPS, STEPS
    for count, strategy, steps in ((4, "FSDP2", (0, 1)), (2, "TP", (1, STEPS)), (1, "", last)):
        with processes(count) as some:
            some.run("cpu", _go_on, strategy, steps, str(tmp_path))
    found = torch.load(tmp_path / f"{STEPS}.pt")
    one, exact = torch.load(stack_cells.reference("GPT", "fp32"))
    off = stack_cells.differences({"parameters": found}, one, one["parameters"])
    unit = stack_cells.differences(one, exact, one["parameters"])
    assert off.norm() <= stack_cells.RMS * unit.norm()


# --- A process is killed --------------------------------------------------------------------------


def _until_killed(rank: int, store: str, folder: str, end: Any) -> None:
    """Save after a step; in the second's backward the second process is killed."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timeout)
    cell = Cell("GPT", torch.float32)
    zero3(cell.model, init_device_mesh("cpu", (2,)))
    optimizer = adamw(cell.model)
    cell.seed(cell.model)
    for step in range(2):
        if step == 1 and rank == 1:
            block = cell.model.blocks["1"]
            block.register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        start = time.monotonic()
        try:
            cell.accumulate(cell.model, step, rank, 2)
            optimizer.step()
            optimizer.zero_grad()
        except RuntimeError as error:
            end.send((str(error), time.monotonic() - start))
            os._exit(0)  # without leaving the group
        if step == 0:
            checkpoint.save(folder, cell.model, optimizer, 1)
    end.send(("no error", 0.0))


def test_others_raise_and_the_last_checkpoint_loads(tmp_path: Path) -> None:
    context = starts()
    ends = [context.Pipe() for _ in range(2)]
    store, folder = f"file://{tmp_path / 'store'}", str(tmp_path / "saved")
    started = [
        context.Process(target=_until_killed, args=(rank, store, folder, ends[rank][1]))
        for rank in range(2)
    ]
    for process in started:
        process.start()
    try:
        assert ends[0][0].poll(240)
        error, seconds = ends[0][0].recv()
        assert error != "no error"
        assert seconds < TIMEOUT + 5
        started[1].join(10)
        assert started[1].exitcode == -signal.SIGKILL
    finally:
        for process in started:
            process.kill()
            process.join()
    with processes(1) as one:
        one.run("cpu", _loads, folder, stack_cells.reference("GPT", "fp32"))


def _loads(rank: int, folder: str, reference: str) -> None:
    cell = Cell("GPT", torch.float32)
    optimizer = adamw(cell.model)
    cell.seed(cell.model)
    step = checkpoint.load(folder, cell.model, optimizer)
    assert step == 1
    loss = cell.accumulate(cell.model, step)
    wanted = torch.load(reference)[0]["losses"][step]
    assert loss.item() == pytest.approx(wanted, rel=1e-6)
