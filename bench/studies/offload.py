"""The host's cost of offloading: python -m torchweld.bench.studies.offload.

The step kernel writes float32 masters, moments and the 16-bit parameters in one pass. DeepSpeed's
CPUAdam steps float32 parameters, which are then copied to 16 bits. The contenders take turns in one
process. The hooks are timed in the backward pass of a model of 100 million parameters, without the
copies.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torchweld import keep_pages, optim
from torchweld.table import Table

COUNT, TENSORS = 1 << 20, 16
TURNS = 41


def _seconds(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    begin = clock()
    call()
    return clock() - begin


def _params(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1024, COUNT // 1024, generator=generator) for _ in range(TENSORS)]
    params = [nn.Parameter(t.to(dtype)) for t in drawn]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    return params


def steps() -> dict[str, Callable[[], Any]]:
    """A step of each installed contender. Each ends with bfloat16 parameters."""
    ours = optim.AdamW(_params(torch.bfloat16), 1e-3, master_weights=True)
    by_name: dict[str, Callable[[], Any]] = {"torchweld, one pass": ours.step}
    eight_bit = optim.AdamW(
        _params(torch.bfloat16), 1e-3, master_weights="remainder", state_dtype="8bit"
    )
    by_name["torchweld, remainders, 8 bits"] = eight_bit.step
    masters = _params(torch.float32)
    narrow = [p.detach().bfloat16() for p in masters]
    theirs: list[tuple[str, torch.optim.Optimizer]] = [
        ("torch fused, and a copy", torch.optim.AdamW(masters, 1e-3, fused=True))
    ]
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        cpu_adam = DeepSpeedCPUAdam(masters, 1e-3, weight_decay=1e-2)
        theirs.append(("DeepSpeed's CPUAdam, and a copy", cpu_adam))
    except Exception as error:  # its op is compiled at first use
        print(f"DeepSpeed's CPUAdam is not available: {error}")
    for name, optimizer in theirs:

        def step_and_copy(optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            with torch.no_grad():
                for p, master in zip(narrow, masters, strict=True):
                    p.copy_(master)

        by_name[name] = step_and_copy
    return by_name


def compare_steps() -> Table:
    """Each contender's median time, and its median ratio to ours in the same turn."""
    contenders = steps()
    for call in contenders.values():
        for _ in range(3):
            call()
    turns = [{name: _seconds(call) for name, call in contenders.items()} for _ in range(TURNS)]
    first = next(iter(contenders))
    table = Table(["a step of 16.8 million parameters", "ms", "its time / ours"], 1)
    for name in contenders:
        ratio = statistics.median(turn[name] / turn[first] for turn in turns)
        middle = statistics.median(turn[name] for turn in turns)
        table.add(name, f"{1e3 * middle:.1f}", f"{ratio:.2f}")
    return table


def hook_share(layers: int = 14, width: int = 768, tokens: int = 128) -> tuple[int, float, float]:
    """The number of parameters, and the seconds of a step and of its hooks, without the copies.

    Both are CPU seconds of the thread that runs the backward pass.
    """
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(width, 12, 4 * width, 0.0) for _ in range(layers)]
    model = nn.Sequential(*blocks)
    count = sum(p.numel() for p in model.parameters())
    offload = optim.Offload(optim.AdamW(model.parameters(), 1e-4))
    in_hooks = [0.0]
    accumulated, fetch = offload._take_gradient, offload._transfers.fetch
    copies_are_made = True

    def timed(p: torch.Tensor) -> None:
        in_hooks[0] += _seconds(lambda: accumulated(p), time.thread_time)

    def queued(copies: Any, after: Any = None) -> Any:
        # A device would only queue them.
        return fetch(copies if copies_are_made else (), after)

    offload._take_gradient = timed  # type: ignore[method-assign]
    offload._transfers.fetch = queued  # type: ignore[method-assign]
    timings = []
    x = torch.randn(tokens, 1, width)

    def step() -> None:
        model(x).square().mean().backward()
        offload.step()
        offload.zero_grad()

    for at in range(9):
        copies_are_made, in_hooks[0] = at < 2, 0.0
        seconds = _seconds(step, time.thread_time)
        timings.append((seconds, in_hooks[0]))
    middle = [statistics.median(values) for values in zip(*timings[2:], strict=True)]
    return count, middle[0], middle[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, help="threads for the steps; default: torch's")
    asked = parser.parse_args(arguments)
    if asked.threads:
        torch.set_num_threads(asked.threads)
    keep_pages()
    compare_steps().show()
    count, seconds, in_hooks = hook_share()
    print(f"{count / 1e6:.0f} million parameters: {1e3 * seconds:.0f} ms a step, of which hooks")
    print(f"take {1e3 * in_hooks:.1f} ms: {100 * in_hooks / seconds:.2f}%")


if __name__ == "__main__":
    main()
