"""Training over a link of 200 Mbit/s: python -m torchweld.bench.studies.slow_link.

Two processes run in separate network namespaces, over a link that `tc` limits. They train a model
of 30 M parameters with DDP and torch's fused AdamW, and with OneBitAdam before and after its
freeze. It needs root and the tools ip and tc, and takes about two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchweld import optim
from torchweld.table import Table

WIDTH, LAYERS, WORDS, LENGTH = 512, 9, 4096, 16
SECONDS = 400  # timeout
_HOST = "10.213.7."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, or one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbit", type=int, default=200, help="speed of the link, Mbit/s")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each kind")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        _work(options.rank, options.steps)
        return 0
    if why := _why_not():
        print(f"torchweld: the link was not measured: {why}")
        return 0
    try:
        figures = _measure(options.mbit, options.steps)
    finally:
        _remove()
    _show(figures, options.mbit)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0


# --- The link ---------------------------------------------------------------------------------


def _names(rank: int) -> tuple[str, str]:
    """The names of a rank's namespace and network device."""
    return f"torchweld{rank}", f"twlink{rank}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _why_not() -> str | None:
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} was not found: apt-get install iproute2"
    try:
        _ip("netns", "add", _names(0)[0])
        _ip("netns", "del", _names(0)[0])
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    return None


def _make(mbit: int) -> None:
    (first, device), (second, other) = _names(0), _names(1)
    for space in (first, second):
        _ip("netns", "add", space)
    peer = ["type", "veth", "peer", "name", other, "netns", second]
    _ip("link", "add", device, "netns", first, *peer)
    for rank in range(2):
        space, name = _names(rank)
        _ip("-n", space, "addr", "add", f"{_HOST}{rank + 1}/24", "dev", name)
        for up in (name, "lo"):
            _ip("-n", space, "link", "set", up, "up")
        limit = ["rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
        tc = ["tc", "-n", space, "qdisc", "add", "dev", name, "root", "tbf", *limit]
        subprocess.run(tc, check=True, capture_output=True, text=True)


def _remove() -> None:
    for rank in range(2):
        subprocess.run(["ip", "netns", "del", _names(rank)[0]], check=False, capture_output=True)


def _measure(mbit: int, steps: int) -> dict[str, dict[str, float]]:
    _make(mbit)
    started = []
    for rank in range(2):
        space, name = _names(rank)
        own = {"MASTER_ADDR": f"{_HOST}1", "MASTER_PORT": "29517", "GLOO_SOCKET_IFNAME": name}
        command = [sys.executable, "-m", "torchweld.bench.studies.slow_link"]
        command += ["--rank", str(rank), "--steps", str(steps)]
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", space, *command],
                env=os.environ | own | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        return json.loads(started[0].communicate(timeout=SECONDS)[0])
    finally:
        for process in started:
            process.kill()


# --- A process --------------------------------------------------------------------------------


def _model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), body)


def _sent(rank: int) -> int:
    """The bytes sent from this namespace so far."""
    return int(Path(f"/sys/class/net/{_names(rank)[1]}/statistics/tx_bytes").read_text())


def _work(rank: int, steps: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(rank)
    text = torch.randint(WORDS, (100, 1, LENGTH), generator=generator)
    figures: dict[str, dict[str, float]] = {}

    def timed(name: str, model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        def step(number: int) -> None:
            optimizer.zero_grad()
            model(text[number]).square().mean().backward()
            optimizer.step()

        figures[name] = _timed(step, rank, count)

    model = _model()
    size = float(sum(p.numel() for p in model.parameters()))
    ddp = DistributedDataParallel(model)
    timed("DDP, fused AdamW", ddp, torch.optim.AdamW(model.parameters(), fused=True), steps)
    model = _model()
    one_bit = optim.OneBitAdam(model.parameters(), freeze_step=steps + 1)
    timed("OneBitAdam, warm-up", model, one_bit, steps)
    timed("OneBitAdam, compressed", model, one_bit, 4 * steps)
    for name in figures:
        figures[name]["parameters"] = size
    dist.barrier()
    if rank == 0:
        print(json.dumps(figures))
    dist.destroy_process_group()


def _timed(step: Callable[[int], None], rank: int, count: int) -> dict[str, float]:
    """The median time of `count` steps after a warm-up step, and the bytes sent per step."""
    step(0)
    seconds, began = [], _sent(rank)
    for number in range(1, count + 1):
        dist.barrier()
        start = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": sorted(seconds)[count // 2],
        "bytes": (_sent(rank) - began) / count,
    }


def _show(figures: dict[str, dict[str, float]], mbit: int) -> None:
    first = next(iter(figures.values()))
    print(f"{first['parameters'] / 1e6:.1f} M parameters, 2 processes, {mbit} Mbit/s")
    table = Table(["", "s a step", "steps/s", "MB sent a step", "faster", "fewer bytes"], 1)
    for name, one in figures.items():
        table.add(
            name,
            f"{one['seconds']:.3f}",
            f"{1 / one['seconds']:.2f}",
            f"{one['bytes'] / 1e6:.2f}",
            f"{first['seconds'] / one['seconds']:.2f}x",
            f"{first['bytes'] / one['bytes']:.1f}x",
        )
    table.show()


if __name__ == "__main__":
    sys.exit(main())
