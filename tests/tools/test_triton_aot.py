"""Every Triton kernel, compiled for GPUs that need not be here: no spill, and bounded resources.

The code for the GPU also tells whether warps compute products that others compute too.

tests/helpers/resources.py compiles. `pytest -s` prints what each case takes.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

import fresh
import layouts
import resources
from oracle import TORCH
from resources import CAPABILITIES, NEVER_UNALIGNED
from selection import WHOLE
from torchweld.bench.measure import evidence
from torchweld.triton_kernels.memory import memory_of

pytest.importorskip("triton", reason="Triton is not installed")

# Compute capability -> the most bytes of shared memory per block. What is compiled for sm_80 serves
# sm_86 and sm_89, too, which have less than sm_80, and as much as sm_120.
SHARED_MEMORY = {80: 101376, 90: 232448, 100: 232448, 120: 101376}
LIKE_SM_80 = (86, 89)
AGAIN = 90
REGISTERS_PER_MULTIPROCESSOR = 65536
# Warps that must fit a multiprocessor at once: sixteen keep loads in flight. Eight suffice if loads
# go to shared memory and registers hold sums of products. Eight is also what rotary embeddings with
# a norm reach, which keep whole rows, their gradients and weights in registers.
WARPS = dict.fromkeys(
    (
        "linear_act._linear_act",
        "attention.forward.attention_forward",
        "attention.dq.attention_dq",
        "attention.dkv.attention_dkv",
        "attention.bias.attention_bias_gradient",
        "attention.specialised_forward.attention_forward_specialised",
        "attention.specialised_dq.attention_dq_specialised",
        "attention.specialised_dkv.attention_dkv_specialised",
        "rotary._rotate",
        "rotary._differentiate",
        "symmetric._symmetric",
        "experts.products._first_product",
        "experts.products._product",
        "experts.products._hidden_gradient",
        "experts.products._weight_gradient",
    ),
    8,
) | dict.fromkeys(
    (
        "linear_act_specialised.linear_act_specialised",
        "symmetric_specialised.symmetric_specialised",
    ),
    12,
)
# Bytes that a thread may spill. Stores and loads of them were counted in the machine code, in
# natural loops. Where a launch on sm_90 sums keys and values, an H200 is faster with them; nearly
# all are outside the loop over blocks without conditions.
MAY_SPILL = {
    "attention.dq.attention_dq on sm_100": 8,  # by a bias on a plane
    "attention.bias.attention_bias_gradient on sm_90": 16,
    # With dropout and heads of 256: two registers, in and out once a tile of 700 instructions.
    "attention.forward.attention_forward on sm_90": 16,
    "attention.dkv.attention_dkv on sm_80": 32,
    "attention.dkv.attention_dkv on sm_90": 384,
    "attention.dkv.attention_dkv on sm_100": 24,
    # Constants of the warps that finish, stored once, before these warps get their registers.
    "linear_act_specialised.linear_act_specialised on sm_90": 8,
    # None in the loops over blocks: heads of 128 load one word in a line's 2600 instructions, of
    # 256 up to 11 in 2150. The registers of a role are all that a multiprocessor has.
    "attention.specialised_forward.attention_forward_specialised on sm_90": 56,
    # None in these loops either, but where two programs share a multiprocessor (blocks of 64):
    # three stores and loads in 472 instructions of a block with conditions. 88 under Triton 3.6.
    "attention.specialised_dkv.attention_dkv_specialised on sm_90": 88,
    # Outside of the loop over rows. More registers would halve the programs of a multiprocessor.
    "modulation_rows._backward on sm_100": 8,
    "modulation_rows._backward on sm_120": 8,
    # 131,073 columns that are not aligned: one or two loads in a row's 250 instructions.
    "modulation_rows._backward of views on sm_90": 8,
    "modulation_rows._backward of views on sm_100": 16,
    "modulation_rows._backward of views on sm_120": 8,
    # For a fifth program a multiprocessor: at most one load in 480 instructions. On sm_90 one store
    # before the loop and one load behind it, with whole rows of angles and no positions.
    "rotary._differentiate on sm_80": 16,
    "rotary._differentiate on sm_90": 8,
    "rotary._differentiate on sm_100": 8,
    "rotary._differentiate on sm_120": 8,
    # Tiles are sm_80's. In loops over blocks at most one load, with dropout up to 7 in 1700
    # instructions.
    "attention.forward.attention_forward on sm_120": 48,
    "attention.dq.attention_dq on sm_120": 8,
    "attention.dkv.attention_dkv on sm_120": 40,
    "attention.bias.attention_bias_gradient on sm_120": 8,
    # One load in 390 instructions of 16 tiles' loop; none in it; two in 290 of 131,073 columns.
    "batch_norm._normalize_act on sm_120": 8,
    "norm._backward on sm_120": 8,
    "norm._forward_wide on sm_120": 8,
    # With dropout and a mask: up to 7 loads in 840 instructions of 131,073 columns.
    "softmax._forward on sm_120": 32,
    "softmax._forward of views on sm_120": 8,
}
# And under Triton 3.6, for which tiles were not chosen.
PINNED = TORCH >= (2, 13)
SPILLED = {
    "attention.bias.attention_bias_gradient": 8,
    "dropout_add_norm._forward": 16,
    "dropout_add_norm._forward_wide": 8,
    "dropout_add_norm._forward_wide of views": 88,
    "norm._forward_wide of views": 208,
    "attention.dkv.attention_dkv": 8,
    "loss.rows._forward on sm_80": 8,
    "attention.dkv.attention_dkv on sm_100": 152,
    "attention.dq.attention_dq on sm_100": 8,
    "experts.route._route on sm_80": 8,
}

# Cases that may compute a product more than once: float32, whose three passes of the tensor cores
# take eight warps for the registers, and biases, likewise.
REPEATED = re.compile(r"float32|(line|pairs|plane)(, unaligned)?$")
# On sm_90 the sums of heads of 256 do not fit the registers with 64 rows to a group of warps.
SLOW = re.compile(
    r"attention.dkv.attention_dkv 256 "
    r"|attention.dq.attention_dq 256 bfloat16 64 causal p"
)


def is_timed(row: dict[str, Any]) -> bool:
    """Whether the benchmark has such a call of attention: lists, causal, heads of these widths."""
    attention = row["kernel"].startswith("attention.")
    return attention and bool(re.match(r"(64|128|256) bfloat16 (64|128) causal( p)?$", row["case"]))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'kernel':44} {'case':40} warps registers  shared"]
    for row in rows:
        taken = row["now"] or row["kept"]
        numbers = f"{row['warps']:5} {taken['registers']:9} {taken['shared']:7}"
        lines.append(f"{row['kernel']:44} {row['case']:40} {numbers}")
    return "\n".join(["", *lines])


# One test per architecture, so that each is compiled once however tests are distributed. The table
# of Triton 3.6 has no sm_120, whose compiles would take minutes.
@pytest.mark.parametrize("capability", CAPABILITIES if PINNED else CAPABILITIES[:3])
def test_every_case_fits_the_gpu(capability: int) -> None:
    """None spills, and enough warps fit a multiprocessor."""
    # That kept rows are those of today's compiler is tried once, and by `make nightly` four times.
    again = ["again"] if capability == AGAIN or WHOLE else []
    how = str(capability), *again
    rows = json.loads(fresh.run_file(resources.__file__, *how, TRITON_INTERPRET="0"))
    print(table(rows))
    assert sum(row["aligned"] for row in rows) == sum(1 for _ in resources.launches(capability)) > 0
    kernels = {row["kernel"] for row in rows}
    assert {row["kernel"] for row in rows if not row["aligned"]} == kernels - {*NEVER_UNALIGNED}
    for row in rows:
        taken = row["now"] or row["kept"]
        assert taken["shared"] <= SHARED_MEMORY[capability], row
        warps = WARPS.get(row["kernel"], 16) if row["aligned"] else row["warps"]
        assert taken["registers"] <= REGISTERS_PER_MULTIPROCESSOR // (32 * warps), row
        name = row["kernel"] if row["aligned"] else f"{row['kernel']} of views"
        at = f"{name} on sm_{capability}"
        spilled = 0 if PINNED else SPILLED.get(at, SPILLED.get(name, 0))
        assert taken["spilled"] <= max(spilled, MAY_SPILL.get(at, 0)), row
        if not REPEATED.search(row["case"]):
            assert taken["repeats"] <= 1, row
        is_slow = capability == 100 or (
            capability == 90 and SLOW.match("{kernel} {case}".format(**row))
        )
        if is_timed(row) and not is_slow:
            assert taken["slow"] == 0, row
        if row["now"] and row["kept"]:
            assert row["now"] == row["kept"], row
    if again:
        assert {row["kernel"] for row in rows if row["now"]} == kernels
    timed = {row["case"] for row in rows if is_timed(row)}
    assert len(timed) == 12
    for case in timed:
        names = {row["kernel"].rpartition(".")[2] for row in rows if row["case"] == case}
        assert {"attention_forward", "attention_dq", "attention_dkv"} < names
    if missing := sum(row["kept"] is None for row in rows):
        warnings.warn(f"{missing} results are not kept: run `make resources`", stacklevel=1)


def test_a_key_knows_what_a_compile_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile, the compiler's options, dtypes, alignment, and any source file of the kernel."""
    from triton.runtime.jit import JITFunction

    cases: dict[str, Any] = {}
    for case, each in resources.launches(90):
        cases.setdefault(case, each)  # the forward comes first
    launch = cases["layer_norm float32 4096"]
    options = launch.options

    def key(launch: Any, aligned: bool = True) -> str:
        compiled = launch._replace(kernel=JITFunction(launch.kernel.fn))  # here it is interpreted
        return resources.Compile("", compiled, aligned).key

    others = [
        key(launch, aligned=False),
        key(cases["layer_norm bfloat16 4096"]),
        key(launch._replace(options=options | {"num_warps": 2 * options["num_warps"]})),
        key(launch._replace(options=options | {"enable_fp_fusion": False})),
        key(launch._replace(options=options | {"BLOCK": 2 * options["BLOCK"]})),
    ]
    before, stripped = key(launch), evidence.stripped
    for changed in ("norm.py", "norm_rows.py", "tensors.py"):

        def with_a_change(path: Path, changed: str = changed) -> str:
            return stripped(path) + ("pass" if path.name == changed else "")

        monkeypatch.setattr(evidence, "stripped", with_a_change)
        others.append(key(launch))
    monkeypatch.undo()
    assert before == key(launch)
    assert len({before, *others}) == 1 + len(others)


