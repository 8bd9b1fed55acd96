"""Saves are whole or absent at every moment; examples/train.py resumes another strategy's run."""

from __future__ import annotations

import copy
import errno
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.tensor import DTensor

import declared
import train
from comparing import has_neighbours, shares_rows
from processes import on, processes, starts
from refusing import refuses
from selection import WHOLE
from torchweld import optim
from torchweld.distributed import RowSharded, checkpoint, saves
from torchweld.errors import CollectiveError
from transformer import Settings

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
S = Settings(vocabulary=16, length=8, width=16, heads=2, layers=2)
STRATEGIES: dict[str, Any] = {
    **{name: name for name in ("ddp", "zero1", "zero2", "zero3", "tp", "pp")},
    "2bw": {"pipeline": {"size": 2, "schedule": "2bw"}},
}


def _take_steps(strategy: str, steps: int) -> Any:
    training = declared.start(S, STRATEGIES[strategy], 1, 2)
    for step in range(steps):
        _step(training, step)
    return training


def _step(training: Any, number: int) -> None:
    declared.take_step(training, S, number, 1)


def _content(training: Any) -> list[torch.Tensor]:
    """This process's parts of parameters and states."""
    optimizer = training.optimizer
    optimizer = optimizer.optimizer if isinstance(optimizer, RowSharded) else optimizer
    states = [state for _, state in sorted(optimizer.state_dict()["state"].items())]
    found = [
        *training.model.parameters(),
        *(state[key] for state in states for key in sorted(state)),
    ]
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in found]


# --- Moments --------------------------------------------------------------------------------------

# Called before each change of a file, with its path.
_at_change: list[Callable[[str], None]] = []
_CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


@contextmanager
def _watching(folder: str, act: Callable[[], None]) -> Iterator[None]:
    """Act before each change in a folder, and when a file has been written."""

    def see(event: str, args: Any) -> None:
        if event in _CHANGES and _at_change and (event != "open" or _writes(args[2])):
            _at_change[0](str(args[0]))

    def note_change(path: str) -> None:
        if path.startswith(folder):
            _at_change.clear()
            act()
            _at_change.append(note_change)

    if not hasattr(sys, "_watches_changes"):
        sys.addaudithook(see)  # for as long as the process lives
        sys._watches_changes = True  # type: ignore[attr-defined]
    sync = os.fsync
    os.fsync = lambda fd: (note_change(folder), sync(fd))[1]
    _at_change.append(note_change)
    try:
        yield
    finally:
        _at_change.clear()
        os.fsync = sync


def _writes(flags: Any) -> bool:
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


