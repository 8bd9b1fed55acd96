"""Documents say what the code says."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

import torchweld

ROOT = Path(__file__).parents[2]


def test_the_tables_are_current() -> None:
    """python docs/generate.py writes them."""
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert (ROOT / "docs" / "ops.md").read_text() == generate["table"]()
    assert (ROOT / "docs" / "optimizers.md").read_text() == generate["optimizers"]()


def test_the_readmes_python_runs() -> None:
    """Every Python block, in order, in one namespace."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 3
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(block, namespace)


def test_public_functions_are_documented() -> None:
    for name in torchweld.functional.__all__:
        function = getattr(torchweld.functional, name)
        assert "Args:" in function.__doc__
        assert "Returns:" in function.__doc__
        named = {*inspect.signature(function).parameters, "return"}
        assert set(function.__annotations__) == named
