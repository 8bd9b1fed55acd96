"""Evidence by what is compiled: what makes a row stale, and what does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import fresh
import planted
from torchweld.bench.cases import CASES, Case
from torchweld.bench.measure import evidence, launched
from torchweld.registry import OPS

pytest.importorskip("triton", reason="Triton is not installed")


def test_what_runs_otherwise_has_another_code() -> None:
    """One instruction, option, size or grid counts; comments, places and names do not.

    A hash of sources called 144 of 147 rows stale, most of which compiled to the same.
    """
    codes = json.loads(fresh.run_file(planted.__file__, TRITON_INTERPRET="0"))
    stale = {name for name, code in codes.items() if code != codes[""]}
    assert stale == {"an instruction", *planted.OPTIONS}


@pytest.mark.parametrize("direction", ["fwd", "full"])
@pytest.mark.parametrize(
    "name",
    [n for n, op in OPS.items() if "triton" in op.sources],
)
def test_launches_are_found_without_a_gpu(name: str, direction: str) -> None:
    case = Case(OPS[name], CASES[name].benchmarks_on_gpu[0], torch.bfloat16, "cuda")
    kernels = [each.kernel for each, _ in launched.list_launches(case, direction)]
    assert kernels
    if name == "block_sparse_attention":  # with the kernels that serve an H200
        assert any("specialised" in kernel.fn.__name__ for kernel in kernels)
    if direction == "full":
        forward = [each.kernel for each, _ in launched.list_launches(case, "fwd")]
        assert len(kernels) > len(forward)


PRODUCTS = {"linear_act": (0, 2), "mlp": (1, 5), "linear_batch_norm_act": (1, 3)}


@pytest.mark.parametrize("name", PRODUCTS)
def test_ops_of_several_steps_have_their_launches_and_products(name: str) -> None:
    """They went by their sources: with a rename all of their rows were stale.

    A kernel by warps with roles multiplies itself. A product of another size has another code.
    """
    codes = []
    for given in (CASES[name].benchmarks_on_gpu[at] for at in (0, -1)):
        case = Case(OPS[name], given, torch.bfloat16, "cuda")
        steps = [launched.list_steps(case, direction) for direction in ("fwd", "full")]
        counts = tuple(sum(isinstance(step, str) for step in each) for each in steps)
        assert counts == PRODUCTS[name]
        assert [step[0].kernel.fn.__name__ for step in steps[0] if not isinstance(step, str)]
        codes.append([step for step in steps[1] if isinstance(step, str)])
    assert codes[0] != codes[1]


def test_a_row_is_current_by_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal under any version of Triton that both have is enough, and none in common is stale."""
    row: dict[str, Any] = {"shape": [4, 8], "variant": "p 0.1", "dtype": "bfloat16"}
    row |= {"direction": "fwd", "code": {"3.6.0": "a", "3.7.1": "b"}}
    at = ("softmax_dropout", "now", "4x8 p 0.1 bfloat16 fwd")
    assert evidence.name_row(row) == at[2]

    def is_current(codes: dict[str, str], sources: str = "then") -> bool:
        monkeypatch.setattr(evidence, "read_codes", lambda: {at: codes})
        return evidence.is_current("softmax_dropout", {"sources": sources}, row, "now")

    assert is_current({"3.7.1": "b"})
    assert is_current({"3.6.0": "x", "3.7.1": "b"})
    assert not is_current({"3.7.1": "a"})
    assert not is_current({"3.8.0": "b"})
    assert not is_current({})
    assert is_current({}, "now")


def test_codes_are_kept_by_sources(tmp_path: Any) -> None:
    codes = {("norm", "a", "4x8 fwd"): {"3.6.0": "x", "3.7.1": "y"}}
    evidence.write_codes(tmp_path / "kept.tsv", codes)
    assert (tmp_path / "kept.tsv").read_text().splitlines() == [
        "op\tsources\tcase\ttriton\tcode",
        "norm\ta\t4x8 fwd\t3.6.0\tx",
        "norm\ta\t4x8 fwd\t3.7.1\ty",
    ]


def test_the_tile_by_rule_is_what_counts() -> None:
    """Once the choice of tiles was connected, evidence took the first of those that are only timed.

    Each kernel with several tiles had one in its first place that was like it, or only one.
    """
    from torchweld.dispatch import tile_proof

    tile_proof.connect()
    cases = [Case(OPS["rotary_embedding"], given, torch.bfloat16, "cuda")
             for given in CASES["rotary_embedding"].benchmarks_on_gpu]  # fmt: skip
    normed = next(case for case in cases if "norm_weight" in case.variant)
    (only,) = launched.list_launches(normed, "fwd")
    assert only[0].kernel.fn.__name__ == "_rotate"


def test_what_will_be_measured_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch once, each tile of a tiled one, and none of rows that are known.

    Nothing ran this: a faulty way would have been found in the minutes that a GPU is there.
    """
    compiled: list[str] = []

    def see(kernel: Any, signature: Any, options: Any) -> None:
        compiled.append(f"{kernel.fn.__name__} {signature} {options}")

    monkeypatch.setattr(launched, "compile_launch", see)
    monkeypatch.setattr(launched, "sign", lambda made: ({}, made.grid, ()))  # interpreted here
    name, rows = "block_sparse_attention", dict[str, set[str]]()
    for given in CASES[name].benchmarks_on_gpu:
        case = Case(OPS[name], given, torch.bfloat16, "cuda")
        about = {"shape": case.shape, "variant": case.variant, "dtype": "bfloat16"}
        for direction in ("fwd", "full"):
            made = launched.list_launches(case, direction)
            kernels = {each.kernel.fn.__name__ for each, _ in made}
            rows[evidence.name_row(about | {"direction": direction})] = kernels
    first = next(iter(rows))
    count = launched.compile_ahead([name], lambda op, backend: [r for r in rows if r != first])
    assert count == len(compiled) == len({*compiled})
    assert {each.partition(" ")[0] for each in compiled} >= rows[first]
    assert count > len(rows[first])  # its tiles
    assert launched.compile_ahead([name], lambda op, backend: [*rows]) == 0
    assert launched.compile_ahead([name], lambda op, backend: []) > count
