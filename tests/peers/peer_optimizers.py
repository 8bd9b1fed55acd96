"""Other packages' optimizers and ours take steps with the gradients of a small transformer.

`exact` is the rule in float64. In float32 ours is the peer's to the roundings of 50 steps. In 16
bits both round parameters every step, and torch more than that: ours is to be as near to `exact` as
the peer is.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import bitsandbytes
import bitsandbytes.functional as peer
import models
import pytest
import torch
import transformers

from optimizers import U, in_float64, lamb
from torchweld import optim
from torchweld.functional import dequantize_8bit, quantize_8bit
from torchweld.ops.quantize_8bit import BLOCK, MAPS
from torchweld.optim import convert

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when it is imported
# Packages that warn about torch and about themselves at import.
pytestmark = pytest.mark.filterwarnings("ignore")

Make = Callable[..., torch.optim.Optimizer]
STEPS = 50
ADAM = {"lr": 1e-3, "weight_decay": 0.1}
SGD = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
GIVEN = {"lr": 1e-3, "relative_step": False, "scale_parameter": False}


def _deepspeed(params: Any, **settings: Any) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, **settings, fp32_optimizer_states=True)


def _torchao(params: Any, **settings: Any) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, **settings)


class _AdEMAMix(torch.optim.Optimizer):
    """Algorithm 1 of the paper of AdEMAMix."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, alpha, decay = group["lr"], group["alpha"], group["weight_decay"]
            for p in group["params"]:
                state = self.state[p]
                t = state["t"] = state.get("t", 0) + 1
                averages = state.setdefault("averages", [torch.zeros_like(p) for _ in range(3)])
                for average, beta, g in zip(
                    averages, group["betas"], (p.grad, p.grad**2, p.grad), strict=True
                ):
                    average.lerp_(g, 1 - beta)
                fast, square, slow = averages
                fast, square = fast / (1 - 0.9**t), square / (1 - 0.999**t)
                p -= lr * ((fast + alpha * slow) / (square.sqrt() + 1e-8) + decay * p)


class Case(NamedTuple):
    """Our optimizer, a peer's of the same rule, and torch's or the peer's in float64."""

    peer: Make
    ours: Make
    exact: Make
    settings: dict[str, Any]
    only_peers: Mapping[str, Any] = MappingProxyType({})
    # The allowed difference in float32, relative to the parameters' movement, besides rounding.
    apart: float = 1e-5
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)


def _torchs(name: str, settings: dict[str, Any], **peers: Any) -> Case:
    theirs = getattr(torch.optim, name)
    return Case(theirs, getattr(optim, name), theirs, settings, peers)


ADAMW, HF = torch.optim.AdamW, transformers.Adafactor
CASES = {
    "torch AdamW": _torchs("AdamW", ADAM, foreach=False),
    "torch AdamW foreach": _torchs("AdamW", ADAM, foreach=True),
    "torch AdamW fused": _torchs("AdamW", ADAM, fused=True),
    "torch AdamW amsgrad": _torchs("AdamW", ADAM | {"amsgrad": True}),
    "torch Adam maximize": _torchs("Adam", ADAM | {"maximize": True}),
    "torch SGD": _torchs("SGD", SGD, foreach=False),
    "torch SGD fused": _torchs("SGD", SGD, fused=True),
    "torch Adafactor": _torchs("Adafactor", {"lr": 1e-2, "eps": (1e-7, 1e-3)}),
    "transformers Adafactor": Case(HF, optim.TransformersAdafactor, HF, {}),
    "transformers Adafactor warm-up": Case(
        HF, optim.TransformersAdafactor, HF, {"warmup_init": True}
    ),
    "transformers Adafactor with a momentum": Case(
        HF, optim.TransformersAdafactor, HF, GIVEN | {"beta1": 0.9, "weight_decay": 0.1}
    ),
    "bitsandbytes AdEMAMix": Case(
        lambda p, **settings: bitsandbytes.optim.AdEMAMix(p, **settings, optim_bits=32),
        optim.AdEMAMix,
        _AdEMAMix,
        ADAM | {"alpha": 5.0, "betas": (0.9, 0.999, 0.9999)},
        dtypes=(torch.float32, torch.bfloat16),
    ),
    "DeepSpeed CPUAdam": Case(_deepspeed, optim.AdamW, ADAMW, ADAM),
    # It does not always round to the nearest code.
    "bitsandbytes AdamW8bit": Case(
        bitsandbytes.optim.AdamW8bit, optim.AdamW8bit, ADAMW, ADAM, apart=0.02
    ),
    # Its blocks have other ties; in float16 it does not converge.
    "torchao AdamW8bit": Case(
        _torchao, optim.AdamW8bit, ADAMW, ADAM, apart=1e-3, dtypes=(torch.float32, torch.bfloat16)
    ),
}


