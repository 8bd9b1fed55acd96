"""Preparation for capturing a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# The number of calls that torch.cuda.make_graphed_callables makes before a capture.
CALLS = 3


def warmup(fn: Callable[[], Any]) -> None:
    """Call `fn` a few times, so that capturing or timing it finds everything ready.

    A kernel is compiled and checked at its first use on a GPU. Neither is possible during a
    capture, so kernels that were never tried are not captured. On a GPU the calls run on a side
    stream, as capturing requires, and have finished when this returns. Calls have their usual
    effects: an optimizer step inside `fn` changes the parameters.

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
