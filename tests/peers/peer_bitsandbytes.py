"""What bitsandbytes makes of the same numbers; `make test-peers`."""

from __future__ import annotations

import bitsandbytes.functional as peer
import pytest
import torch

from torchweld.functional import dequantize_8bit, quantize_8bit
from torchweld.ops.quantize_8bit import BLOCK, MAPS

SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


@SIGNED
def test_the_map_is_bitsandbytes_to_the_bit(signed: bool) -> None:
    assert torch.equal(MAPS[signed], peer.create_dynamic_map(signed=signed))


@SIGNED
def test_the_same_blocks_and_codes(signed: bool) -> None:
    """float64 takes their code in torch, which differs from ours at thresholds only, to rounding.

    Their native code for float32 is not exact; what it finds in our code's place is never nearer.
    """
    torch.manual_seed(0)
    x = torch.randn(512, 2048)
    x = x if signed else x.square()
    codes, absmax = quantize_8bit(x, signed=signed)
    ours = dequantize_8bit(codes, absmax, signed=signed)
    for given, share, steps in ((x.double(), 1e-4, 1), (x, 0.05, 8)):
        theirs, scales = torch.ops.bitsandbytes.quantize_blockwise(given, MAPS[signed], BLOCK)
        assert torch.equal(absmax.flatten(), scales)
        differ = codes != theirs
        assert differ.float().mean() < share
        assert (codes.int() - theirs.int()).abs().max() <= steps
        other = dequantize_8bit(theirs, absmax, signed=signed)
        back = torch.ops.bitsandbytes.dequantize_blockwise
        assert torch.equal(other, back(theirs, scales, MAPS[signed], BLOCK, torch.float32))
        nearer = (ours.double() - x).abs() <= (other.double() - x).abs() + 2**-23 * x.abs()
        assert nearer.all()
