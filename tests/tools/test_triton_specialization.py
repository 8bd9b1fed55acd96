"""Triton compiles kernels again for another alignment, never for another sequence length.

Triton's JIT runs in its own process, since TRITON_INTERPRET=1 disables it in this one.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fresh
from resources import CAPABILITIES, launches
from torchweld.bench.measure.launched import sign

pytest.importorskip("triton", reason="Triton is not installed")

# Kernels are specialised for these integers being 1 or multiples of 16.
SPECIALISED = {
    **{
        f"{name}_stride": "of a branch or a modulation, parts of one projection: a model's constant"
        for name in ("branch", "scale", "shift")
    },
    "width": "of the rows, and the stride of results: tells how wide loads and stores are",
    "deep": "the width of values, likewise",
    "columns": "the stride of a GEMM's result",
    "inner": "of a GEMM: a model's constant, which tells whether loads need masks",
    "skew": "0 unless the columns are a shard: tells how wide loads are",
    "first_column": "0 unless the columns are a shard",
    "group": "a model's constant",
    "key_heads": "a model's constant",
    "targets": "of a row: 1, or a method's constant",
    "pairs": "a model's constant: tells how wide loads are",
    "experts": "of a router, a model's constant: tells how wide loads are",
    "features": "of a loss's layer, likewise",
    "expert_stride": "between experts' matrices, a model's constant: tells how wide loads are",
    **{
        f"{side}_{what}": "of an expert's gradient, a model's constant: tells how wide loads are"
        for side in ("left", "right")
        for what in ("width", "stride")
    },
    "size": "of a symmetric matrix, a model's constant: tells how wide stores are",
    "distance": "between the columns of a pair, likewise",
    **dict.fromkeys(("cos_stride", "sin_stride"), "of angles: 1, or 2 if they are complex"),
    **{
        f"{name}_{place}_stride": "of a rotation's rows: tells how wide loads and stores are"
        for name in ("x", "y", "k", "k_y", "grad", "k_grad", "result", "k_result")
        for place in ("batch", "token", "head")
    },
    **{
        f"{name}_{place}_stride": "of a table's rows, likewise"
        for name in ("cos", "sin")
        for place in ("batch", "token")
    },
    **dict.fromkeys(
        (
            *("x_stride", "x_row_stride", "weight_stride", "weight_row_stride", "gate_stride"),
            *("up_stride", "residual_stride", "grad_stride", "grad_y_stride", "grad_z_stride"),
            *("z_stride", "q_stride", "k_stride", "v_stride", "mask_stride", "mask_stride0"),
            "logits_stride",
            *("mask_stride1", "mask_stride2", "q_batch_stride", "q_head_stride"),
            *("k_batch_stride", "k_head_stride", "v_batch_stride", "v_head_stride"),
            *("grad_batch_stride", "grad_head_stride"),
        ),
        "an input's stride: tells how wide loads are",
    ),
}


def _specialised_integers() -> list[str]:
    found = set()
    for _, launch in launches(max(CAPABILITIES)):
        values = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
        for parameter in launch.kernel.params:
            free = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
            if not free and isinstance(values.get(parameter.name), int):
                found.add(parameter.name)
    return sorted(found)


def _signatures(every: Iterator[Any]) -> int:
    """How often Triton compiles for these launches."""
    return len({f"{each.kernel.fn} {sign(each)} {each.options}" for each in every})


def _softmaxes(causal: bool) -> Iterator[Any]:
    """Both directions, with a mask and dropout, for rows of 513 to 1023 keys."""
    import torch

    from torchweld.triton_kernels import softmax

    for length in range(513, 1024):
        scores = torch.empty(2, 3, length, length, device="meta")
        mask = torch.empty(2, 1, 1, length, device="meta", dtype=torch.bool)
        seed = torch.empty(1, device="meta", dtype=torch.int64)
        common = softmax._common(scores, mask, 0.125, causal, 0.1, seed, [], [])
        yield softmax._forward_launch(scores, scores, None, causal, common)
        yield softmax._backward_launch(scores, None, scores, scores, scores, causal, common)


def _attentions() -> Iterator[Any]:
    """The forward, for 1025 to 1099 tokens."""
    import torch

    from torchweld.triton_kernels.attention import block_sparse_attention as attention

    for length in range(1025, 1100):
        q = torch.empty(2, 8, length, 64, dtype=torch.bfloat16, device="meta")
        options: list[Any] = [None] * 9
        options += (0, 64, 1, 0.125, True, 0.0, 0.0, None, None, None)
        call = attention.make_call(q, q, q, *options)
        yield attention.forward_tiled(call, q, q[..., 0].float()).launches()[0]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return json.loads(fresh.run_file(__file__, TRITON_INTERPRET="0"))


def test_specialised_integers_are_named(found: dict[str, Any]) -> None:
    """Sizes that vary with the sequence are not among them, unless they set the width of loads."""
    assert found["integers"] == sorted(SPECIALISED)


def test_softmax_compiles_twice_for_all_lengths(found: dict[str, Any]) -> None:
    """In each direction: once for aligned rows and once for others."""
    assert found["softmax"] == found["causal softmax"] == 4


def test_attention_compiles_once_for_all_lengths(found: dict[str, Any]) -> None:
    assert found["attention"] == 1


class _Recorded:
    """A kernel that records the options of its launches."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.options.append(options)


