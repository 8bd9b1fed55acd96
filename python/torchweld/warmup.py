"""What a CUDA graph's capture needs beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# torch.cuda.make_graphed_callables runs as often before it captures.
CALLS = 3


def warmup(fn: Callable[[], Any]) -> None:
    """Call `fn` a few times, so that a capture of it, or a timing, finds everything ready.

    At its first use on a GPU a kernel is compiled, checked and timed, which a capture forbids: what
    was never tried is then not used. On a GPU the calls are made on a stream of their own, as
    capturing asks for, and have ended when this returns. `fn` is called as it is: a step that it
    takes is taken.

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
