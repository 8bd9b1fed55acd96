"""Tries an installed wheel outside the checkout: python -I try_wheel.py torchweld-*.whl.

What needs no torch is in check_wheel.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

import torchweld


def check(what: str, holds: bool, found: object) -> None:
    """Print what was found; stop at the first thing that does not hold."""
    print(f"{'ok' if holds else 'FAILED':7} {what}: {found}")
    if not holds:
        sys.exit(1)


def the_package(wheel: Path) -> None:
    """The environment's package is imported, in the version of the wheel's name."""
    package = Path(torchweld.__file__).parent
    check("imported from the environment", package.is_relative_to(sys.prefix), package)
    check("version", wheel.name.split("-")[1] == torchweld.__version__, torchweld.__version__)
    backends = torchweld.backends()
    check("backends()", backends["cpu"] == "available", backends)


def an_op() -> None:
    """Forward and backward by the CPU kernel, compared with torch in float64."""
    torch.manual_seed(0)
    x, weight = torch.randn(512, 1024), torch.randn(1024)
    chosen = torchweld.explain("rms_norm", x, [1024], weight).chosen
    check("rms_norm runs on", chosen == "cpu", chosen)
    ours, exact = (
        [t.to(dtype, copy=True).requires_grad_() for t in (x, weight)]
        for dtype in (torch.float32, torch.float64)
    )
    y = torchweld.functional.rms_norm(ours[0], [1024], ours[1], eps=1e-6)
    expected = torch.nn.functional.rms_norm(exact[0], [1024], exact[1], eps=1e-6)
    (y * x).sum().backward()
    (expected * x.double()).sum().backward()
    pairs = [(y.detach(), expected.detach())]
    pairs += [(a.grad, b.grad) for a, b in zip(ours, exact, strict=True)]
    # Well above float32's rounding, well below the error of a wrong kernel.
    error = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    check("rms_norm, forward and backward, relative error", error < 1e-6, f"{error:.1e}")


def an_optimizer() -> None:
    """A step of AdamW, compared with torch's in float64; one with 8-bit states moves as far."""
    start, grad = torch.randn(256, 256), torch.randn(256, 256)

    def stepped(make, dtype=torch.float32, **settings):
        p = start.to(dtype).clone().requires_grad_()
        p.grad = grad.to(dtype)
        make([p], lr=1e-2, **settings).step()
        return p.detach().double() - start.double()

    expected = stepped(torch.optim.AdamW, torch.float64)
    for settings in ({}, {"state_dtype": "8bit"}):
        step = stepped(torchweld.optim.AdamW, **settings)
        error = float((step - expected).norm() / expected.norm())
        # A step is a hundredth of a parameter, so the parameter's float32 rounding is 6e-6 of it.
        check(f"AdamW{settings or ''}, one step, relative error", error < 1e-4, f"{error:.1e}")


def the_readme() -> None:
    """Its first block runs as it stands."""
    readme = Path(__file__).resolve().parents[1] / "README.md"
    block = re.search(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    check("README has a first block", block is not None, readme)
    exec(block[1], {})
    check("README's first block", True, "ran")


def the_doctor() -> None:
    """The installed command runs."""
    command = [Path(sys.prefix) / "bin" / "torchweld", "doctor"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    check("torchweld doctor", result.returncode == 0, f"exit status {result.returncode}")
    print(result.stdout)


if __name__ == "__main__":
    given = Path(sys.argv[1])
    the_package(given)
    an_op()
    an_optimizer()
    the_readme()
    the_doctor()
