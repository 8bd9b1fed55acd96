"""examples/two_minutes.ipynb runs whole, in the order of its cells."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "two_minutes.ipynb"


def test_the_notebook_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Both models learn, and the fused one as fast; no output is stored."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    names: dict[str, Any] = {}
    for at, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            source = "".join(cell["source"])
            exec(compile(source, f"{NOTEBOOK.name}, cell {at}", "exec"), names)
    eager, ours = names["eager"], names["ours"]
    assert len(eager) == len(ours) == 60
    assert eager[-1] < 0.8 * eager[0]
    assert ours[0] == pytest.approx(eager[0], rel=1e-5)
    assert ours[-1] == pytest.approx(eager[-1], rel=0.05)
    printed = capsys.readouterr().out
    assert "layer_norm" in printed
    assert "rms_norm runs on cpu" in printed