@functools.cache
def training() -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Parameters, and the gradients of 50 steps of torch's AdamW from them.

    Rows are multiples of 256 elements, where blocks of 8-bit states are bitsandbytes'. Embeddings
    are left out: most of their gradients are zero.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 256, "vocab_size": 64}
    model = models.make("Llama", **sizes, num_attention_heads=2, head_dim=128)
    model.model.embed_tokens.requires_grad_(False)
    params = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in params]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    rows = torch.randint(64, (48, 16), generator=torch.Generator().manual_seed(1))
    of_steps = []
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens = rows[4 * step % 48 : 4 * step % 48 + 4]
        model(input_ids=tokens, labels=tokens).loss.backward()
        of_steps.append([p.grad.clone() for p in params])
        optimizer.step()
    return start, of_steps


def _run(make: Make, settings: dict[str, Any], given: Any, dtype: torch.dtype) -> Any:
    """Parameters and optimizer after 50 steps, from what is of the dtype `given`."""
    start, of_steps = training()
    params = [p.to(given).to(dtype, copy=True).requires_grad_() for p in start]
    optimizer = make(params, **settings)
    for grads in of_steps:
        for p, g in zip(params, grads, strict=True):
            p.grad = g.to(given).to(dtype)
        optimizer.step()
    return params, optimizer


def _distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    differences = [(p.detach().double() - q.detach().double()) for p, q in zip(a, b, strict=True)]
    return torch.stack([d.square().sum() for d in differences]).sum().sqrt().item()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name, case in CASES.items() for dtype in case.dtypes],
    ids=str,
)
def test_fifty_steps(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    theirs, _ = _run(case.peer, {**case.settings, **case.only_peers}, dtype, dtype)
    ours, _ = _run(case.ours, case.settings, dtype, dtype)
    exact, _ = _run(case.exact, case.settings, dtype, torch.float64)
    start = [p.to(dtype) for p in training()[0]]
    moved = _distance(exact, start)
    assert moved > 1e-3
    if dtype == torch.float32:
        size = _distance(exact, [torch.zeros_like(p) for p in exact])
        assert _distance(ours, theirs) <= STEPS * 2 * U * size + case.apart * moved
    off = _distance(ours, exact)
    assert off < moved
    # torch's float16 moments become zeros and infinities.
    other = _distance(theirs, exact)
    assert not other < moved or off <= 1.1 * other + 1e-5 * moved


def test_apexs_lamb() -> None:
    """Its rule in float64: clipped to a norm of 1, and tensors without weight decay unadapted."""
    start, of_steps = training()
    settings = {"weight_decay": 0.01, "max_grad_norm": 1.0, "always_adapt": False}
    ours, _ = _run(optim.LAMB, settings | {"lr": 1e-2}, torch.float32, torch.float32)
    exact, _ = in_float64(lamb, start, of_steps, settings | {"lr": 1e-2})
    size, moved = _distance(exact, [torch.zeros_like(p) for p in exact]), _distance(exact, start)
    assert moved > 1e-3
    assert _distance(ours, exact) <= STEPS * 2 * U * size + 1e-5 * moved


def test_the_codes_of_a_step() -> None:
    """99.9% of the codes equal bitsandbytes' codes in float64, which rounds exactly."""
    start, of_steps = training()
    params = [p.clone().requires_grad_() for p in start]
    optimizer = optim.AdamW8bit(params, **ADAM)
    for p, g in zip(params, of_steps[0], strict=True):
        p.grad = g
    optimizer.step()
    same, count = 0, 0
    for p in params:
        assert p.grad is not None
        if "exp_avg_codes" not in optimizer.state[p]:
            continue
        g = p.grad.double()
        moments = (("exp_avg", 0.1 * g, True), ("exp_avg_sq", 1e-3 * g * g, False))
        for name, moment, signed in moments:
            theirs, _ = torch.ops.bitsandbytes.quantize_blockwise(moment, MAPS[signed], BLOCK)
            same += (theirs == optimizer.state[p][name + "_codes"]).sum().item()
            count += p.numel()
    assert count > 1e6
    assert same >= 0.999 * count


# --- bitsandbytes' states -------------------------------------------------------------------------

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
