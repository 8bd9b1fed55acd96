"""Declarations that are none, that cannot be, or whose sizes a model does not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torchweld
from torchweld.distributed import Parallel, check_fit
from torchweld.errors import ArgumentError
from transformer import Settings, Transformer

S = Settings(vocabulary=64, length=32, width=32, heads=4, layers=4)


def test_what_is_declared() -> None:
    declared: Any = {"pipeline": 2, "tensor": {"mode": "1d", "size": 2}, "data": "zero2"}
    assert Parallel.from_config(declared, 8) == Parallel(2, 2, 2, "zero2")
    declared = {"ring": 2, "tensor": {"size": 2}, "data": "zero3"}
    assert Parallel.from_config(declared, 8) == Parallel(1, 2, 2, "zero3", ring=2)
    assert Parallel.from_config("tp+sp", 4) == Parallel(1, 4, 1, sequence=True)


GRID = {"mode": "2d", "size": 4}
STASHED = {"size": 2, "schedule": "2bw"}


@pytest.mark.parametrize(
    ("config", "world", "message"),
    [
        ({"tensor": {"size": 2, "sequence": "no"}}, 4, "sequence is 'no'"),
        ({"tensor": {"size": 2, "sequence": 1}}, 4, "sequence is 1"),
        ({"tensor": {"mode": ["1d"]}}, 4, "mode is"),
        ({"tensor": {"mode": "4d", "size": 2}}, 4, "mode is '4d'"),
        ({"tensor": True}, 4, "tensor is True"),
        ({"pipeline": True}, 4, "pipeline is True"),
        ({"pipeline": -1}, 4, "pipeline is -1"),
        ({"ring": 1.5}, 4, "ring is 1.5"),
        ({"ring": 2, "pipeline": 2}, 4, "ring is 2"),
        ({"ring": 2}, 4, "data is 'ddp'"),
        ({"tensor": {"size": 2}}, 4, "data is 'ddp'"),
        ({"tensor": {"size": 3}}, 4, "config is 1 x 1 x 3"),
        ({"data": {}}, 4, "data is {}"),
        ({"data": None}, 4, "data is None"),
        ({"data": "zero4"}, 4, "data is 'zero4'"),
        ({"data": {"size": 2}}, 2, "data is with size"),
        ({"data": {"kind": "ddp", "shard": 2}}, 2, "shard is 2 with ddp; accepted: with zero2"),
        ({"data": {"kind": "zero3", "shard": 3}}, 2, "shard is 3 with zero3; .* divisor of 2"),
        (None, 4, "config is with None"),
        (["ddp"], 4, "config is with"),
        ("megatron", 4, "config is 'megatron'"),
        ("no [parallel] table", 4, "config is 'no"),
        ("nowhere.toml", 2, "config is .*nowhere.toml.*; accepted: a file to read"),
        ({"pipelines": 2}, 4, "config is with pipelines"),
        ({"data": {1: 2}}, 4, "data is with 1"),
        ({"pipeline": {"size": 2, "schedule": "1f2b"}}, 2, "schedule is '1f2b'"),
        ({"pipeline": {"stages": 2}}, 2, "pipeline is with stages"),
        ({"checkpoint": "some"}, 2, "checkpoint is 'some'; accepted: one of none, full, selec"),
        (
            {"pipeline": {"size": 2, "schedule": "zbv"}, "checkpoint": "selective"},
            2,
            "checkpoint is 'selective'; accepted: 'none' or 'full' with zbv",
        ),
        ({"offload": True}, 2, "offload is True"),
        ({"optimizer": {"lr": 1e-3}}, 2, "optimizer is .*; accepted: a name, or a table"),
        ({"optimizer": "rprop"}, 2, "optimizer is 'rprop'; accepted: one of adam"),
        ({"optimizer": "muon", "data": "zero1"}, 2, "'muon'; accepted: another with zero1"),
        ({"optimizer": "one_bit_adam", "data": "zero2"}, 2, "adam exchanges whole gradients"),
        ({"optimizer": "one_bit_adam"}, 2, "with no arguments; .*: missing .* 'freeze_step'"),
        (
            {"optimizer": {"name": "one_bit_adam", "freeze_step": 9}, "offload": "auto"},
            2,
            "offload is 'auto'; accepted: 'none' with one_bit_adam",
        ),
        ({"optimizer": {"name": "adamw", "rl": 1}}, 2, "'adamw' with .*: .* argument 'rl'"),
        ({"tensor": {"mode": "2d", "size": 6}}, 6, "tensor is 6 in 2d; .* such as 4 or 9"),
        ({"tensor": {"mode": "3d", "size": 4}}, 4, "tensor is 4 in 3d; .* such as 1 or 8"),
        ({"tensor": {"mode": "2.5d", "size": 6, "depth": 2}}, 6, "2.5d; .* such as 2 or 8"),
        ({"tensor": {**GRID, "depth": 2}}, 4, "depth is 2"),
        ({"tensor": {"size": 4, "depth": 2}}, 4, "depth is 2"),
        ({"tensor": GRID, "data": "zero2"}, 8, "tensor in 2d is with 2 other"),
        ({"tensor": {**GRID, "sequence": True}}, 4, "tensor in 2d is with"),
        ({"tensor": GRID, "optimizer": "lamb"}, 4, "optimizer is 'lamb'"),
        ({"pipeline": STASHED, "tensor": 2}, 4, "tensor is 2; accepted: 1 with 2bw"),
        ({"pipeline": STASHED, "data": "zero2"}, 2, "data is 'zero2'; accepted: 'ddp' with 2bw"),
        ({"pipeline": STASHED, "checkpoint": "full"}, 2, "checkpoint is 'full'; accepted: 'none'"),
        ({"pipeline": STASHED, "offload": "auto"}, 2, "offload is 'auto'; accepted: 'none' with"),
    ],
)
def test_declarations_that_cannot_be_are_named(config: Any, world: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Parallel.from_config(config, world)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match=r"config is .*binary.toml: .*; accepted: TOML"):
        Parallel.from_config(tmp_path / "binary.toml", 2)


# --- Sizes of models and batches ------------------------------------------------------------------


def _model() -> Any:
    with torch.device("meta"):
        return Transformer(S)


@pytest.mark.parametrize(
    ("config", "world", "sizes", "message"),
    [
        ({"tensor": 3}, 3, {}, "4 heads in .*; the nearest are 3 or 6"),
        ({"tensor": 8}, 8, {}, "4 heads in .*; the nearest are 8$"),
        ({"pipeline": 5}, 5, {}, "layers is 4; accepted: at least one for each of 5 stages"),
        ({"pipeline": {"size": 3, "schedule": "zbv"}}, 3, {}, "layers is 4; .* 6 stages"),
        ({"ring": 3}, 3, {"length": 32}, "length is 32; .*; the nearest are 30 or 33"),
        (
            {"ring": 2, "tensor": {"size": 2, "sequence": True}},
            4,
            {"length": 30},
            "length is 30; .* 4 processes that share the sequence; the nearest are 28 or 32",
        ),
        ({}, 4, {"microbatches": 6}, "microbatches is 6; .* 4 replicas; the nearest are 4 or 8"),
        (
            {"pipeline": 2, "data": "zero2"},
            4,
            {"microbatches": 2},
            "microbatches is 2, which is 1 for each of 2 replicas; accepted: at least 2 for each",
        ),
        (
            {"pipeline": {"size": 4, "schedule": "2bw"}},
            4,
            {"microbatches": 3},
            "accumulate is 3 microbatches; .* 4 stages",
        ),
        (
            {"pipeline": {"size": 4, "schedule": "2bw", "accumulate": 4}},
            4,
            {"microbatches": 6},
            "microbatches is 6; .*; the nearest are 4 or 8",
        ),
    ],
)
def test_what_does_not_divide_is_named(config: Any, world: int, sizes: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_fit(_model(), Parallel.from_config(config, world), **sizes)


@pytest.mark.parametrize("schedule", ["gpipe", "zbv"])
def test_some_schedules_take_fewer_microbatches_than_processes(schedule: str) -> None:
    config = {"pipeline": {"size": 2, "schedule": schedule}}
    check_fit(_model(), Parallel.from_config(config, 2), microbatches=1)
    with pytest.raises(ArgumentError, match="at least 2 for each"):
        check_fit(_model(), Parallel.from_config({"pipeline": 2}, 2), microbatches=1)


def test_models_that_do_not_fit_are_named() -> None:
    """Hidden features that do not divide, and parameters that two modules share."""
    model = _model()
    for block in model.blocks.values():
        block.mlp = torchweld.nn.MLP(32, 50)
    with pytest.raises(ArgumentError, match=r"50 features in .*; the nearest are 48 or 52"):
        check_fit(model, Parallel.from_config({"tensor": 4}, 4))
    model = _model()
    model.head.weight = model.token.weight
    with pytest.raises(ArgumentError, match=r"head\.weight is another parameter too"):
        check_fit(model, Parallel.from_config({"pipeline": 2}, 2))