@pytest.mark.parametrize("strategy", STRATEGIES if WHOLE else ("zero1", "pp"))
@on(2)
def test_each_moment_of_a_save_loads(rank: int, strategy: str, tmp_path: Path) -> None:
    """Copy the folder at each moment of a second save; each copy loads as one of both saves."""
    path, training = str(tmp_path), _take_steps(strategy, 1)
    training.save(f"{path}/saved", 1)
    contents = {1: _content(training)}
    _step(training, 1)
    contents[2] = _content(training)
    moments: list[str] = []

    def keep() -> None:
        moments.append(f"{path}/{rank}-{len(moments)}")
        shutil.copytree(f"{path}/saved", moments[-1])

    with _watching(f"{path}/saved", keep):
        training.save(f"{path}/saved", 2)
    everyones: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, moments)
    every = [moment for some in everyones for moment in some]
    found = []
    for moment in (*every[:: 1 if WHOLE else len(every) // 6], f"{path}/saved"):
        found.append(training.load(moment))
        assert all(map(torch.equal, _content(training), contents[found[-1]])), moment
    assert len(found) >= 7
    assert (found[0], found[-1]) == (1, 2)
    kept = [name for name in os.listdir(f"{path}/saved") if name != ".metadata"]
    assert len(kept) == 1  # the data of the first save is deleted


# --- Processes that are killed --------------------------------------------------------------------


def _until_killed(rank: int, strategy: str, path: str, victim: int, moment: int) -> None:
    """Save twice; in the second save a process is killed before a change of a file."""
    torch.set_num_threads(1)
    store, timeout = f"file://{path}/store", timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timeout)
    training = _take_steps(strategy, 1)
    training.save(f"{path}/saved", 1)
    torch.save(_content(training), f"{path}/1-{rank}")
    _step(training, 1)
    torch.save(_content(training), f"{path}/2-{rank}")
    dist.barrier()
    left = [moment]

    def count_down() -> None:
        if rank == victim and left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    with _watching(f"{path}/saved", count_down):
        training.save(f"{path}/saved", 2)


def _load_whole(rank: int, strategy: str, path: str) -> None:
    training = _take_steps(strategy, 0)
    step = training.load(f"{path}/saved")
    assert all(map(torch.equal, _content(training), torch.load(f"{path}/{step}-{rank}")))
    training.save(f"{path}/saved", 3)  # what the interrupted save left is no obstacle
    assert training.load(f"{path}/saved") == 3
    dist.barrier()
    assert len(os.listdir(f"{path}/saved")) == 2


# The second process only writes its part; the first one then publishes the save.
KILLS = [(1, 0), (1, 1), (1, 2), (0, 0), (0, 1), (0, 2), (0, 4), (0, 5), (0, 6), (0, 7)]


@pytest.mark.parametrize("strategy", STRATEGIES if WHOLE else ("zero3",))
def test_a_killed_save(strategy: str, tmp_path: Path) -> None:
    for victim, moment in KILLS if WHOLE else KILLS[1:8:6]:
        path = str(tmp_path / f"{victim}-{moment}")
        os.mkdir(path)
        started = [
            starts().Process(target=_until_killed, args=(rank, strategy, path, victim, moment))
            for rank in range(2)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(120)
        assert started[victim].exitcode == -signal.SIGKILL
        with processes(2) as two:
            two.run("cpu", _load_whole, strategy, path)


@on(2)
def test_a_full_disk_is_full_no_more(rank: int, tmp_path: Path) -> None:
    """What a failed save wrote is deleted before the next one writes, which needs its room."""
    path, training = str(tmp_path), _take_steps("zero3", 1)
    training.save(path, 1)
    write = dcp.FileSystemWriter.write_data

    def fail(self: Any, plan: Any, planner: Any) -> Any:
        write(self, plan, planner)
        raise OSError(errno.ENOSPC, "no space left on device")

    def look(self: Any, plan: Any, planner: Any) -> Any:
        assert len(list(Path(path).glob("step-*"))) == 2, "the last save, and this one"
        return write(self, plan, planner)

    for step, how, error in ((2, fail, True), (3, look, False)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dcp.FileSystemWriter, "write_data", how)
            with pytest.raises(CollectiveError, match="no space") if error else nullcontext():
                training.save(path, step)
        assert training.load(path) == (1 if error else 3)


# --- Folders that are refused ---------------------------------------------------------------------


@on(2)
def test_folders_that_are_refused(rank: int, tmp_path: Path) -> None:
    """All processes say what is wrong, and the model stays as it was."""
    path, training = str(tmp_path), _take_steps("zero3", 1)
    first = _content(training)
    for name in ("old", "new"):
        _step(training, 1)
        training.save(f"{path}/{name}", 5)
    now = _content(training)
    if rank == 0:
        shutil.copytree(f"{path}/new", f"{path}/missing")
        (old,), (new,) = (Path(path, name).glob("step-*") for name in ("old", "missing"))
        shutil.copytree(f"{path}/new", f"{path}/mixed")
        shutil.copy(old / "__1_0.distcp", f"{path}/mixed/{new.name}/__1_0.distcp")
        shutil.copytree(f"{path}/new", f"{path}/cut")
        os.truncate(f"{path}/cut/{new.name}/__1_0.distcp", 100)
        (new / "__1_0.distcp").unlink()
        shutil.copytree(f"{path}/new", f"{path}/unfinished")
        os.unlink(f"{path}/unfinished/.metadata")
        shutil.copytree(f"{path}/new", f"{path}/torn")
        os.truncate(f"{path}/torn/.metadata", 100)
    dist.barrier()
    refused = {
        "missing": r"whose step-5-.*/__1_0.distcp has 0 of \d+ bytes; accepted: the folder of a fi",
        "cut": r"whose step-5-.*/__1_0.distcp has 100 of \d+ bytes",
        "mixed": r"whose step-5-.*/__1_0.distcp has changed since it was saved",
        "unfinished": r"which has no .metadata: no save has finished",
        "torn": r"whose .metadata cannot be read",
        "nowhere": r"which has no .metadata",
    }
    for name, message in refused.items():
        refuses(message, training.load, f"{path}/{name}")
    assert all(map(torch.equal, _content(training), now))
    refuses("step is 6, 7 on different processes", training.save, f"{path}/new", 6 + rank)
    refuses("folder is 's3://bucket'", training.save, "s3://bucket", 6)
    assert training.load(f"{path}/new") == 5
    assert not all(map(torch.equal, first, now))


@on(2)
def test_a_save_of_torchs_own(rank: int, tmp_path: Path) -> None:
    """A folder that torch's own save wrote loads, and is replaced; other files stay."""
    path, training = str(tmp_path / "torch"), _take_steps("zero3", 1)
    before = _content(training)
    parameters, states = get_state_dict(
        *(training.model, training.optimizer),
        options=StateDictOptions(flatten_optimizer_state_dict=True),
    )
    dcp.save({"model": parameters, "optimizer": states, "step": 1}, checkpoint_id=path)
    Path(path, f"notes-{rank}").touch()
    _step(training, 1)
    assert training.load(path) == 1
    assert all(map(torch.equal, _content(training), before))
    training.save(path, 2)
    dist.barrier()
    assert training.load(path) == 2
    names = sorted(name[:6] for name in os.listdir(path))
    assert names == [".metad", "notes-", "notes-", "step-2"]


# --- Damage ---------------------------------------------------------------------------------------


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << (at % 8)
    path.write_bytes(data)


@on(2)
def test_a_flipped_bit_is_found(rank: int, tmp_path: Path) -> None:
    """In any file, before anything is replaced: it loaded in silence, or failed half-way."""
    path, training = tmp_path / "saved", _take_steps("zero3", 1)
    training.save(path, 1)
    _step(training, 1)
    now = _content(training)
    files = [".metadata", *(str(file.relative_to(path)) for file in sorted(path.glob("*/__*")))]
    assert len(files) == 3
    generator = random.Random(0)
    for number, name in enumerate(name for name in files for _ in range(6)):
        damaged = tmp_path / f"{number}"
        if rank == 0:
            shutil.copytree(path, damaged)
            size = (damaged / name).stat().st_size
            _flip(damaged / name, (0, size - 1, generator.randrange(size))[min(number % 6, 2)])
        dist.barrier()
        refuses(rf"whose {name} (cannot be read|has changed)", training.load, damaged)
    assert all(map(torch.equal, _content(training), now))


@pytest.mark.parametrize("damage", [b"", b"\x80\x04.", b"text\n", b"\x00" * 99])
@on(2)
def test_a_damaged_folder_can_be_saved_into(rank: int, damage: bytes, tmp_path: Path) -> None:
    """Each later save raised the bare error of unpickling."""
    training = _take_steps("zero3", 1)
    training.save(tmp_path, 1)
    dist.barrier()
    if rank == 0:
        (tmp_path / ".metadata").write_bytes(damage)
    dist.barrier()
    refuses("whose .metadata cannot be read", training.load, tmp_path)
    training.save(tmp_path, 2)
    assert training.load(tmp_path) == 2
    dist.barrier()
    assert len(os.listdir(tmp_path)) == 2


# What saves, what loads, and how the error names both.
OTHERS: list[Any] = [
    (("AdamW", {}), ("Lion", {}), ("Lion", "AdamW")),
    (("AdamW", {}), ("Adam", {}), ("Adam", "AdamW")),
    (("Lion", {}), ("AdamW", {}), ("AdamW", "Lion")),
    (("AdamW", {}), ("AdamW8bit", {"min_8bit_size": 0}), ("AdamW with state_dtype='8bit'", "Ad")),
    (
        *(("AdamW", {"master_weights": "remainder"}), ("AdamW", {})),
        ("AdamW", "AdamW with master_weights='remainder'"),
    ),
    (
        *(("AdamW", {"master_weights": "remainder"}), ("AdamW", {"master_weights": True})),
        ("AdamW with master_weights=True", "AdamW with master_weights='remainder'"),
    ),
    (("AdamW", {}), ("AdamW", {"ema_decay": 0.9}), ("AdamW with ema_decay", "AdamW")),
    (("SGD", {"momentum": 0.9}), ("LARS", {}), ("LARS", "SGD")),
    (("OneBitAdam", {"freeze_step": 1}), ("AdamW", {}), ("AdamW", "OneBitAdam")),
    (("AdamW", {}), ("OneBitLAMB", {"freeze_step": 1}), ("OneBitLAMB", "AdamW")),
]


def _of(name: str, settings: dict[str, Any], steps: int) -> tuple[torch.nn.Module, Any]:
    model = torch.nn.Linear(16, 8).bfloat16()
    optimizer = getattr(optim, name)(model.parameters(), **settings)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(("saved", "loads", "named"), OTHERS, ids=str)
def test_another_optimizer_is_refused(saved: Any, loads: Any, named: Any, tmp_path: Path) -> None:
    """Before anything is replaced. AdamW's loaded into Lion, and lost its second moments."""
    checkpoint.save(tmp_path, *_of(*saved, steps=2), 2)
    for steps in (0, 2):
        model, optimizer = _of(*loads, steps=steps)
        before = [p.detach().clone() for p in model.parameters()]
        states = copy.deepcopy(optimizer.state_dict()["state"])
        says = f"optimizer is {named[0]} for weight; accepted: {named[1]}"
        refuses(re.escape(says), checkpoint.load, tmp_path, model, optimizer)
        assert all(map(torch.equal, model.parameters(), before))
        torch.testing.assert_close(optimizer.state_dict()["state"], states)


@pytest.mark.parametrize("named", [True, False], ids=["named", "before names"])
def test_an_earlier_checkpoint(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no checksums and no names. It loads, and its entries tell another optimizer."""
    publish = saves._publish
    if not named:
        monkeypatch.setattr(saves, "_publish", lambda folder, name, _: publish(folder, name, {}))
    model, optimizer = _of("AdamW", {}, 2)
    checkpoint.save(tmp_path, model, optimizer, 2)
    other, loaded = _of("AdamW", {}, 0)
    assert checkpoint.load(tmp_path, other, loaded) == 2
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    refuses("Lion.*AdamW|Lion.*exp_avg_sq", checkpoint.load, tmp_path, *_of("Lion", {}, 1))
    wide = torch.nn.Linear(17, 8).bfloat16()
    says = r"with weight of shape \[8, 17\]; accepted: .*one of shape \[8, 16\]"
    refuses(says, checkpoint.load, tmp_path, wide, optim.AdamW(wide.parameters()))


@pytest.mark.parametrize("kind", [optim.OneBitAdam, optim.OneBitLAMB])
def test_states_of_one_bit_have_their_shapes(kind: Any) -> None:
    """Others loaded, and the next step read past their ends or failed on some ranks."""
    model = torch.nn.Linear(16, 8)
    optimizer = kind(model.parameters(), freeze_step=1)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    for get in (optimizer.state_dict, optimizer.whole_state_dict):
        entries = [(k, e) for k, state in get()["state"].items() for e in state if e != "step"]
        assert {e for _, e in entries} >= {"exp_avg_bits", "exp_avg_scale", "worker_error"}
        for key, entry in entries:
            wrong = copy.deepcopy(get())
            of_param = wrong["state"][key]
            of_param[entry] = of_param[entry].flatten().repeat(1, 3)
            refuses(entry, optimizer.load_state_dict, wrong)


# --- examples/train.py ----------------------------------------------------------------------------


SMALL = ["--width", "32", "--length", "32", "--layers", "2", "--steps", "2", "--max-norm", "0.3"]


def _train(rank: int, arguments: list[str], path: Path) -> None:
    record = train.train(train.options([*SMALL, *arguments]), torch.device("cpu"))
    if rank == 0:
        torch.save(record, path)


def _run(count: int, folder: Path, *arguments: str) -> dict:
    with processes(count) as some:
        some.run(None, _train, list(arguments), folder / "record.pt")
    return torch.load(folder / "record.pt")


@cache
def _alone(folder: Path, *arguments: str) -> dict:
    return _run(1, folder, *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


# The example's own options; test_stack.py tries all strategies.
CASES = [
    (2, ["--strategy", "zero3", "--recompute", "selective", "--sparse"]),
    (4, ["--strategy", "fsdp+tp", "--optimizer", "lamb", "--sparse"]),
]


@pytest.mark.parametrize(("count", "arguments"), CASES, ids=str)
def test_strategies_learn_the_same(folder: Path, count: int, arguments: list[str]) -> None:
    kept = [a for a in ("--sparse",) if a in arguments]
    if "--optimizer" in arguments:
        kept += ["--optimizer", arguments[arguments.index("--optimizer") + 1]]
    found, wanted = _run(count, folder, *arguments), _alone(folder, *kept)
    # Losses are rounded to 2**-24 of their size; two steps leave them within a few of those.
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-6)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5)


def test_goes_on_from_another_strategy(folder: Path) -> None:
    """Two parts with different strategies and numbers of processes make one run."""
    wanted = _alone(folder, "--steps", "3")["losses"]
    for first, then in (
        ((2, "zero1"), (2, "pp")),
        ((2, "pp"), (4, "fsdp+tp")),
        ((4, "zero3"), (1, "ddp")),
    ):
        saved = str(folder / f"{first[1]}-{then[1]}")
        begun = _run(first[0], folder, "--strategy", first[1], "--steps", "2", "--save", saved)
        ended = _run(then[0], folder, "--strategy", then[1], "--steps", "1", "--resume", saved)
        assert begun["losses"] == pytest.approx(wanted[:2], rel=1e-6)
        assert ended["losses"] == pytest.approx(wanted[2:], rel=1e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_one_bit_goes_on(count: int, folder: Path) -> None:
    """After its warm-up, on as many processes or fewer: --resume said that sizes were others."""
    given, saved = ["--optimizer", "one_bit_adam", "--steps"], str(folder / f"bits-{count}")
    begun = _run(2, folder, *given, "8", "--save", saved)
    ended = _run(count, folder, *given, "2", "--resume", saved)
    wanted = _run(2, folder, *given, "10")["losses"]  # with as long a warm-up, of two steps
    assert begun["losses"] == wanted[:8]
    assert ended["losses"] == pytest.approx(wanted[8:], rel=1e-2)


def test_one_bit(folder: Path) -> None:
    """Its warm-up averages in float32, and so its first two losses are Adam's of one process."""
    found = _run(2, folder, "--optimizer", "one_bit_adam", "--steps", "8")
    wanted = _alone(folder, "--optimizer", "one_bit_adam", "--steps", "8")
    assert found["losses"][:2] == pytest.approx(wanted["losses"][:2], rel=1e-6)
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-2)


# Processes, the declaration, and options. test_stack.py and test_grid.py have others.
DECLARED: list[Any] = [
    (2, 'offload = "optimizer"\ndata = "zero2"', []),
    (4, "pipeline = 2\ntensor = {size = 2, sequence = true}", []),
    (4, 'data = {kind = "zero3", shard = 2}', []),
    pytest.param(
        *(2, 'pipeline = {size = 2, schedule = "zbv"}', ["--layers", "4"]), marks=has_neighbours
    ),
    pytest.param(4, "ring = 2\ntensor = {size = 2, sequence = true}", [], marks=shares_rows),
    pytest.param(4, 'ring = 2\ndata = "zero3"', [], marks=shares_rows),
]


@pytest.mark.parametrize(("count", "declared", "more"), DECLARED)
def test_a_declaration_in_a_file(
    folder: Path, count: int, declared: str, more: list[str], tmp_path: Path
) -> None:
    """Two steps, and a third one after a checkpoint is loaded into another run."""
    config, wanted = tmp_path / "parallel.toml", _alone(folder, *more, "--steps", "3")
    config.write_text(f"[parallel]\n{declared}\n")
    given, saved = ["--config", str(config), *more], str(tmp_path / "saved")
    begun = _run(count, folder, *given, "--save", saved)
    ended = _run(count, folder, *given, "--steps", "1", "--resume", saved)
    for name, near in (("losses", 1e-6), ("norms", 1e-5)):
        assert begun[name] + ended[name] == pytest.approx(wanted[name], rel=near), name


REFUSED = {
    "--width": ["--width", "30"],
    "--resume": ["--resume", "nowhere"],
    "--json": ["--json", "a-file/record.json"],
    "--save": ["--save", "a-file/folder"],
}


@pytest.mark.parametrize("option", REFUSED)
def test_what_cannot_be_trained_is_refused_before(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").write_text("[serial]")
    with pytest.raises(SystemExit) as ended:
        train.check(train.options(REFUSED[option]))
    assert str(ended.value).startswith(option)


@pytest.mark.parametrize("option", ["--rows", "--steps", "--width", "--microbatches", "--lr"])
def test_numbers_are_checked(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.options([option, "0"])
    assert option in capsys.readouterr().err


def test_a_checkpoint_of_another_optimizer_is_refused(folder: Path) -> None:
    saved = str(folder / "of-adamw")
    _run(1, folder, "--save", saved)
    message = r"--resume: .* optimizer is OneBitAdam for .*; accepted: AdamW, which wrote "
    with pytest.raises(Exception, match=message):
        _run(1, folder, "--resume", saved, "--optimizer", "one_bit_adam")
