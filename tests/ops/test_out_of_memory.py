"""Kernels that run out of memory say so in the words of torch's allocator."""

from __future__ import annotations

import re

import pytest
import torch

import fresh

# Room for a tenth of a result, after a call that has loaded all that one needs.
PROGRAM = """
import resource, torch
from torchweld import functional as F

CALLS = {
    "gated_act": lambda x: F.gated_act(x, x),
    "rms_norm": lambda x: F.rms_norm(x, (4096,)),
    "softmax_dropout": lambda x: F.softmax_dropout(x),
    "bias_act": lambda x: F.bias_act(x, x[0]),
    "backward": lambda x: torch.autograd.grad(F.rms_norm(w.repeat(2, 1), (4096,), w).sum(), w),
    "a copy of columns": lambda x: F.rms_norm(x.mT, (len(x),)),
    "torch": lambda x: torch.empty_like(x),
}
w = torch.ones(4096, requires_grad=True)
x = torch.ones(65536, 4096)
for call in CALLS.values():
    call(x[:64])
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + x.nbytes // 10,) * 2)
for name, call in CALLS.items():
    try:
        call(x)
    except RuntimeError as e:
        print(f"{name}: {e}".replace(chr(10), " "))
"""


def test_the_sentence_of_torch() -> None:
    result = fresh.run(PROGRAM, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    lines = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    asked = ["torch", "gated_act", "rms_norm", "softmax_dropout", "bias_act"]
    asked.append("a copy of columns")
    assert set(lines) >= set(asked), result.stderr
    said = "DefaultCPUAllocator: can't allocate memory: you tried to allocate {} bytes."
    for line in lines.values():
        assert re.search(said.format(2**30), line), lines
        assert "Error code 12 (Cannot allocate memory)" in line


def test_a_kernel_too_large_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's error of a tile without room is no RuntimeError, which a user's call raised."""
    errors = pytest.importorskip("triton.runtime.errors")
    kernels = pytest.importorskip("torchweld.triton_kernels.norm")

    def refuse(*_: object) -> None:
        raise errors.OutOfResources(147456, 101376, "shared memory")

    monkeypatch.setattr(kernels, "rms_norm", refuse)
    with pytest.raises(RuntimeError, match=r"rms_norm: out of resource: shared memory.*101376"):
        torch.ops.torchweld.rms_norm.triton(torch.ones(4, 8), [8], None, 1e-5)
