"""Memory over many calls: native code keeps nothing, and the heap of a long run stays bounded.

Both measure glibc's heap in a process of their own, with glibc's default settings.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import platform
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import fresh
import torchweld
from torchweld import functional as fused
from torchweld.bench.cases import CASES, Case
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.registry import OPS
from torchweld.sparse import BlockLayout

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="mallinfo2 and VmRSS are glibc's and Linux's"
)
CALLS = 100
DIRECT = [op.name for op in OPS.values() if "cpu" in getattr(op, "kernels", {})]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW8bit": {"class": "AdamW", "state_dtype": "8bit"},
    "SGD": {"momentum": 0.9},
    "LAMB": {},
    "Lion": {},
    "Adafactor": {},
    "Muon": {},
    "ScheduleFreeAdamW": {},
}


class _Mallinfo(ctypes.Structure):
    """glibc's struct mallinfo2: ten sizes, two of them read here."""

    _fields_ = [
        *((f"field_{i}", ctypes.c_size_t) for i in range(4)),
        ("hblkhd", ctypes.c_size_t),
        *((f"field_{i}", ctypes.c_size_t) for i in range(5, 7)),
        ("uordblks", ctypes.c_size_t),
        *((f"field_{i}", ctypes.c_size_t) for i in range(8, 10)),
    ]


def count_bytes_in_use() -> int:
    """Bytes of the heap that are allocated now."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


def count_bytes_kept(what: Callable[[], Any]) -> float:
    """Bytes that a call leaves allocated: the lesser of two counts, since Python's vary."""
    counts = []
    for _ in range(2):
        for _ in range(20):
            what()
        gc.collect()
        before = count_bytes_in_use()
        for _ in range(CALLS):
            what()
        gc.collect()
        counts.append((count_bytes_in_use() - before) / CALLS)
    return min(counts)


def make_call(name: str) -> Callable[[], Any]:
    """Forward and backward of an op on its smallest problem."""
    op = OPS[name]
    problem = Case(op, CASES[op.name].tiny, torch.float32, "cpu").draw()
    leaves = list(problem.leaves().values())

    def run() -> None:
        results = [y for y in as_tuple(call(op, *problem.inputs)) if y.requires_grad]
        if results:
            torch.autograd.grad(results, leaves, [torch.ones_like(y) for y in results])

    return run


def make_direct_call(name: str) -> Callable[[], Any]:
    """The same as a later call of a short way makes it."""
    op = OPS[name]
    problem = Case(op, CASES[op.name].tiny, torch.float32, "cpu").draw()
    leaves = list(problem.leaves().values())
    function, first, at, _ = op.kernels["cpu"].make_ready(problem.inputs)
    inputs = [problem.inputs[i] for i in at]

    def run() -> None:
        results = as_tuple(function(*first, *inputs))[: len(op.public)]
        torch.autograd.grad(results, leaves, [torch.ones_like(y) for y in results])

    return run


def make_step(name: str) -> Callable[[], Any]:
    """A step of an optimizer on a matrix."""
    settings = dict(OPTIMIZERS[name])
    p = torch.randn(16, 16, requires_grad=True)
    p.grad = torch.randn(16, 16)
    optimizer = getattr(torchweld.optim, settings.pop("class", name))([p], lr=1e-3, **settings)
    if hasattr(optimizer, "train"):
        optimizer.train()
    step: Callable[[], Any] = optimizer.step
    return step


def count_all() -> dict[str, float]:
    """Bytes kept by a call of each op on the CPU's kernels, and by each optimizer's step."""
    torch.set_num_threads(1)
    kept = {}
    with torchweld.use_backend("cpu", "eager"):
        for name in OPS:
            kept[name] = count_bytes_kept(make_call(name))
        for name in DIRECT:
            kept[f"{name}, direct"] = count_bytes_kept(make_direct_call(name))
        for name in OPTIMIZERS:
            kept[name] = count_bytes_kept(make_step(name))
    return kept


