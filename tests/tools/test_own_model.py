"""`torchweld bench --model`: build()'s accepted results, and equal work for all contenders."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torchweld.bench.measure import limits, machine
from torchweld.bench.models import own_model
from torchweld.commands import cli

MODULE = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU()), torch.randn(4, 8)

def nothing():
    return None
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the user's module, in which the command runs without timing anything."""
    (tmp_path / "users_own.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "settle", lambda **_: None)
    monkeypatch.setattr(limits, "copy_gbps", lambda clock, device: 10.0)
    monkeypatch.setattr(own_model, "SECONDS", 0.0)
    return tmp_path


def test_the_users_model_is_measured(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--model", "users_own:build", "--device", "cpu", "--vs", "bitsandbytes"]
    assert cli.main([*command, "--json", str(here / "found.json")]) == 0
    printed = capsys.readouterr().out
    assert "linear_act" in printed  # what fuse() changes
    rows = json.loads((here / "found.json").read_text())["model"]
    assert [row["contender"] for row in rows] == ["eager", "fused", "fused, 8-bit AdamW"]
    assert all(row["total"] > 0 and row["peak_bytes"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("users_own", "not of the form pkg.module:build"),
        ("nowhere_at_all:build", "No module named"),
        ("users_own:other", "no attribute 'other'"),
        ("users_own:nothing", "returned a NoneType"),
    ],
)
def test_what_is_no_builder_is_refused(
    name: str, why: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--model", name, "--device", "cpu"]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("form", ["loss attribute", "scalar", "several tensors"])
@pytest.mark.parametrize("batch", ["tensor", "tuple", "mapping"])
def test_the_loss_is_the_models_own_or_a_mean_of_squares(form: str, batch: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(3.0))

        def forward(self, x: torch.Tensor) -> object:
            y = x * self.weight
            if form == "loss attribute":
                return SimpleNamespace(loss=y.sum())
            return y.sum() if form == "scalar" else (y, {"mask": x > 0, "half": y / 2})

    x = torch.tensor([1.0, 2.0])
    given = {"tensor": x, "tuple": (x,), "mapping": {"x": x}}[batch]
    expected = 9.0 if form != "several tensors" else (9 + 36) / 2 * (1 + 1 / 4)
    assert own_model._loss(Model(), given).item() == pytest.approx(expected)
