"""What a warm call costs at every size: counted in Python's functions, which no load changes.

The gates of host time measure one size of each op. They saw neither the sizes at which losses took
five times torch's time, nor call forms that never got warm. Later 16-bit layers of few products
went another way, at three times torch's time, and only the table of host times showed it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from torchweld import functional, numerics
from torchweld.bench.measure import host_times
from torchweld.bench.measure.host_times import PAIRS
from torchweld.dispatch.autograd import as_tuple

# How many functions a warm call of an op runs: a look-up, what it found, and the kernel's leaves.
# A forward and a backward pass run so many more than torch's composition. The whole path of a call
# runs more than a hundred.
MOST, MOST_OF_BOTH = 20, 22
# Ops of several steps, which run one after another, and those without a short way, with the reason.
STEPS: dict[str, tuple[int, int]] = {
    "batch_norm_act, training": (32, 40),  # running statistics
    "linear_batch_norm_act, training": (44, 50),
    "experts_mlp": (60, 170),  # products of each expert
    "route": (18, 26),  # with both side losses
    "cross_entropy, z-loss": (18, 24),
    "logprobs": (18, 24),
    "linear_cross_entropy": (18, 34),  # chunks of logits
    "linear_logprobs": (18, 34),
    "rotary_embedding_packed_": (80, 0),  # eager's passes
    # Not in a step's loop.
    **{"quantize_8bit": (24, 0), "dequantize_8bit": (28, 0), "quantize_one_bit": (28, 0)},
    **{"dequantize_one_bit": (38, 0), "average_one_bit": (38, 0)},
}
# In 16 bits layers split their bias in training, and divide products on CPUs without units, but not
# the few of a smallest size.
SPLIT = 42
NARROW: dict[str, tuple[int, int]] = {
    "linear_act": (48, 160),
    "linear_gelu": (48, 160),
    "mlp": (90, 290),
    "gated_mlp": (120, 380),
    "linear_batch_norm_act": (50, 140),
    "linear_batch_norm_act, training": (74, 160),
    "linear_cross_entropy": (48, 130),
    "linear_logprobs": (48, 130),
}


def _count(call: Callable[..., object], given: Sequence[Any]) -> int:
    """The functions in Python that the fifth call runs."""
    for _ in range(4):
        call(*given)
    count = 0

    def see(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(see)
    try:
        call(*given)
    finally:
        sys.setprofile(None)
    return count


def test_every_public_op_has_a_row() -> None:
    made = {name.partition(",")[0] for name in PAIRS}
    ops = {n for n in functional.__all__ if inspect.isfunction(getattr(functional, n))}
    assert made == ops, "PAIRS of bench/measure/host_times.py must have it"


@pytest.mark.parametrize("name", PAIRS)
def test_compositions_compute_the_same(name: str) -> None:
    pair = PAIRS[name]
    torch.manual_seed(0)
    given = pair.draw(*pair.sizes[0])
    with torch.no_grad():
        theirs = as_tuple(pair.theirs(*(t.clone() for t in given)))
        ours = as_tuple(pair.ours(*given))
    if "dropout" in name and "p 0" not in name:
        assert [y.shape for y in ours] == [y.shape for y in theirs]
    else:
        torch.testing.assert_close(ours, theirs, **numerics.CHAINED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_a_warm_call_runs_few_functions(name: str, dtype: torch.dtype) -> None:
    pair = PAIRS[name]
    if not pair.casts and dtype is not torch.float32:
        return
    both = [host_times._both(call, pair.leaves) for call in (pair.ours, pair.theirs)]
    theirs = 0
    for size in pair.sizes:
        forward, more = STEPS.get(name, (MOST, MOST_OF_BOTH))
        if dtype.itemsize == 2:
            few = (forward, max(more, SPLIT))
            forward, more = few if size == pair.sizes[0] else NARROW.get(name, few)
        given = host_times._cast(pair, dtype, *size)
        with torch.no_grad():
            assert _count(pair.ours, given) <= forward, size
        if pair.leaves:
            theirs = theirs or _count(both[1], given)  # at every size
            assert _count(both[0], given) <= theirs + more, size
