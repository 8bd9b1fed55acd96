"""Preparation for capturing a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# As many as torch.cuda.make_graphed_callables makes before a capture.
CALLS = 3


def warmup(fn: Callable[[], Any]) -> None:
    """Call `fn` a few times, so that capturing or timing it finds everything ready.

    A kernel is compiled, checked and timed at its first use on a GPU. A capture forbids that, and
    leaves out kernels that were never tried. On a GPU the calls run on a side stream, as capturing
    requires, and have ended when this returns. Calls have their usual effects: an optimizer step
    inside `fn` is taken.

        torchweld.warmup(lambda: model(x).sum().backward())
        with torch.cuda.graph(graph):
            model(x).sum().backward()
    """
    if not torch.cuda.is_available():
        for _ in range(CALLS):
            fn()
        return
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for _ in range(CALLS):
            fn()
    here.wait_stream(aside)
    torch.cuda.synchronize()
