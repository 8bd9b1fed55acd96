"""`torchweld link`, its formula, and its figures in docs/one-bit.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import torchweld
from processes import on
from torchweld.commands import cli, link
from torchweld.commands.link import choices, verdict
from torchweld.distributed.planner.link_probe import Link, measure_link

PAGE = (Path(__file__).parents[2] / "docs" / "one-bit.md").read_text()
# A row of the page -> its link, parameters and seconds of computation.
EXAMPLES = {
    "8 GPUs, NVLink, 1 G parameters": (Link(8, 300e9, 20e-6, 2e-12), 1e9, 0.5),
    "8 machines, 25 Gbit/s, 1 G parameters": (Link(8, 25e9 / 8, 100e-6, 2e-12), 1e9, 0.5),
    "4 machines, 1 Gbit/s, 350 M parameters": (Link(4, 1e9 / 8, 300e-6, 2e-12), 350e6, 0.4),
    "2 machines, 200 Mbit/s, 30 M parameters": (Link(2, 200e6 / 8, 1e-3, 2e-12), 30e6, 0.3),
}


def test_the_formula() -> None:
    """Two ranks, 25 MB/s, 1 ms, 30 M parameters and 0.3 s, worked out by hand."""
    found = {c.name.partition(":")[0]: c for c in choices(*EXAMPLES[list(EXAMPLES)[-1]])}
    plain = 0.002 + 120e6 / 25e6
    assert found["float32"].sent == 120e6
    assert found["float32"].step == pytest.approx(0.3 + plain - 0.2)
    frozen = 0.3 + 0.003 + 3.75e6 / 25e6 + 30e6 * 2e-12
    assert found["1 bit"].sent == 3.75e6
    assert found["1 bit"].step == pytest.approx(0.2 * (0.3 + plain) + 0.8 * frozen)


def test_none_pays_where_computation_hides_the_exchange() -> None:
    found = choices(Link(8, 300e9, 20e-6), 1e9, 0.5)
    assert found[0].step == 0.5
    assert "None pays" in verdict(found)
    assert "OneBitAdam pays: a run takes 4.05" in verdict(choices(*EXAMPLES[list(EXAMPLES)[2]]))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_has_the_formulas_figures(name: str) -> None:
    found = [c for c in choices(*EXAMPLES[name]) if c.is_adam]
    steps = " | ".join(f"{c.step:.3g}" for c in found)
    assert f"| {name} | {EXAMPLES[name][2]} | {steps} |" in PAGE


@on(2, None)
def test_the_page_has_the_codes_bytes(rank: int) -> None:
    rows = re.findall(r"\| (OneBit\w+) \| (\w+) \| ([\d.]+) \| ([\d.]+) \|", PAGE)
    assert len(rows) == 4
    for name, dtype, *expected in rows:
        p = torch.randn(1024, 1024).requires_grad_()
        made = getattr(torchweld.optim, name)
        optimizer = made([p], freeze_step=1, error_dtype=getattr(torch, dtype))
        for bytes_each in expected:
            p.grad = torch.randn(1024, 1024)
            optimizer.step()
            assert f"{sum(optimizer.bytes_per_parameter().values()):.3f}" == bytes_each


@on(2, None)
def test_a_group_is_measured(rank: int) -> None:
    found = measure_link()
    assert found.ranks == 2
    assert 1e5 < found.bandwidth < 1e12
    assert 0 < found.latency < 1
    assert 0 < found.quantising < 1e-5


def test_the_command_says_how_it_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["link", "--parameters", "1e6", "--step-ms", "10"]) == 2
    assert "torchrun --nproc-per-node 2 -m torchweld link" in capsys.readouterr().out
    link.show(*EXAMPLES[list(EXAMPLES)[-1]], 8)
    shown = capsys.readouterr().out
    assert "2 ranks, 0.2 Gbit/s from each, latency 1 ms" in shown
    assert shown.endswith("float32.\n")
