"""Plants faults one at a time and reports the tests that notice.

python tests/helpers/mutate.py [--native] [words]

A fault that no test notices is a gap in the suite. Faults in Python and Triton need no build.
Faults in C++ (--native) are built for one instruction set into build/mutants. Files are always
restored, also after an interruption.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = ROOT / "build" / "mutants"

ORACLE = "tests/contract/test_oracle.py"
SHAPES = "tests/contract/test_shapes.py"
RANDOM = "tests/contract/test_random.py"
GRADIENTS = "tests/contract/test_gradients.py"
OPTIM = "tests/optim"
SHARDS = "tests/distributed"
PROOFS = " ".join(
    f"tests/pytorch/test_{name}.py"
    for name in ("graph_mutants", "graph_writes", "graph_answers", "graph_fuse", "fuse_mutants")
)
PLANS = "tests/tools/test_plans.py tests/tools/test_bound_plans.py"


@dataclass(frozen=True)
class Fault:
    """Replaces one occurrence of `old` by `new`. `tests` are pytest's arguments."""

    file: str
    old: str
    new: str
    tests: str

    @property
    def native(self) -> bool:
        return self.file.startswith("csrc")

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}: `{old}` -> `{new}`"


CPU = f"{ORACLE} {SHAPES} -k 'cpu and not emulator and"
TRITON = f"{ORACLE} {SHAPES} -k 'interpreter and"