def test_products_are_read_from_the_compiled_code() -> None:
    """More warps than 16 rows each, instructions of older GPUs, and products without any."""
    mma = "#mma = #ttg.nvidia_mma<{{versionMajor = {}, warpsPerCTA = [{}], instrShape = [16, {}]}}>"
    dot = "%c = ttng.warp_group_dot %a, %b, %0 : {} -> tensor<64x32xf32, #mma> loc(#loc1)"
    hopper = dot.format("!ttg.memdesc<64x128xbf16, #shared, #smem>")

    def read(layout: str, *lines: str, capability: int = 90) -> tuple[int, int]:
        found = layouts.read("\n".join([layout, *lines]), capability)
        return found["repeats"], found["slow"]

    assert read(mma.format(3, "4, 1", "32, 16"), hopper) == (1, 0)
    assert read(mma.format(3, "8, 1", "32, 16"), hopper) == (2, 0)
    assert read(mma.format(3, "4, 2", "32, 16"), hopper, hopper) == (2, 0)
    older = hopper.replace("ttng.warp_group_dot", "tt.dot")
    assert read(mma.format(2, "2, 2", "8"), older) == (1, 1)
    blocked = "#mma = #ttg.blocked<{sizePerThread = [1, 4]}>"
    assert read(blocked, older) == (1, 1)
    assert read("", "%x = tt.load %y : tensor<64xf32>") == (0, 0)
    five = "ttng.tc_gen5_mma %a, %b, %c : !ttg.memdesc<{0}x64xf32, #tmem, #ttng.tensor_memory>"
    assert read("", five.format(128), capability=100) == (1, 0)
    assert read("", five.format(64), capability=100) == (1, 1)


@pytest.mark.parametrize("capability", LIKE_SM_80)
def test_sm_80_stands_for_gpus_with_less_memory(capability: int) -> None:
    """The largest launches take as much shared memory there as on sm_80, whose cases fit 99 KB.

    Tiles were chosen by capability, and sm_120 got those of sm_90, which take 147,456 bytes. Only
    the GPUs of data centres were compiled for.
    """
    how = (str(capability), "largest")
    found = json.loads(fresh.run_file(resources.__file__, *how, TRITON_INTERPRET="0"))
    assert {row["kernel"].rpartition(".")[0] for row in found} >= {
        "experts.products",
        "attention.dkv",
    }
    for row in found:
        assert row["shared"] == row["like"] <= SHARED_MEMORY[80], row


def test_tiles_count_on_the_memory_that_gpus_have() -> None:
    for capability, most in SHARED_MEMORY.items():
        assert memory_of(capability) == most