def read_resident() -> int:
    """VmRSS in kB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def walk(which: str, threads: int) -> list[int]:
    """Resident kB after a random sequence of ops of different sizes, at 100 and 300 rounds."""
    torch.set_num_threads(threads)
    # Many narrow rows: their products take a quarter of the time of wide ones of the same size.
    order, width = random.Random(0), 256
    w, wide = torch.ones(width, requires_grad=True), torch.zeros(500, width, requires_grad=True)
    layout = BlockLayout.sliding_window(WINDOW, 3, block=16)
    seen = layout.to_mask()
    ours = {
        "norm": lambda h: fused.rms_norm(h, [width], w),
        "gate": lambda h: fused.gated_act(h, h),
        "residual": lambda h: fused.dropout_add_rms_norm(h, h, w, p=0.1),
        "act": lambda h: fused.bias_act(h, activation="gelu"),
        "softmax": lambda h: fused.softmax_dropout(h, p=0.1),
        "linear": lambda h: fused.linear_act(h, wide[:width], w, activation="gelu"),
        "loss": lambda h: h * fused.cross_entropy(h, torch.arange(len(h)) % width),
        "linear loss": lambda h: (
            h * fused.linear_cross_entropy(h, wide, torch.arange(len(h)) % width)
        ),
        "attention": lambda h: _attend(h, lambda q: fused.block_sparse_attention(q, q, q, layout)),
    }
    theirs = {
        "norm": lambda h: functional.rms_norm(h, [width], w),
        "gate": lambda h: functional.silu(h) * h,
        "residual": lambda h: functional.rms_norm(functional.dropout(h, 0.1) + h, [width], w),
        "act": functional.gelu,
        "softmax": lambda h: functional.dropout(h.softmax(-1), 0.1),
        "linear": lambda h: functional.gelu(functional.linear(h, wide[:width], w)),
        "loss": lambda h: h * functional.cross_entropy(h, torch.arange(len(h)) % width),
        "linear loss": lambda h: (
            h * functional.cross_entropy(functional.linear(h, wide), torch.arange(len(h)) % width)
        ),
        "attention": lambda h: _attend(
            h, lambda q: functional.scaled_dot_product_attention(q, q, q, seen)
        ),
    }
    ops = ours if which == "ours" else theirs
    optimizer = (torchweld.optim.AdamW if which == "ours" else torch.optim.AdamW)([w, wide], 1e-4)
    resident = []
    for round_ in range(300):
        h = torch.ones(order.choice((240, 1200, 2800)), width)
        for name in order.choices(list(ops), k=4):
            with torch.set_grad_enabled(order.random() < 0.5):
                h = ops[name](h)
            if h.requires_grad:
                h.sum().backward()
                h = h.detach()
        if round_ % 10 == 0:
            optimizer.step()
            optimizer.zero_grad()
        if round_ in (99, 299):
            resident.append(read_resident())
    return resident


WINDOW = 1024  # tokens of a call of attention


def _attend(h: torch.Tensor, attend: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Attention over the first tokens in one head."""
    rows = torch.cat([h, h, h, h, h])[:WINDOW]
    result = attend(rows.view(1, WINDOW, 1, -1).transpose(1, 2)).transpose(1, 2).reshape_as(rows)
    return torch.cat([result[: len(h)], h[WINDOW:]])


def test_a_call_keeps_no_native_memory() -> None:
    """The smallest block of glibc has 32 bytes; a leaked one in each call counts as much."""
    kept = json.loads(fresh.run_file(__file__))
    assert set(kept) == {*OPS, *(f"{name}, direct" for name in DIRECT), *OPTIMIZERS}
    assert {name: n for name, n in kept.items() if n >= 24} == {}


@pytest.mark.parametrize("threads", [1, 2])
def test_a_long_run_stays_bounded(threads: int) -> None:
    """At its end it takes at most a tenth more memory than torch's ops do."""
    assert _walk("ours", threads)[-1] <= 1.1 * max(_walk("theirs", 1))


@functools.cache
def _walk(which: str, threads: int) -> list[int]:
    """`walk` in a process of its own. Torch's ops take as much with two threads as with one."""
    return json.loads(fresh.run_file(__file__, which, str(threads)))


if __name__ == "__main__":
    gc.freeze()  # collections need not search modules
    which, threads = sys.argv[1:] or ("", "")
    print(json.dumps(walk(which, int(threads)) if which else count_all()))