# By file and pytest's arguments: what is replaced once, and by what.
_FAULTS: dict[tuple[str, str], list[tuple[str, str]]] = {
    # --- CPU kernels ---
    ("csrc/cpu/norm.h", f"{CPU} layer_norm'"): [
        ("(A)width + eps)", "(A)width + 2 * eps)"),
        ("present(value - of[n].mean, at, (A)0)", "present(value - of[n].mean, at, (A)1)"),
        ("if (bias) v += load(bias + i, at);", "if (bias) v += load(bias, at);"),
        (
            "accumulate(weight_partial, i, gradient * x_hat, at);",
            "accumulate(weight_partial, i, g * x_hat, at);",
        ),
    ],
    ("csrc/cpu/norm.h", f"{CPU} rms_norm'"): [
        ("if constexpr (Centered) acc[0] += g;", "acc[0] += g;"),
        ("for_vectors<A>(a.width, ", "for_vectors<A>(a.width - (a.width == 33), "),
    ],
    ("csrc/cpu/chunks.h", f"{CPU} norm'"): [
        ("chunk < chunks; ++chunk", "chunk + 1 < chunks; ++chunk"),
        ("std::memset(partial, 0, width * sizeof(A));", ""),
    ],
    ("csrc/cpu/act.cpp", "tests/ops tests/contract -k 'gated_act and cpu'"): [
        ("a.gate_pitch;\n      const T* up", "a.up_pitch;\n      const T* up")
    ],
    ("csrc/cpu/act.cpp", f"{CPU} gated_act'"): [
        ("grad * act.value(z), at, streamed", "act.value(z), at, streamed")
    ],
    ("csrc/cpu/softmax.cpp", "tests/contract -k 'softmax_dropout and cpu'"): [
        ("if (!stride) return Bits<A>{} - (*mask != 0);", "if (!stride) return Bits<A>{};")
    ],
    ("csrc/cpu/softmax.cpp", "tests/contract tests/ops -k 'softmax_dropout and cpu'"): [
        ("return z + load(mask, Part{1})[0];", "return z;")
    ],
    # --- Rules ---
    ("csrc/core/rules/adam.h", f"{OPTIM}/test_optim.py"): [
        (
            "decay((float)(s.decoupled_weight_decay ? 1 - now.lr",
            "decay((float)(s.decoupled_weight_decay ? 1 + now.lr",
        ),
        ("m[1] <= m[2] ? m[2] : m[1]", "m[1] <= m[2] ? m[1] : m[2]"),
        ("pow(s.beta2, now.number)", "pow(s.beta2, now.number + 1)"),
    ],
    (
        "csrc/core/rules/lion.h",
        f"{OPTIM}/test_optim_published.py tests/contract/test_absent_lanes.py",
    ): [("(ahead < 0 ? step : zero)", "(ahead <= 0 ? step : zero)")],
    ("csrc/core/rules/lion.h", f"{OPTIM}/test_optim_published.py"): [
        ("m[0] = m[0] * beta2 + g * rate2", "m[0] = m[0] * beta1 + g * rate1")
    ],
    ("csrc/core/rules/lamb.h", f"{OPTIM}/test_optim_published.py"): [
        ("(s.grad_averaging ? 1 - s.beta1 : 1)", "(1 - s.beta1)"),
        ("(s.bias_correction ? 1 / (1", "(true ? 1 / (1"),
    ],
    # --- Triton kernels ---
    ("triton_kernels/norm_rows.py", f"{TRITON} layer_norm'"): [
        ("x = tl.where(inside, x - mean[:, None], 0)", "x = x - mean[:, None]"),
        ("tl.store(rstd_ptr + row, rstd, mask=row < rows)", "tl.store(rstd_ptr + row, rstd)"),
    ],
    ("triton_kernels/chunks.py", f"{TRITON} norm'"): [
        ("tl.minimum(tiles % chunks, chunk)", "tl.minimum(tiles % chunks, 0)"),
        (
            "mask=(chunk < chunks) & (column < width)[None, :],",
            "mask=(column < width)[None, :] & (chunk >= 0),",
        ),
    ],
    ("triton_kernels/dropout.py", f"{RANDOM} {ORACLE} -k 'interpreter and dropout'"): [
        (
            "tl.join(even, tl.join(word1 >= limit, word3 >= limit))",
            "tl.join(even, tl.join(word3 >= limit, word1 >= limit))",
        ),
        ("high = (number >> 32)", "high = (number >> 31)"),
        ("word0 >= limit, word2 >= limit", "word0 > limit, word2 >= limit"),
    ],
    # --- Dispatch ---
    ("triton_kernels/attention/block_lists.py", "tests/ops/test_block_sparse_triton.py"): [
        (
            "partner = tl.load(walk[0] + 2 * at, mask=inside, other=0)\n    return partner",
            "partner = tl.load(walk[0] + 2 * tl.maximum(at - 1, 0), mask=inside, other=0)\n"
            "    return partner",
        )
    ],
    (
        "triton_kernels/attention/block_sparse_attention.py",
        "tests/ops/test_block_sparse_triton.py",
    ): [('"RAGGED": call.q.shape[2] % block != 0', '"RAGGED": False')],
    ("triton_kernels/symmetric.py", "tests/ops/test_symmetric_triton.py"): [
        ("value = tl.where(row[:, None] >= column[None, :], value, mirrored)", ""),
        ("tl.where(row * (row + 1) // 2 > number, row - 1, row)", "row"),
    ],
    ("triton_kernels/loss/rows.py", "tests/ops/test_losses_of_torch.py"): [
        ("targets, logits_stride, logits_stride)", "targets, width, logits_stride)")
    ],
    ("triton_kernels/loss/fused.py", "tests/ops/test_losses_fused.py"): [
        ("mask=known & counts, other=0", "mask=known, other=0")
    ],
    ("triton_kernels/experts/grouped.py", "tests/ops/test_experts_triton.py -k torchs_product"): [
        (
            "spans = itertools.pairwise(bounds.tolist())",
            "spans = [(0, 9), (0, 9), (9, 80), (80, 81)]",
        )
    ],
    # --- Repeated calls ---
    ("python/torchweld/dispatch/warm/plans.py", PLANS): [
        ("not self.fits or len(begins) < len(given) + len(self.made)", "not self.fits"),
        ("            self.fits = False\n", ""),
        ("_count_bytes(x) != _count_bytes(made[at])", "False"),
    ],
    ("python/torchweld/dispatch/warm/plans.py", "tests/tools/test_leaf.py"): [
        ("if at in described:", "if at not in described:"),
        ("find_stream({plan.device})", "{81}"),
    ],
    ("python/torchweld/dispatch/warm/leaf.py", "tests/tools/test_leaf.py"): [
        ("by_argument[at] for at in given_at", "by_argument[at] for at in reversed(given_at)"),
        ("if value.size != size:", "if False:"),
        ("size * stride for stride", "stride for stride"),
        ("-len(packed) % alignment", "0"),
    ],
    ("csrc/python/launch.cpp", "tests/tools/test_leaf.py"): [
        ("if (value >= leaf.near) return Found::yes;", "return Found::yes;"),
        ("if (failed) return call_twin(leaf.twin, given, count);", ""),
        ("driver.version <= 13010 && map.is_small", "false"),
        ("leaf.config.grid[0] *= clusters;", ""),
    ],
    ("csrc/python/guard.cpp", "tests/tools/test_direct.py"): [
        ("result = Py_False;", "result = Py_True;"),
    ],
    ("python/torchweld/dispatch/warm/guards.py", PLANS): [
        ('conditions.append(f"({addresses}) % ALIGNMENT == 0")', "pass")
    ],
    ("python/torchweld/dispatch/warm/cache.py", "tests/pytorch/test_cache.py -k decision"): [
        ("name in raw and given[raw[name]] is value", "name in raw"),
        ("{*raw.values()} - {*taken.values(), seed_at}", "False"),
    ],
    ("python/torchweld/ops/gemm/common.py", "tests/ops/test_seams.py -k plans_have"): [
        (
            "most, rest = _split(bias, dtype)\n    return act(",
            "most, rest = _split(bias, weight.dtype)\n    return act(",
        ),
    ],
    # --- Losses ---
    ("python/torchweld/ops/loss/chunks.py", "tests/ops/test_losses_of_torch.py -k padded"): [
        ("out.addmm_(grad[:, at], layer.weight[at])", "pass")
    ],
    ("python/torchweld/dispatch/call.py", "tests/contract/test_bad_input.py"): [
        ("        op.check(*inputs)\n", "        pass\n")
    ],
    (
        "python/torchweld/dispatch/kernels.py",
        "tests/pytorch/test_autocast.py tests/pytorch/test_torch.py -k autocast",
    ): [
        (
            "cast = [value.to(self.dtype) if self.changes(value) else value for value in inputs]",
            "cast = inputs",
        )
    ],
    ("python/torchweld/dispatch/autograd.py", f"{GRADIENTS} tests/contract/test_transforms.py"): [
        ('"if _is_eager and torch.is_grad_enabled():"', '"if False:"'),
        (
            "_ctx.save_for_backward({', '.join(to_save)})",
            "_ctx.save_for_backward(*[v if v is None else v.clone() "
            "for v in ({', '.join(to_save)},)])",
        ),
    ],
    ("python/torchweld/dispatch/autograd.py", f"{GRADIENTS} {ORACLE}"): [
        ('f"({same[name]} if _{name}_same else {own}) if', 'f"{own} if')
    ],
    ("python/torchweld/dispatch/dtensor.py", f"{SHARDS}/test_shards.py"): [
        ("grads.append(Partial())", "grads.append(Replicate())"),
        (
            'elif not torch.equal(here, torch.arange(len(here), device="cpu") + here[0]):',
            "elif False:",
        ),
    ],
    ("python/torchweld/dispatch/dtensor.py", f"{SHARDS}/test_shards.py {RANDOM}"): [
        ("offsets[dim] = int(here[0])", "offsets[dim] = 0")
    ],
    # --- fuse() ---
    ("python/torchweld/fusion/graph/prove.py", PROOFS): [
        ("return type(a) is type(b) and a == b", "return True"),
        ("and self._match(one.kwargs, two.kwargs)", "and True"),
        ("if one.is_random and not isinstance(one.func, str):", "if False:"),
        ("if not self._outside.isdisjoint(writes):", "if False:"),
        ("if one.outs.index(theirs) != two.outs.index(ours):", "if False:"),
        ("if self.same[theirs] == ours:", "if True:"),
        ("if one.func in COMMUTE and len(two.args) == 2:", "if len(two.args) == 2:"),
        ("with autocast_as(casts):", "if True:"),
    ],
    ("python/torchweld/fusion/graph/rewrite.py", PROOFS): [
        ("if len({step.epoch for step in steps}) > 1:", "if False:"),
        ("if any(map(self.leaves_out, nodes)):", "if False:"),
        ("if self._is_written(proposal, region, anchor):", "if False:"),
    ],
    ("python/torchweld/fusion/graph/rewrite.py", f"{SHARDS}/test_graph_distributed.py"): [
        ("if find_places(x) != find_places(y):", "if False:")
    ],
    ("python/torchweld/ops/loss/head.py", f"{SHARDS}/test_head.py"): [
        ("min(rank * ctx.head.most, ctx.head.classes)", "0"),
        ('reduce(part, "sum", ctx.head.group)', "part"),
        ("dtype = torch.get_autocast_dtype(kind)", "dtype = x.dtype"),
    ],
    ("python/torchweld/state.py", "tests/pytorch/test_call_forms.py"): [
        (
            "torch.compiler._is_compiling_flag and bool(count_dispatch_modes())",
            "torch.compiler._is_compiling_flag",
        )
    ],
    ("python/torchweld/fusion/graph/regions.py", PROOFS): [
        ("if not all(map(operator.is_, now, self._functions)):", "if False:"),
        ("if has_global_hooks() or capture.is_impossible():", "if False:"),
        ("            module.training,\n", "            True,\n"),
        ("            torch.is_grad_enabled(),\n", "            True,\n"),
    ],
    ("python/torchweld/fusion/graph/capture.py", PROOFS): [
        ("skip_nnmodule_hook_guards=False", "skip_nnmodule_hook_guards=True"),
        ("specialize_float=True", "specialize_float=False"),
    ],
    ("python/torchweld/fusion/graph/answers.py", PROOFS): [
        ('_OF_AUTOGRAD = ("grad_fn", "is_leaf", "retains_grad", "output_nr")', "_OF_AUTOGRAD = ()"),
        ("if any((each.f_code, each.lineno) in self.told_yes for each in frames):", "if True:"),
    ],
    # --- Optimizers ---
    ("python/torchweld/ops/optimizer/rule.py", f"{OPTIM}/test_optim_gradients.py"): [
        ("torch.autograd.graph.increment_version(batch.list_written())", "pass")
    ],
    ("python/torchweld/optim/_base.py", f"{OPTIM}/test_optim_gradients.py"): [
        ("factor = -one if factor is None else -factor", "factor = -one"),
        (
            "self._clip(norm) if factor is None else self._clip(norm * factor) * factor",
            "self._clip(norm)",
        ),
        ("factor = torch.where(found_inf.to(factor.device) == 0, factor, 1)", "pass"),
        ("(norm + 1e-6)", "(norm + 1e-2)"),
    ],
    ("python/torchweld/optim/_base.py", f"{OPTIM}/test_optim_rounding.py"): [
        ("number += len(params)", "pass")
    ],
    (
        "python/torchweld/optim/_shards.py",
        f"{SHARDS}/test_optim_distributed.py {SHARDS}/test_stack.py",
    ): [("if dim in dims and mesh.size(at) > 1", "if dim is not None and mesh.size(at) > 1")],
    ("python/torchweld/optim/_rounding_offsets.py", f"{SHARDS}/test_optim_distributed.py"): [
        ("first += int(here[0]) * strides[dim]", "first += int(here[0])")
    ],
    ("python/torchweld/optim/_sharded_blocks.py", f"{SHARDS}/test_optim_distributed.py"): [
        ("columns // BLOCK", "columns // (2 * BLOCK)"),
        ("exchange(Exchange.LARGEST, [across_rows(blocks, p)])", "pass"),
    ],
    ("python/torchweld/optim/_base.py", f"{OPTIM}/test_optim_checkpoints.py"): [
        ("states[key] = {name: _hide(name, value)", "states[key] = {name: value")
    ],
}
FAULTS = [Fault(file, *both, tests) for (file, tests), every in _FAULTS.items() for both in every]


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Plant the fault, and restore the file at the end."""
    path = ROOT / fault.file
    sound = path.read_text()
    if sound.count(fault.old) < 1:
        raise SystemExit(f"{fault.file} no longer has {fault.old!r}")
    path.write_text(sound.replace(fault.old, fault.new, 1))
    try:
        yield
    finally:
        path.write_text(sound)


def run(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def build() -> None:
    """Build the CPU library for the best instruction set, with the planted fault."""
    done = run(f"{sys.executable} csrc/build.py --no-cuda --out {MUTANTS} --isa here")
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def caught_by(fault: Fault) -> str:
    """The first test that fails, or an empty string. A fault may also kill the process."""
    if fault.native:
        build()
    library = {"TORCHWELD_LIB": str(MUTANTS)} if fault.native else {}
    done = run(f"{sys.executable} -m pytest -x -q -p no:xdist {fault.tests}", **library)
    if done.returncode > 128:  # as shells report signals
        return f"the end of the process, by signal {done.returncode - 128}"
    if done.returncode not in (0, 1):
        raise SystemExit(f"{fault}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--native", action="store_true", help="plant the faults in C++")
    parser.add_argument(
        "words", nargs="*", help="only faults whose file name contains one of these"
    )
    options = parser.parse_args()
    wanted = [
        fault
        for fault in FAULTS
        if fault.native == options.native
        and (not options.words or any(word in fault.file for word in options.words))
    ]
    missed = 0
    print("| fault | caught by | s |\n|---|---|--:|")
    for fault in wanted:
        start = time.monotonic()
        with planted(fault):
            by = caught_by(fault)
        missed += not by
        print(f"| {fault} | {by or '**nothing**'} | {time.monotonic() - start:.0f} |", flush=True)
    if options.native and wanted:
        build()  # leaves no mutant behind
    print(f"\n{len(wanted) - missed} of {len(wanted)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
