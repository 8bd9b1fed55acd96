"""8-bit states against bitsandbytes' on the same numbers."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import bitsandbytes.functional as peer
import pytest
import torch

from torchweld import optim
from torchweld.functional import dequantize_8bit, quantize_8bit
from torchweld.ops.quantize_8bit import BLOCK, MAPS
from torchweld.optim import convert

SIGNED = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


@SIGNED
def test_the_map_is_bitsandbytes_to_the_bit(signed: bool) -> None:
    assert torch.equal(MAPS[signed], peer.create_dynamic_map(signed=signed))


@SIGNED
def test_the_same_blocks_and_codes(signed: bool) -> None:
    """float64 takes their code in torch, which differs from ours at thresholds only, to rounding.

    Their native code for float32 is not exact; a code that differs from ours is never nearer.
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


# A row of 512 is two blocks; rows of 300 end within a block; vectors; tensors kept in 32 bits.
SHAPES = ((64, 512), (64, 300), (5000,), (16, 16), (8, 4, 256))


def _trained(kind: Any, steps: range, params: list[torch.Tensor], **settings: Any) -> Any:
    optimizer = kind(params, lr=1e-2, weight_decay=0.1, **settings)
    _train(optimizer, steps)
    return optimizer


def _train(optimizer: Any, steps: range) -> None:
    for seed in steps:
        generator = torch.Generator().manual_seed(seed)
        for p in optimizer.param_groups[0]["params"]:
            # A slope and noise: rounding decides few of the signs, on which Lion depends.
            p.grad = p.detach().sign() * 0.1 + torch.randn(p.shape, generator=generator) * 0.03
        optimizer.step()


def _draw() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit"])
def test_a_run_goes_on_either_way(name: str) -> None:
    """From theirs to ours and back: codes as they were where blocks are the same.

    A step is lr at most, a few for Adam's first ones, and goes by moments that two roundings to 8
    bits have left within 2 x 5% of an element's block: the parameters end within a few hundredths
    of what they move by. Their Adam rounds other codes than the nearest, see above.
    """
    theirs = _trained(getattr(bitsandbytes.optim, name), range(10), _draw())
    params = [p.detach().clone().requires_grad_() for p in theirs.param_groups[0]["params"]]
    ours = getattr(optim, name)(params)
    with pytest.warns(UserWarning, match="not multiples of 256"):
        ours.load_state_dict(convert.from_bitsandbytes(theirs.state_dict(), ours))
    assert ours.param_groups[0]["lr"] == 1e-2
    given = [theirs.state[p] for p in theirs.param_groups[0]["params"]]
    kept = [ours.state[p] for p in params]
    for i in (0, 4):
        assert torch.equal(kept[i]["exp_avg_codes"], given[i]["state1"])
        assert torch.equal(kept[i]["exp_avg_absmax"].flatten(), given[i]["absmax1"])
    assert torch.equal(kept[3]["exp_avg"], given[3]["state1"])
    blocks = given[2]["absmax1"].repeat_interleave(BLOCK)[:5000]
    assert torch.equal(kept[2]["exp_avg"], given[2]["qmap1"][given[2]["state1"].long()] * blocks)
    again = _trained(getattr(bitsandbytes.optim, name), range(1), _draw())
    with torch.no_grad():
        for p, q in zip(again.param_groups[0]["params"], params, strict=True):
            p.copy_(q)
    with pytest.warns(UserWarning, match="not multiples of 256"):
        again.load_state_dict(convert.to_bitsandbytes(ours))
    for i in (0, 4):
        back = again.state[again.param_groups[0]["params"][i]]
        for key in given[i]:
            a, b = back[key], given[i][key]
            assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b
    moved = [p.detach().clone() for p in params]
    for optimizer in (theirs, ours, again):
        _train(optimizer, range(10, 15))
    for p, q, r, before in zip(
        theirs.param_groups[0]["params"],
        params,
        again.param_groups[0]["params"],
        moved,
        strict=True,
    ):
        distance = (p - before).norm()
        assert distance > 0.01 * before.norm()
        for other in (q, r):
            assert (other - p).norm() <= 0.1 * distance
