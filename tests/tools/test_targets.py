"""The aims for a GPU: figures from planted times, met or missed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from torchweld.bench import targets
from torchweld.bench.cases import Case, cases
from torchweld.bench.runner import Result
from torchweld.registry import OPS

NORM = Result("layer_norm", [32768, 4096], "bfloat16", "fwd", "cuda", 2**27, 2**29)


def _timed(like: Result, direction: str, **ms: float) -> list[Result]:
    """Results of these contenders, with a stream of 2 ms forward and 5 ms for both."""
    limit = {"fwd": 2.0, "full": 5.0, "step": 6.0}[direction]
    flops = like.flops * {"fwd": 2, "full": 7, "step": 0}[direction]
    return [
        replace(like, direction=direction, contender=c, ms=t, limit_ms=limit, flops=flops)
        for c, t in ms.items()
    ]


def _figures(results: list[Result]) -> dict[tuple[str, str], tuple[float, bool]]:
    return {
        (target.kernel, target.aim): (figure, figure >= target.least)
        for target, figure in targets.judge(results)
        if figure is not None
    }


def test_shares_of_a_copy(capsys: pytest.CaptureFixture[str]) -> None:
    """The backward pass has what the whole takes beyond the forward pass, of one kernel."""
    results = [
        *_timed(NORM, "fwd", eager=9.0, cuda=2.5, triton=2.1),
        *_timed(NORM, "full", eager=20.0, cuda=7.0, triton=6.0),
    ]
    found = _figures(results)
    case = "layer_norm 32768x4096"
    assert found == {
        (case, "fwd >= 90% of a copy"): (pytest.approx(2 / 2.1), True),
        (case, "bwd >= 80% of a copy"): (pytest.approx(3 / 3.9), False),
    }
    targets.show(results)
    told = capsys.readouterr().out.splitlines()
    assert any("fwd >= 90%" in line and line.rstrip().endswith("met") for line in told)
    assert any("bwd >= 80%" in line and line.rstrip().endswith("missed") for line in told)
    assert any("not measured: rms_norm 32768x4096: fwd >= 90%" in line for line in told)


def test_attention_beside_its_rivals() -> None:
    """The rate on the computed blocks, an eighth of all, by that of the fastest dense kernel."""
    tokens, width = 16384, 128
    pairs = 16 * tokens**2
    like = Result(
        "block_sparse_attention", [1, 16, tokens, width], "bfloat16", "", "", 1, 1,
        flops=2 * width * pairs // 8,
    )  # fmt: skip
    sparser = replace(like, flops=like.flops // 2, variant="fewer")
    results = [
        *_timed(like, "fwd", triton=1.0, sdpa=8.0, sdpa_cudnn=6.0, flex=1.2),
        *_timed(like, "full", triton=4.0, sdpa=24.0, sdpa_cudnn=18.0, flex=4.0),
        *_timed(sparser, "fwd", triton=0.1, sdpa=8.0, sdpa_cudnn=6.0, flex=0.1),
    ]
    block, shape = "block_sparse_attention block 128", "block_sparse_attention 1x16x16384x128"
    assert _figures(results) == {
        (block, "fwd >= 65% of dense SDPA's rate"): (pytest.approx(6 / 8), True),
        (block, "bwd >= 50% of dense SDPA's rate"): (pytest.approx(12 / 8 / 3), True),
        (shape, "fwd >= 1.15x flex"): (pytest.approx(1.2), True),
        (shape, "bwd >= 1.15x flex"): (pytest.approx(2.8 / 3), False),
    }


def test_steps_beside_other_packages() -> None:
    like = Result("adam", [16, 8192, 8192], "float32", "", "", 2**30, 1)
    results = [
        *_timed(like, "step", eager=9.0, cuda=6.4),
        *_timed(replace(like, variant="8-bit states"), "step", eager=9.0, cuda=8, bitsandbytes=9),
    ]
    case = "adam 16x8192x8192"
    assert _figures(results) == {
        (case, "step >= 90% of a copy"): (pytest.approx(6 / 6.4), True),
        (case, "step >= 1x torch fused"): (pytest.approx(9 / 6.4), True),
        (f"{case} 8-bit states", "step >= 80% of a copy"): (pytest.approx(0.75), False),
        (f"{case} 8-bit states", "step >= 1.5x bitsandbytes"): (pytest.approx(9 / 8), False),
    }


def test_epilogues_beside_the_bare_gemm() -> None:
    like = Result("linear_act", [8192, 4096], "bfloat16", "", "", 1, 1)
    results = [
        *_timed(replace(like, variant="tanh"), "fwd", cuda=1.05, triton=1.2, gemm=1.0, eager=2.0),
        *_timed(like, "fwd", cuda=1.1, gemm=1.0, eager=2.0),
    ]
    case = "linear_act 8192x4096"
    assert _figures(results) == {
        (f"{case} tanh", "fwd <= 1.06x the bare GEMM"): (pytest.approx(1 / 1.05), True),
        (f"{case} erf", "fwd <= 1.09x the bare GEMM"): (pytest.approx(1 / 1.1), False),
    }


def test_rotations_and_muon() -> None:
    """A case with norms is not the one without, although both have a shape."""
    like = Result("rotary_embedding", [8, 32, 4096, 128], "bfloat16", "", "", 1, 1)
    normed = replace(like, variant="norm_weight, k_norm_weight, norm_eps 1e-06")
    muon = Result("muon", [2, 8192, 8192], "float32", "", "", 1, 1)
    results = [
        *_timed(like, "fwd", triton=2.2, eager=9.0),
        *_timed(normed, "fwd", triton=2.6, eager=9.0),
        *_timed(muon, "step", cuda=10.0, torch_muon=14.0, eager=30.0),
    ]
    case = "rotary_embedding 8x32x4096x128"
    assert _figures(results) == {
        (case, "fwd >= 85% of a copy"): (pytest.approx(2 / 2.2), True),
        (f"{case} norm_weight", "fwd >= 80% of a copy"): (pytest.approx(2 / 2.6), False),
        ("muon 2x8192x8192", "step >= 1.5x torch_muon"): (pytest.approx(1.4), False),
    }


def test_targets_name_cases_that_are_measured() -> None:
    """A target of a shape or variant that no case has would never be measured."""
    measured = {str(case).rpartition(" ")[0] for case in _cases_on_gpu()}
    for target in targets.TARGETS:
        op, _, rest = target.kernel.partition(" ")
        if op not in OPS or rest.startswith("block"):
            continue
        shape, _, variant = rest.partition(" ")
        words = "" if variant == "erf" else variant
        found = [name for name in measured if name.startswith(f"{op} {shape}")]
        assert any(words in name for name in found), target


def _cases_on_gpu() -> list[Case]:
    return cases(OPS.values(), "cuda", [torch.bfloat16])