def test_views_that_are_not_aligned_run_with_the_options_for_them() -> None:
    """These are compiled ahead of time too: over twice the warps, with all registers."""
    from torchweld.triton_kernels.launch import launch, run

    kernel = _Recorded()
    rows = torch.zeros(8, 64)
    beside = torch.zeros(8 * 64 + 1)[1:].view(8, 64)
    strided = torch.zeros(8, 72)[:, :64]
    options = {"enable_fp_fusion": True, "num_warps": 8}
    for tensor in (rows, beside, strided):
        made = launch(kernel, 1, rows, tensor, 64, num_warps=8, maxnreg=200)
        for spreads in (True, False):
            run(rows, made._replace(spreads=spreads))
    limited = options | {"maxnreg": 200}
    spread = options | {"num_warps": 16, "maxnreg": 128}
    assert kernel.options == [limited, limited, spread, limited, spread, limited]
    run(rows, launch(kernel, 0, rows, num_warps=8))
    assert len(kernel.options) == 6, "a launch without programs does not run"


@pytest.mark.parametrize("width", [4096, 8192, 16384, 16376])
def test_views_of_the_widest_rows_go_in_tiles(width: int) -> None:
    """A thread's registers cannot hold both the widest row and a view's element addresses."""
    from torchweld.triton_kernels import dropout_add_norm, norm

    def kernels(x: torch.Tensor) -> tuple[str, str, str]:
        rstd, row = torch.ones(len(x)), torch.ones(width)
        saved = (x, row, rstd, rstd, x, row, row)
        dropout = dropout_add_norm._dropout(x, [width], 0.0, None, [], [])
        tensors = (x, x, row, row, x, x, rstd, rstd)
        every = (
            dropout_add_norm._forward_launch(*tensors, 1e-5, dropout),
            *norm._backward_launches(x, *saved),
        )
        assert not any(each.aligned and each.spreads for each in every)
        names = [each.kernel.fn.__name__ for each in every]
        return names[0], names[1], str(every[0].aligned)

    rows = torch.empty(2, width)
    beside = torch.empty(2 * width + 1)[1:].view(2, width)
    strided = torch.empty(2, width + 8)[:, :width]
    whole = "_forward" if width % 16 == 0 else "_forward_wide"
    assert kernels(rows)[:2] == (whole, "_backward" if width <= 8192 else "_sum_columns")
    for view in (beside, strided) if width % 16 == 0 else ():
        forward = "_forward" if width <= 8192 else "_forward_wide"
        assert kernels(view)[:2] == (forward, "_backward" if width <= 4096 else "_sum_columns")
        assert kernels(view)[2] == "False"


if __name__ == "__main__":
    counts = {
        "softmax": _signatures(_softmaxes(False)),
        "causal softmax": _signatures(_softmaxes(True)),
        "attention": _signatures(_attentions()),
    }
    json.dump({"integers": _specialised_integers(), **counts}, sys.stdout)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_captured_call_may_load_a_kernel(
    captured: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread's mode is relaxed for the launch, and afterwards what it was."""
    from torchweld.triton_kernels import launch

    mode, seen = [0], []

    class Driver:
        def cuThreadExchangeStreamCaptureMode(self, given: Any) -> None:  # noqa: N802
            given._obj.value, mode[0] = mode[0], given._obj.value

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., Any]:
            return self._run

        def _run(self, *_: Any, **__: Any) -> None:
            seen.append(mode[0])
            if fails:
                raise RuntimeError("too large")

    monkeypatch.setattr(launch, "_cuda", Driver)
    monkeypatch.setattr(launch, "_is_captured", lambda: captured)
    with pytest.raises(RuntimeError, match="too large") if fails else contextlib.nullcontext():
        launch.start(launch.launch(Kernel(), 1), {})
    assert seen == [2 if captured else 0]
    assert mode == [0]
