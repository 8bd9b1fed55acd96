"""Contract 6 and 8: the same bits at every run and thread count, and in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from conftest import Target
from oracle import assert_same_bits_on_any_threads, run
from torchweld import numerics
from torchweld.bench.cases import CASES
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.registry import materialize


@pytest.mark.targets(not_at=("interpreter",))  # one thread, in order: nothing can differ
def test_bitwise_the_same(target: Target) -> None:
    """In two runs, and on any number of threads."""
    for arguments in CASES[target.op.name].samples + CASES[target.op.name].benchmarks[:1]:
        inputs = materialize(arguments, torch.float32, target.device)
        assert_same_bits_on_any_threads(lambda: run(target.op, inputs).values())  # noqa: B023


def test_cuda_graph_replay_equals_eager(target: Target) -> None:
    """A graph captured once is replayed on new values."""
    if target.device != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    inputs = materialize(target.sized((4, 5), (768,)), torch.bfloat16, target.device)
    call(target.op, *inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = as_tuple(call(target.op, *inputs))
    inputs[0].normal_()
    graph.replay()
    torch.testing.assert_close(captured, as_tuple(call(target.op, *inputs)), **numerics.SAME)
